"""The planner of meta devices and ggml agree: on what is refused, and on the numbers of the rest.

GGML_CFFI_FUZZ=N: twice as many random graphs as that, of a new seed; otherwise always the same.
What they come to is printed (``pytest -s``). A fault names the operation, or shows the graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from _release import PINNED, needs
from hypothesis import given
from hypothesis import strategies as st
from planned_graphs import FUNCTIONS, PARTS
from runner import Runner
from test_fuzz import ASKED, EXAMPLES, examples, extents, seeds

from ggml_cffi import capi
from ggml_cffi.meta._rules import RULES

pytestmark = needs("0.15: meta devices that cut what RESHAPE and CONT make as the table says")

OFTEN = [*PARTS] * 24 + ["ggml_add", "ggml_mul", "ggml_rms_norm", "ggml_cont", "ggml_scale"] * 8

WORKERS = hasattr(capi, "RPC_PROTO_MAJOR_VERSION")


def graphs(workers: st.SearchStrategy[bool]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "kind": st.just("planned"),
            "devices": st.sampled_from((2, 3, 2, 4, 1)),
            "style": st.sampled_from((1, 1, 1, 1, 1, 2)),
            "dims": extents(),
            "seed": seeds,
            "more": st.sampled_from((0, 0, 0, 1, 3)),
            "strict": st.just(True),
            "workers": workers,
            "nodes": st.lists(
                st.tuples(
                    st.sampled_from([*OFTEN, *FUNCTIONS]),
                    st.binary(min_size=32, max_size=32).map(bytes.hex),
                ),
                min_size=1,
                max_size=4,
            ),
        }
    )


#: No graph has these.
NEVER_DRAWN = {
    "CUSTOM": "see tests/test_planner.py",
    "MAP_CUSTOM1": "see tests/test_planner.py",
    "MAP_CUSTOM2": "see tests/test_planner.py",
    "MAP_CUSTOM3": "see tests/test_planner.py",
    "FLASH_ATTN_BACK": "ggml_flash_attn_back itself aborts",
}
#: No graph of these can be had on a meta device.
NEVER_ACCEPTED = {"ARANGE": "it has no operands, and ggml asks those for the split"}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    print(made.report("graphs that are planned"))
    made.close()


@examples(2 if ASKED else 500 / EXAMPLES)
@given(graphs(st.sampled_from((False, False, False, WORKERS))))
def test_graphs_of_networks(runner: Runner, example: dict[str, Any]) -> None:
    runner.run(example)


@pytest.mark.rpc
@examples(60 / EXAMPLES)
@given(graphs(st.just(True)))
def test_graphs_of_networks_on_workers(runner: Runner, example: dict[str, Any]) -> None:
    """What is accepted is right there, too, and what writes into host memory is accepted there."""
    runner.run(example)


@pytest.mark.rpc
def test_what_is_computed_on_workers(runner: Runner, need: Any) -> None:
    counts = runner.counts
    need(counts["graphs"] >= 50, "number of graphs that says anything")
    assert counts["computed on workers, too"] + counts["accepted on workers alone"] >= 20


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_operation(runner: Runner, function: str) -> None:
    """With operands that are whole, and with such as are cut."""
    draw = random.Random(function)
    for style, word in ((0, "accepted"), (2, "refused")):
        for i in range(16):
            names = ["ggml_scale"] * (i % 3) + [function]  # some write into a result alone
            runner.run(
                {
                    "kind": "planned",
                    "devices": 2,
                    "style": style,
                    "dims": [draw.choice((4, 8, 32, 64)) for _ in range(4)],
                    "seed": draw.randrange(100),
                    "more": 0,
                    "nodes": [(name, draw.randbytes(32).hex()) for name in names],
                    "strict": False,
                    "workers": False,
                }
            )
            enough = runner.counts[f"{word} call {function}"] >= 2
            if i and enough and (style == 0 or runner.counts[f"refused at {function}"]):
                break


def test_what_the_graphs_come_to(runner: Runner, need: Any) -> None:
    counts = runner.counts
    need(counts["graphs"] >= 900, "number of graphs that says anything")
    accepted = counts["accepted as it is"] + counts["accepted with copies"]
    assert accepted >= 0.4 * counts["graphs"]
    assert counts["accepted with copies"] >= 20
    assert counts["accepted with something cut"] >= 0.2 * counts["graphs"]
    assert counts["refused: ggml aborts"] >= 100
    drawn = {op for op in RULES if counts[f"accepted {op}"] or counts[f"refused {op}"]}
    if PINNED:  # others have not all operations
        assert drawn == RULES.keys() - NEVER_DRAWN
    assert {op for op in drawn if not counts[f"accepted {op}"]} <= NEVER_ACCEPTED.keys()
    assert all(counts[f"refused {op}"] for op in drawn)
