"""Split states: how a tensor is cut over the devices of a meta device, and the check of an answer.

Nothing here needs the compiled extension but `tensor_info` and `fill`, which import it when called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from ._numbers import describe, integer, integers, items, ratios, show

MAX_DEVICES = 16  # GGML_BACKEND_META_MAX_DEVICES
MAX_SEGMENTS = 16  # length of ggml_backend_meta_split_state.nr
MAX_DIMS = 4  # GGML_MAX_DIMS
TYPE_F32 = 0  # GGML_TYPE_F32

KEYS = ("axis", "ne", "n_segments", "nr")


class SplitAxis(IntEnum):
    """Which axis of a tensor is cut (in ggml's order), or what else the devices hold of it."""

    AXIS_0 = 0
    AXIS_1 = 1
    AXIS_2 = 2
    AXIS_3 = 3
    MIRRORED = 10
    """Every device holds the whole tensor."""
    PARTIAL = 11
    """Every device holds an addend of the full shape; the tensor is their sum."""
    NONE = 98
    """No wish: the tensor is mirrored."""
    UNKNOWN = 99
    """No wish: the tensor is mirrored."""


@dataclass(frozen=True)
class TensorInfo:
    """What a split function is told about a tensor, as attributes and as items."""

    name: str
    type: int
    """The `ggml_type`, an IntEnum."""
    ne: tuple[int, int, int, int]
    """Numbers of elements in ggml's order, the innermost axis first; always four."""
    op: int
    """The `ggml_op` that makes the tensor, an IntEnum; GGML_OP_NONE for a weight."""
    flags: int
    """Bits of `ggml_tensor_flag`."""
    block_size: int = 1
    """Elements in a block of the type: slices along axis 0 are multiples of it."""
    nbytes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in NumPy's order: outermost axis first, ggml's trailing ones dropped."""
        n_dims = MAX_DIMS
        while n_dims > 1 and self.ne[n_dims - 1] == 1:
            n_dims -= 1
        return tuple(reversed(self.ne[:n_dims]))

    def keys(self) -> tuple[str, ...]:
        """The names of the items."""
        return (*(field.name for field in fields(self)), "shape")

    def __getitem__(self, key: str) -> str | int | tuple[int, ...]:
        if key not in self.keys():
            raise KeyError(key)
        value: str | int | tuple[int, ...] = getattr(self, key)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass(frozen=True)
class SplitState:
    """How a tensor is cut along `axis`.

    Device `j` gets `ne[s * n_devs + j]` elements of segment `s`, and that `nr[s]` times. The
    classmethods build valid states; whether one fits a tensor is checked when it is used.
    """

    axis: SplitAxis
    ne: tuple[int, ...] = ()
    n_segments: int = 1
    nr: tuple[int, ...] = (1,)

    @classmethod
    def mirrored(cls) -> SplitState:
        """Every device holds the whole tensor."""
        return cls(SplitAxis.MIRRORED)

    @classmethod
    def partial(cls) -> SplitState:
        """Every device holds an addend of the tensor (F32 only)."""
        return cls(SplitAxis.PARTIAL)

    @classmethod
    def split(cls, axis: int, ne: Sequence[int]) -> SplitState:
        """Cut along `axis` (0 to 2, ggml's order), `ne[j]` elements for device `j`.

        Raises TypeError and ValueError for what is no axis or no sequence of integers.
        """
        return cls.segments(axis, [ne])

    @classmethod
    def segments(
        cls, axis: int, ne: Sequence[Sequence[int]], nr: Sequence[int] | None = None
    ) -> SplitState:
        """Cut each segment of `axis` by itself: `ne[s][j]` elements for device `j`, `nr[s]` times.

        Raises TypeError and ValueError for segments with different numbers of devices, for other
        than 1 to 16 segments, for `nr` of another length, and for what is no integer.
        """
        where = "SplitState"
        split_axis = _axis(axis, where)
        if split_axis > SplitAxis.AXIS_2:
            raise ValueError(f"{where}: axis is {split_axis!r}, expected 0, 1 or 2")
        rows = [
            integers(row, f"ne of segment {s}", where)
            for s, row in enumerate(items(ne, "ne", where))
        ]
        if not 1 <= len(rows) <= MAX_SEGMENTS:
            raise ValueError(f"{where}: {len(rows)} segments, expected 1 to {MAX_SEGMENTS}")
        lengths = [len(row) for row in rows]
        if len(set(lengths)) != 1 or not 1 <= lengths[0] <= MAX_DEVICES:
            expected = f"the same number for all, 1 to {MAX_DEVICES}"
            raise ValueError(f"{where}: segments for {show(lengths)} devices, expected {expected}")
        repeats = _repeats(nr, len(rows), where)
        return cls(split_axis, tuple(n for row in rows for n in row), len(rows), repeats)

    @classmethod
    def by_ratio(
        cls,
        info: TensorInfo,
        axis: int,
        ratios: Iterable[float | Fraction],
        granularity: int = 1,
    ) -> SplitState:
        """Cut the tensor along `axis` in the proportion of `ratios`, one for each device.

        Each cut is rounded down to a multiple of `granularity` (along axis 0 also of the type's
        block size); the last device whose ratio is not 0 takes the rest. A ratio of 0 gives an
        empty share.

        Raises TypeError and ValueError for ratios that are negative, not finite or all 0, and for
        an axis along which the tensor cannot be cut.
        """
        where = f"split of tensor {info.name!r}"
        split_axis = _axis(axis, where)
        if split_axis > SplitAxis.AXIS_2:
            raise ValueError(f"{where}: axis is {split_axis!r}, expected 0, 1 or 2")
        step = integer(granularity, "granularity", where)
        if step < 1:
            raise ValueError(f"{where}: granularity is {step}, expected at least 1")
        if split_axis == SplitAxis.AXIS_0:
            step = math.lcm(step, info.block_size)
        return check_answer(cut(info.ne[split_axis], split_axis, ratios, step, where), info, None)

    @property
    def is_split(self) -> bool:
        """Whether the tensor is cut along one of its axes."""
        return self.axis <= SplitAxis.AXIS_3

    @property
    def shares(self) -> tuple[int, ...]:
        """How many elements along the axis each device gets, all segments and repeats together.

        Empty for a tensor that is not cut.
        """
        n_devs = len(self.ne) // self.n_segments
        return tuple(
            sum(self.ne[s * n_devs + j] * self.nr[s] for s in range(self.n_segments))
            for j in range(n_devs)
        )

    def __str__(self) -> str:
        """In words: ``mirrored``, or ``split along axis 1: 2 + 1 | 1 + 1 (2 times)``."""
        if not self.is_split:
            return self.axis.name.lower()
        n_devs = len(self.ne) // self.n_segments
        rows = [self.ne[s * n_devs : (s + 1) * n_devs] for s in range(self.n_segments)]
        parts = [
            " + ".join(map(str, row)) + (f" ({times} times)" if times > 1 else "")
            for row, times in zip(rows, self.nr, strict=False)
        ]
        return f"split along axis {int(self.axis)}: {' | '.join(parts)}"


SplitAnswer: TypeAlias = SplitState | Mapping[str, object]
"""What a split function may return."""


def check_answer(
    answer: object, info: TensorInfo, n_devs: int | None, *, repeats: bool = True
) -> SplitState:
    """Turn what a split function returned for a tensor into a `SplitState` that ggml can use.

    `answer` is a SplitState or a mapping with `axis`, `ne`, `n_segments` (1 if left out) and `nr`
    (ones if left out). `n_devs` None takes the number of devices from a SplitState. `repeats` says
    whether this ggml knows `nr`. The axes NONE and UNKNOWN become MIRRORED.

    Raises TypeError for what is of the wrong type and ValueError for what does not fit the tensor
    or what ggml could not write; the message names the tensor, the value and what was expected.
    """
    where = f"split of tensor {info.name!r}"
    given = _as_mapping(answer, where)
    axis = _axis(given["axis"], where)
    if axis in (SplitAxis.NONE, SplitAxis.UNKNOWN):
        return SplitState.mirrored()
    n_segments = integer(given.get("n_segments", 1), "n_segments", where)
    if not 1 <= n_segments <= MAX_SEGMENTS:
        raise ValueError(f"{where}: n_segments is {n_segments}, expected 1 to {MAX_SEGMENTS}")
    nr = _repeats(given.get("nr"), n_segments, where)
    if axis > SplitAxis.AXIS_3:
        _check_whole(axis, n_segments, nr, info, where)
        return SplitState(axis)
    if "ne" not in given:
        raise ValueError(f"{where}: ne is missing, expected n_segments * n_devs integers")
    length = None if n_devs is None else n_segments * n_devs
    state = SplitState(axis, integers(given["ne"], "ne", where, length), n_segments, nr)
    _check_axis(state.axis, info, where)
    _check_numbers(state, info, where)
    if n_segments > 1 or nr != (1,):
        _check_segments(state, info, repeats, where)
    return state


def _as_mapping(answer: object, where: str) -> Mapping[str, object]:
    if isinstance(answer, SplitState):
        return {key: getattr(answer, key) for key in KEYS}
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"{where}: the split function returned {describe(answer)}, "
            f"expected a SplitState or a mapping with {', '.join(KEYS)}"
        )
    unknown = [key for key in answer if key not in KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key {show(unknown[0])}, expected {', '.join(KEYS)}")
    if "axis" not in answer:
        raise ValueError(f"{where}: axis is missing, expected {', '.join(KEYS)}")
    return answer


def _check_whole(
    axis: SplitAxis, n_segments: int, nr: tuple[int, ...], info: TensorInfo, where: str
) -> None:
    """MIRRORED and PARTIAL: `ne` is ignored, but ggml cannot write segments or repeats of them."""
    if n_segments != 1 or nr != (1,):
        raise ValueError(
            f"{where}: axis is {axis.name} with n_segments = {n_segments} and nr = {list(nr)}, "
            f"expected 1 and [1]"
        )
    if axis == SplitAxis.PARTIAL and info.type != TYPE_F32:
        kind = _type_name(info.type)
        raise ValueError(f"{where}: axis is PARTIAL and the type {kind}, expected F32")


def _check_axis(axis: SplitAxis, info: TensorInfo, where: str) -> None:
    if axis == SplitAxis.AXIS_3:
        raise ValueError(f"{where}: axis is 3, which ggml cannot write, expected 0, 1 or 2")
    unit = _unit(axis, info)
    # ggml scales only the strides that are larger than the axis's own: with one element or block
    # there is none, and a device with an empty share would be written out of bounds
    if info.ne[axis] <= unit:
        what = "element" if unit == 1 else f"block of {unit} elements"
        raise ValueError(
            f"{where}: axis is {int(axis)} in ggml's order, along which a tensor of shape "
            f"{info.shape} has {info.ne[axis]}: expected an axis with more than one {what}"
        )


def _check_numbers(state: SplitState, info: TensorInfo, where: str) -> None:
    axis, length, unit = int(state.axis), info.ne[state.axis], _unit(state.axis, info)
    for s, repeat in enumerate(state.nr):
        # the upper limit matters for a segment of nothing, which ggml would write nr times
        if not 1 <= repeat <= length:
            raise ValueError(f"{where}: nr[{s}] is {repeat}, expected 1 to ne[{axis}] = {length}")
    for i, n in enumerate(state.ne):
        if n < 0:
            raise ValueError(f"{where}: ne[{i}] is {n}, expected at least 0")
        if n % unit:
            kind = _type_name(info.type)
            expected = f"a multiple of {unit}, the block size of {kind}"
            raise ValueError(f"{where}: ne[{i}] is {n}, expected {expected}")
    total = sum(state.shares)
    if total != length:
        times = "" if max(state.nr) == 1 else f" times nr = {list(state.nr)}"
        raise ValueError(
            f"{where}: ne = {show(list(state.ne))}{times} sums up to {show(total)}, "
            f"expected ne[{axis}] = {length} of the tensor"
        )


def _check_segments(state: SplitState, info: TensorInfo, repeats: bool, where: str) -> None:
    """Segments and repeats are written row by row on axis 0, matrix by matrix on axis 1."""
    if not repeats and max(state.nr) > 1:
        raise ValueError(f"{where}: nr is {list(state.nr)}, which this ggml lacks, expected ones")
    if state.axis == SplitAxis.AXIS_2:
        raise ValueError(f"{where}: segments or repeats on axis 2, expected axis 0 or 1")
    if info.ne[3] != 1 or (state.axis == SplitAxis.AXIS_0 and info.ne[2] != 1):
        expected = "ne[2] = ne[3] = 1" if state.axis == SplitAxis.AXIS_0 else "ne[3] = 1"
        raise ValueError(
            f"{where}: segments or repeats on axis {int(state.axis)} of ne = {list(info.ne)}, "
            f"expected {expected}"
        )


def _unit(axis: SplitAxis, info: TensorInfo) -> int:
    return info.block_size if axis == SplitAxis.AXIS_0 else 1


def _axis(value: object, where: str) -> SplitAxis:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: axis is {describe(value)}, expected an int or a SplitAxis")
    try:
        return SplitAxis(int(value))
    except ValueError:
        expected = ", ".join(f"{member.name} ({member.value})" for member in SplitAxis)
        raise ValueError(f"{where}: axis is {show(int(value))}, expected {expected}") from None


def _repeats(value: object, n_segments: int, where: str) -> tuple[int, ...]:
    return (1,) * n_segments if value is None else integers(value, "nr", where, n_segments)


def cut(
    length: int, axis: SplitAxis, proportions: Iterable[object], step: int, where: str
) -> SplitState:
    weights = ratios(proportions, where)
    if len(weights) > MAX_DEVICES:
        raise ValueError(f"{where}: {len(weights)} ratios, expected 1 to {MAX_DEVICES}")
    total = sum(weights)
    last = max(j for j, weight in enumerate(weights) if weight)
    ne: list[int] = []
    done, begin = Fraction(0), 0
    for j, weight in enumerate(weights):
        done += weight
        end = length if j >= last else math.floor(length * done / total) // step * step
        ne.append(end - begin)
        begin = end
    return SplitState(axis, tuple(ne))


def _type_name(type_: int) -> str:
    return type_.name.removeprefix("GGML_TYPE_") if isinstance(type_, IntEnum) else str(type_)


def tensor_info(tensor: Any) -> TensorInfo:
    """What there is to say about a `struct ggml_tensor *`."""
    from .._loader import lib
    from .._runtime import text

    block_size = lib.ggml_blck_size(tensor.type)
    return TensorInfo(
        name=text(tensor.name) or "",
        type=_enum("ggml_type", int(tensor.type)),
        ne=tuple(tensor.ne),
        op=_enum("ggml_op", int(tensor.op)),
        flags=int(tensor.flags),
        block_size=int(block_size),
        nbytes=int(lib.ggml_nbytes(tensor)),
    )


def fill(state: SplitState, out: Any, n_devs: int) -> None:
    """Write a state into a zeroed `struct ggml_backend_meta_split_state`."""
    out.axis = int(state.axis)
    out.n_segments = state.n_segments
    for i, n in enumerate(state.ne[: state.n_segments * n_devs]):
        out.ne[i] = n
    if max(state.nr) > 1 or hasattr(out, "nr"):  # a ggml without nr is never given repeats
        for s, repeat in enumerate(state.nr):
            out.nr[s] = repeat


def _enum(name: str, value: int) -> int:
    """`value` as a member of the generated IntEnum `name`, or as it is if it has no such member."""
    from .. import enums

    try:
        member: int = getattr(enums, name)(value)
    except (AttributeError, ValueError):
        return value
    return member
