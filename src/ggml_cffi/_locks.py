"""Locks that no interrupt leaves held.

Python looks for signals after each call that its own functions make, of C's functions as well; not
within one of C's. So a lock is taken, and that it is noted, in one call, and what gives it back
calls nothing before. `acquire()` in a line of its own leaves a gap, and so do a context manager
that is written in Python and, from Python 3.14 on, the with statement itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_acquire = operator.methodcaller("acquire", True, -1)  # blocking, without a limit


def with_all(locks: Sequence[Any], function: Callable[[], _Result]) -> _Result:
    """Call it while all of them are held, which are taken in this order."""
    if not locks:
        return function()
    lock = locks[0]
    taken: list[object] = []
    try:
        taken.extend(map(_acquire, (lock,)))
        return with_all(locks[1:], function)
    finally:
        if taken:
            lock.release()


def with_or_without(
    lock: Any, function: Callable[[bool], _Result], timeout: float = 0.0
) -> _Result:
    """Call it with whether the lock is held: it is waited for so long (in seconds) only."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (timeout > 0,), (timeout if timeout > 0 else -1,)))
        return function(taken[0])
    finally:
        if taken and taken[0]:
            lock.release()
