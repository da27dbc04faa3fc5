"""Whole layers split by the policies for their names agree with one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _backends
import numpy as np
import pytest
from _layers import experts, gemma, llama_attention
from _release import needs_meta

from ggml_cffi import Context, GGUFFile, GGUFWriter, Graph, MetaDevice, SplitError, ops
from ggml_cffi.device import device
from ggml_cffi.meta import SplitAxis, compare, policies

pytestmark = needs_meta

N_TOKENS = 32
RATIOS = [(1, 1), (3, 1), (1, 1, 1), (2, 1, 3)]
ONE_WITH_A_SHARE = [(1,), (1, 0), (0, 1)]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def causal(n: int, n_kv: int | None = None) -> Any:
    return np.triu(np.full((n, n_kv or n), -np.inf, np.float32), 1)


@pytest.fixture(params=["cpu", pytest.param("workers", marks=pytest.mark.rpc)])
def children(request: pytest.FixtureRequest) -> Any:
    """Gives so many devices: of this process, or of processes of their own."""
    if request.param == "cpu":
        return lambda n: [device("CPU")] * n
    return lambda n: list(_backends.workers(n))


# ---- a real model


@pytest.fixture(scope="module")
def model(gemma: Path) -> Iterator[GGUFFile]:
    with GGUFFile(gemma) as file:
        yield file


@pytest.mark.slow
@pytest.mark.parametrize("ratios", RATIOS, ids=str)
def test_a_layer_of_gemma(model: GGUFFile, ratios: Sequence[float], children: Any) -> None:
    policy = policies.gguf(model, ratios)
    layer = "blk.3."
    names = [name for name in model.tensors if name.startswith(layer)]
    with MetaDevice(children(len(ratios)), policy) as split, Context() as ctx:
        loaded = model.load_into(ctx, split, names)
        w = {name.removeprefix(layer).removesuffix(".weight"): t for name, t in loaded.items()}
        graph = Graph(gemma(ctx, w, N_TOKENS))
        plan = split.plan(graph)
        assert plan[f"{layer}attn_q.weight"].split.axis == SplitAxis.MIRRORED
        assert plan[f"{layer}ffn_up.weight"].split.axis == SplitAxis.AXIS_1
        assert plan[f"{layer}ffn_down.weight"].split.axis == SplitAxis.AXIS_0
        assert len(plan.all_reduces) == 1
        given = {
            "x": numbers(N_TOKENS, 640),
            "positions": np.arange(N_TOKENS, dtype=np.int32),
            "mask": causal(N_TOKENS),
        }
        found = compare(graph, split, inputs=given)
        assert found.agrees, f"{found.first}\n{found}"
        assert len(found.nodes) > 20
        with graph.compile(split) as compiled, graph.compile(split) as again:
            np.testing.assert_array_equal(compiled(**given), again(**given))


# ---- made-up ones

HEADS, KV_HEADS, LENGTH = 8, 4, 32
WIDTH = HEADS * LENGTH
HIDDEN = 512
NUMBERS = {
    "general.architecture": "made",
    "made.block_count": 1,
    "made.embedding_length": WIDTH,
    "made.attention.head_count": HEADS,
    "made.attention.head_count_kv": KV_HEADS,
    "made.feed_forward_length": HIDDEN,
}


def named(arrays: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, Any, str]]:
    """Keys, whole names and types: norms and caches have types of their own."""
    for name, array in arrays.items():
        plain = name.endswith(("norm", "inp", ".bias"))
        suffix = "" if name.endswith(".bias") else ".weight"
        whole = name if name.startswith("cache") else f"blk.0.{name}{suffix}"
        yield name, whole, array, "f16" if name.startswith("cache") else "f32" if plain else kind


def policy_for(
    path: Path,
    arrays: Mapping[str, Any],
    ratios: Sequence[float],
    kind: str = "f32",
    more: Mapping[str, int] | None = None,
) -> policies.Rules:
    """That of a file of a layer with these weights, and with `more` numbers in its metadata."""
    with GGUFWriter(path / "m.gguf") as writer:
        writer.update({**NUMBERS, **(more or {})})
        for _, name, array, dtype in named(arrays, kind):
            if not name.startswith("cache"):
                writer.add_tensor(name, array, dtype)
    with GGUFFile(path / "m.gguf") as file:
        return policies.gguf(file, ratios)


def load(ctx: Context, target: Any, arrays: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Weights by their names without layer and suffix."""
    made = {}
    for name, whole, array, dtype in named(arrays, kind):
        made[name] = ctx.from_numpy(array, name=whole, dtype=dtype)
    ctx.allocate(target)
    return made


def attention_weights(n_cached: int = 0) -> dict[str, Any]:
    kv = KV_HEADS * LENGTH
    found = {
        "attn_norm": numbers(WIDTH, seed=1),
        "attn_q": numbers(WIDTH, WIDTH, seed=2) / 16,
        "attn_k": numbers(kv, WIDTH, seed=3) / 16,
        "attn_v": numbers(kv, WIDTH, seed=4) / 16,
        "attn_output": numbers(WIDTH, WIDTH, seed=5) / 16,
    }
    if n_cached:
        found["cache_k_l0"] = numbers(n_cached, kv, seed=6)
        found["cache_v_l0"] = numbers(n_cached, kv, seed=7)
    return found


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("ratios", [*RATIOS, *ONE_WITH_A_SHARE], ids=str)
def test_attention_split_by_heads(
    tmp_path: Path, ratios: Sequence[float], kind: str, children: Any
) -> None:
    arrays = attention_weights()
    policy = policy_for(tmp_path, arrays, ratios, kind)
    with MetaDevice(children(len(ratios)), policy) as split, Context() as ctx:
        w = load(ctx, split, arrays, kind)
        graph = Graph(llama_attention(ctx, w, N_TOKENS, HEADS, KV_HEADS, LENGTH))
        plan = split.plan(graph)
        assert len(plan.all_reduces) == 1
        assert plan["blk.0.attn_output.weight"].split.axis == SplitAxis.AXIS_0
        given = {"x": numbers(N_TOKENS, WIDTH), "mask": causal(N_TOKENS).astype(np.float16)}
        found = compare(graph, split, inputs=given)
        assert found.agrees, f"{found.first}\n{found}"


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("ratios", [*ONE_WITH_A_SHARE, (1, 1), (3, 1)], ids=str)
def test_a_layer_with_one_kv_head(
    tmp_path: Path, ratios: Sequence[float], kind: str, children: Any
) -> None:
    """Attention is whole, whatever the devices; the feed-forward part is shared out."""
    width, length, hidden = 640, 256, 1024
    arrays = {
        "attn_norm": numbers(width, seed=1),
        "attn_q": numbers(4 * length, width, seed=2) / 25,
        "attn_q_norm": numbers(length, seed=3),
        "attn_k": numbers(length, width, seed=4) / 25,
        "attn_k_norm": numbers(length, seed=5),
        "attn_v": numbers(length, width, seed=6) / 25,
        "attn_output": numbers(width, 4 * length, seed=7) / 32,
        "post_attention_norm": numbers(width, seed=8),
        "ffn_norm": numbers(width, seed=9),
        "ffn_gate": numbers(hidden, width, seed=10) / 25,
        "ffn_up": numbers(hidden, width, seed=11) / 25,
        "ffn_down": numbers(width, hidden, seed=12) / 32,
        "post_ffw_norm": numbers(width, seed=13),
    }
    own = {
        "made.embedding_length": width,
        "made.attention.head_count": 4,
        "made.attention.head_count_kv": 1,
        "made.attention.key_length": length,
        "made.attention.value_length": length,
        "made.feed_forward_length": hidden,
    }
    policy = policy_for(tmp_path, arrays, ratios, kind, own)
    given = {
        "x": numbers(N_TOKENS, width),
        "positions": np.arange(N_TOKENS, dtype=np.int32),
        "mask": causal(N_TOKENS),
    }
    with (
        MetaDevice(children(len(ratios)), policy, on_error="raise") as split,
        Context() as ctx,
        Context() as other,
    ):
        graph = Graph(gemma(ctx, load(ctx, split, arrays, kind), N_TOKENS))
        whole = Graph(gemma(other, load(other, "CPU", arrays, kind), N_TOKENS))
        plan = split.plan(graph)
        for name in ("q", "k", "v", "output"):
            assert plan[f"blk.0.attn_{name}.weight"].split.axis == SplitAxis.MIRRORED
        assert plan["blk.0.ffn_up.weight"].split.axis == SplitAxis.AXIS_1
        assert plan["blk.0.ffn_down.weight"].split.axis == SplitAxis.AXIS_0
        assert len(plan.all_reduces) == 1
        with graph.compile(split) as compiled, whole.compile("CPU") as expected:
            wanted = expected(**given)
            np.testing.assert_allclose(
                compiled(**given), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()
            )


@pytest.mark.parametrize("ratios", RATIOS, ids=str)
def test_a_cache_of_keys_and_values(
    tmp_path: Path, ratios: Sequence[float], children: Any, request: pytest.FixtureRequest
) -> None:
    """Written by set_rows: refused over this process's memory, done over workers, twice."""
    n_cached = 48
    arrays = attention_weights(n_cached)
    policy = policy_for(tmp_path, arrays, ratios)
    given = {
        "x": numbers(N_TOKENS, WIDTH),
        "positions": np.arange(8, 8 + N_TOKENS, dtype=np.int32),
        "rows": np.arange(8, 8 + N_TOKENS, dtype=np.int64),
        "mask": np.triu(np.full((N_TOKENS, n_cached), -np.inf, np.float16), 9),
    }
    with MetaDevice(children(len(ratios)), policy) as split, Context() as ctx, Context() as other:
        one, w = load(other, "CPU", arrays, "f32"), load(ctx, split, arrays, "f32")
        whole = Graph(llama_attention(other, one, N_TOKENS, HEADS, KV_HEADS, LENGTH))
        graph = Graph(llama_attention(ctx, w, N_TOKENS, HEADS, KV_HEADS, LENGTH))
        if request.node.callspec.params["children"] == "cpu":
            with pytest.raises(SplitError, match=r"SET_ROWS .* use rpc\.LocalWorkers"):
                graph.compile(split)
            return
        with graph.compile(split) as compiled, whole.compile("CPU") as expected:
            for shift in (0, 4):  # the cache keeps what the first run wrote
                moved = {**given, "rows": given["rows"] + shift, "x": given["x"] + shift}
                np.testing.assert_allclose(
                    compiled(**moved), expected(**moved), rtol=1e-4, atol=1e-4
                )
        for name in ("cache_k_l0", "cache_v_l0"):
            np.testing.assert_allclose(
                w[name].numpy(copy=True).astype(np.float32),
                one[name].numpy(copy=True).astype(np.float32),
                rtol=2e-3,
                atol=1e-3,
            )


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("ratios", RATIOS, ids=str)
def test_a_mixture_of_experts(
    tmp_path: Path, ratios: Sequence[float], kind: str, children: Any
) -> None:
    n_experts, hidden = 4, HIDDEN
    arrays = {
        "ffn_norm": numbers(WIDTH, seed=1),
        "ffn_gate_inp": numbers(n_experts, WIDTH, seed=2),
        "ffn_up_exps": numbers(n_experts, hidden, WIDTH, seed=3) / 16,
        "ffn_gate_exps": numbers(n_experts, hidden, WIDTH, seed=4) / 16,
        "ffn_down_exps": numbers(n_experts, WIDTH, hidden, seed=5) / 16,
    }
    policy = policy_for(tmp_path, arrays, ratios, kind)
    with MetaDevice(children(len(ratios)), policy) as split, Context() as ctx:
        w = load(ctx, split, arrays, kind)
        graph = Graph(experts(ctx, w, N_TOKENS, 2))
        plan = split.plan(graph)
        assert len(plan.all_reduces) == 1
        assert plan["blk.0.ffn_down_exps.weight"].split.axis == SplitAxis.AXIS_0
        found = compare(graph, split, inputs={"x": numbers(N_TOKENS, WIDTH)})
        assert found.agrees, f"{found.first}\n{found}"
        with graph.compile(split) as compiled, Context() as other:
            same = Graph(experts(other, load(other, "CPU", arrays, kind), N_TOKENS, 2))
            with same.compile("CPU") as expected:
                x = numbers(N_TOKENS, WIDTH, seed=9)
                wanted = expected(x=x)
                np.testing.assert_allclose(
                    compiled(x=x), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()
                )


def biased_experts(ctx: Context, w: Mapping[str, Any], n_tokens: int, n_used: int) -> Any:
    """Experts with biases, gate and up in one where `w` has them so; the router is an input."""
    x = ctx.input((n_tokens, WIDTH), name="x")
    chosen = ctx.input((n_tokens, n_used), "i32", name="chosen")
    h = ops.reshape_3d(x, WIDTH, 1, n_tokens)

    def product(name: str, given: Any) -> Any:
        made = ops.mul_mat_id(w[f"ffn_{name}_exps"], given, chosen)
        return ops.add_id(made, w[f"ffn_{name}_exps.bias"], chosen)

    if "ffn_gate_up_exps" in w:
        h = ops.swiglu(product("gate_up", h))
    else:
        h = ops.swiglu_split(product("gate", h), product("up", h))
    found = product("down", h)
    step, rows = found.handle.nb[1], found.handle.nb[2]
    y = x
    for i in range(n_used):
        y = y + ops.view_2d(found, WIDTH, n_tokens, rows, i * step)
    y.name = "y"
    return y


@pytest.mark.parametrize("names", [("up", "gate"), ("gate_up",)], ids="+".join)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("ratios", [*RATIOS, (1, 0, 1)], ids=str)
def test_experts_with_biases(
    tmp_path: Path, ratios: Sequence[float], kind: str, names: tuple[str, ...], children: Any
) -> None:
    n_experts, n_used, hidden = 4, 2, HIDDEN
    arrays = {
        "ffn_down_exps": numbers(n_experts, WIDTH, hidden, seed=5) / 16,
        "ffn_down_exps.bias": numbers(n_experts, WIDTH, seed=6),
    }
    for i, name in enumerate(names):
        rows = 2 * hidden if name == "gate_up" else hidden
        arrays[f"ffn_{name}_exps"] = numbers(n_experts, rows, WIDTH, seed=10 + i) / 16
        arrays[f"ffn_{name}_exps.bias"] = numbers(n_experts, rows, seed=20 + i)
    policy = policy_for(tmp_path, arrays, ratios, kind)
    given = {
        "x": numbers(N_TOKENS, WIDTH),
        "chosen": np.array([[i % 4, (i + 1 + i // 4 % 3) % 4] for i in range(N_TOKENS)], np.int32),
    }
    with (
        MetaDevice(children(len(ratios)), policy, on_error="raise") as split,
        Context() as ctx,
        Context() as other,
    ):
        graph = Graph(biased_experts(ctx, load(ctx, split, arrays, kind), N_TOKENS, n_used))
        whole = Graph(biased_experts(other, load(other, "CPU", arrays, kind), N_TOKENS, n_used))
        plan = split.plan(graph)
        assert len(plan.all_reduces) == 1
        for name in names:
            assert plan[f"blk.0.ffn_{name}_exps.weight"].split.axis == SplitAxis.AXIS_1
            assert plan[f"blk.0.ffn_{name}_exps.bias"].split.axis == SplitAxis.AXIS_0
        with graph.compile(split) as compiled, whole.compile("CPU") as expected:
            wanted = expected(**given)
            np.testing.assert_allclose(
                compiled(**given), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()
            )
