"""What the hand-written functions of capi share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import TypeVar, cast

from .. import _runtime
from .._gen.tables import DOCS
from .._loader import lib
from .._runtime import call as call

_Function = TypeVar("_Function", bound=Callable[..., object])


def bound(function: _Function) -> _Function:
    """Put the facts of the C function before the docstring, as generated functions have them.

    In a build without the C function its stand-in raises NotSupportedError.
    """
    name = function.__name__
    if not hasattr(lib, name):
        missing = _runtime.absent(name)
        doc = missing.__doc__
        functools.update_wrapper(missing, function)
        missing.__doc__ = doc
        return cast(_Function, missing)
    own = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = f"{DOCS[name].rstrip()}\n\n{own}\n" if name in DOCS else own
    return function


def count(function: str, name: str, value: int) -> int:
    """`value` as an integer that is not negative."""
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{function}: {name} must be an integer, not {kind}") from None
    if number < 0:
        raise ValueError(f"{function}: {name} must not be negative, not {number}")
    return number
