"""Making a meta device of ggml around a Python split function; no other module does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _callbacks, _runtime
from .._handles import raw, renew_after_fork
from .._loader import ffi, lib
from ..errors import NotSupportedError
from ._latch import SplitCallable, SplitFunction
from ._split import MAX_DEVICES

if TYPE_CHECKING:
    from .._gen import types
    from ..device import Device

_NAME = "ggml_backend_meta_device"
_lock = threading.RLock()  # ggml's maps of meta devices and of their buffer types have none
renew_after_fork(globals(), "_lock")


def create(
    devices: Sequence[Device | types.ggml_backend_device],
    split_fn: SplitCallable,
    on_error: str = "mirror",
) -> tuple[types.ggml_backend_device, SplitFunction]:
    """A new meta device over 1 to 16 devices, none of them meta, and its split function."""
    pointers = _pointers(devices)
    if not hasattr(lib, _NAME):
        version = ffi.string(lib.ggml_version()).decode() if hasattr(lib, "ggml_version") else "?"
        raise NotSupportedError(f"{_NAME}: ggml {version} has no meta device, 0.10 or later has")
    fields = ffi.typeof("struct ggml_backend_meta_split_state").fields
    repeats = any(name == "nr" for name, _ in fields)
    function = SplitFunction(split_fn, len(pointers), on_error, repeats=repeats)
    callback, registration = _callbacks.new_split_callback(function)
    array = ffi.new("struct ggml_backend_device *[]", pointers)
    with _lock:
        try:
            device = _runtime.call(_NAME, array, len(pointers), callback, registration.userdata)
        except BaseException:
            registration.drop()
            raise
        lib.ggml_backend_dev_buffer_type(device)  # enters it into its map while we have the lock
        _callbacks.remember_meta_device(device, function)
    function.when_closed = functools.partial(lib.ggml_cffi_end_use, device)
    return device, function


def split_function(device: Device | types.ggml_backend_device) -> SplitFunction:
    """The split function behind a meta device: its error, and what it answered.

    Raises ValueError for a device that is not meta.
    """
    found = _callbacks.split_function_of(raw(device, "struct ggml_backend_device *", "device"))
    if found is None:
        raise ValueError("device is no meta device made by this package")
    return found


def _pointers(devices: object) -> list[types.ggml_backend_device]:
    if devices is None:
        raise ValueError(f"{_NAME}: devs must not be None")
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        kind = type(devices).__name__
        raise TypeError(f"{_NAME}: devs is {devices!r} ({kind}), expected a sequence of devices")
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise ValueError(f"{_NAME}: {len(devices)} devices, expected 1 to {MAX_DEVICES}")
    pointers = []
    for i, device in enumerate(devices):
        pointer = raw(device, "struct ggml_backend_device *", f"{_NAME}: devs[{i}]")
        if lib.ggml_backend_dev_type(pointer) == getattr(
            lib, "GGML_BACKEND_DEVICE_TYPE_META", None
        ):
            raise ValueError(f"{_NAME}: devs[{i}] is a meta device, expected a real one")
        pointers.append(pointer)
    return pointers
