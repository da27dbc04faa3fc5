"""That the fuzz would notice: a child that dies, overruns, hangs or computes wrongly."""

from __future__ import annotations

import pytest
import runner as runner_module
from runner import Runner


@pytest.fixture
def runner():
    made = Runner()
    yield made
    made.close()


def broken(how: str) -> dict[str, str]:
    return {"kind": "broken", "how": how}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "has ended with -9"),
        ("overruns", "(Segmentation fault|SEGV)"),
        ("differs", r"t2 = ggml_add\(t0, t0\): 16 of 16 numbers"),
        ("no_such", "KeyError"),
    ],
)
def test_a_fault_is_told_with_its_example(runner, how, told):
    with pytest.raises(AssertionError, match=rf"(?s){told}.*to see it again: .*\"how\": \"{how}\""):
        runner.run(broken(how))
    runner.run(broken("nothing"))  # by another child, if need be
    assert runner.counts["examples"] >= 1


def test_a_child_that_hangs(runner, monkeypatch):
    runner.run(broken("nothing"))  # it has imported all by then
    monkeypatch.setattr(runner_module, "TIMEOUT", 1)
    with pytest.raises(AssertionError, match="has not answered for 1 s"):
        runner.run(broken("hangs"))


def test_what_c_prints_is_no_answer(runner):
    runner.run(broken("speaks"))
    runner.run(broken("nothing"))
    assert runner.counts == {"examples": 2, "began": 2}
