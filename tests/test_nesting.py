"""Calls inside callbacks, failures on other threads, interrupts: nothing gets lost or mixed up.

Each of these was once wrong.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _compute import Arena
from _release import needs

from ggml_cffi import AbortError, GGUFError, capi, ffi

I32 = capi.GGML_TYPE_I32


def floats(tensor: Any) -> Any:
    """A host tensor's numbers, in place."""
    return np.frombuffer(ffi.buffer(tensor.data, capi.ggml_nbytes(tensor)), np.float32)


def custom(arena: Arena, function: Callable[..., None], n_tasks: int = 1, n_ops: int = 1) -> Any:
    """A graph that applies `function` n_ops times, and its operand and result."""
    ctx = arena.context()
    operand = result = arena.weight(8)
    for _ in range(n_ops):
        result = capi.ggml_map_custom1(ctx, result, function, n_tasks)
    return arena.graph(ctx, result), operand, result


def test_a_worker_fails_while_the_caller_computes_something_else(arena: Arena, cpu: Any) -> None:
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    capi.ggml_backend_cpu_set_n_threads(other, 1)
    inner, _, _ = custom(arena, lambda dst, src, ith, nth: None)

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        if ith:
            raise KeyError("worker")
        capi.ggml_backend_graph_compute(other, inner)

    graph, _, _ = custom(arena, function, n_tasks=2)
    for _ in range(3):
        with pytest.raises(KeyError, match="worker"):
            capi.ggml_backend_graph_compute(cpu, graph)
    capi.ggml_backend_graph_compute(cpu, inner)  # and nothing is left over for the next


def test_failures_on_worker_threads_stay_with_their_computation(cpu: Any) -> None:
    wrong: list[BaseException] = []

    def compute(fails: bool) -> None:
        backend = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(backend, 2)

        def function(dst: Any, src: Any, ith: int, nth: int) -> None:
            if fails and ith:
                raise KeyError("worker")

        with Arena(backend) as arena:
            arena.callback(capi.ggml_backend_free, backend)
            graph, _, _ = custom(arena, function, n_tasks=2)
            for _ in range(100):
                try:
                    capi.ggml_backend_graph_compute(backend, graph)
                    assert not fails, "the failure did not come out"
                except KeyError as error:
                    if not fails:
                        wrong.append(error)
                except BaseException as error:
                    wrong.append(error)

    threads = [threading.Thread(target=compute, args=(fails,)) for fails in (True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_interrupt_is_lost_and_no_result_is_wrong(arena: Arena, cpu: Any) -> None:
    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        floats(dst)[:] = floats(src) + 1

    n_ops, n_signals = 100, 10
    graph, operand, result = custom(arena, function, n_ops=n_ops)
    arrived = threading.Event()
    lost = []

    def interrupt() -> None:
        for number in range(n_signals):
            time.sleep(0.01)
            arrived.clear()
            os.kill(os.getpid(), signal.SIGINT)
            if not arrived.wait(10):
                lost.append(number)

    interrupter = threading.Thread(target=interrupt)
    seen = computed = 0
    done = False
    while not done:
        try:
            if interrupter.ident is None:
                interrupter.start()
            while interrupter.is_alive():
                capi.ggml_backend_tensor_set(operand, np.full(8, computed, np.float32), 0)
                capi.ggml_backend_graph_compute(cpu, graph)
                got = np.empty(8, np.float32)
                capi.ggml_backend_tensor_get(result, got, 0)
                assert (got == computed + n_ops).all()
                computed += 1
            done = True
        except KeyboardInterrupt:
            seen += 1
            arrived.set()
    assert lost == []
    assert seen == n_signals
    assert computed > 0


def test_after_a_failure_no_other_callback_is_called(arena: Arena, cpu: Any) -> None:
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(ith)
        raise KeyError(len(calls))

    graph, _, _ = custom(arena, function, n_ops=5)
    with pytest.raises(KeyError, match="1"):
        capi.ggml_backend_graph_compute(cpu, graph)
    assert calls == [0]


def scheduler(arena: Arena) -> Any:
    made = capi.ggml_backend_sched_new([arena.backend], None, 64, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def test_a_scheduler_is_for_one_graph_until_it_is_reset(arena: Arena) -> None:
    sched = scheduler(arena)
    operand = arena.weight(4)
    capi.ggml_backend_tensor_set(operand, np.arange(4, dtype=np.float32), 0)
    graphs = []
    for factor in (2.0, 3.0):
        ctx = arena.context()
        result = capi.ggml_scale(ctx, operand, factor)
        graphs.append((arena.graph(ctx, result, allocate=False), result))
    capi.ggml_backend_sched_graph_compute(sched, graphs[0][0])
    with pytest.raises(ValueError, match="reset_or_allocated_for"):
        capi.ggml_backend_sched_graph_compute(sched, graphs[1][0])
    with pytest.raises(ValueError, match="reset_or_allocated_for"):
        capi.ggml_backend_sched_alloc_graph(sched, graphs[1][0])
    capi.ggml_backend_sched_graph_compute(sched, graphs[0][0])
    capi.ggml_backend_sched_reset(sched)
    capi.ggml_backend_sched_graph_compute(sched, graphs[1][0])
    got = np.empty(4, np.float32)
    capi.ggml_backend_tensor_get(graphs[1][1], got, 0)
    assert got.tolist() == [0, 3, 6, 9]


def test_a_scheduler_is_not_taken_for_reset_after_an_abort(arena: Arena, cpu: Any) -> None:
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    sched = scheduler(arena)
    number, table = arena.weight(1), arena.weight(4, 2)
    capi.ggml_backend_tensor_set(number, np.array([7], np.float32), 0)
    ctx = arena.context()
    rows = capi.ggml_get_rows(ctx, table, capi.ggml_cast(ctx, number, I32))  # computed: unchecked
    with pytest.raises(AbortError):
        capi.ggml_backend_sched_graph_compute(sched, arena.graph(ctx, rows, allocate=False))
    other = arena.graph(ctx, capi.ggml_scale(ctx, table, 2.0), allocate=False)
    with pytest.raises(ValueError, match="reset_or_allocated_for"):
        capi.ggml_backend_sched_graph_compute(sched, other)


def test_an_eval_callback_takes_itself_away(arena: Arena) -> None:
    sched = scheduler(arena)
    seen = []

    def callback(node: Any, ask: bool) -> bool:
        seen.append(ask)
        capi.ggml_backend_sched_set_eval_callback(sched, None)
        return True

    capi.ggml_backend_sched_set_eval_callback(sched, callback)
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_scale(ctx, arena.weight(4), 2.0), allocate=False)
    capi.ggml_backend_sched_graph_compute(sched, graph)
    assert seen == [True]


def test_a_reason_is_kept_though_the_log_receiver_calls_ggml() -> None:
    capi.ggml_log_set(lambda level, text: capi.ggml_tensor_overhead())
    try:
        with pytest.raises(GGUFError, match="failed to open"):
            capi.gguf_init_from_file("/nonexistent")
    finally:
        capi.ggml_log_set(None)


@needs("ggml_backend_tensor_set_2d")
def test_an_array_of_another_type_than_its_tensor(arena: Arena) -> None:
    tensor = arena.weight(4)
    for array in (np.zeros(2), np.zeros(4, np.int32), np.zeros(4, np.uint16)):
        message = f"data is an array of {array.dtype}"
        with pytest.raises(TypeError, match=message):
            capi.ggml_backend_tensor_set(tensor, array, 0)
        with pytest.raises(TypeError, match=message):
            capi.ggml_backend_tensor_get(tensor, array, 0)
        with pytest.raises(TypeError, match=message):
            capi.ggml_backend_tensor_set_2d(tensor, array, 0, 4, 2, 8, 4)
    for array in (np.zeros(4, np.float32), np.zeros(16, np.uint8)):
        capi.ggml_backend_tensor_set(tensor, array, 0)
