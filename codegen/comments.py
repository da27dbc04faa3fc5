"""Where each function stands in its header, and the comments around it.

Found in the header's own text, not from the preprocessor's line markers: those differ between
compilers where a macro call spans lines. The comments go to docstrings on the user's machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import ir

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", re.M)


def locate(api: ir.Api, headers: Sequence[Path]) -> ir.Api:
    """`api` with the place and the comments of every function filled in."""
    # a comment need not be UTF-8
    texts = {h.name: _Header(h.read_text(encoding="utf-8", errors="replace")) for h in headers}
    functions = {}
    for name, function in api.functions.items():
        where = texts[function.where.header].find(name, function.where)
        functions[name] = replace(function, where=where)
    return replace(api, functions=functions)


class _Header:
    def __init__(self, text: str) -> None:
        self.text = text
        self.code = _DIRECTIVE.sub(_blank, _COMMENT.sub(_blank_comment, text))
        self.places: dict[str, int] = {}
        for match in re.finditer(r"\b([A-Za-z_]\w*)\s*\(", self.code):
            self.places.setdefault(match.group(1), match.start(1))

    def find(self, name: str, where: ir.Where) -> ir.Where:
        """`where`, with what is found of the function `name`."""
        place = self.places.get(name)
        if place is None:
            return where
        start = max(self.code.rfind(c, 0, place) for c in ";{}") + 1
        end = self.code.find(";", place)
        first = start + len(self.code[start:]) - len(self.code[start:].lstrip())
        line_end = self.text.find("\n", end)
        one_line = "\n" not in self.text[place:end]
        after = _clean(self.text[end + 1 : line_end]) if one_line else ""
        return replace(
            where,
            line=self.text.count("\n", 0, place) + 1,
            comment="\n".join(filter(None, (self._above(first), after))),
            param_comments=() if one_line else self._params(place, line_end),
        )

    def _above(self, position: int) -> str:
        """The comment that ends on the line above, with no blank line between."""
        lines = self.text[:position].split("\n")[:-1]
        block: list[str] = []
        inside = False
        while lines:
            line = lines.pop().strip()
            if line.startswith("//"):
                block.append(line)
            elif line.endswith("*/") or inside:
                block.append(line)
                inside = not line.startswith("/*")
            else:
                break
        return _clean("\n".join(reversed(block)))

    def _params(self, start: int, end: int) -> tuple[tuple[str, str], ...]:
        found = []
        for match in re.finditer(
            r"(\w+)\s*(?:\[[^\]\n]*\])?\s*[,)]?[\s);]*?//([^\n]*)", self.text[start:end]
        ):
            found.append((match.group(1), match.group(2).strip()))
        return tuple(found)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _blank_comment(match: re.Match[str]) -> str:
    text = match.group()
    return text if text.startswith('"') else _blank(match)


def _clean(text: str) -> str:
    """A comment's words, without its signs."""
    lines = []
    for line in text.strip().split("\n"):
        line = re.sub(r"^\s*(//+|/\*+|\*(?!/))? ?", "", line)
        lines.append(re.sub(r"\s*\*/\s*$", "", line).rstrip())
    return "\n".join(lines).strip("\n") if text.lstrip().startswith(("/", "*")) else ""
