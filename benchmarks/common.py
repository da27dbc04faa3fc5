"""What the benchmarks share: subjects measured in turn, ratios of a round, extensions in C."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cffi

import ggml_cffi
from ggml_cffi import ffi
from ggml_cffi._gen import build_info
from ggml_cffi._loader import library_files

HERE = Path(__file__).resolve().parent

Subjects = Mapping[str, Callable[[], float]]
"""What is measured, by name: each call gives the time that it took, in whatever unit."""


@dataclass(frozen=True)
class Ratio:
    """How many times as much one subject takes as another: lowest, median and highest round."""

    subject: str
    base: str
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


class Rounds(list[dict[str, float]]):
    """For each round the time of each subject."""

    def ratio(self, subject: str, base: str) -> Ratio:
        """The ratio of two subjects over all rounds."""
        values = [found[subject] / found[base] for found in self]
        return Ratio(subject, base, min(values), statistics.median(values), max(values))


def measure(subjects: Subjects, n_rounds: int, passes: int = 1) -> Rounds:
    """Measure all subjects in turn, `passes` times a round, each time in another order.

    The shortest of a round's passes counts: the others were disturbed. All are called once before.
    """
    names = list(subjects)
    for name in names:  # memory is touched, caches are warm
        subjects[name]()
    rounds = Rounds()
    gc.collect()
    gc.disable()
    try:
        for _ in range(n_rounds):
            found: dict[str, float] = {}
            for _ in range(passes):
                random.shuffle(names)
                for name in names:
                    taken = subjects[name]()
                    found[name] = min(taken, found.get(name, taken))
            rounds.append(found)
    finally:
        gc.enable()
    return rounds


def wall(function: Callable[[], object]) -> Callable[[], float]:
    """The function, timed by the clock: for what uses several threads, or waits."""

    def timed() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return timed


def cpu(function: Callable[[], object]) -> Callable[[], float]:
    """The function, timed by the thread's own CPU time: what others take does not count."""

    def timed() -> float:
        start = time.thread_time_ns()
        function()
        return time.thread_time_ns() - start

    return timed


@dataclass(frozen=True)
class Limit:
    """What a median may be: at most `most`, or at least `least`."""

    what: str
    ratio: Ratio
    most: float = float("inf")
    least: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the median is in the range."""
        return self.least <= self.ratio.median <= self.most

    def __str__(self) -> str:
        bound = f"at most {self.most:g}" if self.least == 0.0 else f"at least {self.least:g}"
        return f"{self.what}: {self.ratio.median:.2f}, expected {bound}"


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds ({rounds})")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    return made


def report(
    title: str, ratios: Mapping[str, Ratio], limits: Sequence[Limit], options: argparse.Namespace
) -> int:
    """Print the ratios by what they are of; 1 where a limit is to be kept and is not."""
    if options.json:
        print(json.dumps({"title": title} | {name: one.__dict__ for name, one in ratios.items()}))
    else:
        print(title)
        width = max(map(len, ratios))
        for name, one in ratios.items():
            print(f"  {name:{width}}  {one}")
    failed = [str(limit) for limit in limits if not limit.kept]
    if options.check:
        print(*failed or ["all limits are kept"], sep="\n", file=sys.stderr)
    return 1 if options.check and failed else 0


# ---- C


def build_extension(folder: Path, name: str, stem: str) -> ModuleType:
    """Compile ``stem.h`` and ``stem.c`` against the libraries of ggml_cffi, and import that."""
    builder = cffi.FFI()
    builder.cdef((HERE / f"{stem}.h").read_text("utf-8"))
    builder.set_source(name, (HERE / f"{stem}.c").read_text("utf-8"))
    source, target = folder / f"{name}.c", folder / f"{name}.so"
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints what it does
        builder.emit_c_code(str(source))
    libraries = library_files(build_info)
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *("-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", f"-I{HERE}"),
        *(str(source), "-o", str(target)),
        *(str(path) for path in libraries.values()),
        *{f"-Wl,-rpath,{path.parent}" for path in libraries.values()},
    ]
    subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None and spec.loader is not None
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    ours = int(ffi.cast("uintptr_t", ggml_cffi.lib.ggml_version()))
    if int(module.ffi.cast("uintptr_t", module.lib.ggml_version())) != ours:
        raise RuntimeError("the extension in C is served by another ggml than ggml_cffi")
    return module
