"""A graph on a meta device against one device, result by result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import Context, Graph, MetaDevice, SplitError, SplitState, ops
from ggml_cffi.meta import compare, policies
from ggml_cffi.meta._compare import Difference, _difference

pytestmark = needs_meta

RULES = policies.Rules(
    [policies.Rule("up|gate", policies.Column("h")), policies.Rule("down", policies.Row("h"))],
    [3, 1],
    {"h": policies.Group(256, 32)},
)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def feed_forward(ctx: Context, device: MetaDevice) -> Any:
    up = ctx.from_numpy(numbers(256, 64), name="up", dtype="q8_0")
    gate = ctx.from_numpy(numbers(256, 64, seed=1), name="gate", dtype="q4_0")
    down = ctx.from_numpy(numbers(64, 256, seed=2), name="down", dtype="q8_0")
    table = ctx.from_numpy(numbers(100, 64, seed=3), name="table", dtype="f16")
    norm = ctx.from_numpy(numbers(2, 64, seed=4), name="norm")
    ctx.allocate(device)
    x = ops.get_rows(table, ctx.input(5, "i32", name="tokens"))
    hidden = ops.swiglu_split(ops.mul_mat(gate, x), ops.mul_mat(up, x))
    y = ops.mul_mat(down, hidden) + x
    y = ops.rms_norm(y, 1e-5) * norm[1]  # a view of a weight
    y.name = "y"
    return y


def test_what_is_no_graph_or_no_meta_device() -> None:
    with MetaDevice(["CPU", "CPU"], RULES) as device, Context() as ctx:
        y = feed_forward(ctx, device)
        with pytest.raises(TypeError, match=r"graph is <Tensor 'y'.*expected a Graph"):
            compare(y, device)
        with pytest.raises(TypeError, match=r"graph is <Tensor 'y'.*expected a Graph"):
            device.plan(y)
        with pytest.raises(TypeError, match=r"meta is 'CPU'.*expected a MetaDevice"):
            compare(Graph(y), "CPU")  # type: ignore[arg-type]


def test_constants_are_those_of_the_graph() -> None:
    with MetaDevice(["CPU", "CPU"], RULES) as device, Context() as ctx:
        y = feed_forward(ctx, device)
        k = ctx.from_numpy(100 * numbers(5, 64, seed=9), name="k")
        unnamed = ctx.from_numpy(numbers(5, 64, seed=8))
        graph = Graph(ops.mul(y, k) + unnamed)
        found = compare(graph, device)
        assert found.agrees and found.nodes[-1].absolute < 1
        with pytest.raises(TypeError, match="unknown inputs: 'k'"):
            compare(graph, device, inputs={"k": numbers(5, 64)})


def test_an_input_that_is_not_there() -> None:
    with MetaDevice(["CPU", "CPU"], RULES) as device, Context() as ctx:
        graph = Graph(feed_forward(ctx, device))
        with pytest.raises(TypeError, match="unknown inputs: 'token'"):
            compare(graph, device, inputs={"token": [7, 99, 0, 1, 2]})


@pytest.mark.parametrize("inputs", [None, {"tokens": [7, 99, 0, 1, 2]}])
def test_all_results_are_compared(inputs: Any) -> None:
    with MetaDevice(["CPU", "CPU"], RULES) as device, Context() as ctx:
        found = compare(Graph(feed_forward(ctx, device)), device, inputs=inputs)
    names = [one.op for one in found.nodes]
    assert names.count("MUL_MAT") == 3 and "GLU" in names and "VIEW" not in names
    assert found.agrees and found.first is None
    assert found.nodes[-1].name == "y" and found.nodes[-1].shape == (5, 64)
    assert 0 < max(one.relative for one in found.nodes) < 1e-5  # the sums are in another order
    assert str(found).count("\n") == len(found.nodes)


@pytest.mark.parametrize("sizes", [(3, 100, 7), (100, 7, 3), (7, 3, 100)])
def test_an_index_is_good_for_all_that_it_is_of(sizes: tuple[int, ...]) -> None:
    """As it is, as a view and as a copy: in the smallest of the tables."""
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        tables = [ctx.from_numpy(numbers(n, 4), name=f"{n} rows") for n in sizes]
        ctx.allocate(device)
        index = ctx.input(20, "i32", name="index")
        used = [index, ops.cont(index), ops.reshape_2d(index, 20, 1)]
        rows = [ops.get_rows(t, one) for t, one in zip(tables, used, strict=True)]
        found = compare(Graph(rows[0] + rows[1] + rows[2]), device)
        assert found.agrees and max(one.absolute for one in found.nodes) == 0


def test_results_without_a_name_are_shown_by_what_they_are_made_of() -> None:
    with MetaDevice(["CPU", "CPU"], RULES) as device, Context() as ctx:
        graph = Graph(feed_forward(ctx, device))
        found = compare(graph, device)
        planned = device.plan(graph)
    (first, *_), products = found.nodes, [one for one in found.nodes if one.op == "MUL_MAT"]
    assert (first.name, first.label) == ("", "GET_ROWS of 'table', 'tokens'")
    assert str(first).startswith("GET_ROWS       of 'table', 'tokens'  ")
    assert [one.label for one in products] == [f"MUL_MAT of '{n}'" for n in ("gate", "up", "down")]
    assert (found.nodes[-1].name, found.nodes[-1].label) == ("y", "y")
    lines = str(planned).splitlines()
    assert any(line.startswith("MUL_MAT        of 'down'   ") for line in lines)
    assert any(line.startswith("MUL            y    ") for line in lines)
    assert planned["y"].label == "y"


def test_results_whose_operands_have_no_name_either() -> None:
    """They are told by what these are made from, if that is not too far away."""
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        far = [ctx.input((3, 4), name="x") * ctx.input((3, 4), name="y")]
        for _ in range(10):
            far.append(ops.sqr(far[-1]))
        graph = Graph(far[-1])
        compared, planned = compare(graph, device), device.plan(graph)
    lines = str(planned).splitlines()[2:]  # behind the inputs
    for number, label in ((2, "SQR from 'x', 'y'"), (8, "SQR from 'x', 'y'"), (10, "SQR")):
        assert compared.nodes[number].label == planned.tensors[number + 2].label == label
        for line in (str(compared.nodes[number]), lines[number]):
            assert line.startswith(f"SQR            {label[4:]} ") and line.count("SQR") == 1


def test_there_is_nothing_to_compare() -> None:
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        w = ctx.from_numpy(numbers(4, 3), name="w")
        ctx.allocate(device)
        for outputs in (w, w[1], ctx.input((0, 3), name="x") * 2):
            found = compare(Graph(outputs), device)
            assert found.nodes == () and found.agrees and str(found) == "no results"


def test_the_first_that_differs_is_named() -> None:
    calls = []

    def other_each_time(out: Any, x: Any) -> None:
        calls.append(1)
        out[...] = x + (1 if len(calls) == 1 else 0)

    with MetaDevice(["CPU"], policies.mirror()) as device, Context() as ctx:
        w = ctx.from_numpy(numbers(4, 3), name="w")
        ctx.allocate(device)
        odd = ops.custom(other_each_time, w, n_tasks=1)
        odd.name = "odd"
        later = odd * 2
        later.name = "later"
        found = compare(Graph(later), device)
    assert not found.agrees
    assert found.first is not None and found.first.name == "odd"
    assert found.first.absolute == pytest.approx(1)
    assert "differs" in str(found.first)
    verdict = "1 of 2 results differ, the first is CUSTOM odd"
    assert repr(found) == f"<Comparison: {verdict}>" and str(found).splitlines()[-1] == verdict


def test_what_is_nan_in_one_alone_differs() -> None:
    with Context() as ctx:
        tensor = ctx.tensor(3, name="t").handle

        def apart(split: Any, reference: Any) -> Difference:
            return _difference(tensor, split, reference, reference)

        one, nan = np.float32([1, 2, 3]), np.float32([1, np.nan, 3])
        assert apart(one, one).agrees
        assert apart(nan, nan).agrees
        assert not apart(nan, one).agrees
        assert math.isnan(apart(one, nan).absolute)
        infinite = np.float32([1, -np.inf, 3])
        assert apart(infinite, infinite).agrees
        assert not apart(infinite, one).agrees


def test_what_a_difference_is_relative_to() -> None:
    """The largest number of the reference, also where that is much the smaller of the two."""
    with Context() as ctx:
        tensor = ctx.tensor(3, name="t").handle
        large, small, none = np.float32([0, 100, 0]), np.float32([1, 1, 1]), np.float32([0, 0, 0])
        found = _difference(tensor, large, small, none)
        assert (found.absolute, found.relative, found.own) == (99, 99, math.inf)
        assert _difference(tensor, none, none, none).own == 0


DEEP = policies.Rules(
    [policies.Rule(r"up\d", policies.Column("h")), policies.Rule(r"down\d", policies.Row("h"))],
    [3, 1],
    {"h": policies.Group(512, 256)},
)


def deep(ctx: Context, device: MetaDevice, dtype: str) -> Graph:
    shapes = {"up": (512, 256), "down": (256, 512)}
    w = {
        f"{name}{i}": ctx.from_numpy(numbers(*shape, seed=i) / 16, f"{name}{i}", dtype=dtype)
        for i in range(8)
        for name, shape in shapes.items()
    }
    ctx.allocate(device)
    y = ctx.input((32, 256), name="x")
    for i in range(8):
        hidden = ops.silu(ops.mul_mat(w[f"up{i}"], ops.rms_norm(y, 1e-6)))
        y = y + ops.mul_mat(w[f"down{i}"], hidden)
    return Graph(y)


def test_roundings_that_add_up_are_no_difference_of_their_own() -> None:
    """Activations are rounded to the type that a weight is multiplied in, of a few bits."""
    worst = []
    for dtype in ("f16", "bf16", "q4_0", "q4_K"):
        with MetaDevice(["CPU"] * 2, DEEP) as device, Context() as ctx:
            found = compare(deep(ctx, device, dtype), device)
        assert found.agrees
        assert max(one.own for one in found.nodes) < 1e-5
        worst.append(max(one.relative for one in found.nodes))
    assert max(worst) > 1e-4  # which bits fall the other way is for the release to say


def test_inputs_of_one_shape_have_numbers_of_their_own() -> None:
    seen = []

    def both(out: Any, a: Any, b: Any) -> None:
        seen.append((a.copy(), b.copy()))
        out[...] = a - b

    with MetaDevice(["CPU"], policies.mirror()) as device, Context() as ctx:
        a, b = ctx.input((3, 4), name="a"), ctx.input((3, 4), name="b")
        graph = Graph(ops.custom(both, a, b, n_tasks=1))
        assert compare(graph, device).agrees
        assert compare(graph, device, seed=1).agrees
    assert len(seen) == 6 and all(np.abs(a - b).max() > 0.1 for a, b in seen)
    (first, _), (again, _), (other, _) = seen[0], seen[2], seen[3]
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_one_device_is_compared_with() -> None:
    with MetaDevice(["CPU"], policies.mirror()) as device, Context() as ctx:
        graph = Graph(ctx.input(3, name="x") + 1)
        with pytest.raises(ValueError, match="expected a single device"):
            compare(graph, device, device)


def test_a_partial_weight_cannot_be_read_back() -> None:
    def split(info: Any, n_devs: int) -> SplitState:
        return SplitState.partial() if info.name == "b" else SplitState.mirrored()

    with MetaDevice(["CPU", "CPU"], split) as device, Context() as ctx:
        b = ctx.from_numpy(numbers(2, 4), name="b")
        ctx.allocate(device)
        with pytest.raises(SplitError, match="PARTIAL"):
            compare(Graph(ops.scale(b, 2.0)), device)


def test_what_is_no_device() -> None:
    with MetaDevice(["CPU"], policies.mirror()) as device, Context() as ctx:
        graph = Graph(ctx.input(3, name="x") + 1)
        with pytest.raises(TypeError, match="reference is 3"):
            compare(graph, device, reference=3)  # type: ignore[arg-type]
