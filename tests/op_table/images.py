"""Convolutions, pools, images."""

from __future__ import annotations

import _references as ref
import numpy as np

from ggml_cffi.enums import ggml_op_pool as Pool
from ggml_cffi.enums import ggml_scale_flag as ScaleFlag
from ggml_cffi.enums import ggml_scale_mode as Scale

from .case import (
    EXACT,
    F16,
    F32,
    Operand,
    case,
    f16,
    f32,
)

# ---- convolutions, pools, images

_1D = {"s0": 2, "p0": 1, "d0": 2}
_2D = {"s0": 2, "s1": 1, "p0": 1, "p1": 2, "d0": 1, "d1": 2}
_3D = {"s0": 2, "s1": 1, "s2": 1, "p0": 1, "p1": 0, "p2": 1, "d0": 1, "d1": 1, "d2": 2}
_HALF = EXACT["f16"] * 4  # images go through half precision


def _order(words):
    """Stride, pad and dilation in NumPy's order of axes."""
    n = sum(name.startswith("s") for name in words)
    return tuple([words[f"{kind}{i}"] for i in reversed(range(n))] for kind in "spd")


for _dtype in ("f16", "f32"):
    _kernel = Operand((5, 3, 3), _dtype)
    _to = F16 if _dtype == "f16" else F32
    case(
        "im2col",
        lambda a, b, is_2D, dst_type, s0, p0, d0, **_: ref.im2col(b, a.shape[2:], [s0], [p0], [d0]),
        {"a": _kernel, "b": f32(2, 3, 9)},
        s0=2,
        s1=0,
        p0=1,
        p1=0,
        d0=2,
        d1=0,
        is_2D=False,
        dst_type=_to,
    )
    case(
        "im2col",
        lambda a, b, is_2D, dst_type, **w: ref.im2col(b, a.shape[2:], *_order(w)),
        {"a": Operand((5, 3, 2, 3), _dtype), "b": f32(2, 3, 6, 7)},
        **_2D,
        is_2D=True,
        dst_type=_to,
    )
    case(
        "im2col_3d",
        lambda a, b, IC, dst_type, **w: ref.im2col(
            b.reshape(-1, IC, *b.shape[1:]), a.shape[1:], *_order(w)
        ).reshape(
            -1, *ref.im2col(b.reshape(-1, IC, *b.shape[1:]), a.shape[1:], *_order(w)).shape[2:]
        ),
        {"a": Operand((10, 2, 3, 2), _dtype), "b": f32(4, 5, 6, 7)},
        IC=2,
        **_3D,
        dst_type=_to,
    )
case(
    "im2col_back",
    lambda a, b, ne, is_2D, **w: ref.gradient(
        lambda x: ref.im2col(x, b.shape[2:], *_order(w)), np.zeros(ne[::-1]), a
    ),
    {"a": f32(2, 4, 4, 3 * 2 * 3), "b": f32(5, 3, 2, 3)},
    ne=[7, 2, 3, 2],
    **_2D,
    is_2D=True,
    atol=1e-4,
)
for _dtype in ("f32", "f16", "bf16"):
    case("col2im_1d", ref.col2im_1d, {"a": Operand((5, 12), _dtype)}, s0=2, oc=3, p0=1)
case(
    "conv_1d",
    lambda a, b, **w: ref.conv(b, a, *_order(w)),
    {"a": f16(5, 3, 3), "b": f32(1, 3, 9)},
    atol=_HALF,
    **_1D,
)
case(
    "conv_1d_ph",
    lambda a, b, s, d: ref.conv(b, a, [s], [a.shape[-1] // 2], [d]),
    {"a": f16(5, 3, 3), "b": f32(1, 3, 9)},
    atol=_HALF,
    s=1,
    d=1,
)
case(
    "conv_1d_dw",
    lambda a, b, **w: ref.conv_depthwise(b, a[:, 0], *_order(w)),
    {"a": f16(4, 1, 3), "b": f32(1, 4, 9)},
    atol=_HALF,
    **_1D,
)
case(
    "conv_1d_dw_ph",
    lambda a, b, s0, d0: ref.conv_depthwise(b, a[:, 0], [s0], [a.shape[-1] // 2], [d0]),
    {"a": f16(4, 1, 3), "b": f32(1, 4, 9)},
    atol=_HALF,
    s0=1,
    d0=1,
)
for _dtype in ("f16", "f32"):
    case(
        "conv_transpose_1d",
        lambda a, b, s0, p0, d0: ref.conv_transpose(b, a, s0),
        {"a": Operand((3, 5, 4), _dtype), "b": f32(3, 6)},
        atol=_HALF,
        s0=2,
        p0=0,
        d0=1,
    )
case(
    "conv_transpose_2d_p0",
    lambda a, b, stride: ref.conv_transpose(b, a, stride),
    {"a": f16(3, 5, 3, 4), "b": f32(3, 4, 6)},
    atol=_HALF,
    stride=2,
)
_IMAGE = {"a": f16(5, 3, 2, 3), "b": f32(2, 3, 6, 9)}
case("conv_2d", lambda a, b, **w: ref.conv(b, a, *_order(w)), _IMAGE, atol=_HALF * 2, **_2D)
case(
    "conv_2d_sk_p0",
    lambda a, b: ref.conv(b, a, a.shape[2:], [0, 0], [1, 1]),
    _IMAGE,
    atol=_HALF * 2,
)
case(
    "conv_2d_s1_ph",
    lambda a, b: ref.conv(b, a, [1, 1], [n // 2 for n in a.shape[2:]], [1, 1]),
    {"a": f16(5, 3, 3, 3), "b": f32(2, 3, 6, 9)},
    atol=_HALF * 2,
)
for _dtype in ("f16", "f32"):
    case(
        "conv_2d_direct",
        lambda a, b, **w: ref.conv(b, a, *_order(w)),
        {"a": Operand((5, 3, 2, 3), _dtype), "b": f32(2, 3, 6, 9)},
        atol=_HALF * 2 if _dtype == "f16" else 1e-5,
        **_2D,
    )
case(
    "conv_2d_dw",
    lambda a, b, **w: ref.conv_depthwise(b, a[:, 0], *_order(w)),
    {"a": f16(3, 1, 2, 3), "b": f32(2, 3, 6, 9)},
    atol=_HALF,
    **_2D,
)
case(
    "conv_2d_dw_direct",
    lambda a, b, stride0, stride1, pad0, pad1, dilation0, dilation1: ref.conv_depthwise(
        b, a[:, 0], [stride1, stride0], [pad1, pad0], [dilation1, dilation0]
    ),
    {"a": f32(3, 1, 2, 3), "b": f32(2, 3, 6, 9)},
    stride0=2,
    stride1=1,
    pad0=1,
    pad1=2,
    dilation0=1,
    dilation1=2,
)


def _conv_3d(a, b, channels, words):
    x, w = b.reshape(-1, channels, *b.shape[1:]), a.reshape(-1, channels, *a.shape[1:])
    found = ref.conv(x, w, *_order(words))
    return found.reshape(-1, *found.shape[2:])


case(
    "conv_3d",
    lambda a, b, IC, **w: _conv_3d(a, b, IC, w),
    {"a": f16(10, 2, 3, 2), "b": f32(4, 5, 6, 7)},
    atol=_HALF * 2,
    IC=2,
    **_3D,
)
for _dtype in ("f16", "f32"):
    case(
        "conv_3d_direct",
        lambda a, b, n_channels, n_batch, n_channels_out, **w: _conv_3d(a, b, n_channels, w),
        {"a": Operand((10, 2, 3, 2), _dtype), "b": f32(4, 5, 6, 7)},
        atol=_HALF * 2,
        **_3D,
        n_channels=2,
        n_batch=2,
        n_channels_out=5,
    )
for _pool in (Pool.GGML_OP_POOL_MAX, Pool.GGML_OP_POOL_AVG):
    _largest = _pool == Pool.GGML_OP_POOL_MAX
    case(
        "pool_1d",
        lambda a, op, k0, s0, p0, m=_largest: ref.pool(a, [k0], [s0], [p0], m, count_padding=False),
        {"a": f32(2, 3, 9)},
        op=_pool,
        k0=3,
        s0=2,
        p0=1,
    )
    _words = {"op": _pool, "k0": 3, "k1": 2, "s0": 2, "s1": 1, "p0": 1.0, "p1": 1.0}
    _function = lambda a, op, k0, k1, s0, s1, p0, p1, m=_largest: ref.pool(  # noqa: E731
        a, [k1, k0], [s1, s0], [int(p1), int(p0)], m, count_padding=True
    )
    case("pool_2d", _function, {"a": f32(2, 3, 6, 9)}, **_words)
    case("pool_2d", _function, {"a": f16(2, 3, 6, 9)}, **_words)
    case(
        "pool_2d_back",
        lambda a, af, f=_function, **w: ref.gradient(lambda x: f(x, **w), af, a),
        {"a": f32(1, 2, 5, 5), "af": f32(1, 2, 6, 9)},
        **_words | {"p0": 1.0, "p1": 0.0},
    )
for _mode, _name in (
    (Scale.GGML_SCALE_MODE_NEAREST, "nearest"),
    (Scale.GGML_SCALE_MODE_BILINEAR, "bilinear"),
    (Scale.GGML_SCALE_MODE_BICUBIC, "bicubic"),
):
    case(
        "upscale",
        lambda a, scale_factor, mode, n=_name: ref.resize(
            a, (*a.shape[:2], *(scale_factor * m for m in a.shape[2:])), n
        ),
        {"a": f32(2, 3, 4, 5)},
        scale_factor=3,
        mode=_mode,
    )
    _sizes = {"ne0": 7, "ne1": 6, "ne2": 3, "ne3": 2}
    case(
        "upscale_ext",
        lambda a, mode, n=_name, **ne: ref.resize(a, tuple(ne.values())[::-1], n),
        {"a": f32(2, 3, 4, 5)},
        **_sizes,
        mode=_mode,
    )
    case(
        "interpolate",
        lambda a, mode, n=_name, **ne: ref.resize(a, tuple(ne.values())[::-1], n),
        {"a": f32(2, 3, 4, 5)},
        **_sizes,
        mode=_mode,
    )
_BILINEAR = int(Scale.GGML_SCALE_MODE_BILINEAR)
case(
    "interpolate",
    lambda a, mode, **ne: ref.resize(a, tuple(ne.values())[::-1], "bilinear", align_corners=True),
    {"a": f32(2, 3, 4, 5)},
    **_sizes,
    mode=_BILINEAR | ScaleFlag.GGML_SCALE_FLAG_ALIGN_CORNERS,
)
case(
    "interpolate",
    lambda a, mode, **ne: ref.resize(a, tuple(ne.values())[::-1], "bilinear", antialias=True),
    {"a": f32(2, 3, 9, 12)},
    **_sizes,
    mode=_BILINEAR | ScaleFlag.GGML_SCALE_FLAG_ANTIALIAS,
)
case("win_part", ref.win_part, {"a": f32(5, 7, 4)}, w=3)
case("win_unpart", ref.win_unpart, {"a": f32(6, 3, 3, 4)}, w0=7, h0=5, w=3)
case("get_rel_pos", ref.get_rel_pos, {"a": f16(7, 5)}, qh=4, kh=4)
for _op in ("add_rel_pos", "add_rel_pos_inplace"):
    case(_op, ref.add_rel_pos, {"a": f32(2, 12, 9), "pw": f32(2, 4, 3, 3), "ph": f32(2, 4, 3, 3)})
