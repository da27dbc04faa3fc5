"""Policies: which weight of a model is cut how, and that the cuts fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _layers import experts
from _release import needs, needs_meta

from ggml_cffi import (
    Context,
    GGUFFile,
    GGUFWriter,
    Graph,
    MetaDevice,
    SplitState,
    capi,
    device,
    ops,
)
from ggml_cffi.meta import SplitAxis, TensorInfo, policies

F32, Q4_K = 0, 12
MIRRORED = SplitState.mirrored()


def weight(name: str, *ne: int, kind: int = F32, block_size: int = 1) -> TensorInfo:
    return TensorInfo(name, kind, (*ne, 1, 1, 1)[:4], 0, 0, block_size)  # type: ignore[arg-type]


def test_everything_is_mirrored() -> None:
    policy = policies.mirror()
    assert policy(weight("w", 8, 6), 2) == MIRRORED
    assert str(policy) == "everything: mirrored"


def test_everything_by_ratio() -> None:
    policy = policies.by_ratio(1, [3, 1], granularity=2)
    assert policy(weight("w", 8, 16), 2) == SplitState.split(1, [12, 4])
    assert policy(weight("small", 8, 3), 2) == MIRRORED
    assert policy(weight("bias", 8), 2) == MIRRORED
    assert "no two parts of 2" in policy.why(weight("bias", 8), 2)
    with pytest.raises(ValueError, match="2 ratios, the meta device 3 devices"):
        policy(weight("w", 8, 16), 3)


@pytest.mark.parametrize("length", [4, 5, 7, 1000, 1001])
def test_the_last_device_takes_the_rest(length: int) -> None:
    policy, tensor = policies.by_ratio(1, [1, 1], granularity=2), weight("w", 8, length)
    first = length // 2 // 2 * 2
    assert policy(tensor, 2) == SplitState.split(1, [first, length - first])
    assert policy(tensor, 2) == SplitState.by_ratio(tensor, 1, [1, 1], 2)
    assert policy.why(tensor, 2) == "by ratio along axis 1"


def test_parts_are_of_whole_blocks_along_axis_0() -> None:
    """Multiples of 48 elements and of blocks of 256 are multiples of 768."""
    policy = policies.by_ratio(0, [1, 1], granularity=48)
    wide = weight("w", 1792, 8, kind=Q4_K, block_size=256)
    assert policy(wide, 2) == SplitState.split(0, [768, 1024])
    assert policy.why(wide, 2) == "by ratio along axis 0"
    narrow = weight("w", 1280, 8, kind=Q4_K, block_size=256)
    assert policy(narrow, 2) == MIRRORED
    assert policy.why(narrow, 2) == "axis 0 has no two parts of 768"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, [1, 1]), "axis is 3, expected 0, 1 or 2"),
        ((0, [0, 0]), "at least one above 0"),
        ((0, [1, -1]), "expected 0 or more"),
        ((0, [1, 1], 0), "granularity is 0, expected at least 1"),
    ],
)
def test_what_is_no_ratio(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policies.by_ratio(*arguments)


def test_rules_are_tried_in_order_and_whole_names_match() -> None:
    rules = policies.Rules(
        [
            policies.Rule(r"l(?P<layer>\d+)\.up", policies.Column("ffn {layer}")),
            policies.Rule(r"l(?P<layer>\d+)\.down", policies.Row("ffn {layer}")),
            policies.Rule(r"l\d+\..*", policies.Mirror("a norm")),
        ],
        [1, 1],
        {"ffn 0": policies.Group(64, 32), "ffn 1": policies.Group(96, 32)},
    )
    assert rules(weight("l0.up", 8, 64), 2) == SplitState.split(1, [32, 32])
    assert rules(weight("l0.up", 64), 2) == SplitState.split(0, [32, 32])  # its bias
    assert rules(weight("l1.down", 96, 8), 2) == SplitState.split(0, [32, 64])
    assert rules(weight("l1.norm", 8), 2) == MIRRORED
    assert rules.why(weight("l1.norm", 8), 2) == "a norm"
    assert rules.find(weight("l1.upper", 8, 64), 2) == MIRRORED
    assert rules.find(weight("xl1.up", 8, 64), 2) is None
    with pytest.raises(ValueError, match="there is no group 'ffn 7'"):
        rules(weight("l7.up", 8, 64), 2)
    assert str(rules).splitlines()[:2] == [
        "parts 1 : 1",
        r"l(?P<layer>\d+)\.up: column-parallel in ffn {layer}",
    ]


def test_policies_compose() -> None:
    only = policies.Rules([policies.Rule("w", policies.Row())], [1, 1])
    both = only | policies.by_ratio(1, [1, 1])
    assert both(weight("w", 8, 8), 2).axis == SplitAxis.AXIS_0
    assert both(weight("v", 8, 8), 2).axis == SplitAxis.AXIS_1
    assert both(weight("b", 8), 2) == MIRRORED
    assert str(both) == f"{only}\neverything: axis 1, 1 : 1"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([policies.Rule("(", policies.Row())], "'\\(' is no expression"),
        ([policies.Rule("w", policies.Row("ffn"))], "names a group that is not there"),
    ],
)
def test_rules_that_cannot_be(rules: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policies.Rules(rules, [1, 1])


def test_groups_by_what_the_expression_found() -> None:
    """A brace in a name stands for itself."""
    rules = policies.Rules(
        [
            policies.Rule(r"l(?P<layer>\d+)\.up", policies.Column("{ffn {layer}")),
            policies.Rule("down", policies.Row("{other}")),
        ],
        [1, 1],
        {"{ffn 0": policies.Group(64.0, 32.0), "{other}": policies.Group(8)},  # type: ignore[arg-type]
    )
    state = rules(weight("l0.up", 8, 64), 2)
    assert state == SplitState.split(1, [32, 32]) and all(type(n) is int for n in state.ne)
    assert rules(weight("down", 8, 64), 2) == SplitState.split(0, [4, 4])


def test_a_group_leaves_no_device_without_a_share() -> None:
    group = policies.Group(4 * 32, 32)
    assert group.shares([1, 1, 1], 128) == (32, 32, 64)
    assert group.shares([10, 1, 1], 128) == (64, 32, 32)
    assert group.shares([1, 0], 128) == (128, 0)
    assert group.shares([1, 1], 64) == (32, 32)  # half as long: KV heads of grouped queries
    with pytest.raises(ValueError, match="no whole parts of 3"):
        group.shares([1, 1], 3)


# ---- models


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def transformer(
    path: Path,
    heads: int,
    kv_heads: int,
    hidden: int,
    kind: str = "f32",
    *,
    fused: bool = False,
    experts: int = 0,
    without: tuple[str, ...] = (),
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> GGUFFile:
    """A file with one layer; heads have 32 elements.

    `fused`: queries, keys and values are one, and gate and up. `experts` is how many there are in
    place of the one. `without` are weights of the layer to leave out, `more` some to add.
    """
    width, kv = heads * 32, kv_heads * 32
    n = (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    shapes = {
        "attn_output": (width, width),
        f"ffn_up{suffix}": (*n, hidden * (2 if fused else 1), width),
        f"ffn_down{suffix}": (*n, width, hidden),
    }
    if fused:
        shapes["attn_qkv"] = (width + 2 * kv, width)
    else:
        shapes |= {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width)}
        shapes[f"ffn_gate{suffix}"] = (*n, hidden, width)
    shapes |= more or {}
    with GGUFWriter(path) as writer:
        writer.update(
            {
                "general.architecture": "made",
                "made.block_count": 1,
                "made.embedding_length": width,
                "made.attention.head_count": heads,
                "made.attention.head_count_kv": kv_heads,
                "made.feed_forward_length": hidden,
            }
        )
        for name, shape in shapes.items():
            if name not in without:
                dtype = kind if shape[-1] % 256 == 0 else "f32"
                writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, np.float32), dtype)
        for name in ("token_embd", "output"):
            writer.add_tensor(f"{name}.weight", np.zeros((100, width), np.float32))
    return GGUFFile(path)


@needs_meta
def test_a_llama_with_grouped_queries(path: Path) -> None:
    with transformer(path, heads=8, kv_heads=4, hidden=512) as file:
        policy = policies.gguf(file, [1, 1])
    q, k = weight("blk.0.attn_q.weight", 256, 256), weight("blk.0.attn_k.weight", 256, 128)
    assert policy(q, 2) == SplitState.split(1, [128, 128])
    assert policy(k, 2) == SplitState.split(1, [64, 64])
    assert policy(weight("blk.0.attn_k.bias", 128), 2) == SplitState.split(0, [64, 64])
    assert policy(weight("blk.0.attn_sinks.weight", 8), 2) == SplitState.split(0, [4, 4])
    assert policy(weight("cache_k_l0", 128, 50), 2) == SplitState.split(0, [64, 64])
    assert policy(weight("blk.0.attn_output.weight", 256, 256), 2).axis == SplitAxis.AXIS_0
    assert policy(weight("blk.0.attn_output.bias", 256), 2) == MIRRORED
    assert policy(weight("blk.0.ffn_gate.weight", 256, 512), 2) == SplitState.split(1, [256, 256])
    assert policy(weight("blk.0.ffn_down.weight", 512, 256), 2) == SplitState.split(0, [256, 256])
    assert policy(weight("output.weight", 256, 100), 2) == SplitState.split(1, [50, 50])
    for name in ("token_embd.weight", "blk.0.attn_norm.weight", "output_norm.weight"):
        assert policy(weight(name, 256, 100), 2) == MIRRORED


def test_a_cache_is_cut_between_kv_heads_or_not_at_all(path: Path) -> None:
    with transformer(path, heads=8, kv_heads=4, hidden=512) as file:
        policy = policies.gguf(file, [3, 1])
    for name in ("cache_k_l0", "cache_v_l0"):
        rows, heads = weight(name, 128, 16), weight(name, 32, 16, 4)
        assert policy(rows, 2) == SplitState.split(0, [96, 32])
        assert policy(heads, 2) == SplitState.split(2, [3, 1])
        assert policy(weight(name, 128, 16, 2), 2) == SplitState.split(0, [96, 32])  # 2 sequences
        assert policy(weight(name, 32, 16, 4, 2), 2) == SplitState.split(2, [3, 1])
        assert policy.why(heads, 2) == policy.why(rows, 2) == "between KV heads in attention 0"
        for ne in ((32, 4, 16), (16, 32, 4), (32, 16), (64, 16), (256, 16), (32, 16, 8)):
            other = weight(name, *ne)
            assert policy(other, 2) == MIRRORED
            told = f"shape {other.shape}, expected (places, 128) or (4, places, 32)"
            assert policy.why(other, 2) == f"a cache of {told}"


def test_caches_of_keys_and_values_have_the_width_of_theirs(path: Path) -> None:
    lengths = {"made.attention.key_length": 48, "made.attention.value_length": 32}
    with made(path, NUMBERS | lengths) as file:
        policy = policies.gguf(file, [1, 1])
    kv = NUMBERS["made.attention.head_count_kv"]
    for name, width in (("cache_k_l0", 48), ("cache_v_l0", 32)):
        half = kv // 2
        assert policy(weight(name, kv * width, 9), 2) == SplitState.split(0, [half * width] * 2)
        assert policy(weight(name, width, 9, kv), 2) == SplitState.split(2, [half, half])
        assert policy(weight(name, kv * (80 - width), 9), 2) == MIRRORED


@needs_meta
@pytest.mark.parametrize(
    ("shapes", "keys", "values"),
    [
        ({"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}, 32, 32),
        ({"attn_q": 128, "attn_k": 64, "attn_v": 128, "attn_output": 256}, 16, 32),
        ({"attn_q": 256, "attn_k": 128, "attn_output": 256}, 32, 32),  # keys are the values
        ({"attn_q": 256, "attn_output": 128}, 32, 16),  # keys and values of another layer
        ({"attn_q": 512, "attn_k": 256, "attn_v": 256, "attn_output": 512}, 64, 64),
        ({"attn_q": 512, "attn_k": 130, "attn_v": 130, "attn_output": 510}, 64, 64),
        ({"attn_qkv": 1024, "attn_output": 513}, 64, 64),
    ],
)
def test_a_layer_with_heads_of_another_length(
    path: Path, shapes: Mapping[str, int], keys: int, values: int
) -> None:
    """As layers with a sliding window; the metadata has that of the others."""
    lengths = {"attention.key_length": 64, "attention.value_length": 64}
    of_window = {"attention.key_length_swa": 32, "attention.value_length_swa": 32}
    rows = {one: (n, 256) if "output" not in one else (256, n) for one, n in shapes.items()}
    written(path, rows, {}, **lengths, **of_window)
    with GGUFFile(path) as file:
        policy = policies.gguf(file, [3, 1])
    for name, width in (("cache_k_l0", keys), ("cache_v_l0", values)):
        assert policy(weight(name, width, 16, 4), 2) == SplitState.split(2, [3, 1])
        row = weight(name, 4 * width, 16)
        assert policy(row, 2) == SplitState.split(0, [3 * width, width])
        assert policy.why(weight(name, 9, 16), 2).endswith(f"(4, places, {width})")
    query = weight("blk.0.attn_q.weight", 256, 8 * keys)
    assert policy(query, 2) == SplitState.split(1, [6 * keys, 2 * keys])


@needs_meta
def test_a_norm_of_heads_of_another_length(path: Path) -> None:
    rows = {"attn_q": (512, 256), "attn_k": (256, 256), "attn_v": (256, 256)}
    written(path, rows | {"attn_q_norm": (64,), "attn_output": (256, 512)}, {})
    with GGUFFile(path) as file:
        policy = policies.gguf(file, [1, 1])
    query = weight("blk.0.attn_q.weight", 256, 512)
    assert policy(query, 2) == SplitState.split(1, [256, 256])


@needs("0.15: meta devices that cut what RESHAPE and CONT make as the table says")
@needs_meta
def test_a_cache_with_the_heads_outside_goes_through_a_graph(path: Path) -> None:
    """As docs/tensor_parallel.md has it: the cache and the new rows by concat."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((4, 16, 32), np.float32)
    with transformer(path, heads=8, kv_heads=4, hidden=512) as file:
        policy = policies.gguf(file, [3, 1])
        with MetaDevice(["CPU"] * 2, policy, on_error="raise") as device, Context() as ctx:
            cache = ctx.from_numpy(numbers, name="cache_k_l0")
            w = ctx.from_numpy(rng.standard_normal((128, 256), np.float32), "blk.0.attn_k.weight")
            ctx.allocate(device)
            x = ctx.input((1, 256), name="x")
            rows = ops.reshape_3d(x @ w.T, 32, 4, 1)
            now = ops.concat(cache, ops.cont(ops.permute(rows, 0, 2, 1, 3)), 1)
            graph = Graph(now)
            assert device.plan(graph)["cache_k_l0"].split == SplitState.split(2, [3, 1])
            given = rng.standard_normal((1, 256), np.float32)
            found = graph.compile(device)(x=given)
            new = (given @ w.numpy().T).reshape(4, 1, 32)
    np.testing.assert_allclose(found, np.concatenate([numbers, new], 1), rtol=1e-4, atol=1e-4)


@needs_meta
def test_cuts_are_of_whole_heads_and_blocks(path: Path) -> None:
    """4 KV heads of 2 heads of 32 elements: a block of 256 is four of those groups."""
    with transformer(path, heads=32, kv_heads=16, hidden=1024, kind="q4_K") as file:
        policy = policies.gguf(file, [3, 1])
    q = weight("blk.0.attn_q.weight", 1024, 1024, kind=Q4_K, block_size=256)
    assert policy(q, 2) == SplitState.split(1, [768, 256])
    v = weight("blk.0.attn_v.weight", 1024, 512, kind=Q4_K, block_size=256)
    assert policy(v, 2) == SplitState.split(1, [384, 128])
    down = weight("blk.0.ffn_down.weight", 1024, 1024, kind=Q4_K, block_size=256)
    assert policy(down, 2) == SplitState.split(0, [768, 256])


@needs_meta
def test_too_few_kv_heads_keep_attention_whole(path: Path) -> None:
    with transformer(path, heads=4, kv_heads=1, hidden=512) as file:
        policy = policies.gguf(file, [1, 1])
    q = weight("blk.0.attn_q.weight", 128, 128)
    assert policy(q, 2) == MIRRORED
    assert policy.why(q, 2) == "1 KV heads are too few for 2 devices"
    assert policy(weight("blk.0.ffn_up.weight", 128, 512), 2).axis == SplitAxis.AXIS_1


@needs_meta
@pytest.mark.parametrize("ratios", [(1,), (1, 0), (0, 2, 0)])
def test_one_kv_head_is_whole_where_one_device_has_a_share(path: Path, ratios: Any) -> None:
    """A cut of it would be along the elements of a head, once there is an axis of heads."""
    n = len(ratios)
    for heads, fused in ((4, False), (4, True), (1, False)):
        with transformer(path, heads, kv_heads=1, hidden=512, fused=fused) as file:
            policy = policies.gguf(file, ratios)
        for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "blk.0.attn_output.weight"):
            assert policy(weight(name, 32, 32), n) == MIRRORED
            assert policy.why(weight(name, 32, 32), n) == "1 KV head cannot be cut"
        assert policy(weight("cache_k_l0", 32, 50), n) == MIRRORED
        assert policy(weight("blk.0.ffn_down.weight", 512, 32), n).axis == SplitAxis.AXIS_0
    with transformer(path, heads=4, kv_heads=2, hidden=512) as file:
        policy = policies.gguf(file, ratios)
    all_of_it = SplitState.split(0, [128 if ratio else 0 for ratio in ratios])
    assert policy(weight("blk.0.attn_output.weight", 128, 128), n) == all_of_it


@needs_meta
@pytest.mark.parametrize("ratios", [(1,), (1, 0)])
def test_a_single_block_is_whole_where_one_device_has_a_share(path: Path, ratios: Any) -> None:
    n = len(ratios)
    with transformer(path, heads=8, kv_heads=8, hidden=256, kind="q4_K") as file:
        policy = policies.gguf(file, ratios)
    for name, why in (
        ("attn_output", "8 KV heads have too few whole blocks for 1 device"),
        ("ffn_down", "it is too small to be cut"),
    ):
        tensor = weight(f"blk.0.{name}.weight", 256, 256, kind=Q4_K, block_size=256)
        assert policy(tensor, n) == MIRRORED
        assert policy.why(tensor, n) == why
    with transformer(path, heads=16, kv_heads=16, hidden=512, kind="q4_K") as file:
        policy = policies.gguf(file, ratios)
    for name in ("attn_output", "ffn_down"):
        tensor = weight(f"blk.0.{name}.weight", 512, 512, kind=Q4_K, block_size=256)
        assert policy(tensor, n) == SplitState.split(0, [512, 0][:n])


MLA = {
    "attn_q_a": (64, 256),
    "attn_q_a_norm": (64,),
    "attn_q_b": (256, 64),
    "attn_kv_a_mqa": (96, 256),
    "attn_kv_a_norm": (64,),
    "attn_kv_b": (512, 64),
}


@needs_meta
@pytest.mark.parametrize(
    ("without", "more", "why"),
    [
        (("attn_q", "attn_k", "attn_v"), MLA, "there is no cut for attn_q_a.weight"),
        (
            ("attn_k", "attn_v"),
            {"attn_kv_a_mqa": (96, 256), "attn_k_b": (8, 64, 32), "attn_v_b": (8, 32, 64)},
            "there is no cut for attn_kv_a_mqa.weight",
        ),
        ((), {"attn_gate": (256, 256)}, "there is no cut for attn_gate.weight"),
        (("attn_q", "attn_k", "attn_v"), {"wqkv": (512, 256)}, "there is no attn_q.weight"),
        (("attn_output",), {"attn_out": (256, 256)}, "there is no cut for attn_out.weight"),
        (("attn_output",), {"ssm_out": (256, 256)}, "there is no attn_output.weight"),
        ((), {"ssm_conv1d_q": (256, 4)}, "there is no cut for ssm_conv1d_q.weight"),
        ((), {"attn_sub_norm": (256,)}, "attn_sub_norm.weight is of all heads"),
        ((), {"attn_q_norm": (256,)}, "attn_q_norm.weight is of all heads"),
        ((), {"attn_k_norm": (4, 32)}, "attn_k_norm.weight is of all heads"),
    ],
)
def test_an_attention_with_other_weights_is_whole(
    path: Path, without: Any, more: Any, why: str
) -> None:
    with transformer(path, 8, 4, hidden=512, without=without, more=more) as file:
        policy = policies.gguf(file, [1, 1])
    for name in ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"):
        tensor = weight(f"blk.0.{name}.weight", 256, 256)
        assert policy(tensor, 2) == MIRRORED
        assert policy.why(tensor, 2) == why
    assert policy(weight("cache_k_l0", 128, 50), 2) == MIRRORED
    assert policy(weight("blk.0.ffn_down.weight", 512, 256), 2) == SplitState.split(0, [256, 256])


@needs_meta
@pytest.mark.parametrize(
    ("without", "more"),
    [
        ((), {"attn_norm": (256,), "attn_q_norm": (32,), "attn_k_norm": (32,)}),
        ((), {"attn_norm_2": (256,), "attn_sinks": (8,), "attn_rot_embd": (16,)}),
        ((), {"ssm_in": (600, 256), "ssm_out": (256, 300)}),  # beside the attention
        (("attn_k", "attn_v"), {}),  # those of another layer
        (("attn_v",), {}),  # the keys
    ],
)
def test_an_attention_with_these_weights_is_cut(path: Path, without: Any, more: Any) -> None:
    with transformer(path, 8, 4, hidden=512, without=without, more=more) as file:
        policy = policies.gguf(file, [1, 1])
    assert policy(weight("blk.0.attn_q.weight", 256, 256), 2) == SplitState.split(1, [128, 128])
    output = weight("blk.0.attn_output.weight", 256, 256)
    assert policy(output, 2) == SplitState.split(0, [128, 128])


@needs_meta
@pytest.mark.parametrize(
    ("without", "more", "why"),
    [
        (("ffn_up", "ffn_gate"), {"ffn_in": (512, 256)}, "there is no ffn_up.weight"),
        (("ffn_up",), {}, "there is no ffn_up.weight"),
        (("ffn_down",), {"ffn_out": (256, 512)}, "there is no ffn_down.weight"),
        ((), {"ffn_sub_norm": (512,)}, "ffn_sub_norm.weight is of all hidden units"),
    ],
)
def test_a_feed_forward_part_with_other_weights_is_whole(
    path: Path, without: Any, more: Any, why: str
) -> None:
    with transformer(path, 8, 4, hidden=512, without=without, more=more) as file:
        policy = policies.gguf(file, [1, 1])
    for name in ("ffn_up", "ffn_gate", "ffn_gate_up", "ffn_down"):
        tensor = weight(f"blk.0.{name}.weight", 512, 512)
        assert policy(tensor, 2) == MIRRORED
        assert policy.why(tensor, 2) == why
    output = weight("blk.0.attn_output.weight", 256, 256)
    assert policy(output, 2) == SplitState.split(0, [128, 128])


@needs_meta
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"ffn_down_exps": (2, 256, 512)}, "there is no ffn_up_exps.weight"),
        ({"ffn_gate_up_exps": (2, 1024, 256)}, "there is no ffn_down_exps.weight"),
        ({"ffn_down_shexp": (256, 512)}, "there is no ffn_up_shexp.weight"),
    ],
)
def test_incomplete_experts_beside_a_dense_part_are_whole(path: Path, more: Any, why: str) -> None:
    with transformer(path, 8, 4, hidden=512, more=more) as file:
        policy = policies.gguf(file, [1, 1])
    suffix = next(iter(more)).rsplit("_", 1)[1]
    for name in (f"ffn_up_{suffix}", f"ffn_down_{suffix}"):
        tensor = weight(f"blk.0.{name}.weight", 512, 512)
        assert policy.find(tensor, 2) == MIRRORED
        assert policy.why(tensor, 2) == why
    down = weight("blk.0.ffn_down.weight", 512, 256)
    assert policy(down, 2) == SplitState.split(0, [256, 256])


@needs_meta
@pytest.mark.parametrize(
    ("architecture", "n_layers", "has_number"),
    [
        ("mpt", 1, True),
        ("jais", 1, True),
        ("bloom", 1, False),  # llama.cpp knows it of these
        ("refact", 1, False),
        ("jina-bert-v2", 1, False),
        ("baichuan", 40, False),
    ],
)
def test_an_attention_with_alibi_is_whole(
    path: Path, architecture: str, n_layers: int, has_number: bool
) -> None:
    numbers = {key.replace("made.", f"{architecture}."): n for key, n in NUMBERS.items()}
    numbers |= {"general.architecture": architecture, f"{architecture}.block_count": n_layers}
    bias = f"{architecture}.attention.max_alibi_bias"
    query = weight("blk.0.attn_q.weight", 256, 256)
    for ratios in ([1, 1], [1, 0], [0, 1]):
        with made(path, numbers | ({bias: 8.0} if has_number else {})) as file:
            policy = policies.gguf(file, ratios)
        for name in ("attn_q.weight", "attn_qkv.weight", "attn_qkv.bias", "attn_output.weight"):
            tensor = weight(f"blk.0.{name}", 256, 256)
            assert policy(tensor, 2) == MIRRORED
            assert policy.why(tensor, 2).startswith("ALiBi goes by the numbers of the heads")
        assert policy(weight("cache_k_l0", 128, 16), 2) == MIRRORED
        assert policy(weight("blk.0.ffn_down.weight", 512, 256), 2).axis == SplitAxis.AXIS_0
    with made(path, numbers | {bias: 0.0}) as file:
        state = policies.gguf(file, [1, 1])(query, 2)
    assert state == (SplitState.split(1, [128, 128]) if has_number else MIRRORED)
    with made(path, numbers | {f"{architecture}.block_count": 32}) as file:  # Baichuan 7B has none
        state = policies.gguf(file, [1, 1])(query, 2)
    is_whole = not has_number and architecture != "baichuan"
    assert state == (MIRRORED if is_whole else SplitState.split(1, [128, 128]))


def test_what_is_not_in_the_first_of_several_files(path: Path) -> None:
    names = "blk.0.attn_output.weight", "blk.1.ffn_down.weight"
    with made(path, NUMBERS | {"split.count": 3}, *names) as file:
        policy = policies.gguf(file, [1, 1])
    for i in range(2):
        down = weight(f"blk.{i}.ffn_down.weight", 512, 256)
        assert policy(down, 2) == SplitState.split(0, [256, 256])
        output = weight(f"blk.{i}.attn_output.weight", 256, 256)
        assert policy(output, 2) == SplitState.split(0, [128, 128])
    assert policy.why(weight("token_embd.weight", 256, 100), 2) == "each device needs all of it"
    with made(path, NUMBERS | {"split.count": 1}, *names) as file:
        policy = policies.gguf(file, [1, 1])
    assert policy(weight("blk.0.attn_output.weight", 256, 256), 2) == MIRRORED
    assert policy(weight("blk.1.ffn_down.weight", 512, 256), 2) == MIRRORED
    assert policy(weight("blk.0.ffn_down.weight", 512, 256), 2) == SplitState.split(0, [256, 256])


@needs_meta
def test_fused_weights_are_segments(path: Path) -> None:
    with transformer(path, heads=8, kv_heads=4, hidden=512, fused=True) as file:
        policy = policies.gguf(file, [1, 3])
    qkv = weight("blk.0.attn_qkv.weight", 256, 512)
    assert policy(qkv, 2) == SplitState.segments(1, [[64, 192], [32, 96], [32, 96]])
    up = weight("blk.0.ffn_up.weight", 256, 1024)
    assert policy(up, 2) == SplitState.segments(1, [[128, 384]], [2])
    with pytest.raises(ValueError, match="has 500 rows, expected 256 \\+ 128 \\+ 128"):
        policy(weight("blk.0.attn_qkv.weight", 256, 500), 2)


@needs_meta
def test_experts_are_split_inside(path: Path) -> None:
    with transformer(path, heads=8, kv_heads=8, hidden=512, experts=4) as file:
        policy, one_idle = policies.gguf(file, [1, 1]), policies.gguf(file, [1, 0])
    up = weight("blk.0.ffn_up_exps.weight", 256, 512, 4)
    assert policy(up, 2) == SplitState.split(1, [256, 256])
    down = weight("blk.0.ffn_down_exps.weight", 512, 256, 4)
    assert policy(down, 2) == SplitState.split(0, [256, 256])
    assert policy(weight("blk.0.ffn_down_exps.bias", 256, 4), 2) == SplitState.partial()
    assert policy(weight("blk.0.ffn_gate_inp.weight", 256, 4), 2) == MIRRORED
    assert one_idle(weight("blk.0.ffn_down_exps.bias", 256, 4), 2) == MIRRORED


@needs_meta
def test_biases_of_experts_are_split_inside(path: Path) -> None:
    """Their rows are the experts; with one row as many as there are experts, or of one expert."""
    with transformer(path, heads=8, kv_heads=8, hidden=512, experts=3) as file:
        policy = policies.gguf(file, [1, 1])
    for n in (1, 2, 3, 512):
        for name in ("ffn_up", "ffn_gate"):
            bias = weight(f"blk.0.{name}_exps.bias", 512, n)
            assert policy(bias, 2) == SplitState.split(0, [256, 256])
            assert policy.why(bias, 2) == "column-parallel along axis 0 in experts 0"
        both = weight("blk.0.ffn_gate_up_exps.bias", 1024, n)
        assert policy(both, 2) == SplitState.segments(0, [[256, 256]], [2])
    both = weight("blk.0.ffn_gate_up_exps.weight", 256, 1024, 3)
    assert policy(both, 2) == SplitState.segments(1, [[256, 256]], [2])
    with pytest.raises(ValueError, match="has 500 elements, expected 512 \\+ 512"):
        policy(weight("blk.0.ffn_gate_up_exps.bias", 500, 3), 2)


ARCTIC = {  # of a layer: a dense part, experts and shared experts, each of a length of its own
    "ffn_up": (7168, 256),
    "ffn_gate": (7168, 256),
    "ffn_down": (256, 7168),
    "ffn_up_exps": (2, 4864, 256),
    "ffn_gate_exps": (2, 4864, 256),
    "ffn_down_exps": (2, 256, 4864),
    "ffn_up_shexp": (1408, 256),
    "ffn_gate_shexp": (1408, 256),
    "ffn_down_shexp": (256, 1408),
}


def written(path: Path, shapes: Mapping[str, Any], kinds: Mapping[str, str], **more: Any) -> None:
    """A file of one layer with these weights, of the types `kinds`, else f32."""
    with GGUFWriter(path) as writer:
        numbers = {f"made.{key}": value for key, value in more.items()}
        writer.update(NUMBERS | {"made.block_count": 1} | numbers)
        for name, shape in shapes.items():
            zeros = np.zeros(shape, np.float32)
            writer.add_tensor(f"blk.0.{name}.weight", zeros, kinds.get(name, "f32"))


@needs_meta
@pytest.mark.parametrize("ratios", [(1, 1), (3, 1), (5, 3, 2), (1, 0)])
def test_a_dense_part_beside_experts_of_another_length(path: Path, ratios: Any) -> None:
    written(path, ARCTIC, {}, feed_forward_length=4864)
    with GGUFFile(path) as file, Context() as ctx:
        policy = policies.gguf(file, ratios)
        with MetaDevice(["CPU"] * len(ratios), policy, on_error="raise") as device:
            file.load_into(ctx, device)
    for part, suffix, length in (
        ("ffn", "", 7168),
        ("experts", "_exps", 4864),
        ("shared experts", "_shexp", 1408),
    ):
        shares = policies.Group(length, 128).shares(ratios, length)
        for name in ("up", "gate"):
            tensor = weight(f"blk.0.ffn_{name}{suffix}.weight", 256, length, 2)
            assert policy(tensor, len(ratios)) == SplitState.split(1, shares)
            assert policy.why(tensor, len(ratios)) == f"column-parallel in {part} 0"
        down = weight(f"blk.0.ffn_down{suffix}.weight", length, 256, 2)
        assert policy(down, len(ratios)) == SplitState.split(0, shares)
    gate = weight("blk.0.ffn_gate_inp_shexp.weight", 256)
    assert policy.why(gate, len(ratios)) == "each device needs all of it"


@needs_meta
@pytest.mark.parametrize("ratios", [(3, 1), (1, 0)])
def test_a_dense_part_beside_experts_goes_through_a_graph(path: Path, ratios: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = {
        "ffn_norm": (256,),
        "ffn_gate_inp": (2, 256),
        "ffn_up": (896, 256),
        "ffn_down": (256, 896),
        "ffn_up_exps": (2, 512, 256),
        "ffn_gate_exps": (2, 512, 256),
        "ffn_down_exps": (2, 256, 512),
        "ffn_up_shexp": (384, 256),
        "ffn_down_shexp": (256, 384),
    }
    written(path, shapes, {})
    with GGUFFile(path) as file:
        policy = policies.gguf(file, ratios)
    arrays = {name: rng.standard_normal(shape, np.float32) / 16 for name, shape in shapes.items()}
    given = rng.standard_normal((5, 256), np.float32)
    results = []
    for target in (MetaDevice(["CPU"] * 2, policy, on_error="raise"), device("CPU")):
        with Context() as ctx:
            w = {one: ctx.from_numpy(a, f"blk.0.{one}.weight") for one, a in arrays.items()}
            ctx.allocate(target)
            y, x = experts(ctx, w, n_tokens=5, n_used=1), ctx.input((5, 256), name="dense")
            for suffix in ("", "_shexp"):
                hidden = ops.relu(ops.mul_mat(w[f"ffn_up{suffix}"], x))
                y = y + ops.mul_mat(w[f"ffn_down{suffix}"], hidden)
            with Graph(y).compile(target) as run:
                results.append(run(x=given, dense=given))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)


@needs_meta
def test_a_dense_part_beside_experts_of_other_blocks(path: Path) -> None:
    shapes = {
        "ffn_up": (512, 256),
        "ffn_down": (256, 512),
        "ffn_up_exps": (2, 512, 256),
        "ffn_down_exps": (2, 256, 512),
    }
    for kinds, dense, expert in (
        ({"ffn_down": "q4_K", "ffn_down_exps": "q8_0"}, [256, 256], [384, 128]),
        ({"ffn_down": "q8_0", "ffn_down_exps": "q4_K"}, [384, 128], [256, 256]),
    ):
        written(path, shapes, kinds)
        with GGUFFile(path) as file, Context() as ctx:
            policy = policies.gguf(file, [3, 1])
            with MetaDevice(["CPU"] * 2, policy, on_error="raise") as device:
                file.load_into(ctx, device)
        assert policy(weight("blk.0.ffn_up.weight", 256, 512), 2).shares == tuple(dense)
        up = weight("blk.0.ffn_up_exps.weight", 256, 512, 2)
        assert policy(up, 2).shares == tuple(expert)


@needs_meta
def test_a_fused_up_is_told_by_the_length_of_down(path: Path) -> None:
    """The metadata may have the length of the experts."""
    shapes = {"ffn_up": (1024, 256), "ffn_down": (256, 512), "ffn_up_exps": (2, 1024, 256)}
    written(path, shapes | {"ffn_down_exps": (2, 256, 1024)}, {}, feed_forward_length=1024)
    with GGUFFile(path) as file:
        policy = policies.gguf(file, [3, 1])
    up = weight("blk.0.ffn_up.weight", 256, 1024)
    assert policy(up, 2) == SplitState.segments(1, [[384, 128]], [2])
    up = weight("blk.0.ffn_up_exps.weight", 256, 1024, 2)
    assert policy(up, 2) == SplitState.split(1, [768, 256])


@needs_meta
def test_experts_that_are_too_small_have_a_rule(path: Path) -> None:
    with transformer(path, heads=8, kv_heads=8, hidden=1, experts=3) as file:
        policy = policies.gguf(file, [1, 1]) | policies.by_ratio(0, [1, 1])
    for name in ("up", "gate", "gate_up", "down"):
        for part in ("weight", "bias"):
            tensor = weight(f"blk.0.ffn_{name}_exps.{part}", 256, 3)
            assert policy(tensor, 2) == MIRRORED, tensor
            assert policy.why(tensor, 2) == "it is too small to be cut"


CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
NUMBERS = {
    "general.architecture": "made",
    "made.block_count": 2,
    "made.embedding_length": 256,
    "made.attention.head_count": 8,
    "made.attention.head_count_kv": 4,
    "made.feed_forward_length": 512,
}


def made(path: Path, numbers: dict[str, Any], *names: str) -> GGUFFile:
    """A file with this metadata, and with small tensors of these names."""
    with GGUFWriter(path) as writer:
        writer.update(numbers)
        for name in names:
            writer.add_tensor(name, np.zeros((4, 4), np.float32))
    return GGUFFile(path)


def test_an_output_that_is_tied_to_the_embedding(path: Path) -> None:
    embedding, output = weight("token_embd.weight", 256, 100), weight("output.weight", 256, 100)
    with made(path, NUMBERS, "token_embd.weight") as file:
        policy = policies.gguf(file, [1, 1])
    assert policy(embedding, 2) == MIRRORED
    assert policy.why(embedding, 2) == "tied: it is the output as well"
    assert policy(output, 2) == SplitState.split(1, [50, 50])  # a copy of one's own
    with made(path, NUMBERS, "token_embd.weight", "output.weight") as file:
        policy = policies.gguf(file, [1, 1])
    assert policy(embedding, 2) == MIRRORED
    assert policy.why(embedding, 2) == "each device needs all of it"
    assert policy(output, 2) == SplitState.split(1, [50, 50])


@needs_meta
@pytest.mark.parametrize("ratios", [(3, 1), (1, 0), (1, 1, 1)])
def test_a_bias_of_the_output_is_cut_as_the_weight(path: Path, ratios: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((96, 64), np.float32), rng.standard_normal(96, np.float32)
    given = rng.standard_normal((3, 64), np.float32)
    with made(path, NUMBERS, "output.weight") as file:
        of_gguf = policies.gguf(file, ratios)
    for policy, name in ((of_gguf, "output"), (policies.hugging_face(CONFIG, ratios), "lm_head")):
        meta = MetaDevice(["CPU"] * len(ratios), policy, on_error="raise")
        with meta, Context() as ctx:
            w = ctx.from_numpy(a, f"{name}.weight")
            bias = ctx.from_numpy(b, f"{name}.bias")
            ctx.allocate(meta)
            x = ctx.input((3, 64), name="x")
            found = Graph(x @ w.T + bias).compile(meta)(x=given)
        np.testing.assert_allclose(found, given @ a.T + b, rtol=1e-4, atol=1e-4)


def test_a_bias_of_an_output_that_is_tied(path: Path) -> None:
    with made(path, NUMBERS, "token_embd.weight") as file:
        of_gguf = policies.gguf(file, [1, 1])
    tied = policies.hugging_face(CONFIG | {"tie_word_embeddings": True}, [1, 1])
    for policy, name in ((of_gguf, "output"), (tied, "lm_head"), (tied, "language_model.lm_head")):
        bias = weight(f"{name}.bias", 100)
        assert policy(bias, 2) == MIRRORED
        assert policy.why(bias, 2) == "tied: each device computes all logits"


COUNT, ABOVE = "expected an integer of 0 or more", "expected an integer of 1 or more"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("attention.head_count", [8], "has 1 numbers, expected one for each of 2 layers"),
        ("feed_forward_length", [512], "has 1 numbers, expected one for each of 2 layers"),
        ("attention.head_count", [8, -8], rf"is -8 \(int\), {COUNT}"),
        ("attention.head_count", [8.0, 8.0], rf"is 8.0 \(float\), {COUNT}"),
        ("attention.head_count_kv", [True, True], rf"is True \(bool\), {COUNT}"),
        ("attention.head_count", [[8], [8]], rf"is .*GGUFArray.*, {COUNT}"),
        ("attention.head_count_kv", -1, rf"is -1 \(int\), {COUNT}"),
        ("attention.key_length", 0, rf"is 0 \(int\), {ABOVE}"),
        ("attention.value_length", -32, rf"is -32 \(int\), {ABOVE}"),
        ("embedding_length", 0, rf"is 0 \(int\), {ABOVE}"),
        ("embedding_length", [256, 256], rf"is .*GGUFArray.*, {ABOVE}"),
        ("feed_forward_length", -512, rf"is -512 \(int\), {COUNT}"),
        ("feed_forward_length", 512.0, rf"is 512.0 \(float\), {COUNT}"),
        ("feed_forward_length", "512", rf"is '512' \(str\), {COUNT}"),
        ("expert_feed_forward_length", False, rf"is False \(bool\), {COUNT}"),
        ("block_count", True, rf"is True \(bool\), {ABOVE}"),
        ("block_count", 0, rf"is 0 \(int\), {ABOVE}"),
        ("block_count", -2, rf"is -2 \(int\), {ABOVE}"),
        ("block_count", [2, 2], rf"is .*GGUFArray.*, {ABOVE}"),
        ("block_count", 2**32 - 1, "is 4294967295, expected at most 1024 layers"),
    ],
)
def test_metadata_without_sense(path: Path, key: str, value: Any, text: str) -> None:
    tensors = [f"blk.{i}.ffn_down_exps.weight" for i in range(2)]
    file = made(path, NUMBERS | {f"made.{key}": value}, *tensors)
    with file, pytest.raises(ValueError, match=rf"model\.gguf: made\.{key} {text}"):
        policies.gguf(file, [1, 1])


def test_what_stands_in_for_numbers_that_a_file_lacks(path: Path) -> None:
    file = made(path, NUMBERS | {"made.attention.head_count": 512})  # of 256 elements
    with file, pytest.raises(ValueError, match=r"no number made\.attention\.key_length"):
        policies.gguf(file, [1, 1])
    for architecture in ({}, {"general.architecture": 7}):
        numbers = {key: value for key, value in NUMBERS.items() if key.startswith("made")}
        file = made(path, numbers | architecture)
        with file, pytest.raises(ValueError, match=r"model\.gguf has no general\.architecture"):
            policies.gguf(file, [1, 1])


def test_a_layer_of_numbers_of_its_own(path: Path) -> None:
    """Some layers of hybrid models have no attention, or no KV heads."""
    for heads, kv_heads, why in (
        (0, 0, "0 KV heads are too few for 2 devices"),
        (8, 0, "0 KV heads are too few for 2 devices"),
        (0, 4, "0 heads are too few for 4 KV heads"),
    ):
        own = {
            "made.attention.head_count": [8, heads],
            "made.attention.head_count_kv": [4, kv_heads],
            "made.feed_forward_length": [512, 0],
        }
        with made(path, NUMBERS | own) as file:
            policy = policies.gguf(file, [1, 1])
        q = "attn_q.weight", 256, 256
        assert policy(weight(f"blk.0.{q[0]}", *q[1:]), 2) == SplitState.split(1, [128, 128])
        assert policy(weight(f"blk.1.{q[0]}", *q[1:]), 2) == MIRRORED
        assert policy.why(weight(f"blk.1.{q[0]}", *q[1:]), 2) == why
        up = weight("blk.1.ffn_up.weight", 256, 512)
        assert policy.why(up, 2) == "it is too small to be cut"


@pytest.mark.parametrize("n", [1, 2, 10, 11, 18, 32, 126, 1024])
def test_equal_layers_are_printed_once(n: int) -> None:
    policy = policies.hugging_face(CONFIG | {"num_hidden_layers": n}, [1, 1])
    assert len(str(policy).splitlines()) == 12
    for i in range(n):
        up = weight(f"model.layers.{i}.mlp.up_proj.weight", 256, 512)
        assert policy.find(up, 2) == SplitState.split(1, [256, 256])
        assert policy.why(up, 2) == f"column-parallel in ffn {i}"
    for i in (n, n + 1, 10 * n, 10 * n + 9, n + 1000, "00", "01", "-1", ""):
        up = weight(f"model.layers.{i}.mlp.up_proj.weight", 256, 512)
        assert policy.find(up, 2) is None


def test_the_numbers_of_equal_layers_are_an_expression(path: Path) -> None:
    with made(path, NUMBERS | {"made.block_count": 18}) as file:
        lines = str(policies.gguf(file, [1, 1])).splitlines()
    assert r"cache_[kv]_l(?P<layer>[0-9]|1[0-7]): between KV heads in attention {layer}" in lines
    policy = policies.hugging_face(CONFIG | {"num_hidden_layers": 126}, [1, 1])
    assert "cache_[kv]_l(?P<layer>[0-9]|([1-9]|1[01])[0-9]|12[0-5])" in str(policy)


def test_layers_that_differ_have_rules_of_their_own(path: Path) -> None:
    own = {"made.block_count": 30, "made.feed_forward_length": [512, 512, 256] * 10}
    with made(path, NUMBERS | own) as file:
        policy = policies.gguf(file, [1, 1])
    assert len(str(policy).splitlines()) < 30
    for i in range(30):
        half = 128 if i % 3 == 2 else 256
        up = weight(f"blk.{i}.ffn_up.weight", 256, 2 * half)
        assert policy(up, 2) == SplitState.split(1, [half, half])
        assert policy.why(up, 2) == f"column-parallel in ffn {i}"
        assert policy(weight(f"cache_v_l{i}", 128, 9), 2) == SplitState.split(0, [64, 64])


@pytest.mark.parametrize("key", [*CONFIG, "head_dim", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", [8, 8], {}])
def test_configs_without_sense(key: str, value: Any) -> None:
    for config in (CONFIG | {key: value}, {"text_config": CONFIG | {key: value}}):
        with pytest.raises(ValueError, match=rf"config: {key} is .*, {ABOVE}"):
            policies.hugging_face(config, [1, 1])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000.*0, expected at most 1024"),
        ({"num_attention_heads": 512}, "config has no number 'head_dim'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'.*true or false"),
        ({"text_config": [1]}, r"text_config is \[1\] \(list\), expected a mapping"),
    ],
)
def test_other_configs_without_sense(more: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policies.hugging_face(CONFIG | more, [1, 1])


def test_nulls_of_a_config_are_left_out() -> None:
    nulls = {"text_config": None, "head_dim": None, "tie_word_embeddings": None}
    found = policies.hugging_face(CONFIG | nulls, [1, 1])
    assert str(found) == str(policies.hugging_face(CONFIG, [1, 1]))


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-32, ValueError), (1.5, ValueError), ("32", TypeError)]
)
def test_block_sizes_without_sense(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"block_size is .*, expected"):
        policies.hugging_face(CONFIG, [1, 1], size)


HUGE = [10**400, 10**5000, -(10**400), Fraction(10**400), Fraction(10**5000, 3)]


@pytest.mark.parametrize("ratio", HUGE, ids=range(len(HUGE)))
def test_ratios_that_no_float_holds(path: Path, ratio: Any) -> None:
    with made(path, NUMBERS) as file:
        for make in (
            lambda ratios: policies.by_ratio(1, ratios),
            lambda ratios: policies.Rules([], ratios),
            lambda ratios: policies.Group(8).shares(ratios, 8),
            lambda ratios: policies.gguf(file, ratios),
            lambda ratios: policies.hugging_face(CONFIG, ratios),
        ):
            with pytest.raises(ValueError, match=r"ratio 1 is .*, expected 0 or more, finite"):
                make([1, ratio])


def test_a_config_that_ties_output_and_embedding() -> None:
    for tied, why in ((True, "tied: it is the output as well"), (False, "each device needs all")):
        policy = policies.hugging_face(CONFIG | {"tie_word_embeddings": tied}, [1, 1])
        embedding = weight("model.embed_tokens.weight", 256, 100)
        assert policy(embedding, 2) == MIRRORED
        assert policy.why(embedding, 2).startswith(why)
        assert policy(weight("lm_head.weight", 256, 100), 2) == SplitState.split(1, [50, 50])
    beside = policies.hugging_face({"text_config": CONFIG, "tie_word_embeddings": True}, [1, 1])
    assert beside.why(embedding, 2) == "tied: it is the output as well"


@needs_meta
def test_a_file_that_is_no_transformer(path: Path) -> None:
    with GGUFWriter(path) as writer:
        writer.set("general.architecture", "made")
    with GGUFFile(path) as file, pytest.raises(ValueError, match=r"no number made\.block_count"):
        policies.gguf(file, [1, 1])


def test_names_of_hugging_face() -> None:
    policy = policies.hugging_face(CONFIG, [1, 1])
    layer = "model.layers.1."
    columns = SplitState.split(1, [128, 128])
    assert policy(weight(f"{layer}self_attn.q_proj.weight", 256, 256), 2) == columns
    assert policy(weight(f"{layer}self_attn.sinks", 8), 2) == SplitState.split(0, [4, 4])
    assert policy(weight(f"{layer}self_attn.o_proj.weight", 256, 256), 2).axis == SplitAxis.AXIS_0
    assert policy(weight(f"{layer}mlp.gate_up_proj.weight", 256, 1024), 2).nr == (2,)
    expert = f"{layer}block_sparse_moe.experts.3."
    assert policy(weight(f"{expert}w1.weight", 256, 512), 2).axis == SplitAxis.AXIS_1
    assert policy(weight(f"{expert}w2.weight", 512, 256), 2).axis == SplitAxis.AXIS_0
    assert policy(weight("lm_head.weight", 256, 100), 2).axis == SplitAxis.AXIS_1
    assert policy(weight("model.embed_tokens.weight", 256, 100), 2) == MIRRORED
    with pytest.raises(ValueError, match="config has no number 'hidden_size'"):
        policies.hugging_face({"num_attention_heads": 8}, [1, 1])


def test_a_config_of_layers_without_a_window_of_other_heads() -> None:
    """Gemma 4: 4 KV heads of 32 elements in a window, else 2 of 64, where keys are values."""
    kinds = ["sliding_attention", "full_attention"]
    more = {"layer_types": kinds, "global_head_dim": 64, "num_global_key_value_heads": 2}
    for k_is_v, kv_heads in ((True, 2), (False, 4)):
        config = CONFIG | more | {"attention_k_eq_v": k_is_v}
        policy = policies.hugging_face(config, [3, 1])
        for i, n, width in ((0, 4, 32), (1, kv_heads, 64)):
            query = weight(f"model.layers.{i}.self_attn.q_proj.weight", 256, 8 * width)
            split = SplitState.split(1, [8 * width // n * (n - 1), 8 * width // n])
            assert policy.find(query, 2) == split
            for name in ("cache_k", "cache_v"):
                cache = weight(f"{name}_l{i}", width, 9, n)
                assert policy.find(cache, 2) == SplitState.split(2, [n - 1, 1])
    unknown = CONFIG | more | {"layer_types": kinds[:1]}
    policy = policies.hugging_face(unknown, [3, 1])
    assert policy.find(weight("cache_k_l1", 32, 9, 4), 2) == SplitState.split(2, [3, 1])


DENSE_AND_EXPERTS = CONFIG | {"intermediate_size": 10944, "moe_intermediate_size": 1408}


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({}, None),
        ({"n_shared_experts": 0}, None),
        ({"n_shared_experts": None}, None),
        ({"n_shared_experts": 2}, 2816),  # DeepSeek, GLM
        ({"moe_num_shared_experts": 2}, 2816),  # ERNIE
        ({"num_shared_experts": 1}, 1408),
        ({"shared_expert_intermediate_size": 5632}, 5632),  # Qwen
    ],
)
def test_dense_layers_before_those_with_experts(more: Any, shared: int | None) -> None:
    policy = policies.hugging_face(DENSE_AND_EXPERTS | more, [3, 1])
    lengths = {"mlp": 10944, "mlp.experts.7": 1408}
    kinds = {"mlp": "ffn", "mlp.experts.7": "experts"}
    for name in ("mlp.shared_experts", "mlp.shared_expert"):
        if shared is None:
            assert policy.find(weight(f"model.layers.1.{name}.up_proj.weight", 64, 2816), 2) is None
        else:
            lengths[name], kinds[name] = shared, "shared experts"
    for name, length in lengths.items():
        first = length * 3 // 4 // 128 * 128
        for one in ("gate_proj", "up_proj"):
            tensor = weight(f"model.layers.1.{name}.{one}.weight", 64, length)
            assert policy.find(tensor, 2) == SplitState.split(1, [first, length - first])
            assert policy.why(tensor, 2) == f"column-parallel in {kinds[name]} 1"
        down = weight(f"model.layers.1.{name}.down_proj.weight", length, 64)
        assert policy.find(down, 2) == SplitState.split(0, [first, length - first])
    both = weight("model.layers.0.mlp.gate_up_proj.weight", 64, 2 * 10944)
    assert policy.find(both, 2) == SplitState.segments(1, [[8192, 2752]], [2])
    expert = weight("model.layers.1.block_sparse_moe.experts.0.w1.weight", 64, 1408)
    assert policy.find(expert, 2) == SplitState.split(1, [1024, 384])
    gate = weight("model.layers.1.mlp.shared_expert_gate.weight", 64)
    assert policy.why(gate, 2) == "each device needs all of it"


@pytest.mark.parametrize(
    "key", ["n_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size"]
)
@pytest.mark.parametrize("value", [-1, True, 8.0, "8", [8]])
def test_numbers_of_shared_experts_without_sense(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"config: {key} is .*, {COUNT}"):
        policies.hugging_face(DENSE_AND_EXPERTS | {key: value}, [1, 1])


@needs_meta
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model_type": "cohere", "use_qk_norm": True}, "q_norm is of all heads (use_qk_norm)"),
        ({"model_type": "minimax_m2", "use_qk_norm": True}, "q_norm is of all heads (use_qk_norm)"),
        ({"model_type": "olmo2"}, "q_norm is of all heads"),
        ({"model_type": "olmo3"}, "q_norm is of all heads"),
        ({"model_type": "olmoe"}, "q_norm is of all heads"),
        ({"model_type": "bitnet"}, "attn_sub_norm is of all heads"),
        ({"model_type": "baichuan"}, "there is no cut for self_attn.W_pack"),
        ({"model_type": "persimmon"}, "there is no cut for self_attn.query_key_value"),
        (
            {"model_type": "stablelm", "qk_layernorm": True},
            "self_attn.q_layernorm has a norm for each head (qk_layernorm)",
        ),
    ],
)
def test_a_config_of_an_attention_without_a_cut(more: Any, why: str) -> None:
    for config in (CONFIG | more, {"text_config": CONFIG | more}):
        policy = policies.hugging_face(config, [1, 1])
        for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight"):
            tensor = weight(f"model.layers.0.{name}", 256, 256)
            assert policy.find(tensor, 2) == MIRRORED
            assert policy.why(tensor, 2).endswith(why)
        assert policy.find(weight("cache_k_l0", 128, 9), 2) == MIRRORED
        down = weight("model.layers.0.mlp.down_proj.weight", 512, 256)
        is_bitnet = more["model_type"] == "bitnet"
        assert policy.find(down, 2) == (MIRRORED if is_bitnet else SplitState.split(0, [256] * 2))
        if is_bitnet:
            assert policy.why(down, 2) == "mlp.ffn_sub_norm is of all hidden units"


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "cohere", "use_qk_norm": False},
        {"model_type": "glm4_moe", "use_qk_norm": True},  # these have a norm of each head
        {"model_type": "hunyuan_v1_dense", "use_qk_norm": True},
        {"model_type": "stablelm", "qk_layernorm": False},
        {"model_type": "phi", "qk_layernorm": True},
        {"model_type": "olmo"},
        {"model_type": None},
        {"model_type": ["llama"]},
    ],
)
def test_a_config_of_an_attention_that_is_cut(more: Any) -> None:
    policy = policies.hugging_face(CONFIG | more, [1, 1])
    query = weight("model.layers.0.self_attn.q_proj.weight", 256, 256)
    assert policy.find(query, 2) == SplitState.split(1, [128, 128])


@needs_meta
def test_norms_and_outputs_of_hugging_face_go_through_graphs() -> None:
    """command-r-plus, BitNet and phi-2."""
    layer, rng = "model.layers.0.", np.random.default_rng(0)
    config = CONFIG | {"hidden_size": 64, "head_dim": 16}

    def command_r(w: Any, x: Any) -> Any:
        q = ops.norm(ops.reshape_3d(ops.mul_mat(w("q_proj"), x), 16, 8, 3), 1e-5) * w("q_norm")
        return ops.mul_mat(w("o_proj"), ops.reshape_2d(q, 128, 3))

    def bitnet(w: Any, x: Any) -> Any:
        h = ops.sqr(ops.relu(ops.mul_mat(w("up_proj"), x)))
        return ops.mul_mat(w("down_proj"), ops.rms_norm(h, 1e-5) * w("ffn_sub_norm"))

    def phi(w: Any, x: Any) -> Any:
        return ops.mul_mat(w("dense"), ops.mul_mat(w("q_proj"), x)) + w("dense.bias")

    given = rng.standard_normal((3, 64), np.float32)
    for build, part, more, shapes in (
        (
            command_r,
            "self_attn",
            {"model_type": "cohere", "use_qk_norm": True},
            {"q_proj": (128, 64), "q_norm": (8, 16), "o_proj": (64, 128)},
        ),
        (
            bitnet,
            "mlp",
            {"model_type": "bitnet"},
            {"up_proj": (512, 64), "ffn_sub_norm": (512,), "down_proj": (64, 512)},
        ),
        (
            phi,
            "self_attn",
            {"model_type": "phi"},
            {"q_proj": (128, 64), "dense": (64, 128), "dense.bias": (64,)},
        ),
    ):
        arrays = {one: rng.standard_normal(n, np.float32) for one, n in shapes.items()}
        results = []
        policy = policies.hugging_face(config | more, [3, 1])
        for target in (MetaDevice(["CPU"] * 2, policy, on_error="raise"), device("CPU")):
            with Context() as ctx:
                held = {
                    one: ctx.from_numpy(
                        array, f"{layer}{part}.{one}{'' if '.' in one else '.weight'}"
                    )
                    for one, array in arrays.items()
                }
                ctx.allocate(target)
                y = build(held.__getitem__, ctx.input((3, 64), name="x"))
                with Graph(y).compile(target) as run:
                    results.append(run(x=given))
        np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["model.", "language_model.model.", "model.language_model."])
def test_names_of_models_that_see_or_hear(text: str) -> None:
    policy = policies.hugging_face({"text_config": CONFIG, "vision_config": {}}, [1, 1])
    layer = f"{text}layers.1."
    for name, split in (
        ("self_attn.q_proj.weight", SplitState.split(1, [128, 128])),
        ("self_attn.qkv_proj.weight", SplitState.segments(1, [[128, 128], [64, 64], [64, 64]])),
        ("self_attn.o_proj.weight", SplitState.split(0, [128, 128])),
        ("mlp.gate_up_proj.weight", SplitState.segments(1, [[256, 256]], [2])),
        ("mlp.up_proj.weight", SplitState.split(1, [256, 256])),
        ("mlp.down_proj.weight", SplitState.split(0, [256, 256])),
        ("mlp.experts.3.up_proj.weight", SplitState.split(1, [256, 256])),
        ("block_sparse_moe.experts.3.w2.weight", SplitState.split(0, [256, 256])),
    ):
        length = sum(split.shares)
        tensor = weight(layer + name, *((256, length) if split.axis else (length, 256)))
        assert policy.find(tensor, 2) == split, name
    for name in ("norm", "embed_tokens", "layers.1.self_attn.q_norm", "layers.1.mlp.gate"):
        tensor = weight(f"{text}{name}.weight", 256)
        assert policy.find(tensor, 2) == MIRRORED
        assert policy.why(tensor, 2) == "each device needs all of it"
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert policy.find(weight(name, 256, 100), 2) == SplitState.split(1, [50, 50])


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "vision_tower.vision_model.post_layernorm.weight",
        "model.vision_tower.encoder.layers.0.self_attn.o_proj.bias",
        "model.visual.blocks.0.attn.qkv.weight",
        "model.visual.blocks.0.norm.weight",
        "model.visual.blocks.0.mlp.down_proj.bias",
        "visual.merger.ln_q.norm.weight",
        "model.audio_tower.layers.0.self_attn_layer_norm.weight",
        "audio_tower.layers.0.self_attn.q_proj.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "language_model.vision.layers.0.mlp.up_proj.weight",
    ],
)
def test_towers_have_no_rule(name: str) -> None:
    policy = policies.hugging_face({"text_config": CONFIG}, [1, 1])
    assert policy.find(weight(name, 256, 256), 2) is None
    assert policy.why(weight(name, 256, 256), 2) == "no rule names it"


@pytest.mark.parametrize("inside", [False, True])
def test_a_config_of_compressed_keys_and_values(inside: bool) -> None:
    config = CONFIG | {"kv_lora_rank": 64}
    policy = policies.hugging_face({"text_config": config} if inside else config, [1, 1])
    for name in ("q_proj", "o_proj"):
        tensor = weight(f"model.layers.0.self_attn.{name}.weight", 256, 256)
        assert policy.find(tensor, 2) == MIRRORED
        assert policy.why(tensor, 2) == "keys and values are compressed (kv_lora_rank)"
    down = weight("model.layers.0.mlp.down_proj.weight", 512, 256)
    assert policy.find(down, 2) == SplitState.split(0, [256, 256])
    null = policies.hugging_face(CONFIG | {"kv_lora_rank": None}, [1, 1])
    assert str(null) == str(policies.hugging_face(CONFIG, [1, 1]))


@pytest.mark.slow
@needs_meta
def test_every_weight_of_a_real_model_fits(gemma: Path) -> None:
    """It has one KV head: attention is whole, the feed-forward parts are shared out."""
    with GGUFFile(gemma) as file:
        policy = policies.gguf(file, [2, 1, 1])
        embedding = file.tensors["token_embd.weight"]
        tied = policy.why(weight(embedding.name, *embedding.ne), 3)
        assert "output.weight" not in file.tensors and tied == "tied: it is the output as well"
        axes: dict[str, set[int]] = {}
        for name, tensor in file.tensors.items():
            kind = int(tensor.type)
            info = weight(name, *tensor.ne, kind=kind, block_size=capi.ggml_blck_size(kind))
            axes.setdefault(name.split(".", 2)[-1], set()).add(int(policy(info, 3).axis))
    assert axes["ffn_up.weight"] == axes["ffn_gate.weight"] == {1}
    assert axes["ffn_down.weight"] == {0}
    assert axes["attn_q.weight"] == axes["attn_output.weight"] == {10}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: policies.Group(256, 0),
            ValueError,
            "Group: granularity is 0, expected at least 1",
        ),
        (lambda: policies.Group(0), ValueError, "Group: length is 0, expected at least 1"),
        (lambda: policies.Group(2.5), ValueError, "length is 2.5"),
        (lambda: policies.Rules([("up", policies.Column())], [1]), TypeError, "expected a Rule"),
        (
            lambda: policies.Rules([policies.Rule("up", "column")], [1]),
            TypeError,
            "the cut of 'up' is 'column', expected a Column",
        ),
        (
            lambda: policies.Rules([policies.Rule("up", policies.Column)], [1]),
            TypeError,
            "expected a Column",
        ),
        (lambda: policies.Column(axis=2), ValueError, "Column: axis is 2, expected 0, 1 or None"),
        (lambda: policies.Fused((1,), axis="0"), TypeError, "Fused: axis is '0'"),
        (lambda: policies.Fused((8, 0)), ValueError, r"lengths\[1\] is 0, expected at least 1"),
        (lambda: policies.Fused((8, 2.5)), ValueError, r"lengths\[1\] is 2.5"),
        (lambda: policies.Fused(8), TypeError, "Fused: lengths is 8"),
        (lambda: policies.Fused(()), ValueError, "Fused: there are no lengths"),
        (
            lambda: policies.Rules([], [1], {"ffn": 8}),
            TypeError,
            "Rules: group 'ffn' is 8 .*, expected a Group",
        ),
        (
            lambda: policies.Rules([policies.Rule("w", policies.Row("ffn {layer}"))], [1]),
            ValueError,
            "w: row-parallel in ffn {layer} has no group of the expression named 'layer'",
        ),
        (
            lambda: policies.Rules([policies.Rule("w", policies.Row(3))], [1]),
            TypeError,
            "the group of 'w' is 3 .*, expected a string",
        ),
        (
            lambda: policies.Rules([policies.Rule(7, policies.Row())], [1]),
            TypeError,
            "a pattern is 7 .*, expected a string",
        ),
        (lambda: policies.gguf("m.gguf", [1]), TypeError, "file is 'm.gguf'.*expected a GGUFFile"),
        (lambda: policies.hugging_face("c.json", [1]), TypeError, "expected a mapping"),
    ],
)
def test_what_a_policy_cannot_be_made_of(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_models_have_no_rule_for_other_names(tmp_path: Path) -> None:
    other = policies.by_ratio(1, [1, 1])
    name, cut = weight("model.layers.9.mlp.up_proj.weight", 8, 16), SplitState.split(1, [8, 8])
    policy = policies.hugging_face(CONFIG, [1, 1])
    assert policy.why(name, 2) == "no rule names it"
    assert policy(name, 2) == MIRRORED and (policy | other)(name, 2) == cut
    norm = weight("model.layers.0.input_layernorm.weight", 8)
    assert (policy | other).why(norm, 2) == "each device needs all of it"
    with transformer(tmp_path / "a.gguf", heads=8, kv_heads=4, hidden=512) as file:
        policy = policies.gguf(file, [1, 1])
        assert (policy | other)(weight("v.blk.0.up.weight", 8, 16), 2) == cut
        for known in ("token_embd", "blk.0.attn_norm", "output_norm", "blk.0.ffn_gate_inp"):
            why = (policy | other).why(weight(f"{known}.weight", 8, 16), 2)
            assert why == "each device needs all of it"


def test_why_attention_is_whole() -> None:
    query = weight("model.layers.0.self_attn.q_proj.weight", 256, 256)
    for heads, n, why in (
        ((8, 3), 2, "8 heads are no multiple of 3 KV heads"),
        ((8, 2), 3, "2 KV heads are too few for 3 devices"),
    ):
        config = CONFIG | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        assert policies.hugging_face(config, [1] * n).why(query, n) == why
