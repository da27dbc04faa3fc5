"""What a split function may give for a number: strict conversions whose errors name the value."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np


def integer(value: object, name: str, where: str) -> int:
    """An int, a NumPy integer or an integral float, as an int.

    Raises TypeError for other types, bool among them, and ValueError for other floats.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if not number.is_integer():  # False for NaN and the infinities as well
            raise ValueError(f"{where}: {name} is {number!r}, expected an integer")
        return int(number)
    raise TypeError(f"{where}: {name} is {describe(value)}, expected an integer")


def items(value: object, name: str, where: str, length: int | None = None) -> list[object]:
    """The elements of a sequence or of an array, of the given length.

    Raises TypeError for anything else, strings and bytes among them, and ValueError for another
    length.
    """
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    is_number = isinstance(value, np.ndarray) and value.ndim == 0
    if is_text or is_number or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{where}: {name} is {describe(value)}, expected a sequence of integers")
    # before the elements are looked at: there may be very many
    if length is not None and len(value) != length:
        raise ValueError(f"{where}: {name} has length {len(value)}, expected {length}")
    return list(value)


def integers(value: object, name: str, where: str, length: int | None = None) -> tuple[int, ...]:
    """The elements of a sequence or of an array as ints; errors as `items` and `integer`."""
    found = items(value, name, where, length)
    return tuple(integer(item, f"{name}[{i}]", where) for i, item in enumerate(found))


def ratios(values: Iterable[object], where: str) -> list[Fraction]:
    """Proportions, exact. Raises TypeError and ValueError for all that is none, or if all are 0."""
    given = list(values)
    found: list[Fraction] = []
    for j, value in enumerate(given):
        is_bool = isinstance(value, (bool, np.bool_))
        if is_bool or not isinstance(value, (int, float, Fraction, np.integer, np.floating)):
            raise TypeError(f"{where}: ratio {j} is {describe(value)}, expected a number")
        number = value if isinstance(value, (int, Fraction)) else float(value)
        try:
            good = math.isfinite(number) and number >= 0
        except OverflowError:  # beyond what a float holds
            good = False
        if not good:
            raise ValueError(f"{where}: ratio {j} is {show(number)}, expected 0 or more, finite")
        found.append(Fraction(number))
    if not any(found):
        raise ValueError(f"{where}: the ratios are {show(given)}, expected at least one above 0")
    return found


_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 32
_repr.maxother = _repr.maxstring = 100


def show(value: object) -> str:
    """A repr in one line: what a split function returns may be anything, and of any size."""
    try:
        return " ".join(_repr.repr(value).split())
    except Exception:
        return f"<{type(value).__name__} without a repr>"


def describe(value: object) -> str:
    """`show` with the type."""
    return f"{show(value)} ({type(value).__name__})"
