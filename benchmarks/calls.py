"""What a call costs: from C, through bare cffi, through capi, and through ggml-python (ctypes).

Prints ratios, never times: each is of two measurements of the same round of one interleaved run.
"Bare cffi" is an extension in API mode with the declarations of these few functions and no guard
(bare.h); the loops "from C" are in it too (bare.c). It is compiled on the spot and linked to the
very libraries that ggml_cffi runs on; ggml-python brings a ggml of its own.

    python -m benchmarks.calls [--rounds N] [--json] [--check] [--without-ggml-python]

`--check` exits with 1 if a call through capi is slower than `LIMITS` allow.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import cffi

from benchmarks.common import build_extension
from ggml_cffi import capi

SUBJECTS = ("C", "bare cffi", "capi", "ggml-python")
BASE = "bare cffi"
MIB = 1 << 20

#: (call, numerator, denominator, at most): what a median may be.
LIMITS = (
    ("ggml_mul_mat", "capi", "bare cffi", 1.6),
    ("ggml_mul_mat", "capi", "ggml-python", 1 / 2.5),
    ("ggml_nelements", "capi", "ggml-python", 1.0),
    ("ggml_get_name", "capi", "ggml-python", 1.0),
)

# ---- the calls

Timer = Callable[[int], int]
"""Nanoseconds that n calls took."""

UNROLLED = 16
PASSES = 5


def timer(call: str, **names: object) -> Timer:
    """Time Python code: one call, written out often enough that the loop does not count."""
    code = "def run(n):\n    start = now()\n    for _ in repeat(None, n):\n"
    code += f"        {call}\n" * UNROLLED
    code += "    return now() - start\n"
    scope: dict[str, Any] = {**names, "now": time.thread_time_ns, "repeat": itertools.repeat}
    exec(code, scope)
    run = scope["run"]
    return lambda n: run(n // UNROLLED)


@dataclass
class Call:
    """One function, and how each subject calls it `n` times."""

    name: str
    kind: str
    n: int
    timers: dict[str, Timer] = field(default_factory=dict)
    reset: dict[str, Callable[[], object]] = field(default_factory=dict)

    def time(self, subject: str) -> float:
        """Nanoseconds a call; what the calls made is thrown away before and not after."""
        if subject in self.reset:
            self.reset[subject]()
        return self.timers[subject](self.n) / self.n


def make_calls(bare: ModuleType, other: Any) -> list[Call]:
    """All calls of all subjects: the same shapes, names and sizes for each."""
    calls = [
        Call("ggml_mul_mat", "makes a tensor", 1024),
        Call("ggml_nelements", "a getter", 4096),
        Call("ggml_get_name", "a string", 4096),
        Call("ggml_unravel_index", "four out-parameters", 4096),
        Call("ggml_init", "a struct by value, with ggml_free", 1024),
    ]
    _add_c_and_bare(calls, bare)
    _add_capi(calls)
    if other is not None:
        _add_ggml_python(calls, other)
    return calls


def _add(calls: list[Call], subject: str, timers: list[Timer], reset: Callable[[], object]) -> None:
    for call, one in zip(calls, timers, strict=True):
        call.timers[subject] = one
    calls[0].reset[subject] = reset


def _add_c_and_bare(calls: list[Call], bare: ModuleType) -> None:
    lib, null, new = bare.lib, bare.ffi.NULL, bare.ffi.new
    inputs, ctx = lib.ggml_init((MIB, null, True)), lib.ggml_init((MIB, null, True))
    a, b = lib.ggml_new_tensor_2d(inputs, 0, 4, 3), lib.ggml_new_tensor_2d(inputs, 0, 4, 5)
    lib.ggml_set_name(a, b"blk.0.attn_q.weight")
    loops: list[Timer] = [
        lambda n: lib.loop_mul_mat(n, ctx, a, b),
        lambda n: lib.loop_nelements(n, a),
        lambda n: lib.loop_get_name(n, a),
        lambda n: lib.loop_unravel_index(n, a),
        lambda n: lib.loop_init(n, 1024),
    ]
    _add(calls, "C", loops, lambda: lib.ggml_reset(ctx))

    def unravel_index() -> tuple[int, int, int, int]:
        i0, i1, i2, i3 = new("int64_t *"), new("int64_t *"), new("int64_t *"), new("int64_t *")
        lib.ggml_unravel_index(a, 11, i0, i1, i2, i3)
        return i0[0], i1[0], i2[0], i3[0]

    scope = {"a": a, "b": b, "ctx": ctx, "null": null, "string": bare.ffi.string}
    timers = [
        timer("f(ctx, a, b)", f=lib.ggml_mul_mat, **scope),
        timer("f(a)", f=lib.ggml_nelements, **scope),
        timer("string(f(a)).decode()", f=lib.ggml_get_name, **scope),
        timer("f()", f=unravel_index),
        timer("free(f((1024, null, True)))", f=lib.ggml_init, free=lib.ggml_free, **scope),
    ]
    _add(calls, "bare cffi", timers, lambda: lib.ggml_reset(ctx))


def _add_capi(calls: list[Call]) -> None:
    inputs = capi.ggml_init(mem_size=MIB, no_alloc=True)
    ctx = capi.ggml_init(mem_size=MIB, no_alloc=True)
    a = capi.ggml_new_tensor_2d(inputs, capi.GGML_TYPE_F32, 4, 3)
    b = capi.ggml_new_tensor_2d(inputs, capi.GGML_TYPE_F32, 4, 5)
    capi.ggml_set_name(a, "blk.0.attn_q.weight")
    scope = {"a": a, "b": b, "ctx": ctx}
    timers = [
        timer("f(ctx, a, b)", f=capi.ggml_mul_mat, **scope),
        timer("f(a)", f=capi.ggml_nelements, **scope),
        timer("f(a)", f=capi.ggml_get_name, **scope),
        timer("f(a, 11)", f=capi.ggml_unravel_index, **scope),
        timer("free(f(mem_size=1024, no_alloc=True))", f=capi.ggml_init, free=capi.ggml_free),
    ]
    _add(calls, "capi", timers, lambda: capi.ggml_reset(ctx))


def _add_ggml_python(calls: list[Call], ggml: Any) -> None:
    import ctypes

    params = ggml.ggml_init_params
    inputs = ggml.ggml_init(params(mem_size=MIB, mem_buffer=None, no_alloc=True))
    ctx = ggml.ggml_init(params(mem_size=MIB, mem_buffer=None, no_alloc=True))
    a = ggml.ggml_new_tensor_2d(inputs, ggml.GGML_TYPE_F32, 4, 3)
    b = ggml.ggml_new_tensor_2d(inputs, ggml.GGML_TYPE_F32, 4, 5)
    ggml.ggml_set_name(a, b"blk.0.attn_q.weight")
    number, byref = ctypes.c_int64, ctypes.byref

    def unravel_index() -> tuple[int, int, int, int]:
        i0, i1, i2, i3 = number(), number(), number(), number()
        ggml.ggml_unravel_index(a, 11, byref(i0), byref(i1), byref(i2), byref(i3))
        return i0.value, i1.value, i2.value, i3.value

    scope = {"a": a, "b": b, "ctx": ctx}
    init = "free(f(params(mem_size=1024, mem_buffer=None, no_alloc=True)))"
    timers = [
        timer("f(ctx, a, b)", f=ggml.ggml_mul_mat, **scope),
        timer("f(a)", f=ggml.ggml_nelements, **scope),
        timer("f(a)", f=ggml.ggml_get_name, **scope),  # bytes: less than capi gives
        timer("f()", f=unravel_index),
        timer(init, f=ggml.ggml_init, free=ggml.ggml_free, params=params),
    ]
    _add(calls, "ggml-python", timers, lambda: ggml.ggml_reset(ctx))


# ---- the run

Rounds = list[dict[str, dict[str, float]]]
"""For each round, call and subject: nanoseconds."""


def measure(calls: list[Call], n_rounds: int) -> Rounds:
    """Time all calls of all subjects in turn, `PASSES` times a round, each time in another order.

    The shortest of a round's passes counts: the others were disturbed.
    """
    order = [(call, subject) for call in calls for subject in call.timers]
    for call, subject in order:  # memory is touched, caches are warm
        call.time(subject)
    rounds: Rounds = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(n_rounds):
            found: dict[str, dict[str, float]] = {call.name: {} for call in calls}
            for _ in range(PASSES):
                random.shuffle(order)
                for call, subject in order:
                    taken = call.time(subject)
                    found[call.name][subject] = min(taken, found[call.name].get(subject, taken))
            rounds.append(found)
    finally:
        gc.enable()
    return rounds


@dataclass(frozen=True)
class Ratio:
    """How many times as long one subject takes as another: lowest, median and highest round."""

    call: str
    subject: str
    base: str
    low: float
    median: float
    high: float


def ratio(rounds: Rounds, call: str, subject: str, base: str) -> Ratio:
    """The ratio of two subjects over all rounds."""
    values = [found[call][subject] / found[call][base] for found in rounds]
    return Ratio(call, subject, base, min(values), statistics.median(values), max(values))


def table(calls: list[Call], rounds: Rounds) -> list[str]:
    """The ratios to bare cffi, and of capi to ggml-python."""
    subjects = list(calls[0].timers)
    pairs = [(subject, BASE) for subject in subjects if subject != BASE]
    if "ggml-python" in subjects:
        pairs.append(("capi", "ggml-python"))
    lines = [f"{'':20}" + "".join(f"{f'{s} / {b}':>26}" for s, b in pairs)]
    lines.append(f"{'':20}" + f"{'median (low - high)':>26}" * len(pairs))
    for call in calls:
        cells = [ratio(rounds, call.name, subject, base) for subject, base in pairs]
        text = [f"{cell.median:.2f} ({cell.low:.2f} - {cell.high:.2f})" for cell in cells]
        lines.append(f"{call.name:20}" + "".join(f"{one:>26}" for one in text) + f"  {call.kind}")
    return lines


def failures(rounds: Rounds) -> Iterator[str]:
    """What the limits do not allow."""
    for call, subject, base, limit in LIMITS:
        found = ratio(rounds, call, subject, base)
        if found.median > limit:
            yield (
                f"{call}: {subject} takes {found.median:.2f} times as long as {base}, "
                f"allowed are {limit:.2f}"
            )


def describe(other: Any) -> dict[str, str]:
    """What is measured."""
    found = {
        "python": platform.python_version(),
        "cffi": cffi.__version__,
        "ggml": capi.ggml_version(),
    }
    if other is not None:
        found["ggml-python"] = importlib.metadata.version("ggml-python")
        with contextlib.suppress(AttributeError):
            found["its ggml"] = other.ggml_version().decode()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ratios of what a call costs.")
    parser.add_argument("--rounds", type=int, default=50, help="interleaved rounds (50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    parser.add_argument("--without-ggml-python", action="store_true", help="leave it out")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.check and options.without_ggml_python:
        parser.error("--check compares with ggml-python")
    other: Any = None
    if not options.without_ggml_python:
        try:
            other = importlib.import_module("ggml.ggml")
        except ImportError:
            parser.error(
                "ggml-python is not installed: pip install ggml-python, or --without-ggml-python"
            )
    with tempfile.TemporaryDirectory() as folder:
        calls = make_calls(build_extension(Path(folder), "_bare_ggml", "bare"), other)
        rounds = measure(calls, options.rounds)
    versions = describe(other)
    if options.json:
        ratios = [
            ratio(rounds, call.name, subject, base).__dict__
            for call in calls
            for subject in call.timers
            for base in call.timers
            if subject != base
        ]
        print(json.dumps({"versions": versions, "rounds": len(rounds), "ratios": ratios}, indent=1))
    else:
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        print(f"{len(rounds)} interleaved rounds; how many times as long a call takes:\n")
        print(*table(calls, rounds), sep="\n")
    if not options.check:
        return 0
    failed = list(failures(rounds))
    print(*failed or ["all limits are kept"], sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
