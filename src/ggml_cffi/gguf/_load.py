"""Puts the tensors of a GGUF file into a context, on a device."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import capi
from .._handles import address
from .._loader import ffi
from .._memory import raises_memory_error
from .._placement import check_weights, reorders
from .._progress import Progress, Tell, telling
from ..backend import Backend
from ..context import MAX_DIMS, WEIGHTS, Context, ne_of
from ..device import Device, device
from ..tensor import Tensor
from ._parse import Entry

if TYPE_CHECKING:
    from ..capi import types

_SLICE = 1 << 24
"""Bytes that are written at once."""

_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python names it from 3.13 on


def load(
    data: mmap.mmap,
    fd: int,
    entries: Mapping[str, Entry],
    ctx: Context,
    target: Device | Backend | str,
    progress: Progress,
    buffer_type: str | None = None,
) -> dict[str, Tensor]:
    """What `GGUFFile.load_into` does; `data` is a map of the file that `fd` is open for."""
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx is {ctx!r} ({type(ctx).__name__}), expected a Context")
    where: Any = device(target) if isinstance(target, str) else target
    where = where.device if isinstance(where, Backend) else where
    if not isinstance(where, Device):
        raise TypeError(f"target is {target!r}, expected a Device, a Backend or a name")
    kind = where.buffer_type(buffer_type)
    weights = ((name, one.type, ne_of(one.ne[::-1])) for name, one in entries.items())
    check_weights(where.handle, kind, weights)

    def fill() -> dict[str, Tensor]:
        store = ctx.handle
        if not entries:
            return {}
        size = len(entries) * capi.ggml_tensor_overhead()
        arena = capi.ggml_init(mem_size=size, no_alloc=True)
        buffer, keep = None, None
        try:
            handles = {name: _describe(arena, name, entry) for name, entry in entries.items()}
            total = sum(entry.nbytes for entry in entries.values())
            if buffer_type is None and _can_map(where, entries):
                keep = _private_map(fd, len(data))
                with telling(total, progress) as tell:
                    buffer = _place(keep, where, entries, handles, total, tell)
            elif total:
                with raises_memory_error():
                    buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(arena, kind)
                capi.ggml_backend_buffer_set_usage(buffer, WEIGHTS)
                with telling(total, progress) as tell:
                    _copy(data, where, kind, entries, handles, total, tell)
        except BaseException:
            if buffer is not None:
                capi.ggml_backend_buffer_free(buffer)
            capi.ggml_free(arena)
            raise
        store.leaves.insert(0, arena)  # the last one is where others are made
        if buffer is not None:
            store.buffers.append(buffer)
            ctx._reordered |= reorders(kind)
        if keep is not None:
            store.keep.append(keep)
        return {n: Tensor(handle, ctx, len(entries[n].ne)) for n, handle in handles.items()}

    return ctx._while_allocating(fill)


def _describe(arena: types.ggml_context, name: str, entry: Entry) -> types.ggml_tensor:
    handle = capi.ggml_new_tensor(arena, entry.type, list(entry.ne) or [1])
    capi.ggml_set_name(handle, name)
    return handle


# ---- by a map


def _can_map(where: Device, entries: Mapping[str, Entry]) -> bool:
    """Whether the device computes in a map of the file, and the data is aligned as it needs it."""
    kind = where.buffer_type()
    if not capi.ggml_backend_buft_is_host(kind):
        return False
    if not capi.ggml_backend_dev_get_props(where.handle).caps.buffer_from_host_ptr:
        return False
    alignment = capi.ggml_backend_buft_get_alignment(kind)
    filled = [entry for entry in entries.values() if entry.nbytes]
    return bool(filled) and all(entry.start % alignment == 0 for entry in filled)


def _private_map(fd: int, size: int) -> mmap.mmap:
    """A map whose pages are copied once they are written; the file stays as it is.

    Nothing is set aside for those copies: a file may be larger than the memory.
    """
    flags = mmap.MAP_PRIVATE | _NORESERVE
    try:
        return mmap.mmap(fd, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"there is no room for a map of {size} bytes") from None


def _place(
    keep: mmap.mmap,
    where: Device,
    entries: Mapping[str, Entry],
    handles: Mapping[str, types.ggml_tensor],
    total: int,
    tell: Tell,
) -> types.ggml_backend_buffer:
    """A buffer that is the map, with the tensors in it."""
    base = int(np.frombuffer(keep, np.uint8).__array_interface__["data"][0])
    page = mmap.PAGESIZE
    first = min(entry.start for entry in entries.values() if entry.nbytes) // page * page
    last = max(entry.start + entry.nbytes for entry in entries.values())
    largest = max(entry.nbytes for entry in entries.values())
    begin: Any = ffi.cast("void *", base + first)
    buffer = capi.ggml_backend_dev_buffer_from_host_ptr(where.handle, begin, last - first, largest)
    try:
        capi.ggml_backend_buffer_set_usage(buffer, WEIGHTS)
        done = 0
        for name, entry in entries.items():
            # one that is empty has no place of its own
            at = base + (entry.start if entry.nbytes else first)
            pointer: Any = ffi.cast("void *", at)
            capi.ggml_backend_tensor_alloc(buffer, handles[name], pointer)
            done += entry.nbytes
            tell(done, total)
    except BaseException:
        capi.ggml_backend_buffer_free(buffer)
        raise
    return buffer


# ---- by slices


def _copy(
    data: mmap.mmap,
    where: Device,
    kind: types.ggml_backend_buffer_type,
    entries: Mapping[str, Entry],
    handles: Mapping[str, types.ggml_tensor],
    total: int,
    tell: Tell,
) -> None:
    done = 0
    every = np.frombuffer(data, np.uint8)
    whole = reorders(kind)
    for name, entry in entries.items():
        unit = max(1, entry.nbytes) if whole else _unit(where, handles[name], entry)
        for begin, end in _slices(entry.nbytes, unit):
            part = every[entry.start + begin : entry.start + end]
            capi.ggml_backend_tensor_set(handles[name], part, begin)
            _drop_pages(data, entry.start + begin, entry.start + end)
            done += end - begin
            tell(done, total)


def _unit(where: Device, handle: types.ggml_tensor, entry: Entry) -> int:
    """The bytes that a write's begin and size must be multiples of.

    A meta device cuts each write as it cuts the tensor: a slice is whole along the axis of the cut.
    """
    if not capi.ggml_backend_dev_type(where.handle).name.endswith("_META"):
        return 1
    from ..meta._create import split_function
    from ..meta._split import SplitAxis, SplitState  # not every release has meta devices

    state: SplitState | None
    try:
        state = split_function(where).frozen(address(handle))
    except ValueError:
        state = None  # made by others
    if state is None or state.axis == SplitAxis.PARTIAL:
        return max(1, entry.nbytes)
    if state.axis == SplitAxis.MIRRORED:
        return 1
    steps = [*handle.nb, max(1, entry.nbytes)]
    return int(steps[min(state.axis + 1, MAX_DIMS)])


def _slices(nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
    step = max(1, _SLICE // unit) * unit
    for begin in range(0, nbytes, step):
        yield begin, min(begin + step, nbytes)


def _drop_pages(data: mmap.mmap, begin: int, end: int) -> None:
    """The pages of the file that are done with need no memory any more."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and os.name == "posix":
        data.madvise(mmap.MADV_DONTNEED, begin, end - begin)
