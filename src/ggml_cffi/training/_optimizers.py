"""The optimisers: their parameters, checked, and what ggml is told before each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..enums import ggml_opt_optimizer_type

__all__ = ["SGD", "AdamW", "Optimizer", "Schedule"]

Schedule: TypeAlias = float | Callable[[int], float]
"""A learning rate, or a function that gives it for a step; the first one is step 0."""

_TINY = float(np.finfo(np.float32).tiny)
"""ggml refuses a learning rate of 0; this one changes no weight either."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    For the gradient g of step t, the first being 1::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g²
        w = (1 - rate decay) w - rate m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

    `learning_rate` may be a function of the step. Raises ValueError for a `learning_rate` or an
    `epsilon` below 0, betas outside 0 to below 1, a `weight_decay` outside 0 to 1, all as float32
    has them, and TypeError for what is no number.
    """

    learning_rate: Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        _check("beta1", self.beta1, 1.0, below=True)
        _check("beta2", self.beta2, 1.0, below=True)
        _check("epsilon", self.epsilon)
        _check("weight_decay", self.weight_decay, 1.0)

    @property
    def type(self) -> ggml_opt_optimizer_type:
        """The enumerator for it."""
        return ggml_opt_optimizer_type.GGML_OPT_OPTIMIZER_TYPE_ADAMW

    def _values(self, step: int, counted: int) -> dict[str, dict[str, float]]:
        """What ggml is told for step `step`, where it has counted `counted` of those before.

        Its count, from which it corrects the bias of m and v, begins anew with each context, and
        cannot be set: rate, epsilon and decay make up for that. sqrt(v c) + epsilon, for the
        correction c = 1 / (1 - beta2^t), is sqrt(v c') + r epsilon divided by r = sqrt(c' / c).
        """
        rate = max(_rate(self.learning_rate, step), _TINY)
        first = (1 - self.beta1 ** (counted + 1)) / (1 - self.beta1 ** (step + 1))
        root = math.sqrt((1 - self.beta2 ** (step + 1)) / (1 - self.beta2 ** (counted + 1)))
        scale = first * root
        # ggml refuses a decay above 1, which only a beta1 far above beta2 leads to
        decay = min(self.weight_decay / scale, 1.0)
        return {
            "adamw": {
                "alpha": rate * scale,
                "beta1": self.beta1,
                "beta2": self.beta2,
                "eps": self.epsilon * root,
                "wd": decay,
            }
        }


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: ``w = (1 - rate decay) w - rate g``, without momentum.

    `learning_rate` may be a function of the step. Raises ValueError for a `learning_rate` below 0
    and a `weight_decay` outside 0 to 1, TypeError for what is no number.
    """

    learning_rate: Schedule = 1e-2
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.learning_rate)
        _check("weight_decay", self.weight_decay, 1.0)

    @property
    def type(self) -> ggml_opt_optimizer_type:
        """The enumerator for it."""
        return ggml_opt_optimizer_type.GGML_OPT_OPTIMIZER_TYPE_SGD

    def _values(self, step: int, counted: int) -> dict[str, dict[str, float]]:
        rate = max(_rate(self.learning_rate, step), _TINY)
        return {"sgd": {"alpha": rate, "wd": self.weight_decay}}


Optimizer: TypeAlias = AdamW | SGD
"""What a `Trainer` takes."""


def _check(name: str, value: Any, most: float = math.inf, below: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a number")
    try:
        with np.errstate(over="ignore"):
            told = float(np.float32(value))
    except OverflowError:  # of an integer
        told = math.inf

    def fits(number: Any) -> bool:
        return bool(0 <= number < most or (number == most and not below and most < math.inf))

    if not fits(told):
        above = f"0 to {'below ' if below else ''}{most:g}" if math.isfinite(most) else "0 or more"
        changed = f", which float32 has as {told:g}" if fits(value) else ""
        raise ValueError(f"{name} is {value}{changed}, expected {above}")
    return float(value)


def _check_rate(rate: Schedule) -> None:
    if not callable(rate):
        _check("learning_rate", rate)


def _rate(schedule: Schedule, step: int) -> float:
    if not callable(schedule):
        return float(schedule)
    return _check(f"learning_rate({step})", schedule(step))
