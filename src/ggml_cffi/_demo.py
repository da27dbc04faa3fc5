"""The demo command: a feed-forward block, split over several devices and checked."""

from __future__ import annotations

import math
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from . import _demo_block, _demo_check, _demo_gguf, capi
from ._demo_block import FeedForward, Weight
from .device import Device
from .errors import SplitError
from .meta import MetaDevice, SplitState

MAX_DEVICES = 16
N_TOKENS = 8


class UsageError(Exception):
    """What was asked for cannot be done; the text says why in one line."""


def parse_ratios(text: str) -> tuple[float, ...]:
    """The shares of the devices, for argparse, from a text such as "3,1"."""
    try:
        ratios = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r}, expected numbers with commas between them") from None
    if not all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios) or not any(ratios):
        raise ArgumentTypeError(f"{text!r}, expected numbers of 0 or more, not all 0")
    if len(ratios) > MAX_DEVICES:
        raise ArgumentTypeError(f"{len(ratios)} numbers, expected 1 to {MAX_DEVICES}")
    return ratios


def parse_devices(text: str) -> int:
    """The number of devices, for argparse."""
    number = parse_number(text)
    if not 1 <= number <= MAX_DEVICES:
        raise ArgumentTypeError(f"{number}, expected 1 to {MAX_DEVICES}")
    return number


def parse_number(text: str) -> int:
    """A number of 0 or more, for argparse."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r}, expected a number of 0 or more")
    return int(text)


def run(
    model: Path | None, layer: int | None, devices: int | None, ratios: Sequence[float] | None
) -> int:
    """Run the demo and print what came of it; returns the exit status, 1 if results disagree.

    Raises UsageError for arguments, and files, that cannot be used.
    """
    if layer is not None and model is None:
        raise UsageError("--layer needs --model")
    if ratios is None:
        ratios = (1.0,) * (devices or 2)
    elif devices not in (None, len(ratios)):
        raise UsageError(f"--devices is {devices}, but there are {len(ratios)} ratios")
    try:
        block = _demo_gguf.read_layer(model, layer or 0) if model else _demo_block.made_up()
    except _demo_gguf.ModelError as error:
        raise UsageError(str(error)) from error
    return _run(block, ratios)


def _run(block: FeedForward, ratios: Sequence[float]) -> int:
    cpu = _cpu()
    names = [f"{i}: {cpu.name}" for i in range(len(ratios))]
    x = np.random.default_rng(1).standard_normal((N_TOKENS, block.n_embd), np.float32)
    answers: dict[str, SplitState] = {}
    split = _demo_block.split_function(block, ratios, answers)
    with MetaDevice([cpu] * len(ratios), split, on_error="raise") as meta:
        try:
            got = _demo_block.compute(block, meta, x)
        except SplitError as error:
            raise UsageError(f"cannot be split: {error.__cause__ or error}") from error
    alone = _demo_block.compute(block, cpu, x)
    expected = _demo_check.expect(block, x)

    print(
        f"feed-forward block, {block.origin}: {block.n_embd} wide, {block.n_ff} inside, "
        f"{block.gating}, {N_TOKENS} tokens\n"
        f"split over {len(ratios)} x {cpu.name} by {':'.join(f'{ratio:g}' for ratio in ratios)}, "
        f"cut on multiples of {block.down.block_size} (the block of {block.down.type_name})\n"
    )
    print(table(block.weights, answers, names))
    checks = {
        "one device": _demo_check.compare(got, alone, expected.to_other),
        "NumPy": _demo_check.compare(got, expected.result, expected.to_exact),
    }
    print(f"\nlargest difference of the result (values up to {np.abs(alone).max():.3g}):")
    for name, check in checks.items():
        word = "agrees" if check.agree else "DISAGREES"
        share = f"{check.used:.2%} of what is allowed"
        print(f"  from {name + ':':<11} {check.largest:.2e}, {share}: {word}")
    print(f"allowed: {_demo_check.describe_tolerance(block)}")
    if all(check.agree for check in checks.values()):
        return 0
    sys.stdout.flush()
    against = " and ".join(name for name, check in checks.items() if not check.agree)
    print(f"the result over {len(ratios)} devices disagrees with {against}", file=sys.stderr)
    return 1


def _cpu() -> Device:
    found = capi.ggml_backend_dev_by_type(capi.GGML_BACKEND_DEVICE_TYPE_CPU)
    if found is None:
        raise UsageError("this ggml has no CPU device (python -m ggml_cffi info says why)")
    return Device(found)


def table(weights: Sequence[Weight], states: Mapping[str, SplitState], names: Sequence[str]) -> str:
    """How each weight is split: for each device its elements along the axis, and its bytes."""
    words = {0: "row-parallel", 1: "column-parallel"}
    columns = [["", "", "", *names, "all"]]
    total = [0] * len(names)
    for weight in weights:
        state = states[weight.name]
        axis, shares = int(state.axis), state.shares
        parts = [weight.data.nbytes * n // weight.ne[axis] for n in shares]
        total = [sum(both) for both in zip(total, parts, strict=True)]
        columns.append(
            [
                weight.name,
                f"{weight.type_name} [{weight.ne[0]}, {weight.ne[1]}]",
                f"axis {axis}, {words[axis]}",
                *(f"{n}: {size:,} B" for n, size in zip(shares, parts, strict=True)),
                f"{sum(shares)}: {sum(parts):,} B",
            ]
        )
    columns.append(["together", "", "", *(f"{n:,} B" for n in total), f"{sum(total):,} B"])
    for column in columns:
        width = max(map(len, column))
        column[:] = [cell.ljust(width) for cell in column]
    return "\n".join("   ".join(row).rstrip() for row in zip(*columns, strict=True))
