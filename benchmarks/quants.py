"""Quantisation and back against the gguf package: ratios from one run, on the same numbers.

    python -m benchmarks.quants [--rounds N] [--types Q4_0,Q8_0] [--json] [--check]

Each round measures both; a ratio is of two times of one round, by the clock: how many times faster
ggml_cffi is. The limits are meant for two cores that have nothing else to do. As the clock counts
what other processes take, the ratio of CPU times is given as well: times the cores, it is what
could be had at most. So is np.copyto of the numbers on as many threads: how near the memory's speed
is. The results of both are compared, byte for byte, before anything is measured.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import quants as reference

from benchmarks import common
from ggml_cffi import quants
from ggml_cffi.backend import usable_cores

SHAPE = (2048, 4096)  # a matrix of a model of one to three thousand million parameters

#: How many times faster, at least.
LEAST = {"Q4_0": 4.0, "Q8_0": 2.5}
WAYS = ("quantize", "dequantize")


def copy_on_threads(target: Any, source: Any, n_threads: int) -> None:
    """np.copyto, a part on each thread."""
    parts = zip(np.array_split(target, n_threads), np.array_split(source, n_threads), strict=True)
    threads = [threading.Thread(target=np.copyto, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def both(name: str, function: Callable[[], object], found: dict[str, float]) -> Callable[[], float]:
    """The function, timed by the clock; the CPU time of the process goes to `found`."""

    def timed() -> float:
        cpu, start = time.process_time(), time.perf_counter()
        function()
        taken = time.perf_counter() - start
        used = time.process_time() - cpu
        found[name] = min(used, found.get(name, used))
        return taken

    return timed


def measure(
    name: str, n_rounds: int, shape: tuple[int, int] = SHAPE, n_threads: int | None = None
) -> dict[str, common.Ratio]:
    """The ratios of all rounds, for each direction, to the gguf package and to copying."""
    theirs = gguf.GGMLQuantizationType[name]
    numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    blocks = reference.quantize(numbers, theirs)
    np.testing.assert_array_equal(quants.quantize(numbers, name), blocks)
    np.testing.assert_array_equal(
        quants.dequantize(blocks, name), reference.dequantize(blocks, theirs)
    )
    used: dict[str, float] = {}
    spare = np.zeros_like(numbers)
    cores = usable_cores() if n_threads is None else n_threads
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: quants.quantize(numbers, name, threads=n_threads),
        "gguf quantize": lambda: reference.quantize(numbers, theirs),
        "dequantize": lambda: quants.dequantize(blocks, name, threads=n_threads),
        "gguf dequantize": lambda: reference.dequantize(blocks, theirs),
        "copyto": lambda: copy_on_threads(spare, numbers, cores),
    }
    timed = {key: both(key, call, used) for key, call in calls.items()}
    rounds = common.measure(timed, n_rounds)
    ratios = {}
    for way in WAYS:
        ratios[f"{name} {way}: times faster than gguf"] = rounds.ratio(f"gguf {way}", way)
        ratio = used[f"gguf {way}"] / used[way]
        at_most = common.Ratio(f"gguf {way}", way, ratio, ratio, ratio)
        ratios[f"{name} {way}: the same, of CPU times"] = at_most
        ratios[f"{name} {way}: of np.copyto's time"] = rounds.ratio(way, "copyto")
    return ratios


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and tell whether the limits hold."""
    parser = common.parser(__doc__, 15)
    parser.add_argument("--types", default=",".join(LEAST), metavar="NAMES")
    options = parser.parse_args(arguments)
    found: dict[str, common.Ratio] = {}
    for name in options.types.split(","):
        found |= measure(name, options.rounds)
    limits = [
        common.Limit(key, one, least=LEAST[key.split()[0]])
        for key, one in found.items()
        if key.endswith("faster than gguf") and key.split()[0] in LEAST
    ]
    title = f"quantisation of {SHAPE[0]} rows of {SHAPE[1]}, {usable_cores()} cores"
    return common.report(title, found, limits, options)


if __name__ == "__main__":
    sys.exit(main())
