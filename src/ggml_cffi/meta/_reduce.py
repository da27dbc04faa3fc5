"""When ggml adds up what the devices have: after each row-parallel product, or somewhat later.

The source is ``ggml_backend_meta_graph_compute`` in ggml's ``src/ggml-backend-meta.cpp``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from ._rules import VIEWS, Node, State
from ._split import SplitAxis


def all_reduces(nodes: Sequence[Node], states: Sequence[State | None]) -> dict[int, int]:
    """After which node ggml adds up each partial result, by the number of the node that is partial.

    `nodes` are all tensors of a graph in order of computation. What comes last is never added up,
    and is not listed.
    """
    order = [i for i, node in enumerate(nodes) if node.kind.op != "NONE"]
    walk = _Walk(nodes, states, order)
    found: dict[int, int] = {}
    after = 0  # the place behind those that are taken already
    for at, i in enumerate(order):
        state = states[i]
        if at < after or state is None or state.told.axis != SplitAxis.PARTIAL:
            continue
        until = walk.delayed(at)
        if until + 1 < len(order):
            found[i] = order[until]
        after = until + 1
    return found


def needing_a_barrier(
    nodes: Sequence[Node],
    states: Sequence[State | None],
    outputs: Collection[int],
    reduces: Mapping[int, int],
) -> dict[int, str]:
    """The partial results that ggml adds up too late, and why that is wrong.

    `reduces` is what `all_reduces` finds. A copy of such a result (``ggml_cont``) that is used in
    its place makes it right.
    """
    users = _users(nodes) if any(i != last for i, last in reduces.items()) else {}
    found = {}
    for i, state in enumerate(states):
        if state is None or state.told.axis != SplitAxis.PARTIAL or nodes[i].op == "NONE":
            continue
        last = reduces.get(i)
        if last is None or i in outputs:
            found[i] = _EARLY
        elif last != i:
            computed = not lacks_a_share(nodes[i], states)
            if why := _why_not_later(i, last, nodes, users, outputs, computed):
                found[i] = why
    return found


_EARLY = "its addends would be used, or read, before they are added up"
_LEFT_OUT = (
    "a device without a share leaves out what is computed before the addends are added up, and "
    "that is used later, or read"
)


def lacks_a_share(node: Node, states: Sequence[State | None]) -> bool:
    """Whether a device has no element of what this is made of, so that it does not compute it."""
    operands = [states[one] for one in node.operands if one is not None]
    return any(0 in one.told.shares for one in operands if one is not None and one.told.is_split)


def _uses(node: Node) -> Iterator[int]:
    """What a tensor is made from, and is a view of: some may come twice."""
    yield from (one for one in (*node.operands, node.root) if one is not None)


def _users(nodes: Sequence[Node]) -> dict[int, list[int]]:
    """Which tensors use each tensor."""
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for one in _uses(node):
            users.setdefault(one, []).append(i)
    return users


def _why_not_later(
    first: int,
    last: int,
    nodes: Sequence[Node],
    users: dict[int, list[int]],
    outputs: Collection[int],
    computed: bool,
) -> str:
    """What is wrong with adding up a partial result only after `last`; "" if nothing is.

    What is made of it before must lead to `last` alone. Unless all devices have a share of it
    (`computed`), nor may anything else be used later that is computed meanwhile: a device without
    one computes nothing up to `last`.
    """
    early = {first}
    for i in range(first + 1, last + 1):
        if not early.isdisjoint(_uses(nodes[i])):
            early.add(i)
    inner = early - {last}
    if last not in early or not inner.isdisjoint(outputs):
        return _EARLY
    if not all(set(users.get(i, ())) <= early for i in inner):
        return _EARLY
    if computed:
        return ""
    for i in range(first, last):
        if i in early or nodes[i].op == "NONE":
            continue
        writes = nodes[i].root is not None and nodes[i].op not in VIEWS
        if writes or i in outputs or any(user > last for user in users.get(i, ())):
            return _LEFT_OUT
    return ""


class _Walk:
    """ggml's search for how far an addition can be put off."""

    def __init__(
        self, nodes: Sequence[Node], states: Sequence[State | None], order: Sequence[int]
    ) -> None:
        self.nodes, self.states, self.order = nodes, states, order

    @cached_property
    def uses(self) -> Counter[int]:
        """How many times each tensor is an operand of another one."""
        return Counter(
            one
            for i in self.order
            for one in self.nodes[i].operands
            if one is not None and one != i
        )

    def delayed(self, at: int) -> int:
        """The last place to which the addition after the node at place `at` is put off."""
        order, nodes = self.order, self.nodes
        until, last = at, at
        current = order[at]
        until = self._skip(until, current)
        if until + 1 >= len(order):
            return last
        following = order[until + 1]
        node = nodes[following]
        if (
            node.op == "ADD_ID"
            and node.operands[0] == current
            and self._axis(node.operands[1]) == SplitAxis.PARTIAL
            and self._axis(node.operands[2]) == SplitAxis.MIRRORED
        ):
            current, until = following, until + 1
            last = until
        while True:
            until = self._skip(until, current)
            if until + 1 >= len(order):
                return last
            following = order[until + 1]
            node = nodes[following]
            if not (
                node.op == "MUL"
                and node.operands[0] == current
                and self._axis(node.operands[1]) == SplitAxis.MIRRORED
            ):
                break
            current, until = following, until + 1
            last = until
        return self._sum_of_experts(until, current, last)

    def _sum_of_experts(self, until: int, current: int, last: int) -> int:
        """The end of a chain of additions of all rows of the result, where that follows."""
        order, nodes = self.order, self.nodes
        if nodes[order[until + 1]].op != "VIEW":  # before all uses are counted
            return last
        whole = nodes[current]
        n = self.uses[order[last]]
        if n < 2 or n != whole.ne[1] or until + 2 * n - 1 >= len(order):
            return last
        for k in range(n):
            i = order[until + 1]
            view = nodes[i]
            if (
                view.op != "VIEW"
                or view.root != current
                or view.offset != k * whole.nb[1]
                or (view.ne[0], view.ne[1], view.nb[1]) != (whole.ne[0], whole.ne[2], whole.nb[2])
                or self.uses[i] != 1
            ):
                return last
            until += 1
        for k in range(n - 1):
            i = order[until + 1]
            a, b = nodes[i].operands[:2] if nodes[i].op == "ADD" else (None, None)
            if a is None or b is None or self.uses[i] != 1:
                return last
            left = order[until - (n - 1)] if k == 0 else order[until]
            if a != left or b != order[until - (n - 2)]:
                return last
            until += 1
        return until

    def _skip(self, until: int, current: int) -> int:
        """Past mirrored results of mirrored operands that do not use the partial one."""
        while until + 1 < len(self.order):
            i = self.order[until + 1]
            if self._axis(i) != SplitAxis.MIRRORED:
                break
            operands = [one for one in self.nodes[i].operands if one is not None]
            if current in operands:
                break
            if any(self._axis(one) != SplitAxis.MIRRORED for one in operands):
                break
            until += 1
        return until

    def _axis(self, i: int | None) -> SplitAxis | None:
        state = None if i is None else self.states[i]
        return None if state is None else state.axis
