"""How an operation on tensor objects becomes a tensor of ggml's; what the generated `ops` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import capi
from .context import Context, place
from .dtypes import type_name
from .errors import AbortError, OperandError
from .tensor import Tensor, n_dims


def build(
    function: Callable[..., Any],
    arguments: Mapping[str, object],
    ctx: Context | None = None,
    axes: int | None = None,
) -> Tensor:
    """Call a function of `capi` that makes a tensor in a context.

    `axes` is how many the result has; None: as many as ggml counts, and as its operands have.

    Raises OperandError where ggml, or a check before it, finds that the operands do not fit.
    """
    operands: dict[str, Tensor] = {}
    passed: dict[str, object] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            operands[name] = value
            passed[name] = value.handle
        elif isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
            operands |= {f"{name}[{i}]": one for i, one in enumerate(value)}
            passed[name] = [one.handle for one in value]
        else:
            passed[name] = value
    contexts = [one.context for one in operands.values()]
    if ctx is not None:
        if not isinstance(ctx, Context):
            raise TypeError(f"ctx is {ctx!r} ({type(ctx).__name__}), expected a Context")
        contexts.insert(0, ctx)
    if not contexts:
        raise TypeError(f"{function.__name__}: none of the operands is a Tensor: ctx is missing")
    context = place(contexts)
    with context._lock:
        try:
            handle = function(context._results(), *passed.values())
        except AbortError as error:
            raise OperandError(
                _told(operands, error.message), error.file, error.line, error.function, error.log
            ) from None
        except ValueError as error:
            _, is_requirement, text = str(error).partition(f"{function.__name__}: requires ")
            if not is_requirement:
                raise
            message = _told(operands, f"requires {text}")
            raise OperandError(message, function=function.__name__) from None
    if axes is None:
        axes = max([_n_dims(handle, operands), *(one.ndim for one in operands.values())])
    return Tensor(handle, context, axes)


def copy(tensor: object) -> object:
    """A copy of an operand that ggml would write in; what is no Tensor stays as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    return build(capi.ggml_cont, {"a": tensor})


def _n_dims(handle: Any, operands: Mapping[str, Tensor]) -> int:
    """As ggml counts, but that a single number has no axis if it is made of operands."""
    counted = n_dims(handle)
    return 0 if operands and counted == 1 and handle.ne[0] == 1 else counted


def _told(operands: Mapping[str, Tensor], message: str) -> str:
    """The message behind what the operands are."""
    told = []
    for name, tensor in operands.items():
        called = f" {tensor.name!r}" if tensor.name else ""
        told.append(f"{name}{called} is {type_name(tensor.type)} of shape {tensor.shape}")
    return f"{'; '.join(told)}: {message}" if told else message
