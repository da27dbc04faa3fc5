"""Contexts: where tensors are described, and the memory of those that are no results."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import _runtime, capi
from ._handles import Loans, Owned, address, addresses, renew_after_fork
from ._loader import Room, leaves, lib
from ._memory import raises_memory_error
from ._placement import check_weights, reorders
from .backend import Backend
from .capi import types
from .device import Device, device
from .dtypes import as_array, element_type, is_quantized, type_name, types_by_name
from .enums import ggml_backend_buffer_usage, ggml_backend_dev_type, ggml_type

if TYPE_CHECKING:
    from ._dlpack import SupportsDLPack
    from .tensor import Tensor

__all__ = ["Context"]

MAX_DIMS = 4
WEIGHTS = ggml_backend_buffer_usage.GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_FIRST_ARENA, _LARGEST_ARENA = 64, 1 << 10  # calls that an arena is made for
_SPARE = 16  # tensors that an operation may make at most
_CPU = ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
_LEAF, _INPUT, _RESULT = range(3)  # as building.hpp numbers them
_TOO_LARGE = 1 << 60
_Result = TypeVar("_Result")
_numbers = itertools.count()


class _Arenas(list[types.ggml_context]):
    """Arenas of ggml's, where tensors of a kind are described: another one if the newest is full.

    The `room`, which is the context's lock too, knows how many calls the newest has room for.
    """

    __slots__ = ("kind", "newest", "room", "wanted")

    def __init__(self, room: Any, kind: int, wanted: int = 1) -> None:
        self.room = room
        self.kind = kind
        self.wanted = wanted  # tensors that a call makes at most
        self.newest: types.ggml_context | None = None

    def begin_anew(self) -> None:
        """Describe what comes next in another arena; with the room's lock."""
        if self.newest is not None:
            self.room.open(self.kind, self.newest, 0)
            self.newest = None

    def take(self) -> types.ggml_context:
        """The arena for one call more; with the room's lock."""
        if (arena := self.room.take(self.kind)) is None:
            self._make_room()
            arena = self.room.take(self.kind)
        found: types.ggml_context = arena
        return found

    def _make_room(self) -> None:
        size = capi.ggml_tensor_overhead()
        left = 0
        if self.newest is not None:
            free = capi.ggml_get_mem_size(self.newest) - capi.ggml_used_mem(self.newest)
            left = free // (self.wanted * size)
        if not left:
            left = min(_FIRST_ARENA << len(self), _LARGEST_ARENA)
            self.newest = capi.ggml_init(mem_size=left * self.wanted * size, no_alloc=True)
            self.append(self.newest)
        self.room.open(self.kind, self.newest, left)


class _Store:
    """What a context has of ggml: arenas of tensors, and buffers with their numbers."""

    def __init__(self, room: Any) -> None:
        self.room = room
        self.leaves = _Arenas(room, _LEAF)
        self.inputs = _Arenas(room, _INPUT)
        self.results = _Arenas(room, _RESULT, _SPARE)
        self.buffers: list[types.ggml_backend_buffer] = []
        self.keep: list[object] = []  # memory that buffers are made on, for as long as they are
        _stores.add(self)

    def free(self) -> None:
        with self.room:  # an operation that another thread has begun is made first
            self.room.shut()
            for buffer in self.buffers:
                capi.ggml_backend_buffer_free(buffer)
            self.keep.clear()
            for arena in [*self.results, *self.inputs, *self.leaves]:
                capi.ggml_free(arena)


_stores: weakref.WeakSet[_Store] = weakref.WeakSet()


def _renew() -> None:
    """In a forked child: what was made before is refused there; a thread may have had the lock."""
    for store in _stores:
        store.room.renew()


os.register_at_fork(after_in_child=_renew)


class Context(Owned[_Store]):
    """Where tensors are described; grows as it needs to.

    `tensor` and `from_numpy` make tensors, `allocate` gives them memory on a device. Operations on
    them (`ops`) make tensors here too, which get memory where a graph is compiled; those on tensors
    of several contexts in the newest of them, which the others stay open for, or in the `ctx` that
    is given; but where one of the contexts needs another one already, never in that.

    Closing it closes what was compiled from it, and its tensors are gone. While an array of NumPy's
    shares memory with one of its tensors, closing raises BufferError. Several threads may use a
    context: each waits for the others.
    """

    def __init__(self) -> None:
        self._lock = Room()
        store = _Store(self._lock)
        super().__init__(store, _Store.free)
        self._leaves, self._inputs, self._results = store.leaves, store.inputs, store.results
        self._number = next(_numbers)  # older ones have smaller ones
        self._needs: set[Context] = set()  # contexts whose tensors ours were made from
        self._ndims: dict[int, int] = {}  # of leaves, where it is not what ggml counts
        self._pending: dict[int, npt.NDArray[Any]] = {}  # numbers of tensors without memory
        self._reordered = False  # some of its tensors are where weights have another order
        self._lent = Loans(self._resource)  # views of our memory that others hold
        self._allocating = False

    def tensor(
        self, shape: int | Sequence[int], dtype: object = "f32", name: str | None = None
    ) -> Tensor:
        """A tensor without memory yet, of NumPy's `shape`: the innermost axis last, 0 to 4 axes.

        `dtype` is what `dtypes.element_type` takes: a ggml type, its name or a NumPy dtype.
        `allocate` gives it memory; without, it is an input of the graphs that it is part of. What
        is in that memory is undefined until it is written: ``tensor[...] = 0`` clears it.

        Raises ValueError for a shape of more than 4 axes or with negative ones, and where the last
        axis is no multiple of the type's block; TypeError for what is no shape.
        """
        made: Tensor | None = _new_leaf(self, self._lock, _LEAF, shape, dtype)
        if made is None:  # to be refused, or to be looked at more closely
            return self._leaf(self._leaves, shape, dtype, name)
        if name is not None:
            made.name = name
        self._note_ndim(made)
        return made

    def _note_ndim(self, made: Tensor) -> None:
        """Axes of length 1 in front, and that there is none, ggml does not tell."""
        n = made._ndim
        if n != 1 and (not n or made._ne[n - 1] == 1):
            self._ndims[made._address] = n

    def input(self, shape: int | Sequence[int], dtype: object = "f32", name: str = "") -> Tensor:
        """A tensor that never has memory of its own: an input of the graphs that it is part of.

        Its numbers are given at each run of a compiled graph, by its name. Raises as `tensor` does.
        """
        return self._leaf(self._inputs, shape, dtype, name)

    def _leaf(
        self, arenas: _Arenas, shape: int | Sequence[int], dtype: object, name: str | None
    ) -> Tensor:
        kind = element_type(dtype)
        wanted = shape_of(shape)
        block = capi.ggml_blck_size(kind)
        if wanted and wanted[-1] % block:
            raise ValueError(
                f"shape is {wanted}: its last axis must be a multiple of {block}, a block of "
                f"{type_name(kind)}"
            )
        self.handle  # noqa: B018 # raises where it is closed, and after a fork
        with self._lock:
            self.handle  # noqa: B018 # nor closed since
            handle = capi.ggml_new_tensor_4d(arenas.take(), kind, *ne_of(wanted))
            if name is not None:
                capi.ggml_set_name(handle, name)
            made = _tensor.Tensor(handle, self, len(wanted))
            self._note_ndim(made)
        return made

    def from_numpy(
        self, array: npt.ArrayLike, name: str | None = None, dtype: object = None
    ) -> Tensor:
        """A tensor with the shape and the numbers of `array`, which it has once it has memory.

        `dtype` is the array's by default; with float64, which is NumPy's default, ggml computes
        little: ``dtype="f32"``. Numbers are converted, and quantised, as `Tensor.set` does. An
        array of uint8 for a quantised type has its blocks, as `quantize` gives them: of shape
        ``(..., bytes of a row)``. The array is not copied before: do not change it until then. In
        a graph that is compiled before `allocate` it is a constant of that graph, with memory of
        its own there.

        Raises ValueError, TypeError and OverflowError as `tensor` and `Tensor.set` do.
        """
        numbers = as_array(array)
        shape = numbers.shape
        if dtype is not None and numbers.dtype == np.uint8 and shape:
            shape = _shape_of_blocks(shape, element_type(dtype))
        tensor = self.tensor(shape, numbers.dtype if dtype is None else dtype, name)
        _tensor.check_numbers(tensor, numbers, "same_kind")
        self._pending[tensor._address] = numbers
        return tensor

    def from_dlpack(self, source: SupportsDLPack, name: str | None = None) -> Tensor:
        """A tensor with the numbers of an array of another library, by the DLPack protocol.

        It has them once it has memory, as with `from_numpy`; bfloat16 too. Raises TypeError for
        what does not know the protocol, BufferError for an array that is not in the CPU's memory
        and where the library refuses, and ValueError for numbers that ggml has no type for.
        """
        from ._dlpack import take

        if not hasattr(source, "__dlpack__"):
            raise TypeError(
                f"source is a {type(source).__name__}, expected an object with __dlpack__"
            )
        return self.from_numpy(take(source), name)

    def allocate(
        self,
        target: Device | Backend | str,
        usage: ggml_backend_buffer_usage | int = WEIGHTS,
        buffer_type: str | None = None,
    ) -> int:
        """Give memory on a device to all tensors that have none, and write what `from_numpy` took.

        What is in the memory of the others is undefined, not zero, and may be NaN: clear what is
        read before it is written, such as a cache of keys and values.

        Results of operations are left out: a compiled graph has memory for those. `buffer_type`
        names another than the device's own (`Device.buffer_types`). Gives the bytes allocated, 0
        where all tensors have memory.

        Memory that keeps weights in an order of its own (CPU_REPACK, AMX) is for `mul_mat` and
        `mul_mat_id` alone, and is written as a whole: its numbers cannot be read, nor viewed.

        Raises MemoryError where there is not enough, SplitError where the split function of a meta
        device fails, ValueError for a tensor that such memory does not take
        (`Device.supports_weight`), and what `Tensor.set` raises over the numbers of `from_numpy`.
        Then no tensor has memory that had none before, and no numbers are lost.
        """
        target = device(target) if isinstance(target, str) else target
        where = target.device if isinstance(target, Backend) else target
        if not isinstance(where, Device):
            raise TypeError(f"target is {target!r}, expected a Device, a Backend or a name")
        kind = where.buffer_type(buffer_type)
        return self._while_allocating(lambda: self._allocate(where, kind, usage))

    def _allocate(
        self,
        where: Device,
        kind: types.ggml_backend_buffer_type,
        usage: ggml_backend_buffer_usage | int,
    ) -> int:
        store = self.handle
        done: list[types.ggml_backend_buffer] = []
        lent = self._lent.count
        if reorders(kind):
            bare = (t for a in store.leaves for t in _tensors(a) if _tensor.is_without_memory(t))
            check_weights(where.handle, kind, map(_described, bare))
        try:
            for arena in store.leaves:
                # ggml refuses where all of them are empty
                if any(
                    _tensor.is_without_memory(t) and not capi.ggml_is_empty(t)
                    for t in _tensors(arena)
                ):
                    with raises_memory_error():
                        done.append(capi.ggml_backend_alloc_ctx_tensors_from_buft(arena, kind))
                    capi.ggml_backend_buffer_set_usage(done[-1], usage)
                    if where.type == _CPU:
                        base = capi.ggml_backend_buffer_get_base(done[-1])
                        size = capi.ggml_backend_buffer_get_size(done[-1])
                        lib.ggml_cffi_use_large_pages(base, size)
            written = self._write_pending()
        except BaseException:
            self._lent.views.clear()  # of what has been written
            for arena, buffer in ((a, b) for a in store.leaves for b in done):
                lib.ggml_cffi_forget_buffer(arena, buffer)
            if self._lent.count > lent:  # arrays that were taken meanwhile: freed with the rest
                store.buffers += done
            else:
                for buffer in done:
                    capi.ggml_backend_buffer_free(buffer)
            raise
        store.buffers += done
        # a meta device gives all tensors of an arena memory anew
        store.leaves.begin_anew()
        self._reordered |= bool(done) and reorders(kind)
        for tensor in written:
            del self._pending[tensor._address]
        return sum(capi.ggml_backend_buffer_get_size(buffer) for buffer in done)

    def _write_pending(self) -> list[Tensor]:
        """Write what `from_numpy` took for tensors that have memory now."""
        written = []
        for arena in self.handle.leaves:
            for handle in _tensors(arena):
                numbers = self._pending.get(address(handle))
                if numbers is not None:
                    tensor = _tensor.Tensor(handle, self, numbers.ndim)
                    tensor.set(numbers)
                    written.append(tensor)
        return written

    def close(self) -> None:
        """Free it, and before that what was compiled from it. Closing twice is fine.

        Raises BufferError, and stays open, while arrays share its memory or that of a context which
        needs this one, and ValueError from a split function that its tensors are asked of.
        """
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._allocating:  # by this thread, whose split function has led here
                raise ValueError("the Context's tensors are being allocated: it stays open")
            super()._close()
            self._lent.views.clear()  # what a signal's handler has looked at meanwhile

    def _while_allocating(self, function: Callable[[], _Result]) -> _Result:
        """Call what gives tensors memory, with the lock: nobody can close it meanwhile."""
        with self._lock:
            if self._allocating:
                raise ValueError("the Context's tensors are being allocated")
            try:
                self._allocating = True
                return function()
            finally:
                self._allocating = False

    def _check_unshared(self) -> None:
        with self._lock:
            self._lent.views.clear()
        if self._lent.count and not self.closed:
            raise BufferError(
                f"arrays share the memory of {self._lent.count} of the Context's tensors: it stays "
                "open"
            )

    def _has_input(self, tensor: Tensor) -> bool:
        """Whether it is of those that `input` has made."""
        for arena in self._inputs:
            start = address(capi.ggml_get_mem_buffer(arena))
            if start <= tensor._address < start + capi.ggml_get_mem_size(arena):
                return True
        return False

    def _arenas(self) -> list[types.ggml_context]:
        return [*self._leaves, *self._inputs, *self._results]

    def _room(self) -> types.ggml_context:
        """Where an operation makes its results. Raises where it is closed, and after a fork."""
        self.handle  # noqa: B018
        return self._results.take()

    def _need(self, others: Iterator[Context]) -> None:
        """Keep other contexts for as long as this one: its tensors are made from theirs."""
        for other in others:
            if other is not self and other not in self._needs:
                self._depend_on(other)  # raises where that is closed
                self._needs.add(other)

    def __repr__(self) -> str:
        return f"<Context {'closed' if self.closed else f'at {id(self):#x}'}>"


_placing = threading.RLock()  # nobody needs one meanwhile, so that none comes to need itself
renew_after_fork(globals(), "_placing")


def place(contexts: Iterable[Context], wanted: Context | None = None) -> Context:
    """Where the result of an operation on tensors of these contexts goes, and keep the others.

    One that none of the others needs, so that none ever needs itself: the one that is `wanted`, or
    the newest. So it is a request's that goes with what is made from a model's, not the model's.
    """
    distinct: list[Context] = list(dict.fromkeys([*contexts, *([wanted] if wanted else [])]))
    if len(distinct) == 1:
        return distinct[0]
    with _placing:
        free = [
            one
            for one in distinct
            if not any(other is not one and _reaches(other, one) for other in distinct)
        ]
        found = wanted if wanted in free else max(free, key=lambda one: one._number)
        assert found is not None
        found._need(iter(distinct))
        return found


def reachable(contexts: Iterable[Context]) -> Iterator[Context]:
    """These contexts and those that they need, each once."""
    seen: set[Context] = set()
    todo = list(contexts)
    while todo:
        context = todo.pop()
        if context not in seen:
            seen.add(context)
            yield context
            todo += context._needs


def needed_first(contexts: Iterable[Context]) -> list[Context]:
    """These contexts and those that they need, each before who needs it.

    Closing takes their locks in this order, and so has everybody who takes several.
    """
    found = list(reachable(contexts))
    return sorted(found, key=lambda one: (len(list(reachable([one]))), one._number))


def homes_of(
    contexts: Sequence[Context], handles: Sequence[types.ggml_tensor]
) -> Iterator[Context]:
    """Which context each of these tensors is described in: one of these or of those they need."""
    known = list(reachable(contexts))
    if len(known) == 1:
        yield from known * len(handles)
        return
    arenas = [
        (address(capi.ggml_get_mem_buffer(arena)), capi.ggml_get_mem_size(arena), one)
        for one in known
        for arena in one._arenas()
    ]
    arenas.sort(key=lambda arena: arena[0])
    starts = [start for start, _, _ in arenas]
    for where in addresses(handles):  # in an arena, which is one piece of memory
        start, size, home = arenas[bisect.bisect(starts, where) - 1]
        yield home if start <= where < start + size else known[0]  # of somebody's who uses `capi`


def _reaches(context: Context, other: Context) -> bool:
    return any(one is other for one in reachable([context]))


def _tensors(arena: types.ggml_context) -> Iterator[types.ggml_tensor]:
    tensor = capi.ggml_get_first_tensor(arena)
    while tensor is not None:
        yield tensor
        tensor = capi.ggml_get_next_tensor(arena, tensor)


def _described(handle: types.ggml_tensor) -> tuple[str, ggml_type, tuple[int, ...]]:
    return capi.ggml_get_name(handle) or "", ggml_type(handle.type), tuple(handle.ne)


def _shape_of_blocks(shape: tuple[int, ...], kind: ggml_type) -> tuple[int, ...]:
    """The shape of a tensor of which bytes are given: blocks, if its type is quantised."""
    if not is_quantized(kind):
        return shape
    size = capi.ggml_type_size(kind)
    if shape[-1] % size:
        raise ValueError(
            f"the array has rows of {shape[-1]} bytes, expected a multiple of {size}: blocks of "
            f"{type_name(kind)}; numbers are converted before, by array.astype(np.float32)"
        )
    return (*shape[:-1], shape[-1] // size * capi.ggml_blck_size(kind))


def shape_of(shape: object) -> tuple[int, ...]:
    """A shape as a tuple. Raises TypeError and ValueError for what is none of at most 4 axes."""
    try:
        given = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)  # type: ignore[arg-type]
        found = tuple(n.__index__() for n in given)
    except (TypeError, AttributeError):
        raise TypeError(f"shape is {shape!r}, expected integers") from None
    if len(found) > MAX_DIMS:
        raise ValueError(f"shape is {found}, expected at most {MAX_DIMS} axes")
    if any(n < 0 for n in found) or math.prod(n or 1 for n in found) >= _TOO_LARGE:
        raise ValueError(f"shape is {found}: an axis is negative, or all are too large")
    return found


def ne_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """In ggml's order: the innermost axis first."""
    n0, n1, n2, n3 = [*reversed(shape), 1, 1, 1, 1][:MAX_DIMS]
    return n0, n1, n2, n3


from . import tensor as _tensor  # noqa: E402 # it needs what is above

_new_leaf = leaves(
    _runtime.raising("ggml_new_tensor_4d", _runtime.spec("ggml_new_tensor_4d").fails),
    {name: int(kind) for name, kind in types_by_name().items()},
)
