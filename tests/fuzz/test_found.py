"""What the fuzz has found, each by itself."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import Arena
from _release import PINNED, needs_meta, not_here
from splits import Limit

from ggml_cffi import AbortError, _loader, capi, device, ffi
from ggml_cffi._gen import build_info
from ggml_cffi.meta import MetaDevice, SplitState

F32, I32 = capi.GGML_TYPE_F32, capi.GGML_TYPE_I32


def compute(arena: Arena, ctx: Any, result: Any) -> np.ndarray:
    """The numbers of a result, in memory that the nodes share."""
    capi.ggml_set_output(result)
    graph = arena.graph(ctx, result)
    capi.ggml_backend_graph_compute(arena.backend, graph)
    found = np.empty(list(result.ne)[::-1], np.float32)
    capi.ggml_backend_tensor_get(result, found, 0)
    return found.squeeze()


def leaf(arena: Arena, array: np.ndarray) -> Any:
    tensor = arena.weight(*array.shape[::-1], type=I32 if array.dtype.kind == "i" else F32)
    capi.ggml_backend_tensor_set(tensor, array, 0)
    return tensor


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("kept", [False, True], ids=["shared", "kept"])
def test_add_id_does_not_write_over_the_rows_that_it_adds(arena, kept):
    """ggml's graph allocator takes it for an operation that is done element by element."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 8), np.float32)
    ids = np.array([2, 0, 1], np.int32)
    ctx = arena.context()
    rows = capi.ggml_neg(ctx, leaf(arena, b))
    if kept:
        capi.ggml_set_output(rows)
    result = capi.ggml_add_id(ctx, leaf(arena, a), rows, leaf(arena, ids))
    if kept:
        np.testing.assert_array_equal(compute(arena, ctx, result), a - b[ids])
    else:
        with pytest.raises(ValueError, match=r"ADD_ID 'node_1' would write over NEG 'node_0'"):
            compute(arena, ctx, result)


@pytest.mark.parametrize("kept", [False, True], ids=["shared", "kept"])
def test_soft_max_back_does_not_write_over_the_result_that_it_reads(arena, kept):
    rng = np.random.default_rng(0)
    gradient, y = rng.random((2, 4, 8), np.float32)
    ctx = arena.context()
    result_before = capi.ggml_neg(ctx, leaf(arena, y))
    if kept:
        capi.ggml_set_output(result_before)
    result = capi.ggml_soft_max_ext_back(ctx, leaf(arena, gradient), result_before, 1.0, 0.0)
    if kept:
        wanted = -y * (gradient + (gradient * y).sum(1, keepdims=True))
        np.testing.assert_allclose(compute(arena, ctx, result), wanted, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"SOFT_MAX_BACK .* would write over NEG"):
            compute(arena, ctx, result)


@pytest.mark.parametrize("kept", [False, True], ids=["shared", "kept"])
def test_soft_max_does_not_write_over_the_sinks_that_it_reads(arena, kept):
    ctx = arena.context()
    sinks = capi.ggml_sqr(ctx, leaf(arena, np.float32([2])))
    if kept:
        capi.ggml_set_output(sinks)
    result = capi.ggml_soft_max(ctx, leaf(arena, np.float32([[1]])))
    capi.ggml_soft_max_add_sinks(result, sinks)
    if kept:
        wanted = np.exp(1) / (np.exp(1) + np.exp(4))
        np.testing.assert_allclose(compute(arena, ctx, result), wanted, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"SOFT_MAX .* would write over SQR"):
            compute(arena, ctx, result)


def test_a_result_that_takes_the_place_of_its_first_operand_is_right(arena):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 8), np.float32)
    ids = np.array([2, 0, 1], np.int32)
    ctx = arena.context()
    first = capi.ggml_neg(ctx, leaf(arena, a))
    result = capi.ggml_add_id(ctx, first, leaf(arena, b), leaf(arena, ids))
    np.testing.assert_array_equal(compute(arena, ctx, result), b[ids] - a)
    assert result.data == first.data


@pytest.mark.parametrize("half", [False, True], ids=["conv_1d", "conv_1d_ph"])
def test_conv_1d_of_a_batch_is_refused(arena, half):
    """ggml would give out [out, batch, n] under the shape [batch, out, n]."""
    ctx = arena.context()

    def conv(kernel: Any, x: Any) -> Any:
        if half:
            return capi.ggml_conv_1d_ph(ctx, kernel, x, 1, 1)
        return capi.ggml_conv_1d(ctx, kernel, x, 1, 1, 1)

    kernel, x = np.ones((2, 4, 3), np.float32), numbers(1, 4, 8)
    tensor = leaf(arena, kernel)
    with pytest.raises(ValueError, match=r"requires b->ne\[2\] == 1 .*b = f32\[8,4,2,1\]"):
        conv(tensor, arena.weight(8, 4, 2))
    padded = np.pad(x[0].sum(0), 1)
    wanted = padded[:-2] + padded[1:-1] + padded[2:]
    found = compute(arena, ctx, conv(tensor, leaf(arena, x)))
    np.testing.assert_allclose(found, [wanted, wanted], rtol=0, atol=2e-2)


# ---- capped attention of many queries without a mask

CAP, SCALE = 2.0, 0.25


def attention(arena: Arena, n: int, keys: int, kind: int, masked: bool, cap: float) -> Any:
    """The result of flash_attn_ext of a head, and what it has to be."""
    q, k, v = (numbers(rows, 32) for rows in (n, keys, keys))
    ctx = arena.context()
    tensors = [leaf(arena, q)]
    for array in (k, v):
        tensors.append(arena.weight(32, keys, type=kind))
        dtype = {F32: np.float32, capi.GGML_TYPE_F16: np.float16}.get(kind)
        if dtype is None:
            array = np.uint32(array.view(np.uint32) >> 16).astype(np.uint16)
        else:
            array = array.astype(dtype)
        capi.ggml_backend_tensor_set(tensors[-1], array, 0)
    mask = None
    if masked:
        mask = arena.weight(keys, n, type=capi.GGML_TYPE_F16)
        capi.ggml_backend_tensor_set(mask, np.zeros((n, keys), np.float16), 0)
    scores = SCALE * (q @ k.T)
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = weights / weights.sum(1, keepdims=True) @ v
    return ctx, capi.ggml_flash_attn_ext(ctx, *tensors, mask, SCALE, 0.0, cap), wanted


@pytest.mark.parametrize("kind", [F32, capi.GGML_TYPE_F16], ids=["f32", "f16"])
@pytest.mark.parametrize(("n", "keys"), [(64, 1), (100, 65), (200, 130)])
def test_capped_attention_weighs_no_keys_that_are_not_there(arena, n, keys, kind):
    """The CPU's kernel takes 64 keys at a time, and lets those that the last 64 lack take part."""
    ctx, result, _ = attention(arena, n, keys, kind, False, CAP)
    with pytest.raises(ValueError, match=r"FLASH_ATTN_EXT .* not there.* a mask of zeros makes it"):
        compute(arena, ctx, result)
    ctx, result, wanted = attention(arena, n, keys, kind, True, CAP)
    np.testing.assert_allclose(compute(arena, ctx, result), wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("n", "keys", "kind", "cap"),
    [
        (63, 65, F32, CAP),
        (100, 128, F32, CAP),
        (100, 65, capi.GGML_TYPE_BF16, CAP),
        (100, 65, F32, 0.0),
    ],
    ids=["few queries", "full tiles", "bf16", "no cap"],
)
def test_capped_attention_that_is_right(arena, n, keys, kind, cap):
    ctx, result, wanted = attention(arena, n, keys, kind, False, cap)
    np.testing.assert_allclose(compute(arena, ctx, result), wanted, rtol=0, atol=3e-2)


def test_ggml_still_weighs_keys_that_are_not_there(arena):
    """Once it does not, `check::weighs_missing_keys` can go."""
    ctx, result, wanted = attention(arena, 64, 65, F32, False, CAP)
    graph = arena.graph(ctx, result)
    base = ctypes.CDLL(str(_loader.library_files(build_info)["ggml-base"]))
    pointers = [ctypes.c_void_p(int(ffi.cast("uintptr_t", p))) for p in (arena.backend, graph)]
    assert base.ggml_backend_graph_compute(*pointers) == capi.GGML_STATUS_SUCCESS
    found = np.empty((64, 32), np.float32)
    capi.ggml_backend_tensor_get(result, found, 0)
    if np.abs(found - wanted).max() < 1e-2:
        if PINNED:
            pytest.fail("ggml has mended it: the refusal can go")
        not_here("keys that are not there")


# ---- what a meta device computes wrongly without an error, see docs/limits.md


def on(target: Any, leaves: list[np.ndarray], build: Any) -> np.ndarray:
    """Compute on a device and read the result."""
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    ctx_graph = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    backend = target.init_backend(1)
    with contextlib.ExitStack() as closing:
        closing.callback(capi.ggml_free, ctx)
        closing.callback(capi.ggml_free, ctx_graph)
        closing.callback(backend.close)
        tensors = []
        for i, array in enumerate(leaves):
            kind = {"i4": I32, "f4": F32, "f2": capi.GGML_TYPE_F16}[array.dtype.str[1:]]
            tensors.append(capi.ggml_new_tensor(ctx, kind, list(array.shape[::-1])))
            capi.ggml_set_name(tensors[-1], str(i))
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
        closing.callback(capi.ggml_backend_buffer_free, buffer)
        capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        for tensor, array in zip(tensors, leaves, strict=True):
            capi.ggml_backend_tensor_set(tensor, array, 0)
        result = build(ctx_graph, *tensors)
        graph = capi.ggml_new_graph(ctx_graph)
        capi.ggml_build_forward_expand(graph, result)
        buft = capi.ggml_backend_get_default_buffer_type(backend.handle)
        galloc = capi.ggml_gallocr_new(buft)
        closing.callback(capi.ggml_gallocr_free, galloc)
        capi.ggml_gallocr_alloc_graph(galloc, graph)
        capi.ggml_backend_buffer_clear(result.buffer, 0)  # of what was right before
        capi.ggml_backend_graph_compute(backend.handle, graph)
        found = np.empty(list(result.ne)[::-1], np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
        return found


MIRRORED = SplitState.mirrored()
POSITIONS = np.arange(0, 56, 7, np.int32)
CAUSAL = np.triu(np.full((8, 8), -np.inf, np.float16), 1)

#: The leaves, how they are cut, what is computed; and a cut with which it is right.
WRONG = {
    Limit.POSITIONS: (
        [numbers(8, 4, 8), POSITIONS],
        [SplitState.split(2, [4, 4]), MIRRORED],
        lambda ctx, a, positions: capi.ggml_rope(ctx, a, positions, 8, 0),
        [SplitState.split(1, [2, 2]), MIRRORED],
    ),
    Limit.CONCAT: (
        [numbers(1, 4, 3), numbers(8, 4, 3)],
        [MIRRORED, SplitState.split(1, [2, 2])],
        lambda ctx, a, b: capi.ggml_concat(ctx, a, b, 2),
        [SplitState.split(1, [2, 2]), SplitState.split(1, [2, 2])],
    ),
    Limit.GROUP_NORM: (
        [numbers(4, 6, 8)],
        [SplitState.split(1, [3, 3])],
        lambda ctx, a: capi.ggml_group_norm(ctx, a, 2, 1e-5),
        [MIRRORED],
    ),
    Limit.ACROSS: (
        [numbers(3, 8, 16)],
        [SplitState.split(0, [8, 8])],
        lambda ctx, a: capi.ggml_neg(ctx, capi.ggml_reshape_3d(ctx, a, 12, 2, 16)),
        [MIRRORED],
    ),
    Limit.JOINED: (  # the reshape makes segments, which a product forgets: it is read by device
        [numbers(3, 4, 8), numbers(5, 8)],
        [SplitState.split(1, [2, 2]), MIRRORED],
        lambda ctx, a, x: capi.ggml_mul_mat(ctx, capi.ggml_reshape_2d(ctx, a, 8, 12), x),
        [MIRRORED, MIRRORED],
    ),
    Limit.ADD_ID: (  # the second device takes the first of its rows for the first of all
        [numbers(1, 4, 8), numbers(4, 8), np.array([[0, 1, 1, 0]], np.int32)],
        [SplitState.split(1, [2, 2]), SplitState.split(1, [2, 2]), MIRRORED],
        capi.ggml_add_id,
        [MIRRORED, MIRRORED, MIRRORED],
    ),
    Limit.ADD_ID_TO: (  # the second device takes the first ids for those of its rows
        [numbers(2, 4, 8), numbers(4, 8), np.array([[0, 1, 1, 0], [2, 3, 3, 2]], np.int32)],
        [SplitState.split(2, [1, 1]), MIRRORED, MIRRORED],
        capi.ggml_add_id,
        [SplitState.split(0, [4, 4]), SplitState.split(0, [4, 4]), MIRRORED],
    ),
    Limit.MASK: (  # each device takes its part of the mask for all of it
        [numbers(2, 2, 8), numbers(2, 8, 8), numbers(2, 8, 8), CAUSAL],
        [*[SplitState.split(2, [1, 1])] * 3, SplitState.split(0, [4, 4])],
        lambda ctx, *qkv_mask: capi.ggml_flash_attn_ext(ctx, *qkv_mask, 0.3, 0.0, 0.0),
        [*[SplitState.split(2, [1, 1])] * 3, MIRRORED],
    ),
}


@needs_meta
@pytest.mark.parametrize("what", WRONG, ids=lambda what: what.value)
def test_a_graph_that_a_meta_device_gets_wrong(what):
    """If this fails, ggml has been mended: it goes from `Limit` and from docs/limits.md."""
    leaves, states, build, mended = WRONG[what]

    def spread(cuts: list[SplitState]) -> np.ndarray:
        with MetaDevice(["CPU", "CPU"], lambda info, n: cuts[int(info.name)], "raise") as meta:
            return on(meta, leaves, build)

    wanted = on(device("CPU"), leaves, build)
    assert np.abs(spread(states) - wanted).max() > 1e-2
    np.testing.assert_allclose(spread(mended), wanted, rtol=0, atol=1e-5)


@needs_meta
def test_what_a_device_without_a_share_leaves_out():
    """All before a sum that is put off. If this fails, ggml has been mended, and the row can go."""
    leaves = [numbers(4, 8), numbers(3, 8), numbers(3, 4)]

    def build(ctx: Any, w: Any, x: Any, m: Any) -> Any:
        product = capi.ggml_mul_mat(ctx, w, x)
        between = capi.ggml_sqr(ctx, m)
        return capi.ggml_add(ctx, capi.ggml_mul(ctx, product, between), between)

    def spread(shares: list[int]) -> np.ndarray:
        cuts = [SplitState.split(0, shares), SplitState.split(0, shares), MIRRORED]
        with MetaDevice(["CPU", "CPU"], lambda info, n: cuts[int(info.name)], "raise") as meta:
            return on(meta, leaves, build)

    wanted = on(device("CPU"), leaves, build)
    np.testing.assert_allclose(spread([4, 4]), wanted, rtol=0, atol=1e-5)
    assert not np.allclose(spread([0, 8]), wanted, rtol=0, atol=1e-2)


@needs_meta
@pytest.mark.parametrize(
    ("leaves", "cuts", "build", "told"),
    [
        (  # it looks at the first operand only
            [np.arange(8, dtype=np.int32).reshape(4, 2)] * 2,
            [MIRRORED, SplitState.split(1, [2, 2])],
            capi.ggml_count_equal,
            r"ggml_are_same_shape\(src0, src1\)",
        ),
        (  # nor at the type of a result
            [numbers(2, 32)],
            [SplitState.split(0, [16, 16])],
            lambda ctx, a: capi.ggml_cast(ctx, a, capi.GGML_TYPE_Q4_0),
            "not implemented",
        ),
    ],
    ids=[Limit.HELD_DIFFERENTLY.value, Limit.BLOCKS.value],
)
def test_a_kernel_that_aborts_on_a_meta_device(leaves, cuts, build, told):
    """With several threads the process would end."""
    with (
        MetaDevice(["CPU", "CPU"], lambda info, n: cuts[int(info.name)], "raise") as meta,
        pytest.raises(AbortError, match=told),
    ):
        on(meta, leaves, build)


def test_the_limits_of_a_meta_device_are_said():
    """Each by the name that it has here, with the test that shows it."""
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    said = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert {limit.value for limit in Limit} <= set(said)
    for limit in WRONG:
        assert test_a_graph_that_a_meta_device_gets_wrong.__name__ in said[limit.value]
    for limit in (Limit.HELD_DIFFERENTLY, Limit.BLOCKS):
        assert test_a_kernel_that_aborts_on_a_meta_device.__name__ in said[limit.value]
