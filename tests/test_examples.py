"""The examples run, and print what they should: figures, not only an exit code of 0."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import require

from ggml_cffi import GGUFFile, GGUFWriter, quantize

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
CHECKS: dict[str, Callable[[str], None]] = {}


def run(name: str, folder: Path, *arguments: object, strict: bool = True) -> str:
    """What it prints; nothing may go to stderr."""
    options = ["-W", "error"] if strict else []
    child = subprocess.run(
        [sys.executable, *options, EXAMPLES[name], *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    """`function` looks at what the example of its name prints."""
    CHECKS[function.__name__] = function
    return function


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*\.?\d*", text)]


@check
def first(out: str) -> None:
    *layer, refused = out.splitlines()
    assert numbers(" ".join(layer)) == [0, 18, 42, 18, 106, 194, *[0] * 6]
    assert refused == "not allowed: a 'weight' is f32 of shape (3, 4); b is f32 of shape (2, 3)"


@check
def generate(out: str) -> None:
    (line,) = out.splitlines()
    assert line.startswith("The capital of France is the capital of")


@check
def capi(out: str) -> None:
    *product, refused = out.splitlines()
    assert numbers(" ".join(product)) == [14, 38, 62, 38, 126, 214]
    assert refused == "not allowed: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed"


@check
def tensor_parallel(out: str) -> None:
    assert out == "agrees with NumPy: True\n"


@check
def split_attention(out: str) -> None:
    *weights, sums, agrees, shape = out.splitlines()
    assert [line.partition(" (")[0] for line in weights] == [
        "wq split along axis 1: 192 + 64",
        "wk split along axis 1: 96 + 32",
        "wv split along axis 1: 96 + 32",
        "wo split along axis 0: 192 + 64",
    ]
    assert sums == "sums over the devices: 1" and agrees == "agrees with one device: True"
    assert shape == "result: (16, 256)"


@check
def linear_layer(out: str) -> None:
    _, *rows = out.splitlines()
    types, sizes, errors = zip(*(row.rstrip("%").split() for row in rows), strict=True)
    assert types == ("f32", "f16", "q8_0", "q4_K", "q2_K")
    bits = [32, 16, 8.5, 4.5, 2.625]  # for each of 256 x 512 numbers
    assert [int(n) for n in sizes] == [256 * 512 * n / 8 for n in bits]
    exact, half, q8, q4, q2 = map(float, errors)
    assert exact == 0 and half <= 0.1 and 0.3 < q8 < 1.5 and 4 < q4 < 10 and 20 < q2 < 40


@check
def scheduler(out: str) -> None:
    first, second, difference = out.splitlines()
    for line, layers in ((first, range(3)), (second, range(3, 6))):
        found = re.fullmatch(r"(\S+) \d: (\d+) bytes for (.*)", line)
        assert found and int(found[2]) >= 5 * 64 * 4
        assert found[3] == ", ".join(f"product {i}, layer {i}" for i in layers)
    assert float(difference.rpartition(" ")[2]) < 1e-5


@check
def custom_op(out: str) -> None:
    medians, same, sides, raised = out.splitlines()
    assert len(numbers(medians)) == 6 and all(0.5 < n < 1 for n in numbers(medians))
    assert same == "as NumPy has them: True"
    assert numbers(sides) == [50] * 12
    assert raised == "it raised: a row with NaN has no median"


@check
def quantize_file(out: str) -> None:
    total, *tensors = out.splitlines()
    before, after, percent = numbers(total)
    assert before == 2 * (512 * 1024 + 1024) * 4
    assert after == 2 * (512 * 1024 * 4.5 / 8 + 1024 * 4)
    assert percent == round(100 * after / before, 1)
    for i in range(2):
        name, kind, error = tensors[2 * i].split()
        assert (name, kind) == (f"blk.{i}.weight", "q4_K") and 4 < float(error.rstrip("%")) < 10
        assert tensors[2 * i + 1].split() == [f"blk.{i}.norm", "f32", "0.0%"]


@check
def train_digits(out: str) -> None:
    *epochs, accuracy, wrong, loaded = out.splitlines()
    assert re.findall(r"^epoch +(\d+): ", out, re.M) == ["1", "2", "5", "10", "20", "30"]
    losses = [float(line.split()[3]) for line in epochs]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 10
    (percent,) = numbers(accuracy)
    assert percent > 95
    n_wrong, n = numbers(wrong)
    assert n == 357 and round(100 * (1 - n_wrong / n), 1) == percent
    assert loaded == "the same after loading: True"


def test_each_example_has_a_check() -> None:
    assert set(CHECKS) == set(EXAMPLES)


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"train_digits", "generate"}))
def test_example(name: str, tmp_path: Path) -> None:
    if "MetaDevice(" in EXAMPLES[name].read_text(encoding="utf-8"):
        require("ggml_backend_meta_device")
    CHECKS[name](run(name, tmp_path))
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["CPU", "CPU,CPU", "CPU,CPU,CPU"])
def test_text_is_generated(gemma: Path, tmp_path: Path, devices: str) -> None:
    if "," in devices:
        require("ggml_backend_meta_device")
    generate(run("generate", tmp_path, gemma, "--tokens", 8, "--devices", devices))


@pytest.mark.slow
def test_digits_are_learnt(tmp_path: Path, need: Any) -> None:
    need(importlib.util.find_spec("sklearn"), "scikit-learn")
    train_digits(run("train_digits", tmp_path, strict=False))


def test_what_an_example_needs_is_said(tmp_path: Path) -> None:
    """Where scikit-learn is missing, or cannot be imported."""
    (tmp_path / "sklearn.py").write_text("raise ImportError('there is none')\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, EXAMPLES["train_digits"]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (child.returncode, child.stdout, child.stderr) == (
        1,
        "",
        "this example needs scikit-learn (pip install scikit-learn): there is none\n",
    )
    assert "Needs scikit-learn" in EXAMPLES["train_digits"].read_text(encoding="utf-8")


def test_a_file_of_ones_own_is_quantised(tmp_path: Path) -> None:
    source, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    w = np.random.default_rng(0).standard_normal((4, 96), np.float32)
    with GGUFWriter(source) as file:
        file.set("general.name", "mine")
        file.add_tensor("w", w, "f16")
        file.add_tensor("odd", np.ones((3, 5), np.float32))
    out = run("quantize_file", tmp_path, source, target, "q8_0")
    assert out.splitlines()[2].split() == ["odd", "f32", "0.0%"]
    with GGUFFile(target) as file:
        assert dict(file.metadata) == {"general.name": "mine"}
        assert file.tensors["odd"].numpy().tolist() == [[1.0] * 5] * 3
        expected = quantize(w.astype(np.float16), "q8_0")
        np.testing.assert_array_equal(file.tensors["w"].data, expected.reshape(-1))


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") < 140  # to be read at one go
