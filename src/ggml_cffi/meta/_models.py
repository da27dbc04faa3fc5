"""The names of weights in common model files, and where they can be cut."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ._numbers import describe, integer, show
from ._numbers import ratios as _ratios
from .policies import Column, Cut, Fused, Group, Mirror, Partial, Row, Rule, Rules, _Cache

if TYPE_CHECKING:
    from ..gguf import GGUFFile

#: A feed-forward part is cut on multiples of this, whatever its type, as llama.cpp has it.
FFN_STEP = 128
#: No model has so many; llama.cpp takes half of them.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class Layer:
    """The numbers of a layer that its cuts depend on."""

    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    hidden: int
    attention_block: int = 1
    """Elements in a block of the type of the attention's output weight."""
    ffn_block: int = 1
    """The same, of the feed-forward part's last weight."""
    attention_whole: str = ""
    """Why the attention is mirrored whatever its numbers are; "" where they decide."""
    ffn_whole: str = ""
    """The same, of the feed-forward part."""

    def attention(self, n: int) -> Group | None:
        """How the heads are shared out among `n` devices with a share; None where they are not.

        The group's length is in query rows. A share is whole KV heads with their queries, and
        whole blocks of the output weight, which is cut along with the values.
        """
        if self.why_whole(n):
            return None
        return Group(self.heads * self.key_length, self._heads_per_block() * self.key_length)

    def why_whole(self, n: int) -> str:
        """Why the attention is not cut for so many devices; "" where it is."""
        if self.attention_whole:
            return self.attention_whole
        devices = "1 device" if n == 1 else f"{n} devices"
        if self.kv_heads < n:
            return f"{self.kv_heads} KV heads are too few for {devices}"
        if self.kv_heads == 1:  # one device gets it all; but a reshape loses the axis of heads
            return "1 KV head cannot be cut"
        if self.heads < self.kv_heads:
            return f"{self.heads} heads are too few for {self.kv_heads} KV heads"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads are no multiple of {self.kv_heads} KV heads"
        is_one_block = self.heads * self.value_length <= self.attention_block  # ggml cuts no such
        if is_one_block or self.heads // self._heads_per_block() < n:
            return f"{self.kv_heads} KV heads have too few whole blocks for {devices}"
        return ""

    def _heads_per_block(self) -> int:
        """The fewest heads that are whole KV heads' and have whole blocks of the output weight."""
        per_group = self.heads // self.kv_heads
        columns = per_group * self.value_length
        return math.lcm(columns, self.attention_block) // columns * per_group

    def feed_forward(self, n: int) -> Group | None:
        """How the hidden units are shared out; None where they are not."""
        if self.ffn_whole or self.hidden <= self.ffn_block:  # ggml cuts no single block
            return None
        for step in (math.lcm(self.ffn_block, FFN_STEP), self.ffn_block):
            if self.hidden % self.ffn_block == 0 and self.hidden // step >= n:
                return Group(self.hidden, step)
        return None


@dataclass(frozen=True)
class Names:
    """The patterns of one naming scheme; ``{n}`` is the layer in each but the last three."""

    columns: str
    """Queries, keys and values, weights and biases, and the sinks of heads."""
    cache: str
    """What is kept of keys and values."""
    fused: str
    """Queries, keys and values in one."""
    output: str
    """The attention's output weight."""
    up: str
    """Gate and up, of experts too, with the biases that are a row."""
    up_biases: str
    """The biases of experts' gate and up, a row for each expert; "" where there are none."""
    gate_up: str
    """Gate and up in one, as `up`."""
    gate_up_biases: str
    """As `up_biases`."""
    wide_up: str
    """What is gate and up in one by its length alone; "" where nothing is."""
    down: str
    down_biases: str
    """The biases of experts' down, "" where there are none."""
    vocabulary: str
    """The weight that makes the logits."""
    embedding: str
    """What takes its place where the two are tied, so that each device computes all logits."""
    whole: str
    """Embeddings, norms, routers and the biases of row-parallel products."""


_GGUF = Names(
    columns=r"blk\.{n}\.attn_([qkv]\.(weight|bias)|sinks\.weight)",
    cache=r"cache_[kv]_l{n}",
    fused=r"blk\.{n}\.attn_qkv\.(weight|bias)",
    output=r"blk\.{n}\.attn_output\.weight",
    up=r"blk\.{n}\.ffn_(up|gate)(\.(weight|bias)|_exps\.weight)",
    up_biases=r"blk\.{n}\.ffn_(up|gate)_exps\.bias",
    gate_up=r"blk\.{n}\.ffn_gate_up(\.(weight|bias)|_exps\.weight)",
    gate_up_biases=r"blk\.{n}\.ffn_gate_up_exps\.bias",
    wide_up=r"blk\.{n}\.ffn_up\.(weight|bias)",
    down=r"blk\.{n}\.ffn_down(_exps)?\.weight",
    down_biases=r"blk\.{n}\.ffn_down_exps\.bias",
    vocabulary=r"output\.weight",
    embedding=r"token_embd\.weight",
    whole=(
        r"(token_embd|position_embd|token_types|rope_freqs|rope_factors_\w+|.*norm|.*\.ffn_gate_inp)"
        r"\.(weight|bias)|.*\.(attn_output|ffn_down)\.bias"
    ),
)
#: A model that also sees or hears has towers beside, with layers and norms of their own.
_TEXT = r"(language_model\.model|model(\.language_model)?)\."
_LAYERS = _TEXT + r"layers\."
_HUGGING_FACE = Names(
    columns=_LAYERS + r"{n}\.self_attn\.([qkv]_proj\.(weight|bias)|sinks)",
    cache=r"cache_[kv]_l{n}",
    fused=_LAYERS + r"{n}\.self_attn\.qkv_proj\.(weight|bias)",
    output=_LAYERS + r"{n}\.self_attn\.o_proj\.weight",
    up=(
        _LAYERS + r"{n}\.(mlp\.(gate|up)_proj"
        r"|block_sparse_moe\.experts\.\d+\.w[13]|mlp\.experts\.\d+\.(gate|up)_proj)\.(weight|bias)"
    ),
    up_biases="",
    gate_up=_LAYERS + r"{n}\.mlp\.gate_up_proj\.(weight|bias)",
    gate_up_biases="",
    wide_up="",
    down=(
        _LAYERS + r"{n}\.(mlp\.down_proj"
        r"|block_sparse_moe\.experts\.\d+\.w2|mlp\.experts\.\d+\.down_proj)\.weight"
    ),
    down_biases="",
    vocabulary=r"(language_model\.)?lm_head\.weight",
    embedding=_TEXT + r"embed_tokens\.weight",
    whole=(
        _TEXT + r"(embed_tokens\.weight|\w*norm\.(weight|bias)|rotary_emb\..*|layers\.[0-9]+\."
        r"(.*norm\.(weight|bias)|.*rotary_emb\..*|.*\.gate\.weight|.*\.(o_proj|down_proj)\.bias))"
    ),
)


def rules(
    names: Names,
    layers: Sequence[Layer],
    ratios: Sequence[float | Fraction],
    tied: bool,
    wide: Iterable[int] = (),
) -> Rules:
    """The rules for a model with these layers; `wide` are those whose `wide_up` it is.

    `tied`: the embedding is the output as well. Layers that are equal share their rules.
    """
    parts = _ratios(ratios, "policy")
    n = sum(1 for part in parts if part)
    found: list[Rule] = []
    groups: dict[str, Group] = {}
    # a device that has no share of a product leaves out its addend of the bias as well
    addends = Partial() if all(parts) else Mirror("a device has no share of what it is added to")
    wide = set(wide)
    equal: dict[tuple[Layer, bool], list[int]] = {}
    for i, layer in enumerate(layers):
        equal.setdefault((layer, i in wide), []).append(i)
    for (layer, is_wide), numbers in equal.items():
        of_kind = {"attention": layer.attention(n), "ffn": layer.feed_forward(n)}
        for kind, group in of_kind.items():
            if group:
                groups |= {f"{kind} {i}": group for i in numbers}
        cuts = _attention_cuts(names, layer, n) + _ffn_cuts(names, layer, n, is_wide, addends)
        these = f"(?P<layer>{_any_of(numbers)})"
        found += [Rule(pattern.replace("{n}", these), cut) for pattern, cut in cuts if pattern]
    found.append(Rule(names.vocabulary, Column()))
    if tied:
        found.append(Rule(names.embedding, Mirror("tied: it is the output as well")))
    found.append(Rule(names.whole, Mirror("each device needs all of it")))
    return Rules(found, parts, groups)


def _attention_cuts(names: Names, layer: Layer, n: int) -> list[tuple[str, Cut]]:
    """Patterns and cuts of a layer's attention on `n` devices with a share."""
    if layer.attention(n) is None:
        whole = Mirror(layer.why_whole(n))
        return [(one, whole) for one in (names.columns, names.cache, names.fused, names.output)]
    lengths = (
        layer.heads * layer.key_length,
        layer.kv_heads * layer.key_length,
        layer.kv_heads * layer.value_length,
    )
    group = "attention {layer}"
    return [
        (names.columns, Column(group)),
        (names.cache, _Cache(group, layer.kv_heads, layer.key_length, layer.value_length)),
        (names.fused, Fused(lengths, group)),
        (names.output, Row(group)),
    ]


def _ffn_cuts(
    names: Names, layer: Layer, n: int, is_wide: bool, addends: Partial | Mirror
) -> list[tuple[str, Cut]]:
    """The same of the feed-forward part; `addends`: the cut of biases that are added up."""
    if layer.feed_forward(n) is None:
        whole = Mirror(layer.ffn_whole or "it is too small to be cut")
        weights = names.up, names.gate_up, names.down
        biases = names.up_biases, names.gate_up_biases, names.down_biases
        return [(one, whole) for one in (*weights, *biases)]
    group, twice = "ffn {layer}", (layer.hidden,) * 2
    return [
        (names.wide_up if is_wide else "", Fused(twice, group)),
        (names.gate_up, Fused(twice, group)),
        (names.gate_up_biases, Fused(twice, group, axis=0)),
        (names.up, Column(group)),
        (names.up_biases, Column(group, axis=0)),
        (names.down, Row(group)),
        (names.down_biases, addends),
    ]


_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
#: Weights of an attention that are cut or go with the cut; norms are looked at by themselves.
_ATTENTION = re.compile(r"attn_([qkv]|qkv|output|sinks|rot_embd|\w*norm(_\d)?)\.weight")


def _attention_whole(sizes: Mapping[str, int], key_length: int, is_part: bool) -> str:
    """Why the attention of a layer with these weights is mirrored, "" where none says so.

    `sizes` are the numbers of elements, by names without the layer; `is_part`: what is missing may
    be in other files. Keys and values may be another layer's.
    """
    output, queries = "attn_output.weight", ("attn_q.weight", "attn_qkv.weight")
    is_complete = output in sizes and any(name in sizes for name in queries)
    for name, size in sizes.items():
        if name.startswith("attn_") and name.endswith(".weight") and not _ATTENTION.fullmatch(name):
            return f"there is no cut for {name}"
        # with an output of its own a state-space part is beside the attention, else within
        if name.startswith("ssm_") and is_complete and "ssm_out.weight" not in sizes:
            return f"there is no cut for {name}"
        is_by_head = name in ("attn_q_norm.weight", "attn_k_norm.weight") and size <= key_length
        if re.fullmatch(r"attn_(q|k|sub)_norm\.weight", name) and not is_by_head:
            return f"{name} is of all heads"
    if is_part or is_complete or not any(name in sizes for name in (output, *queries)):
        return ""
    return f"there is no {queries[0] if output in sizes else output}"


def _ffn_whole(sizes: Mapping[str, int], is_part: bool) -> str:
    """The same, of the feed-forward part."""
    if "ffn_sub_norm.weight" in sizes:
        return "ffn_sub_norm.weight is of all hidden units"
    for kind in ("", "_exps"):
        down, *others = (f"ffn_{one}{kind}.weight" for one in ("down", "up", "gate_up", "gate"))
        if is_part or not any(name in sizes for name in (down, *others)):
            continue
        if down not in sizes:
            return f"there is no {down}"
        if not any(name in sizes for name in others[:2]):
            return f"there is no {others[0]}"
    return ""


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
    from .. import capi
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

    def block(tensor: str) -> int:
        if tensor not in file.tensors:
            return 1
        return capi.ggml_blck_size(file.tensors[tensor].type)

    n_layers = _layers(found("block_count"), f"{name}: {architecture}.block_count")
    width = found("embedding_length")
    width = _checked(width, f"{name}: {architecture}.embedding_length", 1)
    n_parts = metadata.get("split.count", 1)
    is_part = isinstance(n_parts, int) and n_parts > 1
    sizes: dict[int, dict[str, int]] = {i: {} for i in range(n_layers)}
    for tensor_name, tensor in file.tensors.items():
        match = _IN_LAYER.fullmatch(tensor_name)
        if match and int(match[1]) < n_layers:
            sizes[int(match[1])][match[2]] = math.prod(tensor.ne)
    layers, wide = [], []
    for i in range(n_layers):
        heads = number("attention.head_count", i)
        kv_heads = number("attention.head_count_kv", i, heads)
        length = width // max(heads, 1) or None
        down = f"blk.{i}.ffn_down"
        expert = f"{down}_exps.weight" in file.tensors
        key_length = number("attention.key_length", i, length, 1)
        hidden = number("feed_forward_length", i)
        if expert:
            hidden = number("expert_feed_forward_length", i, hidden)
        layers.append(
            Layer(
                heads,
                kv_heads,
                key_length,
                number("attention.value_length", i, length, 1),
                hidden,
                block(f"blk.{i}.attn_output.weight"),
                block(f"{down}_exps.weight" if expert else f"{down}.weight"),
                _attention_whole(sizes[i], key_length, is_part),
                _ffn_whole(sizes[i], is_part),
            )
        )
        up = file.tensors.get(f"blk.{i}.ffn_up.weight")
        if up is not None and not expert and up.ne[1:] == (2 * hidden,):
            wide.append(i)
    tied = "output.weight" not in file.tensors and not is_part
    return rules(_GGUF, layers, ratios, tied, wide)


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

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"config has no number {key!r}")
        return _checked(value, f"config: {key}", 1)

    heads = number("num_attention_heads")
    length = number("head_dim", number("hidden_size") // heads or None)
    hidden = number("intermediate_size")
    layer = Layer(
        heads,
        number("num_key_value_heads", heads),
        length,
        length,
        number("moe_intermediate_size", hidden),
        int(block_size),
        int(block_size),
        "keys and values are compressed (kv_lora_rank)" if text.get("kv_lora_rank") else "",
    )
    n_layers = _layers(number("num_hidden_layers"), "config: num_hidden_layers")
    tied = text.get("tie_word_embeddings")
    tied = config.get("tie_word_embeddings") if tied is None else tied
    if tied is not None and not isinstance(tied, bool):
        expected = "true or false"
        raise ValueError(f"config: tie_word_embeddings is {describe(tied)}, expected {expected}")
    return rules(_HUGGING_FACE, [layer] * n_layers, ratios, bool(tied))
