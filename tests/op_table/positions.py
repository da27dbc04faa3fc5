"""Rotary positions."""

from __future__ import annotations

import _references as ref
import numpy as np

from .case import (
    Operand,
    case,
    f16,
    f32,
    given,
)

# ---- rotary positions

_ROPE = {
    "n_ctx_orig": 64,
    "freq_base": 10000.0,
    "freq_scale": 0.5,
    "ext_factor": 0.7,
    "attn_factor": 1.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_TOKENS = {"a": f32(2, 3, 4, 16), "b": given([0, 5, 11])}
_FACTORS = Operand((8,), "f32", 0.5, 2)
for _mode in (ref.NORMAL, ref.NEOX):
    for _op in ("rope", "rope_inplace"):
        case(_op, ref.rope, _TOKENS, atol=1e-4, n_dims=16, mode=_mode)
        case(_op, ref.rope, _TOKENS, atol=1e-4, n_dims=8, mode=_mode)
    case("rope", ref.rope, {"a": f16(3, 4, 16), "b": given([0, 5, 11])}, n_dims=16, mode=_mode)
    for _op in ("rope_ext", "rope_ext_inplace"):
        case(_op, ref.rope, _TOKENS, atol=1e-4, c=None, n_dims=16, mode=_mode, **_ROPE)
        case(_op, ref.rope, _TOKENS | {"c": _FACTORS}, atol=1e-4, n_dims=16, mode=_mode, **_ROPE)
    for _op in ("rope_custom", "rope_custom_inplace"):
        case(_op, ref.rope, _TOKENS, atol=1e-4, n_dims=16, mode=_mode, **_ROPE)
    case(
        "rope_ext_back",
        lambda a, b, c, **w: ref.gradient(lambda x: ref.rope(x, b, c, **w), np.zeros_like(a), a),
        _TOKENS | {"c": _FACTORS},
        atol=1e-4,
        n_dims=16,
        mode=_mode,
        **_ROPE,
    )
_SECTIONS = {"a": f32(1, 3, 2, 16), "b": given([0, 5, 11, 1, 2, 7, 3, 9, 4, 0, 1, 2])}
for _mode, _n in ((ref.MROPE, 16), (ref.IMROPE, 16), (ref.VISION, 8)):
    _words = {
        "n_dims": _n,
        "sections": [3, 2, 2, 1] if _mode != ref.VISION else [4, 4, 0, 0],
        "mode": _mode,
    }
    for _op in ("rope_multi", "rope_multi_inplace"):
        case(_op, ref.rope, _SECTIONS, atol=1e-4, c=None, **_words, **_ROPE)
    case(
        "rope_multi_back",
        lambda a, b, c=None, **w: ref.gradient(
            lambda x: ref.rope(x, b, c, **w), np.zeros_like(a), a
        ),
        _SECTIONS,
        atol=1e-4,
        c=None,
        **_words,
        **_ROPE,
    )
