"""Where the strings of an array begin: each is its length in 8 bytes, then so many bytes.

One has to follow them all to know where the array ends. In text there are hardly ever seven zeros
in a row but in a length: NumPy looks for those. What it finds is a guess, and taken for a string's
begin only where the string before ends there; the rest is followed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._format import U64

_FEW = 64  # strings that are not worth NumPy
_CHUNK = 1 << 17  # bytes looked at together


class StringError(Exception):
    """A string, the `index`-th of the array, that does not fit; its length is at byte `at`."""

    def __init__(self, index: int, at: int, length: int | None) -> None:
        super().__init__(index, at, length)
        self.index = index
        self.at = at
        self.length = length


def follow(data: Any, at: int, count: int, size: int) -> tuple[Sequence[int] | None, int]:
    """The begins of `count` strings from byte `at` on, and where the last one ends.

    `size` is that of `data`. The begins, those of the lengths, are None where there are few.
    Raises StringError for a string that does not fit.
    """
    if count < _FEW:
        return None, follow_few(data, at, count, size)[1]
    starts = np.empty(count, np.int64)
    done = 0
    while done < count:
        block = data[at : min(at + _CHUNK, size)]
        found, next_ = _in_block(block, count - done)
        if len(found):
            starts[done : done + len(found)] = found
            starts[done : done + len(found)] += at
            done += len(found)
            at += next_
        else:  # the file ends here
            _end(data, at, done, size)
        if at > size:
            last = int(starts[done - 1])
            raise StringError(done - 1, last, at - last - 8)
    return starts, at  # type: ignore[return-value] # an array is sequence enough


def follow_few(data: Any, at: int, count: int, size: int) -> tuple[list[int], int]:
    """As `follow`, one by one."""
    starts = []
    for index in range(count):
        starts.append(at)
        at = _end(data, at, index, size)
    return starts, at


def _end(data: Any, at: int, index: int, size: int) -> int:
    if at + 8 > size:
        raise StringError(index, at, None)
    (length,) = U64.unpack_from(data, at)
    if at + 8 + length > size:
        raise StringError(index, at, length)
    return at + 8 + int(length)


def _in_block(block: bytes, wanted: int) -> tuple[npt.NDArray[np.int64], int]:
    """The begins in a block, whose first byte is one, and where the last one found ends.

    That end may lie beyond the block. None is found where a length lies partly beyond it.
    """
    n = len(block) - 7
    if n <= 0:
        return np.empty(0, np.int64), 0
    lengths = np.ndarray((n,), "<u8", block, strides=(1,))
    guesses = np.flatnonzero(lengths < 256)
    ends = guesses + 8 + lengths[guesses].astype(np.int64)
    # where a guess, if it is right, is not followed by the next guess
    breaks = np.flatnonzero(ends[:-1] != guesses[1:])
    if len(breaks) > len(guesses) // 4:
        return _one_by_one(block, n, wanted)
    pieces: list[npt.NDArray[np.int64]] = []
    at, found = 0, 0
    while found < wanted and at < n:
        first = int(np.searchsorted(guesses, at))
        if first < len(guesses) and guesses[first] == at:
            gap = int(np.searchsorted(breaks, first))
            last = int(breaks[gap]) if gap < len(breaks) else len(guesses) - 1
            last = min(last, first + wanted - found - 1)
            pieces.append(guesses[first : last + 1])
            found += last + 1 - first
            at = int(ends[last])
        else:
            length = int(lengths[at])
            pieces.append(np.array([at], np.int64))
            found += 1
            at += 8 + length
    return (np.concatenate(pieces) if pieces else np.empty(0, np.int64)), at


def _one_by_one(block: bytes, n: int, wanted: int) -> tuple[npt.NDArray[np.int64], int]:
    at = 0
    found: list[int] = []
    while at < n and len(found) < wanted:
        found.append(at)
        at += 8 + int(U64.unpack_from(block, at)[0])
    return np.array(found, np.int64), at
