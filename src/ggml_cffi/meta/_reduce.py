"""When ggml adds up what the devices have: after each row-parallel product, or somewhat later.

The source is ``ggml_backend_meta_graph_compute`` in ggml's ``src/ggml-backend-meta.cpp``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from ._rules import Node, State
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
) -> list[int]:
    """The partial results that would be used, or read, before they are added up.

    `reduces` is what `all_reduces` finds. A copy of such a result (``ggml_cont``) that is used in
    its place makes it right.
    """
    users = _users(nodes) if any(i != last for i, last in reduces.items()) else {}
    found = []
    for i, state in enumerate(states):
        if state is None or state.told.axis != SplitAxis.PARTIAL or nodes[i].op == "NONE":
            continue
        last = reduces.get(i)
        if last is None or i in outputs or not _is_safe(i, last, nodes, users, outputs):
            found.append(i)
    return found


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


def _is_safe(
    first: int,
    last: int,
    nodes: Sequence[Node],
    users: dict[int, list[int]],
    outputs: Collection[int],
) -> bool:
    """Whether what is made of a partial result before it is added up leads to `last` alone."""
    early = {first}
    for i in range(first + 1, last + 1):
        if not early.isdisjoint(_uses(nodes[i])):
            early.add(i)
    if last not in early:
        return False
    inner = early - {last}
    return not inner.intersection(outputs) and all(set(users.get(i, ())) <= early for i in inner)


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
