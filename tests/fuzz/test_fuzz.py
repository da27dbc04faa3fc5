"""Random graphs and calls: every outcome is a right value or a Python exception.

A child process runs the examples, so that one that ends the process is reported, and made smaller,
as any other. GGML_CFFI_FUZZ=N: so many examples in all, of a new seed that is told if one fails;
otherwise a few hundred, always the same. What they come to is printed (``pytest -s``).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from operations import OPERATIONS
from runner import Runner
from spread import WRONG_ANSWERS

from ggml_cffi import capi

ASKED = int(os.environ.get("GGML_CFFI_FUZZ") or 0)
SANITIZED = "libasan" in Path("/proc/self/maps").read_text(encoding="utf-8")
EXAMPLES = ASKED or (140 if SANITIZED else 300)  # where all takes several times as long
NODES = 30

pytestmark = pytest.mark.skipif(
    not hasattr(capi, "ggml_mul_mat"), reason="there is nothing to compute with"
)


def examples(share: float) -> Callable[..., Any]:
    """Settings of a test that has this share of the examples."""
    return settings(
        max_examples=max(int(EXAMPLES * share), 1),
        derandomize=not ASKED,
        database=None,
        deadline=None,  # a child may wait for a core; the runner has a time limit
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Runner]]:
    made: defaultdict[str, Runner] = defaultdict(Runner)
    yield made.__getitem__
    for kind, each in made.items():
        print(each.report(kind))
        each.close()


EXTENTS = (1, 2, 3, 4, 8, 32, 5, 16, 33, 64)
seeds = st.integers(0, 2**20)
# The threads of a busy machine wait for one another.
threads = st.sampled_from((1, 1, 1, 2, 1, 4, 1))


def nodes(names: list[str]) -> st.SearchStrategy[Any]:
    """The functions to call, and what their arguments are drawn from; "" is no call."""
    node = st.tuples(
        st.sampled_from(["", *names]), st.binary(min_size=16, max_size=16).map(bytes.hex)
    )
    return st.lists(node, min_size=NODES, max_size=NODES)


def extents(*more: int) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from((*EXTENTS, *more)), min_size=4, max_size=4)


on_one_device = st.fixed_dictionaries(
    {
        "kind": st.just("single"),
        "dims": extents(0),
        "seed": seeds,
        "threads": threads,
        "nodes": nodes(list(OPERATIONS)),
    }
)

# Those that a network with tensor parallelism is made of come more often.
OFTEN = [
    *["ggml_mul_mat"] * 40,
    *["ggml_add", "ggml_mul", "ggml_silu", "ggml_rms_norm", "ggml_swiglu_split"] * 8,
    *["ggml_reshape_3d", "ggml_permute", "ggml_cont", "ggml_scale", "ggml_get_rows"] * 8,
]

on_several_devices = st.fixed_dictionaries(
    {
        "kind": st.just("spread"),
        "dims": st.one_of(extents(), extents(), extents(), extents(0)),
        "seed": seeds,
        "threads": threads,
        "nodes": nodes([*OFTEN, *(name for name in OPERATIONS if "inplace" not in name)]),
        "ratios": st.lists(st.sampled_from((1, 1, 2, 3, 0)), min_size=1, max_size=4).filter(any),
        "splits": st.lists(st.integers(0, 7), min_size=8, max_size=8),
        # what a split function that fails says (-1: it raises), and of which tensor
        "wrong": st.one_of(
            st.none(), st.none(), st.none(), st.integers(-1, len(WRONG_ANSWERS) - 1)
        ),
        "wrong_at": st.integers(0, 8),
        "on_error": st.sampled_from(("mirror", "mirror", "raise")),
    }
)

any_calls = st.fixed_dictionaries(
    {
        "kind": st.just("calls"),
        "spread": st.booleans() if hasattr(capi, "ggml_backend_meta_device") else st.just(False),
        "calls": st.lists(
            st.tuples(st.integers(0, 2**16), st.binary(min_size=16, max_size=16).map(bytes.hex)),
            min_size=40,
            max_size=40,
        ),
    }
)


@examples(0.4)
@given(on_one_device)
def test_graphs_on_one_device(runner, example):
    """Right by NumPy, with several threads as with one, and in memory that is used again."""
    runner("graphs on one device").run(example)


@pytest.mark.skipif(not hasattr(capi, "ggml_backend_meta_device"), reason="no meta devices")
@examples(0.4)
@given(on_several_devices)
def test_graphs_on_several_devices(runner, example):
    """As on one device, or an exception; the faults of docs/limits.md are left out."""
    runner("graphs on several devices").run(example)


@examples(0.2)
@given(any_calls)
def test_calls(runner, example):
    """Of any function, with arguments of the right kinds, or of none."""
    runner("calls").run(example)


def test_the_examples_are_mostly_accepted(runner, need):
    """What the fuzz is worth: of the examples of the tests above."""
    counts = runner("graphs on one device").counts
    need(counts["examples"] >= 50, "number of examples that says anything")
    assert counts["accepted"] > counts["tried"] / 2
    assert len({name for name in counts if name.startswith("computed: ")}) >= 80
    counts = runner("graphs on several devices").counts
    if hasattr(capi, "ggml_backend_meta_device"):
        assert counts["examples"] >= 50
        assert counts["outcome: right on several devices"] > counts["examples"] / 4
        assert counts["of them with something cut"] > counts["examples"] / 5
        assert counts["of them with a sum over the devices"] > 0
