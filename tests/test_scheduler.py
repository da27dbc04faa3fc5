"""A graph over several backends: who computes what, watching it, memory for the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from _fake_backend import buffer_type

from ggml_cffi import device, ops
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


def test_measuring(ctx: Context, backends: Any) -> None:
    graph = Graph(model(ctx)[-1])
    with Scheduler(backends) as scheduler:
        sizes = scheduler.measure(graph)
        assert list(sizes) == backends and sum(sizes.values()) > 0
        assert graph.compile(scheduler).nbytes == sum(sizes.values())


def test_watching(ctx: Context, backends: Any) -> None:
    results = model(ctx)
    x = numbers(2, 16)
    with Scheduler(backends) as scheduler:
        made = Graph(results[-1]).compile(scheduler)
        seen: dict[str, Any] = {}
        found = scheduler.watch(made, lambda name, array: seen.update({name: array}), x=x)
        assert list(seen) == [one.name for one in results]
        for i in range(4):
            np.testing.assert_allclose(seen[f"layer {i}"], expected(x, i + 1), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(next(iter(found.values())), seen["layer 3"])

        def failing(name: str, array: Any) -> None:
            raise RuntimeError(name)

        with pytest.raises(RuntimeError, match="product 0"):
            scheduler.watch(made, failing, x=x)
        np.testing.assert_allclose(made(x=x), expected(x), rtol=1e-4, atol=1e-6)


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
