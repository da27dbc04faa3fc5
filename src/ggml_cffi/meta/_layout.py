"""Which elements of an axis each device holds, and in which order.

ggml knows of a split tensor how many elements each device has, and takes their order for given.
Where an operation puts them into another order, all devices may still agree on it: then the numbers
are right, but they come out of ggml permuted. So the planner follows the elements themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._split import SplitState

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""Elements of an axis in the order in which a device holds them: ranges, from and up to."""
Layout: TypeAlias = tuple[Pieces, ...]
"""The pieces of each device."""


def layout_of(state: SplitState) -> Layout:
    """The layout of a tensor that is cut as `state` says, in the order in which ggml writes it."""
    n_devs = len(state.ne) // state.n_segments
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(n_devs)]
    for device, start, length in chunks(state):
        pieces[device].append((start, start + length))
    return tuple(merged(one) for one in pieces)


def chunks(state: SplitState) -> Iterator[tuple[int, int, int]]:
    """Device, start and length of each run of elements, in the order of ggml's reads and writes."""
    n_devs = len(state.ne) // state.n_segments
    start = 0
    for segment, repeats in enumerate(state.nr[: state.n_segments]):
        for _ in range(repeats):
            for device in range(n_devs):
                length = state.ne[segment * n_devs + device]
                if length:
                    yield device, start, length
                start += length


def merged(pieces: Iterable[tuple[int, int]]) -> Pieces:
    """The same elements in the same order, in as few ranges as possible."""
    found: list[tuple[int, int]] = []
    for start, stop in pieces:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def size(pieces: Pieces) -> int:
    """How many elements these are."""
    return sum(stop - start for start, stop in pieces)


def elements(pieces: Pieces) -> npt.NDArray[np.int64]:
    """The elements one by one."""
    runs = [np.arange(start, stop) for start, stop in pieces]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def pieces_of(found: npt.NDArray[np.int64]) -> Pieces:
    """The ranges that these elements are."""
    if not len(found):
        return ()
    borders = np.flatnonzero(np.diff(found) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(found, borders))


def repeated(layout: Layout, length: int, times: int) -> Layout:
    """Each device's elements of an axis of `length`, `times` in a row: of one so much longer."""
    return tuple(
        merged((start + i * length, stop + i * length) for i in range(times) for start, stop in one)
        for one in layout
    )


def folded(layout: Layout, length: int, times: int) -> Layout | None:
    """The layout over an axis of `length` that this is the repetition of; None if of none."""
    found = []
    for one in layout:
        if size(one) % times:
            return None
        first = elements(one)[: size(one) // times]
        found.append(pieces_of(first))
    whole = tuple(found)
    return whole if repeated(whole, length, times) == layout else None


def reshaped(
    layout: Layout, axis: int, ne: Sequence[int], new_axis: int, new_ne: Sequence[int]
) -> Layout | None:
    """The layout along `new_axis` once a tensor of `ne`, cut along `axis`, is given another shape.

    None where what a device holds is no set of whole slices along that axis.
    """
    inner, new_inner = math.prod(ne[:axis]), math.prod(new_ne[:new_axis])
    period, new_period = inner * ne[axis], new_inner * new_ne[new_axis]
    if new_period % period:
        return None
    flat = repeated(
        tuple(tuple((a * inner, b * inner) for a, b in one) for one in layout),
        period,
        new_period // period,
    )
    if any(border % new_inner for one in flat for piece in one for border in piece):
        return None
    return tuple(tuple((a // new_inner, b // new_inner) for a, b in one) for one in flat)


def unpermuted(state: SplitState, layout: Layout) -> npt.NDArray[np.int64] | None:
    """Where each element of the axis stands in what ggml reads; None if each stands in its place.

    `state` is what ggml takes the split for. Raises ValueError where not all elements are there.
    """
    held = [elements(one) for one in layout]
    done = [0] * len(held)
    read = []
    for device, _, length in chunks(state):
        read.append(held[device][done[device] : done[device] + length])
        done[device] += length
    order = np.concatenate(read) if read else np.zeros(0, np.int64)
    if (np.sort(order) != np.arange(len(order))).any():
        raise ValueError("the devices do not hold each element once")
    if (order[:-1] < order[1:]).all():
        return None
    return np.argsort(order)
