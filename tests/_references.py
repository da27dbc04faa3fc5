"""What the operations of ggml compute, in NumPy and in double precision.

Arrays have NumPy's order of axes: an image is (batch, channels, height, width). The parameters are
those of `ops`.
"""

from __future__ import annotations

import math

import _backends
import numpy as np

# ---- element by element


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def gelu_erf(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_quick(x):
    return x * sigmoid(1.702 * x)


def tabled(function):
    """The CPU looks these up in a table of half-precision numbers, by half-precision numbers."""

    def looked_up(x):
        if _backends.KIND.on_gpu:
            return function(x)
        near = np.float16(x).astype(np.float64)
        return np.where(x <= -10, 0, np.where(x >= 10, x, np.float16(function(near))))

    return looked_up


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def relu(x):
    return np.maximum(x, 0)


def elu(x):
    return np.where(x > 0, x, np.expm1(x))


def softplus(x):
    return np.logaddexp(x, 0)


def hardsigmoid(x):
    return np.clip((x + 3) / 6, 0, 1)


def round_half_away(x):
    return np.trunc(x + np.copysign(0.5, x))


def xielu(x, alpha_n, alpha_p, beta, eps):
    negative = (np.expm1(np.minimum(x, eps)) - x) * (beta + softplus(alpha_n)) + beta * x
    return np.where(x > 0, softplus(alpha_p) * x * x + beta * x, negative)


def swiglu_oai(x, gate, alpha, limit):
    x = np.minimum(x, limit)
    return x * sigmoid(alpha * x) * (np.clip(gate, -limit, limit) + 1)


def gated(function):
    """A gated linear unit over the two halves of the last axis."""

    def halves(a, swapped=False):
        x, gate = np.split(a, 2, axis=-1)
        return function(gate) * x if swapped else function(x) * gate

    return halves


# ---- along axes


def norm(a, eps):
    centred = a - a.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def rms_norm(a, eps):
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + eps)


def l2_norm(a, eps):
    return a / np.maximum(np.sqrt((a * a).sum(-1, keepdims=True)), eps)


def group_norm(a, n_groups, eps):
    """Over groups of channels, the third axis from the end."""
    groups = np.array_split(np.arange(a.shape[-3]), n_groups)
    parts = []
    for group in groups:
        part = a[..., group, :, :]
        centred = part - part.mean((-3, -2, -1), keepdims=True)
        parts.append(centred / np.sqrt((centred**2).mean((-3, -2, -1), keepdims=True) + eps))
    return np.concatenate(parts, -3)


def soft_max(a):
    powers = np.exp(a - a.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def alibi_slopes(n_heads, max_bias):
    if not max_bias:
        return np.ones(n_heads)
    power = 1 << math.floor(math.log2(n_heads))
    heads = np.arange(n_heads)
    low = (2 ** (-max_bias / power)) ** (heads + 1.0)
    high = (2 ** (-max_bias / 2 / power)) ** (2 * (heads - power) + 1.0)
    return np.where(heads < power, low, high)


def soft_max_ext(a, mask=None, scale=1.0, max_bias=0.0):
    x = a * scale
    if mask is not None:
        slopes = alibi_slopes(a.shape[-3] if a.ndim > 2 else 1, max_bias)
        x = x + slopes[:, None, None] * mask if a.ndim > 2 else x + mask * slopes[0]
    return soft_max(x)


def cross_entropy_loss(a, b):
    logits = a - a.max(-1, keepdims=True)
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -(b * log_probability).sum() / math.prod(a.shape[:-1])


def repeat_to(a, shape):
    a = a.reshape((1,) * (len(shape) - a.ndim) + a.shape)
    return np.tile(a, [n // m for n, m in zip(shape, a.shape, strict=True)])


def diag_mask(x, n_past, value):
    rows, columns = np.indices(x.shape[-2:])
    return np.where(columns > rows + n_past, value, x)


def timestep_embedding(timesteps, dim, max_period):
    half = dim // 2
    angles = timesteps[:, None] * np.exp(-math.log(max_period) * np.arange(half) / half)
    return np.pad(np.hstack([np.cos(angles), np.sin(angles)]), ((0, 0), (0, dim % 2)))


# ---- rotary positions

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40


def rope(
    a, b, c=None, *, n_dims, mode=NORMAL, n_ctx_orig=0, freq_base=10000.0, freq_scale=1.0,
    ext_factor=0.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0, sections=None, sign=1,
):  # fmt: skip
    """`a` is (…, tokens, heads, width); `b` the positions, with sections four a token."""
    tokens = a.shape[-3]
    pairs = np.arange(n_dims if mode == VISION else n_dims // 2)
    if sections is None:
        positions = np.repeat(b[:, None], len(pairs), 1)
    else:
        which = _of_section(pairs, list(sections), mode)
        positions = b.reshape(4, tokens)[which].T
    exponents = pairs
    if mode == VISION:  # each section starts anew
        starts = np.cumsum([0, *sections])
        exponents = np.array([i - starts[w] for i, w in zip(pairs, which, strict=True)])
    angles = positions * freq_base ** (-2.0 * exponents / n_dims)
    if c is not None:
        angles = angles / c[: len(pairs)]
    extrapolated, angles, size = angles, angles * freq_scale, attn_factor
    if ext_factor:
        mix = _yarn(pairs, n_dims, n_ctx_orig, freq_base, beta_fast, beta_slow) * ext_factor
        angles = angles * (1 - mix) + extrapolated * mix
        size *= 1 + 0.1 * math.log(1 / freq_scale)
    cos, sin = (np.cos(angles) * size)[:, None], (np.sin(angles) * size * sign)[:, None]
    first = 2 * pairs if mode == NORMAL else pairs
    second = first + 1 if mode == NORMAL else pairs + len(pairs)
    result = a.copy()
    result[..., first] = a[..., first] * cos - a[..., second] * sin
    result[..., second] = a[..., first] * sin + a[..., second] * cos
    return result


def _of_section(pairs, sections, mode):
    at = pairs % sum(sections)
    if mode == IMROPE:
        turn = at % 3
        fits = at < 3 * np.array(sections)[turn]
        return np.where(fits, turn, 3)
    return np.searchsorted(np.cumsum(sections), at, side="right")


def _yarn(pairs, n_dims, n_ctx_orig, base, beta_fast, beta_slow):
    def turns(n):
        return n_dims * math.log(n_ctx_orig / (n * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(turns(beta_fast))), min(n_dims - 1, math.ceil(turns(beta_slow)))
    return 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)


# ---- windows: convolutions, pools, images


def windows(x, kernel, stride, pad, dilation):
    """The windows over the last axes of x: (…, outputs…, kernel…)."""
    n = len(kernel)
    x = np.pad(x, [(0, 0)] * (x.ndim - n) + [(p, p) for p in pad])
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    axes = tuple(range(x.ndim - n, x.ndim))
    found = np.lib.stride_tricks.sliding_window_view(x, spans, axes)
    outputs = tuple(slice(None, None, s) for s in stride)
    return found[(..., *outputs, *(slice(None, None, d) for d in dilation))]


def conv(x, w, stride, pad, dilation):
    """(N, IC, …) with (OC, IC, …): (N, OC, …)."""
    n = w.ndim - 2
    found = windows(x, w.shape[2:], stride, pad, dilation)
    axes = [1, *range(2 + n, 2 + 2 * n)]
    return np.moveaxis(np.tensordot(found, w, (axes, range(1, w.ndim))), -1, 1)


def conv_depthwise(x, w, stride, pad, dilation):
    """(N, C, …) with (C, …): (N, C, …)."""
    n = w.ndim - 1
    found = windows(x, w.shape[1:], stride, pad, dilation)
    return (found * w.reshape(w.shape[0], *[1] * n, *w.shape[1:])).sum(tuple(range(-n, 0)))


def conv_transpose(x, w, stride):
    """(IC, …) with (IC, OC, …): (OC, …)."""
    spatial = [(n - 1) * stride + k for n, k in zip(x.shape[1:], w.shape[2:], strict=True)]
    result = np.zeros((w.shape[1], *spatial))
    for index in np.ndindex(*x.shape[1:]):
        place = tuple(
            slice(i * stride, i * stride + k) for i, k in zip(index, w.shape[2:], strict=True)
        )
        result[(slice(None), *place)] += np.tensordot(x[(slice(None), *index)], w, 1)
    return result


def im2col(x, kernel, stride, pad, dilation):
    """(N, C, …): (N, outputs…, C · kernel…)."""
    n = len(kernel)
    found = np.moveaxis(windows(x, kernel, stride, pad, dilation), 1, 1 + n)
    return found.reshape(*found.shape[: 1 + n], -1)


def col2im_1d(a, s0, oc, p0):
    t_in, k = a.shape[0], a.shape[1] // oc
    result = np.zeros((oc, (t_in - 1) * s0 + k))
    for t in range(t_in):
        result[:, t * s0 : t * s0 + k] += a[t].reshape(oc, k)
    return result[:, p0 : result.shape[1] - p0]


def pool(x, kernel, stride, pad, largest, *, count_padding):
    spans = [(0, 0)] * (x.ndim - len(kernel)) + [(p, p) for p in pad]
    kept, axes = [1] * len(kernel), tuple(range(-len(kernel), 0))
    if largest:
        x = np.pad(x, spans, constant_values=-np.inf)
        return windows(x, kernel, stride, [0] * len(kernel), kept).max(axes)
    total = windows(x, kernel, stride, pad, kept).sum(axes)
    if count_padding:
        return total / math.prod(kernel)
    return total / windows(np.ones_like(x), kernel, stride, pad, kept).sum(axes)


def resize_matrix(n, m, mode, align_corners=False, antialias=False):
    """(m, n): how each of m pixels is made of n."""
    scale, offset = m / n, 0.5
    if align_corners:
        scale, offset = ((m - 1) / (n - 1) if m > 1 and n > 1 else scale), 0.0
    result = np.zeros((m, n))
    for i in range(m):
        if mode == "nearest":
            result[i, int(i / scale)] = 1
            continue
        at = (i + offset) / scale - offset
        if antialias:
            support = max(1.0, 1 / scale)
            weights = np.maximum(1 - np.abs((np.arange(n) - at) / support), 0)
            result[i] = weights / weights.sum()
            continue
        low = math.floor(at)
        if mode == "bilinear":
            for k, weight in ((low, 1 - (at - low)), (low + 1, at - low)):
                result[i, min(max(k, 0), n - 1)] += weight
            continue
        for k in range(low - 1, low + 3):
            result[i, min(max(k, 0), n - 1)] += _cubic(abs(at - k))
    return result


def _cubic(x, a=-0.75):
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def resize(x, shape, mode, **flags):
    for axis, m in enumerate(shape):
        kind = mode if axis >= len(shape) - 2 else "nearest"
        options = flags if axis >= len(shape) - 2 else {}
        matrix = resize_matrix(x.shape[axis], m, kind, **options)
        x = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
    return x


def win_part(a, w):
    height, width, channels = a.shape
    rows, columns = -(-height // w), -(-width // w)
    padded = np.pad(a, ((0, rows * w - height), (0, columns * w - width), (0, 0)))
    split = padded.reshape(rows, w, columns, w, channels)
    return split.transpose(0, 2, 1, 3, 4).reshape(-1, w, w, channels)


def win_unpart(a, w0, h0, w):
    rows, columns, channels = -(-h0 // w), -(-w0 // w), a.shape[-1]
    whole = a.reshape(rows, columns, w, w, channels).transpose(0, 2, 1, 3, 4)
    return whole.reshape(rows * w, columns * w, channels)[:h0, :w0]


def get_rel_pos(a, qh, kh):
    return a[np.arange(qh)[:, None] - np.arange(kh) + kh - 1]


def add_rel_pos(a, pw, ph):
    patches, size = a.shape[0], pw.shape[-1]
    split = a.reshape(patches, *pw.shape[1:3], size, size)
    return (split + ph[..., :, None] + pw[..., None, :]).reshape(a.shape)


# ---- products and attention


def mul_mat(a, b):
    """b @ a.T, with a repeated over what is stacked."""
    stack = b.shape[:-2]
    if stack:
        a = a.reshape((1,) * (b.ndim - a.ndim) + a.shape)
        for axis, n in enumerate(stack):
            a = np.repeat(a, n // a.shape[axis], axis)
    return b @ np.swapaxes(a, -1, -2)


def mul_mat_id(as_, b, ids):
    b = np.broadcast_to(b, (b.shape[0], ids.shape[1], b.shape[2]))
    return np.einsum("tumk,tuk->tum", as_[ids], b)


def flash_attn_ext(q, k, v, mask=None, scale=1.0, max_bias=0.0, logit_softcap=0.0):
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if logit_softcap:
        scores = logit_softcap * np.tanh(scores / logit_softcap)
    if mask is not None:
        scores = scores + alibi_slopes(q.shape[1], max_bias)[:, None, None] * mask
    return np.swapaxes(soft_max(scores) @ v, 1, 2)


def lightning_indexer(q, k, weights, mask):
    scores = relu(np.einsum("sthd,skd->sthk", q, k[:, :, 0]))
    return np.einsum("sthk,sth->stk", scores, weights[:, 0])[:, None] + mask


# ---- recurrences: (tokens, heads, size) each; the result has the states behind the outputs


def _recurrence(step, tokens, state):
    """`step(state, *numbers of a token and head)` gives the new state and the output."""
    n, heads, size = tokens[0].shape
    states = state.reshape(-1, heads, size, size).copy()
    outputs = np.empty((n, heads, size))
    for t in range(n):
        sequence = t // (n // len(states))
        for h in range(heads):
            states[sequence, h], outputs[t, h] = step(
                states[sequence, h], h, *(one[t, h] for one in tokens)
            )
    return np.concatenate([outputs.ravel(), states.ravel()]).reshape(-1, heads * size)


def gated_linear_attn(k, v, q, g, state, scale):
    def step(s, _, k, v, q, g):
        s = s * g[:, None] + np.outer(k, v)
        return s, q * scale @ s

    return _recurrence(step, (k, v, q, g), state)


def rwkv_wkv6(k, v, r, tf, td, state):
    def step(s, h, k, v, r, td):
        kv = np.outer(k, v)
        return s * td[:, None] + kv, r @ (s + kv * tf[h][:, None])

    return _recurrence(step, (k, v, r, td), state)


def rwkv_wkv7(r, w, k, v, a, b, state):
    def step(s, _, r, w, k, v, a, b):
        s = s * w + np.outer(v, k) + np.outer(s @ a, b)
        return s, s @ r

    return _recurrence(step, (r, w, k, v, a, b), state)


def gated_delta_net(q, k, v, g, beta, state, K):
    batch, tokens, heads, size = v.shape
    outputs, kept = np.empty_like(v), np.empty((K, batch, heads, size, size))
    for n, h in np.ndindex(batch, heads):
        s = state[n, h]
        for t in range(tokens):
            s = s * np.exp(g[n, t, h])
            delta = (v[n, t, h] - s @ k[n, t, h]) * beta[n, t, h]
            s = s + np.outer(delta, k[n, t, h])
            outputs[n, t, h] = s @ q[n, t, h] / math.sqrt(size)
            if tokens - 1 - t < K:
                kept[tokens - 1 - t, n, h] = s
    return np.concatenate([outputs.ravel(), kept.ravel()]).reshape(-1, heads * size)


def ssm_conv(sx, c):
    return np.swapaxes(conv_depthwise(sx, c, [1], [0], [1]), 1, 2)


def ssm_scan(s, x, dt, A, B, C, ids, K):
    assert K == 1
    sequences, tokens, heads, _ = x.shape
    group = heads // B.shape[2]
    states, outputs = s[ids].copy(), np.empty_like(x)
    for n, t, h in np.ndindex(sequences, tokens, heads):
        step = softplus(dt[n, t, h])
        grown = np.outer(x[n, t, h] * step, B[n, t, h // group])
        states[n, h] = states[n, h] * np.exp(step * A[h]) + grown
        outputs[n, t, h] = states[n, h] @ C[n, t, h // group]
    return np.concatenate([outputs.ravel(), states.ravel()])


def dsv4_hc_comb(mixes, scale, base, eps, n_iter):
    comb = soft_max((mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(n_iter - 1):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    return comb


def dsv4_hc_post(x, residual, post, comb):
    return x[:, None] * post[:, :, None] + np.einsum("tse,tsd->tde", residual, comb)


# ---- training


def opt_step_adamw(a, grad, m, v, adamw_params):
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = adamw_params
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + grad**2 * (1 - beta2)
    return a * (1 - alpha * decay) - alpha * m * beta1h / (np.sqrt(v * beta2h) + eps)


def opt_step_sgd(a, grad, sgd_params):
    return a * (1 - sgd_params[0] * sgd_params[1]) - sgd_params[0] * grad


def gradient(function, x, weights, step=1e-6):
    """Of the sum of `function(x)` times `weights` by each number of x: central differences."""
    found = np.empty_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        found[index] = ((function(up) - function(down)) * weights).sum() / (2 * step)
    return found
