"""How an operation on tensor objects becomes a tensor of ggml's; what the generated `ops` call.

What is most frequent by far is done in C++ (ggml/building.hpp): operands of one context, and plain
numbers. `build` does everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _loader, _runtime, capi
from .context import Context, place
from .dtypes import type_name
from .errors import AbortError, OperandError
from .tensor import Tensor, n_axes, n_dims


def operation(
    name: str, parameters: tuple[str, ...], kinds: str, axes: int | None = None
) -> Callable[..., Tensor]:
    """The operation of that name in C, as a function of ``(ctx, *arguments)``.

    `kinds` has a letter for each parameter: t for a tensor, n for one that may be None, i, f and b
    for an integer, a float and a bool. `axes` is as in `build`, which the rest is left to.
    """
    function = getattr(capi, name)

    def slow(ctx: Context | None, *values: object) -> Tensor:
        return build(function, dict(zip(parameters, values, strict=True)), ctx, axes)

    def failed(why: tuple[Any, ...], *values: object) -> None:
        given = [one._handle if isinstance(one, Tensor) else one for one in values]
        try:
            raise _runtime.failed(name, (None, *given), why)
        except (AbortError, ValueError) as error:
            refuse(error, function, dict(zip(parameters, values, strict=True)))
            raise

    raising = _runtime.raising(name, _runtime.spec(name).fails)
    made: Callable[..., Tensor] = _loader.operation(
        raising, slow, failed, kinds, -1 if axes is None else axes
    )
    return made


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
    operands = _operands(arguments)
    passed: dict[str, object] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            passed[name] = value.handle
        elif isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
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
    context.handle  # noqa: B018 # raises after a fork, where another thread's lock may never be free
    with context._lock:
        try:
            handle = function(context._room(), *passed.values())
        except (AbortError, ValueError) as error:
            refuse(error, function, arguments)
            raise
    if axes is None:
        axes = max([_n_dims(handle, operands), *(one.ndim for one in operands.values())])
    return Tensor(handle, context, axes)


def refuse(error: Exception, function: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise OperandError, with what the operands are, where the error is that they do not fit."""
    if isinstance(error, AbortError):
        message = _told(_operands(arguments), error.message)
        place = error.file, error.line, error.function, error.log
        raise OperandError(message, *place) from None
    _, is_requirement, text = str(error).partition(f"{function.__name__}: requires ")
    if is_requirement:
        message = _told(_operands(arguments), f"requires {text}")
        raise OperandError(message, function=function.__name__) from None


def _operands(arguments: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors among the arguments, by name; those of a sequence by name and number."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Sequence) and value and isinstance(value[0], Tensor):
            found |= {f"{name}[{i}]": one for i, one in enumerate(value)}
    return found


def copy(tensor: object) -> object:
    """A copy of an operand that ggml would write in; what is no Tensor stays as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    return build(capi.ggml_cont, {"a": tensor})


def _n_dims(handle: Any, operands: Mapping[str, Tensor]) -> int:
    """As many axes as tell the shape; a single number has none only if it is made of operands."""
    return n_axes(handle) if operands else n_dims(handle)


def _told(operands: Mapping[str, Tensor], message: str) -> str:
    """The message behind what the operands are."""
    told = []
    for name, tensor in operands.items():
        called = f" {tensor.name!r}" if tensor.name else ""
        told.append(f"{name}{called} is {type_name(tensor.type)} of shape {tensor.shape}")
    return f"{'; '.join(told)}: {message}" if told else message
