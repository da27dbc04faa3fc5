"""Where a view lies on each device, as ggml places it, and which elements that are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._layout import Layout, Pieces, elements, pieces_of, size
from ._split import MAX_DIMS


class Memory(NamedTuple):
    """The shape and place of a tensor, with axis 0 counted in blocks of its type."""

    ne: Sequence[int]
    nb: Sequence[int]
    offset: int = 0
    block_size: int = 1


def held_by_view(
    view: Memory, axis: int, shares: Sequence[int], root: Memory, root_axis: int, held: Layout
) -> Layout | str:
    """What of a view along `axis` each device holds, if `shares` of it are theirs as ggml has it.

    The tensor that owns the memory is cut along `root_axis` (4: it is whole on every device) with
    the layout `held`. Where a device's part of the view lies over other elements than those of a
    slice along the axis: what is wrong, in words. All along axis 0 is counted in blocks.
    """
    found: list[Pieces] = []
    for pieces, share in zip(held, shares, strict=True):
        if not share:
            found.append(())
            continue
        local = _local(view, axis, share, root, root_axis)
        where = _Cut(root, root_axis, pieces)
        along = where.original(local.offset + local.nb[axis] * np.arange(share))
        if along is None:
            return "a device's part of the view would lie outside of its memory"
        first, rest = np.divmod(along - view.offset, view.nb[axis])
        if rest.any() or first.min() < 0 or first.max() >= view.ne[axis]:
            return "a device's part of the view lies over other elements than the view"
        if not _agrees(view, axis, local, where, first):
            return "a device's part of the view lies over other elements than a slice of it"
        found.append(pieces_of(first))
    return tuple(found)


def _local(view: Memory, axis: int, share: int, root: Memory, root_axis: int) -> Memory:
    """A device's part of a view, by ggml's rule: larger strides and the offset are scaled.

    The rule has the extent of an axis in bytes as a stride for each number, also of blocks.
    """
    length, below = view.ne[axis], view.nb[axis]
    ne = [share if i == axis else n for i, n in enumerate(view.ne)]
    nb = [stride * share // length if stride > below else stride for stride in view.nb]
    inside = root_axis < MAX_DIMS and view.offset <= root.nb[root_axis]
    for i, (n, stride) in enumerate(zip(view.ne, view.nb, strict=True)):
        numbers = n * view.block_size if i == 0 else n
        inside |= view.offset <= numbers * stride < below
    return Memory(ne, nb, view.offset if inside else view.offset * share // length)


class _Cut:
    """The memory of a device that holds pieces of a contiguous tensor."""

    def __init__(self, root: Memory, axis: int, pieces: Pieces) -> None:
        whole = axis == MAX_DIMS
        self.cell = 1 if whole else root.nb[axis]
        self.span = 0 if whole else self.cell * size(pieces)
        self.full = 0 if whole else self.cell * root.ne[axis]
        self.total = root.nb[MAX_DIMS - 1] * root.ne[MAX_DIMS - 1]
        self._elements = elements(pieces)

    def original(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Where in the whole tensor these bytes are from; None if some lie outside of the part."""
        if not self.span:
            return at if at.min() >= 0 and at.max() < self.total else None
        if at.min() < 0 or at.max() >= self.total // self.full * self.span:
            return None
        outer, rest = np.divmod(at, self.span)
        element, byte = np.divmod(rest, self.cell)
        moved: npt.NDArray[np.int64] = outer * self.full + self._elements[element] * self.cell
        return moved + byte


def _agrees(
    view: Memory, axis: int, local: Memory, where: _Cut, first: npt.NDArray[np.int64]
) -> bool:
    """Whether each element of the local view is the one of the whole view that it stands for."""
    at, expected = np.array([local.offset]), np.array([view.offset])
    for i in sorted(range(MAX_DIMS), key=lambda one: -local.nb[one]):
        steps = np.arange(local.ne[i])
        if i != axis and _is_even(i, local, where, at):
            steps = steps[[0, -1]]  # what is between lies evenly in both
        at = np.add.outer(at, steps * local.nb[i]).ravel()
        expected = np.add.outer(expected, (first if i == axis else steps) * view.nb[i]).ravel()
    found = where.original(at)
    return found is not None and bool((found == expected).all())


def _is_even(i: int, local: Memory, where: _Cut, at: npt.NDArray[np.int64]) -> bool:
    """Whether equal steps along an axis, from all these places, are equal steps in the original."""
    if not where.span or not local.nb[i] % where.span:
        return True  # there is no cut, or each step is from one repetition of it to the next
    others = [local.ne[k] for k in range(MAX_DIMS) if local.nb[k] < local.nb[i]]
    if max(others, default=1) > 1:
        return False
    last = at + (local.ne[i] - 1) * local.nb[i]
    return bool((at // where.cell == last // where.cell).all())
