"""Numbers into tensors and out of them against np.copyto, and what a view costs.

    python -m benchmarks.transfer [--rounds N] [--mb N] [--json] [--check]

256 MB of float32 on the CPU. `set` writes where np.copyto would: into memory that has been written
before. A copy by `numpy(copy=True)` is a new array, so it is measured against np.copyto into a new
array; what is copied from a view into an array that is there is measured against np.copyto into
that. A view shares memory: its cost, of 256 MB or of nothing, is told in calls of an empty Python
function, and in views that NumPy makes of a buffer (np.frombuffer); the first one of a tensor, from
which it makes the others, by itself.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks import common
from ggml_cffi import Context

MB = 256
PAIRS = {
    "set / np.copyto": ("set", "copyto"),
    "np.copyto from a view / np.copyto": ("from a view", "copyto"),
    "numpy(copy=True) / np.copyto into a new array": ("copy", "copyto, new"),
    "numpy(copy=True) / np.copyto": ("copy", "copyto"),
    "a view / an empty function": ("view", "empty function"),
    "a view / np.frombuffer": ("view", "frombuffer"),
    "the first view / np.frombuffer": ("first view", "frombuffer"),
}
#: Of medians.
MOST = {
    "set / np.copyto": 1.1,
    "np.copyto from a view / np.copyto": 1.1,
    "numpy(copy=True) / np.copyto into a new array": 1.1,
    "a view / an empty function": 10,
    "a view / np.frombuffer": 1,
}


def repeated(function: Callable[[], object], n: int) -> Callable[[], float]:
    """The function `n` times, timed by the thread's CPU time: nanoseconds for one."""

    def timed() -> float:
        start = time.thread_time_ns()
        for _ in itertools.repeat(None, n):
            function()
        return (time.thread_time_ns() - start) / n

    return timed


def first_views(n: int) -> Callable[[], float]:
    """The first view of each of `n` new tensors, timed likewise."""

    def timed() -> float:
        with Context() as ctx:
            tensors = [ctx.tensor(256) for _ in range(n)]
            ctx.allocate("CPU")
            start = time.thread_time_ns()
            for one in tensors:
                one.numpy()
            return (time.thread_time_ns() - start) / n

    return timed


def measure(n_bytes: int, n_rounds: int, n_views: int = 2000) -> dict[str, common.Ratio]:
    """All ratios, for a tensor of so many bytes."""
    numbers = np.random.default_rng(0).random(n_bytes // 4, dtype=np.float32)
    target, raw = np.zeros_like(numbers), bytearray(1024)

    def copy_to_new() -> None:
        np.copyto(np.empty_like(numbers), numbers)

    def nothing() -> None:
        pass

    with Context() as ctx:
        tensor = ctx.tensor(numbers.shape)
        ctx.allocate("CPU")
        tensor.set(numbers)
        np.testing.assert_array_equal(tensor.numpy(), numbers)
        copies = {
            "set": common.cpu(lambda: tensor.set(numbers)),
            "copyto": common.cpu(lambda: np.copyto(target, numbers)),
            "from a view": common.cpu(lambda: np.copyto(target, tensor.numpy())),
            "copy": common.cpu(lambda: tensor.numpy(copy=True)),
            "copyto, new": common.cpu(copy_to_new),
        }
        views = {
            "view": repeated(tensor.numpy, n_views),
            "first view": first_views(n_views),
            "empty function": repeated(nothing, n_views),
            "frombuffer": repeated(lambda: np.frombuffer(raw, np.float32), n_views),
        }
        rounds = common.measure(copies, n_rounds)
        small = common.measure(views, n_rounds, passes=5)
    found = {}
    for name, (subject, base) in PAIRS.items():
        found[name] = (small if subject in views else rounds).ratio(subject, base)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and tell whether the limits hold."""
    parser = common.parser(__doc__, 9)
    parser.add_argument("--mb", type=int, default=MB)
    options = parser.parse_args(arguments)
    found = measure(options.mb << 20, options.rounds)
    limits = [common.Limit(name, found[name], most=most) for name, most in MOST.items()]
    title = f"{options.mb} MB to a tensor and back: how many times as long it takes"
    return common.report(title, found, limits, options)


if __name__ == "__main__":
    sys.exit(main())
