"""Many threads at once: aborts of one never disturb the others, and what each computes is right."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _compute import Arena, check_product

from ggml_cffi import MetaDevice, SplitState, capi, device, lib
from ggml_cffi.errors import AbortError, SplitError

#: However slow the machine is: a thread that has not gone on for so long never will.
LIMIT = 300
Step = Callable[[int], object]
FREE = contextlib.nullcontext()


@pytest.fixture(autouse=True)
def often() -> Any:
    """Let threads take turns more often than Python does by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


def at_once(makers: list[Callable[[], Step]], seconds: float, steps: int = 5) -> None:
    """Let each thread make its things, then take its steps all together.

    They go on for `seconds`, and until each has taken so many steps, however long that takes them.
    Raises what the first of them raised.
    """
    counts = [0] * len(makers)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(makers))
    stop = threading.Event()

    def run(number: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                made = makers[number]()
                step = stack.enter_context(made) if hasattr(made, "__enter__") else made
                barrier.wait(LIMIT)
                for turn in itertools.count():
                    if stop.is_set():
                        return
                    step(turn)
                    counts[number] += 1
        except BaseException as error:
            errors.append(error)
            stop.set()
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(makers))]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    stop.wait(seconds)
    while min(counts) < steps and time.monotonic() - begun < LIMIT and not stop.wait(0.01):
        pass
    stop.set()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]
    assert min(counts) >= steps, counts


def new_backend(n_threads: int = 1) -> Any:
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, n_threads)
    return backend


@contextlib.contextmanager
def products(backend: Any = None, alone: Any = FREE, n_threads: int = 1) -> Any:
    """Steps that compute a product and look at it; `alone` is held while the backend computes."""
    own = new_backend(n_threads) if backend is None else None
    with Arena(own if backend is None else backend) as arena:

        def step(turn: int) -> None:
            rng = np.random.default_rng(turn)
            a, b = (rng.standard_normal((n, 32), np.float32) for n in (24, 16))
            with Arena(arena.backend) as mine:
                ctx = mine.context()
                tensors = [mine.tensor(32, n, ctx=ctx) for n in (24, 16)]
                mine.allocate(ctx)
                ctx_graph = mine.context()
                product = capi.ggml_mul_mat(ctx_graph, *tensors)
                graph = mine.graph(ctx_graph, product)
                for tensor, array in zip(tensors, (a, b), strict=True):
                    capi.ggml_backend_tensor_set(tensor, array, 0)
                with alone:
                    capi.ggml_backend_graph_compute(arena.backend, graph)
                assert lib.ggml_cffi_error() == 0
                found = np.empty((16, 24), np.float32)
                capi.ggml_backend_tensor_get(product, found, 0)
            np.testing.assert_allclose(found, b @ a.T, rtol=1e-4, atol=1e-4)

        yield step
    if own is not None:
        capi.ggml_backend_free(own)


@contextlib.contextmanager
def aborts() -> Any:
    """Steps that end in an abort, or otherwise by an exception: in building, access, a split."""
    with Arena(new_backend()) as arena:
        ctx = arena.context(1 << 20)
        a, b = arena.tensor(3, 3, ctx=ctx), arena.tensor(5, 5, ctx=ctx)
        loose = arena.tensor(8, ctx=ctx)

        def fail(info: Any, n_devs: int) -> SplitState:
            raise ValueError("no plan")

        meta = MetaDevice(["CPU"] * 2, fail, on_error="raise")
        backend = meta.init_backend(1)
        split_ctx = arena.context()
        arena.tensor(8, 8, ctx=split_ctx)

        def step(turn: int) -> None:
            kind = turn % 8
            if kind == 0:
                with pytest.raises(AbortError, match="tensor buffer not set"):
                    capi.ggml_backend_tensor_set(loose, np.ones(8, np.float32), 0)
            elif kind == 1:  # nobody reads this error: it stays with this thread
                assert not lib.ggml_mul_mat(ctx, a, b)
                assert lib.ggml_cffi_error() != 0
            elif kind == 2:
                with pytest.raises(SplitError):
                    capi.ggml_backend_alloc_ctx_tensors(split_ctx, backend.handle)
            else:
                with pytest.raises(AbortError, match="ggml_can_mul_mat"):
                    capi.ggml_mul_mat(ctx, a, b)

        yield step
        backend.close()
        meta.close()
        own = arena.backend
    capi.ggml_backend_free(own)


def test_a_thread_that_always_aborts_disturbs_no_other() -> None:
    at_once([*[products] * 8, aborts], 10)


def test_eight_threads_with_backends_of_their_own() -> None:
    """Two compute with threads of ggml's: slow where there are fewer cores than threads."""
    at_once([*[products] * 6, *[lambda: products(n_threads=2)] * 2], 3, steps=1)


def test_eight_threads_on_one_backend() -> None:
    """What capi promises: all but the computing itself needs no lock."""
    backend, lock = new_backend(), threading.Lock()
    try:
        at_once([lambda: products(backend, lock)] * 8, 3)
    finally:
        capi.ggml_backend_free(backend)


def test_what_capi_promises_to_threads_is_said() -> None:
    said = " ".join((capi.__doc__ or "").split())
    assert "for one thread at a time, and so is computing on a backend" in said


def test_four_meta_devices_are_loaded_at_once() -> None:
    """Each is made, filled and used by a thread of its own, again and again."""
    wrong: list[object] = []

    @contextlib.contextmanager
    def loads(number: int) -> Any:
        axes = {"up": 1, "down": 0}
        weights = [3, 1] if number % 2 else [1, 1]

        def step(turn: int) -> None:
            asked: dict[str, int] = {}
            thread = threading.get_ident()

            def split(info: Any, n_devs: int) -> SplitState:
                asked[info.name] = asked.get(info.name, 0) + 1
                if threading.get_ident() != thread or n_devs != 2:
                    wrong.append((info.name, n_devs))
                if info.name not in axes:
                    return SplitState.mirrored()
                return SplitState.by_ratio(info, axis=axes[info.name], ratios=weights)

            with MetaDevice(["CPU"] * 2, split) as meta, meta.init_backend(1) as backend:
                check_product(backend.handle, seed=turn)
                assert meta.error is None
            # once for each weight: the answers of one device are never another's
            assert asked == {"up": 1, "down": 1}

        yield step

    at_once([lambda i=i: loads(i) for i in range(4)], 3)  # type: ignore[misc]
    assert wrong == []


def test_errors_of_meta_devices_stay_with_them() -> None:
    """Of four split functions every second fails: its latch alone closes."""

    @contextlib.contextmanager
    def loads(number: int) -> Any:
        def step(turn: int) -> None:
            def split(info: Any, n_devs: int) -> SplitState:
                if number % 2:
                    raise ValueError(f"of {number} at {turn}")
                return SplitState.mirrored()

            with MetaDevice(["CPU"] * 2, split) as meta, meta.init_backend(1) as backend:
                check_product(backend.handle, seed=turn)  # mirrored is right as well
                told = str(meta.error) if meta.error else ""
            assert told.partition("\n")[0] == (f"of {number} at {turn}" if number % 2 else "")

        yield step

    at_once([lambda i=i: loads(i) for i in range(4)], 2)  # type: ignore[misc]


def test_devices_are_listed_by_many_threads() -> None:
    def steps() -> Step:
        return lambda turn: device("CPU").memory

    at_once([steps] * 8, 0.5)


def test_a_step_that_fails_is_seen() -> None:
    """Else nothing here could fail."""

    def broken() -> Step:
        def step(turn: int) -> None:
            raise AbortError("of a thread", None, None, "", "")

        return step

    started = time.monotonic()
    with pytest.raises(AbortError, match="of a thread"):
        at_once([products, broken], LIMIT)
    assert time.monotonic() - started < LIMIT


def test_a_thread_that_does_not_go_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 1)

    def slow() -> Step:
        return lambda turn: time.sleep(0.4)

    with pytest.raises(AssertionError, match=r"\[\d"):
        at_once([slow], 0)
