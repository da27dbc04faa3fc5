"""Stage 1: one umbrella header through ``cc -E``, with line markers and macro definitions kept.

The C library's headers are replaced by the few lines in ``codegen/libc``, so that the text
depends on ggml's headers alone: not on the platform, nor on which compiler preprocessed it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .prefix import BuildError

LIBC = Path(__file__).parent / "libc"

_MARKER = re.compile(r'^#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\(?:([0-3]?[0-7]{1,2})|(.))")
_DEFINE = re.compile(r"^#define\s+([A-Za-z_]\w*)(\(?)\s*(.*)$")
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|[A-Za-z_]\w*|\s+|.', re.S)


class PreprocessError(BuildError):
    """No compiler, or the headers do not preprocess."""


@dataclass(frozen=True)
class Macro:
    """An object-like macro that one of the wanted headers defines."""

    name: str
    body: str
    header: str


@dataclass(frozen=True)
class Preprocessed:
    """C text for the parser, and what the parser would not see.

    The line markers of `text` name the wanted headers without their folders.
    """

    text: str
    macros: tuple[Macro, ...]
    deprecated: dict[str, str]


def find_preprocessor(name: str | None = None) -> list[str]:
    """What to preprocess C with: `name`, else $CC, else cc, gcc or clang.

    The build names its C++ compiler, which will do; `toolchain.find_compiler` finds that.
    """
    candidates = [name] if name else [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    for candidate in candidates:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise PreprocessError(
        "there is no C compiler",
        looked=[f"{', '.join(filter(None, candidates))} on PATH"],
        advice="install gcc or clang, or name one in CC",
    )


def preprocess(
    headers: Sequence[Path], include_dirs: Iterable[Path], compiler: str | None = None
) -> Preprocessed:
    """Preprocess `headers` together; what other headers define is parsed but not ours.

    Each of `headers` must be the first of its name in `include_dirs`. Raises PreprocessError if
    it is not, or if the compiler fails.
    """
    # By name, not by path: there is no way to write every path in an #include.
    umbrella = "".join(f"#include <{header.name}>\n" for header in headers)
    command = [*find_preprocessor(compiler), "-E", "-dD", "-x", "c", "-std=gnu11", "-nostdinc"]
    command += ["-I", str(LIBC)]
    for directory in include_dirs:
        command += ["-I", str(directory)]
    done = subprocess.run([*command, "-"], input=umbrella.encode(), capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise PreprocessError(f"{shlex.join(command)} failed:\n{said}")
    text, macros = _split_macros(done.stdout.decode("utf-8", "surrogateescape"), headers)
    text, deprecated = _strip_extensions(text)
    return Preprocessed(text, macros, deprecated)


def _split_macros(text: str, headers: Sequence[Path]) -> tuple[str, tuple[Macro, ...]]:
    wanted = {header.resolve(): header.name for header in headers}
    names: dict[str, str | None] = {}  # by the words of a marker
    macros: dict[str, Macro] = {}
    kept = []
    current = None
    for line in text.split("\n"):
        marker = _MARKER.match(line)
        if marker:
            number, words = marker.groups()
            if words not in names:
                names[words] = wanted.get(_unescape(words).resolve())
            current = names[words]
            kept.append(f'#line {number} "{current or words}"')
            continue
        if line.startswith("#"):
            define = _DEFINE.match(line)
            if define and not define.group(2) and current:
                name, _, body = define.groups()
                macros[name] = Macro(name, body.strip(), current)
            kept.append("")
            continue
        kept.append(line)
    if missing := [str(path) for path, name in wanted.items() if name not in names.values()]:
        raise PreprocessError(
            "the compiler does not say where these headers begin, or takes others in their place",
            looked=missing,
            advice="name another compiler in CXX (for `python -m codegen` in CC)",
        )
    return "\n".join(kept) + "\n", tuple(macros.values())


def _unescape(words: str) -> Path:
    """The path in a line marker: gcc escapes only what it must, clang all but printable ASCII."""
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f", b"a": b"\a"}

    def byte(match: re.Match[bytes]) -> bytes:
        octal, letter = match.groups()
        return bytes([int(octal, 8)]) if octal else letters.get(letter, letter)

    return Path(os.fsdecode(_ESCAPE.sub(byte, words.encode("utf-8", "surrogateescape"))))


def _strip_extensions(text: str) -> tuple[str, dict[str, str]]:
    """Drop compiler extensions; remember what ``__attribute__((deprecated(...)))`` said of whom."""
    deprecated: dict[str, str] = {}
    out: list[str] = []
    tokens = _TOKEN.findall(text)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token in ("__attribute__", "__attribute", "__asm__"):
            end = _closing(tokens, position + 1)
            inside = "".join(tokens[position + 1 : end])
            hint = re.search(r'deprecated\s*\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\)', inside)
            if "deprecated" in inside:
                name = _declared_before(out)
                if name:
                    words = re.findall(r'"((?:[^"\\]|\\.)*)"', hint.group(1)) if hint else []
                    deprecated[name] = "".join(words)
            position = end
            continue
        if token in ("__extension__", "__inline", "__inline__", "__restrict", "__restrict__"):
            position += 1
            continue
        out.append(token)
        position += 1
    return "".join(out), deprecated


def _closing(tokens: Sequence[str], position: int) -> int:
    """The index after the bracket that closes the first one at or after `position`."""
    depth = 0
    for index in range(position, len(tokens)):
        if tokens[index] == "(":
            depth += 1
        elif tokens[index] == ")":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(tokens)


def _declared_before(out: Sequence[str]) -> str | None:
    """The function whose parameter list has just been closed in `out`."""
    depth = 0
    for index in range(len(out) - 1, -1, -1):
        token = out[index]
        if token == ")":
            depth += 1
        elif token == "(":
            depth -= 1
            if depth == 0:
                before = [t for t in out[:index] if not t.isspace()]
                return before[-1] if before else None
        elif depth == 0 and not token.isspace():
            return None
    return None
