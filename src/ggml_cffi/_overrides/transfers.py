"""Copies of many pieces at once, to and from tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _runtime
from .._handles import raw
from .._loader import ffi
from ._base import bound, call, count

if TYPE_CHECKING:
    from .._gen import types

_CData = ffi.CData


def _copy(
    function: str,
    backend: tuple[Any, ...],
    tensor: Any,
    data: Any,
    numbers: tuple[int, int, int, int, int],
    writes: bool,
) -> None:
    names = ("offset", "size", "n_copies", "stride_tensor", "stride_data")
    offset, size, n_copies, stride_tensor, stride_data = (
        count(function, name, number) for name, number in zip(names, numbers, strict=True)
    )
    tensor = raw(tensor, "struct ggml_tensor *", f"{function}: tensor")
    if backend and not (tensor.view_src.buffer if tensor.view_src else tensor.buffer):
        raise ValueError(f"{function}: tensor is in no buffer")
    if not size:
        n_copies = 0  # ggml would count through them all
    needed = 0
    if n_copies and size:
        needed = (n_copies - 1) * stride_data + size
        end = offset + (n_copies - 1) * stride_tensor + size
        have = call("ggml_nbytes", tensor)
        if end > have:
            raise ValueError(f"{function}: the last copy ends at byte {end} of tensor's {have}")
    if isinstance(data, _CData) and ffi.typeof(data).kind == "array" and ffi.sizeof(data) < needed:
        have = ffi.sizeof(data)
        raise ValueError(f"{function}: data has {have} bytes, fewer than the {needed} asked for")
    pointer, _ = _runtime.buffer(
        data, needed, function, "data", nullable=False, writes=writes, holds=tensor
    )
    call(function, *backend, tensor, pointer, offset, size, n_copies, stride_tensor, stride_data)


@bound
def ggml_backend_tensor_set_2d(
    tensor: types.ggml_tensor,
    data: types.ReadableBuffer,
    offset: int,
    size: int,
    n_copies: int,
    stride_tensor: int,
    stride_data: int,
) -> None:
    """Write `n_copies` pieces of `size` bytes.

    Piece `i` goes from byte ``i * stride_data`` of `data` to byte ``offset + i * stride_tensor`` of
    the tensor. Raises ValueError for a negative number, and for pieces that lie outside the tensor
    or outside `data` (any object with the buffer protocol; the length of what a bare pointer
    points to is not checked).
    """
    numbers = (offset, size, n_copies, stride_tensor, stride_data)
    _copy("ggml_backend_tensor_set_2d", (), tensor, data, numbers, writes=False)


@bound
def ggml_backend_tensor_get_2d(
    tensor: types.ggml_tensor,
    data: types.WritableBuffer,
    offset: int,
    size: int,
    n_copies: int,
    stride_tensor: int,
    stride_data: int,
) -> None:
    """Read `n_copies` pieces of `size` bytes into `data`, an object with a writable buffer.

    Piece `i` goes from byte ``offset + i * stride_tensor`` of the tensor to byte
    ``i * stride_data`` of `data`. Raises ValueError for a negative number, and for pieces that lie
    outside the tensor or outside `data`.
    """
    numbers = (offset, size, n_copies, stride_tensor, stride_data)
    _copy("ggml_backend_tensor_get_2d", (), tensor, data, numbers, writes=True)


@bound
def ggml_backend_tensor_set_2d_async(
    backend: types.ggml_backend,
    tensor: types.ggml_tensor,
    data: types.ReadableBuffer,
    offset: int,
    size: int,
    n_copies: int,
    stride_tensor: int,
    stride_data: int,
) -> None:
    """Write `n_copies` pieces of `size` bytes, in the order of the backend's other work.

    As `ggml_backend_tensor_set_2d`; ValueError too for a tensor that is in no buffer. `data` must
    stay as it is until ggml_backend_synchronize.
    """
    numbers = (offset, size, n_copies, stride_tensor, stride_data)
    _copy("ggml_backend_tensor_set_2d_async", (backend,), tensor, data, numbers, writes=False)


@bound
def ggml_backend_tensor_get_2d_async(
    backend: types.ggml_backend,
    tensor: types.ggml_tensor,
    data: types.WritableBuffer,
    offset: int,
    size: int,
    n_copies: int,
    stride_tensor: int,
    stride_data: int,
) -> None:
    """Read `n_copies` pieces of `size` bytes, in the order of the backend's other work.

    As `ggml_backend_tensor_get_2d`; ValueError too for a tensor that is in no buffer. `data` must
    live, and is complete, until ggml_backend_synchronize.
    """
    numbers = (offset, size, n_copies, stride_tensor, stride_data)
    _copy("ggml_backend_tensor_get_2d_async", (backend,), tensor, data, numbers, writes=True)
