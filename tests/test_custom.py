"""Operations written in Python: on arrays, on threads, and what they raise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ggml_cffi import ops
from ggml_cffi.context import Context
from ggml_cffi.graph import Graph
from ggml_cffi.training import SGD, Dataset, Trainer


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_one_task(ctx: Context) -> None:
    x, y = ctx.input((3, 4), name="x"), ctx.input((4,), name="y")

    def outer(result: Any, a: Any, b: Any) -> None:
        assert not a.flags.writeable and result.flags.writeable
        result[...] = np.sort(a, axis=-1) + b

    made = Graph(ops.custom(outer, x, y) * 2).compile("CPU")
    given = numbers(3, 4), numbers(4)
    for _ in range(3):
        np.testing.assert_allclose(
            made(x=given[0], y=given[1]), (np.sort(given[0]) + given[1]) * 2, rtol=1e-6
        )


def test_another_shape_and_dtype(ctx: Context) -> None:
    x = ctx.input((5, 8), name="x")

    def count(result: Any, a: Any) -> None:
        assert result.dtype == np.int32 and result.shape == (5,)
        result[...] = (a > 0).sum(-1)

    made = Graph(ops.custom(count, x, shape=5, dtype="i32")).compile("CPU")
    given = numbers(5, 8)
    np.testing.assert_array_equal(made(x=given), (given > 0).sum(-1))


def test_views_and_quantised_operands(ctx: Context) -> None:
    x = ctx.input((4, 6), name="x")
    w = ctx.from_numpy(numbers(2, 64), dtype="q8_0")
    ctx.allocate("CPU")

    def both(result: Any, a: Any, b: Any) -> None:
        assert a.shape == (6, 4) and b.dtype == np.float32
        result[...] = a.sum() + b.sum()

    made = Graph(ops.custom(both, x.T, w, shape=())).compile("CPU")
    given = numbers(4, 6)
    np.testing.assert_allclose(made(x=given), given.sum() + w.numpy().sum(), rtol=1e-4)


@pytest.mark.parametrize("n_tasks", [None, 3])
def test_several_threads(ctx: Context, n_tasks: int | None) -> None:
    x = ctx.input((64, 16), name="x")
    seen: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def part(result: Any, a: Any, *, task: int, n_tasks: int) -> None:
        with lock:
            seen.add((task, n_tasks))
        result[task::n_tasks] = a[task::n_tasks] ** 2

    made = Graph(ops.custom(part, x, n_tasks=n_tasks)).compile("CPU", n_threads=3)
    given = numbers(64, 16)
    np.testing.assert_allclose(made(x=given), given**2, rtol=1e-6)
    assert seen == {(0, 3), (1, 3), (2, 3)}


@pytest.mark.parametrize("n_tasks", [1, None])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_it_raises_comes_out(
    ctx: Context, n_tasks: int | None, kind: type[BaseException]
) -> None:
    x = ctx.input(8, name="x")
    raising = [True]

    def function(result: Any, a: Any, **task: int) -> None:
        if raising[0]:
            raise kind("no")
        result[...] = a

    made = Graph(ops.custom(function, x, n_tasks=n_tasks)).compile("CPU", n_threads=2)
    with pytest.raises(kind, match="no"):
        made(x=np.ones(8))
    raising[0] = False
    np.testing.assert_array_equal(made(x=np.ones(8)), np.ones(8))


def test_errors(ctx: Context) -> None:
    x = ctx.input(32, name="x")
    with pytest.raises(TypeError, match="expected a function"):
        ops.custom(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be quantised"):
        ops.custom(print, x, dtype="q8_0")
    with pytest.raises(ValueError, match="n_tasks is 0"):
        ops.custom(print, x, n_tasks=0)
    with pytest.raises(TypeError, match="without operands shape and ctx are needed"):
        ops.custom(print)

    def ones(result: Any) -> None:
        result[...] = 1

    made = Graph(ops.custom(ones, shape=(2, 3), dtype="f32", ctx=ctx)).compile("CPU")
    np.testing.assert_array_equal(made(), np.ones((2, 3)))


@pytest.mark.parametrize(
    "keep",
    [
        lambda result, a: result,
        lambda result, a: a,
        lambda result, a: a[1:, ::2].T,
        lambda result, a: memoryview(result),
        lambda result, a: lambda: a,
    ],
    ids=["result", "operand", "view", "memoryview", "closure"],
)
@pytest.mark.parametrize("n_tasks", [1, 2])
def test_an_array_that_is_kept_is_an_error_and_keeps_its_memory(keep: Any, n_tasks: int) -> None:
    """It would show what comes to lie there, and point to freed memory in the end."""
    ctx, kept = Context(), []
    x = ctx.input((1024, 1024), name="x")

    def function(result: Any, a: Any, task: int = 0, n_tasks: int = 1) -> None:
        result[task::n_tasks] = a[task::n_tasks]
        kept.append(keep(result, a))

    made = Graph(ops.custom(function, x, n_tasks=n_tasks)).compile("CPU", 2)
    with pytest.raises(BufferError, match=r"is kept beyond its call.*: keep a copy"):
        made(x=np.ones((1024, 1024)))
    made.close()
    ctx.close()
    assert len(kept) == n_tasks
    for one in kept:
        np.testing.assert_array_equal(np.unique(one() if callable(one) else one), 1)
    del one
    kept.clear()  # the function has it, and lives as long as the memory


def test_an_array_that_a_trainer_computes_with_is_not_kept_either() -> None:
    ctx, kept = Context(), []
    w = ctx.from_numpy(np.ones((1, 4), np.float32), name="w")
    ctx.allocate("CPU")
    x = ctx.input((1 << 18, 4), name="x")

    def function(result: Any, a: Any) -> None:
        result[...] = a
        kept.extend([result, a])

    made = Trainer(x, ops.custom(function, x) @ w.T, "sum", SGD(0.1), n_threads=1)
    data = np.ones((1 << 18, 4), np.float32)
    for use in (made.predict, lambda data: made.fit(Dataset(data))):
        with pytest.raises(BufferError, match="is kept beyond its call"):
            use(data)
    made.close()
    ctx.close()
    assert len(kept) == 4 and all(np.isfinite(one).all() for one in kept)  # results come there
    kept.clear()


def test_arrays_of_an_exception_are_there_as_long_as_it_is() -> None:
    """For a debugger that looks at what the function had."""
    ctx = Context()

    def function(result: Any, a: Any) -> None:
        raise LookupError("no")

    made = Graph(ops.custom(function, ctx.input((1024, 1024), name="x"))).compile("CPU", 1)
    with pytest.raises(LookupError) as caught:
        made(x=np.ones((1024, 1024)))
    made.close()
    ctx.close()
    inner = list(caught.traceback)[-1].frame.f_locals
    assert (inner["a"] == 1).all()


def test_what_has_used_an_array_may_take_a_moment_to_forget_it(ctx: Context) -> None:
    """Circles are collected, and threads of a pool let go of what they worked on."""

    def function(result: Any, a: Any) -> None:
        def fill(row: Any) -> None:
            if row is None:
                fill(row)
            row[...] = 3

        list(pool.map(fill, result))

    made = Graph(ops.custom(function, ctx.input((4, 8), name="x"))).compile("CPU", 1)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            np.testing.assert_array_equal(made(x=np.ones((4, 8))), np.full((4, 8), 3))
