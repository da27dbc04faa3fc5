"""Locks that no interrupt leaves held.

Python looks for signals between the steps of its own functions, but neither between a with
statement and the lock of C's that it takes, nor within a function of C's. So locks are taken by
the statement itself, each by one of its own, or all in one call of C's; a context manager written
in Python, or `acquire()` in a line of its own, leaves a gap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Lock = contextlib.AbstractContextManager[Any]


def with_all(locks: Sequence[_Lock], function: Callable[[], _Result]) -> _Result:
    """Call it while all of them are held, which are taken in this order."""
    if not locks:
        return function()
    with locks[0]:
        return with_all(locks[1:], function)


def with_or_without(
    lock: Any, function: Callable[[bool], _Result], timeout: float = 0.0
) -> _Result:
    """Call it with whether the lock is held: it is waited for so long (in seconds) only."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (timeout > 0,), (timeout if timeout > 0 else -1,)))
        return function(taken[0])
    finally:
        if any(taken):
            lock.release()
