"""Nothing is left of what is made and freed, not quite made, or forgotten; what is, is known.

The cycles, and what they are made of, are in leaks/. They run in one process of their own, each a
thousand times and more where memory seems to have grown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _fake_backend import layout_is_known
from leaks import callbacks, costs, handles, objects
from leaks.__main__ import all_cycles

import ggml_cffi
from codegen import ROOT, pin
from codegen.annotations import load
from ggml_cffi import capi, diagnostics
from ggml_cffi._gen.build_info import GGML_VERSION
from ggml_cffi._handles import Closing

TESTS = Path(__file__).resolve().parent

#: Bytes of malloc's that a cycle may leave: a leak in one of four cycles would be more, for malloc
#: hands out no less than 24 at a time.
ALLOCATED = 6
#: Bytes of resident memory that a batch may leave: twelve pages. A thousand of the smallest things
#: that ggml makes, a result of training of 96 bytes, fill twice as many.
RESIDENT = 12 * 4096

#: Python objects that a cycle may leave, for some are the interpreter's own.
OBJECTS = 0.05

NAMES = [name for name, *_ in all_cycles()]
CLEAN = [n for n in NAMES if not n.startswith(("abort: ", "on purpose: ", "meta device"))]

Results = dict[str, dict[str, Any]]


def measured(*names: str) -> Results:
    """What each of these cycles, or of all, leaves in a process of their own.

    Python's memory has no checked bounds there: what they add is no cost of ours.
    """
    environ = dict(os.environ)
    if "debug" in environ.get("PYTHONMALLOC", ""):
        environ["PYTHONMALLOC"] = "pymalloc"
    done = subprocess.run(
        [sys.executable, "-m", "leaks", *names],
        cwd=TESTS,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "Sanitizer failed to allocate" not in line]
    assert (done.returncode, told) == (0, [])
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def results(need: Callable[[object, str], None]) -> Results:
    """What each cycle left."""
    need(layout_is_known(), "ggml whose private structs are as in _fake_backend.py")
    found = measured()
    assert list(found) == NAMES
    return found


def left_by(results: Results, name: str) -> dict[str, Any]:
    left = results[name]
    assert not left["error"], left["error"]
    if left["missing"]:
        assert capi.__coverage__.absent, left["missing"]
        pytest.skip(left["missing"])
    return left


def growth(left: dict[str, Any]) -> dict[str, object]:
    """What has grown by more than chance; the sizes of what has only shrunk are no matter."""
    n = left["n"]
    return {
        "handles": left["handles"],
        "lost": left["lost"],
        "tables": {table: size for table, size in left["tables"].items() if size > n / 100},
        "objects": left["objects"] > OBJECTS * max(n, 1000),
    }


NOTHING = {"handles": {}, "lost": {}, "tables": {}, "objects": False}


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_left(results: Results, name: str) -> None:
    left = left_by(results, name)
    assert growth(left) == NOTHING
    assert left["aborts"] == 0


@pytest.mark.own_memory
@pytest.mark.parametrize("name", CLEAN)
def test_memory_does_not_grow(results: Results, name: str) -> None:
    left = left_by(results, name)
    if left["resident"] > RESIDENT:  # what grows does so alone, too
        left = measured(name)[name]
    assert left["resident"] <= RESIDENT
    assert (left["allocated"] or 0) <= ALLOCATED * left["n"]


def test_every_kind_of_handle_is_tried() -> None:
    have, tried = set(diagnostics.live_handles()), set(handles.HANDLES)
    assert not have - tried
    assert have == tried or capi.__coverage__.absent
    assert all(handle.fails for handle in handles.HANDLES.values())


def test_every_kind_of_callback_is_tried() -> None:
    annotated = load(ROOT / "ggml" / "annotations").callbacks
    used = {name for name, (_, table) in annotated.items() if table.get("used", True)}
    assert set(callbacks.CALLBACKS) == used


def test_every_kind_of_object_is_tried() -> None:
    tried = {name.partition(":")[0] for name in objects.OBJECTS}
    tried |= {"MetaDevice"}  # which ggml never frees: see below
    public = {name: getattr(ggml_cffi, name) for name in ggml_cffi.__all__}
    public["Trainer"] = ggml_cffi.training.Trainer
    closing = {n for n, one in public.items() if isinstance(one, type) and issubclass(one, Closing)}
    assert closing <= tried
    for name in closing - {"MetaDevice"}:
        ways = {case.partition(": ")[2] for case in objects.OBJECTS if case.startswith(f"{name}:")}
        assert {"close", "forget", "fail"} <= ways, name


# ---- leaks on purpose


@pytest.mark.parametrize("kind", handles.HANDLES)
def test_a_handle_that_is_not_freed_is_seen(results: Results, kind: str) -> None:
    left = left_by(results, f"on purpose: {kind}")
    assert left["handles"] == {kind: left["n"]}
    assert growth(left) != NOTHING


@pytest.mark.own_memory
@pytest.mark.parametrize("kind", ["malloc", *handles.HANDLES])
def test_its_memory_is_seen(results: Results, kind: str) -> None:
    """What is small may find room in memory that is there already: malloc's own count is exact."""
    left = left_by(results, f"on purpose: {kind}")
    if kind == "malloc" or left["allocated"] is None:
        assert left["resident"] > RESIDENT
    if left["allocated"] is not None:
        assert left["allocated"] > ALLOCATED * left["n"]


def test_objects_of_python_are_seen(results: Results) -> None:
    left = left_by(results, "on purpose: objects")
    assert left["objects"] >= left["n"]
    assert growth(left) == {**NOTHING, "objects": True}


# ---- what is known to be left

of_the_pin = pytest.mark.skipif(
    pin()["ggml"] != GGML_VERSION, reason="the figures are those of the default release"
)
LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
#: By name of the cycle: the guard class and the bytes that docs/limits.md says.
STATED = {
    name: (guard, int(size.replace(",", "")))
    for name, guard, size in re.findall(r"^- (.+) \(`(\w+)`\): ([\d,]+) bytes", LIMITS, re.M)
}


@of_the_pin
@pytest.mark.parametrize("name", costs.ABORTS)
def test_each_caught_abort_is_counted(results: Results, name: str) -> None:
    left = left_by(results, f"abort: {name}")
    assert left["aborts"] == left["n"]
    cost = costs.ABORTS[name]
    assert left["handles"] == {}
    assert left["lost"] == ({"ggml_backend_buffer": left["n"]} if cost.guard == "nothrow" else {})
    assert {table: n for table, n in left["tables"].items() if n > 0} == dict.fromkeys(
        cost.entries, left["n"]
    )
    if not cost.entries:
        assert not growth(left)["objects"]


def test_each_cost_is_said_and_measured() -> None:
    assert set(STATED) == set(costs.ABORTS)


@of_the_pin
@pytest.mark.own_memory
@pytest.mark.parametrize("name", costs.ABORTS)
def test_what_a_caught_abort_costs(results: Results, name: str) -> None:
    left = left_by(results, f"abort: {name}")
    guard, stated = STATED[name]
    assert guard == costs.ABORTS[name].guard
    if left["allocated"] is not None:
        assert stated / 2 * left["n"] <= left["allocated"] <= (stated + ALLOCATED) * left["n"]
    assert left["resident"] <= stated * left["n"] + RESIDENT


def test_what_a_meta_device_leaves(results: Results) -> None:
    """ggml keeps it, and so do we what it asks."""
    left = left_by(results, "meta device")
    each = {"_callbacks._table": left["n"], "_callbacks._meta": left["n"]}
    assert left["tables"] == each
    assert (left["handles"], left["lost"]) == ({}, {})
    assert left["objects"] <= 12 * left["n"]


@of_the_pin
@pytest.mark.own_memory
def test_what_a_meta_device_costs(results: Results) -> None:
    left = left_by(results, "meta device")
    (stated,) = re.findall(r"Each meta device, closed or not, takes ([\d,]+) bytes", LIMITS)
    most = int(stated.replace(",", "")) * left["n"]
    assert left["resident"] <= most + RESIDENT
    assert (left["allocated"] or 0) <= most
