"""Memory in which each tensor ends where a page begins that nobody may touch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from programs import F16, F32, I32, I64, Leaf

from ggml_cffi import GGMLError, capi, ffi

PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_BOTH, _PRIVATE, _ANONYMOUS = 0, 3, 0x02, 0x20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory:
    """Allocates the tensors of a context, filled with a byte, and frees them when it is closed."""

    def __init__(self, tensors: Sequence[Any], fill: int) -> None:
        sizes = [0 if t.view_src else capi.ggml_nbytes(t) for t in tensors]
        pages = [-(-size // PAGE) * PAGE for size in sizes]
        self.size = sum(p + PAGE for p in pages) + PAGE
        self.base = _libc.mmap(None, self.size, _PROT_NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        if self.base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError("mmap")
        self.buffer = capi.ggml_backend_cpu_buffer_from_ptr(
            ffi.cast("void *", self.base), self.size
        )
        at = self.base + PAGE
        for t, size, room in zip(tensors, sizes, pages, strict=True):
            if t.view_src:
                capi.ggml_backend_view_init(t)
                continue
            if room:
                _libc.mprotect(at, room, _PROT_BOTH)
                ctypes.memset(at, fill, room)
            capi.ggml_backend_tensor_alloc(self.buffer, t, ffi.cast("void *", at + room - size))
            at += room + PAGE

    def close(self) -> None:
        capi.ggml_backend_buffer_free(self.buffer)
        _libc.munmap(self.base, self.size)

    def __enter__(self) -> GuardedMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def data(leaf: Leaf, seed: int) -> bytes:
    """Numbers for a leaf: the same whenever they are asked for."""
    rng = np.random.default_rng(seed)
    n = int(np.prod(leaf.ne))
    if leaf.limit is not None:
        dtype = "<i8" if leaf.type == I64 else "<i4"
        return _indices(rng, leaf, n).astype(dtype).tobytes()
    if leaf.type in (I32, I64):
        return rng.integers(-3, 4, n).astype("<i8" if leaf.type == I64 else "<i4").tobytes()
    numbers = rng.standard_normal(n).astype("<f4")
    kind = seed % 16
    if kind == 1:
        numbers = np.round(numbers * 2)  # with zeros, and many equal ones
    elif kind == 2 and n:
        special = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e30, 1e-40], "<f4")
        numbers[rng.integers(0, n, 1 + n // 8)] = rng.choice(special)
    elif kind == 3:
        numbers *= 30
    if leaf.type == F32:
        return numbers.tobytes()
    if leaf.type == F16:
        with np.errstate(over="ignore"):
            return numbers.astype("<f2").tobytes()
    if leaf.type == capi.GGML_TYPE_BF16:
        return (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    if capi.ggml_is_quantized(leaf.type):
        return quantised(numbers, leaf.type, leaf.ne[0])
    return rng.integers(0, 256, n * capi.ggml_type_size(leaf.type), np.uint8).tobytes()


def _indices(rng: np.random.Generator, leaf: Leaf, n: int) -> np.ndarray[Any, Any]:
    limit = max(leaf.limit or 0, 1)
    if leaf.distinct and leaf.ne[0] <= limit:
        rows = [rng.permutation(limit)[: leaf.ne[0]] for _ in range(n // max(leaf.ne[0], 1))]
        return np.concatenate([*rows, np.empty(0, int)])
    return rng.integers(0, limit, n)


def quantised(numbers: np.ndarray[Any, Any], type: int, row: int) -> bytes:
    finite = np.nan_to_num(numbers, posinf=1, neginf=-1).clip(-1e3, 1e3)
    size = capi.ggml_row_size(type, row) * (len(finite) // row) if row else 0
    found = np.zeros(size, np.uint8)
    if size:
        with contextlib.suppress(ValueError, GGMLError):  # it wants an importance matrix: all zero
            capi.ggml_quantize_chunk(type, finite, found, 0, len(finite) // row, row, None)
    return found.tobytes()
