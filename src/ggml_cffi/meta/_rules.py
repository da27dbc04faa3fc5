"""How a split travels through an operation: one table, with a rule for each operation.

A rule has two parts. `told` is what ggml takes the result's split for, or where it gives up, in its
own terms: it compares axes and numbers of elements. `held` is which elements of the result the
devices have, once each has computed its part; it refuses what ggml lets pass and gets wrong. The
facts are from ggml's ``src/ggml-backend-meta.cpp``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ._layout import Layout, elements, folded, merged, repeated, reshaped, size
from ._split import MAX_DIMS, SplitAxis, SplitState

MIRRORED, PARTIAL = SplitState.mirrored(), SplitState.partial()

#: Operations that make a view of their first operand.
VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


class GivesUp(Exception):
    """ggml aborts: why, in words, and the condition that its message names."""

    def __init__(self, why: str, condition: str) -> None:
        super().__init__(why, condition)
        self.why = why
        self.condition = condition


class Wrong(Exception):
    """ggml goes on, and the numbers would be wrong or a device's kernel would abort."""


@dataclass(frozen=True, eq=False)
class Kind:
    """All that the rules look at of a tensor by itself; tensors of the same kind share one."""

    op: str
    type: int
    block_size: int
    type_size: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    params: bytes = b""
    """op_params."""
    offset: int = 0
    """Where it begins in what it is a view of, in bytes."""

    @property
    def n_dims(self) -> int:
        """Axes up to the last one that is longer than 1, as ggml counts them."""
        return max((i + 1 for i, n in enumerate(self.ne) if n > 1), default=1)

    @property
    def n_axes(self) -> int:
        """Axes that the shape has: up to the last one that is not 1 long."""
        return max((i + 1 for i, n in enumerate(self.ne) if n != 1), default=1)

    @property
    def is_empty(self) -> bool:
        return 0 in self.ne

    def shape(self, ne: Sequence[int]) -> tuple[int, ...]:
        """Extents of such a tensor, or of a device's part, in NumPy's order: outermost first."""
        return tuple(reversed(ne[: self.n_axes]))

    def integer(self, i: int) -> int:
        """A 32-bit parameter."""
        number: int = struct.unpack_from("=i", self.params, 4 * i)[0]
        return number

    def number(self, i: int) -> float:
        """A parameter that is a float."""
        number: float = struct.unpack_from("=f", self.params, 4 * i)[0]
        return number


class Node(NamedTuple):
    """A tensor of a graph, whose tensors are numbered in order of computation."""

    name: str
    kind: Kind
    operands: tuple[int | None, ...] = ()
    root: int | None = None
    """What it is a view of."""

    @property
    def op(self) -> str:
        return self.kind.op

    @property
    def ne(self) -> tuple[int, ...]:
        return self.kind.ne

    @property
    def nb(self) -> tuple[int, ...]:
        return self.kind.nb

    @property
    def block_size(self) -> int:
        return self.kind.block_size

    @property
    def offset(self) -> int:
        return self.kind.offset

    @property
    def n_dims(self) -> int:
        return self.kind.n_dims

    @property
    def is_empty(self) -> bool:
        return self.kind.is_empty


class State(NamedTuple):
    """How a tensor is split: what ggml takes it for, and which elements the devices have of it."""

    told: SplitState
    held: Layout | None = None
    """None where it is not cut along an axis."""

    @property
    def axis(self) -> SplitAxis:
        return self.told.axis


class Operand(NamedTuple):
    node: Node
    state: State


@dataclass(frozen=True)
class Step:
    """An operation with the states of its operands; None where there is none."""

    node: Node
    operands: tuple[Operand | None, ...]
    n_devs: int

    def axis(self, i: int) -> SplitAxis | None:
        one = self.get(i)
        return None if one is None else one.state.axis

    def get(self, i: int) -> Operand | None:
        return self.operands[i] if i < len(self.operands) else None

    def __getitem__(self, i: int) -> Operand:
        one = self.get(i)
        assert one is not None
        return one

    def present(self) -> Iterator[Operand]:
        return (one for one in self.operands if one is not None)


Told: TypeAlias = Callable[[Step], SplitState]
Held: TypeAlias = Callable[[Step, SplitState], "Layout | None"]


class Rule(NamedTuple):
    told: Told
    held: Held


_RATIOS = "the devices have other shares of one operand than of another"
_ALONG_0 = "it is computed along axis 0, which is cut"


def empty() -> GivesUp:
    """What to raise for an operand without elements."""
    why = "ggml has no split for an operand without elements"
    return GivesUp(why, "src_ss[i].axis != GGML_BACKEND_SPLIT_AXIS_UNKNOWN")


def apply(step: Step) -> SplitState:
    """The split of a result as ggml has it. Raises GivesUp where it aborts."""
    for one in step.present():
        if one.node.is_empty:
            raise empty()
    rule = RULES.get(step.node.op)
    if rule is None:
        raise GivesUp("ggml has no rule for the operation", "ggml op not implemented")
    return _scaled(step, rule.told(step))


def held(step: Step, told: SplitState) -> Layout | None:
    """Which elements of the result the devices have. Raises Wrong where it would not be right."""
    for one in step.present():
        if one.state.axis == SplitAxis.PARTIAL and step.node.op != "ADD_ID":
            raise Wrong(f"{_what(one)} is PARTIAL, which only a bias behind ADD_ID can be")
    layout = RULES[step.node.op].held(step, told)
    if told.is_split:
        assert layout is not None
        node = step.node
        if tuple(map(size, layout)) != told.shares:
            raise Wrong("ggml takes the devices' shares for others than they are")
        borders = (border for one in layout for piece in one for border in piece)
        if told.axis == 0 and any(border % node.block_size for border in borders):
            raise Wrong(f"a cut goes through a block of {node.block_size} elements")
    return layout


def _scaled(step: Step, told: SplitState) -> SplitState:
    """With the shares of the first operand that is cut, which those of all others must equal."""
    if not told.is_split:
        return told
    node, n = step.node, step.n_devs
    ne = list(told.ne) or [0] * n
    n_segments, nr, first = told.n_segments, told.nr, True
    for one in step.present():
        state = one.state.told
        if not state.is_split:
            continue
        length = one.node.ne[state.axis]
        if first:
            ne[: n * state.n_segments] = [0] * (n * state.n_segments)
            for j, share in enumerate(state.shares):
                ne[j], rest = divmod(share * node.ne[told.axis], length * nr[0])
                if rest:
                    raise GivesUp(
                        "the shares do not fit the result", "split_state.ne[j] % div == 0"
                    )
        else:
            if n_segments != 1:
                raise GivesUp(_RATIOS, "split_state.n_segments == 1")
            for j, share in enumerate(state.shares):
                if ne[j] * nr[0] * length != share * node.ne[told.axis]:
                    raise GivesUp(
                        _RATIOS, "split_state.ne[j]*split_state.nr[0] * tensor->src[i]->ne"
                    )
        first = False
    if first:
        raise GivesUp("no operand says what share is whose", "!first_src_split_by_axis")
    return SplitState(told.axis, tuple(ne[: n * n_segments]), n_segments, nr)


# ---- what ggml takes a split for


def _along(axis: int, repeats: int = 1) -> SplitState:
    return SplitState(SplitAxis(axis), (), 1, (repeats,))


def _equal(a: SplitState, b: SplitState) -> bool:
    return a.axis == b.axis and (not a.is_split or a.shares == b.shares)


def _generic(step: Step, whole: bool) -> SplitState:
    states = [one.state.told for one in step.present()]
    if (
        not states
        or not all(_equal(states[0], one) for one in states)
        or (whole and states[0].is_split)
    ):
        why = "its operands must be mirrored" if whole else "its operands must all be split alike"
        raise GivesUp(why, "ret.axis != GGML_BACKEND_SPLIT_AXIS_UNKNOWN")
    return states[0]


def _same(step: Step) -> SplitState:
    return _generic(step, whole=False)


def _uncut(step: Step) -> SplitState:
    return _generic(step, whole=True)


def _by_row(step: Step) -> SplitState:
    if step.axis(0) == SplitAxis.AXIS_0:
        raise GivesUp(_ALONG_0, "src_ss[0].axis != GGML_BACKEND_SPLIT_AXIS_0")
    return step[0].state.told


def _broadcast(step: Step) -> SplitState:
    a, b, third = step[0], step[1], step.axis(2)
    if a.state.told.is_split and b.node.ne[a.state.axis] == 1 and b.state.told == MIRRORED:
        return a.state.told
    mirrored = SplitAxis.MIRRORED
    if third == mirrored and (
        a.state.axis == b.state.axis
        or (a.state.axis == mirrored and b.state.axis == SplitAxis.PARTIAL)
    ):
        return a.state.told
    if third is not None and third != mirrored:
        raise GivesUp(
            "its ids must be mirrored", "src_ss[2].axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED"
        )
    return _same(step)


def _concat(step: Step) -> SplitState:
    a, b, axis = step[0].state.told, step[1].state.told, step.node.kind.integer(0)
    for one, other, i in ((a, b, 1), (b, a, 0)):
        if one.axis == SplitAxis.MIRRORED and other.is_split:
            if other.axis == axis:
                raise GivesUp(
                    "it is put together along the axis that is cut",
                    f"concat_axis != src_ss[{i}].axis",
                )
            return other
    if a.axis == b.axis and a.axis != axis:
        return a
    return _uncut(step)


def _product(step: Step) -> SplitState:
    a, b = step[0].state.told, step[1].state.told
    mirrored = SplitAxis.MIRRORED
    if a.axis == b.axis == mirrored:
        return MIRRORED
    if a.axis == 1 and b.axis == mirrored:
        return _along(0)  # segments and repeats are one from here on
    if b.axis == 1 and a.axis == mirrored:
        return b
    if a.axis == b.axis == 0:
        if not _equal(a, b):
            raise GivesUp(
                "the shares of the two differ", "split_states_equal(src_ss[0], src_ss[1])"
            )
        return PARTIAL
    why = (
        "a weight goes with its input if both are whole, if one of them is cut along axis 1 and "
        "the other whole, or if both are cut along axis 0"
    )
    if SplitAxis.AXIS_2 in (a.axis, b.axis):
        why += "; heads, along axis 2, are split by flash_attn_ext alone"
    raise GivesUp(why, "fatal error")


def _reshape(step: Step) -> SplitState:
    source, node = step[0], step.node
    state = source.state.told
    if not state.is_split:
        return state
    if state.n_segments != 1:
        raise GivesUp("what is cut in segments keeps its shape", "src_ss[0].n_segments == 1")
    if state.axis == source.node.n_dims - 1 and state.nr[0] == 1:
        return _along(node.n_dims - 1)
    base = math.prod(source.node.ne[: state.axis + 1]) // state.nr[0]
    product = 1
    for dim, n in enumerate(node.ne):
        product *= n
        if product % base == 0:
            return _along(dim, product // base)
        if product > base:
            if state.nr[0] != 1:
                raise GivesUp("what is cut in repeats keeps its shape", "src_ss[0].nr[0]      == 1")
            return _along(dim)
    raise GivesUp("the cut goes along no axis of the new shape", "shape mismatch")


def _copy(step: Step) -> SplitState:
    return _reshape(step) if step[0].state.told.is_split else _same(step)


def is_contiguous(node: Node) -> bool:
    """Whether it lies without gaps in the order of its axes, as ggml asks for."""
    expected = node.kind.type_size
    for i, (n, stride) in enumerate(zip(node.ne, node.nb, strict=True)):
        if (n != node.block_size if i == 0 else n != 1) and stride != expected:
            return False
        expected *= n // node.block_size if i == 0 else n
    return True


def _permuted(node: Node) -> bool:
    return any(node.nb[i] > node.nb[i + 1] for i in range(MAX_DIMS - 1))


def _view(step: Step) -> SplitState:
    source, node = step[0], step.node
    state = source.state.told
    if is_contiguous(node) and is_contiguous(source.node):
        return _reshape(step)
    pairs = zip(node.ne, source.node.ne, node.nb, source.node.nb, strict=True)
    if all(a == b or n == m == 1 for n, m, a, b in pairs):
        return state
    if not _permuted(node) and not _permuted(source.node) and state.axis < SplitAxis.AXIS_3:
        for dim in range(MAX_DIMS - 1):
            if node.nb[dim + 1] == source.node.nb[state.axis + 1]:
                return _along(dim)
        raise GivesUp("the view narrows what is inside of the axis that is cut", "fatal error")
    if not state.is_split:
        return state
    why = "views of what is permuted, and cut, must have its strides"
    raise GivesUp(why, "view of permuted tensor not implemented")


def _moved(step: Step) -> SplitState:
    state = step[0].state.told
    if not state.is_split or (step.node.op == "TRANSPOSE" and state.axis > 1):
        return state
    if state.n_segments != 1 and state.nr[0] != 1:
        raise GivesUp(
            "what is cut in repeats is not permuted",
            "src_ss[0].n_segments == 1 || src_ss[0].nr[0] == 1",
        )
    return _along(_new_axis(step, state.axis), state.nr[0])


def _new_axis(step: Step, axis: int) -> int:
    """Where PERMUTE and TRANSPOSE put an axis."""
    if step.node.op == "TRANSPOSE":
        return axis ^ 1 if axis < 2 else axis
    return step.node.kind.integer(axis)


def _get_rows(step: Step) -> SplitState:
    if step.axis(0) == SplitAxis.AXIS_0 and step.axis(1) == SplitAxis.MIRRORED:
        return step[0].state.told
    return _uncut(step)


def _set_rows(step: Step) -> SplitState:
    if step.axis(0) == SplitAxis.AXIS_1:
        raise GivesUp("the rows are cut", "src_ss[0].axis != GGML_BACKEND_SPLIT_AXIS_1")
    if step.axis(1) != SplitAxis.MIRRORED:
        raise GivesUp(
            "its ids must be mirrored", "src_ss[1].axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED"
        )
    if not _equal(step[0].state.told, step[2].state.told):
        raise GivesUp(
            "the rows are not split as what they go into",
            "split_states_equal(src_ss[0], src_ss[2])",
        )
    return step[0].state.told


def _rope(step: Step) -> SplitState:
    if step.axis(1) != SplitAxis.MIRRORED:
        why = "the positions must be mirrored"
        raise GivesUp(why, "src_ss[1].axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED")
    return step[0].state.told


def _pad(step: Step) -> SplitState:
    state = step[0].state.told
    if state.is_split:
        for i in (0, 1):
            if step.node.kind.integer(2 * state.axis + i):
                raise GivesUp(
                    "it is longer along the axis that is cut",
                    f"tensor->op_params[2*src_ss[0].axis + {i}] == 0",
                )
    return state


def _attention(step: Step) -> SplitState:
    for i in range(3):
        if step.axis(i) != SplitAxis.AXIS_2:
            raise GivesUp(
                "queries, keys and values must all be split by heads, along axis 2; where they are "
                "mirrored, MUL_MAT and SOFT_MAX compute the same",
                f"src_ss[{i}].axis == GGML_BACKEND_SPLIT_AXIS_2",
            )
    if step.get(4) is not None:
        if step.axis(3) != SplitAxis.MIRRORED:
            raise GivesUp(
                "where there are sinks there must be a mask, and mirrored",
                "src_ss[3].axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED",
            )
        if step.axis(4) != SplitAxis.AXIS_0:
            raise GivesUp(
                "the sinks must be split along axis 0",
                "src_ss[4].axis == GGML_BACKEND_SPLIT_AXIS_0",
            )
    return _along(1)


def _ssm_conv(step: Step) -> SplitState:
    a, b = step[0].state.axis, step[1].state.axis
    if a == b and a in (SplitAxis.AXIS_0, SplitAxis.AXIS_1):
        return _along(1 - a)
    return _same(step)


def _delta_net(step: Step) -> SplitState:
    axes = [step.axis(i) for i in range(6)]
    if all(axis == SplitAxis.MIRRORED for axis in axes):
        return MIRRORED
    for i, axis in enumerate(axes[:5]):
        if axis != SplitAxis.AXIS_1:
            raise GivesUp(
                "its operands must be mirrored", f"src_ss[{i}].axis == GGML_BACKEND_SPLIT_AXIS_1"
            )
    if axes[5] not in (SplitAxis.AXIS_0, SplitAxis.AXIS_1, SplitAxis.AXIS_2):
        raise GivesUp(
            "its operands must be mirrored", "src_ss[5].axis == GGML_BACKEND_SPLIT_AXIS_2"
        )
    return _along(0)


# ---- which elements the devices have


def _what(one: Operand) -> str:
    return f"{one.node.op} {one.node.name!r}" if one.node.op != "NONE" else repr(one.node.name)


def _agreeing(step: Step, *numbers: int) -> Layout | None:
    """The layout of these operands, or of all, which must be one and the same."""
    first, *others = [step[i] for i in numbers] if numbers else list(step.present())
    for one in others:
        if one.state.axis != first.state.axis:
            raise Wrong(f"{_what(first)} and {_what(one)} are split differently")
        _check_same(first, one)
    return first.state.held


def _check_same(a: Operand, b: Operand) -> None:
    """Raise Wrong unless each device holds the same elements of both."""
    if a.state.held != b.state.held:
        raise Wrong(f"the devices hold other elements of {_what(a)} than of {_what(b)}")


def _mirrored(step: Step, *numbers: int) -> None:
    """Raise Wrong unless these operands, where there are any, are whole on every device."""
    for i in numbers:
        one = step.get(i)
        if one is not None and one.state.axis != SplitAxis.MIRRORED:
            raise Wrong(f"{_what(one)} must be mirrored")


def _held_alike(step: Step, told: SplitState) -> Layout | None:
    return _agreeing(step)


def _held_whole(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, *range(len(step.operands)))
    return None


def _held_by_row(step: Step, told: SplitState) -> Layout | None:
    layout = _agreeing(step)
    if told.axis == SplitAxis.AXIS_0:
        raise Wrong(_ALONG_0)
    return layout


def _check_slopes(step: Step, heads: Layout | None) -> None:
    """Raise Wrong where max_bias gives a head a slope by a number that is not the head's.

    A device counts the heads that it has; right is only one that has all, in their order.
    """
    if not step.node.kind.number(1) or heads is None:
        return
    if [merged(one) for one in heads if size(one)] != [((0, step[0].node.ne[2]),)]:
        raise Wrong("max_bias is not 0: a device does not know the numbers of its heads")


def _held_softmax(step: Step, told: SplitState) -> Layout | None:
    layout = _held_by_row(step, told)
    if told.axis == SplitAxis.AXIS_2:
        _check_slopes(step, layout)
    return layout


def _held_glu(step: Step, told: SplitState) -> Layout | None:
    layout = _agreeing(step)
    if layout is None or told.axis or step.get(1) is not None:
        return layout
    half = folded(layout, step.node.ne[0], 2)  # gate and value are halves of one tensor
    if half is None or any(stop > step.node.ne[0] for one in half for _, stop in one):
        raise Wrong("a device's share must be the same part of both halves: split it as segments")
    return half


def _held_repeat(step: Step, told: SplitState) -> Layout | None:
    layout, source = step[0].state.held, step[0].node
    if layout is None:
        return None
    times = step.node.ne[told.axis] // source.ne[told.axis]
    return repeated(layout, source.ne[told.axis], times)


def _held_repeat_back(step: Step, told: SplitState) -> Layout | None:
    layout, node = step[0].state.held, step.node
    if layout is None:
        return None
    times = step[0].node.ne[told.axis] // node.ne[told.axis]
    found = folded(layout, node.ne[told.axis], times)
    if found is None:
        raise Wrong("a device has other elements of one repetition than of the next")
    return found


def _held_broadcast(step: Step, told: SplitState) -> Layout | None:
    if not told.is_split:
        _mirrored(step, *range(len(step.operands)))
        return None
    if step[1].state.axis == SplitAxis.MIRRORED:
        return step[0].state.held
    return _agreeing(step, 0, 1)


def _held_add_id(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, 2)
    if told.is_split:
        if told.axis != SplitAxis.AXIS_0:
            raise Wrong("its rows are chosen by ids, of which each device has all")
        return _agreeing(step, 0, 1)
    _mirrored(step, 0)
    if step.axis(1) not in (SplitAxis.MIRRORED, SplitAxis.PARTIAL):
        raise Wrong(f"{_what(step[1])} is cut and {_what(step[0])} is not")
    return None


def _held_concat(step: Step, told: SplitState) -> Layout | None:
    return _agreeing(step, 0, 1)


def _held_product(step: Step, told: SplitState) -> Layout | None:
    a, b = step[0].state, step[1].state
    if step.node.op == "MUL_MAT_ID":
        _mirrored(step, 2)
        if b.axis == SplitAxis.AXIS_1:
            raise Wrong("its rows go to experts by ids, of which each device has all")
    if told.axis == SplitAxis.PARTIAL:
        _agreeing(step, 0, 1)
        return None
    if not told.is_split:
        return None
    return a.held if a.axis == SplitAxis.AXIS_1 else b.held


def _held_reshaped(step: Step, told: SplitState) -> Layout | None:
    source = step[0]
    if source.state.held is None:
        return None
    axis, new = source.state.axis, told.axis
    layout = reshaped(source.state.held, axis, source.node.ne, new, step.node.ne)
    if layout is None:
        raise Wrong("what a device holds is no part of the new shape that ggml could cut")
    return layout


def _held_copy(step: Step, told: SplitState) -> Layout | None:
    layout = _held_reshaped(step, told)
    into = step.get(1)  # none where ggml makes the destination, which is the result itself
    if into is not None and into.node is not step.node:
        if into.state.axis != told.axis:
            raise Wrong(f"{_what(into)} is not split as {_what(step[0])} is")
        if into.state.held != layout:
            raise Wrong(f"the devices hold other elements of {_what(into)} than are copied")
    return layout


def _held_viewed(step: Step, told: SplitState) -> Layout | None:
    raise AssertionError("the memory that it is a view of says so")


def _held_get_rows(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, 1)
    return step[0].state.held


def _held_set_rows(step: Step, told: SplitState) -> Layout | None:
    layout = _agreeing(step, 0, 2)
    _mirrored(step, 1)
    axis = told.axis
    if axis in (SplitAxis.AXIS_2, SplitAxis.AXIS_3) and step[1].node.ne[axis - 1] != 1:
        raise Wrong(f"{_what(step[1])} has other rows for each element of the axis that is cut")
    return layout


def _held_rope(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, 1, 2)
    if told.axis == SplitAxis.AXIS_0:
        raise Wrong("it turns pairs of elements along axis 0, which is cut")
    if told.axis == SplitAxis.AXIS_2:
        raise Wrong("the positions are those of axis 2, which is cut")
    return step[0].state.held


def _held_pad(step: Step, told: SplitState) -> Layout | None:
    return step[0].state.held


def _held_attention(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, 3)
    q, k = step[0], step[1]
    if step.get(4) is not None:
        _check_same(q, step[4])
    _agreeing(step, 1, 2)
    _check_slopes(step, q.state.held)
    mask = step.get(3)
    if mask is not None and mask.node.ne[2] != 1:
        raise Wrong(f"{_what(mask)} has a plane for each head, of which each device has some")
    assert q.state.held is not None and k.state.held is not None
    group = q.node.ne[2] // k.node.ne[2]
    for mine, theirs in zip(q.state.held, k.state.held, strict=True):
        heads, wanted = elements(mine), elements(theirs)
        if len(heads) != group * len(wanted) or (heads // group != wanted.repeat(group)).any():
            raise Wrong("a device does not have the KV heads of its heads, in their order")
    return q.state.held


def _held_ssm_conv(step: Step, told: SplitState) -> Layout | None:
    layout = _agreeing(step, 0, 1)
    if layout is not None and step.axis(0) != SplitAxis.AXIS_1:
        raise Wrong(_ALONG_0)
    return layout


def _held_delta_net(step: Step, told: SplitState) -> Layout | None:
    _mirrored(step, *range(6))
    return None


# ---- the table

_ALIKE = Rule(_same, _held_alike)
_WHOLE = Rule(_uncut, _held_whole)
_ROWS = Rule(_by_row, _held_by_row)
_NEVER_BY_ROW = Rule(_by_row, _held_whole)
_BROADCAST = Rule(_broadcast, _held_broadcast)
_SOFTMAX = Rule(_same, _held_softmax)
_PRODUCT = Rule(_product, _held_product)
_VIEW = Rule(_view, _held_viewed)
_MOVED = Rule(_moved, _held_viewed)

RULES: dict[str, Rule] = {
    "DUP": _WHOLE,
    "ADD": _BROADCAST,
    "ADD_ID": Rule(_broadcast, _held_add_id),
    "ADD1": _WHOLE,
    "ACC": _WHOLE,
    "SUB": _BROADCAST,
    "MUL": _BROADCAST,
    "DIV": _BROADCAST,
    "SQR": _ALIKE,
    "SQRT": _ALIKE,
    "LOG": _ALIKE,
    "SIN": _ALIKE,
    "COS": _ALIKE,
    "SUM": _WHOLE,
    "SUM_ROWS": _ROWS,
    "CUMSUM": _ROWS,
    "MEAN": _ROWS,
    "ARGMAX": _NEVER_BY_ROW,
    "COUNT_EQUAL": _NEVER_BY_ROW,
    "REPEAT": Rule(_same, _held_repeat),
    "REPEAT_BACK": Rule(_same, _held_repeat_back),
    "CONCAT": Rule(_concat, _held_concat),
    "SILU_BACK": _ALIKE,
    "NORM": _ROWS,
    "RMS_NORM": _ROWS,
    "RMS_NORM_BACK": _ROWS,
    "GROUP_NORM": _NEVER_BY_ROW,
    "L2_NORM": _ROWS,
    "MUL_MAT": _PRODUCT,
    "MUL_MAT_ID": _PRODUCT,
    "OUT_PROD": _WHOLE,
    "SCALE": _ALIKE,
    "SET": _WHOLE,
    "CPY": Rule(_copy, _held_copy),
    "CONT": Rule(_reshape, _held_reshaped),
    "RESHAPE": Rule(_reshape, _held_viewed),
    "VIEW": _VIEW,
    "PERMUTE": _MOVED,
    "TRANSPOSE": _MOVED,
    "GET_ROWS": Rule(_get_rows, _held_get_rows),
    "GET_ROWS_BACK": _WHOLE,
    "SET_ROWS": Rule(_set_rows, _held_set_rows),
    "DIAG": _WHOLE,
    "DIAG_MASK_INF": _WHOLE,
    "DIAG_MASK_ZERO": _WHOLE,
    "SOFT_MAX": _SOFTMAX,
    "SOFT_MAX_BACK": _SOFTMAX,
    "ROPE": Rule(_rope, _held_rope),
    "ROPE_BACK": _WHOLE,
    "CLAMP": _ALIKE,
    "CONV_TRANSPOSE_1D": _WHOLE,
    "IM2COL": _WHOLE,
    "IM2COL_BACK": _WHOLE,
    "IM2COL_3D": _WHOLE,
    "CONV_2D": _WHOLE,
    "CONV_3D": _WHOLE,
    "CONV_2D_DW": _WHOLE,
    "CONV_TRANSPOSE_2D": _WHOLE,
    "POOL_1D": _WHOLE,
    "POOL_2D": _WHOLE,
    "POOL_2D_BACK": _WHOLE,
    "UPSCALE": _WHOLE,
    "PAD": Rule(_pad, _held_pad),
    "PAD_REFLECT_1D": _WHOLE,
    "ROLL": _WHOLE,
    "ARANGE": _WHOLE,
    "TIMESTEP_EMBEDDING": _WHOLE,
    "ARGSORT": _ROWS,
    "TOP_K": _ROWS,
    "LEAKY_RELU": _ALIKE,
    "TRI": _WHOLE,
    "FILL": _ALIKE,
    "FLASH_ATTN_EXT": Rule(_attention, _held_attention),
    "FLASH_ATTN_BACK": _WHOLE,
    "SSM_CONV": Rule(_ssm_conv, _held_ssm_conv),
    "SSM_SCAN": _WHOLE,
    "WIN_PART": _WHOLE,
    "WIN_UNPART": _WHOLE,
    "GET_REL_POS": _WHOLE,
    "ADD_REL_POS": _WHOLE,
    "RWKV_WKV6": _WHOLE,
    "GATED_LINEAR_ATTN": _WHOLE,
    "RWKV_WKV7": _WHOLE,
    "SOLVE_TRI": _WHOLE,
    "GATED_DELTA_NET": Rule(_delta_net, _held_delta_net),
    "DSV4_HC_COMB": _WHOLE,
    "DSV4_HC_PRE": _WHOLE,
    "DSV4_HC_POST": _WHOLE,
    "UNARY": _ALIKE,
    "MAP_CUSTOM1": _WHOLE,
    "MAP_CUSTOM2": _WHOLE,
    "MAP_CUSTOM3": _WHOLE,
    "CUSTOM": _WHOLE,
    "CROSS_ENTROPY_LOSS": _NEVER_BY_ROW,
    "CROSS_ENTROPY_LOSS_BACK": _NEVER_BY_ROW,
    "OPT_STEP_ADAMW": _WHOLE._replace(told=_same),
    "OPT_STEP_SGD": _WHOLE._replace(told=_same),
    "GLU": Rule(_same, _held_glu),
}
