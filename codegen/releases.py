"""The table of docs/releases.md: what each release of ggml declares, what is bound, what passes.

``nox -s releases`` runs it for each release: ``python -m codegen.releases NAME --prefix DIR``.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import codegen
from codegen import lock
from codegen.prefix import Prefix, read_prefix

DOCUMENT = codegen.ROOT / "docs" / "releases.md"
#: How a test that needs what a release lacks begins its reason (tests/_release.py).
LACKING = "not in this release"
COLUMNS = (
    *("release", "functions declared", "bound", "left out", "new since the one above"),
    *("tests passed", "not in this release"),
)
_BEGIN, _END = "<!-- written by nox -s releases -- --write -->\n", "<!-- until here -->\n"


@dataclass
class Results:
    """What a run of the tests said, from pytest's XML."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # for another reason than the release
    lacking: Counter[str] = field(default_factory=Counter)  # what is not there: tests

    @property
    def good(self) -> bool:
        """Whether all passed but what the release lacks."""
        return self.passed > 0 and not self.failed and not self.skipped


def results(path: Path) -> Results:
    """Read pytest's ``--junitxml``."""
    found = Results()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed.append(name)
        elif (skipped := case.find("skipped")) is not None:
            text = skipped.get("message") or ""
            if text.startswith(LACKING):
                found.lacking[text.partition("): ")[2]] += 1
            else:
                found.skipped.append(f"{name}: {text}")
        else:
            found.passed += 1
    return found


def row(name: str, prefix: Prefix, before: Iterable[str] | None, tests: Results) -> list[str]:
    """The row of a release; `before`: those that the one above declares, if any."""
    binding = codegen.bind(prefix)
    declared = set(binding.api.functions)
    return [
        name,
        str(len(declared)),
        str(len(binding.bound)),
        str(len(binding.skipped)),
        "" if before is None else str(len(declared - set(before))),
        str(tests.passed),
        str(sum(tests.lacking.values())),
    ]


def table(text: str) -> dict[str, list[str]]:
    """The rows of the document's table, by release."""
    _, _, rest = text.partition(_BEGIN)
    lines = [line for line in rest.partition(_END)[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row for row in rows}


def lacking(text: str) -> dict[str, str]:
    """What the document says that each release lacks, as it stands there."""
    _, _, rest = text.partition(_BEGIN)
    found = re.findall(r"^- (\S+): (.*)$", rest.partition(_END)[0], re.M)
    return dict(found)


def rewrite(text: str, new: Sequence[str], tests: Results) -> str:
    """The document with the row of a release, and what it lacks, put in or replaced."""
    rows = {**table(text), new[0]: list(new)}
    missing = lacking(text)
    missing.pop(new[0], None)
    if tests.lacking:
        parts = [f"{what} ({count})" for what, count in sorted(tests.lacking.items())]
        missing[new[0]] = "; ".join(parts)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(rows[name])} |" for name in sorted(rows, key=_order)]
    lines += ["", "What the tests needed and a release lacks, and how many of them:", ""]
    lines += [f"- {name}: {missing[name]}" for name in sorted(missing, key=_order)]
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, "docs/releases.md has lost its marks"
    return head + begin + "\n".join(lines) + "\n" + end + tail


def _order(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row of a release and what is wrong; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(prog="python -m codegen.releases", description=__doc__)
    parser.add_argument("name", help="the release, as the table calls it")
    parser.add_argument("--prefix", type=Path, required=True, help="its install prefix")
    parser.add_argument("--before", help="that of the one above, if any; `lock` for the pin")
    parser.add_argument("--tests", type=Path, required=True, help="pytest's --junitxml")
    parser.add_argument("--write", action="store_true", help="put the row into docs/releases.md")
    given = parser.parse_args(arguments)
    prefix = read_prefix(given.prefix.resolve(), origin="--prefix")
    before: Iterable[str] | None = None
    if given.before == "lock":
        before = lock.functions(codegen.GGML / "api.json")
    elif given.before:
        above = read_prefix(Path(given.before).resolve(), origin="--before")
        before = codegen.read_api(above).functions
    tests = results(given.tests)
    new = row(given.name, prefix, before, tests)
    for heading, value in zip(COLUMNS, new, strict=True):
        print(f"{heading:24} {value}")
    for what, count in sorted(tests.lacking.items()):
        print(f"  {LACKING}: {what} ({count})")
    for name in tests.failed:
        print(f"failed: {name}")
    for name in tests.skipped:
        print(f"skipped: {name}")
    if given.write and tests.good:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(rewrite(text, new, tests), encoding="utf-8")
    return 0 if tests.good else 1


if __name__ == "__main__":
    sys.exit(main())
