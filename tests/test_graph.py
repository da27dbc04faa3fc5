"""Graphs: compiled once, run many times, wrong inputs refused by name."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import subprocess
import threading
from typing import Any

import numpy as np
import pytest
from _release import needs_meta, require

from ggml_cffi import (
    Backend,
    MetaDevice,
    Scheduler,
    SplitError,
    SplitState,
    _drawing,
    capi,
    device,
    diagnostics,
    ops,
)
from ggml_cffi.context import Context
from ggml_cffi.errors import OperandError
from ggml_cffi.graph import Graph


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def columns(info: Any, n: int) -> SplitState:
    return SplitState.by_ratio(info, axis=1, ratios=[2, 1])


def columns_but_of_t(info: Any, n: int) -> SplitState:
    return SplitState.mirrored() if info.name == "t" else columns(info, n)


def rows(info: Any, n: int) -> SplitState:
    return SplitState.by_ratio(info, axis=0, ratios=[1, 1])


W = numbers(6, 8)


def layer(ctx: Context, target: Any = "CPU") -> Any:
    w = ctx.from_numpy(W, name="w")
    x = ctx.input((3, 8), name="x")
    ctx.allocate(target)
    return ops.cont(ops.relu(ops.mul_mat(w, x)))


def test_many_runs(ctx: Context) -> None:
    made = Graph(layer(ctx)).compile("CPU")
    for seed in range(5):
        x = numbers(3, 8, seed=seed)
        np.testing.assert_allclose(made(x=x), np.maximum(x @ W.T, 0), rtol=1e-4, atol=1e-5)
    assert made.inputs == {"x": (3, 8)} and made.nbytes > 0


def test_what_a_graph_has(ctx: Context) -> None:
    y = layer(ctx)
    graph = Graph(y)
    assert [t.name for t in graph.inputs] == ["x"]
    assert [t.op.name for t in graph.nodes] == [
        "GGML_OP_MUL_MAT", "GGML_OP_UNARY", "GGML_OP_CONT"
    ]  # fmt: skip
    assert graph.outputs == (y,) and len(graph.tensors) == 5
    assert repr(graph) == "<Graph of 5 tensors>"


def test_the_same_graph_on_several_devices(ctx: Context) -> None:
    graph = Graph(layer(ctx))
    one, two = graph.compile("CPU", n_threads=1), graph.compile(device("CPU"), n_threads=2)
    with device("CPU").init_backend(1) as backend:
        three = graph.compile(backend)
        x = numbers(3, 8)
        for made in (one, two, three):
            np.testing.assert_allclose(made(x=x), np.maximum(x @ W.T, 0), rtol=1e-4, atol=1e-5)
    assert three.closed and not one.closed


@needs_meta
def test_a_meta_device(ctx: Context) -> None:
    with MetaDevice(["CPU", "CPU"], columns) as spread:
        graph = Graph(layer(ctx, spread))
        one, two = graph.compile(spread), graph.compile(spread)
        for seed in range(3):
            x = numbers(3, 8, seed=seed)
            for made in (one, two):
                np.testing.assert_allclose(made(x=x), np.maximum(x @ W.T, 0), rtol=1e-4, atol=1e-5)


@needs_meta
def test_a_row_parallel_product_is_read(ctx: Context) -> None:
    """Its sum is ggml's to make, which it puts off until something else is made of it."""
    down = numbers(5, 6, seed=1)

    def split(info: Any, n: int) -> SplitState:
        return SplitState.by_ratio(info, axis=int(info.name == "w"), ratios=[2, 1])

    with MetaDevice(["CPU", "CPU"], split) as spread:
        second = ctx.from_numpy(down, name="down")
        hidden = layer(ctx, spread)
        given = numbers(3, 8)
        wanted = np.maximum(given @ W.T, 0) @ down.T
        product = ops.mul_mat(second, hidden)
        twice = ctx.input((3, 8), name="y") * 2
        for outputs in (product, [product, twice], {"one": twice, "two": product}):
            graph = Graph(outputs)
            inputs = {one.name: given for one in graph.inputs}
            for name, array in graph.compile(spread).run(**inputs).items():
                right = given * 2 if array.shape == (3, 8) else wanted
                np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-4, err_msg=name)
        product.name = "product"
        made = Graph(product).compile(spread)
        assert list(made.run(x=given)) == ["product"]
        assert made.to_dot().count("CONT") == Graph(product).to_dot().count("CONT") + 1
    with Context() as other:
        plain = Graph(other.input((2, 3), name="x") @ other.input((3, 2), name="y").T.T)
        assert plain.compile("CPU").to_dot().count("CONT") == plain.to_dot().count("CONT")


@needs_meta
def test_weights_that_are_elsewhere(ctx: Context) -> None:
    graph = Graph(layer(ctx))
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    text = r"'w' has its memory on CPU, not on Meta\(CPU,CPU\)"
    with MetaDevice(["CPU", "CPU"], columns) as spread, pytest.raises(SplitError, match=text):
        graph.compile(spread)
    assert diagnostics.live_handles() == before


@needs_meta
def test_what_a_meta_device_cannot_cut_is_named(ctx: Context) -> None:
    """ggml's own words are `fatal error` and the like."""
    with MetaDevice(["CPU", "CPU"], rows) as spread:
        w = ctx.from_numpy(W, name="w")
        ctx.allocate(spread)
        product = ops.mul_mat(w, ctx.input((3, 8), name="x"))
        product.name = "product"
        text = (
            r"MUL_MAT 'product' of 'w' \(6, 8\), split along axis 0 4\+4; "
            r"'x' \(3, 8\), mirrored: a weight goes with .* \(ggml would abort: fatal error\)"
        )
        gc.collect()  # what other tests have left
        before = diagnostics.live_handles()
        with pytest.raises(SplitError, match=text):
            Graph(ops.relu(product)).compile(spread)
        with pytest.raises(SplitError, match=text):
            spread.plan(Graph(ops.relu(product)))
        assert diagnostics.live_handles() == before
        norm = ops.norm(w, 1e-5)
        with pytest.raises(SplitError, match=r"NORM of 'w' \(6, 8\), split along axis 0 4\+4: "):
            Graph(ops.relu(norm)).compile(spread)


@needs_meta
def test_what_follows_from_a_closed_latch_has_it_as_its_cause(ctx: Context) -> None:
    def fails(info: Any, n: int) -> SplitState:
        if info.name == "w":
            return rows(info, n)
        raise KeyError(info.name)

    with MetaDevice(["CPU", "CPU"], fails) as spread:
        w = ctx.from_numpy(W, name="w")
        ctx.from_numpy(W, name="other")
        ctx.allocate(spread)
        with pytest.raises(SplitError, match="NORM") as caught:
            Graph(ops.norm(w, 1e-5)).compile(spread)
        assert isinstance(caught.value.__cause__, KeyError)


# ---- outputs


def test_several_outputs(ctx: Context) -> None:
    x = ctx.input((2, 3), name="x")
    double, square = x * 2, ops.sqr(x)
    given = numbers(2, 3)
    first, second = Graph([double, square]).compile("CPU")(x=given)
    np.testing.assert_allclose(first, given * 2)
    np.testing.assert_allclose(second, given**2, rtol=1e-6)
    found = Graph({"double": double, "square": square}).compile("CPU").run(x=given)
    assert list(found) == ["double", "square"]
    np.testing.assert_allclose(found["square"], given**2, rtol=1e-6)


def test_outputs_are_arrays_of_their_own(ctx: Context) -> None:
    x = ctx.input(4, name="x")
    made = Graph(x + 1).compile("CPU")
    first = made(x=np.zeros(4))
    made(x=np.ones(4))
    np.testing.assert_array_equal(first, np.ones(4))


def test_intermediate_and_viewed_outputs(ctx: Context) -> None:
    """Memory of what is an output is not used again, nor that of what it is a view of."""
    x = ctx.input((4, 4), name="x")
    a = ops.sqr(x)
    part = a[1:3]
    t = a
    for _ in range(6):
        t = ops.scale(ops.relu(t), 0.5)
    given = numbers(4, 4)
    first, view, last = Graph([a, part, t]).compile("CPU")(x=given)
    np.testing.assert_allclose(first, given**2, rtol=1e-6)
    np.testing.assert_allclose(view, given[1:3] ** 2, rtol=1e-6)
    np.testing.assert_allclose(last, given**2 / 64, rtol=1e-6)


def test_an_input_as_output(ctx: Context) -> None:
    x = ctx.input(3, name="x")
    same, more = Graph([x, x + 1]).compile("CPU")(x=[1, 2, 3])
    np.testing.assert_array_equal(same, [1, 2, 3])
    np.testing.assert_array_equal(more, [2, 3, 4])


# ---- inputs


def test_a_constant_is_not_written_into(ctx: Context) -> None:
    """Each compiled graph has its own, which no other would see."""
    cache = ctx.from_numpy(np.zeros((4, 3), np.float32), name="cache")
    rows, ids = ctx.input((1, 3), name="rows"), ctx.input(1, "i64", name="ids")
    graph = Graph(ops.set_rows(cache, rows, ids))
    with pytest.raises(ValueError, match=r"SET_ROWS writes into .*'cache'.* allocate its Context"):
        graph.compile("CPU")
    ctx.allocate("CPU")
    graph.compile("CPU")(rows=np.ones((1, 3)), ids=[2])
    assert (cache[2].numpy() == 1).all() and not cache[:2].numpy().any()


def test_inputs_of_any_name(ctx: Context) -> None:
    made = Graph(ctx.input(3, name="self") * ctx.input(3, name="inputs")).compile("CPU", 1)
    given = {"self": [1, 2, 3], "inputs": [4, 5, 6]}
    for found in (made(**given), *made.run(**given).values()):
        np.testing.assert_array_equal(found, [4, 10, 18])


@pytest.mark.parametrize("program", ["exit 1", "sleep 60", "not a program"])
def test_a_drawing_that_fails_is_none(
    ctx: Context, program: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dot = tmp_path / "dot"
    dot.write_text(program if "not" in program else f"#!/bin/sh\nexec {program}\n")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(_drawing, "_PATIENCE", 0.3)
    assert Graph(ctx.input(3, name="x") * 2)._repr_svg_() is None


@needs_meta
def test_on_a_backend_of_a_meta_device_it_has_as_many_threads(ctx: Context) -> None:
    """As the Backend, instead of which it runs on one of its own: ggml has one for one graph."""
    seen: list[tuple[int, int]] = []

    def shares(result: Any, a: Any, *, task: int, n_tasks: int) -> None:
        seen.append((task, n_tasks))

    x = ctx.input((64, 3), name="x")
    with MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.mirrored()) as device:
        with Backend(device, 3) as backend:
            made = Graph(ops.custom(shares, x, n_tasks=None)).compile(backend)
            backend.set_n_threads(1)
            again = Graph(ops.custom(shares, x, n_tasks=None)).compile(backend)
        for compiled, count in ((made, 3), (again, 1)):
            compiled(x=np.ones((64, 3)))
            assert {nth for _, nth in seen} == {count}
            seen.clear()


def test_every_run_needs_all_inputs(ctx: Context) -> None:
    x, y = ctx.input(3, name="x"), ctx.input(3, name="y")
    made = Graph(x - y).compile("CPU")
    for wrong, message in (
        ({}, "missing inputs: 'x', 'y'"),
        ({"x": [1, 2, 3]}, "missing inputs: 'y'"),
        ({"x": [1, 2, 3], "y": [1, 2, 3], "z": 1}, "no input 'z'; the inputs are 'x', 'y'"),
    ):
        with pytest.raises(TypeError, match=message):
            made(**wrong)
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(3,\) of <Tensor 'y'"):
        made(x=[1, 2, 3], y=[1, 2])
    np.testing.assert_array_equal(made(x=[1, 2, 3], y=[1, 1, 1]), [0, 1, 2])


def test_inputs_that_are_kept(ctx: Context) -> None:
    x, y = ctx.input(64, name="x"), ctx.input(64, name="y")
    t = x + y
    for _ in range(5):
        t = ops.relu(t)
    made = Graph(t).compile("CPU", keep=["y"])
    with pytest.raises(TypeError, match="missing inputs: 'y'"):
        made(x=np.ones(64))
    np.testing.assert_array_equal(made(x=np.ones(64), y=np.full(64, 5)), np.full(64, 6))
    for i in range(3):
        np.testing.assert_array_equal(made(x=np.full(64, i)), np.full(64, 5 + i))
    with pytest.raises(ValueError, match="keep names 'q', which is no input"):
        Graph(t).compile("CPU", keep=["q"])


def test_numbers_that_were_given_before(ctx: Context) -> None:
    """They are written once, and last, though ggml uses memory again."""
    x = ctx.input(32, name="x")
    c = ctx.from_numpy(np.arange(32, dtype=np.float32), name="c")
    t = x + c
    for _ in range(4):
        t = ops.relu(t)
    graph = Graph(t)
    assert [one.name for one in graph.inputs] == ["x"]
    made = graph.compile("CPU")
    for i in range(3):
        np.testing.assert_array_equal(made(x=np.full(32, i)), np.arange(32) + i)
    ctx.allocate("CPU")
    np.testing.assert_array_equal(c.numpy(), np.arange(32))


def test_names_of_inputs(ctx: Context) -> None:
    with pytest.raises(ValueError, match="an input has no name: <Tensor f32"):
        Graph(ctx.input(3) + 1).compile("CPU")
    with pytest.raises(ValueError, match="two inputs have the name 'x'"):
        Graph(ctx.input(3, name="x") + ctx.input(3, name="x")).compile("CPU")


def test_indices_out_of_range(ctx: Context) -> None:
    table = ctx.from_numpy(numbers(5, 4), name="table")
    rows = ctx.input(2, "i32", name="rows")
    ctx.allocate("CPU")
    made = Graph(ops.get_rows(table, rows)).compile("CPU")
    np.testing.assert_array_equal(made(rows=[4, 0]), numbers(5, 4)[[4, 0]])
    with pytest.raises(IndexError):
        made(rows=[5, 0])
    np.testing.assert_array_equal(made(rows=[1, 1]), numbers(5, 4)[[1, 1]])


# ---- drawing


def edges(dot: str) -> set[tuple[str, str]]:
    """By the first line of the labels."""
    names = dict(re.findall(r'^  (t\d+) \[label="(.*?)(?:\\n|")', dot, re.M))
    found = re.findall(r"^  (t\d+) -> (t\d+)( \[.*\])?;$", dot, re.M)
    return {(names[one], names[other]) for one, other, _ in found}


def svg(dot: str) -> str:
    """What graphviz draws of it."""
    done = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout


def nodes_and_edges(dot: str) -> tuple[int, int]:
    """How many there are, for graphviz as well where it is installed."""
    found = [len(re.findall(rf"^  t\d+ {what}", dot, re.M)) for what in (r"\[label=", "-> ")]
    if shutil.which("dot"):
        drawn = svg(dot)
        assert found == [drawn.count(f'class="{what}"') for what in ("node", "edge")]
    return found[0], found[1]


def test_drawing(ctx: Context) -> None:
    w = ctx.from_numpy(W, name="w")
    x = ctx.input((3, 8), name="x")
    ctx.allocate("CPU")
    product = ops.mul_mat(w, x)
    product.name = "product"
    half = ops.cast(product[:2], "f16")
    half.name = "half"
    graph = Graph({"all": product, "part": half})
    dot = graph.to_dot()
    view = next(t for t in graph.nodes if t.op.name == "GGML_OP_VIEW").name
    assert edges(dot) == {("w", "product"), ("x", "product"), ("product", view), (view, "half")}
    assert '[label="w\\nf32 (6, 8)", shape=box]' in dot
    assert '[label="x\\nf32 (3, 8)", shape=parallelogram]' in dot
    assert r'"product\nMUL_MAT\nf32 (3, 6)\noutput all", shape=ellipse, peripheries=2]' in dot
    assert r"f16 (2, 6)\noutput part" in dot
    for drawn in (dot, graph.compile("CPU").to_dot()):
        assert nodes_and_edges(drawn) == (5, len(edges(dot)))


def test_drawing_in_a_notebook(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(layer(ctx))
    monkeypatch.setenv("PATH", "")
    assert graph._repr_svg_() is None  # it is shown as text
    monkeypatch.undo()
    if shutil.which("dot") is None:
        assert graph._repr_svg_() is None
        return
    drawn = svg(graph.to_dot())
    made = graph.compile("CPU")
    assert graph._repr_svg_() == drawn and made._repr_svg_() == svg(made.to_dot())
    assert drawn.lstrip().startswith("<?xml") and "MUL_MAT" in drawn


@pytest.mark.parametrize(
    "name", ['quo"te', "back\\slash", "new\nline", "größer", "<b>&amp;", "\\n"]
)
def test_drawing_any_name(ctx: Context, name: str) -> None:
    x = ctx.input(3, name=name or "x")
    assert nodes_and_edges(Graph({name: x + 1}).to_dot()) == (2, 1)


@needs_meta
def test_drawing_says_how_weights_are_split(ctx: Context) -> None:
    with MetaDevice(["CPU", "CPU"], columns) as spread:
        graph = Graph(layer(ctx, spread))
        for dot in (graph.to_dot(), graph.compile(spread).to_dot()):
            assert r'label="w\nf32 (6, 8)\nsplit along axis 1: 4 + 2", shape=box' in dot
    other = Context()
    table = other.from_numpy(numbers(4, 8), name="table")

    def segments(info: Any, n: int) -> SplitState:
        return SplitState.segments(1, [[1, 1], [2, 0]])

    with MetaDevice(["CPU", "CPU"], segments) as spread:
        other.allocate(spread)
        assert r"\nsplit along axis 1: 1 + 1 | 2 + 0" in Graph(table).to_dot()
    with MetaDevice(["CPU"], lambda info, n: SplitState.mirrored()) as spread, Context() as third:
        same = third.from_numpy(numbers(4, 8), name="same")
        third.allocate(spread)
        assert r"f32 (4, 8)\nmirrored" in Graph(same).to_dot()


# ---- errors and limits


def test_no_graph(ctx: Context) -> None:
    with pytest.raises(ValueError, match="outputs is empty"):
        Graph([])
    with pytest.raises(TypeError, match="expected a Tensor"):
        Graph([3])  # type: ignore[list-item]
    y = ctx.input(3, name="x") + 1
    with pytest.raises(TypeError, match="expected a Device, a Backend, a Scheduler or a name"):
        Graph(y).compile(None)  # type: ignore[arg-type]
    with (
        device("CPU").init_backend(1) as backend,
        pytest.raises(ValueError, match="n_threads is the Backend's"),
    ):
        Graph(y).compile(backend, n_threads=2)


def test_what_is_no_output_cannot_be_read(ctx: Context) -> None:
    """ggml uses its memory again: what would be read might be anything."""
    y = layer(ctx)
    graph = Graph(y)
    made = graph.compile("CPU")
    made(x=numbers(3, 8))
    for node in graph.nodes:
        with pytest.raises(ValueError, match="those of a compiled graph are read as the graph's"):
            node.numpy()
    with pytest.raises(ValueError, match="it is an input of graphs, which are given"):
        graph.inputs[0].numpy()


@pytest.mark.parametrize("where", ["CPU", "meta", "scheduler"])
def test_what_is_empty(ctx: Context, where: str) -> None:
    """Alone, beside others, as an input and as a weight; ggml's allocators abort over the first."""
    x, other = ctx.input((0, 3), name="x"), ctx.input((2, 3), name="other")
    w = ctx.from_numpy(np.empty((0, 3), np.float32), name="w")
    nothing = np.empty((0, 3))
    with contextlib.ExitStack() as stack:
        target: Any = "CPU"
        if where == "meta":
            require("ggml_backend_meta_device")
            target = stack.enter_context(MetaDevice(["CPU"] * 2, columns_but_of_t))
        elif where == "scheduler":
            backend = stack.enter_context(Backend(device("CPU"), 1))
            target = stack.enter_context(Scheduler([backend]))
        for outputs in (ops.sqr(x), x, ops.sqr(ops.relu(x))):
            made = Graph(outputs).compile(target)
            assert made.nbytes < 100
            for _ in range(2):
                assert made(x=nothing).shape == (0, 3)
            assert made().shape == (0, 3)  # there is nothing to be given
            with pytest.raises(ValueError, match=r"shape \(1, 3\), expected \(0, 3\)"):
                made(x=np.ones((1, 3)))
            made.to_dot()
        both = Graph([ops.sqr(x), other * 2]).compile(target)
        first, second = both(other=np.ones((2, 3)))
        assert first.shape == (0, 3) and (second == 2).all()
        assert Graph(ops.sqr(w)).compile(target)().shape == (0, 3)
        ctx.allocate("CPU" if where == "scheduler" else target)
        assert Graph(ops.sqr(w)).compile(target)().shape == (0, 3)
        # nothing of a table that is not empty
        table = ctx.from_numpy(np.ones((4, 3), np.float32), name="t")
        indices = ctx.input(0, "i32", "i")
        ctx.allocate("CPU" if where == "scheduler" else target)
        given = {"i": np.empty(0, np.int32)}
        for outputs, shape in (
            (ops.get_rows(table, indices), (0, 3)),
            (ops.get_rows(table, indices) @ table.T, (0, 4)),
            (table[:0] * 2, (0, 3)),
            (x @ table.T, (0, 4)),
            (x * table[0], (0, 3)),
        ):
            made = Graph({"nothing": outputs, "row": table[1]}).compile(target)
            for _ in range(2):
                inputs = {k: v for k, v in {**given, "x": nothing}.items() if k in made.inputs}
                found = made.run(**inputs)
                assert found["nothing"].shape == shape
                assert (found["row"] == 1).all()
            alone = Graph(outputs).compile(target)
            found = alone(**{k: v for k, v in inputs.items() if k in alone.inputs})
            assert found.shape == shape and found.dtype == np.float32
            assert "leaf" not in alone.to_dot()


def test_a_deep_graph(ctx: Context) -> None:
    """Deeper than a recursive walk over it could go."""
    t = x = ctx.input(1, name="x")
    for _ in range(60_000):
        t = ops.scale_bias(t, 1.0, 1.0)
    made = Graph(t).compile("CPU", n_threads=1)
    assert made(x=[0.0]) == 60_000
    assert x.shape == (1,)


def test_too_little_memory(ctx: Context) -> None:
    x = ctx.input(1 << 16, name="x")
    huge = ops.repeat_4d(x, 1 << 16, 1 << 24, 1, 1)
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    with pytest.raises(MemoryError, match="failed to allocate"):
        Graph(huge).compile("CPU")
    assert diagnostics.live_handles() == before


def test_threads_share_what_is_compiled(ctx: Context) -> None:
    x = ctx.input(512, name="x")
    made = Graph(ops.sqr(x) + 1).compile("CPU")
    wrong = []

    def work(seed: int) -> None:
        for i in range(50):
            given = np.full(512, seed * 100 + i, np.float32)
            if not np.array_equal(made(x=given), given**2 + 1):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closing_frees_it(ctx: Context) -> None:
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    y = layer(ctx)
    with Graph(y).compile("CPU") as made:
        made(x=numbers(3, 8))
    assert made.closed and repr(made) == "<Compiled closed>"
    with pytest.raises(ValueError, match="the Compiled is closed"):
        made(x=numbers(3, 8))
    ctx.close()
    assert diagnostics.live_handles()["ggml_gallocr"] == before["ggml_gallocr"]
    assert diagnostics.live_handles()["ggml_backend"] == before["ggml_backend"]
    assert capi.ggml_n_dims  # the module is alive


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 2), (), (1,), (4,), (1, 1, 1, 1), (2, 1)])
@pytest.mark.parametrize("kind", ["input", "tensor"])
def test_inputs_have_the_axes_that_they_were_made_with(shape: tuple[int, ...], kind: str) -> None:
    """Those of length 1 in front as well, which ggml does not count."""
    with Context() as ctx:
        x = getattr(ctx, kind)(shape, name="x")
        graph = Graph(ops.sqr(x))
        assert [one.shape for one in graph.inputs] == [shape]
        assert graph.tensors[0].shape == shape
        with graph.compile("CPU", n_threads=1) as made:
            assert made.inputs == {"x": shape}
            assert made(x=np.full(shape, 3)).shape == shape
            with pytest.raises(ValueError, match=re.escape(f"expected {shape} of")):
                made(x=np.zeros(7))


def test_a_tensor_whose_context_was_not_allocated_is_told() -> None:
    with Context() as ctx:
        w, x = ctx.tensor((2, 2), name="w"), ctx.input((2, 2), name="x")
        with Graph(x @ w.T).compile("CPU", n_threads=1) as made:
            with pytest.raises(TypeError, match="'w', 'x'; the Context of 'w' was not allocated"):
                made()
            with pytest.raises(TypeError, match=r"missing inputs: 'x'$"):
                made(w=np.ones((2, 2)))


def test_float64_which_ggml_computes_little_with() -> None:
    """NumPy's default: errors say what to write."""
    wanted = re.escape("Context.from_numpy(array, dtype='f32') converts")
    with Context() as ctx:
        x, w = ctx.input((2, 4), name="x"), ctx.from_numpy(np.ones((3, 4)), "w")
        with pytest.raises(OperandError, match=wanted):
            x @ w.T
        added = x + ctx.from_numpy(np.ones(4), "b")
        with pytest.raises(ValueError, match=wanted):
            Graph(added).compile("CPU", n_threads=1)
