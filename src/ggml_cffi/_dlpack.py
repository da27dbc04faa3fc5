"""DLPack, the protocol by which array libraries share memory, for bfloat16 as well.

NumPy speaks it, but has no bfloat16: its numbers go as uint16, and the capsule is relabelled. The
structs are those of ``dlpack.h``, versions 0.x and 1.x.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array of any library that knows the protocol."""

    def __dlpack__(self) -> object:
        """The numbers, in a capsule."""
        ...

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where they are: DLPack's kind of device, and its number."""
        ...


_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_CPU = 1  # DLDeviceType
#: Where a capsule of this name has its DLTensor: behind version, context, deleter and flags.
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
_TYPE_AT = 20  # behind data, device and ndim: code, bits, lanes
#: From 2.1 on NumPy knows the arguments that versions 1.x of the protocol have.
_KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

_api = ctypes.pythonapi
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p


def give(array: npt.NDArray[Any], **kwargs: Any) -> object:
    """A capsule of an array, which it keeps alive; raises BufferError as NumPy does."""
    if not _KNOWS_VERSIONS:
        kwargs = {"stream": kwargs.get("stream")}
    if array.dtype.name != "bfloat16":
        return array.__dlpack__(**kwargs)
    return _relabel(array.view(np.uint16).__dlpack__(**kwargs), _UINT, _BFLOAT)


def take(source: Any) -> npt.NDArray[Any]:
    """An array that shares the memory of another library's.

    Raises BufferError for what is not in the CPU's memory, and what the library raises.
    """
    if isinstance(source, np.ndarray):
        return source
    kind, number = source.__dlpack_device__()
    if kind != _CPU:
        raise BufferError(f"source is on device {kind}, {number} of DLPack's, expected the CPU's")
    if not str(getattr(source, "dtype", "")).endswith("bfloat16"):
        return np.from_dlpack(source)
    import ml_dtypes

    capsule = _relabel(source.__dlpack__(), _BFLOAT, _UINT)
    taken: Any = _Taken(capsule)
    return np.from_dlpack(taken).view(ml_dtypes.bfloat16)


class _Taken:
    """A capsule that was asked for already."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **kwargs: Any) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def _relabel(capsule: object, code: int, other: int) -> object:
    """The capsule, whose elements are of 16 bits, with another code for their type."""
    name = _api.PyCapsule_GetName(capsule)
    pointer = _api.PyCapsule_GetPointer(capsule, name)
    where = (ctypes.c_uint8 * 2).from_address(pointer + _TENSOR_AT[name] + _TYPE_AT)
    if tuple(where) != (code, 16):
        raise BufferError(f"the capsule has elements of code {where[0]} and {where[1]} bits")
    where[0] = other
    return capsule
