"""Operations written in Python, on NumPy arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _kept, capi, quants
from ._loader import ffi
from .backend import thread
from .context import Context, ne_of, place, shape_of
from .dtypes import element_type, is_quantized, numpy_dtype
from .tensor import Tensor, block_rows, outer_first

Function = Callable[..., object]


def custom(
    function: Function,
    *operands: Tensor,
    shape: int | Sequence[int] | None = None,
    dtype: object = None,
    n_tasks: int | None = 1,
    ctx: Context | None = None,
) -> Tensor:
    """An operation that a Python function computes: ``function(result, *operands)`` on arrays.

    It fills `result`, an array of `shape` and `dtype` (those of the first operand by default); the
    operands are arrays that must not be written. All are views of ggml's memory, for the time of
    the call; quantised operands are float32 copies. With `n_tasks` other than 1 it is called for
    each task, as ``function(result, *operands, task=i, n_tasks=n)``, on ggml's threads, and fills
    its part of the result; None: as many tasks as the backend has threads.

    What it raises comes out of the computation, and a BufferError where an array, or a view of it,
    is kept beyond the call: keep copies. On a meta device it sees each device's part.

    Raises TypeError for what is no function, ValueError for a quantised `dtype` and for less than a
    task.
    """
    if not callable(function):
        raise TypeError(
            f"function is {function!r} ({type(function).__name__}), expected a function"
        )
    if not operands and (shape is None or ctx is None):
        raise TypeError("without operands shape and ctx are needed")
    if n_tasks is not None and n_tasks < 1:
        raise ValueError(f"n_tasks is {n_tasks}, expected 1 or more, or None")
    first = operands[0].type if operands else "f32"
    kind = element_type(first if dtype is None else dtype)
    wanted = shape_of(operands[0].shape if shape is None else shape)
    if is_quantized(kind):
        raise ValueError(f"dtype is {kind.name}: the result cannot be quantised")
    ndims = [one.ndim for one in operands]

    def call(dst: Any, task: int, count: int) -> None:
        owners: list[weakref.ref[object]] = []
        lent = [_array(dst, len(wanted), owners, writable=True)]
        lent += [_array(dst.src[i], ndim, owners) for i, ndim in enumerate(ndims)]
        thread.kernels += 1
        try:
            if n_tasks == 1:
                function(*lent)
            else:
                function(*lent, task=task, n_tasks=count)
        except BaseException:
            lent.clear()
            _kept.note(owners)  # by the exception's traceback, at least
            raise
        finally:
            thread.kernels -= 1
        lent.clear()
        _kept.check_given_back(owners)

    contexts = [one.context for one in operands]
    context = place(contexts, ctx)
    n0, n1, n2, n3 = ne_of(wanted)
    tasks = capi.GGML_N_TASKS_MAX if n_tasks is None else n_tasks
    with context._lock:
        handle = capi.ggml_custom_4d(
            context._room(), kind, n0, n1, n2, n3, [one.handle for one in operands], call, tasks
        )
    return Tensor(handle, context, len(wanted))


def _array(
    handle: Any, ndim: int, owners: list[weakref.ref[object]], writable: bool = False
) -> npt.NDArray[Any]:
    """The memory of a tensor that is being computed with; its owner is added to the others."""
    shape, strides = outer_first(handle.ne, ndim), outer_first(handle.nb, ndim)
    data = ffi.buffer(handle.data, capi.ggml_nbytes(handle))
    kind = element_type(int(handle.type))
    if is_quantized(kind):
        rows = block_rows(kind, shape, strides, np.frombuffer(data, np.uint8))
        return quants.dequantize(rows, kind, threads=1)
    dtype = numpy_dtype(kind)
    assert dtype is not None
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, strides=strides)
    owners.append(weakref.ref(data))
    array.flags.writeable = writable
    return array
