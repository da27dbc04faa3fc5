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

LIBC = Path(__file__).parent / "libc"

_MARKER = re.compile(r'^#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"')
_DEFINE = re.compile(r"^#define\s+([A-Za-z_]\w*)(\(?)\s*(.*)$")
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|[A-Za-z_]\w*|\s+|.', re.S)


class PreprocessError(RuntimeError):
    """No compiler, or the headers do not preprocess."""


@dataclass(frozen=True)
class Macro:
    """An object-like macro that one of the wanted headers defines."""

    name: str
    body: str
    header: str


@dataclass(frozen=True)
class Preprocessed:
    """C text for the parser, and what the parser would not see."""

    text: str
    macros: tuple[Macro, ...]
    deprecated: dict[str, str]


def find_compiler(name: str | None = None) -> list[str]:
    """The C compiler to preprocess with: `name`, else $CC, else cc, gcc or clang."""
    candidates = [name or os.environ.get("CC", ""), "cc", "gcc", "clang"]
    for candidate in candidates:
        words = shlex.split(candidate or "")
        if words and shutil.which(words[0]):
            return words
        if name:
            break
    raise PreprocessError(
        f"no C compiler: looked for {', '.join(c for c in candidates if c)} on PATH; "
        "install gcc or clang, or name one in the environment variable CC"
    )


def preprocess(
    headers: Sequence[Path], include_dirs: Iterable[Path], compiler: str | None = None
) -> Preprocessed:
    """Preprocess `headers` together; what other headers define is parsed but not ours."""
    umbrella = "".join(f'#include "{header}"\n' for header in headers)
    command = [*find_compiler(compiler), "-E", "-dD", "-x", "c", "-std=gnu11", "-nostdinc"]
    command += ["-I", str(LIBC)]
    for directory in include_dirs:
        command += ["-I", str(directory)]
    done = subprocess.run([*command, "-"], input=umbrella, capture_output=True, text=True)
    if done.returncode:
        raise PreprocessError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    text, macros = _split_macros(done.stdout, {str(header) for header in headers})
    text, deprecated = _strip_extensions(text)
    return Preprocessed(text, macros, deprecated)


def _split_macros(text: str, wanted: set[str]) -> tuple[str, tuple[Macro, ...]]:
    macros: dict[str, Macro] = {}
    kept = []
    current = ""
    for line in text.splitlines():
        marker = _MARKER.match(line)
        if marker:
            current = marker.group(2)
            kept.append(f'#line {marker.group(1)} "{current}"')
            continue
        if line.startswith("#"):
            define = _DEFINE.match(line)
            if define and not define.group(2) and current in wanted:
                name, _, body = define.groups()
                macros[name] = Macro(name, body.strip(), Path(current).name)
            kept.append("")
            continue
        kept.append(line)
    return "\n".join(kept) + "\n", tuple(macros.values())


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
