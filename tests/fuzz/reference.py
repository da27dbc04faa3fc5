"""What operations compute, in NumPy: shapes in NumPy's order, always four axes, float64.

Each function takes what the call in capi takes, arrays for tensors, and returns the result, or the
result and what it may be off by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from programs import BF16, F16, F32, I32, I64

from ggml_cffi import capi, ffi

Array = np.ndarray[Any, Any]

UNKNOWN = object()

DTYPES = {int(F32): "<f4", int(F16): "<f2", int(BF16): "<u2", int(I32): "<i4", int(I64): "<i8"}


def raw(t: Any) -> Array:
    """The bytes of a tensor's elements in order of the axes; a copy, without gaps."""
    if capi.ggml_blck_size(t.type) > 1:
        ne = [t.ne[0] // capi.ggml_blck_size(t.type), *list(t.ne)[1:]]
        dtype = np.dtype((np.void, capi.ggml_type_size(t.type)))
    else:
        ne = list(t.ne)
        dtype = np.dtype(DTYPES.get(int(t.type), f"V{capi.ggml_type_size(t.type)}"))
    if 0 in ne:
        return np.empty(ne[::-1], dtype)
    size = dtype.itemsize + sum((n - 1) * step for n, step in zip(ne, t.nb, strict=True))
    memory = ffi.buffer(ffi.cast("char *", t.data), size)
    return np.ndarray(ne[::-1], dtype, memory, 0, list(t.nb)[::-1]).copy()


def values(t: Any) -> Array | None:
    """The numbers in a tensor, None where there is no telling."""
    found = raw(t)
    if t.type == BF16:
        return (found.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if t.type in (F32, F16):
        return found.astype(np.float64)
    if t.type in (I32, I64):
        return found
    if capi.ggml_is_quantized(t.type):
        return dequantised(found, int(t.type), list(t.ne)[::-1])
    return None


def operand(t: Any) -> Any:
    """The numbers of an operand, UNKNOWN where there is no telling."""
    found = values(t)
    return UNKNOWN if found is None else found


def dequantised(blocks: Array, type: int, shape: list[int]) -> Array | None:
    from gguf import GGMLQuantizationType, dequantize

    if blocks.size == 0:
        return np.empty(shape)
    rows = np.frombuffer(blocks.tobytes(), np.uint8).reshape(
        -1, shape[-1] // capi.ggml_blck_size(type) * capi.ggml_type_size(type)
    )
    try:
        return dequantize(rows, GGMLQuantizationType(type)).reshape(shape).astype(np.float64)
    except (NotImplementedError, ValueError):  # a type that only ggml knows
        return None


#: Relative errors of a type.
ROUNDING = {int(F32): 1e-5, int(F16): 2e-3, int(BF16): 1.6e-2}

REFERENCES: dict[str, Callable[..., Any]] = {}


def _unary(**functions: Callable[[Array], Array]) -> None:
    for name, f in functions.items():
        REFERENCES[f"ggml_{name}"] = REFERENCES[f"ggml_{name}_inplace"] = f


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf, otypes=[float])(x)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array) -> Any:
    # ggml looks it up in a table of half floats
    return 0.5 * x * (
        1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x))
    ), 4e-3 + 2e-3 * abs(x)


def _gelu_quick(x: Array) -> Any:
    return x * _sigmoid(1.702 * x), np.where(abs(x) < 6e4, 4e-3 + 2e-3 * abs(x), np.inf)


_unary(
    abs=np.abs,
    sgn=np.sign,
    neg=np.negative,
    step=lambda x: (x > 0).astype(float),
    tanh=np.tanh,
    elu=lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    relu=lambda x: np.maximum(x, 0),
    sigmoid=_sigmoid,
    exp=np.exp,
    expm1=np.expm1,
    floor=np.floor,
    ceil=np.ceil,
    trunc=np.trunc,
    softplus=lambda x: np.logaddexp(x, 0),
    sqr=np.square,
    sqrt=np.sqrt,
    log=np.log,
    sin=np.sin,
    cos=np.cos,
    gelu=_gelu,
    gelu_quick=_gelu_quick,
    gelu_erf=lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    silu=_silu,
    hardswish=lambda x: x * np.clip((x + 3) / 6, 0, 1),
    hardsigmoid=lambda x: np.clip((x + 3) / 6, 0, 1),
    round=lambda x: np.trunc(x + np.copysign(0.5, x)),
)


def _tiled(x: Array, shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.empty(shape)
    return np.tile(x, [n // m if m else 1 for n, m in zip(shape, x.shape, strict=True)])


def _both(**functions: Callable[..., Any]) -> None:
    for name, f in functions.items():
        REFERENCES[f"ggml_{name}"] = f
        REFERENCES[f"ggml_{name}_inplace"] = f


def _soft_max(x: Array) -> Array:
    if x.size == 0:
        return x
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _norm(x: Array, eps: float) -> Any:
    centred = _known(x - x.mean(-1, keepdims=True))
    scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return centred * scale, 1e-5 * np.abs(x).max(-1, keepdims=True, initial=0) * scale + 1e-5


def _group_norm(x: Array, groups: int, eps: float) -> Any:
    per = -(-x.shape[1] // groups)
    found, off = np.empty_like(x), np.empty_like(x)
    for first in range(0, x.shape[1], per):
        part = x[:, first : first + per]
        centred = part - part.mean((1, 2, 3), keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean((1, 2, 3), keepdims=True) + eps)
        found[:, first : first + per] = centred * scale
        off[:, first : first + per] = (
            1e-5 * np.abs(part).max((1, 2, 3), keepdims=True, initial=0) * scale + 1e-5
        )
    return found, off


def _rms_norm(x: Array, eps: float) -> Array:
    return _known(x) / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def _l2_norm(x: Array, eps: float) -> Array:
    return _known(x) / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), eps)


def _known(x: Array) -> Array:
    """Rows whose squares are not lost in floats, NaN for others."""
    return np.where((x**2).sum(-1, keepdims=True) > 1e-30, x, np.nan)


def _diag_mask(value: float) -> Callable[..., Array]:
    def mask(x: Array, n_past: int) -> Array:
        rows, columns = np.indices(x.shape[-2:])
        return np.where(columns > n_past + rows, value, x)

    return mask


def _rope(
    a: Array,
    positions: Array,
    n_dims: int,
    mode: int,
    base: float = 1e4,
    factors: Array | None = None,
    sign: float = 1,
) -> Any:
    half = n_dims // 2
    theta = positions.reshape(-1)[: a.shape[1], None] * base ** (
        -2.0 * np.arange(half) / max(n_dims, 1)
    )
    if factors is not None:
        theta = theta / factors.reshape(-1)[:half]
    if not (np.abs(theta) < 1e30).all():
        return UNKNOWN
    cos, sin = np.cos(theta)[None, :, None], sign * np.sin(theta)[None, :, None]
    first, second = (
        (np.s_[0:n_dims:2], np.s_[1:n_dims:2]) if mode == 0 else (np.s_[:half], np.s_[half:n_dims])
    )
    found = a.copy()
    x, y = a[..., first], a[..., second]
    found[..., first], found[..., second] = x * cos - y * sin, x * sin + y * cos
    # the angle is a product of floats
    return found, 1e-6 * (np.abs(theta).max(initial=0) + 1) * np.abs(a).max(initial=0) * 4 + 1e-5


def _rope_ext(sign: float) -> Callable[..., Any]:
    def rope(
        a: Array,
        p: Array,
        c: Array | None,
        n_dims: int,
        mode: int,
        ctx: int,
        base: float,
        *rest: float,
    ) -> Any:
        if rest[:3] != (1.0, 0.0, 1.0) or mode not in (0, 2) or not 1 < base < 1e9:
            return UNKNOWN
        return _rope(a, p, n_dims, mode, base, c, sign)

    return rope


_both(
    add=lambda a, b: a + _tiled(b, a.shape),
    sub=lambda a, b: a - _tiled(b, a.shape),
    mul=lambda a, b: a * _tiled(b, a.shape),
    div=lambda a, b: a / _tiled(b, a.shape),
    add1=lambda a, b: a + b.reshape(-1)[0],
    scale=lambda a, s: a * np.float32(s),
    scale_bias=lambda a, s, b: a * s + b,
    dup=lambda a: a,
    soft_max=_soft_max,
    norm=_norm,
    rms_norm=_rms_norm,
    l2_norm=_l2_norm,
    group_norm=_group_norm,
    diag_mask_inf=_diag_mask(-np.inf),
    diag_mask_zero=_diag_mask(0),
    fill=np.full_like,
    rope=lambda a, p, n_dims, mode: _rope(a, p, n_dims, mode),
    rope_ext=_rope_ext(1),
)


def _matmul(a: Array, b: Array) -> Any:
    a = np.repeat(np.repeat(a, b.shape[1] // a.shape[1], 1), b.shape[0] // a.shape[0], 0)
    t = np.swapaxes(a, -1, -2)
    return b @ t, 1e-2 * (
        np.abs(b).max(-1, keepdims=True, initial=0) * np.abs(a).sum(-1)[..., None, :]
    ) + 1e-6


def _matmul_id(a: Array, b: Array, ids: Array) -> Any:
    used, tokens = ids.shape[3], ids.shape[2]
    found = np.empty((1, tokens, used, a.shape[2]))
    off = np.empty_like(found)
    if found.size == 0:
        return found
    for t in range(tokens):
        for u in range(used):
            weight, x = a[0, ids[0, 0, t, u]], b[0, t, u % b.shape[2]]
            found[0, t, u] = weight @ x
            off[0, t, u] = 1e-2 * np.abs(weight).sum(-1) * np.abs(x).max(initial=0) + 1e-6
    return found, off


def _out_prod(a: Array, b: Array) -> Any:
    # a [.., k, m], b [.., k, n]: [.., n, m]
    a = np.repeat(np.repeat(a, b.shape[1] // a.shape[1], 1), b.shape[0] // a.shape[0], 0)
    return np.swapaxes(b, -1, -2) @ a, 1e-5 * (np.swapaxes(np.abs(b), -1, -2) @ np.abs(a)) + 1e-6


def _get_rows(a: Array, ids: Array) -> Array:
    found = np.empty((ids.shape[1], ids.shape[2], ids.shape[3], a.shape[3]), a.dtype)
    for i2 in range(ids.shape[1]):
        for i1 in range(ids.shape[2]):
            found[i2, i1] = a[i2, i1][ids[0, i2, i1]]
    return found


def _set_rows(a: Array, b: Array, ids: Array) -> Array:
    found = a.copy()
    for i3 in range(b.shape[0]):
        for i2 in range(b.shape[1]):
            found[i3, i2, ids[0, i3 % ids.shape[1], i2 % ids.shape[2]]] = b[i3, i2]
    return found


def _pad_ext(a: Array, *p: int) -> Array:
    return np.pad(a, [(p[2 * i], p[2 * i + 1]) for i in (3, 2, 1, 0)])


def _pad_circular(a: Array, *p: int) -> Array:
    return np.pad(a, [(0, p[i]) for i in (3, 2, 1, 0)], "wrap")


def _cumsum(a: Array) -> Any:
    return np.cumsum(a, -1), 1e-5 * np.cumsum(np.abs(a), -1) + 1e-6


def _sum(a: Array) -> Any:
    return np.full((1, 1, 1, 1), a.sum()), 1e-2 * np.abs(a).sum() + 1e-6


def _rows(reduce: str) -> Callable[[Array], Any]:
    def rows(a: Array) -> Any:
        return getattr(a, reduce)(-1, keepdims=True), 1e-5 * getattr(np.abs(a), reduce)(
            -1, keepdims=True
        ) + 1e-6

    return rows


def _glu(act: Callable[[Array], Any], swapped: bool, off: float) -> Callable[[Array], Any]:
    def glu(a: Array) -> Any:
        half = a.shape[-1] // 2
        x, gate = (a[..., half : 2 * half], a[..., :half])
        if not swapped:
            x, gate = gate, x
        return _glu_split(act, off)(x, gate)

    return glu


def _glu_split(act: Callable[[Array], Any], off: float) -> Callable[[Array, Array], Any]:
    def glu(x: Array, gate: Array) -> Any:
        y = act(x)
        y = y[0] if isinstance(y, tuple) else y
        return y * gate, (off * (1 + np.abs(x)) + 1e-5) * np.abs(gate) + 1e-6 + np.where(
            off * np.abs(x) > 200, np.inf, 0
        )

    return glu


for _name, _act, _off in (
    ("reglu", lambda x: np.maximum(x, 0), 0.0),
    ("geglu", _gelu, 4e-3),
    ("swiglu", _silu, 1e-5),
    ("geglu_erf", lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))), 1e-5),
    ("geglu_quick", _gelu_quick, 4e-3),
):
    REFERENCES[f"ggml_{_name}"] = _glu(_act, False, _off)
    REFERENCES[f"ggml_{_name}_swapped"] = _glu(_act, True, _off)
    REFERENCES[f"ggml_{_name}_split"] = _glu_split(_act, _off)


def _soft_max_ext(a: Array, mask: Array | None, scale: float, max_bias: float) -> Array:
    x = a * scale
    if mask is not None:
        x = x + mask[:, :, : a.shape[2]]
    return _soft_max(x)


def _flash(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, max_bias: float, cap: float
) -> Any:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    off = 2e-2 * (np.abs(q).max(initial=0) * np.abs(k).max(initial=0) + 1)
    if mask is not None:
        scores = scores + mask[:, :, : q.shape[2]]
    found = np.swapaxes(_soft_max(scores) @ v, 1, 2)
    return found, off * np.abs(v).max(initial=0) + 1e-4


def _concat(a: Array, b: Array, axis: int) -> Array:
    return np.concatenate([a, b], 3 - axis)


def _clamp(a: Array, low: float, high: float) -> Array:
    return np.clip(a, low, high)


def _tri(a: Array, kind: int) -> Array:
    rows, columns = np.indices(a.shape[-2:])
    keep = {
        capi.GGML_TRI_TYPE_UPPER_DIAG: columns >= rows,
        capi.GGML_TRI_TYPE_UPPER: columns > rows,
        capi.GGML_TRI_TYPE_LOWER_DIAG: columns <= rows,
        capi.GGML_TRI_TYPE_LOWER: columns < rows,
    }[kind]
    return np.where(keep, a, 0)


def _leaky(a: Array, slope: float, inplace: bool) -> Array:
    return np.where(a > 0, a, a * slope)


def _roll(a: Array, *shifts: int) -> Array:
    return np.roll(a, shifts[::-1], (0, 1, 2, 3))


def _arange(start: float, stop: float, step: float) -> Any:
    return np.arange(start, stop, step).reshape(1, 1, 1, -1) if abs(step) < 1e9 else UNKNOWN


def _ssm_conv(x: Array, c: Array) -> Any:
    width, tokens = c.shape[3], x.shape[3] - c.shape[3] + 1
    windows = np.lib.stride_tricks.sliding_window_view(
        x[0], width, -1
    )  # [seqs, inner, tokens, width]
    found = np.einsum("sitw,iw->sti", windows, c[0, 0])
    return found.reshape(1, -1, tokens, x.shape[2]), 1e-4 * np.abs(x).max(initial=0) * np.abs(
        c
    ).sum() + 1e-6


REFERENCES.update(
    ggml_cont=lambda a: a,
    ggml_add_cast=lambda a, b, t: a + b,
    ggml_add_id=lambda a, b, ids: a + b[0, 0][ids.reshape(a.shape[1], a.shape[2])][None],
    ggml_repeat_4d=lambda a, *ne: _tiled(a, ne[::-1]),
    ggml_repeat=lambda a, b: _tiled(a, b.shape),
    ggml_concat=_concat,
    ggml_sum=_sum,
    ggml_sum_rows=_rows("sum"),
    ggml_mean=_rows("mean"),
    ggml_cumsum=_cumsum,
    ggml_argmax=lambda a: a.max(-1).reshape(1, 1, 1, -1) if a.shape[3] else UNKNOWN,
    ggml_count_equal=lambda a, b: np.full((1, 1, 1, 1), (a == b).sum()),
    ggml_mul_mat=_matmul,
    ggml_mul_mat_id=_matmul_id,
    ggml_out_prod=_out_prod,
    ggml_get_rows=_get_rows,
    ggml_set_rows=_set_rows,
    ggml_soft_max_ext=_soft_max_ext,
    ggml_flash_attn_ext=_flash,
    ggml_rope_ext_back=_rope_ext(-1),
    ggml_clamp=_clamp,
    ggml_leaky_relu=_leaky,
    ggml_diag=lambda a: a * np.eye(a.shape[3]),
    ggml_tri=_tri,
    ggml_pad=lambda a, *p: _pad_ext(a, 0, p[0], 0, p[1], 0, p[2], 0, p[3]),
    ggml_pad_circular=_pad_circular,
    ggml_pad_ext=_pad_ext,
    ggml_pad_reflect_1d=lambda a, p0, p1: np.pad(a, [(0, 0), (0, 0), (0, 0), (p0, p1)], "reflect"),
    ggml_roll=_roll,
    ggml_ssm_conv=_ssm_conv,
    ggml_arange=_arange,
    ggml_cast=lambda a, t: a,
    ggml_cpy=lambda a, b: a.reshape(b.shape),
    ggml_transpose=lambda a: np.swapaxes(a, -1, -2),
    ggml_reshape=lambda a, b: a.reshape(b.shape),
)
for _rank in range(1, 5):
    for _kind in ("cont", "reshape"):
        REFERENCES[f"ggml_{_kind}_{_rank}d"] = lambda a, *ne: a.reshape(
            (1,) * (4 - len(ne)) + ne[::-1]
        )


def _permute(a: Array, *axes: int) -> Array:
    order = [0] * 4  # ggml's axis i becomes axis axes[i]
    for i, axis in enumerate(axes):
        order[3 - axis] = 3 - i
    return np.transpose(a, order)


REFERENCES["ggml_permute"] = _permute


def _set(rank: int, add: bool = False) -> Callable[..., Any]:
    """`b` replaces a region of `a`, given by strides and an offset in bytes, or is added to it."""

    def put(a: Array, b: Array, *where: int) -> Array:
        steps = [n // 4 for n in where[:-1]]
        while len(steps) < 3:  # those of `a` itself
            steps.append(int(np.prod(a.shape[3 - len(steps) :])))
        i3, i2, i1, i0 = np.indices(b.shape)
        at = where[-1] // 4 + i0 + i1 * steps[0] + i2 * steps[1] + i3 * steps[2]
        found = a.copy().reshape(-1)
        found[at] = found[at] + b if add else b
        return found.reshape(a.shape)

    return put


def _repeat_back(a: Array, b: Array) -> Any:
    def folded(x: Array) -> Array:
        pairs = [(n // m if m else 1, m) for n, m in zip(a.shape, b.shape, strict=True)]
        return x.reshape([n for pair in pairs for n in pair]).sum((0, 2, 4, 6))

    return folded(a), 1e-5 * folded(np.abs(a)) + 1e-6


def _silu_back(dy: Array, x: Array) -> Any:
    s = _sigmoid(x)
    return dy * s * (1 + x * (1 - s)), 1e-4 * np.abs(dy) * (1 + np.abs(x)) + 1e-6


def _soft_max_back(dy: Array, y: Array, scale: float, max_bias: float) -> Any:
    total = np.abs(dy * y).sum(-1, keepdims=True)
    found = scale * y * (dy - (dy * y).sum(-1, keepdims=True))
    return found, 1e-4 * np.abs(scale * y) * (np.abs(dy) + total) + 1e-6


def _rms_norm_back(dz: Array, x: Array, eps: float) -> Any:
    rms = np.sqrt((_known(x) ** 2).mean(-1, keepdims=True) + eps)
    part = x * (x * dz).mean(-1, keepdims=True) / rms**3
    bound = np.abs(x) * np.abs(x * dz).mean(-1, keepdims=True) / rms**3
    return dz / rms - part, 1e-4 * (np.abs(dz) / rms + bound) + 1e-6


def _cross_entropy(a: Array, b: Array) -> Any:
    logs = np.log(_soft_max(a))
    rows = a.size // max(a.shape[3], 1)
    found = -(b * logs).sum() / rows
    return np.full((1, 1, 1, 1), found), 1e-4 * np.abs(b * logs).sum() / rows + 1e-6


def _get_rows_back(a: Array, ids: Array, c: Array) -> Array:
    found = np.zeros(c.shape)
    np.add.at(found[0, 0], ids.reshape(-1), a[0, 0, : ids.size])
    return found


def _convolution(kernel: Array, x: Array, steps: Any, pads: Any, dilations: Any, off: float) -> Any:
    """[out, in, kh, kw] over [batch, in, h, w]."""
    x = np.pad(x, [(0, 0), (0, 0), (pads[1],) * 2, (pads[0],) * 2])
    high, wide = ((kernel.shape[i] - 1) * d + 1 for i, d in ((2, dilations[1]), (3, dilations[0])))
    windows = np.lib.stride_tricks.sliding_window_view(x, (high, wide), (2, 3))
    windows = windows[:, :, :: steps[1], :: steps[0], :: dilations[1], :: dilations[0]]
    found = np.einsum("bchwyx,ocyx->bohw", windows, kernel)
    return found, off * np.einsum("bchwyx,ocyx->bohw", np.abs(windows), np.abs(kernel)) + 1e-5


def _conv_2d(off: float) -> Callable[..., Any]:
    return lambda k, x, s0, s1, p0, p1, d0, d1: _convolution(
        k, x, (s0, s1), (p0, p1), (d0, d1), off
    )


def _conv_1d(kernel: Array, x: Array, step: int, pad: int, dilation: int) -> Any:
    # [1, out, in, k] over [1, batch, in, n]
    k, x = kernel[0][:, :, None], x[0][:, :, None]
    found, off = _convolution(k, x, (step, 1), (pad, 0), (dilation, 1), 5e-3)
    return found[:, :, 0][None], off[:, :, 0][None]


def _pool(a: Array, op: int, kernel: tuple[int, int], steps: tuple[int, int]) -> Any:
    if a.size == 0:
        return UNKNOWN
    windows = np.lib.stride_tricks.sliding_window_view(a, kernel, (2, 3))
    windows = windows[:, :, :: steps[0], :: steps[1]]
    return windows.max((4, 5)) if op == capi.GGML_OP_POOL_MAX else windows.mean((4, 5))


def _pool_2d(a: Array, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> Any:
    return UNKNOWN if p0 or p1 else _pool(a, op, (k1, k0), (s1, s0))


def _upscale(a: Array, factor: int, mode: int) -> Any:
    if mode != capi.GGML_SCALE_MODE_NEAREST:
        return UNKNOWN
    return a.repeat(factor, 2).repeat(factor, 3)


REFERENCES.update(
    ggml_silu_back=_silu_back,
    ggml_soft_max_ext_back=_soft_max_back,
    ggml_rms_norm_back=_rms_norm_back,
    ggml_repeat_back=_repeat_back,
    ggml_cross_entropy_loss=_cross_entropy,
    ggml_get_rows_back=_get_rows_back,
    ggml_conv_2d=_conv_2d(5e-3),  # through half floats
    ggml_conv_2d_direct=_conv_2d(5e-3),
    ggml_conv_1d=_conv_1d,
    ggml_pool_1d=lambda a, op, k, s, p: UNKNOWN if p else _pool(a, op, (1, k), (1, s)),
    ggml_pool_2d=_pool_2d,
    ggml_upscale=_upscale,
    ggml_argsort=lambda a, order: np.sort(a, -1)[..., :: -1 if order else 1],
    ggml_argsort_top_k=lambda a, k: np.sort(a, -1)[..., ::-1][..., :k],
    ggml_top_k=lambda a, k: np.sort(a, -1)[..., ::-1][..., :k],
)
_both(
    set=_set(4),
    set_1d=_set(1),
    set_2d=_set(2),
    acc=_set(4, add=True),
)

#: Operations that give the places of numbers: any of equal ones will do.
PLACES = ("ggml_argmax", "ggml_argsort", "ggml_argsort_top_k", "ggml_top_k")


def difference(function: str, args: list[Any], result: Any) -> str | None:
    """How a result differs from what it should be, None if it does not or nothing is known."""
    reference = REFERENCES.get(function)
    found = values(result)
    if reference is None or found is None:
        return None
    for a in args:
        if a is UNKNOWN:
            return None
        if isinstance(a, np.ndarray) and a.dtype.kind == "f" and not (np.abs(a) < 1e18).all():
            return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mean of nothing
        wanted = reference(*args)
    if wanted is UNKNOWN:
        return None
    wanted, off = wanted if isinstance(wanted, tuple) else (wanted, 0.0)
    wanted = np.asarray(wanted)
    if function in PLACES and wanted.size:
        at = found.reshape(*args[0].shape[:3], -1) if function == "ggml_argmax" else found
        found = np.take_along_axis(args[0], at.astype(np.int64), 3).reshape(wanted.shape)
        if function == "ggml_top_k":  # in any order
            found = np.sort(found, -1)[..., ::-1]
    if found.shape != wanted.shape:
        return f"shape {found.shape} instead of {wanted.shape}"
    if found.dtype.kind in "iu" and wanted.dtype.kind in "iu":
        wrong = found != wanted
    else:
        with np.errstate(all="ignore"):
            largest = {int(F16): 6e4}.get(int(result.type), 1e30)
            bound = off + ROUNDING.get(int(result.type), 0) * (np.abs(wanted) * 4 + 1)
            if capi.ggml_is_quantized(result.type):
                bound = bound + _quantised_step(wanted, int(result.type))
            known = np.isfinite(wanted + bound) & (np.abs(wanted) < largest)
            wrong = known & ~(np.abs(found - wanted) <= bound)
    if not wrong.any():
        return None
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    shown = f"{found[at]!r} instead of {wanted[at]!r}"
    return f"{int(wrong.sum())} of {wrong.size} numbers; at {at}: {shown}"


def _quantised_step(wanted: Array, type: int) -> Array:
    """How far a number may be from what it is rounded to, given the largest of its row."""
    largest = np.abs(wanted).max(-1, keepdims=True, initial=0)
    return np.where(largest < 1e4, 0.3 * largest + 1e-3, np.inf)  # the scale is a half float
