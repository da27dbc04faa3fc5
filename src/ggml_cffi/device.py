"""Devices that ggml can compute on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import capi
from ._handles import Borrowed, address, raw
from ._loader import ffi, lib
from ._locks import with_all
from ._runtime import helper, invoke
from .capi import types
from .enums import ggml_backend_dev_type

if TYPE_CHECKING:
    from .backend import Backend

__all__ = ["Device", "Memory", "device", "devices"]

DEVICE = "struct ggml_backend_device *"
TENSOR = "struct ggml_tensor *"

_Result = TypeVar("_Result")


class Memory(NamedTuple):
    """Bytes of a device's memory."""

    free: int
    total: int


class Shared:
    """The turn to compute on a device whose graphs share what ggml knows of them.

    `turns` counts those in which a graph is computed, from when they begin: who had the last one
    finds all as it was left. `writes` is held for each write into what is no graph's own, within a
    turn or not.
    """

    def __init__(self, device: types.ggml_backend_device) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self.turns: int = 0
        self.writes: threading.RLock = threading.RLock()
        _shared[address(device)] = self

    def is_within(self, kernels: int) -> bool:
        """Whether this is called by what the device computes: an operation, or this thread's."""
        return self._lock.locked() and (bool(kernels) or self._owner == threading.get_ident())

    def take(self, function: Callable[[], _Result], *, computes: bool = True) -> _Result:
        """Wait for the turn, and call it; what does not compute leaves all as it was."""

        def owned() -> _Result:
            try:
                self._owner = threading.get_ident()
                self.turns += computes
                return function()
            finally:
                self._owner = 0

        return with_all((self._lock,), owned)


_shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()


def shared_of(device: types.ggml_backend_device | None) -> Shared | None:
    """The turn to compute on a device; None of one whose graphs share nothing, or that is gone."""
    return None if device is None else _shared.get(address(device))


class Device(Borrowed[types.ggml_backend_device]):
    """A device, real or meta. Two are equal if they stand for the same one of ggml's.

    Takes the pointer that `capi.ggml_backend_dev_get` and its like return; `devices()` and
    `device(name)` find those of this machine. Raises TypeError and ValueError for no such pointer.
    """

    _shared: Shared | None = None

    def __init__(self, handle: types.ggml_backend_device) -> None:
        super().__init__(raw(handle, DEVICE, "Device: handle"))

    @property
    def handle(self) -> types.ggml_backend_device:
        """The pointer, for `capi`. Raises ValueError once its backend has been unloaded."""
        found = super().handle
        if not lib.ggml_cffi_is_loaded(found):
            raise ValueError("the Device belongs to a backend that has been unloaded")
        return found

    @property
    def name(self) -> str:
        """The name by which `device(name)` finds it, such as CPU or Vulkan0."""
        return capi.ggml_backend_dev_name(self.handle) or ""

    @property
    def description(self) -> str:
        """What the device is, in words."""
        return capi.ggml_backend_dev_description(self.handle) or ""

    @property
    def type(self) -> ggml_backend_dev_type:
        """CPU, GPU, IGPU, ACCEL or META."""
        return capi.ggml_backend_dev_type(self.handle)

    @property
    def memory(self) -> Memory:
        """Free and total bytes, as far as the device tells."""
        return Memory(*capi.ggml_backend_dev_memory(self.handle))

    @property
    def buffer_types(self) -> list[str]:
        """The names of the kinds of memory it can compute with: its own first, then special ones.

        Those of the CPU device keep weights in another order, for speed (CPU_REPACK and the like).
        """
        return list(self._buffer_types())

    def buffer_type(self, name: str | None = None) -> types.ggml_backend_buffer_type:
        """The kind of memory of this name, its own by default.

        Raises ValueError, with the names there are, for no such name.
        """
        found = self._buffer_types()
        if name is None:
            return next(iter(found.values()))
        if name not in found:
            raise ValueError(f"{self.name} has no buffer type {name!r}; it has {', '.join(found)}")
        return found[name]

    def _buffer_types(self) -> dict[str, types.ggml_backend_buffer_type]:
        kinds = [capi.ggml_backend_dev_buffer_type(self.handle)]
        reg = capi.ggml_backend_dev_backend_reg(self.handle)
        getter = reg and capi.ggml_backend_reg_get_proc_address(
            reg, "ggml_backend_dev_get_extra_bufts"
        )
        if getter:
            extra = invoke("ggml_backend_dev_get_extra_bufts_t", getter, self.handle)
            index = 0
            while extra and extra[index]:
                kinds.append(extra[index])
                index += 1
        return {capi.ggml_backend_buft_name(kind) or "": kind for kind in kinds}

    def supports_weight(self, buffer_type: str, dtype: object, shape: int | Sequence[int]) -> bool:
        """Whether memory of this name takes a weight of this type and NumPy's shape.

        That of `buffer_types` which keeps weights in an order of its own takes those that it has a
        product for; all other memory takes any. Raises ValueError as `buffer_type` and
        `Context.tensor` do.
        """
        from ._placement import reorders, takes
        from .context import ne_of, shape_of
        from .dtypes import element_type

        kind, type, wanted = self.buffer_type(buffer_type), element_type(dtype), shape_of(shape)
        return not reorders(kind) or takes(self.handle, kind, type, ne_of(wanted))

    def supports_op(self, tensor: types.ggml_tensor) -> bool:
        """Whether the device can compute the operation that makes `tensor`."""
        return capi.ggml_backend_dev_supports_op(self.handle, raw(tensor, TENSOR, "tensor"))

    def init_backend(self, n_threads: int | None = None) -> Backend:
        """Begin a stream of work on the device; see `Backend`."""
        from .backend import Backend

        return Backend(self, n_threads)

    def __repr__(self) -> str:
        if not lib.ggml_cffi_is_loaded(self._handle):
            return f"<{type(self).__name__} of a backend that has been unloaded>"
        return f"<{type(self).__name__} {self.name}: {self.description}>"


def devices() -> list[Device]:
    """The devices of this machine, in ggml's order; see `load_backend` for more."""
    return [Device(handle) for handle in listed("device")]


def listed(kind: str) -> list[Any]:
    """The pointers of all devices ("device") or backends ("reg"), as they are at one moment."""
    ask = "ggml_cffi_devices" if kind == "device" else "ggml_cffi_backends"
    room = 16
    while True:
        found = ffi.new(f"struct ggml_backend_{kind} *[]", room)
        count = helper(ask, found, room)
        if count <= room:
            return [found[i] for i in range(count)]
        room = count  # some have been loaded meanwhile


def device(name: str) -> Device:
    """The device of this name, in upper or lower case.

    Raises TypeError for what is no str and ValueError, with the names there are, for no device.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r} ({type(name).__name__}), expected a str")
    found = devices()
    for candidate in found:
        if candidate.name.lower() == name.lower():
            return candidate
    names = ", ".join(candidate.name for candidate in found) or "none"
    raise ValueError(f"there is no device {name!r}; the devices are: {names}")
