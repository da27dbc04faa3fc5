"""The demo's feed-forward block: three weights, the way they are cut, and the product on a device.

    hidden = act(gate · x) * (up · x)        result = down · hidden

gate and up are column-parallel: each device has some of their columns (ggml's axis 1) and makes its
part of `hidden`. down is row-parallel: each device has the rows (axis 0) that belong to its part,
and makes one addend of the result; ggml adds them up (the all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import capi
from ._handles import Handle
from .device import Device
from .meta import SplitState, TensorInfo

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Weight:
    """A matrix as ggml stores it: `ne[1]` rows of `ne[0]` elements of a type, maybe quantised."""

    name: str
    type: int
    ne: tuple[int, int]
    data: Bytes
    """The rows, of shape (ne[1], bytes of a row)."""
    to_float: Callable[[Bytes], Floats]
    """The reference: turns rows of `data` into their values, of shape (rows, ne[0])."""

    @property
    def type_name(self) -> str:
        """The name of the type as in names of files: F32, Q4_K."""
        return capi.ggml_type(self.type).name.removeprefix("GGML_TYPE_")

    @property
    def block_size(self) -> int:
        """Elements in a block of the type."""
        return capi.ggml_blck_size(self.type)


@dataclass(frozen=True)
class FeedForward:
    """The weights of one block; `gating` is SwiGLU or GEGLU."""

    gate: Weight
    up: Weight
    down: Weight
    gating: str
    origin: str
    """Where they come from, in words."""

    @property
    def weights(self) -> tuple[Weight, Weight, Weight]:
        """gate, up and down."""
        return self.gate, self.up, self.down

    @property
    def n_embd(self) -> int:
        """The length of a token's vector, in and out."""
        return self.gate.ne[0]

    @property
    def n_ff(self) -> int:
        """The length of `hidden`, which is what the devices share."""
        return self.gate.ne[1]


def made_up(n_embd: int = 256, n_ff: int = 1024, seed: int = 0) -> FeedForward:
    """A block of F32 weights, normally distributed, so that results are about 1."""
    rng = np.random.default_rng(seed)

    def weight(name: str, n_in: int, n_out: int) -> Weight:
        values = rng.standard_normal((n_out, n_in), np.float32) / np.float32(np.sqrt(n_in))
        return Weight(name, capi.GGML_TYPE_F32, (n_in, n_out), values.view(np.uint8), _as_floats)

    return FeedForward(
        gate=weight("ffn_gate", n_embd, n_ff),
        up=weight("ffn_up", n_embd, n_ff),
        down=weight("ffn_down", n_ff, n_embd),
        gating="SwiGLU",
        origin=f"made on the spot (seed {seed})",
    )


def _as_floats(rows: Bytes) -> Floats:
    return rows.view(np.float32)


def split_function(
    block: FeedForward, ratios: Sequence[float], answers: dict[str, SplitState]
) -> Callable[[TensorInfo, int], SplitState]:
    """The split function for a meta device; it notes in `answers` what it answered.

    All three weights are cut at the same places of the axis that they share, on borders of down's
    blocks: a block of a quantised type cannot be halved.
    """
    axes = {block.gate.name: 1, block.up.name: 1, block.down.name: 0}
    granularity = block.down.block_size

    def split(info: TensorInfo, n_devs: int) -> SplitState:
        axis = axes[info.name]
        answers[info.name] = SplitState.by_ratio(info, axis, ratios, granularity)
        return answers[info.name]

    return split


def compute(block: FeedForward, device: Device, x: Floats) -> Floats:
    """The block's result for the tokens `x`, of shape (tokens, n_embd), computed on a device."""
    with ExitStack() as stack:
        # a backend for this one graph: a meta backend must not compute graphs of different sizes
        backend = stack.enter_context(device.init_backend())
        gate, up, down = _load(stack, block, backend.handle)

        ctx = _context(stack, n_tensors=8, n_graphs=1)
        tokens = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, block.n_embd, len(x))
        capi.ggml_set_input(tokens)
        gated = capi.ggml_mul_mat(ctx, gate, tokens)
        lifted = capi.ggml_mul_mat(ctx, up, tokens)
        glu = capi.ggml_swiglu_split if block.gating == "SwiGLU" else capi.ggml_geglu_split
        hidden = glu(ctx, gated, lifted)
        product = capi.ggml_mul_mat(ctx, down, hidden)
        # on a meta device the product itself is a sum yet to be made: only what uses it sees it
        result = capi.ggml_cont(ctx, product)
        capi.ggml_set_output(result)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, result)

        memory = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
        stack.callback(capi.ggml_gallocr_free, memory)
        capi.ggml_gallocr_alloc_graph(memory, graph)
        # a device with an empty share multiplies what lies in its memory by 0: no NaN may lie there
        for buffer in {t.buffer for t in (tokens, gated, lifted, hidden, product, result)}:
            capi.ggml_backend_buffer_clear(buffer, 0)

        capi.ggml_backend_tensor_set(tokens, np.ascontiguousarray(x, np.float32), 0)
        capi.ggml_backend_graph_compute(backend.handle, graph)
        out = np.empty((len(x), block.n_embd), np.float32)
        capi.ggml_backend_tensor_get(result, out, 0)
        return out


def _load(stack: ExitStack, block: FeedForward, backend: Handle) -> list[Handle]:
    """Allocate the weights on a backend, which asks a meta device's split function; fill them."""
    ctx = _context(stack, n_tensors=3)
    tensors = []
    for weight in block.weights:
        tensors.append(capi.ggml_new_tensor_2d(ctx, weight.type, *weight.ne))
        capi.ggml_set_name(tensors[-1], weight.name)
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    stack.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    for tensor, weight in zip(tensors, block.weights, strict=True):
        capi.ggml_backend_tensor_set(tensor, weight.data, 0)
    return tensors


def _context(stack: ExitStack, n_tensors: int, n_graphs: int = 0) -> Handle:
    size = n_tensors * capi.ggml_tensor_overhead() + n_graphs * capi.ggml_graph_overhead()
    ctx = capi.ggml_init(mem_size=size, no_alloc=True)
    stack.callback(capi.ggml_free, ctx)
    return ctx
