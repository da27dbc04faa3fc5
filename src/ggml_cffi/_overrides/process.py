"""The log and the end of the process: both go through the guard's own C callbacks, which stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import _callbacks
from ._base import bound

if TYPE_CHECKING:
    from .._gen import enums


def _check(function: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        kind = type(callback).__name__
        raise TypeError(f"{function}: callback must be a function or None, not {kind}")


@bound
def ggml_log_set(callback: Callable[[enums.ggml_log_level, str], object] | None) -> None:
    """Have `callback(level, text)` take ggml's log, in place of ``logging.getLogger("ggml")``.

    None gives the log back to logging. ggml writes lines in pieces: those after the first have the
    level GGML_LOG_LEVEL_CONT. The function is called on whichever thread writes. What it raises is
    reported through `sys.unraisablehook`. It is kept until replaced.
    """
    _check("ggml_log_set", callback)
    _callbacks.log_receiver = callback


@bound
def ggml_log_get() -> Callable[[enums.ggml_log_level, str], object] | None:
    """Give the function that takes ggml's log, None while it goes to logging."""
    return _callbacks.log_receiver


@bound
def ggml_set_abort_callback(
    callback: Callable[[str], object] | None,
) -> Callable[[str], object] | None:
    """Have `callback(message)` called before an abort that cannot be caught ends the process.

    That is: one on a thread of ggml's own, or inside a computation on several threads. All others
    raise `AbortError` and do not reach it. What it raises is reported and dropped. It is kept until
    replaced; None: nothing is called. Gives the function that was set before, None if none was.
    """
    _check("ggml_set_abort_callback", callback)
    before = _callbacks.abort_observer
    _callbacks.set_abort_observer(callback)
    return before
