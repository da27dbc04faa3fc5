"""A row of the table: an operation, its operands and arguments, and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggml_cffi.enums import (
    ggml_type as Type,
)

F32, F16 = Type.GGML_TYPE_F32, Type.GGML_TYPE_F16

#: How far a number may be from the reference, relative, by the least exact type on its way.
EXACT = {"f32": 2e-6, "f16": 2**-10, "bf16": 2**-8}
QUANTISED = (
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q2_K",
    "q3_K",
    "q4_K",
    "q5_K",
    "q6_K",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
)


#: How far ggml moves a number of -2 to 2 where it takes it to the type that it multiplies in: the
#: weights' own, but 8 bits where those are quantised.
ROUNDING = {"f16": 2**-11, "bf16": 2**-8, "quantised": 2 / 254}


def of_product(n: int, rounding: float = ROUNDING["quantised"]) -> float:
    """How far a product of n numbers of -2 to 2 with as many weights may be, where each is moved
    by up to `rounding`: six times what that adds up to.
    """
    return 6 * rounding / 3**0.5 * (4 / 3) ** 0.5 * n**0.5


@dataclass(frozen=True)
class Operand:
    """A tensor with random numbers, or with `values`."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    low: float = -2.0
    high: float = 2.0
    values: Any = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def numbers(self, rng: np.random.Generator) -> np.ndarray:
        if self.values is not None:
            return np.asarray(self.values).reshape(self.shape)
        if self.dtype in ("i32", "i64"):
            return rng.integers(int(self.low), int(self.high), self.shape)
        return rng.uniform(self.low, self.high, self.shape)


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an operation. `reference` takes the operands and the arguments by name."""

    op: str
    operands: Mapping[str, Operand]
    arguments: Mapping[str, Any]
    reference: Callable[..., Any]
    rtol: float = 1e-5
    atol: float = 1e-5
    unordered: bool = False  # the numbers of a row in any order
    parameters: tuple[str, ...] = ()  # operands that are to be trained
    label: str = ""
    terms: int = 0  # of the sum that each number of a product of matrices is

    @property
    def error_on_gpu(self) -> tuple[float, float]:
        """How far a product of matrices may be, relative and absolute, where GPUs compute it in
        half precision: six times what adds up for numbers and weights of -2 to 2.

        Both factors are rounded. Where weights are not f32 the sum is as well, each time something
        is added: it wanders as the square root of the number of terms, or goes to a large result.
        """
        if not self.terms:
            return 0, 0
        atol = of_product(self.terms, 2**0.5 * ROUNDING["f16"])
        if {one.dtype for one in self.operands.values()} <= {"f32", "i32"}:
            return 0, atol
        rounding = 6 * ROUNDING["f16"] / 3**0.5
        of_sum = rounding * 4 / 3 * self.terms / 2**0.5
        return rounding * (self.terms / 3) ** 0.5, math.hypot(atol, of_sum)


CASES: list[Case] = []

#: Operations that have no reference, and why.
WITHOUT_REFERENCE: dict[str, str] = {}


def f32(*shape: int, low: float = -2, high: float = 2) -> Operand:
    return Operand(shape, "f32", low, high)


def f16(*shape: int, low: float = -2, high: float = 2) -> Operand:
    return Operand(shape, "f16", low, high)


def ints(*shape: int, below: int, dtype: str = "i32") -> Operand:
    return Operand(shape, dtype, 0, below)


def given(values: Any, dtype: str = "i32") -> Operand:
    values = np.asarray(values)
    return Operand(values.shape, dtype, values=values)


def case(
    op: str,
    reference: Callable[..., Any],
    operands: Mapping[str, Operand],
    /,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    unordered: bool = False,
    parameters: tuple[str, ...] = (),
    terms: int = 0,
    **arguments: Any,
) -> None:
    dtypes = {o.dtype for o in operands.values()}
    words = [f"{o.dtype}{'x'.join(map(str, o.shape))}" for o in operands.values()]
    words += [f"{name}={getattr(value, 'name', value)}" for name, value in arguments.items()]
    worst = max((EXACT.get(dtype, 0) for dtype in dtypes), default=0)
    CASES.append(
        Case(
            op,
            operands,
            arguments,
            reference,
            max(rtol, worst),
            max(atol, worst),
            unordered,
            parameters,
            f"{op}-{'-'.join(words)}",
            terms,
        )
    )


#: Shapes and types for what goes element by element.
SHAPES = ((7,), (3, 5), (2, 3, 4, 33))
ALL = ("f32", "f16", "bf16")
