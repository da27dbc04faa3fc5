"""The error latch, and the split function behind one meta device."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import SplitError
from ._split import SplitAnswer, SplitState, TensorInfo, check_answer

logger = logging.getLogger("ggml_cffi")
logger.addHandler(logging.NullHandler())  # without any handler, logging prints to stderr

ON_ERROR = ("mirror", "raise")
MAX_NESTING = 16
"""How many split functions may be at work in a thread, each asked because of the one before."""

SplitCallable = Callable[[TensorInfo, int], SplitAnswer]

_MIRRORED = SplitState.mirrored()


class ErrorLatch:
    """Keeps the first error of a split function; closed from then on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._error: Exception | None = None
        self._tensor_name: str | None = None

    @property
    def closed(self) -> bool:
        """Whether there was an error."""
        return self._error is not None

    @property
    def error(self) -> Exception | None:
        """The error that closed the latch, None while it is open."""
        return self._error

    @property
    def tensor_name(self) -> str | None:
        """The tensor that the function was asked about when it failed, None while it is open."""
        return self._tensor_name

    def close(self, error: Exception, tensor_name: str) -> bool:
        """Close the latch with `error`; False if it was closed before."""
        with self._lock:
            if self._error is not None:
                return False
            self._tensor_name = tensor_name
            self._error = error
            return True

    def release(self) -> None:
        """Turn the error's traceback into text: its frames keep alive what the function held."""
        if self._error is not None:
            _drop_frames(self._error)


@dataclass
class _Frozen:
    """The answer for one tensor, with what tells one allocation of it from the next."""

    state: SplitState
    info: TensorInfo
    buffer: int
    used: bool
    """Whether ggml has asked since the tensor got its memory."""

    def holds(self, info: TensorInfo, buffer: int, allocated: bool) -> bool:
        """Whether this is the answer to give, rather than one for an allocation that is over."""
        if info.ne != self.info.ne or info.type != self.info.type:
            return False  # another tensor at the same address: the answer might not fit
        if buffer and self.buffer and buffer != self.buffer:
            return False
        # before its memory is there, a tensor can be neither used nor renamed
        return allocated or (not self.used and info.name == self.info.name)


class SplitFunction:
    """The user's function behind one meta device: its frozen answers and its latch. Thread-safe.

    An answer holds from the tensor's allocation until the tensor is allocated anew, whatever
    happens to its name.

    With `on_error="mirror"` an exception or an invalid answer closes the latch: this tensor and all
    that are asked about later are mirrored, and the function is not called again. With "raise" the
    call that asked fails with a `SplitError` whose cause is the exception; its answers are not
    frozen, the latch stays open, and the next call asks again. In both modes KeyboardInterrupt,
    SystemExit and whatever else is no Exception come out of the call that asked as they are, close
    no latch and freeze no answer.

    Raises TypeError for a function that cannot be called, ValueError for another `on_error`.
    """

    def __init__(
        self,
        function: SplitCallable,
        n_devs: int,
        on_error: str = "mirror",
        *,
        repeats: bool = True,
    ) -> None:
        if not callable(function):
            expected = "a function of (tensor_info, n_devs)"
            raise TypeError(f"split_fn is {function!r}, expected {expected}")
        if on_error not in ON_ERROR:
            expected = " or ".join(map(repr, ON_ERROR))
            raise ValueError(f"on_error is {on_error!r}, expected {expected}")
        self.n_devs = n_devs
        self.on_error = on_error
        self.latch: ErrorLatch = ErrorLatch()
        self._repeats = repeats
        self._function: SplitCallable | None = function
        self.when_closed: Callable[[], object] = bool
        self._lock = threading.RLock()  # never held while the function runs
        self._frozen: dict[int, _Frozen] = {}
        self._buffers: set[int] = set()

    @property
    def error(self) -> Exception | None:
        """The error that closed the latch, None while it is open."""
        return self.latch.error

    @property
    def tensor_name(self) -> str | None:
        """The tensor at which the latch closed, None while it is open."""
        return self.latch.tensor_name

    @property
    def closed(self) -> bool:
        """Whether the function has been dropped."""
        return self._function is None

    def close(self) -> None:
        """Drop the function and what it holds; what is not frozen is mirrored from then on."""
        self._function = None
        self.latch.release()
        self.when_closed()

    def frozen(self, address: int) -> SplitState | None:
        """The answer for the tensor at this address, None if there is none."""
        return self.all_frozen([address])[0]

    def all_frozen(self, addresses: Iterable[int]) -> list[SplitState | None]:
        """The answers for the tensors at these addresses, None where there is none."""
        with self._lock:
            entries = [self._frozen.get(address) for address in addresses]
        return [None if entry is None else entry.state for entry in entries]

    def answer(
        self,
        info: TensorInfo,
        address: int,
        allocated: bool,
        *,
        raise_later: Callable[[BaseException], object],
        buffer: int = 0,
        failing: bool = False,
    ) -> SplitState:
        """The split of the tensor at `address`.

        Never raises: what has to come out of the C call that asked is handed to `raise_later`.

        `allocated` says whether the tensor has its memory (`tensor->data`): not yet when ggml asks
        first. `buffer` is the address of its buffer, 0 if unknown: in another one it was allocated
        anew. `failing`: an exception waits for the C call to return already, so nobody will see the
        result, and the function is not called.
        """
        try:
            with self._lock:
                before = self._frozen.get(address)
                if before is not None and before.holds(info, buffer, allocated):
                    before.used |= allocated
                    return before.state
            if failing:
                return _MIRRORED
            state = self._ask(info, address)
            return self._freeze(address, _Frozen(state, info, buffer, allocated), before)
        except BaseException as error:
            self._forget(address, buffer, allocated)
            raise_later(error)
            return _MIRRORED

    def first_of(self, buffer: int) -> bool:
        """Whether this is the first question about a tensor of a buffer: `forget` ends it."""
        with self._lock:
            first = buffer not in self._buffers
            self._buffers.add(buffer)
        return first

    def forget(self, buffer: int) -> None:
        """Unfreeze the answers about the tensors of a buffer, which is gone."""
        with self._lock:
            self._buffers.discard(buffer)
            self._frozen = {k: entry for k, entry in self._frozen.items() if entry.buffer != buffer}

    def _ask(self, info: TensorInfo, address: int) -> SplitState:
        function = self._function
        if function is None or self.latch.closed:
            return _MIRRORED
        try:
            with _asking((id(self), address), info.name):
                answer = function(info, self.n_devs)
            state = check_answer(answer, info, self.n_devs, repeats=self._repeats)
        except Exception as error:
            function = None  # this frame may live on through those of the traceback
            if error.__traceback__ is not None:  # let it begin in the function
                error.__traceback__ = error.__traceback__.tb_next
            if self.on_error == "raise":
                message = f"the split function failed for tensor {info.name!r}: {_describe(error)}"
                raise SplitError(message) from error
            if self.latch.close(error, info.name):
                _log(error, info.name)
            return _MIRRORED
        # closed meanwhile: by another thread, or by a question that the function itself led to
        return state if self.error is None else _MIRRORED

    def _freeze(self, address: int, entry: _Frozen, before: _Frozen | None) -> SplitState:
        with self._lock:
            now = self._frozen.get(address)
            if now is None or now is before or not now.holds(entry.info, entry.buffer, entry.used):
                self._frozen[address] = now = entry
            now.used |= entry.used
            return now.state  # that of another thread, if it was asked about this tensor and first

    def _forget(self, address: int, buffer: int, allocated: bool) -> None:
        """Unfreeze what the failing call has frozen: the buffer it was making is thrown away."""
        with self._lock:
            self._frozen.pop(address, None)
            if buffer and not allocated:
                self._frozen = {
                    key: entry
                    for key, entry in self._frozen.items()
                    if entry.used or entry.buffer != buffer
                }


class _Asked(threading.local):
    def __init__(self) -> None:
        self.tensors: list[tuple[int, int]] = []


_asked = _Asked()


@contextlib.contextmanager
def _asking(key: tuple[int, int], name: str) -> Iterator[None]:
    """Refuse a function that, through ggml, leads to the question it is answering, or to too many.

    Without this the C stack would overflow before Python's own limit is reached.
    """
    if key in _asked.tensors:
        raise RuntimeError(f"the split function used tensor {name!r} before it had its split")
    if len(_asked.tensors) >= MAX_NESTING:
        raise RecursionError(f"{MAX_NESTING} split functions wait for each other at {name!r}")
    _asked.tensors.append(key)
    try:
        yield
    finally:
        _asked.tensors.pop()


def _describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(without a message: str() of it fails)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _log(error: Exception, tensor_name: str) -> None:
    with contextlib.suppress(Exception):  # a failing handler or filter must not reach ggml
        logger.warning(
            "split function failed for tensor %r (%s); it is not called again: "
            "this and all further tensors are mirrored",
            tensor_name,
            _describe(error),
        )


def _drop_frames(error: BaseException) -> None:
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and not any(link is known for known in chain):
            chain.append(link)
            todo += [link.__cause__, link.__context__]
    if sys.version_info < (3, 11):
        for link in chain:
            traceback.clear_frames(link.__traceback__)
    elif any(link.__traceback__ is not None for link in chain):
        # there a cleared frame still keeps its function, and with that the closure
        text = "".join(traceback.format_exception(error)).rstrip()
        error.add_note(f"It was raised here:\n{text}")
        for link in chain:
            link.__traceback__ = None
