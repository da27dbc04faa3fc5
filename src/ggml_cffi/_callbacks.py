"""Python functions that ggml calls: the only place with ``def_extern``.

C is given one static trampoline per kind and a userdata that is unique for the life of the
process, a key of `_table`. What a Python function raises is kept and comes out of the call that
led to it; meanwhile C gets the value that the annotations name.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import operator
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

from ._gen.tables import KINDS
from ._handles import renew_after_fork
from ._loader import ffi, lib, load_backends, raised
from ._runtime import Kind, text
from .logs import flush, receive
from .meta._latch import SplitFunction
from .meta._split import fill, tensor_info

_SPLIT = "ggml_backend_meta_get_split_state_t"

_numbers = itertools.count(1)
_lock = threading.RLock()  # the collector may free an owner while it is held
_table: dict[int, Registration] = {}
#: What each native object keeps alive: its address → registrations; `release` ends it.
owners: dict[int, list[Registration]] = {}
#: The one registration per (function, object) of callbacks that a later call replaces.
_replaced: dict[tuple[str, int], Registration] = {}
#: What callbacks raised, by the numbers that the guard keeps with the call it is to come out of.
_errors: dict[int, BaseException] = raised
_error_numbers = itertools.count(1)
#: Held while a callback takes the place of another: C and `_replaced` do so in the same order.
replacing = threading.RLock()
_newest = 0
renew_after_fork(globals(), "_lock", "replacing")


class Registration:
    """A Python function that C may call until `drop`."""

    def __init__(self, function: Any) -> None:
        global _newest
        self.function = function
        self.place: tuple[str, int] | None = None  # in `_replaced`
        with _lock:
            self.number = _newest = next(_numbers)
            _table[self.number] = self

    @property
    def userdata(self) -> Any:
        return ffi.cast("void *", self.number)

    def drop(self) -> None:
        """C will not call it any more; a late call gets the safe value."""
        with _lock:
            _table.pop(self.number, None)
        self.function = None


class Answers(Registration):
    """What a split function has answered about the tensors of a buffer: it goes with the buffer."""

    def __init__(self, function: SplitFunction, buffer: int) -> None:
        super().__init__(function)
        self.buffer = buffer

    def drop(self) -> None:
        function = self.function
        super().drop()
        if function is not None:
            function.forget(self.buffer)


class Attached:
    """The callbacks of one call: kept as long as their annotations say, dropped if it fails."""

    def __init__(self) -> None:
        self._new: list[tuple[Registration | None, str, Any, str]] = []
        self._slots: list[tuple[int, Any]] = []
        self._result: Any = None

    def __enter__(self) -> Attached:
        return self

    def add(
        self,
        kind: str,
        function: Any,
        lifetime: str,
        owner: Any,
        where: str,
        name: str,
        slot: str | None,
    ) -> tuple[Any, Any]:
        """The C function and the userdata for a Python function (or None, or a C function)."""
        if function is None or isinstance(function, ffi.CData):
            if lifetime == "replaced":
                self._new.append((None, lifetime, owner, f"{where}.{name}"))
                if not function and KINDS[kind].gone is not None:
                    # ggml may be about to call it without a look, and then finds nobody there; NULL
                    # comes when it may, in the `after` of the function
                    return getattr(lib, KINDS[kind].trampolines[0]), ffi.NULL
            return function or ffi.NULL, ffi.NULL
        if not callable(function):
            raise TypeError(
                f"{where}: {name} must be a function or None, not {type(function).__name__}"
            )
        registration = Registration(function)
        self._new.append((registration, lifetime, owner, f"{where}.{name}"))
        facts: Kind = KINDS[kind]
        if slot is None:
            trampoline = facts.trampolines[0]
        else:
            trampoline = facts.trampolines[list(facts.slots).index(slot)]
            number = facts.slots[slot]
            before = lib.ggml_cffi_set_slot(number, registration.userdata)
            if lifetime == "call":
                self._slots.append((number, before))
        return getattr(lib, trampoline), registration.userdata

    def result(self, value: Any) -> None:
        """The object that owns the callbacks whose lifetime is that of the result."""
        self._result = value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in reversed(self._slots):  # those of a call that this one is inside of
            lib.ggml_cffi_set_slot(number, before)
        for registration, lifetime, owner, where in self._new:
            if error is not None or lifetime == "call":
                if registration is not None:
                    registration.drop()
            elif lifetime == "replaced":
                _replace(where, owner, registration)
            elif registration is not None and lifetime in ("object", "result"):
                _own(owner if lifetime == "object" else self._result, registration)


def _address(owner: Any) -> int:
    return 0 if owner is None else int(ffi.cast("uintptr_t", owner))


def _replace(where: str, owner: Any, registration: Registration | None) -> None:
    """Put a callback in the place of the one that was given before, to the same object."""
    key = (where, _address(owner))
    with _lock:
        before = _replaced.pop(key, None)
        if registration is not None:
            _replaced[key] = registration
            registration.place = key
        if before is not None and owner is not None:
            kept = owners.get(_address(owner), [])
            kept[:] = [other for other in kept if other is not before]
    if before is not None:
        before.drop()
    if registration is not None and owner is not None:
        _own(owner, registration)


def _own(owner: Any, registration: Registration) -> None:
    with _lock:
        owners.setdefault(_address(owner), []).append(registration)


def newest() -> int:
    """The number of the newest registration, for `release`."""
    return _newest


def release(owner: Any, last: int) -> None:
    """`owner` is gone, and its callbacks with it.

    Those with higher numbers than `last` belong to another object, which got its address meanwhile.
    Where freeing it was refused, because a computation uses it, they stay.
    """
    address = _address(owner)
    if lib.ggml_cffi_in_use(ffi.cast("void *", address)):
        return
    with _lock:
        had = owners.pop(address, [])
        gone = [registration for registration in had if registration.number <= last]
        if len(gone) < len(had):
            owners[address] = [registration for registration in had if registration not in gone]
        for registration in gone:
            place = registration.place
            if place is not None and _replaced.get(place) is registration:
                del _replaced[place]
    for registration in gone:
        registration.drop()


# ---- exceptions on their way out


def raise_later(error: BaseException) -> None:
    """Let `error` come out of the C call that led to the present Python function.

    On a thread of ggml's own there is none: it comes out of the computation that the function is
    a part of, when that ends.
    """
    number = next(_error_numbers)
    _errors[number] = error
    try:
        if lib.ggml_cffi_raise(number):
            return
    except BaseException:  # there is no stack for it, or an interrupt came: C knows of neither
        del _errors[number]
        raise
    del _errors[number]
    if isinstance(error, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        _unraisable(error, "Exception ignored in a function that no call of ggml led to", None)


def take_raised() -> list[BaseException]:
    """What callbacks raised in the call of lib that has just ended on this thread, in order."""
    found = [_errors.pop(number, None) for number in iter(lib.ggml_cffi_next_failure, 0)]
    forget_unread()
    return [error for error in found if error is not None]


def forget_unread() -> None:
    """Drop what callbacks raised in calls that nobody asked about in time."""
    while number := lib.ggml_cffi_next_dropped():
        _errors.pop(number, None)


# ---- the Python side of every trampoline


def _convert(converter: str, value: Any) -> Any:
    if converter == "string":
        return text(value)
    if converter.startswith("enum:"):
        from ._gen import enums

        try:
            return getattr(enums, converter[5:])(value)
        except ValueError:
            return value
    return value


def _dispatcher(name: str, facts: Kind) -> Callable[..., Any]:
    """The function behind the trampoline of a kind.

    It returns True when it has run to its end: where it cannot be called, the recursion being too
    deep, say, cffi gives C a zero, and the guard knows that nobody has answered.
    """
    void = facts.returns == "void"
    position = facts.userdata

    def call(*args: Any) -> bool:
        given = args if void else args[:-1]
        index = len(given) - 1 if position is None else position
        try:
            registration = _table.get(_address(given[index]))
            function = None if registration is None else registration.function
            if function is None:
                if facts.gone is not None:
                    args[-1][0] = facts.gone
                    return True
                raise RuntimeError(f"the function behind a {name} is gone, with what it belongs to")
            if facts.returns == "struct" and lib.ggml_cffi_failing():
                return True  # nobody would see what comes of it
            values = [
                _convert(converter, value)
                for converter, value in zip(
                    facts.converters, given[:index] + given[index + 1 :], strict=True
                )
            ]
            result = function(*values)
            if not void:
                args[-1][0] = _checked(name, facts, result)
        except BaseException as error:  # it comes out of the C call
            raise_later(error)
        return True

    return call


def _checked(name: str, facts: Kind, result: Any) -> Any:
    if facts.returns == "bool":
        if not isinstance(result, bool | np.bool_):
            raise TypeError(f"a {name} must return a bool, not {type(result).__name__}")
        return bool(result)
    if facts.returns == "number":
        try:
            return result if isinstance(result, float) else operator.index(result)
        except TypeError:
            raise TypeError(
                f"a {name} must return an integer, not {type(result).__name__}"
            ) from None
    return result


def _split(tensor: Any, userdata: Any, out: Any) -> bool:
    """The split function's trampoline: `out` holds MIRRORED already."""
    registration = _table.get(_address(userdata))
    if registration is None:
        return True
    function: Any = registration.function
    raised = False

    def later(error: BaseException) -> None:
        nonlocal raised
        raised = True
        raise_later(error)

    try:
        buffer, failing = _address(tensor.buffer), lib.ggml_cffi_failing()
        info = tensor_info(tensor)
        state = function.answer(
            info,
            _address(tensor),
            bool(tensor.data),
            raise_later=later,
            buffer=buffer,
            failing=failing,
        )
        if raised and not tensor.data:  # the buffer that is being made is thrown away
            release(tensor.buffer, newest())
        elif buffer and not failing and function.first_of(buffer):
            _own(tensor.buffer, Answers(function, buffer))
        fill(state, out, function.n_devs)
        in_segments = state.n_segments > 1 or state.nr != (1,)
        lib.ggml_cffi_note_cut(tensor, state.axis, in_segments)
    except BaseException as error:  # ggml must get an answer; out is MIRRORED
        raise_later(error)
    return True


def _late(kind: object, error: BaseException, traceback: object) -> None:
    """What a body did not catch: an interrupt before its first line, or after its last."""
    raise_later(error)


def _define() -> None:
    for name, facts in KINDS.items():
        body = _split if name == _SPLIT else _dispatcher(name, facts)
        ffi.def_extern(name=f"ggml_cffi_py_{name}", onerror=_late)(body)


@ffi.def_extern(name="ggml_cffi_py_signals", onerror=_late)  # type: ignore[untyped-decorator]
def _signals() -> None:
    """Waits are interrupted by signals: on the main thread their functions run here."""


#: Takes ggml's log in place of the bridge to logging, while it is not None.
log_receiver: Callable[[Any, str], object] | None = None


@ffi.def_extern(name="ggml_cffi_py_log", onerror=_late)  # type: ignore[untyped-decorator]
def _log(level: int, line: Any) -> None:
    receiver = log_receiver
    try:
        words = ffi.string(line).decode("utf-8", "replace")
        if receiver is None:
            receive(level, words)
        else:
            receiver(_convert("enum:ggml_log_level", level), words)
    except BaseException as error:  # a line must never break the call that wrote it
        _report(error, "Exception ignored in the receiver of ggml's log", receiver or receive)


#: The function that hears of an abort nobody can catch, just before the process ends.
abort_observer: Callable[[str], object] | None = None


def _last_words(kind: object, error: BaseException, traceback: object) -> None:
    """Print what an abort callback raised, an interrupt too: the process ends, no call does."""
    _unraisable(error, "Exception ignored in the abort callback", abort_observer)


@ffi.def_extern(name="ggml_cffi_py_abort", onerror=_last_words)  # type: ignore[untyped-decorator]
def _abort(message: Any) -> None:
    observer = abort_observer
    if observer is not None:
        observer(ffi.string(message).decode("utf-8", "replace"))


def _report(error: BaseException, what: str, function: object) -> None:
    """Hand what can go nowhere else to `sys.unraisablehook`; but an interrupt comes out."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        raise_later(error)
    else:
        _unraisable(error, what, function)


def _unraisable(error: BaseException, what: str, function: object) -> None:
    if sys.unraisablehook is sys.__unraisablehook__:  # takes nothing but the interpreter's own
        print(f"{what}: {function!r}", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
    else:
        arguments: Any = SimpleNamespace(
            exc_type=type(error),
            exc_value=error,
            exc_traceback=error.__traceback__,
            err_msg=what,
            object=function,
        )
        sys.unraisablehook(arguments)


def set_abort_observer(function: Callable[[str], object] | None) -> None:
    """Have `function` called with ggml's message before an abort that ends the process."""
    global abort_observer
    abort_observer = function
    lib.ggml_cffi_set_user_abort(function is not None)


_define()

# ---- the split functions of meta devices


#: Meta devices by the address of their ggml device: ggml never frees one.
_meta: dict[int, SplitFunction] = {}


def new_split_callback(function: SplitFunction) -> tuple[Any, Registration]:
    """The C function through which ggml asks `function`, given the registration's userdata."""
    return getattr(lib, KINDS[_SPLIT].trampolines[0]), Registration(function)


def remember_meta_device(device: Any, function: SplitFunction) -> None:
    """`device` is a meta device that asks `function`."""
    _meta[_address(device)] = function


def split_function_of(device: Any) -> SplitFunction | None:
    """The split function of a meta device, None for any other device."""
    return _meta.get(_address(device))


def latched_error(values: tuple[Any, ...]) -> BaseException | None:
    """The error that closed the latch of a meta device that one of a call's arguments is on."""
    if not _meta:
        return None
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            device = _device_of(item)
            function = _meta.get(_address(device)) if device else None
            if function is not None and function.error is not None:
                return function.error
    return None


def _device_of(value: Any) -> Any:
    """The device behind a handle, None if it has none."""
    if not isinstance(value, ffi.CData) or not value:
        return None
    name = ffi.typeof(value).cname
    if name == "struct ggml_backend_device *":
        return value
    if name == "struct ggml_backend *":
        return lib.ggml_backend_get_device(value)
    if name == "struct ggml_backend_buffer_type *":
        return lib.ggml_backend_buft_get_device(value)
    if name == "struct ggml_backend_buffer *":
        return _device_of(lib.ggml_backend_buffer_get_type(value))
    if name == "struct ggml_tensor *":
        base = value.view_src or value
        return _device_of(base.buffer)
    if name == "struct ggml_cgraph *":
        for index in range(lib.ggml_graph_n_nodes(value)):
            node = lib.ggml_graph_node(value, index)
            for tensor in (node, *(source for source in node.src if source)):
                found = _device_of(tensor)
                if found and _address(found) in _meta:
                    return found
    return None


if not lib.ggml_cffi_install():
    raise ImportError("ggml_cffi: no functions to call at a fork or at the end can be registered")
load_backends()  # what ggml says of them goes to our log
atexit.register(flush)  # a line that ggml has only begun
