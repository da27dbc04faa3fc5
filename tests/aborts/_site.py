"""What a site is, and how one is entered into the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from _compute import Arena

from ggml_cffi import capi, lib
from ggml_cffi._overrides._base import call

GRAPH = "graph building"
VIEW = "views"
ALLOC = "allocation"
ACCESS = "reads and writes"
QUANTS = "quantisation"
SCHEDULER = "scheduler"
EVENTS = "events"
TRAINING = "opt"
GGUF = "gguf"
META = "meta backend"
SPLIT = "split states"
AREAS = (
    GRAPH, VIEW, ALLOC, ACCESS, QUANTS, SCHEDULER, EVENTS, TRAINING, GGUF, META, SPLIT,
)  # fmt: skip

#: On which backend a site of an area is tried; the CPU else.
BACKENDS = {META: "meta", SPLIT: "unchecked"}


class Site(NamedTuple):
    """An assertion of ggml: who leads to it, and what its message says."""

    name: str
    area: str
    function: str
    fragment: str
    provoke: Callable[[Arena], object]
    row: str | None
    """Of the table of what a split state and a call on a meta device can trigger."""
    alone: bool
    """It changes the environment, which other threads must not see."""

    @property
    def backend(self) -> str:
        return BACKENDS.get(self.area, "cpu")


SITES: list[Site] = []


def site(
    area: str, function: str, fragment: str, row: str | None = None, *, alone: bool = False
) -> Callable[..., Any]:
    """The function below makes `function` abort; the message has `fragment` in it."""

    def add(provoke: Callable[[Arena], object]) -> Callable[[Arena], object]:
        name = provoke.__name__.strip("_").replace("_", " ")
        assert name not in {one.name for one in SITES}, name
        SITES.append(Site(name, area, function, fragment, provoke, row, alone))
        return provoke

    return add


def raw(function: str, *args: Any) -> Any:
    """Call the function of `lib`, which checks less than capi; raises as capi does."""
    return call(function, *args)


def guard_class(function: str) -> str:
    """How a function may be left, as its docstring says."""
    assert hasattr(lib, function)
    found = re.search(r"Guard: (\w+)\.", getattr(capi, function).__doc__)
    assert found, function
    return found[1]
