"""One small header per feature of the generator, and all that is written for it.

After a change that is meant: ``GGML_CFFI_UPDATE_GOLDEN=1 nox -s codegen``, then read the diff.
"""

from __future__ import annotations

import os

import pytest
from harness import GOLDEN, bind, golden, write

OPTIONS = {
    "left_out": {"missing": ["toy_private"]},
    "module": {"modules": {"toy": "Toy"}},
    "missing_feature": {
        "strict": False,
        "known": {
            "toy_old": "int toy_old(struct toy_state *state, int extra)",
            "toy_new": "int toy_new(struct toy_state *state)",
        },
    },
}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return bind(write(tmp_path_factory.mktemp("empty"), {"toy.h": ""}))


@pytest.mark.parametrize("feature", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden(feature, empty):
    text = golden(bind(GOLDEN / feature, **OPTIONS.get(feature, {})), empty)
    expected = GOLDEN / feature / "expected.txt"
    if os.environ.get("GGML_CFFI_UPDATE_GOLDEN") == "1":
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")
