"""Parts of a meta device's tensors: ggml reads and writes whole slices across a cut, no others.

A view is read by way of the tensor that owns its memory: as little of that as ggml can do. It is
written by reading that, changing it and writing it back, while nothing else writes there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import _callbacks, capi
from .._handles import address, holding, renew_after_fork
from ..backend import thread
from ..capi import types
from ..device import Shared, shared_of
from ..enums import ggml_backend_buffer_usage, ggml_op
from ._split import MAX_DIMS, SplitAxis, SplitState

if TYPE_CHECKING:
    from ..tensor import Tensor

_Bytes = npt.NDArray[np.uint8]

_writes = threading.RLock()  # of tensors of devices that have no `Shared`
renew_after_fork(globals(), "_writes")


def read(tensor: Tensor) -> _Bytes:
    """The bytes from the first element of a tensor with memory, or of a view, to the last.

    Raises ValueError for what ggml cannot read: what each device has an addend of.
    """
    with holding((tensor.context,)):
        handle = tensor.handle
        root = handle.view_src or handle
        state = _state(tensor, root)
        if state is not None and state.axis == SplitAxis.PARTIAL:
            raise ValueError(
                f"{tensor!r} cannot be read: each device has an addend of {_named(root)} "
                f"(PARTIAL), and ggml adds none up on reading"
            )
        begin, end = _place(handle)
        first, last = _slices(root, state, begin, end)
        return _get(root, first, last)[begin - first : end - first]


def write(tensor: Tensor, data: _Bytes, put: Callable[[_Bytes], object]) -> None:
    """Write a tensor with memory, or a view: `data` are its rows, one after the other.

    Where they are not all that is to be written, `put` puts the numbers into the memory from the
    first element on, which has been read before.

    Raises ValueError for what ggml cannot write, and for what would have to be read before, when
    this is called by what the device computes.
    """
    with holding((tensor.context,)):
        handle = tensor.handle
        root = handle.view_src or handle
        state = _state(tensor, root)
        begin, end = _place(handle)
        first, last = _slices(root, state, begin, end)
        shared = shared_of(_device(root))
        if (first, last) == (begin, end) and capi.ggml_is_contiguous(handle):
            with _writing(shared):
                capi.ggml_backend_tensor_set(root, data, begin)
            return
        if state is not None and state.axis == SplitAxis.PARTIAL:
            raise ValueError(
                f"{tensor!r} cannot be written: each device has an addend of {_named(root)} "
                f"(PARTIAL), which is written as a whole only"
            )

        def write_slices() -> None:
            with _writing(shared):
                slices = _get(root, first, last)
                put(slices[begin - first : end - first])
                capi.ggml_backend_tensor_set(root, slices, first)

        _in_turn(tensor, shared, write_slices)


def _state(tensor: Tensor, root: types.ggml_tensor) -> SplitState | None:
    """How a tensor is cut that owns its memory; None where only ggml knows."""
    if (
        capi.ggml_backend_buffer_get_usage(root.buffer)
        == ggml_backend_buffer_usage.GGML_BACKEND_BUFFER_USAGE_COMPUTE
    ):
        if root.op == ggml_op.GGML_OP_NONE:
            return SplitState.mirrored()
        if tensor.handle.view_src:
            raise ValueError(
                f"{tensor!r} is a part of {_named(root)}, a result on a meta device: only results "
                f"themselves are read"
            )
        return None
    function = _callbacks.split_function_of(_device(root))
    return None if function is None else function.frozen(address(root))


def _device(root: types.ggml_tensor) -> types.ggml_backend_device | None:
    return capi.ggml_backend_buft_get_device(capi.ggml_backend_buffer_get_type(root.buffer))


def _named(root: types.ggml_tensor) -> str:
    name = capi.ggml_get_name(root)
    return repr(name) if name else "a tensor without a name"


def _place(handle: types.ggml_tensor) -> tuple[int, int]:
    """Where its bytes begin, and end, in the tensor that owns the memory."""
    begin = int(handle.view_offs) if handle.view_src else 0
    return begin, begin + capi.ggml_nbytes(handle)


def _slices(
    root: types.ggml_tensor, state: SplitState | None, begin: int, end: int
) -> tuple[int, int]:
    """The least that ggml can read, or write, with these bytes in it."""
    size = capi.ggml_nbytes(root)
    if state is None or state.axis == SplitAxis.PARTIAL:
        return 0, size
    if not state.is_split:
        return begin, end
    unit = int([*root.nb, size][state.axis + 1]) if state.axis + 1 < MAX_DIMS else size
    return begin // unit * unit, -(-end // unit) * unit


def _get(root: types.ggml_tensor, first: int, last: int) -> _Bytes:
    data = np.empty(last - first, np.uint8)
    capi.ggml_backend_tensor_get(root, data, first)
    return data


def _in_turn(tensor: Tensor, shared: Shared | None, function: Callable[[], None]) -> None:
    """Call it while no graph of the device is computed, which might write into the same tensor."""
    if shared is None:
        function()
        return
    if shared.is_within(thread.kernels):
        raise ValueError(
            f"{tensor!r} is written in parts, which are read before: not within what the device "
            f"computes"
        )
    shared.take(function, computes=False)


def _writing(shared: Shared | None) -> contextlib.AbstractContextManager[Any]:
    """While nobody else writes tensors of the device: what one reads and writes back would go."""
    return _writes if shared is None else shared.writes
