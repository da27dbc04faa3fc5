"""The README's programs run as printed, and are the examples; its links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _release import require

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCKS: list[tuple[str, str]] = BLOCK.findall(README)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]


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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    check_release(example.read_text(encoding="utf-8"))
    assert run(example, tmp_path)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_are_the_examples(number: int) -> None:
    """Under their docstrings, the examples are the programs of the README: none gets old."""
    assert PROGRAMS[number] in [path.read_text("utf-8").split("\n\n", 1)[1] for path in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_say_what_they_are(example: Path) -> None:
    assert ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))


def test_commands_are_those_of_the_program() -> None:
    from ggml_cffi.__main__ import _parsers

    _, commands = _parsers()
    used = re.findall(r"python -m ggml_cffi (\w+)([^\n#]*)", README)
    assert {name for name, _ in used} == set(commands)
    for name, rest in used:
        known = commands[name].format_help()
        for option in re.findall(r"--[\w-]+", rest):
            assert option in known


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target
