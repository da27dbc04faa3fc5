"""How far something has come: told to a function, or shown as a bar by tqdm if that is there."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Tell: TypeAlias = Callable[[int, int], object]
"""A function of how much is done and how much there is."""
Progress: TypeAlias = Tell | bool | None
"""A function to tell, or whether to show a bar; None: where there is a terminal for it."""

DELAY = 1.0
"""Seconds before a bar is shown: none for what is done by then."""


class Bar:
    """A bar on stderr.

    `wanted` None: if that is a terminal and tqdm is installed. True needs tqdm (ImportError).
    """

    def __init__(self, total: int, wanted: bool | None, unit: str) -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._text = ""
        self._bar: Any = None
        # made when it is shown: what is done in less need not wait for tqdm
        self._due = float("inf")
        if wanted or (wanted is None and _is_terminal()):
            self._due = time.monotonic() + DELAY
        if wanted:
            importlib.import_module("tqdm")

    def describe(self, text: str) -> None:
        """What stands before the bar."""
        self._text = text
        if self._bar is not None:
            self._bar.set_description(text, refresh=False)

    def update(self, n: int) -> bool:
        """So many more are done; whether that has been drawn."""
        self._done += n
        if self._bar is not None:
            return bool(self._bar.update(n))
        return time.monotonic() >= self._due and self._begin()

    def show(self, numbers: dict[str, float]) -> None:
        """What stands behind the bar when it is next drawn."""
        if self._bar is not None:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in numbers.items()}, refresh=False)

    def _begin(self) -> bool:
        self._due = float("inf")
        try:
            module: Any = importlib.import_module("tqdm")
        except ImportError:
            return False
        self._bar = module.tqdm(
            total=self._total,
            initial=self._done,
            desc=self._text or None,
            unit=self._unit,
            unit_scale=self._unit == "B",
            dynamic_ncols=True,
        )
        return True

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def telling(total: int, progress: Progress, unit: str = "B") -> Iterator[Tell]:
    """What is to be told how far something has come, in units of `unit` (bytes by default)."""
    if callable(progress):
        yield progress
        return
    if not (progress is None or isinstance(progress, bool)):
        raise TypeError(f"progress is {progress!r}, expected a function, True, False or None")
    with Bar(total, progress, unit) as bar:
        yield lambda done, _total: bar.update(done - bar._done)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
