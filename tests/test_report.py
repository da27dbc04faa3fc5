"""docs/backends.md: its table is of the backends of nox, and is written from what tests said."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from pathlib import Path

import _backends
import _report
import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = _report.DOCUMENT.read_text(encoding="utf-8")
NOXFILE = ROOT / "noxfile.py"
XML = """<testsuites><testsuite>
<testcase classname="tests.test_ops" name="test_against_numpy[add-f32x]"/>
<testcase classname="tests.test_ops" name="test_against_numpy[pad-f32x]">
  <skipped message="not supported by the backend: PAD 'a'"/></testcase>
<testcase classname="tests.test_ops" name="test_against_numpy[add-f16x]">
  <skipped message="not supported by the backend: ADD 'a'"/></testcase>
<testcase classname="tests.test_ops" name="test_against_numpy[arange-]">
  <skipped message="refused by the meta device: arange (an assertion)"/></testcase>
<testcase classname="tests.test_a" name="test_b"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_c"><skipped message="there is no x here"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def run(tmp_path: Path) -> _report.Results:
    (tmp_path / "tests.xml").write_text(XML, encoding="utf-8")
    return _report.results(tmp_path / "tests.xml")


def in_nox(name: str) -> str:
    """The text of a table of noxfile.py: nox itself is not installed for the tests."""
    found = re.search(
        rf"^{name} = ([{{(].*?[}})])$", NOXFILE.read_text(encoding="utf-8"), re.M | re.S
    )
    assert found, name
    return found[1]


def test_the_backends_of_nox_are_those_of_the_tests() -> None:
    assert set(re.findall(r'^    "([\w-]+)": ', in_nox("BACKENDS"), re.M)) == set(_backends.KINDS)


def test_ci_expects_the_backends_that_nox_runs_there() -> None:
    expected = re.search(r"^export GGML_CFFI_EXPECT=(\S+)", (ROOT / ".ci/run").read_text(), re.M)
    assert expected
    assert expected[1].split(",") == re.findall(r'"([\w-]+)"', in_nox("IN_CI"))


def test_what_a_run_said_is_counted_apart(run: _report.Results) -> None:
    assert (run.passed, run.not_supported, run.refused) == (1, 2, 1)
    assert run.failed == ["tests.test_a::test_b"]
    assert run.skipped == ["tests.test_a::test_c: there is no x here"]
    assert not run.good
    assert not run.absent
    assert _report.lacks(run) == "all of pad; some of add (1 of 2)"


@pytest.mark.parametrize(
    ("cases", "unsupported", "said"),
    [
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, "all but b"),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1, "c": 3}, "all but b; some of b (1 of 2)"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, "all"),
        ({"a": 1, "b": 2}, {"a": 1}, "all of a"),
        ({"a": 1}, {}, ""),
    ],
)
def test_what_a_backend_lacks_is_said_shortly(
    cases: dict[str, int], unsupported: dict[str, int], said: str
) -> None:
    run = _report.Results(cases=Counter(cases), unsupported=Counter(unsupported))
    assert _report.lacks(run) == said


def test_a_run_is_good_where_nothing_failed_and_all_that_was_left_out_has_a_reason() -> None:
    assert _report.Results(passed=1, not_supported=3, refused=2).good
    assert not _report.Results(not_supported=3).good
    assert not _report.Results(passed=1, skipped=["x"]).good


def test_a_backend_that_is_not_here_gets_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuite><testcase classname="a" name="b"><skipped message="there is no device CUDA '
        'here"/></testcase></testsuite>'
    )
    monkeypatch.setattr(_report, "DOCUMENT", tmp_path / "is not there.md")
    assert _report.main(["cuda", f"--tests={path}", "--write"]) == 0
    assert capsys.readouterr().out == "cuda: there is no device CUDA here\n"


def test_rows_are_put_in_by_backend_and_replaced(run: _report.Results) -> None:
    text = f"before\n{_report._BEGIN}{_report._END}after\n"
    order = ("cpu", "vulkan")
    for backend, tests in (("vulkan", run), ("cpu", _report.Results(passed=7)), ("vulkan", run)):
        row = _report.row(backend, "1.2.3", "a | b", tests, "2026-01-02")
        text = _report.rewrite(text, row, tests, order)
    assert _report.table(text) == {
        "cpu": ["cpu", "1.2.3", "a / b", "7", "0", "0", "0", "2026-01-02"],
        "vulkan": ["vulkan", "1.2.3", "a / b", "1", "2", "1", "1", "2026-01-02"],
    }
    assert list(_report.table(text)) == ["cpu", "vulkan"]
    assert _report.lacking(text) == {"vulkan": "all of pad; some of add (1 of 2)"}
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    now = _report.Results(passed=9)
    text = _report.rewrite(text, _report.row("vulkan", "1", "x", now, "2026-01-03"), now, order)
    assert _report.lacking(text) == {}


def test_the_document_has_rows_of_backends_with_a_date_and_no_failure() -> None:
    rows = _report.table(TEXT)
    assert set(rows) <= set(_backends.KINDS)
    assert list(rows) == [name for name in _backends.KINDS if name in rows]
    for cells in rows.values():
        row = dict(zip(_report.COLUMNS, cells, strict=True))
        assert datetime.date.fromisoformat(row["date"])
        assert row["device"]
        assert int(row["passed"]) > 0
        assert row["failed"] == "0"


def test_the_words_of_reasons_are_those_of_the_tests() -> None:
    assert (_report.NOT_SUPPORTED, _report.REFUSED) == (_backends.NOT_SUPPORTED, _backends.REFUSED)
