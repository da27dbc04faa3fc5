"""Loading GGUF files into contexts: by a map on the CPU, in slices elsewhere."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _gguf import make
from _gguf import tensor as info
from _release import needs_meta

from ggml_cffi import MetaDevice, SplitState, device, ffi, ops, quants
from ggml_cffi.context import Context
from ggml_cffi.errors import SplitError
from ggml_cffi.gguf import GGUFError, GGUFFile, GGUFWriter, _load
from ggml_cffi.graph import Graph

RNG = np.random.default_rng(11)
MATRIX = RNG.standard_normal((48, 64), dtype=np.float32)
CUBE = RNG.standard_normal((3, 8, 64), dtype=np.float32)
BLOCKS = RNG.standard_normal((40, 256), dtype=np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with GGUFWriter(tmp_path / "model.gguf") as writer:
        writer.add_tensor("matrix", MATRIX)
        writer.add_tensor("cube", CUBE)
        writer.add_tensor("q4", BLOCKS, "q4_0")
        writer.add_tensor("half", MATRIX, "f16")
        writer.add_tensor("ids", np.arange(6, dtype=np.int32))
        writer.add_tensor("none", np.empty((0, 4), np.float32))
        writer.add_tensor("one", np.float32(3.5))
    return tmp_path / "model.gguf"


def expected(file: GGUFFile) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(file.tensors[name].numpy()) for name in file.tensors}


def maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_the_cpu_maps_the_file(path: Path) -> None:
    before = path.read_bytes()
    with GGUFFile(path) as file:
        wanted, types = expected(file), {n: file.tensors[n].type for n in file.tensors}
        ctx = Context()
        mine = ctx.tensor((2, 2), name="mine")
        seen: list[tuple[int, int]] = []
        found = file.load_into(ctx, "CPU", progress=lambda *n: seen.append(n))
    assert maps(path) == 1  # the private one; the file is closed
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in found.values())
    assert [n for n, _ in seen] == sorted(n for n, _ in seen) and len(seen) == len(found)
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert (tensor.name, tensor.type, tensor.shape) == (name, types[name], wanted[name].shape)
        np.testing.assert_array_equal(tensor.numpy(), wanted[name])
    assert found["matrix"].shares_memory and not mine.has_memory
    # pages are copied once they are written: the file and other maps of it stay as they are
    found["matrix"].numpy()[...] = 7
    found["q4"].set(np.ones((40, 256), np.float32))
    assert (found["matrix"].numpy() == 7).all() and path.read_bytes() == before
    with GGUFFile(path) as file, Context() as other:
        again = file.load_into(other, device("CPU"), names=["matrix"])
        assert list(again) == ["matrix"] and (again["matrix"].numpy() == MATRIX).all()
    view = found["matrix"].numpy()
    with pytest.raises(BufferError):
        ctx.close()
    del view
    assert ctx.allocate("CPU") and mine.has_memory
    ctx.close()
    assert maps(path) == 0


def test_loaded_weights_are_computed_with(path: Path) -> None:
    with Context() as ctx:
        with GGUFFile(path) as file:
            w = file.load_into(ctx, "CPU", ["matrix"])["matrix"]
        compiled = Graph(ops.mul_mat(w, ctx.input((5, 64), name="x"))).compile(device("CPU"))
        x = RNG.standard_normal((5, 64), dtype=np.float32)
        np.testing.assert_allclose(compiled(x=x), x @ MATRIX.T, rtol=1e-4, atol=1e-4)


@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_a_tensor_under_other_names(path: Path, where: str) -> None:
    """An embedding that is the output as well, whole on each device and cut by rows."""

    def split(info: Any, n_devs: int) -> SplitState:
        whole = SplitState.mirrored()
        return SplitState.split(1, [30, 10]) if info.name == "output" else whole

    with MetaDevice(["CPU", "CPU"], split) as meta, Context() as ctx:
        with GGUFFile(path) as file:
            wanted = file.tensors["q4"].numpy()
            names = {"embedding": "q4", "output": "q4", "matrix": "matrix"}
            found = file.load_into(ctx, meta if where == "meta" else "CPU", names)
            with pytest.raises(GGUFError, match="there is no tensor 'other', which names has"):
                file.load_into(ctx, "CPU", {"matrix": "other"})
            with pytest.raises(TypeError, match=r"names has 3 \(int\), expected a str"):
                file.load_into(ctx, "CPU", {3: "matrix"})  # type: ignore[dict-item]
        assert list(found) == list(names)
        assert [tensor.name for tensor in found.values()] == list(names)
        for name in ("embedding", "output"):
            np.testing.assert_array_equal(found[name].numpy(), wanted)
        np.testing.assert_array_equal(found["matrix"].numpy(), MATRIX)
        if where == "meta":
            rows = ops.get_rows(found["embedding"], ctx.input(2, "i32", name="ids"))
            graph = Graph(rows @ found["output"].T)
            assert meta.plan(graph)["output"].shapes == ((30, 256), (10, 256))
            with graph.compile(meta) as compiled:
                logits = compiled(ids=[3, 39])
            np.testing.assert_allclose(logits, wanted[[3, 39]] @ wanted.T, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_data_that_is_not_aligned_for_the_cpu_is_copied(tmp_path: Path, alignment: int) -> None:
    with GGUFWriter(tmp_path / "f", alignment=alignment) as writer:
        writer.set("pad", "x" * 5)
        for n in (3, 5, 7):
            writer.add_tensor(f"t{n}", np.arange(n, dtype=np.int8))
            writer.add_tensor(f"f{n}", np.arange(n, dtype=np.float32))
    with Context() as ctx, GGUFFile(tmp_path / "f") as file:
        before = maps(tmp_path / "f")
        for name, tensor in file.load_into(ctx, "CPU").items():
            assert int(ffi.cast("uintptr_t", tensor.handle.data)) % 32 == 0
            assert tensor.numpy().tolist() == list(range(int(name[1:])))
            assert (file.tensors[name].numpy() == tensor.numpy()).all()
        assert maps(tmp_path / "f") == before


SPLITS: dict[str, Callable[[Any, int], SplitState]] = {
    "mirrored": lambda info, n: SplitState.mirrored(),
    "axis 0": lambda info, n: _cut(info, 0),
    "axis 1": lambda info, n: _cut(info, 1),
    "axis 2": lambda info, n: _cut(info, 2),
    "segments of axis 0": lambda info, n: _segments(info, 0),
    "segments of axis 1": lambda info, n: _segments(info, 1),
}


def _cut(info: Any, axis: int) -> SplitState:
    step = info.block_size if axis == 0 else 1
    if info.ne[axis] < 2 * step or 0 in info.ne:
        return SplitState.mirrored()
    return SplitState.by_ratio(info, axis=axis, ratios=[2, 1])


def _segments(info: Any, axis: int) -> SplitState:
    n = info.ne[axis]
    block = info.block_size if axis == 0 else 1
    if n % (4 * block) or info.ne[2] != 1 or 0 in info.ne:
        return SplitState.mirrored()
    return SplitState.segments(axis, [[n // 4, n // 4], [n // 4, n // 4]])


@needs_meta
@pytest.mark.parametrize("size", [100, 1 << 10, 1 << 24])
@pytest.mark.parametrize("split", SPLITS)
def test_slices_onto_a_meta_device(
    path: Path, monkeypatch: pytest.MonkeyPatch, split: str, size: int
) -> None:
    """However the tensors are cut, and whatever slices would be best, all numbers arrive."""
    monkeypatch.setattr(_load, "_SLICE", size)
    seen: list[tuple[int, int]] = []
    with MetaDevice(["CPU", "CPU"], SPLITS[split], on_error="raise") as meta, Context() as ctx:
        with GGUFFile(path) as file:
            wanted = expected(file)
            found = file.load_into(ctx, meta, progress=lambda *n: seen.append(n))
        assert maps(path) == 0
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), wanted[name])
        total = sum(t.nbytes for t in found.values())
        assert seen[-1] == (total, total) and all(a < b for a, b in itertools.pairwise(seen))
        if size == 100 and split == "mirrored":
            assert len(seen) >= total // 100
        if size == 100 and split == "axis 0":
            assert len(seen) > 100  # row by row


@needs_meta
def test_a_partial_weight_is_written_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_load, "_SLICE", 1 << 10)
    seen: list[tuple[int, int]] = []
    meta = MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.partial())
    with meta, Context() as ctx, GGUFFile(path) as file:
        file.load_into(ctx, meta, ["matrix"], lambda *n: seen.append(n))
    assert seen == [(MATRIX.nbytes, MATRIX.nbytes)] and meta.error is None


@needs_meta
def test_weights_of_a_meta_device_are_computed_with(path: Path) -> None:
    meta = MetaDevice(["CPU"] * 3, lambda info, n: SplitState.by_ratio(info, 1, [1, 2, 1]))
    with meta, Context() as ctx:
        with GGUFFile(path) as file:
            w = file.load_into(ctx, meta, ["q4"])["q4"]
        compiled = Graph(ops.mul_mat(w, ctx.input((5, 256), name="x"))).compile(meta)
        x = RNG.standard_normal((5, 256), dtype=np.float32)
        weights = quants.dequantize(quants.quantize(BLOCKS, "q4_0"), "q4_0")
        found = compiled(x=x)
        np.testing.assert_allclose(found, x @ weights.T, atol=0.01 * np.abs(found).max())


@needs_meta
def test_an_error_of_the_device_is_what_comes_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever arrays its traceback keeps; and the file can be closed once that is gone."""
    monkeypatch.setattr(_load, "_unit", lambda *arguments: 4)  # no cut can take that
    monkeypatch.setattr(_load, "_SLICE", 100)
    meta = MetaDevice(["CPU", "CPU"], SPLITS["axis 1"], on_error="raise")
    with meta, Context() as ctx:
        file = GGUFFile(path)
        with pytest.raises(ValueError, match=r"'matrix', .*multiples of 12288 only"):
            file.load_into(ctx, meta, ["matrix"])
        gc.collect()
        file.close()
        refused = pytest.raises(ValueError, match=r"'matrix', .*multiples of 12288 only")
        with refused, GGUFFile(path) as file:
            file.load_into(ctx, meta, ["matrix"])


@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_closing_on_another_thread_waits_for_the_loading(path: Path, where: str) -> None:
    file = GGUFFile(path)
    thread = threading.Thread(target=file.close)

    def close(done: int, total: int) -> None:
        if not thread.ident:
            thread.start()
            thread.join(0.05)
        assert not file.closed

    with MetaDevice(["CPU", "CPU"], SPLITS["mirrored"]) as meta, Context() as ctx:
        found = file.load_into(ctx, meta if where == "meta" else "CPU", progress=close)
        thread.join()
        assert file.closed
        np.testing.assert_array_equal(found["cube"].numpy(), CUBE)


class Stop(Exception):
    pass


@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_an_exception_leaves_the_context_as_it_was(path: Path, where: str) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    def split(info: Any, n_devs: int) -> SplitState:
        raise ValueError("no split")

    with MetaDevice(["CPU", "CPU"], SPLITS["mirrored"]) as meta, Context() as ctx:
        target = device("CPU") if where == "CPU" else meta
        with GGUFFile(path) as file:
            before = maps(path)
            with pytest.raises(Stop):
                file.load_into(ctx, target, progress=stop)
            gc.collect()
            assert maps(path) == before
            with pytest.raises(GGUFError, match="there is no tensor 'x', which names has"):
                file.load_into(ctx, target, ["matrix", "x"])
            with pytest.raises(TypeError, match="names is 'matrix', expected several"):
                file.load_into(ctx, target, "matrix")
            with pytest.raises(TypeError, match="expected a Context"):
                file.load_into(object(), target)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="expected a Device"):
                file.load_into(ctx, 3)  # type: ignore[arg-type]
            with MetaDevice(["CPU"] * 2, split, on_error="raise") as bad, pytest.raises(SplitError):
                file.load_into(ctx, bad)
            assert file.load_into(ctx, target, []) == {}
            assert list(file.load_into(ctx, target, ["none"])) == ["none"]
            found = file.load_into(ctx, target)  # as if nothing had been
            np.testing.assert_array_equal(found["cube"].numpy(), CUBE)
    with pytest.raises(ValueError, match="the Context is closed"), GGUFFile(path) as file:
        file.load_into(ctx, "CPU")


def test_many_loads_leave_nothing(path: Path) -> None:
    for i in range(100):
        ctx = Context()
        with GGUFFile(path) as file:
            found = file.load_into(ctx, "CPU")
        if i % 2:
            ctx.close()
        del ctx, found
    gc.collect()
    assert maps(path) == 0


@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_nothing_but_empty_tensors(path: Path, tmp_path: Path, where: str) -> None:
    """ggml has no memory for those; they can be read and written all the same."""
    with MetaDevice(["CPU", "CPU"], SPLITS["mirrored"]) as meta, Context() as ctx:
        target = device("CPU") if where == "CPU" else meta
        with GGUFFile(path) as file:
            found = file.load_into(ctx, target, ["none"])["none"]
        other = ctx.from_numpy(np.empty((3, 0), np.float32))
        assert ctx.allocate("CPU") == 0
        for tensor in (found, other):
            assert tensor.numpy().shape == tensor.shape and tensor.numpy().size == 0
            tensor.set(np.empty(tensor.shape, np.float32))
        with GGUFWriter(tmp_path / "again") as writer:
            writer.add_tensor("none", found)
        more = ctx.from_numpy(np.ones(3, np.float32))
        assert ctx.allocate("CPU") and more.numpy().sum() == 3


NO_ROOM = """
import re, resource, sys
from pathlib import Path
from ggml_cffi import AbortError, MetaDevice, SplitState
from ggml_cffi.context import Context
from ggml_cffi.gguf import GGUFFile
path, where = sys.argv[1:]
meta = MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.mirrored())
with GGUFFile(path) as file, Context() as ctx:
    size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            file.load_into(ctx, meta if where == "meta" else "CPU")
        except (MemoryError, AbortError) as error:
            print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(file.load_into(ctx, "CPU")["t"].shape, ctx.allocate("CPU"))
"""


@pytest.mark.own_memory
@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_no_room(tmp_path: Path, where: str) -> None:
    data = make([], [info("t", [1 << 26], 0, 0)])
    (tmp_path / "f").write_bytes(data)
    os.truncate(tmp_path / "f", len(data) + (1 << 28))
    child = subprocess.run([sys.executable, "-c", NO_ROOM, tmp_path / "f", where],
                           capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert child.returncode == 0, child.stderr
    *told, end = child.stdout.splitlines()
    # within a meta device ggml aborts over it
    assert told == [{"CPU": "MemoryError", "meta": "AbortMemoryError"}[where]] * 2
    assert end == f"({1 << 26},) 0"


MEMORY = """
import sys, numpy as np
from pathlib import Path
from ggml_cffi import MetaDevice, SplitState, device
from ggml_cffi.context import Context
from ggml_cffi.gguf import GGUFFile

def memory(kind):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024

path, where = sys.argv[1:]
halves = lambda info, n: SplitState.by_ratio(info, 0, [1, 1])
meta = where == "meta" and MetaDevice(["CPU", "CPU"], halves)
most = [0, 0]
def progress(done, total):
    most[0] = max(most[0], memory("RssFile"))
with Context() as ctx, GGUFFile(path) as file:
    before = memory("RssAnon"), memory("RssFile")
    found = file.load_into(ctx, meta or "CPU", progress=progress)
    print(memory("RssAnon") - before[0], most[0] - before[1], sum(t.nbytes for t in found.values()))
"""


@pytest.mark.own_memory
@needs_meta
@pytest.mark.parametrize("where", ["CPU", "meta"])
def test_there_is_never_a_second_copy(tmp_path: Path, where: str) -> None:
    with GGUFWriter(tmp_path / "f") as writer:
        for i in range(3):
            writer.add_tensor(f"t{i}", np.full((4096, 4096), i, np.float16))
    child = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "f", where],
                           capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    own, of_the_file, total = map(int, child.stdout.split())
    os.unlink(tmp_path / "f")
    assert total == 3 << 25
    if where == "CPU":
        assert own < 4 << 20 and of_the_file < 4 << 20  # nothing has been read
    else:
        assert own < total + (8 << 20) and of_the_file < 40 << 20  # a few slices of 16 MiB


@pytest.mark.slow
def test_time_to_load_gemma(gemma: Path) -> None:
    with GGUFFile(gemma) as file, Context() as ctx:
        begin = time.process_time()
        found = file.load_into(ctx, "CPU")
        took = time.process_time() - begin
        print(f"{len(found)} tensors mapped in {took * 1000:.1f} ms of a processor")
        assert took < 0.5 and len(found) == len(file.tensors)
        name = "blk.3.ffn_up.weight"
        np.testing.assert_array_equal(found[name].numpy(), file.tensors[name].numpy())
