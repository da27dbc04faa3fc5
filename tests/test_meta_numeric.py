"""What a meta device computes, against NumPy: every way of cutting, on two and three CPU devices.

Each graph gets a backend of its own (`test_graphs_of_different_sizes` says why), and its compute
buffer is cleared.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from _backends import CHILDREN, COUNTS, ON_GPU, ON_HOST, children
from _compute import Arena
from _release import PINNED, has, needs, needs_meta

from ggml_cffi import _loader, capi
from ggml_cffi._gen import build_info
from ggml_cffi._handles import address
from ggml_cffi.device import device
from ggml_cffi.errors import AbortError, RPCError
from ggml_cffi.meta import MetaDevice, SplitState

pytestmark = needs_meta
needs_nr = needs("struct ggml_backend_meta_split_state.nr")

F32, I32 = capi.GGML_TYPE_F32, capi.GGML_TYPE_I32
MIRRORED = SplitState.mirrored()
#: What it costs, twice, to round a number to half precision.
HALF = 2.0**-10 if ON_GPU else 0.0


@pytest.fixture(params=COUNTS, ids="{}devices".format)
def n_devs(request) -> int:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


class Weight(NamedTuple):
    """A weight in ggml's own form."""

    type: int
    shape: tuple[int, ...]
    data: np.ndarray


def weight(array: np.ndarray) -> Weight:
    return Weight(F32, array.shape, np.ascontiguousarray(array, np.float32))


def run(
    target: Any,
    weights: dict[str, np.ndarray | Weight],
    inputs: dict[str, np.ndarray],
    build: Callable[..., Any],
    n_threads: int | None = None,
    fill: int = 0,
    unread: tuple[str, ...] = (),
) -> np.ndarray:
    """Allocate the weights on a device, compute `build(ctx, **tensors)` and read it.

    Where it is a list, all are computed, in this order, and the last one is read. The weights
    `unread` cannot be read back.
    """
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    ctx_graph = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    backend = target.init_backend(n_threads)
    buffer = galloc = None
    try:
        tensors = {}
        for name, value in weights.items():
            w = value if isinstance(value, Weight) else weight(value)
            tensors[name] = capi.ggml_new_tensor(ctx, w.type, w.shape[::-1])
            capi.ggml_set_name(tensors[name], name)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
        capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        for name, value in weights.items():
            w = value if isinstance(value, Weight) else weight(value)
            capi.ggml_backend_tensor_set(tensors[name], w.data, 0)
            if name not in unread:
                back = np.zeros_like(w.data)
                capi.ggml_backend_tensor_get(tensors[name], back, 0)
                np.testing.assert_array_equal(back, w.data)
        for name, value in inputs.items():
            type_ = I32 if value.dtype.kind == "i" else F32
            tensors[name] = capi.ggml_new_tensor(ctx_graph, type_, list(value.shape[::-1]))
            capi.ggml_set_input(tensors[name])
        built = build(ctx_graph, **tensors)
        results = built if isinstance(built, list) else [built]
        result = results[-1]
        graph = capi.ggml_new_graph(ctx_graph)
        for each in [*(tensors[name] for name in inputs), *results]:  # inputs without use, too
            capi.ggml_build_forward_expand(graph, each)
        galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
        capi.ggml_gallocr_alloc_graph(galloc, graph)
        if (result.view_src or result).buffer != buffer:  # a weight that is written into is kept
            capi.ggml_backend_buffer_clear(result.buffer, fill)
        for name, value in inputs.items():
            dtype = np.int32 if value.dtype.kind == "i" else np.float32
            capi.ggml_backend_tensor_set(tensors[name], np.ascontiguousarray(value, dtype), 0)
        capi.ggml_backend_graph_compute(backend.handle, graph)
        ne = list(result.ne)
        out = np.full(ne[::-1], np.nan, np.float32)
        capi.ggml_backend_tensor_get(result, out, 0)
        return out.squeeze()
    finally:
        if galloc is not None:
            capi.ggml_gallocr_free(galloc)
        if buffer is not None:
            capi.ggml_backend_buffer_free(buffer)
        backend.close()
        capi.ggml_free(ctx_graph)
        capi.ggml_free(ctx)


def spread(
    n_devs: int, states: Callable[..., Any] | dict[str, Any], on_error: str = "raise"
) -> Any:
    """A meta device over `n_devs` devices of the run; `states` by name, or a split function."""
    by_name = (lambda info, n: states[info.name]) if isinstance(states, dict) else states
    return MetaDevice(children(n_devs), by_name, on_error)


def by_ratio(**axes: int) -> Callable[..., SplitState]:
    """A split function: equal shares along these axes, all else mirrored."""

    def split(info, n):
        if info.name not in axes:
            return MIRRORED
        return SplitState.by_ratio(info, axes[info.name], [1] * n)

    return split


def mul_mat(ctx, w, x):
    return capi.ggml_mul_mat(ctx, w, x)


def mended(ctx, w, x):
    """A row-parallel product that may be used by anybody, read too."""
    return capi.ggml_cont(ctx, capi.ggml_mul_mat(ctx, w, x))


def close(actual, expected, tolerance=1e-5):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def differs(actual, expected):
    """A graph without its mend is wrong. If this fails, docs/limits.md has a line too many."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() > 1e-2 * np.abs(expected).max()


def columns(ctx, tensor, width, start):
    """A view of `width` elements of every row."""
    offset = start * tensor.nb[0]
    return capi.ggml_view_2d(ctx, tensor, width, tensor.ne[1], tensor.nb[1], offset)


def silu(x):
    return x / (1 + np.exp(-x))


# --- plain cuts


@pytest.mark.parametrize("axis", [0, 1, None], ids=["row-parallel", "column-parallel", "mirrored"])
def test_product(n_devs, rng, axis):
    w, x = rng.standard_normal((24, 36)), rng.standard_normal((5, 36))
    split = by_ratio(**({} if axis is None else {"w": axis, "x": 0}))
    weights = {"w": w, "x": x} if axis == 0 else {"w": w}
    inputs = {} if axis == 0 else {"x": x}
    with spread(n_devs, split) as meta:
        result = run(meta, weights, inputs, mended if axis == 0 else mul_mat)
    close(result, x @ w.T)


@pytest.mark.parametrize("shares", ["uneven", "empty first", "empty last", "all on one"])
@pytest.mark.parametrize("kind", ["column-parallel", "feed-forward"])
def test_shares(n_devs, rng, shares, kind):
    n_hidden = 24
    ne = {
        "uneven": [5, 19] if n_devs == 2 else [5, 1, 18],
        "empty first": [0, 24] if n_devs == 2 else [0, 11, 13],
        "empty last": [24, 0] if n_devs == 2 else [11, 13, 0],
        "all on one": [0] * (n_devs - 1) + [24],
    }[shares]
    up, down = rng.standard_normal((n_hidden, 10)), rng.standard_normal((7, n_hidden))
    x = rng.standard_normal((3, 10))
    states = {"up": SplitState.split(1, ne), "down": SplitState.split(0, ne)}

    def feed_forward(ctx, up, down, x):
        return mended(ctx, down, capi.ggml_silu(ctx, capi.ggml_mul_mat(ctx, up, x)))

    with spread(n_devs, states) as meta:
        if kind == "column-parallel":
            close(run(meta, {"up": up}, {"x": x}, lambda ctx, up, x: mul_mat(ctx, up, x)), x @ up.T)
        else:
            close(run(meta, {"up": up, "down": down}, {"x": x}, feed_forward),
                  silu(x @ up.T) @ down.T)  # fmt: skip


def test_biases_and_gate(n_devs, rng):
    """A feed-forward block with biases: that of the column-parallel product is cut like it."""
    shapes = {"up": (24, 10), "gate": (24, 10), "down": (6, 24), "up_b": (24,), "down_b": (6,)}
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x = rng.standard_normal((3, 10))

    def build(ctx, up, gate, down, up_b, down_b, x):
        h = capi.ggml_add(ctx, capi.ggml_mul_mat(ctx, up, x), up_b)
        h = capi.ggml_swiglu_split(ctx, capi.ggml_mul_mat(ctx, gate, x), h)
        return capi.ggml_add(ctx, capi.ggml_mul_mat(ctx, down, h), down_b)

    with spread(n_devs, by_ratio(up=1, gate=1, down=0, up_b=0)) as meta:
        result = run(meta, w, {"x": x}, build)
    hidden = silu(x @ w["gate"].T) * (x @ w["up"].T + w["up_b"])
    close(result, hidden @ w["down"].T + w["down_b"])


def test_a_tower_of_layers(n_devs, rng):
    """Several all-reduces in a graph, with residuals and norms between them."""
    n, hidden, layers = 12, 24, 4
    w = {}
    for i in range(layers):
        w[f"up{i}"] = rng.standard_normal((hidden, n)) / 3
        w[f"down{i}"] = rng.standard_normal((n, hidden)) / 4
    x = rng.standard_normal((3, n))

    def build(ctx, x, **w):
        for i in range(layers):
            h = capi.ggml_mul_mat(ctx, w[f"up{i}"], capi.ggml_rms_norm(ctx, x, 1e-5))
            x = capi.ggml_add(ctx, capi.ggml_mul_mat(ctx, w[f"down{i}"], capi.ggml_silu(ctx, h)), x)
        return x

    axes = {name: 1 if name.startswith("up") else 0 for name in w}
    with spread(n_devs, by_ratio(**axes)) as meta:
        result = run(meta, w, {"x": x}, build)
    expected = x
    for i in range(layers):
        normed = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5)
        expected = silu(normed @ w[f"up{i}"].T) @ w[f"down{i}"].T + expected
    close(result, expected)


def test_a_partial_bias(n_devs, rng):
    """A PARTIAL weight: each device has its n-th part of it, which an all-reduce adds up again."""
    b = rng.standard_normal((4, 6))
    state = SplitState.partial()
    ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
    with spread(n_devs, {"b": state}) as meta, meta.init_backend() as backend:
        tensor = capi.ggml_set_name(capi.ggml_new_tensor_2d(ctx, F32, 6, 4), "b")
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
        capi.ggml_backend_tensor_set(tensor, b.astype(np.float32), 0)
        with pytest.raises(ValueError, match="each device has an addend of it"):
            capi.ggml_backend_tensor_get(tensor, np.zeros((4, 6), np.float32), 0)
        capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)


@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 12), 0), ((4, 12, 3), 1), ((12, 4, 3), 2)])
def test_three_axes_are_cut_and_read_back(n_devs, rng, shape, axis):
    w = rng.standard_normal(shape)
    ne = [5, 7] if n_devs == 2 else [5, 0, 7]
    with spread(n_devs, {"w": SplitState.split(axis, ne)}) as meta:
        result = run(meta, {"w": w}, {}, lambda ctx, w: capi.ggml_scale(ctx, w, 2.0))
    close(result, 2 * w)


# --- segments


def halves(total: int, n_devs: int) -> list[int]:
    return [total * j // n_devs - total * (j - 1) // n_devs for j in range(1, n_devs + 1)]


@pytest.mark.parametrize("cut", ["three segments", "one segment", "segments of other ratios"])
def test_fused_qkv(n_devs, rng, cut):
    """q, k and v of equal width, taken out of one product as views and read element by element.

    Views know nothing of the segments: each device has to hold the same share of all three.
    """
    n, width, tokens = 10, 12, 5
    qkv, x = rng.standard_normal((3 * width, n)), rng.standard_normal((tokens, n))
    even = halves(width, n_devs)
    more = [even[0] - 3, *even[1:-1], even[-1] + 3]
    state = {
        "three segments": SplitState.segments(1, [even] * 3),
        "one segment": SplitState.split(1, halves(3 * width, n_devs)),
        "segments of other ratios": SplitState.segments(1, [more, even, more[::-1]]),
    }[cut]

    def build(ctx, qkv, x):
        fused = capi.ggml_mul_mat(ctx, qkv, x)
        q, k, v = (capi.ggml_cont(ctx, columns(ctx, fused, width, width * i)) for i in range(3))
        return capi.ggml_add(ctx, capi.ggml_mul(ctx, q, k), capi.ggml_scale(ctx, v, 3.0))

    with spread(n_devs, {"qkv": state}) as meta:
        result = run(meta, {"qkv": qkv}, {"x": x}, build)
    q, k, v = np.split(x @ qkv.T, 3, axis=-1)
    (close if cut == "three segments" else differs)(result, q * k + 3 * v)


def attention(q, k, v, n_heads, n_kv):
    """softmax(q kᵀ / √d) v for each head, of (tokens, heads * d) arrays."""
    tokens, d = q.shape[0], q.shape[1] // n_heads
    q = q.reshape(tokens, n_heads, d).transpose(1, 0, 2)
    k, v = (
        np.repeat(t.reshape(tokens, n_kv, d).transpose(1, 0, 2), n_heads // n_kv, axis=0)
        for t in (k, v)
    )
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(d)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = scores / scores.sum(-1, keepdims=True) @ v
    return out.transpose(1, 0, 2).reshape(tokens, n_heads * d)


@pytest.mark.parametrize(
    "grouped",
    [
        pytest.param(False, id="three segments"),
        pytest.param(True, id="nr = (1, 2)", marks=needs_nr),
    ],
)
def test_grouped_query_attention(n_devs, rng, grouped):
    """Attention with fewer key heads than query heads, from one fused weight, heads by device."""
    n, d, n_kv, tokens = 18, 8, n_devs + 1, 6
    n_heads = 2 * n_kv
    nq, nk = n_heads * d, n_kv * d
    qkv = rng.standard_normal((nq + 2 * nk, n)) / 4
    out, x = rng.standard_normal((n, nq)), rng.standard_normal((tokens, n))
    heads = [1] * (n_devs - 1) + [2]  # key heads by device: uneven
    q_ne, k_ne = [2 * d * h for h in heads], [d * h for h in heads]
    if grouped:
        state = SplitState.segments(1, [q_ne, k_ne], nr=[1, 2])
    else:
        state = SplitState.segments(1, [q_ne, k_ne, k_ne])
    states = {"qkv": state, "out": SplitState.split(0, q_ne)}

    def build(ctx, qkv, out, x):
        fused = capi.ggml_mul_mat(ctx, qkv, x)

        def part(width, heads, offset):
            view = capi.ggml_view_2d(ctx, fused, width, tokens, fused.nb[1], 4 * offset)
            by_head = capi.ggml_reshape_3d(ctx, capi.ggml_cont(ctx, view), d, heads, tokens)
            return capi.ggml_permute(ctx, by_head, 0, 2, 1, 3)

        q = part(nq, n_heads, 0)
        k = capi.ggml_cast(ctx, part(nk, n_kv, nq), capi.GGML_TYPE_F32)
        v = capi.ggml_cast(ctx, part(nk, n_kv, nq + nk), capi.GGML_TYPE_F32)
        mixed = capi.ggml_flash_attn_ext(ctx, q, k, v, None, d**-0.5, 0.0, 0.0)
        return mended(ctx, out, capi.ggml_reshape_2d(ctx, mixed, nq, tokens))

    with spread(n_devs, states) as meta:
        result = run(meta, {"qkv": qkv, "out": out}, {"x": x}, build)
    q, k, v = np.split(x @ qkv.T, [nq, nq + nk], axis=-1)
    expected = attention(q, k, v, n_heads, n_kv) @ out.T
    close(result, expected, 1e-4 + HALF)  # of keys and values, where a device takes them as halves


@pytest.mark.parametrize("nr", [pytest.param(2, marks=needs_nr), 1])
def test_gate_and_up_in_one_weight(n_devs, rng, nr):
    """A fused gate/up: one segment that stands twice, not one of twice the width."""
    n, hidden, tokens = 10, 12, 4
    w, x = rng.standard_normal((2 * hidden, n)), rng.standard_normal((tokens, n))
    down = rng.standard_normal((n, hidden))
    ne = halves(hidden, n_devs)
    fused = SplitState.segments(1, [[2 // nr * share for share in ne]], nr=[nr])
    states = {"w": fused, "down": SplitState.split(0, ne)}

    def build(ctx, w, down, x):
        return mended(ctx, down, capi.ggml_swiglu(ctx, capi.ggml_mul_mat(ctx, w, x)))

    with spread(n_devs, states) as meta:
        result = run(meta, {"w": w, "down": down}, {"x": x}, build)
    gate, up = np.split(x @ w.T, 2, axis=-1)
    (close if nr == 2 else differs)(result, (silu(gate) * up) @ down.T)


@pytest.mark.parametrize("axis", [0, 1])
@needs_nr
def test_segments_are_written_and_read_in_order(n_devs, rng, axis):
    """What the host sees of a segmented weight is the whole tensor in its own order."""
    shape = (5, 18) if axis == 0 else (18, 5)
    ne = [[1, 3], [2, 4]] if n_devs == 2 else [[1, 0, 3], [2, 3, 1]]
    state = SplitState.segments(axis, ne, nr=[3, 1])
    w = rng.standard_normal(shape)
    ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
    with spread(n_devs, {"w": state}) as meta, meta.init_backend() as backend:
        tensor = capi.ggml_set_name(capi.ggml_new_tensor_2d(ctx, F32, shape[1], shape[0]), "w")
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
        capi.ggml_backend_tensor_set(tensor, w.astype(np.float32), 0)
        back = np.zeros(shape, np.float32)
        capi.ggml_backend_tensor_get(tensor, back, 0)
        np.testing.assert_array_equal(back, w.astype(np.float32))
        capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)


# --- quantised weights


def f16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def dequantise_q4_0(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 32: an F16 scale, then 16 bytes with elements i and i + 16 in a byte."""
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return f16(blocks[:, :2]) * (nibbles.astype(np.float32) - 8)


def dequantise_q8_0(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 32: an F16 scale, then 32 signed bytes."""
    return f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def dequantise_q4_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 256: F16 scales d and dmin, 8 pairs of 6-bit factors in 12 bytes, 128 bytes."""
    d, dmin, packed = f16(blocks[:, :2]), f16(blocks[:, 2:4]), blocks[:, 4:16]
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & 15
    values = nibbles.reshape(-1, 8, 32).astype(np.float32)
    return ((d * scales)[:, :, None] * values - (dmin * minima)[:, :, None]).reshape(-1, 256)


QUANTISED = {
    "Q4_0": (capi.GGML_TYPE_Q4_0, 18, dequantise_q4_0),
    "Q8_0": (capi.GGML_TYPE_Q8_0, 34, dequantise_q8_0),
    "Q4_K": (capi.GGML_TYPE_Q4_K, 144, dequantise_q4_k),
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("axis", [0, 1], ids=["row-parallel", "column-parallel"])
def test_quantised_weights(n_devs, rng, kind, axis):
    type_, size, dequantise = QUANTISED[kind]
    rows, columns = 20, 256 * (n_devs + 1)
    source = rng.standard_normal((rows, columns)).astype(np.float32)
    data = np.zeros(rows * capi.ggml_row_size(type_, columns), np.uint8)
    capi.ggml_quantize_chunk(type_, source, data, 0, rows, columns)
    w = dequantise(data.reshape(-1, size)).reshape(rows, columns)
    assert np.abs(w - source).mean() < 0.1
    x = rng.standard_normal((4, columns)).astype(np.float32)

    ne = [256] * (n_devs - 1) + [512] if axis == 0 else [3] * (n_devs - 1) + [23 - 3 * n_devs]
    seen = []

    def split(info, n):
        seen.append((info.name, info.block_size, info.nbytes))
        return SplitState.split(axis, ne)  # along axis 0 the activations are cut like the weight

    def build(ctx, w, x):
        return mul_mat(ctx, w, x) if axis == 1 else mended(ctx, w, x)

    weights = {"w": Weight(type_, (rows, columns), data)}
    inputs = {"x": x}
    if axis == 0:
        weights, inputs = {**weights, **inputs}, {}
    with spread(n_devs, split) as meta:
        result = run(meta, weights, inputs, build)
    assert seen[0] == ("w", 256 if kind == "Q4_K" else 32, data.nbytes)
    # the kernels round the activations to 8 bits
    close(result, x @ w.T, 1e-2)
    # against one device on the same weights, only the order of the additions may differ; but GPUs
    # round factors to halves, and not the activations to 8 bits
    if ON_GPU:
        return
    one = run(device("CPU"), weights, inputs, build)
    close(result, one, 1e-5)


# --- a latch that closes


def test_a_latch_that_closes_between_layers(n_devs, rng):
    """The layers before are split, those after are mirrored; the result is right."""
    n, hidden, layers = 12, 24, 4
    w = {}
    for i in range(layers):
        w[f"up{i}"] = rng.standard_normal((hidden, n)) / 3
        w[f"down{i}"] = rng.standard_normal((n, hidden)) / 4
    x = rng.standard_normal((3, n))
    asked = []

    def split(info, n):
        asked.append(info.name)
        if info.name == "up2":
            raise LookupError("no plan for layer 2")
        return SplitState.by_ratio(info, 1 if info.name.startswith("up") else 0, [1] * n)

    def build(ctx, x, **w):
        for i in range(layers):
            h = capi.ggml_silu(ctx, capi.ggml_mul_mat(ctx, w[f"up{i}"], x))
            x = capi.ggml_add(ctx, capi.ggml_mul_mat(ctx, w[f"down{i}"], h), x)
        return x

    with spread(n_devs, split, "mirror") as meta:
        result = run(meta, w, {"x": x}, build)
        assert isinstance(meta.error, LookupError)
        assert meta.error_tensor == "up2"
    assert asked == ["up0", "down0", "up1", "down1", "up2"]
    expected = x
    for i in range(layers):
        expected = silu(expected @ w[f"up{i}"].T) @ w[f"down{i}"].T + expected
    close(result, expected)


def test_a_failure_that_follows_names_the_latched_error(n_devs, rng):
    """Closed inside a layer: a mirrored weight meets a split activation, and ggml gives up."""
    w = {"up": rng.standard_normal((24, 10)), "down": rng.standard_normal((7, 24))}
    x = rng.standard_normal((3, 10))

    def split(info, n):
        return SplitState.by_ratio(info, {"up": 1}[info.name], [1] * n)

    def build(ctx, up, down, x):
        return mended(ctx, down, capi.ggml_mul_mat(ctx, up, x))

    with spread(n_devs, split, "mirror") as meta:
        with pytest.raises(AbortError) as caught:
            run(meta, w, {"x": x}, build)
        assert isinstance(meta.error, KeyError)
        assert caught.value.__cause__ is meta.error
    # the devices are none the worse for it
    with spread(n_devs, by_ratio(up=1, down=0)) as meta:
        close(run(meta, w, {"x": x}, build), x @ w["up"].T @ w["down"].T)


# --- graphs that are wrong unless they are mended


def row_parallel(rng, n_devs):
    up, down = rng.standard_normal((24, 10)), rng.standard_normal((7, 24))
    x, factor = rng.standard_normal((3, 10)), rng.standard_normal(7)
    weights = {"up": up, "down": down, "factor": factor}
    return weights, {"x": x}, x @ up.T @ down.T, by_ratio(up=1, down=0)


def test_a_row_parallel_product_that_is_read(n_devs, rng):
    weights, inputs, y, split = row_parallel(rng, n_devs)

    def product(ctx, up, down, factor, x):
        return capi.ggml_mul_mat(ctx, down, capi.ggml_mul_mat(ctx, up, x))

    def with_cont(ctx, **tensors):
        return capi.ggml_cont(ctx, product(ctx, **tensors))

    with spread(n_devs, split) as meta:
        with pytest.raises(AbortError, match=r"ggml-backend-meta\.cpp"):
            run(meta, weights, inputs, product, n_threads=1)
        close(run(meta, weights, inputs, with_cont), y)


@pytest.mark.parametrize("graph", ["the last node", "another consumer"])
def test_a_product_whose_sum_ggml_puts_off(n_devs, rng, graph):
    """Multiplied by a mirrored vector, it is summed up too late, unless a cont stands between."""
    weights, inputs, y, split = row_parallel(rng, n_devs)
    expected = y * weights["factor"] if graph == "the last node" else y * weights["factor"] + y

    def build(ctx, mend, up, down, factor, x):
        y = capi.ggml_mul_mat(ctx, down, capi.ggml_mul_mat(ctx, up, x))
        if mend:
            y = capi.ggml_cont(ctx, y)
        z = capi.ggml_mul(ctx, y, factor)
        return z if graph == "the last node" else capi.ggml_add(ctx, z, y)

    with spread(n_devs, split) as meta:
        wrong = run(meta, weights, inputs, lambda ctx, **t: build(ctx, False, **t))
        right = run(meta, weights, inputs, lambda ctx, **t: build(ctx, True, **t))
    close(right, expected)
    differs(wrong, expected)


def test_garbage_in_the_compute_buffer_and_an_empty_share(n_devs, rng):
    """A device without a share has its part multiplied by 0, and 0 times NaN is NaN."""
    weights, inputs, y, _ = row_parallel(rng, n_devs)
    ne = [0, *halves(24, n_devs - 1)]
    states = {"up": SplitState.split(1, ne), "down": SplitState.split(0, ne), "factor": MIRRORED}

    def build(ctx, up, down, factor, x):
        capi.ggml_set_output(x)  # else the product may get its memory, which holds numbers
        return mended(ctx, down, capi.ggml_mul_mat(ctx, up, x))

    with spread(n_devs, states) as meta:
        if PINNED:  # what other releases compute here they may do right
            assert np.isnan(run(meta, weights, inputs, build, fill=255)).any()
        close(run(meta, weights, inputs, build, fill=0), y)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_view_that_narrows_a_weight_along_its_cut(n_devs, rng, axis):
    """Half of a cut weight: its halves have to be segments.

    Along axis 1 ggml makes no view of a segmented weight: there the product is what is narrowed.
    """
    width, n = 12, 10
    w, x = rng.standard_normal((2 * width, n)), rng.standard_normal((3, n))
    weights, inputs, expected = {"w": w}, {"x": x}, x @ w[width:].T
    if axis == 0:
        weights, inputs, expected = {"w": w.T}, {}, w.T[:, width:] ** 2
    whole = SplitState.split(axis, halves(2 * width, n_devs))
    by_half = SplitState.segments(axis, [halves(width, n_devs)] * 2)

    def narrow_weight(ctx, w, x=None):
        if axis == 0:
            return capi.ggml_sqr(ctx, columns(ctx, w, width, width))
        half = capi.ggml_view_2d(ctx, w, n, width, w.nb[1], width * w.nb[1])
        return capi.ggml_mul_mat(ctx, half, x)

    def narrow_product(ctx, w, x):
        return capi.ggml_cont(ctx, columns(ctx, capi.ggml_mul_mat(ctx, w, x), width, width))

    with spread(n_devs, {"w": whole}) as meta:
        differs(run(meta, weights, inputs, narrow_weight), expected)
    with spread(n_devs, {"w": by_half}) as meta:
        build = narrow_weight if axis == 0 else narrow_product
        close(run(meta, weights, inputs, build), expected)


@pytest.mark.parametrize("nr", [(1, 1), pytest.param((2, 3), marks=needs_nr)])
def test_a_segmented_result_is_read_device_by_device(n_devs, rng, nr):
    """ggml forgets the segments of a product: who reads it has to put it in order."""
    ne = [[1, 3], [4, 2]] if n_devs == 2 else [[1, 0, 3], [2, 3, 1]]
    w = rng.standard_normal((sum(sum(shares) * r for shares, r in zip(ne, nr, strict=True)), 10))
    x = rng.standard_normal((3, 10))
    order: list[list[int]] = [[] for _ in range(n_devs)]  # the weight's rows, by device
    end = 0
    for shares, times in zip(ne, nr, strict=True):
        for device_, share in list(enumerate(shares)) * times:
            order[device_] += range(end, end + share)
            end += share
    with spread(n_devs, {"w": SplitState.segments(1, ne, nr=nr)}) as meta:
        read = run(meta, {"w": w}, {"x": x}, mul_mat)
    differs(read, x @ w.T)
    ordered = np.empty_like(read)
    ordered[:, np.concatenate(order)] = read
    close(ordered, x @ w.T)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rope(x, n_dims):
    """The first `n_dims` of the last axis turned in pairs, by the position along the first axis."""
    angles = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, n_dims, 2) / n_dims)
    a, b = x[..., :n_dims:2], x[..., 1:n_dims:2]
    out = x.copy()
    out[..., :n_dims:2] = a * np.cos(angles) - b * np.sin(angles)
    out[..., 1:n_dims:2] = a * np.sin(angles) + b * np.cos(angles)
    return out


def turned(ctx, h, positions, n_dims):
    return capi.ggml_rope(ctx, h, positions, n_dims, 0)


def twice(ctx, h):
    return capi.ggml_repeat_4d(ctx, h, 2 * h.ne[0], h.ne[1], h.ne[2], 1)


ALONG_AXIS_0 = {  # in ggml and in NumPy
    "soft_max": (capi.ggml_soft_max, softmax),
    "repeat": (twice, lambda h: np.tile(h, 2)),
    "rope": (lambda ctx, h, positions: turned(ctx, h, positions, 4), lambda h: rope(h, 4)),
    "rope of all": (
        lambda ctx, h, positions: turned(ctx, h, positions, h.ne[0]),
        lambda h: rope(h, h.shape[-1]),
    ),
}


@pytest.mark.parametrize("op", ALONG_AXIS_0)
def test_an_operation_along_a_cut_axis_0(n_devs, rng, op):
    """Each device takes its share for the whole.

    A row-parallel product with 1 makes the tensor whole; one head of several is whole anyhow.
    """
    in_ggml, in_numpy = ALONG_AXIS_0[op]
    n, tokens = 24, 5
    w, x = rng.standard_normal((n, 10)), rng.standard_normal((tokens, 10))
    weights = {"w": w, "one": np.eye(n)}
    inputs = {"x": x, "positions": np.arange(tokens)}

    def result(mend, n_heads):
        def build(ctx, w, one, x, positions):
            h = capi.ggml_mul_mat(ctx, w, x)
            if mend:
                h = capi.ggml_mul_mat(ctx, one, h)
            h = capi.ggml_reshape_3d(ctx, h, n // n_heads, n_heads, tokens)
            return in_ggml(ctx, h, positions) if op.startswith("rope") else in_ggml(ctx, h)

        return run(meta, weights, inputs, build, n_threads=1)

    with spread(n_devs, by_ratio(w=1, one=0)) as meta:
        expected = in_numpy((x @ w.T).reshape(tokens, 1, n)).squeeze()
        if op != "rope of all":
            differs(result(mend=False, n_heads=1), expected)
        elif "CPU" in CHILDREN:  # more dimensions to turn than a device has
            with pytest.raises(AbortError, match="n_dims"):
                result(mend=False, n_heads=1)
        elif "worker" in CHILDREN:  # it ends a worker
            with pytest.raises(RPCError):
                result(mend=False, n_heads=1)
        else:  # kernels of GPUs do not look
            differs(result(mend=False, n_heads=1), expected)
    with spread(n_devs, by_ratio(w=1, one=0)) as meta:
        close(result(mend=True, n_heads=1), expected)
        by_head = in_numpy((x @ w.T).reshape(tokens, 6, n // 6))
        close(result(mend=False, n_heads=6), by_head)


@pytest.mark.parametrize("factors", [(6,), (2, 3), ()], ids=["one", "two", "none"])
def test_a_partial_weight_goes_through_one_operation(n_devs, rng, factors):
    """It is summed up after every operation that it goes through, and before none."""
    bias, base = rng.standard_normal((4, 6)), rng.standard_normal((3, 1, 6))
    ids = np.array([[2], [0], [2]])

    def build(ctx, bias, base, ids):
        for factor in factors:
            bias = capi.ggml_scale(ctx, bias, factor)
        return capi.ggml_add_id(ctx, base, bias, ids)

    with spread(n_devs, {"bias": SplitState.partial(), "base": MIRRORED}) as meta:
        result = run(meta, {"bias": bias, "base": base}, {"ids": ids}, build, unread=("bias",))
    expected = base[:, 0] + np.prod(factors) * bias[ids[:, 0]]
    (close if len(factors) == 1 else differs)(result, expected)


@pytest.mark.parametrize("mend", [True, False])
def test_a_partial_bias_of_experts(n_devs, rng, mend):
    """What a PARTIAL weight is for: a bias that is summed up along with the experts' products."""
    n, hidden, n_experts = 6, 12, 4
    w = {
        "up": rng.standard_normal((n_experts, hidden, n)),
        "down": rng.standard_normal((n_experts, n, hidden)),
        "bias": rng.standard_normal((n_experts, n)),
    }
    x = rng.standard_normal((3, 1, n))
    ids = np.array([[2, 1], [0, 3], [2, 0]])

    def build(ctx, up, down, bias, x, ids):
        h = capi.ggml_silu(ctx, capi.ggml_mul_mat_id(ctx, up, x, ids))
        y = capi.ggml_add_id(ctx, capi.ggml_mul_mat_id(ctx, down, h, ids), bias, ids)
        return capi.ggml_cont(ctx, y) if mend else y

    shares = by_ratio(up=1, down=0)

    def split(info, n):
        return SplitState.partial() if info.name == "bias" else shares(info, n)

    with spread(n_devs, split) as meta:
        result = run(meta, w, {"x": x, "ids": ids}, build, unread=("bias",))
    h = silu(np.einsum("tekn,tn->tek", w["up"][ids], x[:, 0]))
    expected = np.einsum("tenk,tek->ten", w["down"][ids], h) + w["bias"][ids]
    (close if mend else differs)(result, expected)


@pytest.mark.parametrize("way", ["set_rows", "cpy", "in place"])
@pytest.mark.parametrize("axis", [0, None], ids=["split", "mirrored"])
def test_writing_into_a_static_tensor(n_devs, rng, way, axis):
    """Over host memory ggml writes through a made-up address: refused. A copy can be written.

    Over workers it is done.
    """
    cache, w = rng.standard_normal((8, 12)), rng.standard_normal((12, 10))
    x, rows = rng.standard_normal((2, 10)), np.array([3, 4])

    def build(ctx, mend, cache, w, x, rows):
        values = capi.ggml_mul_mat(ctx, w, x)
        if mend:
            cache = capi.ggml_cont(ctx, cache)
            capi.ggml_set_output(cache)
        if way == "set_rows":
            return [capi.ggml_set_rows(ctx, cache, values, rows), cache]
        if way == "in place":
            return [capi.ggml_relu_inplace(ctx, cache), cache]
        view = capi.ggml_view_2d(ctx, cache, 12, 2, cache.nb[1], 3 * cache.nb[1])
        return [capi.ggml_cpy(ctx, values, view), cache]

    weights, inputs = {"cache": cache, "w": w}, {"x": x, "rows": rows}
    with spread(n_devs, by_ratio(**({} if axis is None else {"cache": 0, "w": 1}))) as meta:
        expected = np.maximum(cache, 0) if way == "in place" else cache.copy()
        if way != "in place":
            expected[rows] = x @ w.T
        for mend in (False, True):
            if ON_HOST and not mend:
                with pytest.raises(ValueError, match="static"):
                    run(meta, weights, inputs, lambda ctx, **t: build(ctx, False, **t))
            else:
                close(
                    run(meta, weights, inputs, lambda ctx, m=mend, **t: build(ctx, m, **t)),
                    expected,
                )


def test_copying_out_of_a_meta_device(n_devs, rng, cpu):
    """ggml would read from a made-up address: refused. It goes by way of the host's memory."""
    w = rng.standard_normal((4, 12), np.float32)
    with (
        spread(n_devs, by_ratio(w=0)) as meta,
        meta.init_backend(1) as backend,
        Arena(backend.handle) as arena,
        Arena(cpu) as there,
    ):
        source, copy = arena.weight(12, 4, name="w"), there.weight(12, 4)
        capi.ggml_backend_tensor_set(source, w, 0)
        with pytest.raises(ValueError, match="can_copy"):
            capi.ggml_backend_tensor_copy(source, copy)
        through, back = np.empty_like(w), np.empty_like(w)
        capi.ggml_backend_tensor_get(source, through, 0)
        capi.ggml_backend_tensor_set(copy, through, 0)
        capi.ggml_backend_tensor_get(copy, back, 0)
    np.testing.assert_array_equal(back, w)


# --- several graphs on the same weights


def compute(target: Any, graph: Any, result: Any) -> np.ndarray:
    """Compute on a backend, or on a new one of a device."""
    if isinstance(target, MetaDevice):
        with target.init_backend(1) as backend:
            return compute(backend, graph, result)
    capi.ggml_backend_graph_compute(target.handle, graph)
    out = np.empty(list(result.ne)[::-1], np.float32)
    capi.ggml_backend_tensor_get(result, out, 0)
    return out.squeeze()


@pytest.mark.parametrize("way", ["a backend each", "the largest first"])
def test_graphs_of_different_sizes(n_devs, rng, way):
    """A meta backend sizes its storage by the present graph. One that grows may end the process."""
    n, hidden = 12, 24
    up, down = rng.standard_normal((hidden, n)) / 3, rng.standard_normal((n, hidden)) / 4
    x = rng.standard_normal((3, n))
    sizes = [1, 4, 2, 3] if way == "a backend each" else [4, 1, 3, 2]
    with (
        spread(n_devs, by_ratio(up=1, down=0)) as meta,
        meta.init_backend(1) as backend,
        Arena(backend.handle) as arena,
    ):
        weights = arena.weight(n, hidden, name="up"), arena.weight(hidden, n, name="down")
        for tensor, data in zip(weights, (up, down), strict=True):
            capi.ggml_backend_tensor_set(tensor, data.astype(np.float32), 0)
        for n_layers in sizes:
            ctx, expected = arena.context(), x
            first = result = arena.tensor(n, 3, ctx=ctx)
            for _ in range(n_layers):
                h = capi.ggml_silu(ctx, capi.ggml_mul_mat(ctx, weights[0], result))
                result = mended(ctx, weights[1], h)
                expected = silu(expected @ up.T) @ down.T
            graph = arena.graph(ctx, result)
            capi.ggml_backend_tensor_set(first, x.astype(np.float32), 0)
            close(compute(meta if way == "a backend each" else backend, graph, result), expected)


class Slices(Arena):
    """Graphs that multiply a slice of one weight, given as a view, with another weight."""

    def __init__(self, backend: Any, rng: np.random.Generator) -> None:
        super().__init__(backend.handle)
        ctx = self.context(1 << 10)
        self.w = self.tensor(12, 20, name="w", ctx=ctx)
        self.x = self.tensor(12, 3, name="x", ctx=ctx)
        self.allocate(ctx)
        w, x = rng.standard_normal((20, 12), np.float32), rng.standard_normal((3, 12), np.float32)
        capi.ggml_backend_tensor_set(self.w, w, 0)
        capi.ggml_backend_tensor_set(self.x, x, 0)
        self.expected = [x @ rows.T for rows in np.split(w, 5)]

    def slice(self, i: int, into: Arena | None = None) -> list[Any]:
        """A view of slice `i`, what is computed of it in order, and last the graph."""
        into = self if into is None else into
        ctx = into.context()
        view = capi.ggml_view_2d(ctx, self.w, 12, 4, self.w.nb[1], 4 * i * self.w.nb[1])
        product = capi.ggml_mul_mat(ctx, view, self.x)
        result = capi.ggml_cont(ctx, product)
        return [view, product, result, into.graph(ctx, result)]


def test_a_graph_with_views_of_weights_that_is_computed_again(n_devs, rng):
    """Where others were allocated and computed in between, it has their views.

    Over host memory that is no abort: it gives their result. Its tensors have to be initialised
    again, in order.
    """
    with (
        spread(n_devs, by_ratio(w=0, x=0)) as meta,
        meta.init_backend(1) as backend,
        Slices(backend, rng) as slices,
    ):
        made = []
        for i in range(3):
            made.append(slices.slice(i))
            *_, result, graph = made[i]
            close(compute(meta, graph, result), slices.expected[i])
        *tensors, graph = made[0]
        if not ON_HOST:
            with pytest.raises(AbortError):
                compute(meta, graph, tensors[-1])
        elif PINNED:  # another release may as well abort
            differs(compute(meta, graph, tensors[-1]), slices.expected[0])
        for tensor in tensors:
            capi.ggml_backend_buffer_init_tensor(tensor.buffer, tensor)
        close(compute(meta, graph, tensors[-1]), slices.expected[0])


@contextlib.contextmanager
def on_meta_device(n_devs: int) -> Iterator[Arena]:
    """What makes things on a meta device that cuts all tensors alike."""
    with (
        spread(n_devs, by_ratio()) as meta,
        meta.init_backend(1) as backend,
        Arena(backend.handle) as arena,
    ):
        yield arena


def test_a_context_that_is_allocated_twice_is_refused(n_devs):
    with on_meta_device(n_devs) as arena:
        ctx = arena.context()
        first = arena.tensor(8, name="first", ctx=ctx)
        arena.allocate(ctx)
        capi.ggml_backend_tensor_set(first, np.arange(8, dtype=np.float32), 0)
        arena.tensor(8, name="second", ctx=ctx)
        kind = capi.ggml_backend_get_default_buffer_type(arena.backend)
        ways = [
            (capi.ggml_backend_alloc_ctx_tensors, arena.backend),
            (capi.ggml_backend_alloc_ctx_tensors_from_buft, kind),
        ]
        if has("ggml_backend_meta_alloc_ctx_tensors_from_buft"):
            ways.append((capi.ggml_backend_meta_alloc_ctx_tensors_from_buft, kind))
        for allocate, where in ways:
            with pytest.raises(ValueError, match="'first' has, or had, memory: a meta device"):
                allocate(ctx, where)
        found = np.empty(8, np.float32)
        capi.ggml_backend_tensor_get(first, found, 0)
    close(found, np.arange(8))


def test_a_context_with_memory_of_its_own_is_refused(n_devs):
    with on_meta_device(n_devs) as arena:
        ctx = arena.context(no_alloc=False)
        own = arena.tensor(8, name="own", ctx=ctx)
        capi.ggml_set_f32(own, 7.0)
        capi.ggml_set_no_alloc(ctx, True)
        with pytest.raises(ValueError, match="'own' has, or had, memory"):
            arena.allocate(ctx)
        assert capi.ggml_get_f32_1d(own, 7) == 7.0


def test_a_context_that_is_allocated_twice(n_devs):
    """Past the guard, which refuses it. If the last line fails, ggml has been mended."""
    found = np.empty(8, np.float32)
    base = ctypes.CDLL(str(_loader.library_files(build_info)["ggml-base"]))
    allocate = base.ggml_backend_alloc_ctx_tensors
    allocate.restype = ctypes.c_void_p
    with on_meta_device(n_devs) as arena:
        ctx = arena.context()
        first = arena.tensor(8, name="first", ctx=ctx)
        arena.allocate(ctx)
        capi.ggml_backend_tensor_set(first, np.ones(8, np.float32), 0)
        capi.ggml_backend_tensor_get(first, found, 0)
        assert (found == 1).all()
        second = arena.tensor(8, name="second", ctx=ctx)
        made = allocate(*(ctypes.c_void_p(address(one)) for one in (ctx, arena.backend)))
        assert made == address(second.buffer)
        capi.ggml_backend_buffer_clear(second.buffer, 0)
        capi.ggml_backend_tensor_get(first, found, 0)
        capi.ggml_backend_buffer_free(second.buffer)
    assert (found == 0).all()


@pytest.mark.own_memory
@pytest.mark.parametrize("mend", [True, False])
def test_views_of_weights_in_many_graphs(n_devs, rng, mend):
    """Each allocation takes from a pool that only a computation empties."""
    with (
        spread(n_devs, by_ratio(w=0, x=0)) as meta,
        meta.init_backend(1) as backend,
        Slices(backend, rng) as slices,
    ):

        def allocate_often():
            for i in range(64):  # more than the pool has room for
                with Arena(backend.handle) as arena:
                    *_, result, graph = slices.slice(i % 5, arena)
                    if mend:
                        close(compute(backend, graph, result), slices.expected[i % 5])

        if mend:
            allocate_often()
        else:
            with pytest.raises(AbortError, match=r"ggml\.c"):
                allocate_often()
