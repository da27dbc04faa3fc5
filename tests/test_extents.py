"""Extents that ggml computes: what does not fit its numbers is refused where it is built.

ggml does not look, and a kernel would write far behind a buffer of the few bytes that are left of
the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena
from _release import require

from ggml_cffi import AbortError, capi

G = 1 << 30
MAX = capi.GGML_OP_POOL_MAX
NEAREST = capi.GGML_SCALE_MODE_NEAREST
Tensor = Callable[..., Any]


@pytest.fixture
def tensor(arena: Arena) -> Tensor:
    ctx = arena.context()
    return lambda *ne: arena.tensor(*ne, ctx=ctx)


def kernel_3d(c: Any, t: Tensor, p: int) -> Any:
    return capi.ggml_im2col_3d(c, t(2, 2, 2, 8), t(1, 1, 1, 8), 8, 1, 1, 1, p, p, 1, 1, 1, 1, F32)


#: Bytes, or extents, that 64 bits, or 32, have no room for.
TOO_LARGE: dict[str, Callable[[Any, Tensor], Any]] = {
    "im2col": lambda c, t: capi.ggml_im2col(
        c, t(2, 2, 16), t(1, 1, 16), 1, 1, G // 2, G // 2, 1, 1, True, F32
    ),
    "im2col:twice the padding": lambda c, t: capi.ggml_im2col(
        c, t(2, 1), t(8, 1), 1, 0, 2 * G - 1, 0, 1, 0, False, F32
    ),
    "im2col:dilated": lambda c, t: capi.ggml_im2col(
        c, t(1 << 40), t(8, 1), 1, 0, 0, 0, -(1 << 31), 0, False, F32
    ),
    "im2col_3d": lambda c, t: kernel_3d(c, t, G // 2),
    "im2col_3d:twice the padding": lambda c, t: kernel_3d(c, t, G),
    "im2col_3d:planes": lambda c, t: capi.ggml_im2col_3d(
        c, t(1), t(1, 1, 1, 1 << 40), 1, 1, 1, 1, 0, 0, G // 2, 1, 1, 1, F32
    ),
    "conv_1d": lambda c, t: capi.ggml_conv_1d(c, t(2, 1, 1), t(8, 1, 1), 1, 2 * G - 1, 1),
    "conv_1d_dw": lambda c, t: capi.ggml_conv_1d_dw(c, t(2, 1, 1), t(8, 1, 1), 1, 2 * G - 1, 1),
    "conv_2d": lambda c, t: capi.ggml_conv_2d(
        c, t(2, 2, 16), t(1, 1, 16), 1, 1, G // 2, G // 2, 1, 1
    ),
    "conv_2d_dw": lambda c, t: capi.ggml_conv_2d_dw(
        c, t(2, 2, 1, 4), t(1, 1, 4), 1, 1, G // 2, G // 2, 1, 1
    ),
    "conv_2d_direct": lambda c, t: capi.ggml_conv_2d_direct(
        c, t(2, 2, 1, 4), t(1, 1), 1, 1, G // 2, G // 2, 1, 1
    ),
    "conv_2d_direct:twice the padding": lambda c, t: capi.ggml_conv_2d_direct(
        c, t(2, 2, 1, 4), t(1, 1), 1, 1, G, G, 1, 1
    ),
    "conv_2d_dw_direct": lambda c, t: capi.ggml_conv_2d_dw_direct(
        c, t(2, 2, 1, 4), t(1, 1, 4), 1, 1, G // 2, G // 2, 1, 1
    ),
    "conv_3d": lambda c, t: capi.ggml_conv_3d(
        c, t(2, 2, 2, 8), t(1, 1, 1, 8), 8, 1, 1, 1, G // 2, G // 2, 1, 1, 1, 1
    ),
    "conv_3d_direct": lambda c, t: capi.ggml_conv_3d_direct(
        c, t(2, 2, 2, 4), t(1, 1, 1), 1, 1, 1, G // 2, G // 2, G // 2, 1, 1, 1, 1, 1, 4
    ),
    "conv_transpose_1d": lambda c, t: capi.ggml_conv_transpose_1d(
        c, t(1), t(1 << 40), 2 * G - 1, 0, 1
    ),
    "conv_transpose_2d_p0": lambda c, t: capi.ggml_conv_transpose_2d_p0(c, t(2, 2), t(3, 3), G - 1),
    "col2im_1d": lambda c, t: capi.ggml_col2im_1d(c, t(4, 2), 1, 1, G),
    "upscale": lambda c, t: capi.ggml_upscale(c, t(2, 2), G, NEAREST),
    "upscale:bilinear": lambda c, t: capi.ggml_upscale(
        c, t(1, 1, 16), G // 2, capi.GGML_SCALE_MODE_BILINEAR
    ),
    "upscale:of what is wide": lambda c, t: capi.ggml_upscale(c, t(1 << 40), G, NEAREST),
    "pad": lambda c, t: capi.ggml_pad(c, t(2, 2), 2 * G - 1, 2 * G - 1, 0, 0),
    "pad_ext": lambda c, t: capi.ggml_pad_ext(c, t(2), G, G, G, G, 0, 0, 0, 0),
    "repeat_4d": lambda c, t: capi.ggml_repeat_4d(c, t(1), 1 << 31, 1 << 31, 1, 1),
    "pool_2d": lambda c, t: capi.ggml_pool_2d(
        c, t(1, 1, 1 << 40), MAX, 1, 1, 1, 1, 1 << 19, 1 << 19
    ),
    "out_prod": lambda c, t: capi.ggml_out_prod(
        c, t(1 << 40), t(1 << 40)
    ),
    "mul_mat": lambda c, t: capi.ggml_mul_mat(
        c, t(1, 1 << 40), t(1, 1 << 40)
    ),
    "get_rows": lambda c, t: capi.ggml_get_rows(
        c, t(1 << 40), capi.ggml_new_tensor_1d(c, capi.GGML_TYPE_I32, 1 << 40)
    ),
    "win_part": lambda c, t: capi.ggml_win_part(c, t(1, 1 << 30, 1 << 30), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_extents_that_do_not_fit(tensor: Tensor, arena: Arena, name: str) -> None:
    function = f"ggml_{name.partition(':')[0]}"
    require(function)
    ctx = arena.context()
    with pytest.raises((ValueError, AbortError), match=f"{function}: "):
        TOO_LARGE[name](ctx, tensor)


def test_a_refused_result_leaves_its_context_in_order(arena: Arena) -> None:
    """It stands in the context, but has no extents and no operands: nothing is allocated for it."""
    ctx = arena.context()
    a, kernel = arena.tensor(4, 4, 1, 1, ctx=ctx), arena.tensor(2, 2, 1, 8, ctx=ctx)
    with pytest.raises(ValueError, match=r"CONV_2D of f32\[1073741827,1073741827,8,1\]"):
        capi.ggml_conv_2d_direct(ctx, kernel, a, 1, 1, G // 2, G // 2, 1, 1)
    buffer = arena.allocate(ctx)
    assert capi.ggml_backend_buffer_get_size(buffer) < 4096
    names = []
    made = capi.ggml_get_first_tensor(ctx)
    while made:
        names.append((capi.ggml_nelements(made), made.op, bool(made.src[0])))
        made = capi.ggml_get_next_tensor(ctx, made)
    assert names == [(16, 0, False), (32, 0, False), (0, 0, False)]


def test_what_was_made_on_the_way_to_a_refused_result(arena: Arena) -> None:
    """A convolution is several operations: none of them is left without room for its numbers."""
    ctx = arena.context()
    kernel, a = arena.tensor(2, 2, 16, 1, ctx=ctx), arena.tensor(1, 1, 16, 1, ctx=ctx)
    with pytest.raises(ValueError, match=r"ggml_conv_2d: requires .*: IM2COL of f16\[64,"):
        capi.ggml_conv_2d(ctx, kernel, a, 1, 1, G // 2, G // 2, 1, 1)
    made = capi.ggml_get_first_tensor(ctx)
    total = 0
    while made:
        total += capi.ggml_nbytes(made)
        made = capi.ggml_get_next_tensor(ctx, made)
    assert total == (64 + 16) * 4 + 64 * 4  # and a view of the kernel


@pytest.mark.parametrize(("n", "k", "stride", "padding"), [(16, 3, 2, 1), ((1 << 24) + 2, 2, 2, 0)])
def test_pooling_has_as_many_results_as_there_are_windows(
    arena: Arena, n: int, k: int, stride: int, padding: int
) -> None:
    ctx = arena.context()
    a = capi.ggml_new_tensor_1d(ctx, F32, n)
    made = capi.ggml_pool_1d(ctx, a, MAX, k, stride, padding)
    assert made.ne[0] == (n + 2 * padding - k) // stride + 1


@pytest.mark.parametrize("n", [(1 << 24) + 1, (1 << 24) + 3])
def test_pooling_that_ggml_would_count_in_floats(arena: Arena, n: int) -> None:
    """ggml computes their number with 24 bits: one too few, or one too many that is garbage."""
    ctx = arena.context()
    a = capi.ggml_new_tensor_1d(ctx, F32, n)
    with pytest.raises(ValueError, match="ggml_pool_1d: requires pool_output"):
        capi.ggml_pool_1d(ctx, a, MAX, 1, 1, 0)


def test_a_large_padding_that_fits(arena: Arena) -> None:
    """What fits is computed: a convolution of almost nothing but padding."""
    ctx = arena.context()
    kernel, a = arena.tensor(2, 1, ctx=ctx), arena.tensor(8, 1, ctx=ctx)
    made = capi.ggml_im2col(ctx, kernel, a, 1 << 16, 0, 1 << 20, 0, 1, 0, False, F32)
    graph = arena.graph(ctx, made)
    capi.ggml_backend_tensor_set(a, np.arange(1, 9, dtype=np.float32), 0)
    capi.ggml_backend_tensor_set(kernel, np.ones(2, np.float32), 0)
    capi.ggml_backend_graph_compute(arena.backend, graph)
    found = np.empty((33, 2), np.float32)
    capi.ggml_backend_tensor_get(made, found, 0)
    wanted = np.zeros((33, 2), np.float32)
    wanted[16] = [1, 2]
    np.testing.assert_array_equal(found, wanted)
