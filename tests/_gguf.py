"""GGUF files byte by byte, independent of the writer: right ones and wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def array(kind: int, elements: bytes, count: int) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def kv(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, ne: Sequence[int], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", n & (2**64 - 1)) for n in ne)
    return string(name) + struct.pack("<I", len(ne)) + dims + struct.pack("<IQ", kind, offset)


def make(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> bytes:
    """A file of these keys, tensors and data, aligned; counts other than theirs if given."""
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_keys is None else n_keys,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*pairs, *tensors])
    return head + bytes(-len(head) % alignment) + data
