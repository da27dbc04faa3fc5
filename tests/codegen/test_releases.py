"""docs/releases.md: its table is of the releases that nox tests, and agrees with the lock."""

from __future__ import annotations

import json
import re

import pytest

import codegen
from codegen import __main__ as command
from codegen import releases

TEXT = releases.DOCUMENT.read_text(encoding="utf-8")
ROWS = releases.table(TEXT)
PIN = str(codegen.pin()["version"])


def test_the_table_has_the_releases_of_nox():
    source = (codegen.ROOT / "noxfile.py").read_text(encoding="utf-8")
    found = re.search(r"^RELEASES = \((.*)\)", source, re.M)
    assert found
    names = re.findall(r'"([^"]+)"', found[1])
    assert [name for name in ROWS if name in names] == names
    assert PIN in names


def test_the_row_of_the_pin_agrees_with_the_lock_and_the_report():
    _, declared, bound, left_out, *_, lacking = ROWS[PIN]
    lock = json.loads(command.LOCK.read_text(encoding="utf-8"))
    report = dict(
        re.findall(r"^functions (\w+) +(?:out )?(\d+)$", command.REPORT.read_text("utf-8"), re.M)
    )
    assert int(declared) == len(lock["functions"]) == int(report["declared"])
    assert int(bound) == int(report["bound"])
    assert int(left_out) == int(report["left"])
    assert lacking == "0"
    assert PIN not in releases.lacking(TEXT)


def test_each_row_adds_up():
    for name, declared, bound, left_out, _, passed, lacking in ROWS.values():
        assert int(bound) + int(left_out) == int(declared), name
        assert int(passed) > 3 * int(lacking), name
        assert (name in releases.lacking(TEXT)) == (int(lacking) > 0)


XML = """
<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="meta">
<skipped message="not in this release (ggml 0.9.11): ggml_backend_meta_device"/></testcase>
{more}
</testsuite></testsuites>
"""


@pytest.mark.parametrize(
    ("more", "failed", "skipped"),
    [
        ("", [], []),
        ('<testcase classname="t" name="f"><failure message="no"/></testcase>', ["t::f"], []),
        ('<testcase classname="t" name="e"><error message="no"/></testcase>', ["t::e"], []),
        ('<testcase classname="t" name="s"><skipped message="gpu"/></testcase>', [], ["t::s: gpu"]),
    ],
)
def test_only_what_a_release_lacks_may_be_skipped(tmp_path, more, failed, skipped):
    (tmp_path / "tests.xml").write_text(XML.format(more=more))
    found = releases.results(tmp_path / "tests.xml")
    assert (found.passed, found.failed, found.skipped) == (1, failed, skipped)
    assert found.lacking == {"ggml_backend_meta_device": 1}
    assert found.good == (not more)


def test_a_row_is_put_in_where_it_belongs():
    empty = releases.Results(passed=1)
    text = releases._BEGIN + releases._END
    for name in ("0.20.2", "0.9.11", "0.13.1"):
        text = releases.rewrite(text, [name, *"123456"], empty)
    assert list(releases.table(text)) == ["0.9.11", "0.13.1", "0.20.2"]
    lacking = releases.Results(passed=1, lacking=releases.Counter({"that": 2, "this": 1}))
    text = releases.rewrite(text, ["0.13.1", *"654321"], lacking)
    assert releases.table(text)["0.13.1"] == ["0.13.1", *"654321"]
    assert releases.lacking(text) == {"0.13.1": "that (2); this (1)"}
    text = releases.rewrite(text, ["0.13.1", *"123456"], empty)
    assert releases.lacking(text) == {}
    assert len(releases.table(text)) == 3
