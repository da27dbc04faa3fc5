"""The base of all objects that own, or borrow, something of ggml.

An owner is freed by `close()`, at the end of a `with` block, or when nobody refers to it any more;
never at interpreter exit, where the order is anybody's guess and the system takes all back anyway.
Whatever an owner needs is kept alive until it is freed, in whatever order Python collects garbage.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, cast

from ._loader import ffi, lib

Handle = Any
"""A pointer of cffi's, of whatever type."""

logger = logging.getLogger("ggml_cffi")
logger.addHandler(logging.NullHandler())  # without any handler, logging prints to stderr

_Self = TypeVar("_Self", bound="Closing")
_Handle = TypeVar("_Handle")
"""What is pointed to, one of `_gen.types`; a pointer of cffi's at run time."""


def raw(value: object, kind: str, where: str) -> Any:
    """The pointer of type `kind` behind an object of this package, or that pointer itself.

    Raises TypeError for anything else, and ValueError for None, NULL and what is closed.
    """
    if isinstance(value, (Owned, Borrowed)):
        value = value.handle
    if value is None or (isinstance(value, ffi.CData) and value == ffi.NULL):
        raise ValueError(f"{where} must not be None or NULL")
    if not isinstance(value, ffi.CData):
        raise TypeError(f"{where} is {value!r} ({type(value).__name__}), expected a {kind}")
    found = ffi.typeof(value)
    if found is not ffi.typeof(kind):
        raise TypeError(f"{where} is a {found.cname}, expected a {kind}")
    return value


def address(handle: object) -> int:
    """The address that a pointer holds."""
    pointer: Any = handle
    return int(ffi.cast("uintptr_t", pointer))


def addresses(tensors: Sequence[Any]) -> list[int]:
    """The addresses of many tensors, at once."""
    array: Any = ffi.new("struct ggml_tensor *[]", list(tensors))
    return list(ffi.unpack(ffi.cast("uintptr_t *", array), len(tensors)))


def in_use(handle: object) -> bool:
    """Whether a computation uses it, so that freeing it is refused.

    What is no pointer says so itself, with a method of that name.
    """
    if isinstance(handle, ffi.CData):
        return bool(lib.ggml_cffi_in_use(handle))
    asked = getattr(handle, "in_use", None)
    return asked is not None and bool(asked())


class Closing:
    """What can be closed is a context manager, which closes it in the end.

    Entering what is closed raises ValueError. After an exception, whose traceback may keep arrays
    that share its memory, it is closed once those are gone.
    """

    @property
    def closed(self) -> bool:
        """Whether it is closed, and cannot be used any more."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        raise NotImplementedError

    def _gone(self) -> str:
        """What became of it, for an error message."""
        return "is closed"

    def __enter__(self: _Self) -> _Self:
        if self.closed:
            raise ValueError(f"the {type(self).__name__} {self._gone()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BufferError:
            if error is None:
                raise


def _check_process(thing: object, pid: int) -> None:
    """What a fork has copied is refused: threads, locks and devices of its own are not there."""
    if pid != os.getpid():
        name = type(thing).__name__
        raise RuntimeError(f"the {name} was made before a fork, by process {pid}")


class Borrowed(Generic[_Handle]):
    """Something of ggml that is never freed, or that belongs to another object."""

    def __init__(self, handle: _Handle, keep: object = None) -> None:
        self._pid = os.getpid()
        self._handle = handle
        self._address = address(handle)
        self._keep = keep  # what the handle belongs to

    @property
    def handle(self) -> _Handle:
        """The pointer, for `capi`. Raises RuntimeError after a fork, in the child."""
        _check_process(self, self._pid)
        return self._handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Borrowed) and self._address == other._address

    def __hash__(self) -> int:
        return hash(self._address)


class _Resource:
    """What there is to free, apart from the object that stands for it.

    Counts its users: the object, and the resources that need it. So it is freed after those, in
    whatever order, or circle, Python collects the objects.
    """

    __slots__ = ("free", "handle", "keep", "parents", "pid", "users")

    def __init__(
        self, handle: Any, free: Callable[[Any], object], keep: tuple[object, ...]
    ) -> None:
        self.handle = handle
        self.free: Callable[[Any], object] | None = free
        self.pid = os.getpid()
        self.users = 1
        owned = [item for item in keep if isinstance(item, Owned)]
        self.parents = [item._resource for item in owned]
        self.keep = [item for item in keep if not isinstance(item, Owned)]
        with _lock:
            for item in owned:
                item._check_open()  # what has no user any more has been freed
            for parent in self.parents:
                parent.users += 1

    def drop(self, refusable: bool = False) -> None:
        """One user less; the last one frees it. Raises what freeing it raised.

        Where that was refused, because a computation uses it, nothing has been done: with
        `refusable`, the user stays one.
        """
        with _lock:
            self.users -= 1
            if self.users:
                return
        # what a fork has copied belongs to the process that made it
        if self.free is not None and self.pid == os.getpid():
            try:
                self.free(self.handle)
            except BaseException as error:
                if refusable and isinstance(error, ValueError) and in_use(self.handle):
                    with _lock:
                        self.users += 1
                    raise
                # It is lost: nobody can use or free it any more. But what is left of it may go on
                # by itself, on threads or streams of its own, and refers to what it needs: that
                # stays for the life of the process, the memory of Python's as well.
                _lost.append(self)
                raise
        _each(parent.drop for parent in self.parents)


class Loans:
    """Memory of a resource that others share meanwhile: it is freed after that only."""

    __slots__ = ("_resource", "count", "views")

    def __init__(self, resource: _Resource | None = None) -> None:
        self._resource = resource
        self.count = 0
        #: Arrays that tensors give views of; each object knows its own, and takes it along.
        self.views: dict[int, object] = {}

    def begin(self) -> None:
        """One more shares it."""
        with _lock:
            self.count += 1
            if self._resource is not None:
                self._resource.users += 1

    def end(self, _: object = None) -> None:
        """One less; raises nothing, for nobody could catch it."""
        if sys.is_finalizing():
            return
        resource = self._resource
        with _lock:
            self.count -= 1
            if resource is None:
                return
            if resource.users > 1:
                resource.users -= 1
                return
        _collected(resource)


@contextlib.contextmanager
def holding(owners: Iterable[Owned[Any]]) -> Iterator[None]:
    """Whoever closes one of these meanwhile, they are freed only after that.

    Raises ValueError for what is closed.
    """
    held: list[_Resource] = []
    try:
        with _lock:
            for one in owners:
                one._check_open()
                one._resource.users += 1
                held.append(one._resource)
        yield
    finally:
        _each([resource.drop for resource in held])


_Method = TypeVar("_Method", bound=Callable[..., Any])


def while_it_stays(method: _Method) -> _Method:
    """A method of an owner that is freed after it, should another thread close that meanwhile."""

    @functools.wraps(method)
    def held(self: Owned[Any], *args: Any, **kwargs: Any) -> Any:
        self.handle  # noqa: B018 # raises where it is closed, and after a fork
        with holding((self,)):
            return method(self, *args, **kwargs)

    return cast("_Method", held)


def renew_after_fork(module: dict[str, Any], *locks: str) -> None:
    """Give a module, by its globals, new locks of these names in a forked child.

    A thread of the parent's may have held them: nobody in the child would release them.
    """

    def renew() -> None:
        for name in locks:
            module[name] = threading.RLock()

    os.register_at_fork(after_in_child=renew)


_lock = threading.RLock()  # the collector may drop one while another is dropped
renew_after_fork(globals(), "_lock")
_lost: list[_Resource] = []


def _each(steps: Iterable[Callable[[], object]]) -> None:
    """Take all steps, whatever one of them raises; then raise the first exception, log the others.

    An interrupt comes before any exception that is none.
    """
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    if errors:
        errors.sort(key=lambda error: isinstance(error, Exception))
        for other in errors[1:]:
            _log(other)
        try:
            raise errors[0]
        finally:
            errors.clear()  # a traceback has this frame: no circle for the collector


def _log(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # nobody could catch what a failing filter raises
        logger.error("a handle could not be freed; it is lost, with what it needs: %s", error)


def _collected(resource: _Resource) -> None:
    """Nobody refers to the object any more; nor could anybody catch an exception."""
    lib.ggml_cffi_keep_error()  # of lib: this may come before somebody looks at it
    try:
        resource.drop()
    except Exception as error:  # an interrupt is the interpreter's to report
        _log(error)
    finally:
        lib.ggml_cffi_give_back_error()


class Owned(Closing, Generic[_Handle]):
    """Something of ggml that belongs to this object: `free(handle)` is called once.

    `keep` are the objects that it needs: they are freed after it, and closing one of them closes
    this one first. Raises ValueError where one of them is closed: then nothing is taken over.

    If `free` raises, as it does where ggml aborts while it frees something, the object is closed
    all the same, and what it stands for is lost: never freed, nor is what it needs. `close()`
    raises the exception; the garbage collector logs it as an error of the logger ``ggml_cffi``.
    """

    def __init__(
        self, handle: _Handle, free: Callable[[_Handle], object], keep: tuple[object, ...] = ()
    ) -> None:
        self._resource = _Resource(handle, free, keep)
        self._begin()
        self._children: weakref.WeakSet[Owned[Any]] = weakref.WeakSet()
        with _lock:  # while nobody lists them
            for parent in keep:
                if isinstance(parent, Owned):
                    parent._children.add(self)

    def _begin(self) -> None:
        """From now on the garbage collector frees it."""
        self._finalizer = weakref.finalize(self, _collected, self._resource)
        self._finalizer.atexit = False

    @property
    def handle(self) -> _Handle:
        """The pointer, for `capi`.

        Raises ValueError once the object is closed, and RuntimeError after a fork, in the child.
        """
        self._check_open()
        _check_process(self, self._resource.pid)
        handle: _Handle = self._resource.handle
        return handle

    def __copy__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied: what it owns is freed once")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: it is of this process")

    def _depend_on(self, parent: Owned[Any]) -> None:
        """Need one more object, as if it were among `keep`; it must not need this one."""
        with _lock:
            parent._check_open()
            self._check_open()
            self._resource.parents.append(parent._resource)
            parent._resource.users += 1
            parent._children.add(self)

    def _all_children(self) -> list[Owned[Any]]:
        with _lock:  # while nobody adds one
            return list(self._children)

    @property
    def closed(self) -> bool:
        """Whether the object is closed, and cannot be used any more."""
        return not self._finalizer.alive

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"the {type(self).__name__} {self._gone()}")

    def close(self) -> None:
        """Free it, and before that all that depends on it. Closing twice is fine.

        Raises the first exception of those that freeing them raised; all are closed then, but for
        what a computation uses: that is a ValueError, and it stays as it is, with the memory that
        it needs. Where arrays share the memory of one of them it is a BufferError, and all stay
        open.
        """
        self._close()

    def _close(self) -> None:
        for one in self._dependents():
            one._check_unshared()
        _each([*(child._close for child in self._all_children()), self._drop])

    def _check_unshared(self) -> None:
        """Raise BufferError where others share its memory, and it must stay open for that."""

    def _dependents(self) -> list[Owned[Any]]:
        """All that closing it closes, and itself."""
        found: list[Owned[Any]] = [self]
        seen = {id(self)}
        for one in found:
            more = [child for child in one._all_children() if id(child) not in seen]
            seen.update(map(id, more))
            found += more
        return found

    def _drop(self) -> None:
        if self._finalizer.detach() is not None:  # by one thread only
            try:
                self._resource.drop(refusable=True)
            except ValueError:
                if self._resource.users:
                    self._begin()
                raise
