"""The names of weights in common model files, and where they can be cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from ._numbers import describe, integer, show
from ._numbers import ratios as _ratios
from .policies import Column, Cut, Fused, Group, Mirror, Partial, Row, Rule, Rules, _Cache

if TYPE_CHECKING:
    from ..gguf import GGUFFile, GGUFTensor

    _Weights: TypeAlias = Mapping[str, GGUFTensor]
    """The weights of a layer, by their names without it."""

#: A feed-forward part is cut on multiples of this, whatever its type, as llama.cpp has it.
FFN_STEP = 128
#: No model has so many; llama.cpp takes half of them.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class Attention:
    """The numbers of a layer's attention that its cuts depend on."""

    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    block: int = 1
    """Elements in a block of the type of the output weight."""
    whole: str = ""
    """Why it is mirrored whatever its numbers are; "" where they decide."""

    def group(self, n: int) -> Group | None:
        """How the heads are shared out among `n` devices with a share; None where they are not.

        The group's length is in query rows. A share is whole KV heads with their queries, and
        whole blocks of the output weight, which is cut along with the values.
        """
        if self.why_whole(n):
            return None
        return Group(self.heads * self.key_length, self._heads_per_block() * self.key_length)

    def why_whole(self, n: int) -> str:
        """Why it is not cut for so many devices; "" where it is."""
        if self.whole:
            return self.whole
        devices = "1 device" if n == 1 else f"{n} devices"
        if self.kv_heads < n:
            return f"{self.kv_heads} KV heads are too few for {devices}"
        if self.kv_heads == 1:  # one device gets it all; but a reshape loses the axis of heads
            return "1 KV head cannot be cut"
        if self.heads < self.kv_heads:
            return f"{self.heads} heads are too few for {self.kv_heads} KV heads"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads are no multiple of {self.kv_heads} KV heads"
        is_one_block = self.heads * self.value_length <= self.block  # ggml cuts no such
        if is_one_block or self.heads // self._heads_per_block() < n:
            return f"{self.kv_heads} KV heads have too few whole blocks for {devices}"
        return ""

    def _heads_per_block(self) -> int:
        """The fewest heads that are whole KV heads' and have whole blocks of the output weight."""
        per_group = self.heads // self.kv_heads
        columns = per_group * self.value_length
        return math.lcm(columns, self.block) // columns * per_group

    def cuts(self, group: str, addends: Cut) -> dict[str, Cut]:
        """The cuts where it is cut."""
        keys, values = self.kv_heads * self.key_length, self.kv_heads * self.value_length
        return {
            "columns": Column(group),
            "cache": _Cache(group, self.kv_heads, self.key_length, self.value_length),
            "fused": Fused((self.heads * self.key_length, keys, values), group),
            "output": Row(group),
        }


@dataclass(frozen=True)
class FeedForward:
    """The same of a feed-forward part: the dense one, all experts alike, or shared experts."""

    hidden: int
    block: int = 1
    """Elements in a block of the type of its last weight."""
    whole: str = ""
    is_wide: bool = False
    """Its up is gate and up in one, which the length alone tells."""

    def group(self, n: int) -> Group | None:
        """How the hidden units are shared out; None where they are not."""
        if self.whole or self.hidden <= self.block:  # ggml cuts no single block
            return None
        for step in (math.lcm(self.block, FFN_STEP), self.block):
            if self.hidden % self.block == 0 and self.hidden // step >= n:
                return Group(self.hidden, step)
        return None

    def why_whole(self, n: int) -> str:
        """As of `Attention`."""
        return self.whole or ("" if self.group(n) else "it is too small to be cut")

    def cuts(self, group: str, addends: Cut) -> dict[str, Cut]:
        """The cuts where it is cut; `addends` is that of biases that are added up."""
        twice = (self.hidden,) * 2
        return {
            "up": Fused(twice, group) if self.is_wide else Column(group),
            "up biases": Column(group, axis=0),
            "gate_up": Fused(twice, group),
            "gate_up biases": Fused(twice, group, axis=0),
            "down": Row(group),
            "down biases": addends,
        }


Part: TypeAlias = Attention | FeedForward
Layer: TypeAlias = Mapping[str, Part]
"""The parts of a layer, by their kinds: those of `Names.parts`."""


@dataclass(frozen=True)
class Names:
    """The patterns of one naming scheme."""

    parts: Mapping[str, Mapping[str, str]]
    """For each kind of part the patterns of what its `cuts` are of; ``{n}`` is the layer.

    Of the attention: "columns" are queries, keys and values, weights and biases, and the sinks of
    heads; "cache" what is kept of keys and values; "fused" queries, keys and values in one;
    "output" its last weight. Of a feed-forward part: "up" are gate and up, with the biases that
    are a row; "gate_up" the two in one; "down" is the last weight; "... biases" have a row for
    each expert.
    """
    vocabulary: str
    """The weight that makes the logits, and its bias."""
    vocabulary_bias: str
    """The bias alone."""
    embedding: str
    """What takes the weight's place where the two are tied: each device computes all logits."""
    whole: str
    """Embeddings, norms, routers and the biases of row-parallel products."""


_GGUF = Names(
    parts={
        "attention": {
            "columns": r"blk\.{n}\.attn_([qkv]\.(weight|bias)|sinks\.weight)",
            "cache": r"cache_[kv]_l{n}",
            "fused": r"blk\.{n}\.attn_qkv\.(weight|bias)",
            "output": r"blk\.{n}\.attn_output\.weight",
        },
        "ffn": {
            "up": r"blk\.{n}\.ffn_(up|gate)\.(weight|bias)",
            "gate_up": r"blk\.{n}\.ffn_gate_up\.(weight|bias)",
            "down": r"blk\.{n}\.ffn_down\.weight",
        },
        "experts": {
            "up": r"blk\.{n}\.ffn_(up|gate)_exps\.weight",
            "up biases": r"blk\.{n}\.ffn_(up|gate)_exps\.bias",
            "gate_up": r"blk\.{n}\.ffn_gate_up_exps\.weight",
            "gate_up biases": r"blk\.{n}\.ffn_gate_up_exps\.bias",
            "down": r"blk\.{n}\.ffn_down_exps\.weight",
            "down biases": r"blk\.{n}\.ffn_down_exps\.bias",
        },
        "shared experts": {
            "up": r"blk\.{n}\.ffn_(up|gate)_shexp\.weight",
            "down": r"blk\.{n}\.ffn_down_shexp\.weight",
        },
    },
    vocabulary=r"output\.(weight|bias)",
    vocabulary_bias=r"output\.bias",
    embedding=r"token_embd\.weight",
    whole=(
        r"(token_embd|position_embd|token_types|rope_freqs|rope_factors_\w+|.*norm"
        r"|.*\.ffn_gate_inp(_shexp)?)\.(weight|bias)|.*\.(attn_output|ffn_down)\.bias"
    ),
)
#: A model that also sees or hears has towers beside, with layers and norms of their own.
_TEXT = r"(language_model\.model|model(\.language_model)?)\."
_LAYERS = _TEXT + r"layers\."
_EXPERTS = r"(block_sparse_moe|mlp)\.experts\.\d+\."
_SHARED = r"mlp\.shared_experts?\."
_HUGGING_FACE = Names(
    parts={
        "attention": {
            "columns": _LAYERS + r"{n}\.self_attn\.([qkv]_proj\.(weight|bias)|sinks)",
            "cache": r"cache_[kv]_l{n}",
            "fused": _LAYERS + r"{n}\.self_attn\.qkv_proj\.(weight|bias)",
            "output": _LAYERS + r"{n}\.self_attn\.(o_proj|dense)\.weight",
        },
        "ffn": {
            "up": _LAYERS + r"{n}\.mlp\.(gate|up)_proj\.(weight|bias)",
            "gate_up": _LAYERS + r"{n}\.mlp\.gate_up_proj\.(weight|bias)",
            "down": _LAYERS + r"{n}\.mlp\.down_proj\.weight",
        },
        "experts": {
            "up": _LAYERS + r"{n}\." + _EXPERTS + r"(w[13]|(gate|up)_proj)\.(weight|bias)",
            "down": _LAYERS + r"{n}\." + _EXPERTS + r"(w2|down_proj)\.weight",
        },
        "shared experts": {
            "up": _LAYERS + r"{n}\." + _SHARED + r"(gate|up)_proj\.(weight|bias)",
            "down": _LAYERS + r"{n}\." + _SHARED + r"down_proj\.weight",
        },
    },
    vocabulary=r"(language_model\.)?lm_head\.(weight|bias)",
    vocabulary_bias=r"(language_model\.)?lm_head\.bias",
    embedding=_TEXT + r"embed_tokens\.weight",
    whole=(
        _TEXT + r"(embed_tokens\.weight|\w*norm\.(weight|bias)|rotary_emb\..*|layers\.[0-9]+\."
        r"(.*norm\.(weight|bias)|.*rotary_emb\..*|.*\.(gate|shared_expert_gate)\.weight"
        r"|.*\.(o_proj|dense|down_proj)\.bias))"
    ),
)


def rules(
    names: Names, layers: Sequence[Layer], ratios: Sequence[float | Fraction], tied: bool
) -> Rules:
    """The rules for a model with these layers; `tied`: the embedding is the output as well.

    Parts that are equal share their rules.
    """
    ratios = _ratios(ratios, "policy")
    n = sum(1 for ratio in ratios if ratio)
    # a device that has no share of a product leaves out its addend of the bias as well
    addends = Partial() if all(ratios) else Mirror("a device has no share of what it is added to")
    found: list[Rule] = []
    groups: dict[str, Group] = {}
    for kind, patterns in names.parts.items():
        equal: dict[Part, list[int]] = {}
        for i, layer in enumerate(layers):
            if kind in layer:
                equal.setdefault(layer[kind], []).append(i)
        for part, numbers in equal.items():
            group = part.group(n)
            if group is None:
                cuts: dict[str, Cut] = dict.fromkeys(patterns, Mirror(part.why_whole(n)))
            else:
                groups |= {f"{kind} {i}": group for i in numbers}
                cuts = part.cuts(f"{kind} {{layer}}", addends)
            these = f"(?P<layer>{_any_of(numbers)})"
            found += [Rule(one.replace("{n}", these), cuts[of]) for of, one in patterns.items()]
    if tied:
        found.append(Rule(names.embedding, Mirror("tied: it is the output as well")))
        found.append(Rule(names.vocabulary_bias, Mirror("tied: each device computes all logits")))
    found.append(Rule(names.vocabulary, Column()))
    found.append(Rule(names.whole, Mirror("each device needs all of it")))
    return Rules(found, ratios, groups)


_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
#: Weights of an attention that are cut or go with the cut; norms are looked at by themselves.
_ATTENTION = re.compile(r"attn_([qkv]|qkv|output|sinks|rot_embd|\w*norm(_\d)?)\.weight")


#: Architectures whose attention has ALiBi without a number of it, as llama.cpp has them.
_ALIBI = {"bloom", "refact", "jina-bert-v2"}


def _attention_whole(weights: _Weights, key_length: int, is_part: bool) -> str:
    """Why the attention of a layer with these weights is mirrored, "" where none says so.

    `is_part`: what is missing may be in other files. Keys and values may be another layer's.
    """
    output, queries = "attn_output.weight", ("attn_q.weight", "attn_qkv.weight")
    is_complete = output in weights and any(name in weights for name in queries)
    for name, tensor in weights.items():
        if name.startswith("attn_") and name.endswith(".weight") and not _ATTENTION.fullmatch(name):
            return f"there is no cut for {name}"
        # with an output of its own a state-space part is beside the attention, else within
        if name.startswith("ssm_") and is_complete and "ssm_out.weight" not in weights:
            return f"there is no cut for {name}"
        size = math.prod(tensor.ne)
        is_by_head = name in ("attn_q_norm.weight", "attn_k_norm.weight") and size <= key_length
        if re.fullmatch(r"attn_(q|k|sub)_norm\.weight", name) and not is_by_head:
            return f"{name} is of all heads"
    if is_part or is_complete or not any(name in weights for name in (output, *queries)):
        return ""
    return f"there is no {queries[0] if output in weights else output}"


def _head_length(weights: _Weights, stated: int, *places: tuple[str, int, int]) -> int:
    """The length of a head by the first of these places that tells it, else the stated one.

    A place is a weight, an axis of it, and how many heads are there. Layers with a sliding window
    may have a length of their own.
    """
    for name, axis, heads in places:
        extent = _extent(weights, name, axis)
        if extent and heads and extent % heads == 0:
            return extent // heads
    return stated


def _feed_forward(weights: _Weights, suffix: str, stated: int, is_part: bool) -> FeedForward:
    """The feed-forward part whose weights end so; `stated`: its length by the metadata."""
    down, up, both, gate = (
        f"ffn_{one}{suffix}.weight" for one in ("down", "up", "gate_up", "gate")
    )
    hidden = _extent(weights, down, 0) or _extent(weights, gate, 1) or stated
    whole = ""
    if not suffix and "ffn_sub_norm.weight" in weights:
        whole = "ffn_sub_norm.weight is of all hidden units"
    elif not is_part and any(name in weights for name in (down, up, both, gate)):
        if down not in weights:
            whole = f"there is no {down}"
        elif up not in weights and both not in weights:
            whole = f"there is no {up}"
    is_wide = not suffix and gate not in weights and 0 < _extent(weights, up, 1) == 2 * hidden
    return FeedForward(hidden, _block(weights, down), whole, is_wide)


def _extent(weights: _Weights, name: str, axis: int) -> int:
    """0 where there is no such weight, or axis of it."""
    ne = weights[name].ne if name in weights else ()
    return ne[axis] if axis < len(ne) else 0


def _block(weights: _Weights, name: str) -> int:
    from .. import capi

    return capi.ggml_blck_size(weights[name].type) if name in weights else 1


def _any_of(numbers: Iterable[int]) -> str:
    """An expression for numbers in ascending order, such as ``[0-9]|1[0-7]``."""
    last: dict[int, str] = {}  # digits, by what is before them
    for number in numbers:
        last[number // 10] = last.get(number // 10, "") + str(number % 10)
    found = [_one_of(last.pop(0))] if 0 in last else []
    before: dict[str, list[int]] = {}
    for first, digits in last.items():
        before.setdefault(digits, []).append(first)
    for digits, firsts in before.items():
        head = _any_of(firsts)
        found.append((f"({head})" if "|" in head else head) + _one_of(digits))
    return "|".join(found)


def _one_of(digits: str) -> str:
    if len(digits) == 1:
        return digits
    in_a_row = len(digits) > 2 and int(digits[-1]) - int(digits[0]) == len(digits) - 1
    return f"[{digits[0]}-{digits[-1]}]" if in_a_row else f"[{digits}]"


def _checked(value: object, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {describe(value)}, expected an integer of {least} or more")
    return value


def _layers(value: object, name: str) -> int:
    n = _checked(value, name, 1)
    if n > MAX_LAYERS:
        raise ValueError(f"{name} is {show(n)}, expected at most {MAX_LAYERS} layers")
    return n


def of_gguf(file: GGUFFile, ratios: Sequence[float | Fraction]) -> Rules:
    """What `policies.gguf` does."""
    from ..gguf import GGUFArray

    metadata, name = file.metadata, file.name
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{name} has no general.architecture in its metadata")

    def found(key: str, default: int | None = None) -> object:
        value: object = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{name} has no number {architecture}.{key} in its metadata")
        return value

    def number(key: str, layer: int, default: int | None = None, least: int = 0) -> int:
        value, what = found(key, default), f"{name}: {architecture}.{key}"
        if isinstance(value, GGUFArray):  # one for each layer
            if len(value) < n_layers:
                expected = f"one for each of {n_layers} layers"
                raise ValueError(f"{what} has {len(value)} numbers, expected {expected}")
            value = value[layer]
        return _checked(value, what, least)

    n_layers = _layers(found("block_count"), f"{name}: {architecture}.block_count")
    width = found("embedding_length")
    width = _checked(width, f"{name}: {architecture}.embedding_length", 1)
    n_parts = metadata.get("split.count", 1)
    is_part = isinstance(n_parts, int) and n_parts > 1
    has_alibi = architecture in _ALIBI or (architecture == "baichuan" and n_layers == 40)
    has_alibi = has_alibi or bool(found("attention.max_alibi_bias", 0))
    by_layer: list[dict[str, GGUFTensor]] = [{} for _ in range(n_layers)]
    for tensor_name, tensor in file.tensors.items():
        match = _IN_LAYER.fullmatch(tensor_name)
        if match and int(match[1]) < n_layers:
            by_layer[int(match[1])][match[2]] = tensor

    def attention(i: int, weights: _Weights) -> Attention:
        heads = number("attention.head_count", i)
        kv_heads = number("attention.head_count_kv", i, heads)
        length = width // max(heads, 1) or None
        key_length = _head_length(
            weights,
            number("attention.key_length", i, length, 1),
            ("attn_k.weight", 1, kv_heads),
            ("attn_q.weight", 1, heads),
        )
        value_length = _head_length(
            weights,
            number("attention.value_length", i, length, 1),
            ("attn_v.weight", 1, kv_heads),
            ("attn_output.weight", 0, heads),
        )
        whole = _attention_whole(weights, key_length, is_part)
        if has_alibi:
            whole = "ALiBi goes by the numbers of the heads, which a device does not know"
        block = _block(weights, "attn_output.weight")
        return Attention(heads, kv_heads, key_length, value_length, block, whole)

    layers: list[Layer] = []
    for i, weights in enumerate(by_layer):
        hidden = number("feed_forward_length", i)
        of_expert = number("expert_feed_forward_length", i, hidden)
        layer: dict[str, Part] = {
            "attention": attention(i, weights),
            "ffn": _feed_forward(weights, "", hidden, is_part),
        }
        if is_part or any("_exps." in one for one in weights):
            layer["experts"] = _feed_forward(weights, "_exps", of_expert, is_part)
        if "ffn_down_shexp.weight" in weights:  # which tells their length and the blocks
            layer["shared experts"] = _feed_forward(weights, "_shexp", 0, is_part)
        layers.append(layer)
    tied = "output.weight" not in file.tensors and not is_part
    return rules(_GGUF, layers, ratios, tied)


#: Model types whose attention has weights that are not cut, and which.
_WITHOUT_A_CUT = {
    "baichuan": "there is no cut for self_attn.W_pack",
    "bitnet": "self_attn.attn_sub_norm is of all heads",
    "chameleon": "self_attn.q_norm is of all heads",
    "flex_olmo": "self_attn.q_norm is of all heads",
    "fuyu": "there is no cut for self_attn.query_key_value",
    "olmo2": "self_attn.q_norm is of all heads",
    "olmo3": "self_attn.q_norm is of all heads",
    "olmoe": "self_attn.q_norm is of all heads",
    "persimmon": "there is no cut for self_attn.query_key_value",
}
#: Those with a use_qk_norm whose norm is of each head.
_NORM_BY_HEAD = re.compile(r"(glm4|hunyuan|llama4)\w*")


def of_hugging_face(
    config: Mapping[str, object], ratios: Sequence[float | Fraction], block_size: int
) -> Rules:
    """What `policies.hugging_face` does."""
    if integer(block_size, "block_size", "policy") < 1:
        raise ValueError(f"policy: block_size is {block_size}, expected at least 1")
    text = config.get("text_config")  # of models that also see or hear
    text = config if text is None else text
    if not isinstance(text, Mapping):
        raise ValueError(f"config: text_config is {describe(text)}, expected a mapping")

    def number(key: str, default: int | None = None, least: int = 1) -> int:
        value = text.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"config has no number {key!r}")
        return _checked(value, f"config: {key}", least)

    model_type = text.get("model_type", config.get("model_type"))
    block = int(block_size)
    heads = number("num_attention_heads")
    length = number("head_dim", number("hidden_size") // heads or None)
    kv_heads = number("num_key_value_heads", heads)
    whole = _why_attention_is_whole(text, model_type)
    attention = Attention(heads, kv_heads, length, length, block, whole)
    # Gemma 4: layers without a window have heads of another length, and other KV heads
    if text.get("attention_k_eq_v"):
        kv_heads = number("num_global_key_value_heads", kv_heads)
    length = number("global_head_dim", length)
    without_window = Attention(heads, kv_heads, length, length, block, whole)

    hidden = number("intermediate_size")
    of_expert = number("moe_intermediate_size", hidden)
    sub_norm = "mlp.ffn_sub_norm is of all hidden units" if model_type == "bitnet" else ""
    others: dict[str, Part] = {
        "ffn": FeedForward(hidden, block, sub_norm),
        "experts": FeedForward(of_expert, block),
    }
    shared = number("shared_expert_intermediate_size", 0, 0)
    for key in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"):
        shared = shared or of_expert * number(key, 0, 0)  # however many, they are one part
    if shared:
        others["shared experts"] = FeedForward(shared, block)

    n_layers = _layers(number("num_hidden_layers"), "config: num_hidden_layers")
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, Sequence) and len(kinds) == n_layers else [""] * n_layers
    layers = [
        {"attention": without_window if kind == "full_attention" else attention, **others}
        for kind in kinds
    ]
    tied = text.get("tie_word_embeddings")
    tied = config.get("tie_word_embeddings") if tied is None else tied
    if tied is not None and not isinstance(tied, bool):
        expected = "true or false"
        raise ValueError(f"config: tie_word_embeddings is {describe(tied)}, expected {expected}")
    return rules(_HUGGING_FACE, layers, ratios, bool(tied))


def _why_attention_is_whole(text: Mapping[str, object], model_type: object) -> str:
    """Why the attention of a model with this config is mirrored, "" where it says nothing."""
    kind = model_type if isinstance(model_type, str) else ""
    if text.get("kv_lora_rank"):
        return "keys and values are compressed (kv_lora_rank)"
    if text.get("use_qk_norm") and not _NORM_BY_HEAD.fullmatch(kind):
        return "self_attn.q_norm is of all heads (use_qk_norm)"
    if text.get("qk_layernorm") and kind == "stablelm":
        return "self_attn.q_layernorm has a norm for each head (qk_layernorm)"
    return _WITHOUT_A_CUT.get(kind, "")
