"""Arrays that a function of an operation was lent, and that somebody keeps beyond its call.

They are known by their owners, the objects that NumPy has their memory from: each is there as long
as the array, or a view of it, is.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from ._handles import Loans, renew_after_fork

_PAUSES = (0.0, 0.001, 0.01, 0.1, 0.4)  # seconds
_lock = threading.RLock()
_collecting = threading.RLock()
renew_after_fork(globals(), "_lock", "_collecting")
_kept: list[tuple[int, weakref.ref[object]]] = []
_numbers = itertools.count(1)


def check_given_back(owners: Sequence[weakref.ref[object]]) -> None:
    """Raise BufferError where somebody keeps one of them.

    A circle is collected before, and a thread that has used one has time to forget it.
    """
    for pause in _PAUSES:
        if not any(owner() is not None for owner in owners):
            return
        with _collecting:  # while one thread collects, another's does nothing
            gc.collect()
        time.sleep(pause)
    if note(owners):
        raise BufferError(
            "an array that the function of an operation was given is kept beyond its call, where "
            "its memory is used again: keep a copy"
        )


def note(owners: Sequence[weakref.ref[object]]) -> bool:
    """Remember those that are kept; whether there are any."""
    found = [owner for owner in owners if owner() is not None]
    if found:
        with _lock:
            number = next(_numbers)
            _kept[:] = [one for one in _kept if one[1]() is not None]
            _kept.extend((number, owner) for owner in found)
    return bool(found)


def newest() -> int:
    """The number of the last one that was noted, and is kept; 0 where there is none."""
    with _lock:
        return _kept[-1][0] if _kept else 0


def alive(since: int) -> Iterator[object]:
    """What has been noted after `since`, as `newest` gives it, and is still kept."""
    if _kept:
        with _lock:
            owners = [owner() for number, owner in _kept if number > since]
        yield from (one for one in owners if one is not None)


def lend(loans: Loans, since: int) -> None:
    """Let memory stay until nobody keeps what was noted after `since`, in this run or beside it."""
    for owner in alive(since):
        loans.begin()
        weakref.finalize(owner, loans.end).atexit = False
