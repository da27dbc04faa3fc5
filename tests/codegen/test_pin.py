"""The generator on the headers of the pin: the lock, the report, the sets, the very bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from harness import write

import codegen
from codegen import __main__ as command
from codegen import lock, report
from codegen.prefix import HEADERS, exported_symbols, find_prefix

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = codegen.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
COMPILERS = ("gcc", "clang")


@pytest.fixture(scope="module")
def prefix():
    return find_prefix({})


@pytest.fixture(scope="module")
def binding(prefix):
    return codegen.bind(prefix)


# ---- the lock and the report


def test_lock_is_fresh(prefix):
    text = codegen.lock_text(prefix)
    difference = lock.difference(lock.load(command.LOCK), json.loads(text))
    assert list(difference) == []
    assert command.LOCK.read_text(encoding="utf-8") == text, "run nox -s regenerate"


def test_report_is_fresh(binding):
    text = report.emit(binding)
    committed = command.REPORT.read_text(encoding="utf-8")
    assert text == committed, "run nox -s regenerate"


def test_no_wrong_annotation(capsys):
    assert command.main(["--check-annotations"]) == 0
    assert capsys.readouterr().out == ""


def test_check(capsys):
    assert command.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


@pytest.fixture
def stale(monkeypatch, tmp_path):
    """A lock and a report with one thing added, one gone and one changed."""
    data = lock.load(command.LOCK)
    del data["functions"]["ggml_abs"]
    data["functions"]["ggml_gone"] = "void ggml_gone(void)"
    data["structs"]["ggml_init_params"].append("int extra")
    data["enums"]["ggml_status"][0] = "GGML_STATUS_ALLOC_FAILED = -7"
    write(tmp_path, {"api.json": json.dumps(data), "report.txt": "stale\n"})
    monkeypatch.setattr(command, "LOCK", tmp_path / "api.json")
    monkeypatch.setattr(command, "REPORT", tmp_path / "report.txt")
    return tmp_path


CHANGES = [
    "+ function ggml_abs: struct ggml_tensor *ggml_abs(struct ggml_context *ctx, "
    "struct ggml_tensor *a)",
    "- function ggml_gone: void ggml_gone(void)",
    "~ struct ggml_init_params: -int extra",
    "~ enum ggml_status: -GGML_STATUS_ALLOC_FAILED = -7, +GGML_STATUS_ALLOC_FAILED = -2",
]


def test_check_of_a_stale_lock(stale, capsys):
    before = (stale / "api.json").read_text()
    assert command.main(["--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in CHANGES] == CHANGES
    assert "-stale" in lines
    assert (stale / "api.json").read_text() == before


def test_regenerate(stale, capsys, binding):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == CHANGES
    assert command.main(["--check"]) == 0
    assert (stale / "report.txt").read_text() == report.emit(binding)


def test_another_prefix(stale, capsys, prefix):
    """Only the difference is printed; the lock stays as it is."""
    before = (stale / "api.json").read_text()
    assert command.main(["--prefix", str(prefix.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:-1] == CHANGES
    assert "functions declared" in lines[-1]
    assert (stale / "api.json").read_text() == before


def test_no_prefix(capsys):
    assert command.main(["--prefix", "/nowhere"]) == 2
    assert "/nowhere is not a folder" in capsys.readouterr().err


# ---- what is declared, exported and bound


def test_declared_exported_bound(prefix, need):
    """Of the core's headers every function is bound or left out with a reason."""
    need(importlib.util.find_spec("ggml_cffi"), "built ggml_cffi")
    from ggml_cffi import _loader, capi
    from ggml_cffi._gen import build_info

    need(prefix.version == build_info.GGML_VERSION, "package built for the default ggml")
    api = codegen.read_api(prefix)
    declared = {name for name, f in api.functions.items() if f.where.header in HEADERS}
    assert len(declared) > 650
    libraries = _loader.library_files(build_info)
    exported = set().union(*(exported_symbols(path) for path in libraries.values()))
    coverage = capi.__coverage__
    bound, left_out = set(coverage.bound), dict(coverage.left_out)

    assert declared <= bound | set(left_out)
    assert bound.isdisjoint(left_out)
    assert bound <= exported
    assert all(left_out.values())
    assert bound | set(left_out) == set(coverage.declared)
    unexported = declared - exported
    assert unexported <= set(left_out)
    assert "ggml_threadpool_get_n_threads" in unexported
    assert {"ggml_abort", "ggml_format_name"} <= set(left_out)  # variadic
    assert [name for name in coverage.bound if not callable(getattr(capi, name))] == []


def test_all_is_found_in_the_text(prefix):
    """The parser's count against a plain search: no declaration is passed over."""
    api = codegen.read_api(prefix)
    for header in HEADERS:
        text = (prefix.include / header).read_text(encoding="utf-8")
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
        found = set(re.findall(r"\b(?:GGML|GGML_BACKEND)_API\b[^;{]*?\b(\w+)\s*\([^;{]*;", text))
        assert found - set(api.functions) - {"GGML_DEPRECATED", "GGML_ATTRIBUTE_FORMAT"} == set()


# ---- the same bytes everywhere

HASH = """
import hashlib, sys
from pathlib import Path
import codegen, tempfile
from codegen.prefix import read_prefix
prefix = read_prefix(Path(sys.argv[1]), origin="a test")
for compiler in sys.argv[2:]:
    with tempfile.TemporaryDirectory() as folder:
        made = codegen.generate(prefix, Path(folder), compiler=compiler)
        texts = {path.name: path.read_text(encoding="utf-8") for path in made.python_files}
    texts |= {"cdef": made.cdef, "source": made.source, "lock": codegen.lock_text(prefix)}
    for name, text in sorted(texts.items()):
        print(compiler, name, hashlib.sha256(text.encode()).hexdigest())
"""


def interpreter(version: str) -> str | None:
    """A Python of this version that runs; a shim may be there that does not."""
    found = shutil.which(f"python{version}")
    if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return found
    return None


@pytest.fixture(scope="module")
def requirements():
    """What the generator itself needs of the build requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = ("pycparser", "pyelftools", "tomli")
    return [line for line in project["build-system"]["requires"] if line.startswith(names)]


def hashes(python, compilers, prefix, seed):
    """Lines "compiler file hash" of what this Python generates."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": str(seed),  # no order may depend on it
    }
    command = [python, "-c", HASH, str(prefix.root), *compilers]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def reference(prefix):
    return hashes(sys.executable, ["cc"], prefix, 0)


@pytest.mark.parametrize("version", PYTHONS)
def test_same_bytes(version, prefix, reference, requirements, need, tmp_path):
    """In an environment with the newest requirements that this Python can have."""
    base = interpreter(version)
    need(base, f"Python {version}")
    for compiler in COMPILERS:
        need(shutil.which(compiler), compiler)
    python = tmp_path / "bin" / "python"
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path], check=True)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", *requirements]
    subprocess.run(install, check=True)
    found = hashes(python, COMPILERS, prefix, 1)
    assert len(reference) >= 10
    for compiler in COMPILERS:
        ours = [line for line in found if line.startswith(f"{compiler} ")]
        assert ours == [line.replace("cc ", f"{compiler} ", 1) for line in reference]


# ---- nothing of upstream's


def test_no_upstream_file(prefix, need):
    """The repository has no header, library or model of ggml, nor a good part of one."""
    need(shutil.which("git") and (ROOT / ".git").exists(), "git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    upstream = {path.name for path in prefix.include.rglob("*.h")}
    text = "\n".join(path.read_text(encoding="utf-8") for path in prefix.include.rglob("*.h"))
    lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 40}
    for path in files:
        assert path.name not in upstream
        assert path.suffix not in (".so", ".a", ".o", ".gguf", ".whl")
        assert "_gen" not in path.parts
        assert "_libs" not in path.parts
        content = path.read_text(encoding="utf-8", errors="replace").splitlines()
        same = [line for line in content if line.strip() in lines]
        # a few declarations may read alike: there is only one way to say them
        assert len(same) < 10, f"{path.name} has these lines of ggml: {same}"
