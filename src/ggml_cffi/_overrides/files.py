"""GGUF: arrays whose element is known from another argument, and a buffer that C fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _runtime
from .._gen import enums
from .._loader import ffi
from ._base import bound, call, count

if TYPE_CHECKING:
    from .._gen import types

_ELEMENTS = {
    "UINT8": "uint8_t",
    "INT8": "int8_t",
    "UINT16": "uint16_t",
    "INT16": "int16_t",
    "UINT32": "uint32_t",
    "INT32": "int32_t",
    "FLOAT32": "float",
    "BOOL": "bool",
    "UINT64": "uint64_t",
    "INT64": "int64_t",
    "FLOAT64": "double",
}


def _element(kind: int) -> str | None:
    """The C type of a GGUF type's values; None for strings, arrays and what is no type."""
    try:
        return _ELEMENTS.get(enums.gguf_type(kind).name.removeprefix("GGUF_TYPE_"))
    except ValueError:
        return None


def _values(function: str, element: str, data: Any, n: int | None) -> tuple[Any, int]:
    """The address and the number of values to take from `data`."""
    size = ffi.sizeof(element)
    if data is None:
        if n:
            raise ValueError(f"{function}: data must not be None, with n {n}")
        return ffi.NULL, 0
    numbers = isinstance(data, np.ndarray) or (
        isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview)
    )
    if numbers:
        pointer, have = _runtime.array(element, data, function, "data")
        if n is not None and n > have:
            raise ValueError(f"{function}: data has {have} elements, fewer than the {n} asked for")
        return pointer, have if n is None else n
    wanted = None if n is None else n * size
    pointer, bytes_ = _runtime.buffer(data, wanted, function, "data", nullable=False, writes=False)
    if bytes_ % size:
        raise ValueError(f"{function}: data has {bytes_} bytes, no multiple of {size}")
    return pointer, bytes_ // size


@bound
def gguf_set_arr_data(
    ctx: types.gguf_context,
    key: types.String,
    type: enums.gguf_type | int,
    data: Sequence[float] | types.ReadableBuffer | None,
    n: int | None = None,
) -> None:
    """Set a key to an array of numbers or bools.

    `data`: a sequence or a NumPy array of numbers, which are converted to `type` if they fit; or
    bytes, a bytearray or a memoryview, whose bytes are taken as they are. `n`: how many elements of
    it, None for all; None for `data` is an array of none.

    Raises ValueError for data of fewer than n elements or, without n, of no whole number of them,
    and for types that are no number; TypeError and OverflowError for what does not fit `type`.
    """
    function = "gguf_set_arr_data"
    if n is not None:
        n = count(function, "n", n)
    name = _runtime.string(key, function, "key", False)
    element = _element(type)
    pointer, n = (ffi.NULL, 0) if element is None else _values(function, element, data, n)
    call(function, ctx, name, type, pointer, n)  # refuses a type without an element


@bound
def gguf_set_tensor_data(ctx: types.gguf_context, name: types.String, data: types.VoidP) -> None:
    """Say where the data of a tensor are.

    Raises ValueError for an array that has fewer bytes than the tensor.
    """
    function = "gguf_set_tensor_data"
    key = _runtime.string(name, function, "name", False)
    tensor = call("gguf_find_tensor", ctx, key)
    if tensor >= 0:
        size = call("gguf_get_tensor_size", ctx, tensor)
        _runtime.behind(data, size, function, "data", "the tensor")
    call(function, ctx, key, _runtime.handle(data))


@bound
def gguf_get_meta_data(ctx: types.gguf_context) -> bytes:
    """Give the bytes of a file's header, metadata and tensor infos."""
    made = ffi.new("char[]", max(call("gguf_get_meta_size", ctx), 1))
    call("gguf_get_meta_data", ctx, made)
    return bytes(ffi.buffer(made))
