"""Of one tensor, element by element; of two, the second repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _references as ref
import numpy as np

from ggml_cffi.enums import ggml_glu_op as Glu
from ggml_cffi.enums import ggml_unary_op as Unary

from .case import (
    ALL,
    F32,
    SHAPES,
    Operand,
    case,
    f16,
    f32,
    ints,
)

# ---- of one tensor, element by element

_UNARY: list[tuple[str, Callable[..., Any], tuple[str, ...], float, float, float]] = [
    ("dup", lambda a: a, ALL, -3, 3, 0),
    ("cont", lambda a: a, ALL, -3, 3, 0),
    ("sqr", np.square, ALL, -3, 3, 0),
    ("sqrt", np.sqrt, ALL, 0, 9, 0),
    ("log", np.log, ALL, 0.1, 9, 0),
    ("expm1", np.expm1, ALL, -3, 3, 0),
    ("softplus", ref.softplus, ALL, -30, 30, 0),
    ("sin", np.sin, ALL, -7, 7, 0),
    ("cos", np.cos, ALL, -7, 7, 0),
    ("abs", np.abs, ALL, -3, 3, 0),
    ("sgn", np.sign, ALL, -3, 3, 0),
    ("neg", np.negative, ALL, -3, 3, 0),
    ("step", lambda a: np.heaviside(a, 0), ALL, -3, 3, 0),
    ("tanh", np.tanh, ALL, -3, 3, 0),
    ("elu", ref.elu, ALL, -3, 3, 0),
    ("relu", ref.relu, ALL, -3, 3, 0),
    ("sigmoid", ref.sigmoid, ALL, -9, 9, 0),
    ("gelu", ref.tabled(ref.gelu), ("f32", "f16"), -12, 12, 1e-3),
    ("gelu_erf", ref.gelu_erf, ("f32", "f16"), -4, 4, 0),
    ("gelu_quick", ref.tabled(ref.gelu_quick), ("f32", "f16"), -9, 9, 1e-3),
    ("silu", ref.silu, ("f32", "f16"), -9, 9, 0),
    ("hardswish", lambda a: a * ref.hardsigmoid(a), ALL, -5, 5, 0),
    ("hardsigmoid", ref.hardsigmoid, ALL, -5, 5, 0),
    ("exp", np.exp, ALL, -5, 5, 0),
    ("floor", np.floor, ALL, -9, 9, 0),
    ("ceil", np.ceil, ALL, -9, 9, 0),
    ("round", ref.round_half_away, ALL, -9, 9, 0),
    ("trunc", np.trunc, ALL, -9, 9, 0),
]
for _name, _function, _dtypes, _low, _high, _rtol in _UNARY:
    for _shape in SHAPES:
        for _dtype in _dtypes if _shape == (3, 5) else ("f32",):
            _a = Operand(_shape, _dtype, _low, _high)
            case(_name, lambda a, f=_function: f(a), {"a": _a}, rtol=_rtol)
    if hasattr(Unary, f"GGML_UNARY_OP_{_name.upper()}"):
        _a = Operand((3, 5), "f32", _low, _high)
        for _op in ("unary", "unary_inplace"):
            case(
                _op,
                lambda a, op, f=_function: f(a),
                {"a": _a},
                rtol=_rtol,
                op=Unary[f"GGML_UNARY_OP_{_name.upper()}"],
            )
for _dtype in ALL:
    case(
        "xielu",
        lambda a, **w: ref.xielu(a, **w),
        {"a": Operand((3, 5), _dtype)},
        alpha_n=0.8,
        alpha_p=0.5,
        beta=0.5,
        eps=-1e-6,
    )
for _inplace in (False, True):
    case(
        "leaky_relu",
        lambda a, negative_slope, inplace: np.where(a > 0, a, negative_slope * a),
        {"a": f32(3, 5)},
        negative_slope=0.1,
        inplace=_inplace,
    )
for _shape in SHAPES:
    case("scale", lambda a, s: a * s, {"a": f32(*_shape)}, s=-1.5)
    case("scale_bias", lambda a, s, b: a * s + b, {"a": f32(*_shape)}, s=-1.5, b=0.25)
    case("clamp", lambda a, min, max: a.clip(min, max), {"a": f32(*_shape)}, min=-0.5, max=1.0)
    case("fill", lambda a, c: np.full_like(a, c), {"a": f32(*_shape)}, c=2.5)
    case(
        "silu_back",
        lambda a, b: ref.gradient(ref.silu, b, a),
        {"a": f32(*_shape), "b": f32(*_shape)},
    )
case("clamp", lambda a, min, max: a.clip(min, max), {"a": f16(3, 5)}, min=-0.5, max=1.0)

_GATES = {
    "reglu": ("REGLU", ref.relu, 0),
    "geglu": ("GEGLU", ref.tabled(ref.gelu), 1e-3),
    "swiglu": ("SWIGLU", ref.silu, 0),
    "geglu_erf": ("GEGLU_ERF", ref.gelu_erf, 0),
    "geglu_quick": ("GEGLU_QUICK", ref.tabled(ref.gelu_quick), 1e-3),
}
for _name, (_glu, _function, _rtol) in _GATES.items():
    _op, _halves = Glu[f"GGML_GLU_OP_{_glu}"], ref.gated(_function)
    for _dtype in ("f32", "f16"):
        for _shape in ((6,), (3, 66), (2, 3, 4, 10)):
            _a = {"a": Operand(_shape, _dtype)}
            case(_name, lambda a, f=_halves: f(a), _a, rtol=_rtol)
            case(f"{_name}_swapped", lambda a, f=_halves: f(a, swapped=True), _a, rtol=_rtol)
        _two = {"a": Operand((3, 5), _dtype), "b": Operand((3, 5), _dtype)}
        case(f"{_name}_split", lambda a, b, f=_function: f(a) * b, _two, rtol=_rtol)
        case("glu_split", lambda a, b, op, f=_function: f(a) * b, _two, rtol=_rtol, op=_op)
    for _swapped in (False, True):
        case(
            "glu",
            lambda a, op, swapped, f=_halves: f(a, swapped),
            {"a": f32(3, 8)},
            rtol=_rtol,
            op=_op,
            swapped=_swapped,
        )
case(
    "swiglu_oai",
    lambda a, b, alpha, limit: ref.swiglu_oai(a, b, alpha, limit),
    {"a": f32(3, 9, low=-9, high=9), "b": f32(3, 9, low=-9, high=9)},
    alpha=1.702,
    limit=7.0,
)

# ---- of two tensors, the second repeated

_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
for _name, _function in _BINARY.items():
    for _sa, _sb in (
        ((7,), (7,)),
        ((3, 5), (5,)),
        ((2, 3, 4), (3, 1)),
        ((2, 3, 4, 5), (1, 3, 1, 5)),
    ):
        for _da, _db in (
            ("f32", "f32"),
            ("f16", "f16"),
            ("bf16", "bf16"),
            ("f16", "f32"),
            ("bf16", "f32"),
        ):
            if _da != "f32" and _sa != (2, 3, 4):
                continue
            case(
                _name,
                lambda a, b, f=_function: f(a, b),
                {"a": Operand(_sa, _da), "b": Operand(_sb, _db, 0.5, 2)},
            )
case(
    "add",
    lambda a, b: a + b,
    {"a": Operand((3, 64), "q8_0"), "b": f32(3, 64)},
    rtol=0.01,
    atol=0.04,
)
for _dtype in ("f16", "bf16", "q8_0"):
    case(
        "add_cast",
        lambda a, b, type: a + b,
        {"a": Operand((3, 64), _dtype), "b": f32(3, 64)},
        type=F32,
    )
case(
    "add_id",
    lambda a, b, ids: a + b[ids],
    {"a": f32(4, 2, 5), "b": f32(6, 5), "ids": ints(4, 2, below=6)},
)
for _dtype in ALL:
    case("add1", lambda a, b: a + b, {"a": Operand((2, 3, 5), _dtype), "b": f32(1)})


def _placed(a, b, offset, combine):
    """Sum up or write b into a from the element on that `offset` names; a is contiguous."""
    result = a.copy()
    index = np.unravel_index(offset // 4, a.shape)
    place = tuple(slice(i, i + n) for i, n in zip(index[-b.ndim :], b.shape, strict=True))
    view = result[(*index[: a.ndim - b.ndim], *place)]
    view[...] = combine(view, b)
    return result


def _plus(view, b):
    return view + b


def _instead(_, b):
    return b


_INTO = {"a": f32(4, 5, 6), "b": f32(2, 3, 4)}
_AT = {"nb1": 24, "nb2": 120, "nb3": 480, "offset": 120 + 24 + 8}
for _op in ("acc", "acc_inplace"):
    case(_op, lambda a, b, offset, **_: _placed(a, b, offset, _plus), _INTO, **_AT)
for _op in ("set", "set_inplace"):
    case(_op, lambda a, b, offset, **_: _placed(a, b, offset, _instead), _INTO, **_AT)
for _op in ("set_1d", "set_1d_inplace"):
    case(
        _op,
        lambda a, b, offset: _placed(a, b, offset, _instead),
        {"a": f32(9), "b": f32(4)},
        offset=12,
    )
for _op in ("set_2d", "set_2d_inplace"):
    case(
        _op,
        lambda a, b, offset, nb1: _placed(a, b, offset, _instead),
        {"a": f32(4, 5), "b": f32(2, 3)},
        nb1=20,
        offset=20 + 4,
    )
case(
    "count_equal",
    lambda a, b: np.array((a == b).sum()),
    {"a": ints(3, 50, below=3), "b": ints(3, 50, below=3)},
)
