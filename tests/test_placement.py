"""Weights in memory that keeps them in an order of its own (CPU_REPACK): products, refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_cffi import (
    Backend,
    Context,
    GGUFFile,
    GGUFWriter,
    Graph,
    Scheduler,
    capi,
    device,
    diagnostics,
    ops,
)
from ggml_cffi._placement import reorders

CPU = device("CPU")
REPACK = "CPU_REPACK"
KINDS = ("q4_0", "q4_K", "iq4_nl", "q2_K", "q5_K", "q6_K", "mxfp4", "q8_0")


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


W = numbers(64, 256)
X = numbers(5, 256, seed=1)


@pytest.fixture(autouse=True)
def repack(need: Any) -> None:
    there = REPACK in CPU.buffer_types and CPU.supports_weight(REPACK, "q4_0", (64, 256))
    need(there, "CPU that ggml has another order of q4_0 for")


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


def weight(ctx: Context, array: Any = W, kind: str = "q4_0", where: str | None = REPACK) -> Any:
    w = ctx.from_numpy(array, name="w", dtype=kind)
    ctx.allocate("CPU", buffer_type=where)
    return w


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_plain_memory(kind: str) -> None:
    if not CPU.supports_weight(REPACK, kind, W.shape):
        with Context() as ctx, pytest.raises(ValueError, match="cannot be in CPU_REPACK"):
            weight(ctx, kind=kind)
        return
    found = []
    for where in (None, REPACK):
        with Context() as ctx:
            w = weight(ctx, kind=kind, where=where)
            with Graph(ctx.input(X.shape, name="x") @ w.T).compile("CPU") as made:
                found.append(made(x=X))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-2)
    with Context() as ctx:
        rounded = weight(ctx, kind=kind, where=None).numpy(copy=True)
    # the activations are rounded to 8 bits: each product of 256 is off by some 0.1
    np.testing.assert_allclose(found[1], X @ rounded.T, rtol=0, atol=1)


def test_stacks_and_experts(ctx: Context) -> None:
    w = weight(ctx)
    x = numbers(2, 5, 256)
    with Context() as plain:
        same = weight(plain, where=None)
        one, other = (Graph(ops.mul_mat(t, t.context.input(x.shape, name="x"))) for t in (w, same))
        np.testing.assert_allclose(
            one.compile("CPU")(x=x), other.compile("CPU")(x=x), rtol=1e-3, atol=1e-2
        )
    experts = numbers(4, 64, 256, seed=3)
    found = []
    for where in (REPACK, None):
        with Context() as each:
            stack = weight(each, experts, where=where)
            ids = each.input((5, 2), "i32", name="ids")
            y = ops.mul_mat_id(stack, each.input((5, 1, 256), name="x"), ids)
            chosen = np.arange(10, dtype=np.int32).reshape(5, 2) % 4
            found.append(Graph(y).compile("CPU")(x=X[:, None], ids=chosen))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-2)


def test_its_numbers_cannot_be_read(ctx: Context) -> None:
    w = weight(ctx)
    assert w.has_memory and not w.shares_memory
    for read in (w.numpy, lambda: np.asarray(w), lambda: np.from_dlpack(w)):
        with pytest.raises(ValueError, match=r"'w' .*cannot be read: CPU_REPACK keeps it in an"):
            read()
    with pytest.raises(ValueError, match="cannot be read: CPU_REPACK"):
        Graph([w, ops.mul_mat(w, ctx.input((1, 256), name="x"))]).compile("CPU")
    w.set(-W)  # written it can be, as a whole
    made = Graph(ops.mul_mat(w, ctx.input(X.shape, name="x"))).compile("CPU")
    assert np.abs(made(x=X) + X @ W.T).max() < 16


def test_views_of_it_are_refused(ctx: Context) -> None:
    w = weight(ctx)
    part = w[:32]
    for use in (part.numpy, lambda: part.set(W[:32])):
        with pytest.raises(ValueError, match="CPU_REPACK"):
            use()
    x = ctx.input(X.shape, name="x")
    for wrong in (ops.mul_mat(part, x), ops.mul_mat(ops.reshape_2d(w, 256, 64), x)):
        gc.collect()  # what other tests have left
        before = diagnostics.live_handles()
        with pytest.raises(ValueError, match=r"(VIEW|RESHAPE) of the weight 'w': CPU_REPACK"):
            Graph(wrong).compile("CPU")
        assert diagnostics.live_handles() == before


def test_other_operations_are_refused(ctx: Context) -> None:
    w = weight(ctx)
    x = ctx.input((3, 256), name="x")
    half = ctx.input((3, 256), "f16", name="half")
    ids = ctx.input(2, "i32", name="ids")
    for wrong, name in (
        (ops.get_rows(w, ids), "GET_ROWS"),
        (ops.cast(w, "f32"), "CPY"),
        (ops.cpy(ctx.input((64, 256), name="y"), w), "CPY"),
        (ops.mul_mat(w, half), "MUL_MAT"),
        (w.T @ ctx.input((64, 2), name="z"), "CPY|TRANSPOSE"),
    ):
        with pytest.raises(ValueError, match=rf"({name}) of the weight 'w': CPU_REPACK keeps"):
            Graph(wrong).compile("CPU")
    assert Graph(ops.mul_mat(w, x)).compile("CPU")(x=X[:3]).shape == (3, 64)


@pytest.mark.parametrize(
    ("kind", "shape"), [("f32", (64, 256)), ("q4_0", (63, 256)), ("q4_0", (256,)), ("i32", (8, 8))]
)
def test_weights_that_it_does_not_take(ctx: Context, kind: str, shape: tuple[int, ...]) -> None:
    """ggml would write to them through a pointer that is not there."""
    fits = ctx.from_numpy(W, name="fits", dtype="q4_0")
    wrong = ctx.tensor(shape, kind, name="wrong")
    assert not CPU.supports_weight(REPACK, kind, shape) and CPU.supports_weight("CPU", kind, shape)
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    text = rf"the weight 'wrong', {kind} of shape \({', '.join(map(str, shape))}.*CPU_REPACK"
    with pytest.raises(ValueError, match=text):
        ctx.allocate("CPU", buffer_type=REPACK)
    assert not fits.has_memory and not wrong.has_memory
    assert diagnostics.live_handles() == before
    ctx.allocate("CPU")  # elsewhere they have room
    assert np.abs(fits.numpy() - W).max() < 1


def test_what_device_says(ctx: Context) -> None:
    assert CPU.supports_weight("CPU", "f32", 3)
    assert not CPU.supports_weight(REPACK, "q4_0", (8, 33))
    assert not CPU.supports_weight(REPACK, "q4_0", ())
    with pytest.raises(ValueError, match="CPU has no buffer type 'odd'"):
        CPU.supports_weight("odd", "f32", 3)
    assert [reorders(CPU.buffer_type(name)) for name in ("CPU", REPACK)] == [False, True]


def test_from_a_file(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "f.gguf") as writer:
        writer.add_tensor("w", W, "q4_0")
        writer.add_tensor("norm", X[0])
    with Context() as ctx, GGUFFile(tmp_path / "f.gguf") as file:
        with pytest.raises(ValueError, match=r"'norm', f32 of shape \(256,\), cannot be in"):
            file.load_into(ctx, "CPU", buffer_type=REPACK)
        with pytest.raises(ValueError, match="no buffer type 'odd'"):
            file.load_into(ctx, "CPU", buffer_type="odd")
        seen: list[tuple[int, int]] = []
        (w,) = file.load_into(
            ctx, "CPU", ["w"], lambda *n: seen.append(n), buffer_type=REPACK
        ).values()
        assert seen == [(w.nbytes, w.nbytes)]  # as a whole
        norm = file.load_into(ctx, "CPU", ["norm"], buffer_type="CPU")["norm"]
        np.testing.assert_array_equal(norm.numpy(), X[0])
        made = Graph(ops.mul_mat(w, ctx.input(X.shape, name="x") * norm)).compile("CPU")
        assert np.abs(made(x=X) - (X * X[0]) @ W.T).max() < 32
        with pytest.raises(ValueError, match="CPU_REPACK"):
            w.numpy()


def test_on_a_scheduler(ctx: Context) -> None:
    w = weight(ctx)
    x = ctx.input(X.shape, name="x")
    with Backend(CPU, 1) as backend, Scheduler([backend]) as scheduler:
        made = Graph(ops.mul_mat(w, x)).compile(scheduler)
        assert np.abs(made(x=X) - X @ W.T).max() < 16
        with pytest.raises(ValueError, match="GET_ROWS of the weight 'w': CPU_REPACK"):
            Graph(ops.get_rows(w, ctx.input(2, "i32", name="ids"))).compile(scheduler)


def test_weights_of_other_contexts(ctx: Context) -> None:
    """What a graph needs of other contexts is looked at as well."""
    w = weight(ctx)
    with Context() as other:
        x = other.input(X.shape, name="x")
        assert Graph(ops.mul_mat(w, x) + 1).compile("CPU")(x=X).shape == (5, 64)
        with pytest.raises(ValueError, match="GET_ROWS of the weight 'w'"):
            Graph(ops.get_rows(w, other.input(2, "i32", name="ids")) + 1).compile("CPU")


def test_capi_neither_reads_it_nor_writes_a_part(ctx: Any) -> None:
    """ggml would call functions that are not there, or write what no product understands."""
    made, x = weight(ctx), ctx.from_numpy(X, name="x")
    w = made.handle
    ctx.allocate("CPU")
    data = np.empty(capi.ggml_nbytes(w), np.uint8)
    cpu = capi.ggml_backend_cpu_init()
    refused = [
        lambda: capi.ggml_backend_tensor_get(w, data, 0),
        lambda: capi.ggml_backend_tensor_get_async(cpu, w, data, 0),
        lambda: capi.ggml_backend_tensor_set(w, data[:18], 0),
        lambda: capi.ggml_backend_tensor_set(w, data[18:], 18),
        lambda: capi.ggml_backend_tensor_set_async(cpu, w, data[:18], 0),
        lambda: capi.ggml_backend_tensor_memset(w, 0, 0, 18),
    ]
    if "ggml_backend_tensor_set_2d" in capi.__coverage__.bound:
        refused += [
            lambda: capi.ggml_backend_tensor_get_2d(w, data, 0, 18, 2, 36, 18),
            lambda: capi.ggml_backend_tensor_set_2d(w, data, 0, 18, 2, 36, 18),
        ]
    for call in refused:
        with pytest.raises(ValueError, match="order of its own"):
            call()
    other = ctx.from_numpy(W, name="other", dtype="q4_0")
    ctx.allocate("CPU")
    with pytest.raises(ValueError, match="can_copy"):
        capi.ggml_backend_tensor_copy(w, other.handle)
    capi.ggml_backend_tensor_copy(other.handle, w)  # whole, and put in order
    with Graph(x @ made.T).compile("CPU") as compiled:
        np.testing.assert_allclose(compiled(), X @ other.numpy().T, rtol=0.05, atol=0.5)
    capi.ggml_backend_free(cpu)


def test_a_weight_that_is_not_put_in_order_is_not_written_by_capi(ctx: Any) -> None:
    kind = CPU.buffer_type(REPACK)
    native = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
    plain = capi.ggml_new_tensor_2d(native, capi.GGML_TYPE_F32, 64, 2)
    buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(native, kind)
    with pytest.raises(ValueError, match="order of its own"):
        capi.ggml_backend_tensor_set(plain, np.zeros((2, 64), np.float32), 0)
    capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(native)
