"""The generator's command line: keeps ggml/api.json and ggml/report.txt, compares releases."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import codegen
from codegen import lock, report
from codegen.prefix import BuildError, Prefix, find_prefix, read_prefix

LOCK = codegen.GGML / "api.json"
REPORT = codegen.GGML / "report.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; the exit status says whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m codegen", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--check", action="store_true", help="fail if the lock or the report is stale"
    )
    choice.add_argument(
        "--check-annotations", action="store_true", help="print every wrong annotation"
    )
    choice.add_argument(
        "--prefix", type=Path, metavar="DIR", help="compare another ggml with the lock"
    )
    given = parser.parse_args(arguments)
    try:
        if given.prefix:
            return compare(read_prefix(given.prefix.resolve(), origin="--prefix"))
        prefix = pinned()
        if given.check:
            return check(prefix)
        if given.check_annotations:
            return check_annotations(prefix)
        return regenerate(prefix)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2


def pinned() -> Prefix:
    """The installed ggml of the pin; BuildError if it is another release."""
    prefix = find_prefix({})  # the lock is the pin's, whatever GGML_CFFI_PREFIX says
    if not codegen.is_pin(prefix):
        pin = codegen.pin()
        raise BuildError(
            f"the lock is for ggml {pin['ggml']}, but ggml {prefix.version} is installed",
            looked=[f"{pin['distribution']} {pin['version']}"],
            advice=f"install it, or change ggml/pin.toml; see {prefix.version} against the lock "
            f"with --prefix {prefix.root}",
        )
    return prefix


def regenerate(prefix: Prefix) -> int:
    """Rewrite the lock and the report, and print what was added, removed and changed."""
    before, text = lock.load(LOCK), codegen.lock_text(prefix)
    LOCK.write_text(text, encoding="utf-8")
    _print_difference(before, text)
    REPORT.write_text(report.emit(codegen.bind(prefix)), encoding="utf-8")
    return 0


def check(prefix: Prefix) -> int:
    """Print how the lock and the report differ from what would be written now."""
    stale = False
    text = codegen.lock_text(prefix)
    if not LOCK.exists() or LOCK.read_text(encoding="utf-8") != text:
        stale = True
        print(f"{LOCK.name} is stale")
        _print_difference(lock.load(LOCK), text)
    for line in _difference_of_report(report.emit(codegen.bind(prefix))):
        stale = True
        print(line)
    if stale:
        print("write both anew: python -m codegen")
    return int(stale)


def check_annotations(prefix: Prefix) -> int:
    """Print every wrong annotation, not only the first."""
    notes = codegen.bind(prefix, strict=False).notes
    for note in notes:
        print(note)
    return int(bool(notes))


def compare(prefix: Prefix) -> int:
    """Print how another ggml differs from the lock, and what the annotations are no good for."""
    _print_difference(lock.load(LOCK), codegen.lock_text(prefix))
    binding = codegen.bind(prefix, strict=False)
    print(
        f"{len(binding.api.functions)} functions declared, {len(binding.bound)} bound, "
        f"{len(binding.absent)} of the lock are not there"
    )
    for note in binding.notes:
        print(note)
    return 0


def _print_difference(before: dict[str, object], text: str) -> None:
    after = json.loads(text)
    print(f"ggml {before.get('ggml', '(no lock)')} -> {after['ggml']}")
    lines = list(lock.difference(before, after))
    print("\n".join(lines) if lines else "no difference")


def _difference_of_report(text: str) -> Iterator[str]:
    before = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
    yield from difflib.unified_diff(
        before.splitlines(), text.splitlines(), "report.txt", "generated", lineterm="", n=1
    )


if __name__ == "__main__":
    sys.exit(main())
