"""Tensors as NumPy's neighbours: views and copies, reading and writing, DLPack."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from _release import require

from ggml_cffi import MetaDevice, SplitState, capi, ffi, ops, quants
from ggml_cffi import tensor as tensor_module
from ggml_cffi.context import Context
from ggml_cffi.dtypes import element_type
from ggml_cffi.gguf import GGUFWriter
from ggml_cffi.graph import Graph
from ggml_cffi.tensor import Tensor, raw_bytes
from ggml_cffi.training import Dataset

MASKED = np.ma.masked_array(np.ones((2, 32), np.float32), np.zeros((2, 32)), fill_value=5)
DTYPES = ["f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64"]


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


@pytest.fixture
def spread() -> MetaDevice:
    """Two devices; each has part of the rows of what has several, all of the rest."""
    require("ggml_backend_meta_device")
    return MetaDevice(
        ["CPU", "CPU"],
        lambda info, n: (
            SplitState.by_ratio(info, axis=1, ratios=[1, 1])
            if info.ne[1] > 1
            else SplitState.mirrored()
        ),
    )


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


def put(ctx: Context, array: Any, target: Any = "CPU", **kwargs: Any) -> Tensor:
    tensor = ctx.from_numpy(array, **kwargs)
    ctx.allocate(target)
    return tensor


@pytest.mark.parametrize("name", DTYPES)
def test_a_view_of_host_memory(ctx: Context, name: str) -> None:
    tensor = ctx.tensor((3, 4), name)
    ctx.allocate("CPU")
    tensor.set(numbers(3, 4, dtype=np.int8))
    view = tensor.numpy()
    assert tensor.shares_memory and not view.flags.owndata and view.dtype == tensor.dtype
    np.testing.assert_array_equal(view.astype(np.float64), numbers(3, 4))
    view[1, 2] = 5
    assert tensor.numpy()[1, 2] == 5
    assert np.asarray(tensor)[1, 2] == 5 and np.shares_memory(np.asarray(tensor), view)
    copy = tensor.numpy(copy=True)
    copy[...] = 0
    assert view[1, 2] == 5


def test_each_view_is_an_array_of_its_own(ctx: Context) -> None:
    tensor = put(ctx, numbers(3, 4))
    one, two = tensor.numpy(), tensor.numpy()
    assert one is not two and np.shares_memory(one, two)
    one.flags.writeable = False
    assert two.flags.writeable and not one.flags.writeable
    assert tensor.numpy().flags.writeable


def test_a_view_is_of_where_the_tensor_is_now(ctx: Context) -> None:
    one, two = ctx.from_numpy(numbers(8)), ctx.from_numpy(-numbers(8))
    ctx.allocate("CPU")
    np.testing.assert_array_equal(one.numpy(), numbers(8))
    before = one.handle.data
    one.handle.data = two.handle.data
    np.testing.assert_array_equal(one.numpy(), -numbers(8))
    one.set(numbers(8) + 1)
    np.testing.assert_array_equal(two.numpy(), numbers(8) + 1)
    one.handle.data = before
    np.testing.assert_array_equal(one.numpy(), numbers(8))


def test_no_view_once_it_has_no_memory() -> None:
    with Context() as ctx:
        tensor = ctx.tensor(4)
        other = ctx.from_numpy(numbers(4))
        ctx.allocate("CPU")
        for one in (tensor, other, tensor):
            assert one.numpy().shape == (4,)
    for one in (tensor, other):
        with pytest.raises(ValueError, match="Context is closed"):
            one.numpy()
        with pytest.raises(ValueError, match="Context is closed"):
            one.set(numbers(4))


def test_a_tensor_that_has_come_back_keeps_no_context_open() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.itself = tensor, self

        def __del__(self) -> None:
            kept.append(self)

    kept: list[Holder] = []
    ctx = Context()
    held = Holder(put(ctx, numbers(4)))
    held.tensor.numpy()
    del held
    gc.collect()
    assert len(kept) == 1
    ctx.close()
    with pytest.raises(ValueError, match="Context is closed"):
        kept.pop().tensor.numpy()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_view_that_fails(
    ctx: Context, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for what it holds, or an interrupt comes once it is there."""
    tensor = put(ctx, numbers(4))

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(ffi, name)

        def gc(self, *given: Any) -> None:
            if error is not MemoryError:
                ffi.gc(*given)  # and gone again
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(tensor_module, "ffi", Failing())
        with pytest.raises(error):
            tensor.numpy()
    assert ctx._lent.count == 0 and ctx._resource.users == 1
    np.testing.assert_array_equal(tensor.numpy(), numbers(4))
    ctx.close()


def test_views_while_another_thread_closes() -> None:
    """Whoever comes first: a view, whose memory stays, or an error."""
    for _ in range(200):
        ctx = Context()
        tensor = ctx.from_numpy(numbers(1000))
        ctx.allocate("CPU")
        started, seen = threading.Event(), []

        def look(tensor: Tensor = tensor, started: Any = started, seen: Any = seen) -> None:
            with contextlib.suppress(ValueError):
                while True:
                    seen.append(float(tensor.numpy().sum()))
                    started.set()

        thread = threading.Thread(target=look)
        thread.start()
        started.wait()
        while not ctx.closed:
            with contextlib.suppress(BufferError):
                ctx.close()
        thread.join()
        assert set(seen) == {float(numbers(1000).sum())}


def test_a_transposed_view(ctx: Context) -> None:
    tensor = put(ctx, numbers(2, 3, 4))
    turned = ops.permute(tensor, 2, 0, 1, 3)
    shown = turned.numpy()
    assert turned.shares_memory and np.shares_memory(shown, tensor.numpy())
    np.testing.assert_array_equal(shown, numbers(2, 3, 4).transpose(2, 0, 1))
    np.testing.assert_array_equal(tensor.T.numpy(), numbers(2, 3, 4).swapaxes(-1, -2))


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q6_K"])
def test_quantised_tensors_are_copied(ctx: Context, name: str) -> None:
    array = np.random.default_rng(1).standard_normal((3, 512), dtype=np.float32)
    tensor = put(ctx, array, dtype=name)
    assert not tensor.shares_memory and tensor.dtype == np.float32
    got = tensor.numpy()
    assert got.shape == (3, 512) and np.abs(got - array).max() < 0.5
    with pytest.raises(ValueError, match="shares no memory with NumPy"):
        tensor.numpy(copy=False)
    np.testing.assert_array_equal(tensor[1:].numpy(), got[1:])
    np.testing.assert_array_equal(tensor[:, 256:].numpy(), got[:, 256:])
    tensor.set(np.zeros((3, 512)))
    assert not tensor.numpy().any()


@pytest.mark.parametrize("name", ["q4_0", "q6_K"])
def test_quantised_tensors_take_blocks_as_they_are(ctx: Context, name: str) -> None:
    first, second = np.random.default_rng(1).standard_normal((2, 3, 512), np.float32)
    blocks, others = quants.quantize(first, name), quants.quantize(second, name)
    tensor = ctx.from_numpy(blocks, dtype=name)
    assert tensor.shape == (3, 512)
    ctx.allocate("CPU")
    np.testing.assert_array_equal(raw_bytes(tensor), blocks.reshape(-1))
    for given in (others, others.reshape(-1), others[:, ::-1][:, ::-1], np.asfortranarray(others)):
        tensor.set(blocks)
        tensor.set(given)
        np.testing.assert_array_equal(raw_bytes(tensor), others.reshape(-1))
    tensor[1:].set(blocks[:2])
    np.testing.assert_array_equal(raw_bytes(tensor), np.r_[others[:1], blocks[:2]].reshape(-1))
    tensor.set(np.ones((3, 512), np.uint8))  # numbers
    np.testing.assert_allclose(tensor.numpy(), 1, rtol=1e-2)
    x = ctx.input((3, 512), name, name="x")
    made = Graph(ops.cast(x, "f32")).compile("CPU")
    np.testing.assert_array_equal(made(x=blocks), quants.dequantize(blocks, name))
    with pytest.raises(
        ValueError, match=r"shape \(3, 511\), expected \(3, 512\) of .*of its blocks"
    ):
        tensor.set(np.ones((3, 511), np.uint8))
    with pytest.raises(ValueError, match=r"rows of 512 bytes, expected a multiple of .*astype"):
        ctx.from_numpy(np.ones((3, 512), np.uint8), dtype=name)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a.T.copy().T,
        lambda a: np.repeat(a, 2, 1)[:, ::2],
        lambda a: a.astype(">f4"),
        lambda a: a.astype(">i2"),
        lambda a: a.astype(np.float64),
        lambda a: a.astype(np.int8),
        lambda a: a[None],
        lambda a: a.tolist(),
        lambda a: np.broadcast_to(a[0], a.shape),
        lambda a: a.astype(ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("place", ["host", "meta"])
def test_any_array_is_written(
    ctx: Context, request: pytest.FixtureRequest, place: str, change: Any
) -> None:
    tensor = ctx.tensor((4, 6))
    ctx.allocate("CPU" if place == "host" else request.getfixturevalue("spread"))
    given = change(numbers(4, 6))
    tensor.set(given)
    np.testing.assert_array_equal(tensor.numpy(), np.asarray(given, np.float32).reshape(4, 6))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 1, 1)])
def test_single_and_no_numbers(ctx: Context, shape: tuple[int, ...]) -> None:
    tensor = ctx.tensor(shape)
    other = ctx.tensor(2)
    ctx.allocate("CPU")
    tensor.set(np.full(shape, 3.0))
    np.testing.assert_array_equal(tensor.numpy(), np.full(shape, 3.0))
    assert other.has_memory


def test_casting(ctx: Context) -> None:
    tensor = ctx.tensor(3, "i32")
    ctx.allocate("CPU")
    with pytest.raises(TypeError, match=r"float64, which cannot be cast to int32 .*'same_kind'"):
        tensor.set([1.5, 2, 3])
    tensor.set([1.5, 2, 3], casting="unsafe")
    np.testing.assert_array_equal(tensor.numpy(), [1, 2, 3])
    with pytest.raises(TypeError, match="int64, which cannot be cast to int32"):
        tensor.set(np.arange(3), casting="safe")
    with pytest.raises(ValueError, match=r"the array has shape \(4,\), expected \(3,\) of <Tensor"):
        tensor.set(np.arange(4))
    with pytest.raises(TypeError):
        tensor.set(["a", "b", "c"])
    np.testing.assert_array_equal(tensor.numpy(), [1, 2, 3])


BEYOND = [
    ("i32", np.array([1, 2**32 + 3]), 2**32 + 3),
    ("i32", np.array([-(2**40), 1]), -(2**40)),
    ("i32", np.array([1, 2**31], ">u4"), 2**31),
    ("i64", np.array([2**63, 1], np.uint64), 2**63),
    ("i16", np.array([40000, 1], np.uint16), 40000),
    ("i8", np.array([255, 1], np.uint8), 255),
    ("i8", np.array([1, -129], np.int16), -129),
    ("f16", np.array([1, 70000]), 70000),
]


@pytest.mark.parametrize(("kind", "numbers", "wrong"), BEYOND, ids=str)
def test_integers_out_of_range_are_refused(kind: str, numbers: Any, wrong: int) -> None:
    """They would wrap, or be infinite: another row of a table than the one that was meant."""
    with Context() as ctx:
        tensor = ctx.tensor(2, kind)
        x = ctx.input(2, kind, name="x")
        ctx.allocate("CPU")
        tensor.set([5, 6])
        made = Graph(ops.cont(x)).compile("CPU", 1) if kind in ("i32", "f16") else None
        for give in (
            lambda: tensor.set(numbers),
            lambda: ctx.from_numpy(numbers, dtype=kind),
            *([lambda: made(x=numbers)] if made is not None else []),
        ):
            with pytest.raises(OverflowError, match=f"has {wrong}, which .* cannot hold"):
                give()
        np.testing.assert_array_equal(tensor.numpy(), [5, 6])


@pytest.mark.parametrize("kind", ["i8", "i16", "i32", "i64"])
@pytest.mark.parametrize("given", [np.uint8, np.int16, np.uint16, np.int64, np.uint64])
def test_integers_that_fit_are_converted(ctx: Context, kind: str, given: Any) -> None:
    tensor = ctx.tensor(2, kind)
    ctx.allocate("CPU")
    both = np.iinfo(tensor.dtype), np.iinfo(given)
    numbers = [max(one.min for one in both), min(one.max for one in both)]
    tensor.set(np.array(numbers, given))
    assert tensor.numpy().tolist() == numbers
    tensor.set(np.array([2**70 % 251, 300]), casting="unsafe")
    np.testing.assert_array_equal(tensor.numpy(), np.array([2**70 % 251, 300]).astype(tensor.dtype))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("given", ["f2", "f4", "f8", ml_dtypes.bfloat16, "i8", "?"])
def test_real_numbers_become_floats(ctx: Context, kind: str, given: Any) -> None:
    tensor = ctx.tensor(2, kind)
    ctx.allocate("CPU")
    tensor.set(np.array([1, 0], given))
    assert tensor.numpy().astype(float).tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["f32", "bf16", "i32"])
@pytest.mark.parametrize(
    "numbers",
    [
        np.array([1 + 5j, 2j]),
        np.array([(7.0,), (8.0,)], [("a", "f4")]),
        np.array([1, 2], "M8[s]"),
        np.array(["3", "4"]),
        np.array([3, None]),
        np.zeros(2, "V2"),
    ],
    ids=lambda numbers: str(numbers.dtype),
)
def test_what_is_no_real_number_is_refused(ctx: Context, kind: str, numbers: Any) -> None:
    tensor = ctx.tensor(2, kind)
    ctx.allocate("CPU")
    tensor.set([5, 6])
    with pytest.raises(TypeError, match="cannot be cast to"):
        tensor.set(numbers)
    assert tensor.numpy().astype(float).tolist() == [5, 6]


@pytest.mark.parametrize("given", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "f2"])
def test_floats_do_not_become_integers(ctx: Context, given: Any) -> None:
    tensor, x = ctx.tensor(2, "i32"), ctx.input(2, "i32", name="x")
    made = Graph(ops.cont(x)).compile("CPU", 1)
    ctx.allocate("CPU")
    for use in (tensor.set, lambda numbers: made(x=numbers)):
        with pytest.raises(TypeError, match=f"{np.dtype(given)}, which cannot be cast to int32"):
            use(np.array([1.5, 2], given))


def test_no_memory(ctx: Context) -> None:
    x = ctx.input(3, name="x")
    y = ops.sqr(x)
    with pytest.raises(ValueError, match="it is an input of graphs, which are given"):
        x.numpy()
    with pytest.raises(ValueError, match="it is an input of graphs, which are given"):
        x.set([1, 2, 3])
    with pytest.raises(ValueError, match="it is a result"):
        np.asarray(y)
    ctx.allocate("CPU")
    for made, kind in ((ctx.tensor(3), "an input"), (ctx.from_numpy(np.ones(3)), "a constant")):
        with pytest.raises(ValueError, match=f"allocate gives it some; without, it is {kind} of"):
            made.numpy()


def test_a_meta_device_gives_no_view(ctx: Context, spread: Any) -> None:
    """ggml counts its memory as the host's, with addresses that are made up."""
    tensor = put(ctx, numbers(4, 6), spread)
    assert capi.ggml_backend_buffer_is_host(tensor.handle.buffer)
    assert not tensor.shares_memory
    np.testing.assert_array_equal(tensor.numpy(), numbers(4, 6))
    with pytest.raises(ValueError, match="shares no memory"):
        tensor.numpy(copy=False)


def test_numpy_asks(ctx: Context) -> None:
    tensor = put(ctx, numbers(2, 3))
    assert len(tensor) == 2 and np.ndim(tensor) == 2
    np.testing.assert_array_equal(np.asarray(tensor, dtype=np.float64), numbers(2, 3))
    assert np.array(tensor).flags.owndata
    assert isinstance(np.float32(2) * tensor, Tensor)
    with pytest.raises(TypeError):
        np.add(tensor, 1)
    with pytest.raises(TypeError, match="no axis"):
        len(ctx.tensor(()))


def test_the_same_tensor_twice(ctx: Context) -> None:
    x = ctx.tensor(3, name="x")
    (again,) = [t for t in Graph(ops.sqr(x)).tensors if t.name == "x"]
    assert again == x and hash(again) == hash(x) and again is not x
    assert x != ctx.tensor(3)


def test_names(ctx: Context) -> None:
    x = ctx.tensor(3, name="größer")
    assert x.name == "größer"
    x.name = "other"
    assert x.name == "other" and repr(x) == "<Tensor 'other' f32 (3,)>"
    assert repr(ops.sqr(x)) == "<Tensor f32 (3,) by SQR>"


# ---- DLPack


def test_dlpack_out(ctx: Context) -> None:
    tensor = put(ctx, numbers(3, 4))
    array = np.from_dlpack(tensor)
    assert np.shares_memory(array, tensor.numpy())
    assert tensor.__dlpack_device__() == (1, 0)
    del tensor
    gc.collect()
    with pytest.raises(BufferError):
        ctx.close()
    np.testing.assert_array_equal(array, numbers(3, 4))
    del array


def test_dlpack_of_what_shares_no_memory(ctx: Context) -> None:
    tensor = ctx.from_numpy(numbers(2, 32), dtype="q8_0")
    ctx.allocate("CPU")
    np.testing.assert_allclose(np.from_dlpack(tensor), numbers(2, 32), atol=0.1)


def test_dlpack_in(ctx: Context) -> None:
    array = numbers(3, 4)[:, ::2]
    tensor = ctx.from_dlpack(array)
    ctx.allocate("CPU")
    np.testing.assert_array_equal(tensor.numpy(), array)
    with pytest.raises(TypeError, match="expected an object with __dlpack__"):
        ctx.from_dlpack([1, 2])


@pytest.mark.parametrize("layout", [np.s_[:], np.s_[1:], np.s_[:, ::2], np.s_[2], np.s_[1, 2]])
def test_dlpack_with_bfloat16(ctx: Context, layout: Any) -> None:
    """NumPy has none; libraries that have one see it."""
    tensor = ctx.from_numpy(numbers(3, 4), dtype="bf16", name="b")
    ctx.allocate("CPU")
    part = tensor[layout]
    other = ctx.from_dlpack(part)
    assert other.type == capi.GGML_TYPE_BF16 and other.shape == part.shape
    ctx.allocate("CPU")
    np.testing.assert_array_equal(other.numpy(), part.numpy())
    with pytest.raises((BufferError, RuntimeError, TypeError)):
        np.from_dlpack(tensor)


def test_dlpack_keywords(ctx: Context) -> None:
    tensor = put(ctx, numbers(3, 4))
    blocks = ctx.from_numpy(numbers(2, 32), dtype="q8_0")
    ctx.allocate("CPU")
    tensor.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match="shares no memory: it has to be copied"):
        blocks.__dlpack__(copy=False)

    class Copied:
        def __dlpack__(self, **kwargs: Any) -> object:
            return tensor.__dlpack__(copy=True)

        def __dlpack_device__(self) -> tuple[int, int]:
            return tensor.__dlpack_device__()

    array = np.from_dlpack(Copied())
    assert not np.shares_memory(array, tensor.numpy())
    np.testing.assert_array_equal(array, numbers(3, 4))


def test_dlpack_from_elsewhere(ctx: Context) -> None:
    class OnGpu:
        def __dlpack__(self, **kwargs: Any) -> object:
            raise AssertionError("it is not asked for")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(BufferError, match="source is on device 2, 0 of DLPack's, expected the CPU"):
        ctx.from_dlpack(OnGpu())
    with pytest.raises(ValueError, match="ggml has no type for NumPy's uint8"):
        ctx.from_dlpack(np.zeros(3, np.uint8))


@pytest.fixture
def torch(need: Any) -> Any:
    need(importlib.util.find_spec("torch"), "PyTorch")
    return importlib.import_module("torch")


TORCH_TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_dlpack_to_pytorch(ctx: Context, torch: Any, dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = (numbers(3, 4) * 10).astype(kind)
    tensor = put(ctx, array)
    for layout in (np.s_[:], np.s_[1:], np.s_[:, ::2], np.s_[2], np.s_[1, 2], np.s_[3:]):
        theirs = torch.from_dlpack(tensor[layout])
        assert str(theirs.dtype) == f"torch.{dtype}"
        wanted = np.asarray(array[layout], np.float64)
        assert theirs.shape == wanted.shape
        np.testing.assert_array_equal(theirs.to(torch.float64).numpy(), wanted)
    theirs = torch.from_dlpack(tensor.T)
    theirs[1, 2] = 77
    assert tensor.numpy()[2, 1] == 77  # the memory is one
    tensor.set(np.zeros((3, 4), kind))
    assert not theirs.any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_dlpack_from_pytorch(ctx: Context, torch: Any, dtype: str) -> None:
    theirs = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    for given in (theirs, theirs.t(), theirs[1:, ::2], theirs[2], theirs[1, 2], theirs[4:]):
        tensor = ctx.from_dlpack(given)
        ctx.allocate("CPU")
        assert tensor.type == element_type(tensor.dtype)
        assert str(tensor.dtype) == dtype and tensor.shape == tuple(given.shape)
        wanted = given.to(torch.float64).numpy()
        np.testing.assert_array_equal(tensor.numpy().astype(np.float64), wanted)


@pytest.mark.slow
def test_dlpack_with_pytorch_keeps_the_memory(ctx: Context, torch: Any) -> None:
    tensor = put(ctx, numbers(3, 4))
    theirs = torch.from_dlpack(tensor)[1]
    del tensor
    gc.collect()
    with pytest.raises(BufferError):
        ctx.close()
    np.testing.assert_array_equal(theirs.numpy(), numbers(3, 4)[1])
    del theirs
    gc.collect()
    ctx.close()


@pytest.mark.slow
def test_dlpack_with_pytorch_of_what_shares_no_memory(
    ctx: Context, torch: Any, spread: Any
) -> None:
    tensor = put(ctx, numbers(3, 4), spread)
    theirs = torch.from_dlpack(tensor)
    theirs[0, 0] = 77
    np.testing.assert_array_equal(tensor.numpy(), numbers(3, 4))
    with pytest.raises(BufferError):
        torch.from_dlpack(tensor, copy=False)
    with pytest.raises((BufferError, RuntimeError)):
        ctx.from_dlpack(torch.ones(3, requires_grad=True))
    with pytest.raises((ValueError, BufferError, RuntimeError)):
        ctx.from_dlpack(torch.ones(3, dtype=torch.complex64))


def write_gguf(path: Path, act: Any) -> None:
    with GGUFWriter(path) as writer:
        act(writer)


#: Where numbers come in: what takes them from a context, a tensor with memory and a folder.
TAKERS: dict[str, Any] = {
    "from_numpy": lambda ctx, w, path: ctx.from_numpy(MASKED),
    "set": lambda ctx, w, path: w.set(MASKED),
    "assign": lambda ctx, w, path: w.__setitem__(..., MASKED),
    "run": lambda ctx, w, path: Graph(ctx.input((2, 32), name="x") * w).compile("CPU")(x=MASKED),
    "dataset": lambda ctx, w, path: Dataset(MASKED),
    "labels": lambda ctx, w, path: Dataset(np.ones(2), MASKED),
    "quantize": lambda ctx, w, path: quants.quantize(MASKED, "q8_0"),
    "imatrix": lambda ctx, w, path: quants.quantize(MASKED.data, "q4_0", MASKED[0]),
    "dequantize": lambda ctx, w, path: quants.dequantize(MASKED.astype(np.uint8), "q8_0"),
    "metadata": lambda ctx, w, path: write_gguf(path, lambda f: f.set("k", MASKED[0])),
    "tensor": lambda ctx, w, path: write_gguf(path, lambda f: f.add_tensor("x", MASKED)),
    "raw": lambda ctx, w, path: write_gguf(path, lambda f: f.add_raw("x", MASKED, "f32", (2, 32))),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_masked_array_is_refused_wherever_numbers_come_in(
    ctx: Any, tmp_path: Path, taker: str
) -> None:
    w = ctx.from_numpy(np.zeros((2, 32), np.float32))
    ctx.allocate("CPU")
    with pytest.raises(TypeError, match=r"masked array, whose mask would be lost; \.filled\(\)"):
        TAKERS[taker](ctx, w, tmp_path / "f.gguf")
    assert not w.numpy().any() and not os.listdir(tmp_path)


def test_what_a_tensor_is_not_asked(ctx: Any) -> None:
    """Its numbers may be yet to be computed: no truth, and nothing is found in it."""
    w = ctx.from_numpy(np.zeros((2, 3), np.float32), "w")
    single = ctx.tensor((), name="single")
    ctx.allocate("CPU")
    for one in (w, single, ops.sqr(w)):
        with pytest.raises(TypeError, match=r"neither true nor false: look at its numpy\(\)"):
            bool(one)
        with pytest.raises(TypeError, match=r"is not searched: look in its numpy\(\)"):
            0.0 in one  # noqa: B015
    with pytest.raises(TypeError, match="the Tensor has no axis"):
        iter(single)
    w[1] = [1, 2, 3]
    assert [row.numpy().tolist() for row in w] == [[0, 0, 0], [1, 2, 3]]
