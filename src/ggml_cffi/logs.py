"""ggml's log as Python logging: logger ``ggml``, its levels, one record a line."""

from __future__ import annotations

import logging
import threading

__all__ = ["flush", "logger", "receive"]

logger: logging.Logger = logging.getLogger("ggml")
logger.addHandler(logging.NullHandler())

#: enum ggml_log_level → logging level; NONE is ggml's word for plain output.
_LEVELS = {0: logging.INFO, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5


class _Pending(threading.local):
    """The line that this thread has begun."""

    def __init__(self) -> None:
        self.level = logging.INFO
        self.text = ""


_pending = _Pending()


def receive(level: int, text: str) -> None:
    """Take a piece of ggml's log; a record is made at each end of line.

    Pieces of level CONT go on with the line begun before, and so do those of its own level, as the
    scheduler writes them; another level begins a new line.
    """
    wanted = _pending.level if level == _CONTINUE else _LEVELS.get(level, logging.INFO)
    if wanted != _pending.level:
        flush()
        _pending.level = wanted
    _pending.text += text
    while "\n" in _pending.text:
        line, _pending.text = _pending.text.split("\n", 1)
        if line:
            logger.log(_pending.level, "%s", line)


def flush() -> None:
    """Make a record of what this thread's last line has so far."""
    line, _pending.text = _pending.text, ""
    if line:
        logger.log(_pending.level, "%s", line)
