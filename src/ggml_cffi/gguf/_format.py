"""The numbers of the GGUF format, by ggml's ``docs/gguf.md``; the limits are those of ggml."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..enums import gguf_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # laid out alike; 3 allows big-endian files
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

MAX_KEY = (1 << 16) - 1  # bytes
MAX_STRING = 1 << 30  # bytes
MAX_ARRAY = 1 << 30  # elements
MAX_NAME = 63  # bytes of a tensor's name: ggml has room for 64 with the final zero
MAX_DIMS = 4
MAX_NESTING = 8  # arrays in arrays; the format has no limit, nor for those that follow
MAX_COUNT = 1 << 20  # tensors, metadata keys, and arrays in arrays

STRING = int(gguf_type.GGUF_TYPE_STRING)
ARRAY = int(gguf_type.GGUF_TYPE_ARRAY)
BOOL = int(gguf_type.GGUF_TYPE_BOOL)

DTYPES: dict[int, np.dtype[Any]] = {
    int(kind): np.dtype(code)
    for kind, code in (
        (gguf_type.GGUF_TYPE_UINT8, "<u1"),
        (gguf_type.GGUF_TYPE_INT8, "<i1"),
        (gguf_type.GGUF_TYPE_UINT16, "<u2"),
        (gguf_type.GGUF_TYPE_INT16, "<i2"),
        (gguf_type.GGUF_TYPE_UINT32, "<u4"),
        (gguf_type.GGUF_TYPE_INT32, "<i4"),
        (gguf_type.GGUF_TYPE_FLOAT32, "<f4"),
        (gguf_type.GGUF_TYPE_BOOL, "<u1"),  # 0 or 1
        (gguf_type.GGUF_TYPE_UINT64, "<u8"),
        (gguf_type.GGUF_TYPE_INT64, "<i8"),
        (gguf_type.GGUF_TYPE_FLOAT64, "<f8"),
    )
}
"""The types of fixed size, as they lie in the file."""

SCALARS = {
    kind: struct.Struct("<" + {"u": "BHIQ", "i": "bhiq", "f": "  fd"}[dtype.kind][size])
    for kind, dtype in DTYPES.items()
    for size in [dtype.itemsize.bit_length() - 1]
}
"""How one of them is packed."""

SIZES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()}

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
ARRAY_HEAD = struct.Struct("<IQ")  # type and number of the elements


def kind_name(kind: int) -> str:
    """A type's name as in the format's description, for messages."""
    try:
        return gguf_type(kind).name.removeprefix("GGUF_TYPE_").lower()
    except ValueError:
        return str(kind)


def padded(n: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-n // alignment) * alignment
