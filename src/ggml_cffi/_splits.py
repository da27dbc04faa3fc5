"""How a meta device has cut tensors, in words; which operation it gave up on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import capi
from ._handles import address
from .capi import types
from .dtypes import type_name
from .errors import AbortError
from .tensor import is_meta, n_dims, outer_first


def split_in_words(handle: Any) -> str:
    """How a tensor is cut, where a split function was asked about it; else nothing."""
    buffer = (handle.view_src or handle).buffer
    if not buffer or not is_meta(buffer):
        return ""
    from .meta import split_function

    where = capi.ggml_backend_buft_get_device(capi.ggml_backend_buffer_get_type(buffer))
    try:
        state = split_function(where).frozen(address(handle)) if where else None
    except ValueError:  # a device that others made
        return ""
    return "" if state is None else str(state)


def naming_the_node(error: AbortError, tensors: Sequence[types.ggml_tensor]) -> AbortError:
    """The same error, but that it says at which of the tensors, in order, the allocation ended.

    ggml gives a tensor its buffer before it asks how it is to be cut.
    """
    begun = [one for one in tensors if one.buffer]
    if not begun or not any(begun[-1].src):
        return error
    operands = ", ".join(_described(src) for src in begun[-1].src if src)
    message = f"{_named(begun[-1])} of {operands}: {error.message}"
    told = type(error)(message, error.file, error.line, error.function, error.log, error.lost)
    told.__cause__ = error.__cause__
    return told


def _named(handle: Any) -> str:
    name = capi.ggml_get_name(handle)
    desc = capi.ggml_op_desc(handle)
    return f"{desc} {name!r}" if name else str(desc)


def _described(handle: Any) -> str:
    shape = outer_first(handle.ne, n_dims(handle))
    split = split_in_words(handle)
    return (
        f"{capi.ggml_get_name(handle)!r} ({type_name(handle.type)} {shape}{split and ', '}{split})"
    )
