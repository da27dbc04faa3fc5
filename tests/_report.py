"""The table of docs/backends.md: how the numerical tests end on each backend.

``nox -s backends`` runs it for each: ``python tests/_report.py NAME --tests XML``, with the
package and the environment that the tests ran with.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "backends.md"
#: How a test that has no fault begins its reason: the very words of _backends.py.
NOT_SUPPORTED = "not supported by the backend"
REFUSED = "refused by the meta device"
COLUMNS = (*("backend", "ggml", "device", "passed", "not supported", "refused", "failed", "date"),)
_BEGIN, _END = "<!-- written by nox -s backends -- --write -->\n", "<!-- until here -->\n"
_LIST = "Of which operations a backend does not support how many of the cases:"


@dataclass
class Results:
    """What a run of the tests said, from pytest's XML."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    not_supported: int = 0
    refused: int = 0
    skipped: list[str] = field(default_factory=list)  # for another reason
    cases: Counter[str] = field(default_factory=Counter)  # operation: cases of tests/op_table
    unsupported: Counter[str] = field(default_factory=Counter)  # operation: those not supported

    @property
    def good(self) -> bool:
        """Whether all passed but what the backend does not support or the meta device refuses."""
        return self.passed > 0 and not self.failed and not self.skipped

    @property
    def absent(self) -> bool:
        """Whether nothing ran at all: the machine does not have the backend."""
        return bool(self.skipped) and self.passed + self.not_supported + self.refused == 0


def results(path: Path) -> Results:
    """Read pytest's ``--junitxml``."""
    found = Results()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        operation = re.search(r"::test_against_numpy\[(\w+)", name)
        if operation:
            found.cases[operation[1]] += 1
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed.append(name)
        elif (skipped := case.find("skipped")) is not None:
            text = skipped.get("message") or ""
            if text.startswith(NOT_SUPPORTED):
                found.not_supported += 1
                if operation:
                    found.unsupported[operation[1]] += 1
            elif text.startswith(REFUSED):
                found.refused += 1
            else:
                found.skipped.append(f"{name}: {text}")
        else:
            found.passed += 1
    return found


def row(backend: str, ggml: str, device: str, tests: Results, date: str) -> list[str]:
    """The row of a backend."""
    counts = (tests.passed, tests.not_supported, tests.refused, len(tests.failed))
    return [backend, ggml, device.replace("|", "/"), *map(str, counts), date]


def lacks(tests: Results) -> str:
    """The operations that the backend lacks as a whole, or has, if these are fewer; or in part."""
    whole = [name for name, count in tests.unsupported.items() if count == tests.cases[name]]
    part = [
        f"{name} ({count} of {tests.cases[name]})"
        for name, count in sorted(tests.unsupported.items())
        if name not in whole
    ]
    rest = sorted(set(tests.cases) - set(whole))
    if len(whole) > len(rest):
        said = [f"all but {', '.join(rest)}"] if rest else ["all"]
    else:
        said = [f"all of {', '.join(sorted(whole))}"] if whole else []
    return "; ".join([*said, *([f"some of {', '.join(part)}"] if part else [])])


def table(text: str) -> dict[str, list[str]]:
    """The rows of the document's table, by backend."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _written(text).splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row for row in rows[2:]}


def lacking(text: str) -> dict[str, str]:
    """What the document says that each backend lacks, as it stands there."""
    return dict(re.findall(r"^- (\S+): (.*)$", _written(text), re.M))


def rewrite(text: str, new: Sequence[str], tests: Results, order: Iterable[str]) -> str:
    """The document with the row of a backend, and what it lacks, put in or replaced."""
    rows, missing = {**table(text), new[0]: list(new)}, lacking(text)
    missing.pop(new[0], None)
    if said := lacks(tests):
        missing[new[0]] = said
    names = [name for name in order if name in rows]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(rows[name])} |" for name in names]
    lines += ["", _LIST, ""]
    lines += [f"- {name}: {missing[name]}" for name in names if name in missing]
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, "docs/backends.md has lost its marks"
    return head + begin + "\n".join(lines) + "\n" + end + tail


def _written(text: str) -> str:
    return text.partition(_BEGIN)[2].partition(_END)[0]


def _device() -> str:
    """What the run's device, or the devices that a meta device is made of, say of themselves."""
    import _backends

    if _backends.IS_META:
        made_of = _backends.children(len(_backends.KIND.children))
    else:
        with _backends.target() as device:
            made_of = [device]
    # a worker describes itself by its address, whose port is another one each time
    address = re.compile(r"^127\.0\.0\.1:\d+(#\d+)?$")
    said = Counter(address.sub("a worker here", one.description.strip()) for one in made_of)
    return " + ".join(f"{count} x {text}" if count > 1 else text for text, count in said.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row of a backend and what is wrong; the exit status says whether all is well.

    A backend that this machine does not have gets no row, which is no failure.
    """
    parser = argparse.ArgumentParser(prog="python tests/_report.py", description=__doc__)
    parser.add_argument("backend", help="the backend, as _backends.py calls it")
    parser.add_argument("--tests", type=Path, required=True, help="pytest's --junitxml")
    parser.add_argument("--write", action="store_true", help="put the row into docs/backends.md")
    given = parser.parse_args(arguments)
    tests = results(given.tests)
    if tests.absent:
        reasons = Counter(line.partition(": ")[2] for line in tests.skipped)
        print(f"{given.backend}: {reasons.most_common(1)[0][0]}")
        return 0
    import _backends

    from ggml_cffi import capi

    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    new = row(given.backend, capi.ggml_version(), _device(), tests, today)
    for heading, value in zip(COLUMNS, new, strict=True):
        print(f"{heading:14} {value}")
    if said := lacks(tests):
        print(f"not supported: {said}")
    for name in tests.failed:
        print(f"failed: {name}")
    for name in tests.skipped:
        print(f"skipped: {name}")
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        written = rewrite(text, new, tests, _backends.KINDS)
        DOCUMENT.write_text(written, encoding="utf-8")
    return 0 if tests.good else 1


if __name__ == "__main__":
    sys.exit(main())
