"""Bars of what takes long: where there is a terminal for them, or where they are asked for."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import needs

from ggml_cffi import Context, Graph, MetaDevice, _progress, meta, quants
from ggml_cffi.gguf import GGUFFile, GGUFWriter
from ggml_cffi.meta import policies

X = np.ones((64, 32), np.float32)
Task = Callable[[Any], object]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write(path: Path, progress: Any) -> None:
    writer = GGUFWriter(path)
    for name in "ab":
        writer.add_tensor(name, X)
    writer.close(progress)


def load(path: Path, target: Any, progress: Any) -> None:
    write(path, False)
    with GGUFFile(path) as file, Context() as ctx:
        file.load_into(ctx, target, progress=progress)


def compare(progress: Any) -> None:
    with MetaDevice(["CPU"] * 2, policies.mirror()) as device, Context() as ctx:
        w = ctx.from_numpy(X, name="w")
        ctx.allocate(device)
        x = ctx.input((3, 32), name="x")
        assert meta.compare(Graph(x @ w.T), device, progress=progress).agrees


TASKS = ["load_into", "close", "quantize", "dequantize"]


@pytest.fixture(
    params=[*TASKS, *(pytest.param(one, marks=needs("ggml_backend_meta_device")) for one in
            ("load_into a meta device", "compare"))]
)  # fmt: skip
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Task]:
    path = tmp_path / "a.gguf"
    blocks = quants.quantize(X, "q8_0", progress=False)
    if request.param == "load_into a meta device":
        with MetaDevice(["CPU"] * 2, policies.mirror()) as device:
            yield lambda progress: load(path, device, progress)
        return
    yield {
        "load_into": lambda progress: load(path, "CPU", progress),
        "close": lambda progress: write(path, progress),
        "quantize": lambda progress: quants.quantize(X, "q8_0", progress=progress),
        "dequantize": lambda progress: quants.dequantize(blocks, "q8_0", progress=progress),
        "compare": compare,
    }[request.param]


@pytest.mark.parametrize(
    ("where", "progress", "delay", "is_shown"),
    [
        (Terminal, None, 0, True),
        (Terminal, None, 60, False),
        (Terminal, False, 0, False),
        (io.StringIO, None, 0, False),
        (io.StringIO, True, 0, True),
        (io.StringIO, True, 60, False),
    ],
)
def test_where_a_bar_is_shown(
    task: Task, monkeypatch: Any, need: Any, where: Any, progress: Any, delay: int, is_shown: bool
) -> None:
    need(importlib.util.find_spec("tqdm"), "tqdm")
    import tqdm

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread of its own
    monkeypatch.setattr(_progress, "DELAY", delay)
    monkeypatch.setattr(sys, "stderr", where())
    task(progress)
    text = sys.stderr.getvalue()
    monkeypatch.undo()
    assert bool(text) is is_shown
    assert ("100%" in text) is is_shown


def test_without_tqdm(task: Task, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(_progress, "DELAY", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    task(None)
    text = sys.stderr.getvalue()
    with pytest.raises(ImportError, match="tqdm"):
        task(True)
    assert text == ""


def test_a_function_is_told_all(task: Task) -> None:
    told: list[tuple[int, int]] = []
    task(lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0
    assert len({total for _, total in told}) == 1


def test_what_progress_may_not_be(task: Task) -> None:
    with pytest.raises(TypeError, match=r"progress is 'yes', expected a function, True, False or"):
        task("yes")
