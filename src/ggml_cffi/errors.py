"""The exceptions of ggml_cffi; all are `GGMLError`."""

from __future__ import annotations

__all__ = [
    "AbortError",
    "AbortMemoryError",
    "GGMLError",
    "GGUFError",
    "NotSupportedError",
    "OperandError",
    "RPCError",
    "SplitError",
    "StatusError",
    "StatusMemoryError",
]


class GGMLError(RuntimeError):
    """A call of ggml failed."""


class AbortError(GGMLError):
    """ggml would have ended the process; the process, and what the call was made on, go on.

    ``message`` is ggml's own text, ``file`` and ``line`` say where in ggml's source it gave up
    (None where the message does not say), ``function`` is the C function that was called, ``log``
    what ggml logged about it as a warning or an error meanwhile. ``lost``: if ggml aborted while it
    freed something, the type of that, as in ``diagnostics.leaked_handles()``; it must not be used
    again, and what was not freed of it by then never is.
    """

    def __init__(
        self,
        message: str,
        file: str | None = None,
        line: int | None = None,
        function: str | None = None,
        log: str = "",
        lost: str = "",
    ) -> None:
        text = f"{function}: {message}" if function else message
        if lost:
            text += f"; the {lost} is lost"
        super().__init__(f"{text} ({log})" if log else text)
        self.message = message
        self.file = file
        self.line = line
        self.function = function
        self.log = log
        self.lost = lost

    def __reduce__(self) -> tuple[object, ...]:
        fields = self.message, self.file, self.line, self.function, self.log, self.lost
        return type(self), fields


class AbortMemoryError(AbortError, MemoryError):
    """ggml would have ended the process for want of memory: a MemoryError too."""


class OperandError(AbortError, ValueError):
    """Operands of an operation do not fit each other; the message names them with their shapes."""


class StatusError(GGMLError):
    """A call returned a ``ggml_status`` other than success; ``status`` is its number."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.status)


class StatusMemoryError(StatusError, MemoryError):
    """A call returned ``GGML_STATUS_ALLOC_FAILED``: a MemoryError too."""


class RPCError(GGMLError, ConnectionError):
    """A worker that ggml's RPC reaches over the network cannot be reached, or has been lost.

    ``endpoint`` is its address and port, ``reason`` what happened. After it was lost, every call
    that needs the worker raises this at once; what lay in its memory is gone, other devices go on.
    """

    def __init__(self, message: str, endpoint: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.endpoint, self.reason)


class SplitError(GGMLError):
    """A split function of a meta device raised, or its answer is invalid; the cause says more."""


class NotSupportedError(GGMLError):
    """The ggml that this package was built for does not have what was asked for."""


class GGUFError(GGMLError, ValueError):
    """A GGUF file is not valid, or does not fit what is done with it."""
