"""Parts of a meta device's tensors: read and written rightly, or refused before ggml would abort.

ggml reads and writes whole slices across the cut of a tensor, and no part of some. Objects do the
rest another way; capi refuses it. What is right is a NumPy array of the same numbers.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _backends
import ml_dtypes
import numpy as np
import pytest
from _compute import Arena
from _release import has, needs, needs_meta, require

from ggml_cffi import (
    Context,
    Device,
    GGUFFile,
    GGUFWriter,
    Graph,
    Tensor,
    capi,
    diagnostics,
    lib,
    ops,
)
from ggml_cffi.meta import MetaDevice, SplitState
from ggml_cffi.quants import dequantize, quantize

pytestmark = needs_meta

MIRRORED, PARTIAL = SplitState.mirrored(), SplitState.partial()


class Case(NamedTuple):
    """A tensor: NumPy's shape, type, and the split of it."""

    shape: tuple[int, ...]
    kind: str
    state: SplitState

    @property
    def n_devs(self) -> int:
        return max(2, len(self.state.ne) // self.state.n_segments)

    @property
    def row(self) -> int:
        """Bytes of a row."""
        kind = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}.get(self.kind)
        return self.shape[-1] * kind if kind else self.shape[-1] // 32 * 18

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row

    @property
    def unit(self) -> int:
        """What ggml can read and write multiples of, in bytes."""
        if not self.state.is_split:
            return 1
        axis = len(self.shape) - 1 - self.state.axis
        return self.nbytes // math.prod(self.shape[:axis])


CASES = {
    "mirrored": Case((3, 4, 6), "f32", MIRRORED),
    "mirrored blocks": Case((4, 64), "q4_0", MIRRORED),
    "rows": Case((5, 12), "f32", SplitState.split(0, [8, 4])),
    "rows over three": Case((5, 12), "f16", SplitState.split(0, [5, 0, 7])),
    "rows of four axes": Case((2, 3, 2, 8), "bf16", SplitState.split(0, [1, 7])),
    "rows of blocks": Case((4, 96), "q4_0", SplitState.split(0, [64, 0, 32])),
    "columns": Case((6, 4), "f32", SplitState.split(1, [1, 5])),
    "columns over three": Case((6, 4), "i8", SplitState.split(1, [2, 3, 1])),
    "columns of matrices": Case((3, 5, 4), "f16", SplitState.split(1, [0, 5, 0])),
    "columns of blocks": Case((2, 4, 32), "q4_0", SplitState.split(1, [3, 1])),
    "heads": Case((3, 4, 5), "f32", SplitState.split(2, [1, 2])),
    "heads of batches": Case((2, 4, 3, 5), "f32", SplitState.split(2, [2, 1, 1])),
    "a vector": Case((12,), "f32", SplitState.split(0, [7, 5])),
    "fused rows": Case((3, 12), "f32", SplitState.segments(0, [[4, 2], [1, 5]])),
    "fused rows of blocks": Case((3, 128), "q4_0", SplitState.segments(0, [[32, 32], [0, 64]])),
    "fused columns": Case((8, 4), "f16", SplitState.segments(1, [[2, 1, 1], [1, 0, 3]])),
    "fused columns of matrices": Case((2, 6, 4), "f32", SplitState.segments(1, [[1, 2], [3, 0]])),
    "gate and up": Case((12, 4), "f32", SplitState.segments(1, [[4, 2]], [2])),
    "grouped": Case((12, 4), "f32", SplitState.segments(1, [[1, 3], [2, 2]], [2, 1])),
}


class Made(NamedTuple):
    case: Case
    device: MetaDevice
    ctx: Context
    tensor: Tensor
    numbers: np.ndarray[Any, Any]

    @property
    def handle(self) -> Any:
        return self.tensor.handle

    def data(self) -> bytes:
        """All that the devices hold."""
        data = bytearray(self.case.nbytes)
        capi.ggml_backend_tensor_get(self.handle, data, 0)
        return bytes(data)


def numbers_of(case: Case, seed: int = 0) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(seed).integers(-99, 99, case.shape)
    if case.kind == "q4_0":  # as they come back
        return dequantize(quantize(numbers, "q4_0"), "q4_0")
    kind = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "bf16": ml_dtypes.bfloat16}
    return numbers.astype(kind[case.kind])


@pytest.fixture
def make() -> Iterator[Callable[[Case], Made]]:
    opened: list[Any] = []

    def make(case: Case) -> Made:
        def split(info: Any, n_devs: int) -> SplitState:
            return case.state if info.name == "w" else MIRRORED

        device = MetaDevice(["CPU"] * case.n_devs, split, on_error="raise")
        ctx = Context()
        opened.extend((ctx, device))
        tensor = ctx.tensor(case.shape, case.kind, name="w")
        ctx.allocate(device)
        numbers = numbers_of(case)
        tensor.set(numbers)
        return Made(case, device, ctx, tensor, numbers)

    before = diagnostics.caught_aborts()
    yield make
    for one in opened:
        one.close()
    assert diagnostics.caught_aborts() == before, "something was forwarded to an abort"


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest, make: Callable[[Case], Made]) -> Made:
    case = CASES[request.param]
    if max(case.state.nr) > 1:
        require("struct ggml_backend_meta_split_state.nr")
    return make(case)


# ---- capi: whole slices are moved, all else is refused with nothing changed


def test_any_part_is_read_and_written_as_bytes_or_refused(made: Made) -> None:
    case, rng = made.case, np.random.default_rng(1)
    model = bytearray(made.data())
    done = refused = 0
    for _ in range(60):
        step = int(rng.choice([1, case.row, case.unit]))
        offset = int(rng.integers(0, case.nbytes // step)) * step
        size = int(rng.integers(0, (case.nbytes - offset) // step + 1)) * step
        fits = not size or (offset % case.unit == 0 and size % case.unit == 0)
        data = rng.integers(0, 99, size, np.uint8)
        into = bytearray(size)
        if fits:
            capi.ggml_backend_tensor_get(made.handle, into, offset)
            assert into == model[offset : offset + size]
            capi.ggml_backend_tensor_set(made.handle, data, offset)
            model[offset : offset + size] = data.tobytes()
            done += size > 0
        else:
            refused += 1
            said = rf"'w', .*split along axis {int(case.state.axis)}.*: {size} bytes from byte "
            said += rf"{offset} on, where ggml can do multiples of {case.unit} only"
            with pytest.raises(ValueError, match=said):
                capi.ggml_backend_tensor_get(made.handle, into, offset)
            with pytest.raises(ValueError, match=said):
                capi.ggml_backend_tensor_set(made.handle, data, offset)
        assert made.data() == model
    assert done
    assert refused or case.unit == 1


@needs("ggml_backend_tensor_set_2d")
def test_any_pieces_are_read_and_written_or_refused(made: Made) -> None:
    case, rng = made.case, np.random.default_rng(2)
    model = np.frombuffer(made.data(), np.uint8).copy()
    done = refused = 0
    for _ in range(150):
        unit = int(rng.choice([1, case.unit]))
        most = case.nbytes // unit
        n, size, stride = int(rng.integers(0, 4)), int(rng.integers(0, most + 1)), 0
        if n > 1:
            size = int(rng.integers(0, most // n + 1))
            stride = int(rng.integers(size, (most - size) // (n - 1) + 1))
        offset = int(rng.integers(0, most - size - stride * max(0, n - 1) + 1))
        size, stride, offset = size * unit, stride * unit, offset * unit
        data = rng.integers(0, 99, size * n, np.uint8)
        into = np.zeros(size * n, np.uint8)
        args = (offset, size, n, stride, size)
        places = [slice(offset + i * stride, offset + i * stride + size) for i in range(n)]
        if all(number % case.unit == 0 for number in (offset, size, stride)) or not size or not n:
            capi.ggml_backend_tensor_get_2d(made.handle, into, *args)
            for i, place in enumerate(places):
                assert (into[i * size : (i + 1) * size] == model[place]).all()
                model[place] = data[i * size : (i + 1) * size]
            capi.ggml_backend_tensor_set_2d(made.handle, data, *args)
            done += n > 1 and size > 0
        elif n == 1 and not offset % case.unit and not size % case.unit:
            continue
        else:
            refused += 1
            for function, buffer in (
                (capi.ggml_backend_tensor_get_2d, into),
                (capi.ggml_backend_tensor_set_2d, data),
            ):
                with pytest.raises(ValueError, match=r"'w', .*where ggml can do multiples of"):
                    function(made.handle, buffer, *args)
        assert made.data() == model.tobytes()
    assert done or case.nbytes == case.unit
    assert refused or case.unit == 1


def test_asynchronous_moves_are_of_the_whole_or_refused(made: Made) -> None:
    case = made.case
    whole = np.random.default_rng(4).integers(0, 256, case.nbytes, np.uint8).tobytes()
    in_segments = case.state.n_segments > 1 or case.state.nr != (1,)
    with made.device.init_backend(1) as backend:
        before = made.data()

        def refuse(text: str, offset: int, size: int) -> None:
            of, data, into = (backend.handle, made.handle), bytes(size), bytearray(size)
            with pytest.raises(ValueError, match=f"'w', .*{text}"):
                capi.ggml_backend_tensor_set_async(*of, data, offset)
            with pytest.raises(ValueError, match=f"'w', .*{text}"):
                capi.ggml_backend_tensor_get_async(*of, into, offset)
            if has("ggml_backend_tensor_set_2d"):
                with pytest.raises(ValueError, match=f"'w', .*{text}"):
                    capi.ggml_backend_tensor_set_2d_async(*of, data, offset, size, 1, 0, 0)
                with pytest.raises(ValueError, match=f"'w', .*{text}"):
                    capi.ggml_backend_tensor_get_2d_async(*of, into, offset, size, 1, 0, 0)
            assert made.data() == before

        refuse("begins at its first byte only", case.row // 2, case.row // 2)
        if in_segments:
            refuse("ggml does not move it asynchronously", 0, case.nbytes)
            return
        if case.unit > 1:
            refuse("multiples of", 0, case.unit - 1)
        if has("ggml_backend_tensor_set_2d"):
            with pytest.raises(ValueError, match="begins at its first byte only"):
                capi.ggml_backend_tensor_get_2d_async(
                    backend.handle, made.handle, bytearray(2), 0, 1, 2, 1, 1
                )
        capi.ggml_backend_tensor_set_async(backend.handle, made.handle, whole, 0)
        into = bytearray(case.nbytes)
        capi.ggml_backend_tensor_get_async(backend.handle, made.handle, into, 0)
        capi.ggml_backend_synchronize(backend.handle)
        assert into == whole


def test_a_backend_of_another_device_moves_nothing(make: Callable[[Case], Made], cpu: Any) -> None:
    made = make(CASES["rows"])
    with pytest.raises(ValueError, match=r"'w', .*it is not on the backend's device"):
        capi.ggml_backend_tensor_set_async(cpu, made.handle, bytes(made.case.nbytes), 0)
    with Context() as ctx, made.device.init_backend(1) as backend:
        plain = ctx.tensor(4, name="plain")
        ctx.allocate("CPU")
        with pytest.raises(ValueError, match=r"'plain', .*it is not on the backend's device"):
            capi.ggml_backend_tensor_get_async(backend.handle, plain.handle, bytearray(16), 0)


def test_filling_is_refused(made: Made) -> None:
    before = made.data()
    with pytest.raises(ValueError, match=r"'w', .*ggml cannot fill it: write the bytes"):
        capi.ggml_backend_tensor_memset(made.handle, 0, 0, made.case.row)
    capi.ggml_backend_tensor_memset(made.handle, 0, 0, 0)
    assert made.data() == before


def test_what_is_cut_is_copied_into_as_a_whole(made: Made) -> None:
    case = made.case
    with Context() as ctx:
        source = ctx.tensor(case.shape, case.kind)
        ctx.allocate("CPU")
        other = numbers_of(case, seed=1)
        source.set(other)
        capi.ggml_backend_tensor_copy(source.handle, made.handle)
        np.testing.assert_array_equal(made.tensor.numpy(), other)
        if case.unit > 1 and len(case.shape) > 1 and case.kind != "q4_0":
            turned, source = ops.transpose(made.tensor), ops.transpose(source)
            with pytest.raises(ValueError, match="ggml forgets its views"):
                capi.ggml_backend_tensor_copy(source.handle, turned.handle)


def test_a_view_of_what_is_cut_is_refused(make: Callable[[Case], Made]) -> None:
    """It may narrow each device's own share, and is known until other graphs are computed only."""
    made = make(Case((2, 6, 4), "f16", SplitState.split(1, [4, 2])))
    views = [made.tensor[1:], ops.reshape_1d(made.tensor, 48), ops.transpose(made.tensor)]
    capi.ggml_backend_view_init(views[0].handle)
    with made.device.init_backend(1) as backend:
        for one in views:
            said = "a view of 'w', split along axis 1: ggml "
            with pytest.raises(ValueError, match=said):
                capi.ggml_backend_tensor_get(one.handle, bytearray(8), 0)
            with pytest.raises(ValueError, match=said):
                capi.ggml_backend_tensor_set(one.handle, bytes(one.nbytes), 0)
            with pytest.raises(ValueError, match=said):
                capi.ggml_backend_tensor_memset(one.handle, 0, 0, 8)
            if has("ggml_backend_tensor_set_2d"):
                with pytest.raises(ValueError, match=said):
                    capi.ggml_backend_tensor_set_2d(one.handle, bytes(32), 0, 16, 2, 16, 16)
        with pytest.raises(ValueError, match=r"a view of 'w', split along axis 1: ggml forgets"):
            capi.ggml_backend_tensor_get_async(
                backend.handle, views[0].handle, bytearray(views[0].nbytes), 0
            )
        with pytest.raises(ValueError, match="asynchronously ggml moves nothing else"):
            capi.ggml_backend_tensor_set_async(backend.handle, views[2].handle, bytes(96), 0)
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers)
    for one, same in zip(views, (made.numbers[1:], made.numbers.reshape(-1)), strict=False):
        np.testing.assert_array_equal(one.numpy(), same)


def test_a_view_that_ggml_has_forgotten(make: Callable[[Case], Made]) -> None:
    """Graphs that are computed clear what it knows; it would dereference NULL."""
    made = make(Case((2, 6, 4), "f16", SplitState.split(1, [4, 2])))
    view = made.tensor[1:]
    capi.ggml_backend_view_init(view.handle)
    for _ in range(3):
        Graph(ops.cont(made.tensor[1:])).compile(made.device, 1)()
    with pytest.raises(ValueError, match="ggml forgets its views"):
        capi.ggml_backend_tensor_get(view.handle, bytearray(view.nbytes), 0)
    np.testing.assert_array_equal(view.numpy(), made.numbers[1:])


def test_a_result_that_ggml_has_forgotten(make: Callable[[Case], Made]) -> None:
    """Where another graph is given its memory: it stands unallocated, and may be computed anew."""
    made = make(CASES["columns"])
    with made.device.init_backend(1) as backend, Arena(backend.handle) as arena:
        allocator = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
        arena.callback(capi.ggml_gallocr_free, allocator)
        graphs = []
        for _ in range(3):
            ctx = arena.context()
            x = arena.tensor(4, 2, ctx=ctx)
            capi.ggml_set_input(x)
            result = capi.ggml_mul_mat(ctx, made.handle, x)
            capi.ggml_set_output(result)
            graphs.append((arena.graph(ctx, result, allocate=False), x, result))
        for i in (0, 1, 2, 0, 0, 2):
            graph, x, result = graphs[i]
            capi.ggml_gallocr_alloc_graph(allocator, graph)
            numbers = np.full((2, 4), i, np.float32)
            capi.ggml_backend_tensor_set(x, numbers, 0)
            capi.ggml_backend_graph_compute(backend.handle, graph)
            found = np.zeros((2, 6), np.float32)
            capi.ggml_backend_tensor_get(result, found, 0)
            np.testing.assert_array_equal(found, numbers @ made.numbers.T)
            for k in {0, 1, 2} - {i}:
                assert not graphs[k][2].data and not graphs[k][2].buffer


def test_an_answer_holds_for_the_tensor_that_it_was_about(make: Callable[[Case], Made]) -> None:
    """Another tensor at the address may be written in parts; so may one in a graph's memory."""
    before = lib.ggml_cffi_remembered()
    made = make(CASES["columns"])
    assert lib.ggml_cffi_remembered() == before + 2  # the context's version, and the cut
    capi.ggml_set_name(made.handle, "renamed")
    with pytest.raises(ValueError, match="'renamed'"):
        capi.ggml_backend_tensor_get(made.handle, bytearray(4), 0)
    made.ctx.close()
    assert lib.ggml_cffi_remembered() == before


# ---- objects: any view


def views(tensor: Tensor, rng: np.random.Generator) -> Iterator[tuple[Tensor, Any]]:
    """Views of views at random, and the same of a NumPy array."""
    for _ in range(25):
        view, same = tensor, [lambda a: a]
        blocks = view.type == capi.GGML_TYPE_Q4_0
        for _ in range(int(rng.integers(1, 4))):
            if rng.random() < 0.3 and view.ndim > 1 and not blocks:
                view, change = ops.transpose(view), lambda a: np.swapaxes(a, -1, -2)
            else:
                key = []
                for axis, n in enumerate(view.shape):
                    if blocks and axis == view.ndim - 1:
                        n //= 32
                    start = int(rng.integers(0, n + 1))
                    stop = int(rng.integers(start, n + 1))
                    if rng.random() < 0.7:  # not too many without elements
                        start, stop = (start, max(stop, start + 1)) if start < n else (0, n)
                    unit = 32 if blocks and axis == view.ndim - 1 else 1
                    whole = rng.random() < 0.3
                    key.append(slice(None) if whole else slice(start * unit, stop * unit))
                view = view[tuple(key)]
                change = lambda a, key=tuple(key): a[key]  # noqa: E731
            same = [*same, change]
        yield view, same


def test_any_view_is_read_and_written(made: Made) -> None:
    """In place of a part that ggml cannot do, all around it is read and written back."""
    rng, model = np.random.default_rng(3), made.numbers.copy()
    filled = 0
    for view, steps in views(made.tensor, rng):
        part = model
        for step in steps:
            part = step(part)
        assert view.shape == part.shape
        np.testing.assert_array_equal(view.numpy(), part)
        filled += part.size > 0
        new = rng.integers(-9, 9, part.shape)
        if made.case.kind == "q4_0":
            new = dequantize(quantize(new, "q4_0"), "q4_0") if new.size else new
        view.set(new, casting="unsafe")
        part[...] = new  # of the model
        np.testing.assert_array_equal(made.tensor.numpy(), model)
        assert not view.shares_memory
    assert filled > 5


def test_a_view_of_another_shape_is_read_and_written(made: Made) -> None:
    case = made.case
    flat = ops.reshape_1d(made.tensor, math.prod(case.shape))
    np.testing.assert_array_equal(flat.numpy(), made.numbers.reshape(-1))
    new = numbers_of(case, seed=5)
    flat.set(new.reshape(-1))
    np.testing.assert_array_equal(made.tensor.numpy(), new)


def test_a_permuted_view(make: Callable[[Case], Made]) -> None:
    made = make(CASES["heads of batches"])
    turned = ops.permute(made.tensor, 2, 0, 3, 1)
    as_numpy = made.numbers.transpose(1, 3, 0, 2)
    np.testing.assert_array_equal(turned.numpy(), as_numpy)
    turned.set(as_numpy + 1)
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers + 1)


def test_a_cache_is_written_row_by_row(make: Callable[[Case], Made]) -> None:
    """Heads of 4 numbers over two devices, positions one by one."""
    made = make(Case((10, 16), "f16", SplitState.split(0, [12, 4])))
    for i in range(10):
        made.tensor[i].set(np.full(16, i))
        np.testing.assert_array_equal(made.tensor[i, 4:8].numpy(), np.full(4, i, np.float16))
    made.tensor[2:4, 8:].set(np.zeros((2, 8)))
    expected = np.repeat(np.arange(10.0), 16).reshape(10, 16)
    expected[2:4, 8:] = 0
    np.testing.assert_array_equal(made.tensor.numpy(), expected.astype(np.float16))


def test_a_part_is_written_with_numpys_conversions(make: Callable[[Case], Made]) -> None:
    made = make(CASES["columns over three"])
    part = made.tensor[1:3]
    with pytest.raises(OverflowError):
        part.set(np.full((2, 4), 300))
    with pytest.raises(ValueError, match="has shape"):
        part.set(np.zeros((3, 4), np.int8))
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers)
    part.set(np.full((2, 4), 300), casting="unsafe")
    assert (part.numpy() == 44).all()
    part.set(np.arange(8, dtype=">i4").reshape(4, 2).T)
    np.testing.assert_array_equal(part.numpy(), np.arange(8).reshape(4, 2).T)


def test_numbers_that_cannot_be_quantised_write_nothing(make: Callable[[Case], Made]) -> None:
    made = make(CASES["columns of blocks"])
    with pytest.raises(TypeError, match="which cannot be cast"):
        made.tensor[0, 1:3].set(np.zeros((2, 32), complex))
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers)


def test_a_single_number_of_what_is_cut(make: Callable[[Case], Made]) -> None:
    made = make(CASES["a vector"])
    made.tensor[3:4].set([77])
    assert made.tensor.numpy()[3] == 77
    assert (np.delete(made.tensor.numpy(), 3) == np.delete(made.numbers, 3)).all()


def test_a_view_goes_to_a_file(make: Callable[[Case], Made], tmp_path: Any) -> None:
    made = make(CASES["columns"])
    with GGUFWriter(tmp_path / "part.gguf") as writer:
        writer.add_tensor("part", made.tensor[1:3])
    with GGUFFile(tmp_path / "part.gguf") as file:
        np.testing.assert_array_equal(file.tensors["part"].numpy(), made.numbers[1:3])


# ---- addends


def test_addends_are_written_as_a_whole_and_not_read(make: Callable[[Case], Made]) -> None:
    made = make(Case((4, 6), "f32", PARTIAL))
    view = made.tensor[1:3]
    for one in (made.tensor, view):
        with pytest.raises(
            ValueError, match=r"each device has an addend of 'w' \(PARTIAL\)"
        ) as why:
            one.numpy()
        assert "cannot be read" in str(why.value)
    for one in (view, made.tensor.T):
        with pytest.raises(
            ValueError, match=r"an addend of 'w' \(PARTIAL\), which is written as a"
        ):
            one.set(np.zeros(one.shape))
    ops.reshape_2d(made.tensor, 12, 2).set(np.zeros((2, 12)))
    made.tensor.set(np.ones((4, 6)))
    with pytest.raises(ValueError, match=r"'w', .*partial: each device has an addend of it"):
        capi.ggml_backend_tensor_get(made.handle, bytearray(96), 0)
    with pytest.raises(ValueError, match=r"'w', .*partial: it is written as a whole only"):
        capi.ggml_backend_tensor_set(made.handle, bytes(24), 0)
    capi.ggml_backend_view_init(view.handle)
    with pytest.raises(ValueError, match=r"a view of 'w', partial: ggml forgets its views"):
        capi.ggml_backend_tensor_set(view.handle, bytes(24), 0)
    with (
        made.device.init_backend(1) as backend,
        pytest.raises(ValueError, match="partial: ggml does not move it asynchronously"),
    ):
        capi.ggml_backend_tensor_set_async(backend.handle, made.handle, bytes(96), 0)


# ---- several at once


def test_no_write_of_a_part_is_lost(make: Callable[[Case], Made]) -> None:
    """Each reads all of the weight and writes it back: they must not do so at the same time."""
    made = make(Case((4, 2048), "f32", SplitState.split(1, [1, 3])))
    parts, before = [made.tensor[i] for i in range(4)], sys.getswitchinterval()
    start = threading.Barrier(4)
    lost: list[tuple[int, int]] = []

    def work(i: int) -> None:
        start.wait()
        for n in range(100):
            parts[i].set(np.full(2048, n))
            if (parts[i].numpy() != n).any():
                lost.append((i, n))

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    assert not lost
    assert (made.tensor.numpy() == 99).all()


def test_a_part_is_written_between_the_runs_of_a_graph(make: Callable[[Case], Made]) -> None:
    """It takes the device's turn, and does not make a graph be told anew of its views."""
    made = make(Case((6, 4), "f32", SplitState.split(1, [4, 2])))
    x = made.ctx.input((3, 4), name="x")
    compiled = Graph(ops.cont(x @ made.tensor.T)).compile(made.device, 1)
    shared = made.device._shared
    assert shared is not None
    for i in range(3):
        made.tensor[i].set(np.full(4, i))
        turns = shared.turns
        made.tensor[i, 1:].set(np.full(3, i))
        assert shared.turns == turns
        found = compiled(x=np.eye(3, 4))
        np.testing.assert_array_equal(found, np.eye(3, 4) @ made.tensor.numpy().T)


def test_within_an_operation_that_the_device_computes(make: Callable[[Case], Made]) -> None:
    """The run has the device's turn until it ends: to wait for it would be for ever."""
    made = make(CASES["columns"])
    said: list[str] = []

    def middle(out: Any, a: Any) -> None:
        np.testing.assert_array_equal(made.tensor[2].numpy(), made.numbers[2])
        with pytest.raises(ValueError, match="not within what the device computes") as caught:
            made.tensor[2].set(np.zeros(4))
        said.append(str(caught.value))
        out[...] = a

    x = made.ctx.input(4, name="x")
    compiled = Graph(ops.custom(middle, x)).compile(made.device, 1)
    compiled(x=np.ones(4))
    assert said
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers)
    made.tensor[2].set(np.zeros(4))


def test_a_device_that_others_have_made() -> None:
    """Through capi, with no turns: parts are read and written as well."""
    function = SplitState.split(1, [1, 5])
    cpus = [capi.ggml_backend_dev_by_name("CPU")] * 2
    device = Device(capi.ggml_backend_meta_device(cpus, lambda info, n: function))
    with Context() as ctx:
        tensor = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(6, 4), name="w")
        ctx.allocate(device)
        tensor[2:4, 1].set([7, 8])
        expected = np.arange(24, dtype=np.float32).reshape(6, 4)
        expected[2:4, 1] = 7, 8
        np.testing.assert_array_equal(tensor.numpy(), expected)
        np.testing.assert_array_equal(tensor.T[1:].numpy(), expected.T[1:])


def test_a_part_waits_for_a_graph_that_runs(make: Callable[[Case], Made]) -> None:
    """Which may write into the same cache: what was read before would be written back over it."""
    made = make(CASES["columns"])
    running, end = threading.Event(), threading.Event()

    def middle(out: Any, a: Any) -> None:
        running.set()
        assert end.wait(60)
        out[...] = a

    x = made.ctx.input(4, name="x")
    compiled = Graph(ops.custom(middle, x)).compile(made.device, 1)
    run = threading.Thread(target=lambda: compiled(x=np.ones(4)))
    write = threading.Thread(target=lambda: made.tensor[2].set(np.zeros(4)))
    run.start()
    assert running.wait(60)
    write.start()
    write.join(0.1)
    assert write.is_alive()
    np.testing.assert_array_equal(made.tensor.numpy(), made.numbers)  # to read is no turn
    end.set()
    write.join()
    run.join()
    assert (made.tensor[2].numpy() == 0).all()


def test_a_context_that_is_closed_while_a_part_waits(make: Callable[[Case], Made]) -> None:
    made = make(CASES["columns"])
    part, shared, raised = made.tensor[2], made.device._shared, []
    assert shared is not None

    def write() -> None:
        try:
            part.set(np.zeros(4))
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=write)

    def close() -> None:
        thread.start()
        thread.join(0.1)
        made.ctx.close()
        assert thread.is_alive()

    shared.take(close)
    thread.join()
    assert "Context is closed" in str(raised[0])


@pytest.mark.rpc
def test_a_cache_that_a_graph_writes_too() -> None:
    """Over workers graphs write in place: no row of theirs is lost, nor a part of others."""
    n, width = 16, 24

    def split(info: Any, n_devs: int) -> SplitState:
        return SplitState.split({"cache": 0, "up": 1}[info.name], [16, 8])

    with MetaDevice(list(_backends.workers(2)), split, "raise") as device, Context() as ctx:
        cache = ctx.from_numpy(np.zeros((n, width), np.float32), name="cache")
        up = ctx.from_numpy(np.eye(width, dtype=np.float32), name="up")
        ctx.allocate(device)
        x, row = ctx.input((1, width), name="x"), ctx.input(1, "i64", name="row")
        compiled = Graph(ops.set_rows(cache, x @ up.T, row)).compile(device)
        expected = np.zeros((n, width), np.float32)
        expected[::2] = np.arange(0, n, 2)[:, None] + 1
        expected[1::2, 3:20] = 5

        part, done = cache[1::2, 3:20], threading.Event()  # all the graph's rows but one between

        def write() -> None:
            while not done.is_set():
                part.set(np.full((n // 2, 17), 5))

        writing = threading.Thread(target=write)
        writing.start()
        lost = 0
        try:
            for i in [*range(0, n, 2)] * 5:
                compiled(x=np.full((1, width), i + 1), row=np.array([i]))
                lost += (cache[i].numpy() != i + 1).any()
        finally:
            done.set()
            writing.join()
        assert not lost
        np.testing.assert_array_equal(cache.numpy(), expected)
        np.testing.assert_array_equal(cache[2:, 14:18].numpy(), expected[2:, 14:18])


@pytest.mark.rpc
def test_a_result_in_place_is_read_from_where_it_is_written() -> None:
    """It is a view of the cache, which ggml forgets where other graphs that have one run."""

    def split(info: Any, n_devs: int) -> SplitState:
        return SplitState.split({"cache": 0, "up": 1}[info.name], [6, 2])

    with (
        MetaDevice(list(_backends.workers(2)), split, "raise") as device,
        device.init_backend(1) as backend,
        Arena(backend.handle) as arena,
    ):
        cache, up = arena.weight(8, 4, name="cache"), arena.weight(8, 8, name="up")
        expected = np.zeros((4, 8), np.float32)
        capi.ggml_backend_tensor_set(cache, expected, 0)
        capi.ggml_backend_tensor_set(up, np.eye(8, dtype=np.float32), 0)
        results = []
        for i in range(3):
            ctx = arena.context()
            x, row = arena.tensor(8, ctx=ctx), arena.tensor(1, type=capi.GGML_TYPE_I64, ctx=ctx)
            for one in (x, row):
                capi.ggml_set_input(one)
            results.append(capi.ggml_set_rows(ctx, cache, capi.ggml_mul_mat(ctx, up, x), row))
            graph = arena.graph(ctx, results[-1])
            capi.ggml_backend_tensor_set(x, np.full(8, i + 1, np.float32), 0)
            capi.ggml_backend_tensor_set(row, np.array([i]), 0)
            capi.ggml_backend_graph_compute(backend.handle, graph)
            expected[i] = i + 1
            found = np.zeros((4, 8), np.float32)
            capi.ggml_backend_tensor_get(cache, found, 0)
            np.testing.assert_array_equal(found, expected)
            for one in results:
                with pytest.raises(ValueError, match="ggml forgets its views, so read and write"):
                    capi.ggml_backend_tensor_get(one, found, 0)
