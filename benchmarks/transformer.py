"""A transformer like Llama with the names of Hugging Face, cut by heads and by hidden units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_cffi import Context, Device, Graph, SplitState, Tensor, ops

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")


def split(info: Any, n_devs: int) -> SplitState:
    """Columns and rows in equal shares, all else mirrored: two all-reduces a layer."""
    for axis, names in ((1, COLUMNS), (0, ROWS)):
        if any(name in info.name for name in names):
            return SplitState.by_ratio(info, axis, [1] * n_devs)
    return SplitState.mirrored()


@dataclass(frozen=True)
class Shape:
    """How large a model is: 9 weights and 27 operations a layer, and 3 and 4 besides."""

    n_layers: int
    width: int = 64
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 256
    n_tokens: int = 8

    @property
    def config(self) -> dict[str, int]:
        """What config.json says of it."""
        return {
            "num_hidden_layers": self.n_layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "intermediate_size": self.hidden,
        }

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in NumPy's order."""
        wide, hidden = self.width, self.hidden
        yield "model.embed_tokens.weight", (self.vocabulary, wide)
        for i in range(self.n_layers):
            yield f"model.layers.{i}.input_layernorm.weight", (wide,)
            for name in "qkvo":
                yield f"model.layers.{i}.self_attn.{name}_proj.weight", (wide, wide)
            yield f"model.layers.{i}.post_attention_layernorm.weight", (wide,)
            for name in ("gate", "up"):
                yield f"model.layers.{i}.mlp.{name}_proj.weight", (hidden, wide)
            yield f"model.layers.{i}.mlp.down_proj.weight", (wide, hidden)
        yield "model.norm.weight", (wide,)
        yield "lm_head.weight", (self.vocabulary, wide)


Added = Callable[[Tensor, Tensor, Tensor], Tensor]
"""How a row-parallel product is added to the stream: of the stream, the product and a gain."""


def plainly(x: Tensor, product: Tensor, gain: Tensor) -> Tensor:
    """x + product, as in Llama."""
    return x + product


class Transformer:
    """The model on a device, with numbers, and its graph."""

    def __init__(self, device: Device, shape: Shape, added: Added = plainly) -> None:
        self.shape = shape
        self._weights, self._inputs = Context(), Context()
        rng = np.random.default_rng(0)
        self._tensors = {
            name: self._weights.from_numpy(_drawn(rng, dims), name)
            for name, dims in shape.weights()
        }
        self._weights.allocate(device)
        self.graph = Graph(self._logits(added))

    def _logits(self, added: Added) -> Tensor:
        shape, inputs, weights = self.shape, self._inputs, self._tensors
        n, length = shape.n_tokens, shape.width // shape.heads
        tokens = inputs.input(n, "i32", "tokens")
        positions = inputs.input(n, "i32", "positions")
        mask = inputs.input((n, n), "f16", "mask")
        gain = inputs.input(shape.width, "f32", "gain") if added is not plainly else tokens

        def norm(x: Tensor, name: str) -> Tensor:
            return ops.rms_norm(x, 1e-6) * weights[f"model.{name}.weight"]

        def heads(x: Tensor) -> Tensor:
            return ops.reshape_3d(x, length, shape.heads, n)

        def turned(x: Tensor) -> Tensor:
            return ops.rope_ext(heads(x), positions, n_dims=length)

        def first(x: Tensor) -> Tensor:
            return ops.permute(x, 0, 2, 1, 3)

        x = ops.get_rows(weights["model.embed_tokens.weight"], tokens)
        for i in range(shape.n_layers):

            def product(name: str, x: Tensor, i: int = i) -> Tensor:
                return ops.mul_mat(weights[f"model.layers.{i}.{name}_proj.weight"], x)

            h = norm(x, f"layers.{i}.input_layernorm")
            q = first(turned(product("self_attn.q", h)))
            k = ops.cast(first(turned(product("self_attn.k", h))), "f16")
            v = ops.cast(first(heads(product("self_attn.v", h))), "f16")
            y = ops.flash_attn_ext(q, k, v, mask, scale=length**-0.5)
            y = ops.reshape_2d(y, shape.width, n)
            x = added(x, product("self_attn.o", y), gain)
            h = norm(x, f"layers.{i}.post_attention_layernorm")
            h = ops.silu(product("mlp.gate", h)) * product("mlp.up", h)
            x = added(x, product("mlp.down", h), gain)
        return ops.mul_mat(weights["lm_head.weight"], norm(x, "norm"))

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """Numbers for a run: some tokens, of which each sees those before it."""
        n = self.shape.n_tokens
        found: dict[str, npt.NDArray[Any]] = {
            "tokens": np.arange(n, dtype=np.int32) % self.shape.vocabulary,
            "positions": np.arange(n, dtype=np.int32),
            "mask": np.triu(np.full((n, n), -np.inf, np.float16), 1),
            "gain": np.linspace(0.5, 1.5, self.shape.width, dtype=np.float32),
        }
        return {one.name: found[one.name] for one in self.graph.inputs}

    def close(self) -> None:
        """Free all that is on the device."""
        self._inputs.close()
        self._weights.close()


def _drawn(rng: np.random.Generator, dims: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if len(dims) == 1:
        return np.ones(dims, np.float32)
    return rng.standard_normal(dims, np.float32) / np.float32(np.sqrt(dims[1]))
