"""Along axes: sums, orders, norms."""

from __future__ import annotations

import _references as ref
import numpy as np

from ggml_cffi.enums import ggml_sort_order as Order

from .case import (
    Operand,
    case,
    f16,
    f32,
    given,
)

# ---- along axes

for _shape in ((9,), (3, 70), (2, 3, 4, 5)):
    _a = {"a": f32(*_shape)}
    case("sum", lambda a: a.sum(), _a, atol=1e-4)
    case("sum_rows", lambda a: a.sum(-1, keepdims=True), _a, atol=1e-4)
    case("mean", lambda a: a.mean(-1, keepdims=True), _a)
    case("cumsum", lambda a: a.cumsum(-1), _a, atol=1e-4)
    case("soft_max", ref.soft_max, _a)
    case("norm", ref.norm, _a, eps=1e-5)
    case("rms_norm", ref.rms_norm, _a, eps=1e-5)
    case("l2_norm", ref.l2_norm, _a, eps=1e-5)
    case(
        "rms_norm_back",
        lambda a, b, eps: ref.gradient(lambda x: ref.rms_norm(x, eps), b, a),
        {"a": f32(*_shape), "b": f32(*_shape)},
        atol=1e-4,
        eps=1e-5,
    )
    for _order in (Order.GGML_SORT_ORDER_ASC, Order.GGML_SORT_ORDER_DESC):
        case("argsort", lambda a, order: np.argsort(a if order == 0 else -a), _a, order=_order)
    case("argsort_top_k", lambda a, k: np.argsort(-a)[..., :k], _a, k=3)
    case("top_k", lambda a, k: np.argsort(-a)[..., :k], _a, unordered=True, k=3)
for _shape in ((9,), (3, 70)):
    case("argmax", lambda a: a.argmax(-1), {"a": f32(*_shape)})
case("sum", lambda a: a.sum(), {"a": f16(3, 70)}, atol=0.05)
case("sum", lambda a: a.sum(), {"a": Operand((3, 70), "bf16")}, atol=0.5)
for _shape, _groups in (((6, 3, 4), 2), ((2, 4, 3, 5), 4)):
    case("group_norm", ref.group_norm, {"a": f32(*_shape)}, n_groups=_groups, eps=1e-5)

_MASKED = {"a": f32(2, 3, 4, 6), "mask": f16(2, 1, 4, 6)}
for _op in ("soft_max_ext", "soft_max_ext_inplace"):
    case(_op, ref.soft_max_ext, {"a": f32(3, 4)}, mask=None, scale=0.5, max_bias=0.0)
    case(_op, ref.soft_max_ext, {"a": f32(3, 4), "mask": f32(3, 4)}, scale=0.5, max_bias=0.0)
    case(_op, ref.soft_max_ext, _MASKED, scale=0.5, max_bias=8.0)
for _op in ("soft_max_ext_back", "soft_max_ext_back_inplace"):
    _x = np.random.default_rng(5).uniform(-2, 2, (3, 4))
    case(
        _op,
        lambda a, b, scale, max_bias, x=_x: ref.gradient(lambda x: ref.soft_max(scale * x), x, a),
        {"a": f32(3, 4), "b": given(ref.soft_max(0.5 * _x), "f32")},
        scale=0.5,
        max_bias=0.0,
    )
_LABELS = given(ref.soft_max(np.random.default_rng(6).uniform(-2, 2, (4, 7))), "f32")
case("cross_entropy_loss", ref.cross_entropy_loss, {"a": f32(4, 7), "b": _LABELS})
case(
    "cross_entropy_loss_back",
    lambda a, b, c: ref.gradient(lambda x: ref.cross_entropy_loss(x, c), b, a),
    {"a": f32(1), "b": f32(4, 7), "c": _LABELS},
)
