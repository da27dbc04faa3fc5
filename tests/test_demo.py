"""`python -m ggml_cffi demo`, in child processes and in this one, and the parts behind it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import MetaDevice, _demo, _demo_block, _demo_check, capi, device
from ggml_cffi.__main__ import main

N_EMBD, N_FF, LAYER = 256, 2048, 3
NAMES = ("ffn_gate", "ffn_up", "ffn_down")


def run_child(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ggml_cffi", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kwargs,
    )


def agreements(out: str) -> list[tuple[str, float, float, str]]:
    """What it said of each comparison: (from what, difference, percent of the allowed, verdict)."""
    found = re.findall(r"from ([\w ]+): +(\S+), (\S+)% of what is allowed: (\w+)", out)
    return [(a, float(b), float(c), d) for a, b, c, d in found]


def shares(out: str) -> list[list[int]]:
    """The table: for each device, and for all, elements and bytes of gate, up, down, then bytes."""
    rows = [line for line in out.splitlines() if re.match(r"\d+: |all ", line)]
    return [
        [int(n.replace(",", "")) for n in re.findall(r"[\d,]+(?=:| B)", row.split("   ", 1)[1])]
        for row in rows
    ]


def check_output(out: str, n_devs: int) -> list[list[int]]:
    """Agreement, and that the devices' shares make up the whole."""
    assert [(name, verdict) for name, _, _, verdict in agreements(out)] == [
        ("one device", "agrees"),
        ("NumPy", "agrees"),
    ]
    *devices, whole = shares(out)
    assert len(devices) == n_devs
    assert np.sum(devices, axis=0).tolist() == whole
    assert whole[1] + whole[3] + whole[5] == whole[6]
    for row in devices:
        assert row[0] == row[2] == row[4]  # the cuts fit each other
    return devices


@pytest.mark.parametrize(
    ("arguments", "elements"),
    [
        ([], [512, 512]),
        (["--devices", 1], [1024]),
        (["--devices", 3], [341, 341, 342]),
        (["--ratios", "3,1"], [768, 256]),
        (["--ratios", "1,0,2.5", "--devices", 3], [292, 0, 732]),
        (["--devices", 16], [64] * 16),
    ],
)
@needs_meta
def test_default(arguments: Sequence[object], elements: list[int]) -> None:
    child = run_child("demo", *arguments)
    assert (child.returncode, child.stderr) == (0, "")
    devices = check_output(child.stdout, len(elements))
    assert [row[0] for row in devices] == elements
    assert [row[1] for row in devices] == [n * N_EMBD * 4 for n in elements]
    assert [row[5] for row in devices] == [n * N_EMBD * 4 for n in elements]


@needs_meta
def test_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    first = capsys.readouterr().out
    assert main(["demo"]) == 0
    assert capsys.readouterr().out == first


# ---- what is wrong is said in one line


def one_line(capsys: pytest.CaptureFixture[str], arguments: Sequence[object]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("python -m ggml_cffi demo: ") and err.endswith("\n")
    assert err.count("\n") == 1 and err[:-1].isprintable()
    return err[:-1].split(": ", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "argument --devices: 0, expected 1 to 16"),
        (["--devices", "17"], "argument --devices: 17, expected 1 to 16"),
        (["--devices", "9" * 5000], "expected a number of 0 or more"),
        (["--devices", "two"], "argument --devices: 'two', expected a number of 0 or more"),
        (["--devices=-1"], "argument --devices: '-1', expected a number of 0 or more"),
        (["--devices"], "argument --devices: expected one argument"),
        (["--ratios", "3;1"], "argument --ratios: '3;1', expected numbers with commas between"),
        (["--ratios", ""], "expected numbers with commas between them"),
        (["--ratios", "1,,1"], "expected numbers with commas between them"),
        (["--ratios", "0,0"], "argument --ratios: '0,0', expected numbers of 0 or more, not all 0"),
        (["--ratios=-1,2"], "expected numbers of 0 or more"),
        (["--ratios", "nan,1"], "expected numbers of 0 or more"),
        (["--ratios", "inf,1"], "expected numbers of 0 or more"),
        (["--ratios", ",".join("1" * 17)], "argument --ratios: 17 numbers, expected 1 to 16"),
        (["--ratios", "1,1", "--devices", "3"], "--devices is 3, but there are 2 ratios"),
        (["--layer", "1"], "--layer needs --model"),
        (["--layer", "x", "--model", "m"], "argument --layer: 'x', expected a number of 0 or more"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["file.gguf"], "unrecognized arguments: file.gguf"),
    ],
)
def test_bad_values(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in one_line(capsys, arguments)


def test_bad_value_in_a_child() -> None:
    child = run_child("demo", "--devices", "0")
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr == "python -m ggml_cffi demo: argument --devices: 0, expected 1 to 16\n"


# ---- disagreement


@pytest.mark.parametrize("error", [1e-2, np.nan, np.inf], ids=str)
@needs_meta
def test_disagreement(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = _demo_block.compute

    def compute(block: Any, device: Any, x: Any) -> Any:
        result = real(block, device, x)
        if isinstance(device, MetaDevice):
            result[3, 5] += error
        return result

    monkeypatch.setattr(_demo_block, "compute", compute)
    assert main(["demo", "--devices", "3"]) == 1
    out, err = capsys.readouterr()
    assert out.count(": DISAGREES\n") == 2
    assert err == "the result over 3 devices disagrees with one device and NumPy\n"


def test_compare() -> None:
    exact = np.array([[1.0, -2.0]])
    tolerance = np.array([[0.5, 0.25]])

    def compare(*values: float, allowed: Any = tolerance) -> _demo_check.Comparison:
        return _demo_check.compare(np.array([values], np.float32), exact, np.asarray(allowed))

    assert compare(1.25, -2.0) == _demo_check.Comparison(0.25, 0.5)
    assert compare(1.25, -2.25) == _demo_check.Comparison(0.25, 1.0)
    assert compare(1.25, -2.25).agree
    assert not compare(1.25, -2.5).agree
    assert not compare(np.nan, -2.0).agree
    assert not compare(np.inf, -2.0).agree
    zero = np.zeros((1, 2))
    assert compare(1.0, -2.0, allowed=zero).agree
    assert not compare(1.0, -2.5, allowed=zero).agree
    for endless in (np.inf, np.nan):
        assert not compare(1.0, -2.0, allowed=[[endless, 1]]).agree
    with pytest.raises(ValueError, match="differ"):
        _demo_check.compare(np.zeros(2), exact, tolerance)


# ---- files


def tensor_data(type_: int, shape: tuple[int, int], seed: int) -> bytes:
    """Normally distributed weights, quantised by ggml."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    values /= np.float32(np.sqrt(shape[1]))
    if type_ == capi.GGML_TYPE_F32:
        return values.tobytes()
    out = np.zeros(shape[0] * capi.ggml_row_size(type_, shape[1]), np.uint8)
    capi.ggml_quantize_chunk(type_, values, out, 0, *shape, None)
    return out.tobytes()


Tensors = dict[str, tuple[int, tuple[int, ...], bytes]]


def layer(
    types: Sequence[int], n_embd: int = N_EMBD, n_ff: int = N_FF, number: int = LAYER
) -> Tensors:
    """The tensors of a layer, with ggml's ne: gate and up, then down."""
    shapes = ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff))
    return {
        f"blk.{number}.{name}.weight": (type_, shape[::-1], tensor_data(type_, shape, seed))
        for seed, (name, type_, shape) in enumerate(zip(NAMES, types, shapes, strict=True))
    }


def write_gguf(path: Path, tensors: Tensors, metadata: Mapping[str, object] | None = None) -> Path:
    """A GGUF file of version 3, written from its specification and not by what is under test."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    metadata = {"general.architecture": "llama"} if metadata is None else metadata
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += string(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + string(value)
        else:
            out += struct.pack("<II", 4, value)
    data = bytearray()
    for name, (type_, ne, content) in tensors.items():
        out += string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_, len(data))
        data += content + bytes(-len(content) % 32)
    out += bytes(-len(out) % 32) + data
    path.write_bytes(out)
    return path


@pytest.fixture
def reference(need: Any) -> None:
    need(importlib.util.find_spec("gguf"), "package gguf")


F32, F16, BF16 = capi.GGML_TYPE_F32, capi.GGML_TYPE_F16, capi.GGML_TYPE_BF16
Q4_0, Q8_0, Q4_K = capi.GGML_TYPE_Q4_0, capi.GGML_TYPE_Q8_0, capi.GGML_TYPE_Q4_K
KINDS = (
    [F32] * 3,
    [F16] * 3,
    [BF16] * 3,
    [Q4_0] * 3,
    [capi.GGML_TYPE_Q5_1] * 3,
    [Q8_0] * 3,
    [capi.GGML_TYPE_Q2_K] * 3,
    [Q4_K] * 3,
    [capi.GGML_TYPE_Q6_K] * 3,
    [capi.GGML_TYPE_IQ4_NL] * 3,
    [Q8_0, F16, Q4_K],
    [Q4_K, Q4_0, F32],
)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("types", KINDS, ids=lambda types: "-".join(t.name[10:] for t in types))
@needs_meta
def test_types(types: Sequence[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture, gating = (("llama", "SwiGLU"), ("gemma3", "GEGLU"))[KINDS.index(types) % 2]
    path = write_gguf(tmp_path / "m.gguf", layer(types), {"general.architecture": architecture})
    assert main(["demo", "--model", str(path), "--layer", str(LAYER), "--ratios", "2,0,1,1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"layer 3 of m.gguf ({architecture}): 256 wide, 2048 inside, {gating}, 8 tokens" in out
    devices = check_output(out, 4)
    block_size = capi.ggml_blck_size(types[2])
    for row in devices:
        assert row[0] % block_size == 0
        assert [row[1], row[3]] == [row[0] * capi.ggml_row_size(t, N_EMBD) for t in types[:2]]
        assert row[5] == capi.ggml_row_size(types[2], row[0]) * N_EMBD
    # the tolerance is near what happens: a hundredth of it would not do
    _, (_, _, exact, _) = agreements(out)
    if types != [F32] * 3:  # whose sums no CPU makes as badly as is allowed
        assert exact > 1


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("types", KINDS, ids=lambda types: "-".join(t.name[10:] for t in types))
@needs_meta
def test_a_missing_addend_is_seen(types: Sequence[Any], tmp_path: Path) -> None:
    """The tolerances are no wider than they may be: an eighth of the rows must not go missing."""
    from ggml_cffi import _demo_gguf

    path = write_gguf(tmp_path / "m.gguf", layer(types), {"general.architecture": "gemma3"})
    block = _demo_gguf.read_layer(path, LAYER)
    data = block.down.data.copy()
    data[:, data.shape[1] * 7 // 8 :] = 0
    lame = dataclasses.replace(block, down=dataclasses.replace(block.down, data=data))
    x = np.random.default_rng(1).standard_normal((4, N_EMBD), np.float32)
    expected = _demo_check.expect(block, x)
    whole, less = (_demo_block.compute(b, device("CPU"), x) for b in (block, lame))
    assert _demo_check.compare(whole, expected.result, expected.to_exact).agree
    assert _demo_check.compare(less, expected.result, expected.to_exact).used > 3
    assert _demo_check.compare(less, whole, expected.to_other).used > 3


@pytest.mark.usefixtures("reference")
@needs_meta
def test_model_in_a_child(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "täst.gguf", layer([Q4_K] * 3, number=0))
    child = run_child("demo", "--model", path, "--devices", 3)
    assert (child.returncode, child.stderr) == (0, "")
    assert [row[0] for row in check_output(child.stdout, 3)] == [512, 768, 768]


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if name not in key}


def small(**more: tuple[int, tuple[int, ...], bytes]) -> Tensors:
    extra = {f"blk.3.{name.replace('__', '.')}": value for name, value in more.items()}
    return {**layer([Q8_0] * 3, 32, 64), **extra}


def bad_files() -> Iterator[tuple[str, Tensors, dict[str, object] | None, int, str]]:
    one = (F32, (64,), bytes(256))
    llama = None
    yield "layer", small(), llama, 4, "there is no layer 4: its layers are 0 to 3"
    yield "no layers", {"output.weight": one}, llama, 0, "there is no layer 0: it has no layers"
    yield "empty", {}, llama, 0, "there is no layer 0: it has no layers"
    yield (
        "no gate",
        without(small(), "gate"),
        llama,
        3,
        "blk.3.ffn_gate.weight is missing, expected gate, up and down; it has "
        "blk.3.ffn_up.weight, blk.3.ffn_down.weight",
    )
    yield (
        "experts",
        without(small(ffn_gate_exps__weight=one), "gate.weight"),
        llama,
        3,
        "blk.3.ffn_gate.weight is missing",
    )
    bias = "blk.3.ffn_down.bias: the demo knows no such tensor"
    yield "bias", small(ffn_down__bias=one), llama, 3, bias
    yield "no architecture", small(), {}, 3, "has no general.architecture: it is no model"
    number = {"general.architecture": 5}
    yield "architecture", small(), number, 3, "has no general.architecture: it is no model"
    cube = small(ffn_up__weight=(F32, (32, 8, 8), bytes(8192)))
    yield "three dimensions", cube, llama, 3, "blk.3.ffn_up.weight is no matrix"
    misfit = small(ffn_up__weight=(F32, (32, 32), bytes(4096)))
    yield "shapes", misfit, llama, 3, "the shapes do not fit: blk.3.ffn_gate.weight is [32, 64]"
    integers = small(ffn_up__weight=(capi.GGML_TYPE_I32, (32, 64), bytes(8192)))
    reason = "blk.3.ffn_up.weight: the package gguf cannot dequantise i32"
    yield "integers", integers, llama, 3, reason
    block = layer([Q8_0] * 3, 32, 32)
    yield "one block", block, llama, 3, "expected an axis with more than one block of 32 elements"
    strange = {**layer([Q8_0] * 3, 32, 64, 0), "blk.0.ffn_\x1b[31m\nup.weight": one}
    strange = without(strange, "gate")
    yield "control characters", strange, llama, 0, "blk.0.ffn_up.weight"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("tensors", "metadata", "number", "message"),
    [pytest.param(*case[1:], id=case[0]) for case in bad_files()],
)
@needs_meta
def test_bad_models(
    tensors: Tensors,
    metadata: dict[str, object] | None,
    number: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata)
    line = one_line(capsys, ["--model", path, "--layer", number])
    assert message in line


@pytest.mark.usefixtures("reference")
def test_bad_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no such\nfile"
    assert one_line(capsys, ["--model", missing]).endswith("no such file: there is no such file")
    assert one_line(capsys, ["--model", tmp_path]).endswith(": is no file")
    text = tmp_path / "text"
    text.write_text("no model at all, just text")
    assert "invalid magic" in one_line(capsys, ["--model", text])
    text.write_text("")
    assert one_line(capsys, ["--model", text])


@pytest.mark.usefixtures("reference")
@needs_meta
def test_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", layer([Q8_0] * 3, 32, 64, 0))
    assert main(["demo", "--model", str(whole)]) == 0
    capsys.readouterr()
    data = whole.read_bytes()
    part = tmp_path / "part.gguf"
    for length in [*range(0, 400, 7), *range(400, len(data), 500), len(data) - 1]:
        part.write_bytes(data[:length])
        assert "part.gguf: " in one_line(capsys, ["--model", part])
    part.write_bytes(data[:-32])
    line = one_line(capsys, ["--model", part])
    assert line.endswith(f"ffn_down.weight ends at byte {len(data)}, the file at {len(data) - 32}")


FUZZ = """
import contextlib, io, pathlib, random, sys
from ggml_cffi.__main__ import main
path, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
data = path.read_bytes()
rng = random.Random(seed)
ends = set()
for _ in range(100):
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(480)] = rng.randrange(256)
    path.write_bytes(changed)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            ends.add(main(["demo", "--model", str(path)]))
        except SystemExit as error:
            ends.add(error.code)
    assert err.getvalue().count("\\n") <= 1, err.getvalue()
assert ends <= {0, 1, 2}, ends
print("done")
"""


@pytest.mark.usefixtures("reference")
def test_damaged_files_do_no_harm(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", layer([Q8_0] * 3, 32, 64, 0))
    child = subprocess.run(
        [sys.executable, "-c", FUZZ, path, "1"], capture_output=True, text=True, timeout=300
    )
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr


@pytest.mark.usefixtures("reference")
@needs_meta
def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = layer([F32] * 3, 32, 64, 0)
    type_, ne, data = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (type_, ne, np.float32(np.inf).tobytes() + data[4:])
    path = write_gguf(tmp_path / "m.gguf", tensors)
    assert main(["demo", "--model", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_reference(tmp_path: Path) -> None:
    (tmp_path / "gguf.py").write_text("raise ImportError('not here')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ggml_cffi.__main__ import main; main(['demo', '--model', 'any'])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 2
    assert child.stderr == (
        "python -m ggml_cffi demo: --model needs the package gguf, to check against: "
        "python -m pip install gguf\n"
    )


# ---- the parts


@needs_meta
def test_all_is_freed() -> None:
    """Each computation takes 3 MB of weights and more: 30 of them must not add up."""
    block = _demo_block.made_up()
    x = np.ones((1, block.n_embd), np.float32)
    with MetaDevice(["CPU"] * 2, _demo_block.split_function(block, (1, 1), {})) as meta:
        for _ in range(5):
            _demo_block.compute(block, meta, x)
        before = resident()
        for _ in range(30):
            _demo_block.compute(block, meta, x)
        assert resident() - before < 20e6


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_large_weights_are_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    block = _demo_block.made_up(64, 96)
    x = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    whole = _demo_check.expect(block, x)
    monkeypatch.setattr(_demo_check, "_CHUNK", 500)
    parts = _demo_check.expect(block, x)
    for field in dataclasses.fields(whole):
        a, b = getattr(whole, field.name), getattr(parts, field.name)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_ratios_are_parsed() -> None:
    assert _demo.parse_ratios("3,1") == (3, 1)
    assert _demo.parse_ratios(" 0.5 , 1e2") == (0.5, 100)
    assert _demo.parse_ratios("7") == (7,)


# ---- a real model


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("arguments", "elements"),
    [
        ([], [1024, 1024]),  # down is Q6_K in this layer,
        (["--layer", 2, "--devices", 3], [512, 768, 768]),  # and Q4_K in this one
        (["--layer", 17, "--ratios", "3,1"], [1536, 512]),
        (["--layer", 5, "--devices", 1], [2048]),
        (["--layer", 9, "--devices", 16], [0, 256] * 8),
    ],
)
@pytest.mark.slow
@needs_meta
def test_gemma(gemma: Path, arguments: Sequence[object], elements: list[int]) -> None:
    child = run_child("demo", "--model", gemma, *arguments)
    assert (child.returncode, child.stderr) == (0, "")
    assert "640 wide, 2048 inside, GEGLU" in child.stdout
    assert [row[0] for row in check_output(child.stdout, len(elements))] == elements
    (_, one, _, _), (_, exact, percent, _) = agreements(child.stdout)
    assert one <= exact / 1000  # the same roundings: only the order of sums differs
    assert 20 < percent < 80


@pytest.mark.slow
@needs_meta
def test_gemma_has_no_such_layer(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, ["--model", gemma, "--layer", 18])
    assert line.endswith("gemma.gguf: there is no layer 18: its layers are 0 to 17")
