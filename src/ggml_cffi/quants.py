"""Quantisation and back, by ggml's own C and on all cores.

A quantised row is a sequence of blocks; their layout is that of the ``block_*`` structs in ggml's
``ggml-common.h``. Rows lie along the last axis: an array of shape ``(..., n)`` becomes bytes of
shape ``(..., n // block_size * type_size)``.
"""

from __future__ import annotations

import collections
import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _runtime, capi
from ._loader import ffi, lib
from ._progress import Progress, Tell, telling
from .backend import usable_cores
from .dtypes import as_array, check_range, element_type, numpy_dtype, type_name
from .enums import ggml_type
from .errors import NotSupportedError

__all__ = ["dequantize", "quantize"]

_CHUNK = 1 << 18
"""Numbers that a thread converts at a time: long enough for C, short enough to share out."""


def quantize(
    array: npt.ArrayLike,
    type: ggml_type | str | int,
    imatrix: npt.ArrayLike | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> npt.NDArray[np.uint8]:
    """Quantise the rows of `array` to `type`; gives the bytes, shape ``(..., bytes of a row)``.

    `array` has shape ``(..., n)``, of any real dtype and layout; it is converted to float32. `n` is
    a multiple of the type's block size. `imatrix` says how much each number of a row matters: of
    shape ``(n,)`` for all rows, or one that broadcasts to ``array.shape[:-2] + (n,)``, a row for
    each matrix. `threads`: all usable cores by default. `progress(done, total)` is called on the
    calling thread, in rows; what it raises ends the work. Without it a bar on stderr shows that
    with tqdm if it is installed, stderr is a terminal and it takes over a second; False: never,
    True: also where it is no terminal.

    The bytes are those of ``ggml_quantize_chunk``; for q8_1 and q8_K, which that does not know,
    those of ggml's reference and of its CPU backend. Weights are of no use to some types.

    Raises ValueError for a shape that does not fit, for a type that ggml cannot quantise to, and
    for a missing `imatrix` where the type needs one; TypeError for complex numbers, objects
    and masked arrays; OverflowError for integers that `type`, one without blocks, cannot hold;
    AbortError where ggml gives up on the numbers (NaN, for some types).
    """
    kind = element_type(type)
    source = as_array(array, "array")
    if source.dtype.kind not in "fiub" and source.dtype.name != "bfloat16":
        raise TypeError(f"array has dtype {source.dtype}, expected real numbers")
    if (plain := numpy_dtype(kind)) is not None:
        check_range(source, plain, type_name(kind))
    n = _row_length(source, "array")
    size = _row_bytes(kind, n)
    convert = _quantizer(kind, n)
    rows = source.reshape(-1 if n else math.prod(source.shape[:-1]), n)
    weights, n_rows = _importance(imatrix, kind, source.shape)
    result = np.empty((len(rows), size), np.uint8)

    def work(start: int, stop: int) -> None:
        numbers = np.ascontiguousarray(rows[start:stop], np.float32)
        given = ffi.from_buffer("float[]", numbers)
        blocks = ffi.from_buffer(result[start:stop], require_writable=True)
        mine = ffi.from_buffer("float[]", weights[start // n_rows]) if weights.size else ffi.NULL
        convert(given, blocks, stop - start, mine)

    _share_out(work, _chunks(len(rows), n, n_rows), len(rows), threads, progress)
    return result.reshape(*source.shape[:-1], size)


def dequantize(
    data: npt.ArrayLike,
    type: ggml_type | str | int,
    threads: int | None = None,
    progress: Progress = None,
) -> npt.NDArray[np.float32]:
    """Convert rows of `type` back to numbers; gives float32 of shape ``(..., n)``.

    `data` has dtype uint8 and shape ``(..., bytes of a row)``, as `quantize` gives it. `threads`
    and `progress` are as there.

    The numbers are those of ggml's ``to_float``; for q8_1 and q8_K, which ggml only multiplies
    with, scale times integer, as its products take them.

    Raises ValueError for a shape that does not fit, TypeError for another dtype, and
    NotSupportedError for the types that are no numbers of blocks (integers).
    """
    kind = element_type(type)
    source = as_array(data, "data")
    if source.dtype != np.uint8:
        raise TypeError(f"data has dtype {source.dtype}, expected uint8: the bytes of the blocks")
    size = _row_length(source, "data")
    traits = capi.ggml_get_type_traits(kind)
    if size % traits.type_size:
        raise ValueError(
            f"data has rows of {size} bytes, expected a multiple of {traits.type_size}: the bytes "
            f"of a block of {type_name(kind)}"
        )
    n = size // traits.type_size * traits.blck_size
    rows = source.reshape(-1 if size else math.prod(source.shape[:-1]), size)
    result = np.empty((len(rows), n), np.float32)
    scaled = _SCALED.get(type_name(kind))
    if scaled is not None and scaled.itemsize != traits.type_size:
        scaled = None  # another release's layout
    if kind != capi.GGML_TYPE_F32 and not traits.to_float and scaled is None:
        raise NotSupportedError(f"ggml cannot convert {type_name(kind)} to numbers")

    def work(start: int, stop: int) -> None:
        blocks = np.ascontiguousarray(rows[start:stop])
        if kind == capi.GGML_TYPE_F32:
            result[start:stop] = blocks.view(np.float32)
        elif scaled is not None and not traits.to_float:
            each = blocks.reshape(-1).view(scaled)
            numbers = result[start:stop].reshape(len(each), -1)
            np.multiply(each["d"][:, None].astype(np.float32), each["qs"], numbers)
        else:
            numbers = ffi.from_buffer("float[]", result[start:stop], require_writable=True)
            count = result[start:stop].size
            _runtime.invoke(
                "ggml_to_float_t", traits.to_float, ffi.from_buffer(blocks), numbers, count
            )

    _share_out(work, _chunks(len(rows), n, len(rows)), len(rows), threads, progress)
    return result.reshape(*source.shape[:-1], n)


#: Blocks that are a scale and integers: ``block_q8_1`` and ``block_q8_K``.
_SCALED = {
    "q8_1": np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)]),
    "q8_K": np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)]),
}


# ---- what fits


def _row_length(array: npt.NDArray[Any], name: str) -> int:
    if array.ndim == 0:
        raise ValueError(f"{name} is a single number, expected rows along the last axis")
    return int(array.shape[-1])


def _row_bytes(kind: ggml_type, n: int) -> int:
    block = capi.ggml_blck_size(kind)
    if n % block:
        raise ValueError(
            f"array has rows of {n}, expected a multiple of {block}: a block of {type_name(kind)}"
        )
    return n // block * capi.ggml_type_size(kind)


def _importance(
    imatrix: npt.ArrayLike | None, kind: ggml_type, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], int]:
    """The weights, a row for each matrix, none where there are none; and the rows of a matrix."""
    n_rows = max(1, math.prod(shape[:-1]))
    if imatrix is None:
        if capi.ggml_quantize_requires_imatrix(kind):
            raise ValueError(f"imatrix must not be None for {type_name(kind)}")
        return np.empty((0, 0), np.float32), n_rows
    given = as_array(imatrix, "imatrix")
    if given.dtype.kind not in "fiu":
        raise TypeError(f"imatrix has dtype {given.dtype}, expected real numbers")
    with np.errstate(over="ignore"):
        weights = given.astype(np.float32)
    if not np.isfinite(weights).all() or (given < 0).any():
        raise ValueError("imatrix has numbers that are negative or not finite, as float32 at least")
    if given.ndim > 1:
        n_rows = max(1, math.prod(shape[-2:-1]))
    wanted = (*shape[:-2], shape[-1]) if given.ndim > 1 else shape[-1:]
    try:
        weights = np.broadcast_to(weights, wanted)
    except ValueError:
        raise ValueError(
            f"imatrix has shape {given.shape}, expected one that broadcasts to {wanted}"
        ) from None
    return np.ascontiguousarray(weights.reshape(-1, shape[-1]), np.float32), n_rows


# ---- how a type is made


def _quantizer(kind: ggml_type, n: int) -> Callable[[Any, Any, int, Any], None]:
    """Quantises rows of `n` float32: of pointers to them and the blocks, their number, weights."""
    name = type_name(kind)
    from_float = None
    if name == "q8_1":
        from_float = capi.ggml_get_type_traits(kind).from_float_ref
    elif name == "q8_K" and hasattr(lib, "ggml_get_type_traits_cpu"):
        from_float = capi.ggml_get_type_traits_cpu(kind).from_float
    layout = capi.ggml_blck_size(kind), capi.ggml_type_size(kind)

    def by_row(numbers: Any, blocks: Any, count: int, weights: Any) -> None:
        _runtime.invoke("ggml_from_float_t", from_float, numbers, blocks, count * n)

    def by_block(numbers: Any, blocks: Any, count: int, weights: Any) -> None:
        lib.ggml_cffi_quantize_q8_0(numbers, blocks, count * n)

    def by_chunk(numbers: Any, blocks: Any, count: int, weights: Any) -> None:
        # capi's would look at the sizes each time
        _runtime.call("ggml_quantize_chunk", kind, numbers, blocks, 0, count, n, weights)

    if from_float:
        return by_row
    if name == "q8_0" and layout == (32, 34):  # not another release's
        return by_block
    if n:  # refuses types that ggml cannot quantise to
        weights = np.ones(n, np.float32) if capi.ggml_quantize_requires_imatrix(kind) else None
        row = np.empty(_row_bytes(kind, n), np.uint8)
        capi.ggml_quantize_chunk(kind, np.zeros(n, np.float32), row, 0, 0, n, weights)
    return by_chunk


# ---- all cores


def _chunks(n_rows: int, n: int, together: int) -> list[tuple[int, int]]:
    """Ranges of rows, a thread's worth each; none crosses a multiple of `together`."""
    if not n or not n_rows:
        return []
    step = max(1, _CHUNK // n)
    return [
        (start, min(start + step, first + together, n_rows))
        for first in range(0, n_rows, together)
        for start in range(first, min(first + together, n_rows), step)
    ]


def _share_out(
    work: Callable[[int, int], None],
    chunks: list[tuple[int, int]],
    total: int,
    threads: int | None,
    progress: Progress,
) -> None:
    """Do `work` on all chunks; the first exception ends it."""
    if isinstance(threads, (bool, np.bool_)):
        raise TypeError(f"threads is {threads}, expected an int")
    count = usable_cores() if threads is None else operator.index(threads)
    if count < 1:
        raise ValueError(f"threads is {threads}, expected 1 or more")
    todo = collections.deque(chunks)
    finished: collections.deque[int] = collections.deque()
    errors: list[BaseException] = []
    done = 0

    def convert() -> bool:
        try:
            start, stop = todo.popleft()
        except IndexError:
            return False
        work(start, stop)
        finished.append(stop - start)
        return True

    def help_out() -> None:
        try:
            while convert():
                pass
        except BaseException as error:
            errors.append(error)
            todo.clear()

    def account(tell: Tell) -> None:
        nonlocal done
        while finished:
            done += finished.popleft()
            tell(done, total)

    # The calling thread works as well: one that only waited would be woken for every chunk, and
    # take a core and the GIL from those that work.
    helpers = [threading.Thread(target=help_out) for _ in range(min(count, len(chunks)) - 1)]
    begun: list[threading.Thread] = []
    with telling(total, progress, "row") as tell:
        try:
            for helper in helpers:
                helper.start()
                begun.append(helper)
            while convert():
                account(tell)
        finally:
            todo.clear()  # nothing is left, or an exception is on its way
            for helper in begun:
                helper.join()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # its traceback leads here, and back to the arrays
        account(tell)
