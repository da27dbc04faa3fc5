"""What moves, repeats, cuts and joins."""

from __future__ import annotations

import _references as ref
import numpy as np

from ggml_cffi.enums import ggml_tri_type as Tri
from ggml_cffi.enums import ggml_type as Type

from .case import (
    ALL,
    EXACT,
    F32,
    Operand,
    case,
    f16,
    f32,
    given,
    ints,
)

# ---- other shapes

case("repeat", lambda a, b: ref.repeat_to(a, b.shape), {"a": f32(2, 3), "b": f32(2, 4, 9)})
case("repeat", lambda a, b: ref.repeat_to(a, b.shape), {"a": f16(2, 3), "b": f16(4, 3)})
case(
    "repeat_4d",
    lambda a, ne0, ne1, ne2, ne3: ref.repeat_to(a, (ne3, ne2, ne1, ne0)),
    {"a": f32(2, 3)},
    ne0=6,
    ne1=2,
    ne2=2,
    ne3=2,
)
case(
    "repeat_back",
    lambda a, b: ref.gradient(lambda x: ref.repeat_to(x, a.shape), b, a),
    {"a": f32(2, 4, 9), "b": f32(2, 3)},
)
for _dim, _other in enumerate(((2, 3, 4, 2), (2, 3, 2, 5), (2, 2, 4, 5), (1, 3, 4, 5))):
    for _dtype in ("f32", "f16", "i32"):
        case(
            "concat",
            lambda a, b, dim: np.concatenate([a, b], 3 - dim),
            {"a": Operand((2, 3, 4, 5), _dtype, 0, 9), "b": Operand(_other, _dtype, 0, 9)},
            dim=_dim,
        )
for _to in (Type.GGML_TYPE_F32, Type.GGML_TYPE_F16, Type.GGML_TYPE_BF16):
    for _dtype in ALL:
        _rtol = EXACT[{0: "f32", 1: "f16", 30: "bf16"}[int(_to)]]
        case("cast", lambda a, type: a, {"a": Operand((3, 5), _dtype)}, rtol=_rtol, type=_to)
for _dtype in ("q8_0", "q4_K"):
    case("cast", lambda a, type: a, {"a": Operand((2, 256), _dtype)}, type=F32)
case("cast", lambda a, type: np.trunc(a), {"a": f32(3, 5)}, type=Type.GGML_TYPE_I32)
case("cpy", lambda a, b: a.reshape(b.shape), {"a": f32(3, 4), "b": f32(2, 6)})
case("cpy", lambda a, b: a, {"a": f32(3, 4), "b": f16(3, 4)})
for _op in ("cont", "reshape"):
    case(f"{_op}_1d", lambda a, ne0: a.reshape(ne0), {"a": f32(4, 6)}, ne0=24)
    case(f"{_op}_2d", lambda a, ne0, ne1: a.reshape(ne1, ne0), {"a": f32(4, 6)}, ne0=3, ne1=8)
    case(
        f"{_op}_3d",
        lambda a, ne0, ne1, ne2: a.reshape(ne2, ne1, ne0),
        {"a": f32(4, 6)},
        ne0=3,
        ne1=2,
        ne2=4,
    )
    case(
        f"{_op}_4d",
        lambda a, ne0, ne1, ne2, ne3: a.reshape(ne3, ne2, ne1, ne0),
        {"a": f32(4, 6)},
        ne0=3,
        ne1=2,
        ne2=2,
        ne3=2,
    )
case("reshape", lambda a, b: a.reshape(b.shape), {"a": f32(3, 4), "b": f32(2, 6)})
case(
    "view_1d",
    lambda a, ne0, offset: a.ravel()[offset // 4 :][:ne0],
    {"a": f32(4, 6)},
    ne0=5,
    offset=8,
)


def _strided(a, ne, nb, offset):
    return np.ndarray(ne, np.float64, a.copy(), offset * 2, [2 * n for n in nb])


case(
    "view_2d",
    lambda a, ne0, ne1, nb1, offset: _strided(a, (ne1, ne0), (nb1, 4), offset),
    {"a": f32(4, 6)},
    ne0=3,
    ne1=2,
    nb1=48,
    offset=4,
)
case(
    "view_3d",
    lambda a, ne0, ne1, ne2, nb1, nb2, offset: _strided(a, (ne2, ne1, ne0), (nb2, nb1, 4), offset),
    {"a": f32(4, 6)},
    ne0=2,
    ne1=3,
    ne2=2,
    nb1=8,
    nb2=48,
    offset=24,
)
case(
    "view_4d",
    lambda a, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset: _strided(
        a, (ne3, ne2, ne1, ne0), (nb3, nb2, nb1, 4), offset
    ),
    {"a": f32(2, 3, 4, 5)},
    ne0=2,
    ne1=3,
    ne2=2,
    ne3=2,
    nb1=20,
    nb2=80,
    nb3=240,
    offset=4,
)
for _axes in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)):
    case(
        "permute",
        lambda a, axis0, axis1, axis2, axis3: np.moveaxis(
            a, (3, 2, 1, 0), (3 - axis0, 3 - axis1, 3 - axis2, 3 - axis3)
        ),
        {"a": f32(2, 3, 4, 5)},
        **{f"axis{i}": n for i, n in enumerate(_axes)},
    )
for _shape in ((3, 5), (2, 3, 4)):
    case("transpose", lambda a: np.swapaxes(a, -1, -2), {"a": f32(*_shape)})
for _dtype in (*ALL, "q8_0", "q4_K"):
    case("get_rows", lambda a, b: a[b], {"a": Operand((6, 256), _dtype), "b": ints(9, below=6)})
case(
    "get_rows",
    lambda a, b: np.take_along_axis(a, b[..., None], -2),
    {"a": f32(2, 6, 5), "b": ints(2, 4, below=6)},
)
case(
    "get_rows_back",
    lambda a, b, c: ref.gradient(lambda x: x[b], c, a),
    {"a": f32(9, 5), "b": ints(9, below=6), "c": f32(6, 5)},
)


def _set_rows(a, b, c):
    result = a.copy()
    result[c] = b
    return result


for _dtype in ("i32", "i64"):
    for _into in ("f32", "f16", "bf16", "q8_0"):
        _to = Operand((6, 32), _into)
        case(
            "set_rows",
            _set_rows,
            {"a": _to, "b": f32(3, 32), "c": given([4, 0, 5], _dtype)},
            atol=0.02 if _into == "q8_0" else 0,
        )
case("diag", lambda a: a * np.eye(a.shape[-1]), {"a": f32(2, 3, 1, 4)})
for _op, _value in (("diag_mask_inf", -np.inf), ("diag_mask_zero", 0)):
    for _past in (0, 2):
        case(
            _op,
            lambda a, n_past, v=_value: ref.diag_mask(a, n_past, v),
            {"a": f32(2, 4, 6)},
            n_past=_past,
        )
for _tri, _keep in (
    (Tri.GGML_TRI_TYPE_LOWER, lambda a: np.tril(a, -1)),
    (Tri.GGML_TRI_TYPE_LOWER_DIAG, np.tril),
    (Tri.GGML_TRI_TYPE_UPPER, lambda a: np.triu(a, 1)),
    (Tri.GGML_TRI_TYPE_UPPER_DIAG, np.triu),
):
    case("tri", lambda a, type, f=_keep: f(a), {"a": f32(2, 5, 5)}, type=_tri)
case(
    "roll",
    lambda a, **shifts: np.roll(a, tuple(shifts.values()), (3, 2, 1, 0)),
    {"a": f32(2, 3, 4, 5)},
    shift0=2,
    shift1=-1,
    shift2=1,
    shift3=1,
)


def _pad(a, mode="constant", **p):
    left = [p.get(f"lp{i}", 0) for i in range(4)]
    right = [p.get(f"rp{i}", p.get(f"p{i}", 0)) for i in range(4)]
    spans = list(zip(left[::-1], right[::-1], strict=True))[4 - a.ndim :]
    return np.pad(a, spans, mode)


_RIGHT = {"p0": 2, "p1": 1, "p2": 1, "p3": 1}
_BOTH = {"lp0": 2, "rp0": 1, "lp1": 0, "rp1": 2, "lp2": 1, "rp2": 0, "lp3": 1, "rp3": 1}
case("pad", _pad, {"a": f32(2, 3, 4, 5)}, **_RIGHT)
case("pad_ext", _pad, {"a": f32(2, 3, 4, 5)}, **_BOTH)
case("pad_circular", lambda a, **p: _pad(a, "wrap", **p), {"a": f32(2, 3, 4, 5)}, **_RIGHT)
case("pad_ext_circular", lambda a, **p: _pad(a, "wrap", **p), {"a": f32(2, 3, 4, 5)}, **_BOTH)
case(
    "pad_reflect_1d",
    lambda a, p0, p1: np.pad(a, ((0, 0), (p0, p1)), "reflect"),
    {"a": f32(3, 6)},
    p0=2,
    p1=3,
)
case(
    "arange",
    lambda start, stop, step: np.arange(start, stop, step),
    {},
    start=1.0,
    stop=9.0,
    step=1.5,
)
for _dim in (6, 7):
    case(
        "timestep_embedding",
        ref.timestep_embedding,
        {"timesteps": f32(5, low=0, high=50)},
        atol=1e-4,
        dim=_dim,
        max_period=10000,
    )
