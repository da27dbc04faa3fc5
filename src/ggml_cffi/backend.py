"""Backends: streams of work on a device."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from . import capi
from ._handles import Owned, in_use, raw, while_it_stays
from ._loader import lib
from ._locks import with_all
from ._runtime import invoke
from .capi import types
from .device import Device, Shared

__all__ = ["Backend", "child_backends", "set_n_threads", "usable_cores"]

BACKEND = "struct ggml_backend *"
_Result = TypeVar("_Result")

MAX_THREADS = 512  # GGML_MAX_N_THREADS: the CPU backend aborts above it


class Backend(Owned[types.ggml_backend]):
    """A stream of work on a device.

    `n_threads` is what CPU backends compute with, those of a meta device's children among them.
    By default it is all usable cores, for each child: CPU children work one after the other.
    """

    def __init__(self, device: Device, n_threads: int | None = None) -> None:
        if not isinstance(device, Device):
            raise TypeError(f"device is {device!r} ({type(device).__name__}), expected a Device")
        count = usable_cores() if n_threads is None else _thread_count(n_threads)
        handle = capi.ggml_backend_dev_init(device.handle, None)
        super().__init__(handle, capi.ggml_backend_free, (device,))
        self.device = device
        self._lock = threading.RLock()  # a backend computes one graph at a time
        try:
            self.set_n_threads(count)
        except BaseException:
            self.close()
            raise

    @property
    @while_it_stays
    def name(self) -> str:
        """The name of the backend; that of a meta backend lists its children."""
        return capi.ggml_backend_name(self.handle) or ""

    @property
    @while_it_stays
    def children(self) -> list[types.ggml_backend]:
        """The backends that a meta backend drives, in the order of its devices; else none."""
        return child_backends(self.handle)

    @while_it_stays
    def set_n_threads(self, n_threads: int) -> None:
        """Compute with this number of threads; see `set_n_threads`."""
        set_n_threads(self.handle, n_threads)
        self._n_threads = int(n_threads)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {name_or_closed(self)}>"


def name_or_closed(backend: Backend) -> str:
    """The name; "closed" where another thread has closed it, were it this moment."""
    try:
        return backend.name
    except ValueError:
        return "closed"


class _Thread(threading.local):
    kernels: int = 0  # functions of operations that it is in, one called by the other


thread: _Thread = _Thread()


class Turn:
    """The right to compute on some backends, while nobody else does; each waits for its turn.

    All graphs of a meta device take turns: ggml keeps what it knows of their views with the
    weights. All threads take backends and devices in the same order.
    """

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = sorted(set(backends), key=id)
        shared = {one.device._shared for one in self._backends if one.device._shared}
        self._shared: list[Shared] = sorted(shared, key=id)

    def take(self, function: Callable[[], _Result]) -> _Result:
        """Wait for it, and call the function.

        Raises ValueError, at once, within an operation that one of the backends computes: its
        thread may be another one than that which has the turn.
        """
        in_kernel = thread.kernels and any(in_use(one.handle) for one in self._backends)
        if in_kernel or any(one.is_within(thread.kernels) for one in self._shared):
            raise ValueError("the backend is computing what this is called by")
        for one in self._shared:
            function = partial(one.take, function)
        return with_all([one._lock for one in self._backends], function)


def child_backends(backend: types.ggml_backend) -> list[types.ggml_backend]:
    """The backends that a meta backend drives, none for any other."""
    if not hasattr(lib, "ggml_backend_is_meta"):  # a release without meta devices
        return []
    if not capi.ggml_backend_is_meta(backend):
        return []
    count = capi.ggml_backend_meta_n_backends(backend)
    return [capi.ggml_backend_meta_simple_backend(backend, i) for i in range(count)]


def set_n_threads(backend: Backend | types.ggml_backend, n_threads: int) -> None:
    """Let a backend compute with `n_threads` threads, a meta backend's children each with them.

    Backends without threads of their own, such as those of GPUs, are left as they are. Raises
    TypeError for what is no integer and ValueError for other than 1 to 512.
    """
    count = _thread_count(n_threads)
    handle = raw(backend, BACKEND, "backend")
    for child in child_backends(handle) or [handle]:
        reg = capi.ggml_backend_dev_backend_reg(capi.ggml_backend_get_device(child))
        if reg is None:
            continue
        setter = capi.ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads")
        if setter:
            invoke("ggml_backend_set_n_threads_t", setter, child, count)


def usable_cores() -> int:
    """How many cores this process may use: its affinity, and its share where a cgroup sets one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no cgroup, or one that sets no limit ("max")
    return max(1, min(cores, MAX_THREADS))


def _thread_count(n_threads: object) -> int:
    try:
        if isinstance(n_threads, (bool, np.bool_)):
            raise TypeError
        count = operator.index(n_threads)  # type: ignore[arg-type] # it is asked what it is
    except TypeError:
        kind = type(n_threads).__name__
        raise TypeError(f"n_threads is {n_threads!r} ({kind}), expected an int") from None
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"n_threads is {n_threads}, expected 1 to {MAX_THREADS}")
    return count
