"""What the demo's result should be, and how far rounding may take it from that.

The reference is NumPy in float64 on the dequantised weights. ggml differs from it in this:

- Before a product it rounds the activations as the weight's type wants them: F16 to half
  precision, BF16 to bfloat16, every quantised type to 8 bits in blocks, with the largest value of a
  block at 127. Blocks of activations are no longer than those of the weight.
- It computes and adds up in float32. (With F16, CPUs of Arm may add up in half precision.)
- It takes the GELU of GEGLU from a table in half precision.

Roundings are taken as independent and evenly distributed over a step, so their variances add up,
each propagated through what follows. A result may be `SIGMAS` standard deviations off.

Two runs of ggml round the same numbers in the same way, and differ in the order of their float32
sums alone; now and then that lets a number next to the middle of a step fall the other way: `FLIPS`
such steps may come on top.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import capi
from ._demo_block import FeedForward, Floats, Weight

_ROUNDED_TO: dict[int, str] = {
    capi.GGML_TYPE_F32: "",
    capi.GGML_TYPE_F16: "half precision",
    capi.GGML_TYPE_BF16: "bfloat16",
}

Doubles = npt.NDArray[np.float64]

SIGMAS = 8
FLIPS = 4

_UNIT_F32 = 2.0**-24  # half a step, relative to the value
_UNIT_F16 = 2.0**-11
_UNIT_BF16 = 2.0**-8
_SLOPE = 1.13  # the steepest that SiLU (1.10) and GELU (1.13) get
_CHUNK = 2**20  # elements of a weight that are dequantised at a time


@dataclass(frozen=True)
class Expected:
    """The exact result, of shape (tokens, n_embd), and the tolerance of each of its elements."""

    result: Doubles
    to_exact: Doubles
    """How far a run of ggml may be from `result`."""
    to_other: Doubles
    """How far a run of ggml may be from another one."""


@dataclass(frozen=True)
class Comparison:
    """How two results differ; a NaN differs from everything."""

    largest: float
    """The largest difference."""
    used: float
    """The largest share of its tolerance that a difference uses up: above 1 they disagree."""

    @property
    def agree(self) -> bool:
        """Whether no difference is above its tolerance."""
        return self.used <= 1


def compare(got: npt.ArrayLike, wanted: npt.ArrayLike, tolerance: Doubles) -> Comparison:
    """Compare two results, element by element. Raises ValueError for different shapes."""
    one, other = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if not one.shape == other.shape == tolerance.shape:
        raise ValueError(f"shapes {one.shape}, {other.shape} and {tolerance.shape} differ")
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.abs(one - other)
        used = difference / tolerance
    used[(difference == 0) & (tolerance == 0)] = 0
    used[~np.isfinite(tolerance)] = np.nan  # or an overflow would allow everything
    return Comparison(float(np.max(difference)), float(np.max(used)))


def describe_tolerance(block: FeedForward) -> str:
    """What the tolerances of a block are made of, for its types, in one line."""
    notes = {_ROUNDED_TO.get(weight.type, "8 bits") for weight in block.weights}
    parts = [f"activations to {note}" for note in sorted(notes - {""})]
    parts += ["GELU to half precision"] * (block.gating == "GEGLU") + ["sums in float32"]
    between = f", and {FLIPS} roundings that fall the other way" if len(parts) > 1 else ""
    return (
        f"{SIGMAS} standard deviations of rounding ({', '.join(parts)}); "
        f"between two runs, of that of sums alone{between}"
    )


def expect(block: FeedForward, x: Floats) -> Expected:
    """The result of a block for the tokens `x`, of shape (tokens, n_embd), and its tolerances."""
    with np.errstate(over="ignore", invalid="ignore"):  # weights of a file may be anything
        return _expect(block, x.astype(np.float64))


def _expect(block: FeedForward, x: Doubles) -> Expected:
    gate = _product(block.gate, x, 0.0)
    up = _product(block.up, x, 0.0)
    if block.gating == "SwiGLU":
        act, table = gate.value / (1 + np.exp(-gate.value)), np.zeros_like(gate.value)
    else:
        act = _gelu(gate.value)
        # half a step of the table's argument, and of what it holds: at least that of subnormals
        table = _SLOPE * _UNIT_F16 * np.abs(gate.value)
        table += np.maximum(_UNIT_F16 * np.abs(act), 2.0**-25)
    hidden = act * up.value

    def spread(gate_variance: Doubles, up_variance: Doubles) -> Doubles:
        by_gate = (_SLOPE * up.value) ** 2 * gate_variance
        by_up = act**2 * up_variance
        return np.asarray(by_gate + by_up + (4 * _UNIT_F32 * hidden) ** 2)

    table_step = np.abs(up.value) * table
    in_float32 = spread(gate.summing, up.summing)
    in_all = spread(gate.summing + gate.rounding, up.summing + up.rounding) + table_step**2 / 3
    down = _product(block.down, hidden, in_all)
    flip = _largest_addend(block.down, 2 * (_half_step(hidden, block.down) + table_step))
    float32 = _product(block.down, hidden, in_float32, rounded=False)
    return Expected(
        down.value,
        SIGMAS * np.sqrt(down.rounding + down.summing),
        SIGMAS * np.sqrt(2 * (float32.rounding + float32.summing)) + FLIPS * flip,
    )


def _gelu(x: Doubles) -> Doubles:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x**2))))


@dataclass(frozen=True)
class _Product:
    value: Doubles
    rounding: Doubles
    """The variance that comes from the operand."""
    summing: Doubles
    """The variance that comes from adding up in float32."""


def _product(
    weight: Weight, x: Doubles, variance: Doubles | float, *, rounded: bool = True
) -> _Product:
    """The product with a weight, where `x` has a variance, and is `rounded` for the product."""
    if rounded:
        variance = variance + _half_step(x, weight) ** 2 / 3
    value, rounding, size = [], [], []
    for begin, end in _chunks(weight, 1):
        rows = _rows(weight, begin, end)
        value.append(x @ rows.T)
        rounding.append(variance @ (rows**2).T)
        size.append(np.abs(x) @ np.abs(rows).T)
    unit = _UNIT_F32
    if weight.type == capi.GGML_TYPE_F16 and platform.machine() == "aarch64":
        unit = _UNIT_F16
    # as many roundings as addends, each at most of the size of the sum: they add up as a walk
    summing = weight.ne[0] * (unit * np.concatenate(size, 1)) ** 2 / 3
    return _Product(np.concatenate(value, 1), np.concatenate(rounding, 1), summing)


def _largest_addend(weight: Weight, steps: Doubles) -> Doubles:
    """For each element of the product the most that one step of one element of `x` makes of it."""
    found = []
    for begin, end in _chunks(weight, len(steps)):
        rows = np.abs(_rows(weight, begin, end))
        found.append((steps[:, None, :] * rows[None]).max(axis=2))
    return np.concatenate(found, 1)


def _chunks(weight: Weight, copies: int) -> list[tuple[int, int]]:
    n_in, n_out = weight.ne
    step = max(1, _CHUNK // (n_in * copies))
    return [(begin, min(begin + step, n_out)) for begin in range(0, n_out, step)]


def _rows(weight: Weight, begin: int, end: int) -> Doubles:
    return weight.to_float(weight.data[begin:end]).astype(np.float64)


def _half_step(x: Doubles, weight: Weight) -> Doubles:
    """How far each element of `x` may be rounded for a product with the weight."""
    if weight.type == capi.GGML_TYPE_F32:
        return np.zeros_like(x)
    if weight.type == capi.GGML_TYPE_F16:
        return _UNIT_F16 * np.abs(x)
    if weight.type == capi.GGML_TYPE_BF16:
        return _UNIT_BF16 * np.abs(x)
    blocks = np.abs(x).reshape(len(x), -1, weight.block_size).max(axis=2) / 254
    return np.repeat(blocks, weight.block_size, axis=1)
