"""How an operation on tensor objects becomes a tensor of ggml's; what the generated `ops` call.

What is most frequent by far is done in C++ (ggml/building.hpp): operands of one context, and plain
numbers. `build` does everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from . import _loader, _runtime, capi
from .context import Context, place
from .dtypes import type_name
from .enums import ggml_type
from .errors import AbortError, OperandError
from .tensor import Tensor, n_axes, n_dims

_Operation = TypeVar("_Operation", bound=Callable[..., Tensor])


def operation(
    name: str, signature: str, kinds: str, axes: int | None = None
) -> Callable[[_Operation], _Operation]:
    """Decorate an operation so that C++ does what is most frequent, and the rest the function.

    `kinds` has a letter for each parameter but `ctx` and those that are set afterwards: t for a
    tensor, n for one that may be None, i, f and b for an integer, a float and a bool. `axes` is as
    in `build`.
    """

    def decorate(python: _Operation) -> _Operation:
        function: Any = python
        code = function.__code__
        parameters: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = tuple(one for one in parameters if one != "ctx")[: len(kinds)]
        positional = parameters[: code.co_argcount]
        given = function.__defaults__ or ()
        defaults = dict(zip(positional[len(positional) - len(given) :], given, strict=True))
        defaults |= function.__kwdefaults__ or {}

        def failed(why: tuple[Any, ...], *values: object) -> None:
            made_by = getattr(capi, name)
            handles = [one._handle if isinstance(one, Tensor) else one for one in values]
            try:
                raise _runtime.failed(name, (None, *handles), why)
            except (AbortError, ValueError) as error:
                refuse(error, made_by, dict(zip(names, values, strict=True)))
                raise

        made: _Operation = _loader.operation(
            _runtime.raising(name, _runtime.spec(name).fails),
            *(python, failed, (*names, "ctx"), defaults),
            *(kinds, -1 if axes is None else axes, len(positional)),
            *(function.__name__, f"{function.__name__}{signature}\n--\n\n{function.__doc__}"),
            function.__module__,
        )
        return made

    return decorate


def build(
    function: Callable[..., Any],
    arguments: Mapping[str, object],
    ctx: Context | None = None,
    axes: int | None = None,
    *settings: tuple[Callable[[Any, Any], None], str, object],
) -> Tensor:
    """Call a function of `capi` that makes a tensor in a context.

    `axes` is how many the result has; None: as many as ggml counts, and as its operands have.
    `settings` are functions that change the result before anybody has it, each with the name and
    the value of its other argument; None: it is not called.

    Raises OperandError where ggml, or a check before it, finds that the operands do not fit.
    """
    wanted = [one for one in settings if one[2] is not None]
    operands = _operands({**arguments, **{name: value for _, name, value in wanted}})
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
    elif not contexts:
        raise TypeError(f"{function.__name__}: none of the operands is a Tensor: ctx is missing")
    context = place(contexts, ctx)
    context.handle  # noqa: B018 # raises after a fork, where another thread's lock may never be free
    with context._lock:
        try:
            handle = function(context._room(), *passed.values())
        except (AbortError, ValueError) as error:
            refuse(error, function, arguments)
            raise
        for setter, name, value in wanted:
            try:
                setter(handle, value.handle if isinstance(value, Tensor) else value)
            except (AbortError, ValueError) as error:
                refuse(error, setter, {**arguments, name: value})
                raise
        if axes is None:
            axes = max([_n_dims(handle, operands), *(one.ndim for one in operands.values())])
    return Tensor(handle, context, axes)


F64 = ggml_type.GGML_TYPE_F64
FLOAT64 = "ggml computes little with f64: Context.from_numpy(array, dtype='f32') converts"


def refuse(error: Exception, function: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise OperandError where ggml has aborted, or a requirement is not met; say what was given.

    A requirement says itself which numbers it is about.
    """
    if isinstance(error, AbortError):
        told = _told(arguments) + _spoken_of(arguments, error.message)
        message = f"{'; '.join(told)}: " * bool(told) + error.message
        message += _way_out(error.message, arguments)
        raise OperandError(message, error.file, error.line, error.function, error.log) from None
    _, is_requirement, text = str(error).partition(f"{function.__name__}: requires ")
    if is_requirement:
        told = _told(arguments)
        message = f"{'; '.join(told)}: " * bool(told) + f"requires {text}"
        if any(one._kind == F64 for one in _operands(arguments).values()):
            message += f"; {FLOAT64}"
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


def _way_out(assertion: str, arguments: Mapping[str, object]) -> str:
    """What to do where ggml asserts that one of the operands lies as a new tensor does."""
    found = re.search(r"\bggml_is_(?:contiguous|padded)\w*\((\w+)", assertion)
    if not found or found[1] not in arguments:
        return ""
    return "; it has gaps or is permuted, and ops.cont gives a copy that is not"


def _n_dims(handle: Any, operands: Mapping[str, Tensor]) -> int:
    """As many axes as tell the shape; a single number has none only if it is made of operands."""
    return n_axes(handle) if operands else n_dims(handle)


def _told(arguments: Mapping[str, object]) -> list[str]:
    """What the operands are."""
    told = []
    for name, tensor in _operands(arguments).items():
        called = f" {tensor.name!r}" if tensor.name else ""
        told.append(f"{name}{called} is {type_name(tensor.type)} of shape {tensor.shape}")
    return told


def _spoken_of(arguments: Mapping[str, object], message: str) -> list[str]:
    """What the numbers are that an assertion is about."""
    words = set(re.findall(r"\w+", message))
    return [
        f"{name} is {value}"
        for name, value in arguments.items()
        if name in words and isinstance(value, (int, float))
    ]
