"""A graph over several backends: who computes what, watching it, memory for the largest."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from _fake_backend import buffer_type
from _release import needs_meta

from ggml_cffi import MetaDevice, SplitState, device, diagnostics, ops
from ggml_cffi.backend import Backend
from ggml_cffi.context import Context
from ggml_cffi.graph import Graph
from ggml_cffi.scheduler import Scheduler


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


@pytest.fixture
def backends() -> Any:
    with Backend(device("CPU"), 1) as one, Backend(device("CPU"), 2) as two:
        yield [one, two]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 3


WEIGHTS = [numbers(16, 16, seed=i) for i in range(4)]


def model(ctx: Context) -> list[Any]:
    """Four layers, each a product and its activation; the results in order."""
    weights = [ctx.from_numpy(w, name=f"w{i}") for i, w in enumerate(WEIGHTS)]
    t = ctx.input((2, 16), name="x")
    ctx.allocate("CPU")
    results = []
    for i, w in enumerate(weights):
        product = ops.mul_mat(w, t)
        product.name = f"product {i}"
        t = ops.relu(product)
        t.name = f"layer {i}"
        results += [product, t]
    return results


def expected(x: Any, layers: int = 4) -> Any:
    for w in WEIGHTS[:layers]:
        x = np.maximum(x @ w.T, 0)
    return x


@needs_meta
def test_a_meta_device_is_refused() -> None:
    """Its graphs are planned as a whole."""
    with (
        MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.mirrored()) as spread,
        Backend(spread) as first,
        Backend(device("CPU")) as last,
        pytest.raises(ValueError, match="a meta device's: that plans whole graphs"),
    ):
        Scheduler([first, last])


def test_a_model_split_by_layers(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    one, two = backends
    halves = {result: one if i < 4 else two for i, result in enumerate(results)}
    # of backends with one kind of memory ggml takes the first for everything
    kinds = [buffer_type(is_host=True), device("CPU").buffer_type()]
    with Scheduler(backends, kinds) as scheduler:
        made = Graph(results[-1]).compile(scheduler, assign=halves)
        for seed in range(3):
            x = numbers(2, 16, seed=seed)
            np.testing.assert_allclose(made(x=x), expected(x), rtol=1e-4, atol=1e-6)
        assert scheduler.assignment(made) == {
            "CPU 0": ["product 0", "layer 0", "product 1", "layer 1"],
            "CPU 1": ["product 2", "layer 2", "product 3", "layer 3"],
        }
        assert made.nbytes > 0


def test_two_graphs_take_turns(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    with Scheduler(backends) as scheduler:
        long = Graph(results[-1]).compile(scheduler, keep=["x"])
        short = Graph(results[1]).compile(scheduler)
        x = numbers(2, 16)
        for _ in range(2):
            np.testing.assert_allclose(short(x=x), expected(x, 1), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(long(x=x), expected(x), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(long(), expected(x), rtol=1e-4, atol=1e-6)
        short.close()
        np.testing.assert_allclose(long(), expected(x), rtol=1e-4, atol=1e-6)


def test_large_graphs(ctx: Context, backends: Any) -> None:
    t = ctx.input(4, name="x")
    for _ in range(3000):
        t = ops.scale_bias(t, 1.0, 1.0)
    with Scheduler(backends) as scheduler:
        made = Graph(t).compile(scheduler)
        np.testing.assert_array_equal(made(x=np.zeros(4)), np.full(4, 3000))


def test_reserving(ctx: Context, backends: Any) -> None:
    graph = Graph(model(ctx)[-1])
    with Scheduler(backends) as scheduler:
        gc.collect()  # what other tests have left
        before = diagnostics.live_handles()
        sizes = scheduler.reserve(graph)
        assert list(sizes) == backends and sum(sizes.values()) > 0
        assert diagnostics.live_handles() == before
        assert graph.compile(scheduler).nbytes == sum(sizes.values())


def test_reserving_for_a_model_that_is_split(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    kinds = [buffer_type(is_host=True), device("CPU").buffer_type()]
    with Scheduler(backends, kinds) as scheduler:
        graph = Graph(results[-1])
        halves = {result: backends[i >= 4] for i, result in enumerate(results)}
        split = scheduler.reserve(graph, halves)
        assert all(split.values())
        made = graph.compile(scheduler, assign=halves)
        assert made.nbytes == sum(split.values())


def test_too_little_memory(ctx: Context, backends: Any) -> None:
    """ggml itself would go on without the memory and end the process."""
    x = ctx.input(1 << 16, name="x")
    graph = Graph(ops.repeat_4d(x, 1 << 16, 1 << 24, 1, 1))
    with Scheduler(backends) as scheduler:
        gc.collect()  # what other tests have left
        before = diagnostics.live_handles()
        for ask in (graph.compile, lambda where: where.reserve(graph)):
            with pytest.raises(MemoryError, match="failed to allocate"):
                ask(scheduler)
        assert diagnostics.live_handles() == before
        assert Graph(x + 1).compile(scheduler)(x=np.zeros(1 << 16)).all()


def test_seeing_each_result(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    x = numbers(2, 16)
    with Scheduler(backends) as scheduler:
        made = Graph(results[-1]).compile(scheduler)
        seen: dict[str, Any] = {}
        scheduler.set_eval_callback(lambda name, array: seen.update({name: array}))
        found = made(x=x)
        assert list(seen) == [one.name for one in results]
        for i in range(4):
            np.testing.assert_allclose(seen[f"layer {i}"], expected(x, i + 1), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found, seen["layer 3"])
        seen.clear()
        # what is compiled before and after it is set
        Graph(results[1]).compile(scheduler)(x=x)
        assert list(seen) == ["product 0", "layer 0"]
        scheduler.set_eval_callback(None)
        seen.clear()
        made(x=x)
        assert not seen


def test_what_a_callback_raises_ends_the_run(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    x = numbers(2, 16)
    with Scheduler(backends) as scheduler:
        made = Graph(results[-1]).compile(scheduler)
        seen = []

        def failing(name: str, array: Any) -> None:
            seen.append(name)
            if name == "layer 1":
                raise RuntimeError(f"{name} is wrong")

        scheduler.set_eval_callback(failing)
        with pytest.raises(RuntimeError, match="layer 1 is wrong"):
            made(x=x)
        assert seen == ["product 0", "layer 0", "product 1", "layer 1"]
        with pytest.raises(TypeError, match=r"callback is 3 .*expected a function or None"):
            scheduler.set_eval_callback(3)  # type: ignore[arg-type]
        scheduler.set_eval_callback(None)
        np.testing.assert_allclose(made(x=x), expected(x), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="the Scheduler is closed"):
        scheduler.set_eval_callback(failing)


def test_drawing_says_who_computes_what(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    halves = {result: backends[i >= 4] for i, result in enumerate(results)}
    kinds = [buffer_type(is_host=True), device("CPU").buffer_type()]
    with Scheduler(backends, kinds) as scheduler:
        made = Graph(results[-1]).compile(scheduler, assign=halves)
        lines = made.to_dot().splitlines()
        for label, place in (("product 1", "CPU 0"), ("layer 2", "CPU 1")):
            (line,) = [one for one in lines if f'label="{label}' in one]
            assert rf"\n{place}" in line and "fillcolor=" in line
        made.close()
        with pytest.raises(ValueError, match="the Compiled is closed"):
            made.to_dot()


def test_errors(ctx: Context, backends: Any) -> None:
    for wrong, error, message in (
        ([], ValueError, "backends is empty"),
        (backends[0], TypeError, "expected a sequence of Backends"),
        ([3], TypeError, "expected a Backend"),
        ([backends[0], backends[0]], ValueError, "twice"),
    ):
        with pytest.raises(error, match=message):
            Scheduler(wrong)
    y = ctx.input(3, name="x") + 1
    with Scheduler(backends) as scheduler, Backend(device("CPU"), 1) as other:
        with pytest.raises(ValueError, match="none of the Scheduler's"):
            Graph(y).compile(scheduler, assign={y: other})
        for wrong in (ctx.input(3, name="z"), "y"):
            with pytest.raises(ValueError, match="which is no tensor of the graph"):
                Graph(y).compile(scheduler, assign={wrong: other})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="n_threads is the Scheduler's"):
            Graph(y).compile(scheduler, n_threads=1)
        with pytest.raises(ValueError, match="assign is for a Scheduler"):
            Graph(y).compile(other, assign={y: other})
        elsewhere = Graph(y).compile(other)
        with pytest.raises(ValueError, match="is not compiled on this Scheduler"):
            scheduler.assignment(elsewhere)
        made = Graph(y).compile(scheduler)
    assert made.closed and repr(scheduler) == "<Scheduler closed>"


def test_closing_a_backend_closes_it(ctx: Context) -> None:
    one, two = Backend(device("CPU"), 1), Backend(device("CPU"), 1)
    scheduler = Scheduler([one, two])
    made = Graph(ctx.input(3, name="x") + 1).compile(scheduler)
    one.close()
    assert scheduler.closed and made.closed
    two.close()
