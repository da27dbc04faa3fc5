"""What the fuzz has found, each by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from _compute import Arena

from ggml_cffi import capi

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


def test_a_result_that_takes_the_place_of_its_first_operand_is_right(arena):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 8), np.float32)
    ids = np.array([2, 0, 1], np.int32)
    ctx = arena.context()
    first = capi.ggml_neg(ctx, leaf(arena, a))
    result = capi.ggml_add_id(ctx, first, leaf(arena, b), leaf(arena, ids))
    np.testing.assert_array_equal(compute(arena, ctx, result), b[ids] - a)
    assert result.data == first.data
