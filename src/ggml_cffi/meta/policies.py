"""Split functions to choose from: policies, which say by rules how the weights of a model are cut.

A policy is a split function for `MetaDevice`. It can be printed, and two go together: in
``first | second`` the second answers for the tensors that the first has no rule for.

`gguf` and `hugging_face` know the names of common models. The cuts are Megatron's, as llama.cpp
has them: a layer's first products are column-parallel (cut along the rows of the weight, ggml's
axis 1), its last ones row-parallel (axis 0), so that each device goes from one to the other with
what it has, and one sum over the devices ends a layer's attention, and one its feed-forward part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from ._numbers import describe, integer, integers
from ._numbers import ratios as _ratios
from ._split import MAX_DEVICES, SplitAxis, SplitState, TensorInfo, check_answer, cut

if TYPE_CHECKING:
    from ..gguf import GGUFFile

__all__ = [
    "Column",
    "Fused",
    "Group",
    "Mirror",
    "Partial",
    "Policy",
    "Row",
    "Rule",
    "Rules",
    "by_ratio",
    "gguf",
    "hugging_face",
    "mirror",
]

Ratios: TypeAlias = Sequence["float | Fraction"]


class Policy:
    """A split function; what it has no answer for is mirrored."""

    def find(self, info: TensorInfo, n_devs: int) -> SplitState | None:
        """The split of a tensor, None where the policy has no rule for it.

        Raises ValueError where there is one that does not fit the tensor.
        """
        raise NotImplementedError

    def why(self, info: TensorInfo, n_devs: int) -> str:
        """Why the tensor is split, or mirrored, as it is; for people."""
        return ""

    def __call__(self, info: TensorInfo, n_devs: int) -> SplitState:
        """What `find` finds, or MIRRORED; raises as it does."""
        return self.find(info, n_devs) or SplitState.mirrored()

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Either(self, other)


@dataclass(frozen=True)
class _Either(Policy):
    first: Policy
    second: Policy

    def find(self, info: TensorInfo, n_devs: int) -> SplitState | None:
        found = self.first.find(info, n_devs)
        return self.second.find(info, n_devs) if found is None else found

    def why(self, info: TensorInfo, n_devs: int) -> str:
        chosen = self.second if self.first.find(info, n_devs) is None else self.first
        return chosen.why(info, n_devs)

    def __str__(self) -> str:
        return f"{self.first}\n{self.second}"


@dataclass(frozen=True)
class _Everything(Policy):
    def find(self, info: TensorInfo, n_devs: int) -> SplitState | None:
        return SplitState.mirrored()

    def why(self, info: TensorInfo, n_devs: int) -> str:
        return "everything is mirrored"

    def __str__(self) -> str:
        return "everything: mirrored"


def mirror() -> Policy:
    """Every tensor whole on every device."""
    return _Everything()


@dataclass(frozen=True)
class _ByRatio(Policy):
    axis: int
    ratios: tuple[Fraction, ...]
    granularity: int

    def find(self, info: TensorInfo, n_devs: int) -> SplitState | None:
        _check_count(self.ratios, n_devs)
        if info.ne[self.axis] < 2 * self._unit(info):
            return None
        return SplitState.by_ratio(info, self.axis, self.ratios, self.granularity)

    def why(self, info: TensorInfo, n_devs: int) -> str:
        if self.find(info, n_devs) is None:
            return f"axis {self.axis} has no two parts of {self._unit(info)}"
        return f"by ratio along axis {self.axis}"

    def _unit(self, info: TensorInfo) -> int:
        return math.lcm(self.granularity, info.block_size if self.axis == 0 else 1)

    def __str__(self) -> str:
        return f"everything: axis {self.axis}, {_told(self.ratios)}"


def by_ratio(axis: int, ratios: Ratios, granularity: int = 1) -> Policy:
    """Every tensor cut along an axis (ggml's order) in the proportion of `ratios`.

    Cuts are on multiples of `granularity`, and of the block of the type along axis 0; the last
    device takes the rest, as in `SplitState.by_ratio`. A tensor whose axis is shorter than two
    such parts has no rule: it is mirrored.

    Raises TypeError and ValueError for what is no axis from 0 to 2, for ratios that are negative,
    not finite or all 0, and for a granularity below 1.
    """
    where = "by_ratio"
    if integer(axis, "axis", where) not in (0, 1, 2):
        raise ValueError(f"{where}: axis is {axis}, expected 0, 1 or 2")
    if integer(granularity, "granularity", where) < 1:
        raise ValueError(f"{where}: granularity is {granularity}, expected at least 1")
    return _ByRatio(int(axis), tuple(_ratios(ratios, where)), int(granularity))


# ---- rules


@dataclass(frozen=True)
class Group:
    """Tensors that are cut at the same places, since what one makes is what the next one takes.

    `length` is that of the axis along which the first of them is cut, `granularity` what each
    share but the last is a multiple of. A tensor whose axis has another length is cut in the same
    proportion: with grouped queries, a device gets the KV heads of its heads. Every device whose
    ratio is not 0 gets a share as long as there are enough.

    Raises TypeError and ValueError for a length or a granularity that is no integer from 1 on.
    """

    length: int
    granularity: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "granularity"):
            number = integer(getattr(self, name), name, "Group")
            if number < 1:
                raise ValueError(f"Group: {name} is {number}, expected at least 1")
            object.__setattr__(self, name, number)

    def shares(self, ratios: Ratios, length: int, where: str = "group") -> tuple[int, ...]:
        """How much of an axis of `length` each device gets.

        Raises ValueError where the cuts of the group are none of an axis of that length.
        """
        whole = self._whole(ratios, where)
        found = [divmod(share * length, self.length) for share in whole]
        if any(rest for _, rest in found):
            raise ValueError(
                f"{where}: shares {list(whole)} of {self.length} are no whole parts of {length}"
            )
        return tuple(share for share, _ in found)

    def _whole(self, ratios: Ratios, where: str) -> list[int]:
        """Rounded down to the granularity, the last device taking the rest; no share is empty."""
        found = list(cut(self.length, SplitAxis.AXIS_1, ratios, self.granularity, where).ne)
        for j, ratio in enumerate(ratios):
            largest = max(range(len(found)), key=found.__getitem__)
            if ratio and not found[j] and found[largest] > self.granularity:
                found[j] += self.granularity
                found[largest] -= self.granularity
        return found


@dataclass(frozen=True)
class Column:
    """Column-parallel: the rows of the weight (axis 1), or the elements of a bias, are shared out.

    `group` names the `Group`; "" is one of the tensor's own. `axis` is ggml's; None is 1, or 0 for
    a tensor of one row. The biases of experts have a row for each expert: they need axis 0.

    Raises TypeError and ValueError for another axis than 0 and 1.
    """

    group: str = ""
    axis: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _rows_axis(self.axis, "Column"))

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        axis = _rows_of(info, self.axis)
        return SplitState.split(axis, shares(self.group, info.ne[axis]))

    def __str__(self) -> str:
        return f"column-parallel{_along(self.axis)}{_of(self.group)}"


@dataclass(frozen=True)
class Row:
    """Row-parallel: the columns of the weight (axis 0) are shared out; the results are addends.

    Also for a cache of keys or values of shape (places, KV heads x width), of which each device
    has its heads.
    """

    group: str = ""

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        return SplitState.split(0, shares(self.group, info.ne[0]))

    def __str__(self) -> str:
        return f"row-parallel{_of(self.group)}"


@dataclass(frozen=True)
class _Cache(Row):
    """A cache of keys or values, cut between KV heads; mirrored where its shape shows none.

    `keys` and `values` are the lengths of a head.
    """

    kv_heads: int = 0
    keys: int = 0
    values: int = 0

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        axis = self._axis(info)
        if axis is None:
            return SplitState.mirrored()
        return SplitState.split(axis, shares(self.group, info.ne[axis]))

    def _axis(self, info: TensorInfo) -> int | None:
        """Where the KV heads are: within a row, or outermost."""
        length = self._length(info)
        if info.ne[0] == self.kv_heads * length:
            return 0
        return 2 if info.ne[0] == length and info.ne[2] == self.kv_heads else None

    def _length(self, info: TensorInfo) -> int:
        return self.values if info.name.startswith("cache_v") else self.keys

    def _why_whole(self, info: TensorInfo) -> str:
        """Why it is mirrored; "" where it is cut."""
        if self._axis(info) is not None:
            return ""
        n, length = self.kv_heads, self._length(info)
        return (
            f"a cache of shape {info.shape}, expected (places, {n * length}) or "
            f"({n}, places, {length})"
        )

    def __str__(self) -> str:
        return f"between KV heads{_of(self.group)}"


@dataclass(frozen=True)
class Mirror:
    """Whole on every device; `why` is for people."""

    why: str = ""

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        return SplitState.mirrored()

    def __str__(self) -> str:
        return f"mirrored ({self.why})" if self.why else "mirrored"


@dataclass(frozen=True)
class Partial:
    """An addend on every device: for the bias of a row-parallel product of experts."""

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        return SplitState.partial()

    def __str__(self) -> str:
        return "an addend on each"


@dataclass(frozen=True)
class Fused:
    """Several column-parallel weights in one: each of `lengths` is a segment, cut as `group` is.

    Segments of equal length in a row are repeats of one where all are equal (gate and up). `axis`
    is that of `Column`.

    Raises TypeError and ValueError for lengths that are no integers from 1 on, and for another axis
    than 0 and 1.
    """

    lengths: tuple[int, ...]
    group: str = ""
    axis: int | None = None

    def __post_init__(self) -> None:
        lengths = integers(self.lengths, "lengths", "Fused")
        if not lengths:
            raise ValueError("Fused: there are no lengths, expected at least 1")
        for i, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"Fused: lengths[{i}] is {length}, expected at least 1")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "axis", _rows_axis(self.axis, "Fused"))

    def _state(self, info: TensorInfo, shares: Shares) -> SplitState:
        axis = _rows_of(info, self.axis)
        if sum(self.lengths) != info.ne[axis]:
            expected = " + ".join(map(str, self.lengths))
            what = "rows" if axis else "elements"
            raise ValueError(f"{info.name!r} has {info.ne[axis]} {what}, expected {expected}")
        if len(set(self.lengths)) == 1:
            ne, nr = [shares(self.group, self.lengths[0])], [len(self.lengths)]
        else:
            ne, nr = [shares(self.group, n) for n in self.lengths], [1] * len(self.lengths)
        return SplitState.segments(axis, ne, nr)

    def __str__(self) -> str:
        return f"column-parallel{_along(self.axis)}, {len(self.lengths)} fused{_of(self.group)}"


Shares: TypeAlias = Callable[[str, int], "tuple[int, ...]"]
Cut: TypeAlias = Column | Row | Mirror | Partial | Fused


def _rows_of(info: TensorInfo, axis: int | None) -> int:
    if axis is not None:
        return axis
    return 1 if info.ne[1] > 1 else 0


def _rows_axis(axis: object, where: str) -> int | None:
    if axis is None:
        return None
    number = integer(axis, "axis", where)
    if number not in (0, 1):
        raise ValueError(f"{where}: axis is {number}, expected 0, 1 or None")
    return number


def _along(axis: int | None) -> str:
    return "" if axis is None else f" along axis {axis}"


def _of(group: str) -> str:
    return f" in {group}" if group else ""


@dataclass(frozen=True)
class Rule:
    """What happens to the tensors whose whole name matches a regular expression.

    A ``{layer}`` in the name of a group stands for the expression's group of that name.
    """

    pattern: str
    cut: Cut

    def __str__(self) -> str:
        return f"{self.pattern}: {self.cut}"


@dataclass(frozen=True)
class Rules(Policy):
    """The first rule that matches a tensor's name says how it is cut.

    `ratios` are the devices' parts, one each. `groups` are the `Group`s that rules name.

    Raises ValueError for a pattern that is no regular expression and for a rule whose group is not
    there, TypeError for what is no rule or no group, TypeError and ValueError for ratios as
    `by_ratio` does.
    """

    rules: tuple[Rule, ...]
    ratios: tuple[Fraction, ...]
    groups: Mapping[str, Group] = field(default_factory=dict)

    def __init__(
        self, rules: Iterable[Rule], ratios: Ratios, groups: Mapping[str, Group] | None = None
    ) -> None:
        object.__setattr__(self, "rules", tuple(rules))
        object.__setattr__(self, "ratios", tuple(_ratios(ratios, "Rules")))
        object.__setattr__(self, "groups", dict(groups or {}))
        if len(self.ratios) > MAX_DEVICES:
            raise ValueError(f"Rules: {len(self.ratios)} ratios, expected 1 to {MAX_DEVICES}")
        for name, one in self.groups.items():
            if not isinstance(one, Group):
                raise TypeError(f"Rules: group {name!r} is {describe(one)}, expected a Group")
        compiled = []
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"Rules: {rule!r}, expected a Rule of a pattern and a cut")
            if not isinstance(rule.cut, (Column, Row, Mirror, Partial, Fused)):
                expected = "a Column, Row, Mirror, Partial or Fused"
                raise TypeError(
                    f"Rules: the cut of {rule.pattern!r} is {rule.cut!r}, expected {expected}"
                )
            compiled.append((_expression(rule), rule.cut))
            group = getattr(rule.cut, "group", "")
            if not isinstance(group, str):
                raise TypeError(
                    f"Rules: the group of {rule.pattern!r} is {describe(group)}, expected a string"
                )
            if _LAYER in group:
                if "layer" not in compiled[-1][0].groupindex:
                    expected = "no group of the expression named 'layer'"
                    raise ValueError(f"Rules: {rule} has {expected}")
            elif group and group not in self.groups:
                raise ValueError(f"Rules: {rule} names a group that is not there")
        object.__setattr__(self, "_compiled", tuple(compiled))

    def find(self, info: TensorInfo, n_devs: int) -> SplitState | None:
        """The split of a tensor; see `Policy.find`."""
        found = self._rule(info)
        if found is None:
            return None
        _check_count(self.ratios, n_devs)
        match, chosen = found
        where = f"split of tensor {info.name!r}"

        def shares(group: str, length: int) -> tuple[int, ...]:
            if not group:
                unit = info.block_size if isinstance(chosen, Row) else 1
                return Group(length, unit).shares(self.ratios, length, where)
            name = _in_layer(group, match)
            if name not in self.groups:
                raise ValueError(f"{where}: there is no group {name!r}")
            return self.groups[name].shares(self.ratios, length, where)

        return check_answer(chosen._state(info, shares), info, n_devs)

    def why(self, info: TensorInfo, n_devs: int) -> str:
        """The rule, in words."""
        found = self._rule(info)
        if found is None:
            return "no rule names it"
        match, chosen = found
        if isinstance(chosen, Mirror) and chosen.why:
            return chosen.why
        if isinstance(chosen, _Cache) and (why := chosen._why_whole(info)):
            return why
        return _in_layer(str(chosen), match)

    def _rule(self, info: TensorInfo) -> tuple[re.Match[str], Cut] | None:
        compiled: tuple[tuple[re.Pattern[str], Cut], ...]
        compiled = getattr(self, "_compiled")  # noqa: B009 # no field of the dataclass
        for pattern, chosen in compiled:
            match = pattern.fullmatch(info.name)
            if match:
                return match, chosen
        return None

    def __str__(self) -> str:
        return "\n".join([f"parts {_told(self.ratios)}", *map(str, self.rules)])


_LAYER = "{layer}"


def _in_layer(group: str, match: re.Match[str]) -> str:
    return group.replace(_LAYER, str(match["layer"])) if _LAYER in group else group


def _expression(rule: Rule) -> re.Pattern[str]:
    if not isinstance(rule.pattern, str):
        raise TypeError(f"Rules: a pattern is {describe(rule.pattern)}, expected a string")
    try:
        return re.compile(rule.pattern)
    except re.error as error:
        raise ValueError(f"Rules: {rule.pattern!r} is no expression: {error}") from None


def _told(ratios: Iterable[Fraction]) -> str:
    return " : ".join(f"{float(one):g}" for one in ratios)


def _check_count(ratios: Sequence[Fraction], n_devs: int) -> None:
    if len(ratios) != n_devs:
        raise ValueError(f"the policy has {len(ratios)} ratios, the meta device {n_devs} devices")


# ---- models


def gguf(file: GGUFFile, ratios: Ratios) -> Rules:
    """The rules for the tensors of a GGUF file, by the names and the metadata of llama.cpp.

    Of a layer's attention each device gets heads, and the KV heads that belong to them; of its
    dense feed-forward part, of each expert and of shared experts, it gets a part of the hidden
    units; of the output it gets a part of the vocabulary. Embeddings, norms and routers are
    mirrored. In a file without output.weight the embedding is the output as well: each device
    computes all logits. The granularities are those of llama.cpp. The lengths of heads and of
    feed-forward parts are those of a layer's weights, of the metadata where these do not tell.

    The attention of a layer is mirrored where it has fewer KV heads than devices have a share, or
    one; where the file has weights of it that no rule cuts (MLA, gates), or a norm of all heads;
    where it has ALiBi; and where its output is there without the queries, or they without it. It
    must not use FLASH_ATTN_EXT then. A feed-forward part, dense or of experts, of which up or down
    is missing, or with a norm between them, is mirrored as well. In the first of several files
    ("split.count") nothing counts as missing.

    A cache of keys or values is to be named ``cache_k_l0`` or ``cache_v_l0``, by its layer. It is
    cut between KV heads, of width the length of a key or a value: of shape ``(places, KV heads x
    width)`` within the rows, of ``(KV heads, places, width)`` along its first axis; one of another
    shape is mirrored, and `why` says so. There is no rule for other names: ``gguf(...) | policy``
    asks another, else they are mirrored.

    Raises ValueError for a file that lacks the numbers of a transformer in its metadata or has
    others there than there can be (negative ones, more than 1024 layers, too few in an array for
    the layers), TypeError and ValueError for ratios as `by_ratio` does, TypeError for what is no
    GGUFFile.
    """
    from ..gguf import GGUFFile
    from ._models import of_gguf

    if not isinstance(file, GGUFFile):
        raise TypeError(f"file is {file!r} ({type(file).__name__}), expected a GGUFFile")
    return of_gguf(file, ratios)


def hugging_face(config: Mapping[str, object], ratios: Ratios, block_size: int = 1) -> Rules:
    """The rules for weights that have the names of Hugging Face's Transformers.

    `config` is the content of the model's config.json, or its "text_config": num_hidden_layers,
    num_attention_heads, num_key_value_heads, hidden_size, head_dim, intermediate_size (of dense
    layers), moe_intermediate_size (of each expert), tie_word_embeddings; of shared experts
    shared_expert_intermediate_size, or how many there are (n_shared_experts, num_shared_experts,
    moe_num_shared_experts), without which there is no rule for them; of Gemma 4 layer_types,
    global_head_dim, attention_k_eq_v, num_global_key_value_heads. `block_size` is the number of
    elements in a block of the weights' type, if they have been quantised. The names are those of
    Llama, Mistral, Qwen, Gemma, Phi-3, Mixtral and DeepSeek, and of phi-2's attention, after
    "language_model.model." or "model.language_model." too; there is no rule for the towers of
    models that see or hear.

    The cuts, and what is mirrored, are as in `gguf`. Of weights without a cut and of norms of all
    heads kv_lora_rank (MLA), use_qk_norm and the model_type tell: bitnet, olmo2 and some others.

    Raises ValueError where one of the numbers is missing and has no default, or is no integer from
    1 on (from 0 on those of shared experts), and for more than 1024 layers; TypeError and
    ValueError for ratios as `by_ratio` does and for a block size below 1, TypeError for what is no
    mapping.
    """
    from ._models import of_hugging_face

    if not isinstance(config, Mapping):
        raise TypeError(f"config is {config!r} ({type(config).__name__}), expected a mapping")
    return of_hugging_face(config, ratios, block_size)
