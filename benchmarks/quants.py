"""Quantisation and back against the gguf package: ratios from one run, on the same numbers.

    python benchmarks/quants.py [--rounds N] [--types Q4_0,Q8_0] [--json] [--check]

Each round measures both, one after the other, in turns; a ratio is of two times of one round:
how many times faster ggml_cffi is. `--check` exits with 1 if a median is under `LIMITS`, which are
meant for two cores. The results of both are compared, byte for byte, before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import quants as reference

from ggml_cffi import quants
from ggml_cffi.backend import usable_cores

SHAPE = (2048, 4096)  # a matrix of a model of one to three thousand million parameters

#: How many times faster, at least.
LIMITS = {"Q4_0": 4.0, "Q8_0": 2.5}


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """The ratios of all rounds, for each direction."""
    theirs = gguf.GGMLQuantizationType[name]
    numbers = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    blocks = reference.quantize(numbers, theirs)
    np.testing.assert_array_equal(quants.quantize(numbers, name), blocks)
    np.testing.assert_array_equal(
        quants.dequantize(blocks, name), reference.dequantize(blocks, theirs)
    )
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "quantize": (
            lambda: reference.quantize(numbers, theirs),
            lambda: quants.quantize(numbers, name),
        ),
        "dequantize": (
            lambda: reference.dequantize(blocks, theirs),
            lambda: quants.dequantize(blocks, name),
        ),
    }
    ratios: dict[str, list[float]] = {way: [] for way in pairs}
    for number in range(rounds):
        for way, (their, our) in pairs.items():
            if number % 2:
                ours, other = seconds(our), seconds(their)
            else:
                other, ours = seconds(their), seconds(our)
            ratios[way].append(other / ours)
    return ratios


def main() -> int:
    """Measure, print, and tell whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--types", default=",".join(LIMITS), metavar="NAMES")
    parser.add_argument("--json", action="store_true", help="all ratios")
    parser.add_argument("--check", action="store_true", help="fail where a limit is not met")
    options = parser.parse_args()
    found = {name: measure(name, options.rounds) for name in options.types.split(",")}
    slow = []
    if options.json:
        print(json.dumps({"cores": usable_cores(), "shape": SHAPE, "ratios": found}))
    else:
        print(f"times faster than gguf, {usable_cores()} cores: median (lowest - highest)")
    for name, ways in found.items():
        for way, ratios in ways.items():
            median = statistics.median(ratios)
            if not options.json:
                print(f"  {name} {way}: {median:.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
            if median < LIMITS.get(name, 0):
                slow.append(f"{name} {way}: {median:.2f}, expected {LIMITS[name]}")
    if options.check and slow:
        print("slower than they may be:", "; ".join(slow), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
