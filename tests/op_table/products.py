"""Products, attention, recurrences, steps of training."""

from __future__ import annotations

import _references as ref
import numpy as np

from .case import (
    QUANTISED,
    ROUNDING,
    Operand,
    case,
    f16,
    f32,
    given,
    ints,
    of_product,
)

# ---- products and attention

for _sa, _sb in (
    ((5, 32), (3, 32)),
    ((5, 33), (33,)),
    ((5, 64), (2, 3, 64)),
    ((2, 5, 8), (4, 3, 8)),
    ((1, 2, 5, 8), (3, 4, 3, 8)),
    # BLAS takes no products with fewer than 32 rows, columns or addends
    ((40, 64), (33, 64)),
    ((1, 2, 32, 64), (3, 4, 33, 64)),
):
    case(
        "mul_mat",
        lambda a, b: ref.mul_mat(a, np.atleast_2d(b)),
        {"a": f32(*_sa), "b": f32(*_sb)},
        atol=1e-4,
        terms=_sa[-1],
    )
for _rows, _columns in ((5, 3), (40, 33)):
    for _dtype in ("f16", "bf16"):
        case(
            "mul_mat",
            ref.mul_mat,
            {"a": Operand((_rows, 64), _dtype), "b": f32(_columns, 64)},
            atol=of_product(64, ROUNDING[_dtype]),
            terms=64,
        )
    for _dtype in QUANTISED:
        case(
            "mul_mat",
            ref.mul_mat,
            {"a": Operand((_rows, 512), _dtype), "b": f32(_columns, 512)},
            atol=of_product(512),
            terms=512,
        )
_EXPERTS = {"as_": f32(4, 5, 32), "ids": ints(3, 2, below=4)}
case("mul_mat_id", ref.mul_mat_id, _EXPERTS | {"b": f32(3, 2, 32)}, atol=1e-4, terms=32)
case("mul_mat_id", ref.mul_mat_id, _EXPERTS | {"b": f32(3, 1, 32)}, atol=1e-4, terms=32)
case(
    "mul_mat_id",
    ref.mul_mat_id,
    _EXPERTS | {"as_": Operand((4, 5, 32), "q8_0"), "b": f32(3, 2, 32)},
    atol=of_product(32),
    terms=32,
)
for _stack in ((), (2,), (2, 3)):
    case(
        "out_prod",
        lambda a, b: np.swapaxes(b, -1, -2) @ a,
        {"a": f32(*_stack, 4, 6), "b": f32(*_stack, 4, 5)},
    )
case(
    "solve_tri",
    lambda a, b, **_: np.linalg.solve(np.tril(a), b),
    {
        "a": given(np.eye(5) * 3 + np.random.default_rng(7).uniform(-1, 1, (2, 5, 5)), "f32"),
        "b": f32(2, 5, 3),
    },
    left=True,
    lower=True,
    uni=False,
)
for _dtype in ("f16", "f32"):
    _qkv = {
        "q": f32(2, 4, 3, 32),
        "k": Operand((2, 2, 8, 32), _dtype),
        "v": Operand((2, 2, 8, 32), _dtype),
    }
    _close = {"atol": 5e-3}  # queries go through half precision
    case(
        "flash_attn_ext",
        ref.flash_attn_ext,
        _qkv,
        mask=None,
        scale=0.2,
        max_bias=0.0,
        logit_softcap=0.0,
        **_close,
    )
    case(
        "flash_attn_ext",
        ref.flash_attn_ext,
        _qkv,
        mask=None,
        scale=0.2,
        max_bias=0.0,
        logit_softcap=3.0,
        **_close,
    )
    for _bias in (0.0, 8.0):
        case(
            "flash_attn_ext",
            ref.flash_attn_ext,
            _qkv | {"mask": f16(1, 1, 3, 8)},
            scale=0.2,
            max_bias=_bias,
            logit_softcap=0.0,
            **_close,
        )
case(
    "lightning_indexer",
    ref.lightning_indexer,
    {
        "q": f32(2, 3, 4, 32),
        "k": f32(2, 6, 1, 32),
        "weights": f32(2, 1, 3, 4),
        "mask": f16(2, 1, 3, 6),
    },
    atol=1e-3,
)

# ---- recurrences

_S, _H, _T = 64, 2, 6
_KVR = {name: f32(_T, _H, _S, low=-1, high=1) for name in ("k", "v", "r")}
_STATE = f32(2, _S * _S * _H, low=-1, high=1)
_DECAY = Operand((_T, _H, _S), "f32", 0.5, 1)
case(
    "gated_linear_attn",
    ref.gated_linear_attn,
    {"k": _KVR["k"], "v": _KVR["v"], "q": _KVR["r"], "g": _DECAY, "state": _STATE},
    scale=0.5,
    atol=1e-4,
)
case(
    "rwkv_wkv6", ref.rwkv_wkv6, _KVR | {"tf": f32(_H, _S), "td": _DECAY, "state": _STATE}, atol=1e-4
)
case(
    "rwkv_wkv7",
    ref.rwkv_wkv7,
    {
        "r": _KVR["r"],
        "w": _DECAY,
        "k": _KVR["k"],
        "v": _KVR["v"],
        "a": f32(_T, _H, _S, low=-0.2, high=0.2),
        "b": f32(_T, _H, _S, low=-0.2, high=0.2),
        "state": _STATE,
    },
    atol=1e-4,
)
for _K in (1, 2):
    case(
        "gated_delta_net",
        ref.gated_delta_net,
        {
            **{name: f32(2, 3, _H, _S, low=-0.2, high=0.2) for name in ("q", "k", "v")},
            "g": f32(2, 3, _H, 1, low=-1, high=0),
            "beta": f32(2, 3, _H, 1, low=0, high=1),
            "state": f32(2, _H, _S, _S),
        },
        K=_K,
        atol=1e-4,
    )
case("ssm_conv", ref.ssm_conv, {"sx": f32(2, 5, 9), "c": f32(5, 4)})
for _A in ((4, 1), (4, 16)):
    case(
        "ssm_scan",
        ref.ssm_scan,
        {
            "s": f32(3, 4, 2, 16),
            "x": f32(2, 3, 4, 2),
            "dt": f32(2, 3, 4),
            "A": f32(*_A, low=-1, high=0),
            "B": f32(2, 3, 2, 16),
            "C": f32(2, 3, 2, 16),
            "ids": given([2, 0]),
        },
        K=1,
        atol=1e-4,
    )
case(
    "dsv4_hc_comb",
    ref.dsv4_hc_comb,
    {"mixes": f32(3, 24), "scale": f32(3), "base": f32(24)},
    eps=1e-6,
    n_iter=3,
)
case(
    "dsv4_hc_pre",
    lambda x, weights: np.einsum("the,th->te", x, weights),
    {"x": f32(3, 4, 9), "weights": f32(3, 4)},
)
case(
    "dsv4_hc_post",
    ref.dsv4_hc_post,
    {"x": f32(3, 9), "residual": f32(3, 4, 9), "post": f32(3, 4), "comb": f32(3, 4, 4)},
)

# ---- training

case(
    "opt_step_adamw",
    ref.opt_step_adamw,
    {
        "a": f32(3, 5),
        "grad": f32(3, 5),
        "m": f32(3, 5),
        "v": f32(3, 5, low=0, high=1),
        "adamw_params": given([0.01, 0.9, 0.999, 1e-8, 0.1, 1.2, 1.1], "f32"),
    },
    parameters=("a",),
)
case(
    "opt_step_sgd",
    ref.opt_step_sgd,
    {"a": f32(3, 5), "grad": f32(3, 5), "sgd_params": given([0.1, 0.2], "f32")},
    parameters=("a",),
)
