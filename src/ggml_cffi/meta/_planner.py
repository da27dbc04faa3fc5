"""What a meta device makes of a graph, before it runs: every split, every sum, every byte."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from . import _rules
from ._layout import Layout, layout_of
from ._reduce import all_reduces, lacks_a_share, needing_a_barrier
from ._rules import MIRRORED, VIEWS, GivesUp, Kind, Node, Operand, State, Step, Wrong
from ._split import MAX_DIMS, SplitAxis, SplitState
from ._views import Memory, held_by_view


class Refusal(Exception):
    """A node that cannot be split, by its number, and why.

    `condition` is the condition in ggml's message, where ggml itself would give up.
    """

    def __init__(self, number: int, reason: str, condition: str = "") -> None:
        super().__init__(number, reason, condition)
        self.number = number
        self.reason = reason
        self.condition = condition


@dataclass
class Splits:
    """The states of all tensors of a graph, in order of computation; None for empty ones."""

    nodes: Sequence[Node]
    n_devs: int
    given: Mapping[int, SplitState]
    """The splits of the tensors that have memory of their own."""
    states: list[State | None] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    """The same number for tensors of one kind that are split alike."""


class _Known:
    """What has been found out already: the layers of a network are alike.

    What an operation makes is told by its kind and the classes of what it is made from.
    """

    def __init__(self) -> None:
        self.found: dict[Hashable, tuple[State | None, int]] = {}
        self._classes: dict[tuple[Kind, State | None], int] = {}

    def add(self, key: Hashable, kind: Kind, state: State | None) -> tuple[State | None, int]:
        number = self._classes.setdefault((kind, state), len(self._classes))
        self.found[key] = state, number
        return state, number


_ITSELF = -1
"""In place of the class of an operand that is the result."""


def propagate(
    nodes: Sequence[Node], given: Mapping[int, SplitState], n_devs: int, known: _Known
) -> Splits:
    """How all tensors of a graph are split; `given` are the splits of those with memory.

    Raises Refusal at the first node that ggml would abort over, or get wrong.
    """
    found = Splits(nodes, n_devs, given)
    states, classes = found.states, found.classes
    for i, (_, kind, operands, root) in enumerate(nodes):
        key: Hashable
        if i in given:
            key = kind, given[i]
        else:
            made_of = [
                None if one is None else _ITSELF if one == i else classes[one] for one in operands
            ]
            key = kind, None if root is None else classes[root], *made_of
        entry = known.found.get(key)
        if entry is None:
            entry = known.add(key, kind, _checked(found, i))
        states.append(entry[0])
        classes.append(entry[1])
    return found


def _checked(splits: Splits, i: int) -> State | None:
    try:
        return _state(splits, i)
    except GivesUp as why:
        reason = _refused(splits, i, f"{why.why} (ggml would abort: {why.condition})")
        raise Refusal(i, reason, why.condition) from None
    except Wrong as why:
        raise Refusal(i, _refused(splits, i, str(why))) from None


def _state(splits: Splits, i: int) -> State | None:
    node = splits.nodes[i]
    if i in splits.given:
        told = splits.given[i]
        return State(told, layout_of(told) if told.is_split else None)
    if node.is_empty:
        return None
    if node.op == "NONE" and node.root is None:
        return State(MIRRORED)
    step = _step(splits, i)
    told = _rules.apply(step)
    if node.op in VIEWS:
        return State(told, _viewed(splits, step, told))
    held = _rules.held(step, told)
    if node.root is not None and _viewed(splits, step, told) != held:
        raise Wrong("it is written into memory that is split in another way")
    return State(told, held)


def _step(splits: Splits, i: int) -> Step:
    operands: list[Operand | None] = []
    for one in splits.nodes[i].operands:
        if one is None or one == i:
            operands.append(None)
            continue
        state = splits.states[one]
        if state is None:
            raise _rules.empty()
        if state.axis == SplitAxis.PARTIAL and splits.nodes[one].op != "NONE":
            state = State(MIRRORED)  # ggml adds it up before it is used
        operands.append(Operand(splits.nodes[one], state))
    return Step(splits.nodes[i], tuple(operands), splits.n_devs)


def _viewed(splits: Splits, step: Step, told: SplitState) -> Layout | None:
    """Which elements of a view the devices have, by the memory that it lies in."""
    node = step.node
    assert node.root is not None
    root, state = splits.nodes[node.root], splits.states[node.root]
    assert state is not None
    if state.axis == SplitAxis.PARTIAL and root.op == "NONE":
        raise Wrong(f"{root.name!r} is PARTIAL, which only a bias behind ADD_ID can be")
    if not told.is_split:
        if state.held is not None:
            raise Wrong("it is a view of what is split, and ggml takes it for whole")
        return None
    if node.offset and state.held is None:
        raise GivesUp(
            "it is a cut view of what is whole",
            "split_dim_view_src >= 0 && split_dim_view_src < GGML_MAX_DIMS",
        )
    shares, unit = told.shares, node.block_size if told.axis == 0 else 1
    if any(share % unit for share in shares):
        raise Wrong(f"a cut goes through a block of {unit} elements")
    root_axis = MAX_DIMS if state.held is None else int(state.axis)
    root_held = state.held or (((0, 1),),) * splits.n_devs
    if root_axis == 0:
        root_held = _in_blocks(root_held, root.block_size)
    parts = [n // unit for n in shares]
    found = held_by_view(_memory(node), int(told.axis), parts, _memory(root), root_axis, root_held)
    if isinstance(found, str):
        raise Wrong(found)
    return tuple(tuple((a * unit, b * unit) for a, b in one) for one in found)


def _in_blocks(layout: Layout, unit: int) -> Layout:
    return tuple(tuple((a // unit, b // unit) for a, b in one) for one in layout)


def _memory(node: Node) -> Memory:
    ne = (node.ne[0] // node.block_size, *node.ne[1:])
    return Memory(ne, node.nb, node.offset, node.block_size)


def _refused(splits: Splits, i: int, why: str) -> str:
    node = splits.nodes[i]
    told = []
    for one in node.operands:
        if one is not None and one != i:
            operand, state = splits.nodes[one], splits.states[one]
            name, made_of = named(operand), label(splits.nodes, one)
            if not operand.name and made_of != name:
                name = f"[{made_of}]"  # what follows is of the result
            told.append(f"{name} {in_words(operand, state)}")
    return f"{named(node)} of {'; '.join(told)}: {why}" if told else f"{named(node)}: {why}"


def named(node: Node) -> str:
    """A tensor in a message."""
    if node.op == "NONE":
        return repr(node.name) if node.name else "a tensor without a name"
    return f"{node.op} {node.name!r}" if node.name else node.op


def label(nodes: Sequence[Node], i: int) -> str:
    """The name of a tensor, or what it is made of, as in ``MUL_MAT of 'w', 'x'``.

    Where its operands have no names either, what these are made from: ``GLU from 'gate', 'up'``.
    """
    node = nodes[i]
    if node.name:
        return node.name
    operands = [one for one in node.operands if one is not None]
    if made_of := _names(nodes, operands):
        return f"{node.op} of {made_of}"
    seen: set[int] = set()
    for _ in range(_FAR):
        seen.update(operands)
        before = (one for i in operands for one in nodes[i].operands)
        operands = list(dict.fromkeys(one for one in before if one is not None and one not in seen))
        if made_from := _names(nodes, operands):
            return f"{node.op} from {made_from}"
    return named(node)


#: How many operations before an unnamed one those are looked for that have a name.
_FAR = 8


def _names(nodes: Sequence[Node], of: Sequence[int]) -> str:
    return ", ".join(repr(nodes[i].name) for i in of if nodes[i].name)


def beside(op: str, name: str, label: str) -> str:
    """The label of a tensor in a line that has its operation already."""
    return name or ("" if label == op else label.removeprefix(f"{op} "))


def in_words(node: Node, state: State | None) -> str:
    """The shape and the split of a tensor, in a message."""
    shape = node.kind.shape(node.ne)
    if state is None:
        return f"{shape}, empty"
    if not state.told.is_split:
        return f"{shape}, {state.axis.name.lower()}"
    return f"{shape}, split along axis {int(state.axis)} {'+'.join(map(str, state.told.shares))}"


# ---- what ggml can be brought to do


@dataclass
class Mended:
    """A graph with the copies in it that it needs, and how it is split."""

    splits: Splits
    places: list[int]
    """Where each of the given tensors is now."""
    barriers: dict[int, int]
    """Which tensors are such copies, and of which: those of sums stand right behind these and are
    used in their place, those of views that are read stand at the end."""
    outputs: list[int]
    """What is read for each of the outputs."""
    reduces: dict[int, int]
    """After which tensor each partial result is added up."""


def mended(
    nodes: Sequence[Node],
    given: Mapping[int, SplitState],
    n_devs: int,
    outputs: Sequence[int],
    mend: bool = True,
    in_place: str = "",
) -> Mended:
    """How a graph is split, with copies where it is right only with them.

    `outputs` are what is read in the end. `in_place` is what is wrong with an operation that
    writes into a tensor that is no result, if anything is.

    Raises Refusal for what would go wrong: at the first such node in order of computation. Without
    `mend` what a copy would make right is refused as well.
    """
    known = _Known()
    splits = propagate(nodes, given, n_devs, known)
    if in_place:
        _check_in_place(splits, in_place)
    found = Mended(splits, list(range(len(nodes))), {}, list(outputs), _all_reduces(splits))
    late = _late(found)
    needed = _needed(found, late)
    if needed and not mend:
        i, why = next(iter(sorted(needed.items())))
        raise Refusal(i, _refused(splits, i, f"{why}; a copy (cont) in its place mends it"))
    if needed:
        found = _with_copies(found, needed, known)
        late = _late(found)
    _check_sums(found, late)
    _check_reads(found)
    return found


def _all_reduces(splits: Splits) -> dict[int, int]:
    return all_reduces(splits.nodes, splits.states)


def _late(found: Mended) -> dict[int, str]:
    """The sums that are made too late, and why."""
    splits = found.splits
    return needing_a_barrier(splits.nodes, splits.states, found.outputs, found.reduces)


def not_computed(found: Mended) -> list[int]:
    """The sums that a device has no part in, since its share of what they are made of is empty.

    It multiplies what its memory holds by zero in place of its addend: were that not finite, the
    sum would not be either. So that memory must be its own, and zero before each run.
    """
    nodes, states = found.splits.nodes, found.splits.states
    places: dict[int, None] = {}
    for i, last in found.reduces.items():
        if lacks_a_share(nodes[i], states):
            places |= {i: None, last: None}
    return list(places)


def _needed(found: Mended, late: Mapping[int, str]) -> dict[int, str]:
    """The tensors that copies are needed of, and why."""
    splits = found.splits
    as_they_are = {splits.nodes[i].operands[0] for i in _partial_biases(splits)}
    needed = {i: why for i, why in late.items() if i not in as_they_are}
    for i in found.outputs:
        node, state = splits.nodes[i], splits.states[i]
        if state is not None and node.root is not None and i not in needed:
            needed[i] = "it is read, and is a view"
    return needed


def _partial_biases(splits: Splits) -> list[int]:
    """Each ADD_ID with addends, which must follow the product before it as that is."""
    return [
        i
        for i, node in enumerate(splits.nodes)
        if node.kind.op == "ADD_ID" and _is_partial(splits, node.operands[1])
    ]


def _shares(splits: Splits, i: int | None) -> tuple[int, ...]:
    state = None if i is None else splits.states[i]
    return () if state is None or not state.told.is_split else state.told.shares


def _is_partial(splits: Splits, i: int | None) -> bool:
    state = None if i is None else splits.states[i]
    return state is not None and state.axis == SplitAxis.PARTIAL


def _check_sums(found: Mended, late: Mapping[int, str]) -> None:
    """Raise Refusal where a sum would still be made too late."""
    splits = found.splits
    for i, why in late.items():
        raise Refusal(i, _refused(splits, i, why))
    for i in _partial_biases(splits):
        product = splits.nodes[i].operands[0]
        if product is None or not product < i <= found.reduces.get(product, -1):
            why = "its bias is PARTIAL, so it must follow a row-parallel product at once"
            raise Refusal(i, _refused(splits, i, why))
        if any(0 in _shares(splits, one) for one in splits.nodes[product].operands):
            why = "its bias is PARTIAL, and a device without a share leaves out its addend"
            raise Refusal(i, _refused(splits, i, why))


def _check_reads(found: Mended) -> None:
    """Raise Refusal for an output whose parts ggml cannot put together."""
    for i in found.outputs:
        node, state = found.splits.nodes[i], found.splits.states[i]
        if state is None or not state.told.is_split:
            continue
        told = state.told
        in_segments = told.n_segments > 1 or told.nr[0] > 1
        whole = told.axis + 2 if in_segments else MAX_DIMS
        last = SplitAxis.AXIS_1 if in_segments else SplitAxis.AXIS_2
        single = node.ne[told.axis] <= (node.block_size if told.axis == 0 else 1)
        if single or told.axis > last or any(n != 1 for n in node.ne[whole:]):
            why = "ggml cannot put the parts together of what is cut along this axis"
            raise Refusal(i, _refused(found.splits, i, why))


def _check_in_place(splits: Splits, why: str) -> None:
    for i, node in enumerate(splits.nodes):
        if node.root is None or node.op in VIEWS or node.op == "NONE":
            continue
        if splits.nodes[node.root].op == "NONE" and not node.is_empty:
            raise Refusal(i, _refused(splits, i, why))


def _with_copies(found: Mended, needed: Collection[int], known: _Known) -> Mended:
    kinds: dict[Kind, Kind] = {}  # of what is copied, and of the copies
    nodes: list[Node] = []
    places: list[int] = []  # of what is there
    instead: list[int] = []  # what is used in its place
    barriers: dict[int, int] = {}
    for i, node in enumerate(found.splits.nodes):
        operands = tuple(
            None if one is None else len(nodes) if one == i else instead[one]
            for one in node.operands
        )
        root = None if node.root is None else instead[node.root]
        places.append(len(nodes))
        nodes.append(Node(node.name, node.kind, operands, root))
        if i in needed and node.root is None:
            barriers[len(nodes)] = places[-1]
            nodes.append(_copy_of(node, places[-1], kinds))
        instead.append(len(nodes) - 1)
    for i in dict.fromkeys(found.outputs):
        if i in needed and found.splits.nodes[i].root is not None:
            # at the end: what is written in place into a view's memory meanwhile is read as well
            barriers[len(nodes)] = places[i]
            instead[i] = len(nodes)
            nodes.append(_copy_of(found.splits.nodes[i], places[i], kinds))
    given = {places[i]: state for i, state in found.splits.given.items()}
    splits = propagate(nodes, given, found.splits.n_devs, known)
    outputs = [instead[i] for i in found.outputs]
    return Mended(splits, places, barriers, outputs, _all_reduces(splits))


def _copy_of(node: Node, i: int, kinds: dict[Kind, Kind]) -> Node:
    of = node.kind
    if of not in kinds:
        nb = [of.type_size, of.type_size * of.ne[0] // of.block_size]
        for n in of.ne[1:-1]:
            nb.append(nb[-1] * n)
        kinds[of] = replace(of, op="CONT", params=b"", nb=tuple(nb), offset=0)
    return Node(node.name, kinds[of], (i,))
