"""Buffers: memory of a device, and a buffer that is made of others."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Sequence

from . import _callbacks, capi
from ._handles import Owned, address, raw, renew_after_fork, while_it_stays
from .capi import types
from .enums import ggml_backend_buffer_usage

__all__ = ["Buffer", "MultiBuffer"]

BUFFER = "struct ggml_backend_buffer *"

_lock = threading.RLock()
renew_after_fork(globals(), "_lock")

_taken: set[int] = set()
"""Addresses of all buffers that belong to a `Buffer`, by itself or through a `MultiBuffer`."""


class Buffer(Owned[types.ggml_backend_buffer]):
    """Memory of a device, freed with this object.

    Takes over the pointer that `capi.ggml_backend_alloc_ctx_tensors` and its like return; `keep` is
    kept alive until it is freed. Raises TypeError for anything else and ValueError for None, NULL,
    a buffer that belongs to another Buffer and `keep` that is closed. Whether ggml has freed what a
    pointer points to nobody knows: one that is stale must not come here, nor to `capi`.
    """

    def __init__(self, handle: types.ggml_backend_buffer, *, keep: tuple[object, ...] = ()) -> None:
        pointer = raw(handle, BUFFER, "Buffer: handle")
        self._parent: weakref.ref[MultiBuffer] | None = None
        self._addresses = _take(pointer)
        try:
            super().__init__(pointer, functools.partial(_free, self._addresses), keep)
        except ValueError:  # one of `keep` is closed
            with _lock:
                _taken.difference_update(self._addresses)
            raise

    @property
    @while_it_stays
    def size(self) -> int:
        """Bytes; of a meta device's buffer the most that one of its devices has."""
        return capi.ggml_backend_buffer_get_size(self.handle)

    @property
    @while_it_stays
    def usage(self) -> ggml_backend_buffer_usage:
        """What it is for: ANY, WEIGHTS or COMPUTE."""
        return capi.ggml_backend_buffer_get_usage(self.handle)

    @while_it_stays
    def set_usage(self, usage: int) -> None:
        """Say what it is for; reaches the buffers that it is made of."""
        capi.ggml_backend_buffer_set_usage(self.handle, usage)

    @while_it_stays
    def clear(self, value: int = 0) -> None:
        """Set every byte to `value`. Raises ValueError for no byte, TypeError for no int."""
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"value is {value!r}, expected an int from 0 to 255") from None
        if not 0 <= value <= 255:
            raise ValueError(f"value is {value}, expected 0 to 255")
        capi.ggml_backend_buffer_clear(self.handle, value)

    @property
    def closed(self) -> bool:
        """Whether it is closed or spent, and cannot be used any more."""
        return self.spent or super().closed

    @property
    def spent(self) -> bool:
        """Whether a `MultiBuffer` has taken it over: it is used and freed through that one."""
        return self._parent is not None

    def close(self) -> None:
        """Free it. Raises ValueError for a buffer that an open `MultiBuffer` has taken over."""
        parent = self._parent() if self._parent is not None else None
        if parent is not None and parent._finalizer.alive:
            raise ValueError(f"the {type(self).__name__} {self._gone()}, which will free it")
        self._close()

    def __exit__(self, *exc_info: object) -> None:
        """Free it, unless a `MultiBuffer` has taken it over."""
        if not self.spent:
            self.close()

    def _gone(self) -> str:
        return "belongs to a MultiBuffer" if self.spent else "is closed"

    def __repr__(self) -> str:
        try:
            state = f"of {self.size} bytes"
        except ValueError:  # closed, were it this moment
            state = self._gone()
        return f"<{type(self).__name__} {state}>"


class MultiBuffer(Buffer):
    """A buffer that is made of others, which it takes over: their objects are spent from then on.

    Takes `Buffer` objects and pointers of buffers that belong to nobody. Its size is the sum of
    theirs; clearing it and setting its usage reach them all. It is a container: no tensor can be
    allocated in it.

    Raises ValueError for None, an empty list, and a buffer that is named twice, closed, or taken
    over before, and TypeError for what is no list of buffers; then it takes none over.
    """

    def __init__(self, buffers: Sequence[Buffer | types.ggml_backend_buffer]) -> None:
        with _lock:
            given: object = buffers
            if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
                buffers = list(given)  # once: it might not give the same again
            pointers = _pointers(buffers)
            handle = capi.ggml_backend_multi_buffer_alloc_buffer(pointers)
            children = tuple(item for item in buffers if isinstance(item, Buffer))
            super().__init__(handle, keep=children)
            for item, pointer in zip(buffers, pointers, strict=True):
                if isinstance(item, Buffer):
                    item._parent = weakref.ref(self)
                    item._resource.free = None
                    self._addresses |= item._addresses
                else:
                    self._addresses |= _take(pointer)
            self._buffers = children

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The objects that it has taken over, spent."""
        return self._buffers


def _pointers(buffers: object) -> list[types.ggml_backend_buffer]:
    where = "MultiBuffer: buffers"
    if buffers is None:
        raise ValueError(f"{where} must not be None")
    if isinstance(buffers, (str, bytes)) or not isinstance(buffers, Sequence):
        raise TypeError(f"{where} is {buffers!r}, expected a sequence of buffers")
    if not buffers:
        raise ValueError(f"{where} is empty, expected at least one buffer")
    pointers: list[types.ggml_backend_buffer] = []
    seen: dict[int, int] = {}
    for i, item in enumerate(buffers):
        pointer = raw(item, BUFFER, f"{where}[{i}]")
        key = address(pointer)
        if key in seen:
            raise ValueError(f"{where}[{seen[key]}] and {where}[{i}] are the same buffer")
        if key in _taken and not isinstance(item, Buffer):
            raise ValueError(f"{where}[{i}] belongs to a Buffer, give that one")
        seen[key] = i
        pointers.append(pointer)
    return pointers


def _take(pointer: types.ggml_backend_buffer) -> set[int]:
    key = address(pointer)
    with _lock:
        if key in _taken:
            raise ValueError("the buffer belongs to another Buffer, which will free it")
        _taken.add(key)
    return {key}


def _free(addresses: set[int], handle: types.ggml_backend_buffer) -> None:
    with _lock:  # before the memory is free: another buffer may get the same address at once
        _taken.difference_update(addresses)
    newest = _callbacks.newest()
    capi.ggml_backend_buffer_free(handle)
    for child in addresses - {address(handle)}:
        _callbacks.release(child, newest)
