"""Quantisation, whose buffers have sizes that follow from other arguments; YaRN's dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _runtime
from .._gen import enums
from .._loader import ffi
from ._base import bound, call, count

if TYPE_CHECKING:
    from .._gen import types

#: Types that ggml_quantize_chunk has no case for.
_NO_TARGET = {
    f"GGML_TYPE_{name}" for name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "COUNT")
}
_CData = ffi.CData


def _floats(function: str, name: str, value: Any, n: int) -> Any:
    """The address of at least `n` float32 numbers."""
    if isinstance(value, np.ndarray) and value.dtype != np.float32:
        raise TypeError(f"{function}: {name} must be an array of float32, not {value.dtype}")
    pointer = _bytes(function, name, value, 4 * n, writes=False)
    return value if isinstance(value, _CData) else ffi.cast("const float *", pointer)


def _bytes(function: str, name: str, value: Any, size: int, *, writes: bool) -> Any:
    if isinstance(value, _CData) and ffi.typeof(value).kind == "array" and ffi.sizeof(value) < size:
        have = ffi.sizeof(value)
        raise ValueError(f"{function}: {name} has {have} bytes, fewer than the {size} needed")
    pointer, _ = _runtime.buffer(value, size, function, name, nullable=False, writes=writes)
    return pointer


@bound
def ggml_quantize_chunk(
    type: enums.ggml_type | int,
    src: types.ReadableBuffer,
    dst: types.WritableBuffer,
    start: int,
    nrows: int,
    n_per_row: int,
    imatrix: types.ReadableBuffer | None = None,
) -> int:
    """Quantise `nrows` rows of `n_per_row` float32 numbers to `type`; gives the bytes written.

    `src` and `dst` are whole: the rows are those from number `start` of `src`, and go to their
    place in `dst`. `imatrix`: the weights of a row's numbers, float32; some types require it
    (ggml_quantize_requires_imatrix).

    Raises ValueError for a type that ggml cannot quantise to, for buffers that are too small, for
    negative numbers, and for `start` that is no multiple of `n_per_row`, which must be one of the
    type's block size; TypeError for NumPy arrays of another dtype than float32.
    """
    function = "ggml_quantize_chunk"
    try:
        kind = enums.ggml_type(type)
    except ValueError:
        raise ValueError(f"{function}: type is {type}, which is no ggml_type") from None
    if kind.name in _NO_TARGET:
        raise ValueError(f"{function}: ggml cannot quantise to {kind.name}")
    start = count(function, "start", start)
    nrows = count(function, "nrows", nrows)
    n_per_row = count(function, "n_per_row", n_per_row)
    block = call("ggml_blck_size", kind)
    if n_per_row == 0 or n_per_row % block:
        raise ValueError(
            f"{function}: n_per_row is {n_per_row}, expected a multiple of {block} for {kind.name}"
        )
    if start % n_per_row:
        raise ValueError(f"{function}: start is {start}, no multiple of n_per_row {n_per_row}")
    if imatrix is None and call("ggml_quantize_requires_imatrix", kind):
        raise ValueError(f"{function}: imatrix must not be None for {kind.name}")
    row_bytes = n_per_row // block * call("ggml_type_size", kind)
    numbers = _floats(function, "src", src, start + nrows * n_per_row)
    room = (start // n_per_row + nrows) * row_bytes
    weights = ffi.NULL if imatrix is None else _floats(function, "imatrix", imatrix, n_per_row)
    target = _bytes(function, "dst", dst, room, writes=True)
    written: int = call(function, kind, numbers, target, start, nrows, n_per_row, weights)
    return written


@bound
def ggml_rope_yarn_corr_dims(
    n_dims: int, n_ctx_orig: int, freq_base: float, beta_fast: float, beta_slow: float
) -> tuple[float, float]:
    """Give the dimensions between which YaRN goes over from one kind of scaling to the other."""
    dims = ffi.new("float[2]")
    call("ggml_rope_yarn_corr_dims", n_dims, n_ctx_orig, freq_base, beta_fast, beta_slow, dims)
    return dims[0], dims[1]
