"""Python's operators on tensors, by NumPy's rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import ops
from .enums import ggml_op
from .errors import OperandError
from .tensor import Tensor

_COMMUTES = {"add", "mul"}


def binary(name: str, left: object, right: object) -> Any:
    """add, sub, mul or div of tensors and numbers; NotImplemented for anything else."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _of_tensors(name, left, right)
    if isinstance(left, Tensor) and _is_number(right):
        return _with_number(name, left, float(right))  # type: ignore[arg-type]
    if isinstance(right, Tensor) and _is_number(left):
        return _number_first(name, float(left), right)  # type: ignore[arg-type]
    return NotImplemented


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _with_number(name: str, tensor: Tensor, number: float) -> Tensor:
    if name == "add":
        return ops.scale_bias(tensor, 1.0, number)
    if name == "sub":
        return ops.scale_bias(tensor, 1.0, -number)
    if name == "mul":
        return ops.scale(tensor, number)
    if number == 0:
        raise ZeroDivisionError("a Tensor divided by the number 0")
    return ops.scale(tensor, 1.0 / number)


def _number_first(name: str, number: float, tensor: Tensor) -> Tensor:
    if name in _COMMUTES:
        return _with_number(name, tensor, number)
    if name == "sub":
        return ops.scale_bias(tensor, -1.0, number)
    filled = ops.fill(tensor, number)
    return ops.div(filled, tensor)


def _of_tensors(name: str, left: Tensor, right: Tensor) -> Tensor:
    wanted = broadcast(name, left, right)
    if left.shape != wanted and right.shape == wanted and name in _COMMUTES:
        left, right = right, left
    return getattr(ops, name)(spread(left, wanted), right)  # type: ignore[no-any-return]


def broadcast(name: str, left: Tensor, right: Tensor) -> tuple[int, ...]:
    """The shape that both have by NumPy's rule. Raises OperandError where there is none."""
    try:
        return np.broadcast_shapes(left.shape, right.shape)
    except ValueError:
        raise OperandError(f"{name}: {left!r} and {right!r} do not broadcast together") from None


def spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor repeated to `shape`, itself where it has it."""
    if tensor.shape == shape or (math.prod(shape) == tensor.size and len(shape) == tensor.ndim):
        return tensor
    ne = [*reversed(shape), 1, 1, 1, 1][:4]
    result = ops.repeat_4d(tensor, *ne)
    return Tensor(result.handle, result.context, len(shape))


def matmul(left: object, right: object) -> Any:
    """``left @ right`` by NumPy's rule, also for one axis and for stacks of matrices."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return NotImplemented
    if not left.ndim or not right.ndim:
        raise OperandError(f"matmul: {left!r} @ {right!r}: each needs an axis")
    rows = left if left.ndim > 1 else _with_shape(left, (1, *left.shape))
    columns = _transposed(right) if right.ndim > 1 else _with_shape(right, (1, *right.shape))
    if rows.shape[-1] != columns.shape[-1]:
        raise OperandError(
            f"matmul: {left!r} @ {right!r}: {rows.shape[-1]} columns meet {columns.shape[-1]} rows"
        )
    try:
        stack = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    except ValueError:
        raise OperandError(f"matmul: {left!r} @ {right!r}: the stacks do not broadcast") from None
    rows = spread(rows, (*stack, *rows.shape[-2:]))  # ggml repeats the other one itself
    product = ops.mul_mat(columns, rows)
    shape = (*stack, *left.shape[-2:-1], *((right.shape[-1],) if right.ndim > 1 else ()))
    return _with_shape(product, shape)


def _transposed(tensor: Tensor) -> Tensor:
    """The tensor with its last two axes exchanged, contiguous as ggml wants its first operand."""
    handle = tensor.handle
    if handle.op == ggml_op.GGML_OP_TRANSPOSE:  # of a transpose it is what that was made of
        return Tensor(handle.src[0], tensor.context, tensor.ndim)
    return ops.cont(ops.transpose(tensor))


def _with_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape == shape:
        return tensor
    ne = [*reversed(shape), 1, 1, 1, 1][:4]
    if tuple(ne) == tensor.ne:
        return Tensor(tensor.handle, tensor.context, len(shape))
    result = ops.reshape_4d(tensor, *ne)
    return Tensor(result.handle, result.context, len(shape))
