"""Layers of language models as graphs, with the names of llama.cpp's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggml_cffi import Context, capi, ops

NEOX = capi.GGML_ROPE_TYPE_NEOX
EPS = 1e-6


def heads_first(x: Any) -> Any:
    """From [length, heads, tokens], in ggml's order, to [length, tokens, heads]."""
    return ops.permute(x, 0, 2, 1, 3)


def gemma(ctx: Context, w: Mapping[str, Any], n_tokens: int) -> Any:
    """A layer of Gemma 3 270M: 4 heads of 256 elements, one KV head; attention by products."""
    x = ctx.input((n_tokens, 640), name="x")
    positions = ctx.input(n_tokens, "i32", name="positions")
    mask = ctx.input((n_tokens, n_tokens), name="mask")
    h = ops.rms_norm(x, EPS) * w["attn_norm"]

    def heads(name: str, n: int) -> Any:
        one = ops.reshape_3d(ops.mul_mat(w[f"attn_{name}"], h), 256, n, n_tokens)
        one = ops.rms_norm(one, EPS) * w[f"attn_{name}_norm"]
        return heads_first(ops.rope_ext(one, positions, n_dims=256, mode=NEOX, freq_base=1e4))

    q, k = heads("q", 4), heads("k", 1)
    v = ops.mul_mat(w["attn_v"], h)
    weights = ops.soft_max_ext(ops.mul_mat(k, q), mask, 256**-0.5)
    y = ops.mul_mat(ops.cont(ops.transpose(v)), weights)
    y = ops.cont_2d(heads_first(y), 1024, n_tokens)
    y = ops.mul_mat(w["attn_output"], y)
    x = x + ops.rms_norm(y, EPS) * w["post_attention_norm"]
    h = ops.rms_norm(x, EPS) * w["ffn_norm"]
    h = ops.geglu_split(ops.mul_mat(w["ffn_gate"], h), ops.mul_mat(w["ffn_up"], h))
    y = x + ops.rms_norm(ops.mul_mat(w["ffn_down"], h), EPS) * w["post_ffw_norm"]
    y.name = "y"
    return y


def llama_attention(
    ctx: Context, w: Mapping[str, Any], n_tokens: int, heads: int, kv_heads: int, length: int
) -> Any:
    """Attention with grouped queries by FLASH_ATTN_EXT, over a KV cache where `w` has one."""
    x = ctx.input((n_tokens, heads * length), name="x")
    positions = ctx.input(n_tokens, "i32", name="positions")
    h = ops.rms_norm(x, EPS) * w["attn_norm"]

    def projected(name: str, n: int) -> Any:
        return ops.reshape_3d(ops.mul_mat(w[f"attn_{name}"], h), length, n, n_tokens)

    q = ops.rope_ext(projected("q", heads), positions, n_dims=length)
    k = ops.rope_ext(projected("k", kv_heads), positions, n_dims=length)
    v, n_kv = projected("v", kv_heads), n_tokens
    if "cache_k_l0" in w:
        rows = ctx.input(n_tokens, "i64", name="rows")
        n_kv = w["cache_k_l0"].shape[0]

        def cached(name: str, new: Any) -> Any:
            flat = ops.reshape_2d(new, kv_heads * length, n_tokens)
            return ops.reshape_3d(ops.set_rows(w[name], flat, rows), length, kv_heads, n_kv)

        k, v = cached("cache_k_l0", k), cached("cache_v_l0", v)
    mask = ctx.input((n_tokens, n_kv), "f16", name="mask")
    y = ops.flash_attn_ext(heads_first(q), heads_first(k), heads_first(v), mask, scale=length**-0.5)
    y = ops.reshape_2d(y, heads * length, n_tokens)
    y = x + ops.mul_mat(w["attn_output"], y)
    y.name = "y"
    return y


def experts(ctx: Context, w: Mapping[str, Any], n_tokens: int, n_used: int) -> Any:
    """A mixture of experts: each token goes to the `n_used` that a router gives it."""
    n_experts, width = w["ffn_gate_inp"].shape
    x = ctx.input((n_tokens, width), name="x")
    h = ops.rms_norm(x, EPS) * w["ffn_norm"]
    chances = ops.soft_max(ops.mul_mat(w["ffn_gate_inp"], h))
    chosen = ops.argsort_top_k(chances, n_used)
    share = ops.get_rows(ops.reshape_3d(chances, 1, n_experts, n_tokens), chosen)
    h = ops.reshape_3d(h, width, 1, n_tokens)
    up = ops.mul_mat_id(w["ffn_up_exps"], h, chosen)
    gate = ops.mul_mat_id(w["ffn_gate_exps"], h, chosen)
    found = ops.mul_mat_id(w["ffn_down_exps"], ops.swiglu_split(gate, up), chosen) * share
    step, rows = found.handle.nb[1], found.handle.nb[2]
    y = ops.view_2d(found, width, n_tokens, rows, 0)
    for i in range(1, n_used):
        y = y + ops.view_2d(found, width, n_tokens, rows, i * step)
    y = x + y
    y.name = "y"
    return y
