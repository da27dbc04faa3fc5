"""ggml's types of tensor elements, and NumPy's dtypes that have the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import capi
from .enums import ggml_type

__all__ = ["element_type", "is_quantized", "numpy_dtype", "type_name"]

_NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}  # fmt: skip


def type_name(type: ggml_type | int) -> str:
    """The name that ggml has for a type, such as ``f32`` or ``q4_K``."""
    return capi.ggml_type_name(type) or ""


def is_quantized(type: ggml_type | int) -> bool:
    """Whether the elements of a type are stored in blocks, at less than a number each."""
    return capi.ggml_is_quantized(type)


def element_type(value: object) -> ggml_type:
    """The type that `value` stands for.

    That is a `ggml_type` or its number, ggml's name in upper or lower case (``"q4_K"``), or what
    NumPy takes for a dtype (``np.float32``, ``"int32"``; ``ml_dtypes.bfloat16`` or ``"bfloat16"``),
    in whatever byte order.

    Raises ValueError for a name, a number or a dtype that is none of ggml's, TypeError for what can
    be neither.
    """
    if isinstance(value, ggml_type):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return ggml_type(value)
        except ValueError:
            raise ValueError(f"{value} is no ggml_type") from None
    if isinstance(value, str):
        name = "bf16" if value == "bfloat16" else value.lower()  # NumPy may not know it
        if name in types_by_name():
            return types_by_name()[name]
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload] # it is asked what it is
    except TypeError:
        if isinstance(value, str):
            names = ", ".join(type_name(kind) for kind in types_by_name().values())
            raise ValueError(f"{value!r} is no type of ggml's; these are: {names}") from None
        raise TypeError(
            f"{value!r} ({type(value).__name__}) is no type: expected a ggml_type, a name or a "
            "NumPy dtype"
        ) from None
    found = "bf16" if is_bfloat16(dtype) else None
    native = dtype.newbyteorder("=")
    for candidate, same in _NUMPY.items():
        if native == same:
            found = candidate
    if found is None:
        raise ValueError(f"ggml has no type for NumPy's {dtype.name}")
    return types_by_name()[found]


def numpy_dtype(type: ggml_type | int) -> np.dtype[Any] | None:
    """NumPy's dtype with the bytes of a type; None for quantised types.

    That of bf16 is ``ml_dtypes.bfloat16``: raises ImportError where ml_dtypes is not installed.
    """
    name = type_name(type)
    if name == "bf16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return _NUMPY.get(name)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether it is that of ml_dtypes, which need not be installed."""
    return bool(dtype.name == "bfloat16")


def castable(given: np.dtype[Any], wanted: np.dtype[Any], casting: str) -> bool:
    """As NumPy's can_cast, which lets complex numbers become bfloat16 and that nothing but float32.

    bfloat16 is a half as float16 is.
    """
    if given == wanted:
        return True
    half = np.dtype(np.float16)
    like = half if is_bfloat16(given) else given, half if is_bfloat16(wanted) else wanted
    found = np.can_cast(*like, casting)  # type: ignore[arg-type]
    if not found and given.kind == "V" and given.names is None:  # other types of ml_dtypes
        found = np.can_cast(given, wanted, casting)  # type: ignore[arg-type]
    return found


def as_array(given: npt.ArrayLike, name: str = "the array") -> npt.NDArray[Any]:
    """The array that it is, or makes. Raises TypeError for a masked one."""
    if type(given) is np.ndarray:
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; .filled() has none")
    return np.asarray(given)


def check_range(numbers: npt.NDArray[Any], dtype: np.dtype[Any], of: object) -> None:
    """Raise OverflowError where integers are beyond a dtype, which would wrap or be infinite.

    `of` is what they are for, in the message.
    """
    narrow = dtype.kind == "i" or dtype == np.float16  # the others reach beyond 64 bits
    if numbers.dtype.kind not in "iu" or not narrow or not numbers.size:
        return
    if np.can_cast(numbers.dtype, dtype):
        return
    low, high = int(numbers.min()), int(numbers.max())
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)  # NumPy would compare as float16
    if low < least or high > most:
        wrong = low if low < least else high
        raise OverflowError(f"the array has {wrong}, which {dtype} of {of} cannot hold")


_names: dict[str, ggml_type] = {}


def types_by_name() -> dict[str, ggml_type]:
    """The types of ggml by their names, in lower case."""
    if not _names:
        for kind in ggml_type:
            name = None if kind.name.endswith("_COUNT") else capi.ggml_type_name(kind)
            if name and capi.ggml_blck_size(kind):  # what has gone from ggml has no block
                _names[name.lower()] = kind
    return _names
