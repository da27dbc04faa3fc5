"""Python's operators on tensors, by NumPy's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import capi, ops
from .context import ne_of
from .dtypes import is_quantized
from .enums import ggml_op, ggml_type
from .errors import OperandError
from .tensor import Tensor

_COMMUTES = {"add", "mul"}
F32 = ggml_type.GGML_TYPE_F32
_HALF = (ggml_type.GGML_TYPE_F16, ggml_type.GGML_TYPE_BF16)


def binary(name: str, left: object, right: object) -> Any:
    """add, sub, mul or div of tensors and numbers; NotImplemented for anything else."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _of_tensors(name, left, right)
    if isinstance(left, Tensor) and _is_number(right):
        return _with_number(name, left, float(right))  # type: ignore[arg-type]
    if isinstance(right, Tensor) and _is_number(left):
        return _number_first(name, float(left), right)  # type: ignore[arg-type]
    return _no_operand(left, right)


def _no_operand(left: object, right: object) -> Any:
    for one in (left, right):
        if isinstance(one, np.ndarray):
            raise TypeError(
                f"an array of shape {one.shape} is no operand of a Tensor: make it one, by "
                "from_numpy of the Context"
            )
    return NotImplemented


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _with_number(name: str, tensor: Tensor, number: float) -> Tensor:
    if name == "div" and number == 0:
        raise ZeroDivisionError("a Tensor divided by the number 0")
    if name in ("mul", "div"):
        factor = number if name == "mul" else 1.0 / number
        return _in_f32(lambda x: ops.scale(x, factor), tensor)
    term = number if name == "add" else -number
    return _in_f32(lambda x: ops.scale_bias(x, 1.0, term), tensor)


def _number_first(name: str, number: float, tensor: Tensor) -> Tensor:
    if name in _COMMUTES:
        return _with_number(name, tensor, number)
    if name == "sub":
        return _in_f32(lambda x: ops.scale_bias(x, -1.0, number), tensor)
    return _in_f32(lambda x: ops.div(ops.fill(x, number), x), tensor)


def negative(tensor: Tensor) -> Tensor:
    """``-tensor``."""
    return ops.neg(_packed(_as_f32(tensor) if is_quantized(tensor.type) else tensor))


def _of_tensors(name: str, left: Tensor, right: Tensor) -> Tensor:
    same_shape = left.ndim == right.ndim and left.ne == right.ne
    wanted = None if same_shape else broadcast(name, left, right)
    kinds = left._kind, right._kind
    if kinds != (F32, F32) and (kinds[0] != kinds[1] or is_quantized(kinds[0])):
        left, right = _as_f32(left), _as_f32(right)
    if wanted is not None:
        if name in _COMMUTES and left.shape != wanted and right.shape == wanted:
            left, right = right, left
        left = spread(left, wanted)
    return getattr(ops, name)(_packed(left), right)  # type: ignore[no-any-return]


def _in_f32(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What ggml computes of float32 only; half precision comes back as what it was."""
    result = function(_contiguous(_as_f32(tensor)))
    return ops.cast(result, tensor.type) if tensor.type in _HALF else result


def _as_f32(tensor: Tensor) -> Tensor:
    return tensor if tensor._kind == F32 else ops.cast(tensor, F32)


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, copied if need be so that the elements of a row lie next to each other."""
    # ggml_is_contiguous does not look at the step along an axis of 1, but what computes does
    if tensor._nb[0] == capi.ggml_type_size(tensor._kind):
        return tensor
    return ops.cont(tensor)


def _contiguous(tensor: Tensor) -> Tensor:
    # by its steps: ggml_is_contiguous does not look at those along axes of 1, nor where it is empty
    n0, n1, n2, _ = tensor.ne
    step = capi.ggml_type_size(tensor.type)
    steps = (step, step * n0, step * n0 * n1, step * n0 * n1 * n2)
    return tensor if tensor._nb == steps else ops.cont(tensor)


def broadcast(name: str, left: Tensor, right: Tensor) -> tuple[int, ...]:
    """The shape that both have by NumPy's rule. Raises OperandError where there is none."""
    try:
        return np.broadcast_shapes(left.shape, right.shape)
    except ValueError:
        raise OperandError(f"{name}: {left!r} and {right!r} do not broadcast together") from None


def spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor repeated to `shape`, itself where it has it."""
    if tensor.shape == shape:
        return tensor
    ne = ne_of(shape)
    if ne != tensor.ne:
        tensor = ops.repeat_4d(_packed(tensor), *ne)
    return Tensor(tensor.handle, tensor.context, len(shape))


def matmul(left: object, right: object) -> Any:
    """``left @ right`` by NumPy's rule, also for one axis and for stacks of matrices.

    The result is of float32. ``x @ w.T`` takes a `w` of any type as it is, without a copy.
    """
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return _no_operand(left, right)
    if not left.ndim or not right.ndim:
        raise OperandError(f"matmul: {left!r} @ {right!r}: each needs an axis")
    rows = left if left.ndim > 1 else _with_shape(left, (1, *left.shape))
    if right.ndim > 1:
        columns = _transposed(right)
    else:
        columns = _packed(_with_shape(right, (1, *right.shape)))
    if rows.shape[-1] != columns.shape[-1]:
        raise OperandError(
            f"matmul: {left!r} @ {right!r}: {rows.shape[-1]} columns meet {columns.shape[-1]} rows"
        )
    try:
        stack = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    except ValueError:
        raise OperandError(f"matmul: {left!r} @ {right!r}: the stacks do not broadcast") from None
    rows = spread(_as_f32(rows), (*stack, *rows.shape[-2:]))  # ggml repeats the other one itself
    product = ops.mul_mat(columns, _packed(rows))
    shape = (*stack, *left.shape[-2:-1], *((right.shape[-1],) if right.ndim > 1 else ()))
    return _with_shape(product, shape)


def _transposed(tensor: Tensor) -> Tensor:
    """The tensor with its last two axes exchanged, with rows as ggml wants them of an operand."""
    if tensor._made_by == ggml_op.GGML_OP_TRANSPOSE:  # of a transpose it is what that was made of
        with tensor._held():
            source = tensor.handle.src[0]
            cast = source.op == ggml_op.GGML_OP_CPY and source.src[1] == source
            # and of a quantised tensor's, that tensor
            if cast and is_quantized(source.src[0].type):
                source = source.src[0]
        return _packed(Tensor(source, tensor.context, tensor.ndim))
    return ops.cont(ops.transpose(_as_f32(tensor) if is_quantized(tensor.type) else tensor))


def _with_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape == shape:
        return tensor
    ne = ne_of(shape)
    if ne == tensor.ne:
        return Tensor(tensor.handle, tensor.context, len(shape))
    result = ops.reshape_4d(tensor, *ne)
    return Tensor(result.handle, result.context, len(shape))
