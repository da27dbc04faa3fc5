"""How Python values become metadata of a GGUF file."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import as_array
from . import _format as fmt
from ._metadata import GGUFArray

_NUMPY = {dtype.newbyteorder("="): kind for kind, dtype in fmt.DTYPES.items() if kind != fmt.BOOL}
_NUMPY[np.dtype(np.bool_)] = fmt.BOOL
_BY_NAME = {fmt.kind_name(kind): kind for kind in (*fmt.SIZES, fmt.STRING, fmt.ARRAY)}
_FLOATS = (_BY_NAME["float32"], _BY_NAME["float64"])


def metadata_type(value: object) -> int:
    """The type that `value` stands for: a `gguf_type`, its number, or its name in lower case."""
    if isinstance(value, str):
        if value not in _BY_NAME:
            raise ValueError(f"type is {value!r}, expected one of {', '.join(_BY_NAME)}")
        return _BY_NAME[value]
    try:
        kind = operator.index(value)  # type: ignore[arg-type] # it is asked what it is
    except TypeError:
        raise TypeError(f"type is {value!r}, expected a gguf_type or a name") from None
    if kind not in _BY_NAME.values():
        raise ValueError(f"type is {value!r}, expected one of 0 to 12")
    return kind


def encode(key: str, value: object, type: object = None) -> tuple[int, bytes]:
    """A value's type and its bytes in the file.

    `type` is that of the value, of an array that of its innermost elements; a file's array has
    its own, also where it is that of arrays.
    """
    what = f"metadata key {key!r}"
    if isinstance(value, np.ndarray):
        value = as_array(value, what)
    kind = None if type is None else metadata_type(type)
    if kind == fmt.ARRAY and isinstance(value, GGUFArray):
        kind = None  # as `Metadata.type` has it
    if kind == fmt.ARRAY:
        raise ValueError(f"{what}: type is array, expected that of the elements")
    if isinstance(value, GGUFArray) and kind is None:
        return fmt.ARRAY, value.raw()
    if isinstance(value, np.ndarray) and value.ndim:
        kind = _of_dtype(value.dtype, what) if kind is None else kind
        value = value.tolist() if value.dtype.kind in "OUT" or value.ndim > 1 else value
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, (np.ndarray, GGUFArray)) or (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
    ):
        return fmt.ARRAY, _array(value, kind, what, 0)
    kind = _common([value], what) if kind is None else kind
    return kind, _scalar(value, kind, what)


def text(value: str, what: str) -> bytes:
    """A string in the file: its length and its bytes; surrogates are the bytes they stand for."""
    try:
        data = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: {value[:100]!r} is no text: {error.reason}") from None
    return fmt.U64.pack(len(data)) + data


def _array(value: Any, kind: int | None, what: str, depth: int) -> bytes:
    if depth >= fmt.MAX_NESTING:
        raise ValueError(f"{what} is an array too deep, expected at most {fmt.MAX_NESTING}")
    if kind is not None and kind in fmt.SIZES and isinstance(value, np.ndarray):
        return fmt.ARRAY_HEAD.pack(kind, len(value)) + _numbers(value, kind, what)
    items = list(value)
    nested = [isinstance(item, (list, tuple, np.ndarray, GGUFArray)) for item in items]
    if any(nested):
        if not all(nested):
            raise TypeError(f"{what} has arrays and other values: expected one or the other")
        parts = [
            item.raw()
            if isinstance(item, GGUFArray) and kind is None
            else _array(item, kind, what, depth + 1)
            for item in items
        ]
        return fmt.ARRAY_HEAD.pack(fmt.ARRAY, len(items)) + b"".join(parts)
    if not items and kind is None:
        raise ValueError(f"{what} is an empty array: type must say of what")
    kind = _common(items, what) if kind is None else kind
    head = fmt.ARRAY_HEAD.pack(kind, len(items))
    if kind == fmt.STRING:
        return head + b"".join(_scalar(item, kind, what) for item in items)
    return head + _numbers(items, kind, what)


def _numbers(items: Any, kind: int, what: str) -> bytes:
    """Numbers as they lie in the file. Raises for those that the type cannot hold."""
    dtype = fmt.DTYPES[kind]
    if isinstance(items, np.ndarray):
        if items.dtype.kind == "b" if kind == fmt.BOOL else items.dtype == dtype.newbyteorder("="):
            return bytes(items.astype(dtype).tobytes())
        items = items.tolist()
    return b"".join([_scalar(item, kind, what) for item in items])


def _scalar(value: Any, kind: int, what: str) -> bytes:
    if kind == fmt.STRING:
        if not isinstance(value, str):
            raise TypeError(f"{what} is {value!r:.200}, expected a str")
        return text(value, what)
    if kind == fmt.BOOL:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{what} is {value!r:.200}, expected a bool")
        return b"\1" if value else b"\0"
    try:
        if isinstance(value, (bool, np.bool_, str)):
            raise TypeError
        number = float(value) if kind in _FLOATS else operator.index(value)
        return fmt.SCALARS[kind].pack(number)
    except TypeError:
        name = type(value).__name__
        expected = fmt.kind_name(kind)
        raise TypeError(f"{what} is {value!r:.200} ({name}), expected {expected}") from None
    except (struct.error, OverflowError):
        expected = fmt.kind_name(kind)
        raise ValueError(f"{what} is {value!r:.200}, which {expected} cannot hold") from None


def _of_dtype(dtype: np.dtype[Any], what: str) -> int | None:
    if dtype.kind in "OUT":
        return None
    native = dtype.newbyteorder("=")
    if native not in _NUMPY:
        raise TypeError(f"{what} has dtype {dtype}, for which the format has no type")
    return _NUMPY[native]


def _common(values: list[Any], what: str) -> int:
    """The type for some values: that of NumPy's scalars, else the first that holds them all."""
    kinds = {
        _plain(value, what)
        if isinstance(value, str) or not isinstance(value, np.generic)
        else _of_dtype(value.dtype, what)
        for value in values
        if not (isinstance(value, int) and not isinstance(value, bool))
    }
    whole = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    if whole and not kinds:
        for name in ("int32", "int64", "uint64"):
            limits = np.iinfo(name)
            if limits.min <= min(whole) and max(whole) <= limits.max:
                return _BY_NAME[name]
        raise ValueError(f"{what} has {max(whole, key=abs)!r:.200}, which 64 bits cannot hold")
    if len(kinds) != 1 or (whole and kinds != {_BY_NAME["float64"]}):
        raise TypeError(f"{what} has values of several types")
    return int(next(iter(kinds)) or 0)


def _plain(value: object, what: str) -> int:
    for python, kind in ((bool, fmt.BOOL), (float, _BY_NAME["float64"]), (str, fmt.STRING)):
        if isinstance(value, python):
            return kind
    raise TypeError(
        f"{what} is {value!r:.200} ({type(value).__name__}), expected a number, a bool, a str or "
        "an array of those"
    )
