"""The programs of README and docs run; the README's are the examples; links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import require

from ggml_cffi import capi, ffi

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCKS: list[tuple[str, str]] = BLOCK.findall(README)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
DOCS = sorted((ROOT / "docs").glob("*.md"))
IN_DOCS = [
    pytest.param(text, id=f"{page.stem}-{number}", marks=[pytest.mark.rpc] * ("rpc." in text))
    for page in DOCS
    for number, (language, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    if language == "python"
]


def check_release(program: str) -> None:
    """Leave the test if this release of ggml has no meta device and the program makes one."""
    if "MetaDevice(" in program:
        require("ggml_backend_meta_device")


def run(program: Path, folder: Path) -> str:
    child = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2
    assert len(EXAMPLES) >= 2
    assert README.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number: int, tmp_path: Path) -> None:
    check_release(PROGRAMS[number])
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number], encoding="utf-8")
    out = run(program, tmp_path)
    # a block of text after a program, if any before the next, is what it prints
    after = BLOCKS[BLOCKS.index(("python", PROGRAMS[number])) + 1 :]
    for language, text in after:
        if language == "python":
            break
        if language == "text":
            assert out == text


@pytest.mark.parametrize("text", IN_DOCS)
def test_program_of_a_page(text: str, tmp_path: Path) -> None:
    check_release(text)
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    run(program, tmp_path)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_are_the_examples(number: int) -> None:
    """Under their docstrings, the examples are the programs of the README: none gets old."""
    assert PROGRAMS[number] in [path.read_text("utf-8").split("\n\n", 1)[1] for path in EXAMPLES]


def test_commands_are_those_of_the_program() -> None:
    from ggml_cffi.__main__ import _parsers

    _, commands = _parsers()
    used = re.findall(r"python -m ggml_cffi ([\w-]+)([^\n#]*)", README)
    assert {name for name, _ in used} == set(commands)
    for name, rest in used:
        known = commands[name].format_help()
        for option in re.findall(r"--[\w-]+", rest):
            assert option in known


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda path: path.stem)
def test_links_to_sections_name_some(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8")):
        text = (page.parent / target if target else page).read_text("utf-8")
        titles = re.findall(r"^#+ (.+)$", re.sub(BLOCK, "", text), re.M)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert section in anchors, f"{target}#{section}"


def test_the_sources_named_are_those_of_the_default_ggml() -> None:
    pin = (ROOT / "ggml" / "pin.toml").read_text("utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', pin, re.M)
    named = set(re.findall(r"libggml[_-]python(?:==|-)(\d+(?:\.\w*\d)+)", README))
    assert named == {version}


def test_what_who_comes_from_ctypes_writes() -> None:
    ctx = capi.ggml_init(mem_size=1 << 20)  # with memory for numbers
    x = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
    (code,) = re.findall(r"`np\.(frombuffer.*?)` \|", README)
    numbers = eval(f"np.{code}", {"np": np, "ffi": ffi, "capi": capi, "t": x})
    numbers[:] = [1, 2, 3, 4]

    def twice(dst: Any, a: Any, ith: int, nth: int) -> None:
        assert (dst.ne[0], ith, nth) == (4, 0, 1)
        view = np.frombuffer(ffi.buffer(dst.data, 16), np.float32)
        view[:] = 2 * numbers

    graph = capi.ggml_new_graph(ctx)
    result = capi.ggml_map_custom1(ctx, x, twice, 1)
    capi.ggml_build_forward_expand(graph, result)
    plan = capi.ggml_graph_plan(graph, 1)
    assert capi.ggml_graph_compute(graph, plan) == capi.GGML_STATUS_SUCCESS
    out = np.frombuffer(ffi.buffer(capi.ggml_get_data(result), 16), np.float32)
    assert out.tolist() == [2, 4, 6, 8]
    capi.ggml_free(ctx)


def test_all_that_is_public_is_in_the_table() -> None:
    import ggml_cffi

    text = README + (ROOT / "docs" / "objects.md").read_text(encoding="utf-8")
    errors = {name for name in ggml_cffi.__all__ if name.endswith("Error")}
    for name in set(ggml_cffi.__all__) - errors:
        assert re.search(rf"\b{name}\b", text), name


def test_settings_are_said() -> None:
    """Those that are read when the package is imported, or built."""
    read = set()
    for source in [*(ROOT / "src" / "ggml_cffi").glob("*.py"), ROOT / "build_ffi.py"]:
        read |= set(re.findall(r"GGML_CFFI_[A-Z_]+[A-Z]", source.read_text(encoding="utf-8")))
    assert "GGML_CFFI_NO_FAULTHANDLER" in read
    read.discard("GGML_CFFI_LINK")  # for the tests of the build
    assert {name for name in read if name not in README} == set()
    extras = extras_of_the_project()
    assert {"bfloat16"} <= extras and all(
        f"[{name}]" in README for name in extras - {"dev", "test"}
    )


def extras_of_the_project() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    return set(re.findall(r"^([\w-]+) = ", section, re.M))
