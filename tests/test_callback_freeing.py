"""What a computation uses is neither freed nor closed by a function that it calls, nor reset.

ggml would go on with memory that is gone. Each refusal is a ValueError, and changes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from _callback_places import EpochTrain
from _compute import Arena, check_product

from ggml_cffi import Backend, _callbacks, _handles, capi, device, diagnostics

USED = "a computation that has not ended uses it"


def refused(free: Callable[..., object], *args: Any) -> None:
    with pytest.raises(ValueError, match=USED):
        free(*args)


class Operation:
    """A graph of one operation that calls `inside`."""

    def __init__(self, arena: Arena, inside: Callable[[], object], allocate: bool = True) -> None:
        self.n_calls = 0
        self.inside = inside
        ctx = arena.context()
        result = capi.ggml_map_custom1(ctx, arena.weight(8), self.function, 1)
        self.graph = arena.graph(ctx, result, allocate=allocate)

    def function(self, *args: Any) -> None:
        self.n_calls += 1
        self.inside()


def scheduler(arena: Arena) -> Any:
    made = capi.ggml_backend_sched_new([arena.backend], None, 64, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def test_a_backend_in_its_operation(arena: Arena, cpu: Any) -> None:
    operation = Operation(arena, lambda: refused(capi.ggml_backend_free, cpu))
    capi.ggml_backend_graph_compute(cpu, operation.graph)
    capi.ggml_backend_graph_compute_async(cpu, operation.graph)
    assert operation.n_calls == 2
    check_product(cpu)


def test_a_backend_in_its_abort_callback(arena: Arena, cpu: Any) -> None:
    calls: list[int] = []

    def function() -> bool:
        refused(capi.ggml_backend_free, cpu)
        calls.append(1)
        return False

    capi.ggml_backend_cpu_set_abort_callback(cpu, function)
    check_product(cpu)
    n_calls = len(calls)
    check_product(cpu)
    assert len(calls) == 2 * n_calls > 0, "the refusal has taken the function away"


def test_both_backends_that_are_compared(arena: Arena, cpu: Any) -> None:
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    indices: list[int] = []

    def function(index: int, t1: Any, t2: Any) -> bool:
        indices.append(index)
        refused(capi.ggml_backend_free, cpu)
        refused(capi.ggml_backend_free, other)
        return True

    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_scale(ctx, arena.weight(4), 2.0))
    capi.ggml_backend_compare_graph_backend(cpu, other, graph, function)
    assert indices == [0]


def test_a_plan_and_its_backend_in_its_operation(arena: Arena, cpu: Any) -> None:
    def inside() -> None:
        refused(capi.ggml_backend_graph_plan_free, cpu, plan)
        refused(capi.ggml_backend_free, cpu)

    operation = Operation(arena, inside)
    plan = capi.ggml_backend_graph_plan_create(cpu, operation.graph)
    for _ in range(2):
        capi.ggml_backend_graph_plan_compute(cpu, plan)
    assert operation.n_calls == 2
    capi.ggml_backend_graph_plan_free(cpu, plan)


def test_threads_in_an_operation_on_them(arena: Arena, cpu: Any) -> None:
    pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_default(2))
    operation = Operation(arena, lambda: refused(capi.ggml_threadpool_free, pool))
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    capi.ggml_backend_cpu_set_threadpool(cpu, pool)
    capi.ggml_backend_graph_compute(cpu, operation.graph)
    capi.ggml_backend_cpu_set_threadpool(cpu, None)
    capi.ggml_graph_compute(operation.graph, capi.ggml_graph_plan(operation.graph, 2, pool))
    assert operation.n_calls == 2
    capi.ggml_threadpool_free(pool)


def test_a_scheduler_and_its_backend_in_an_operation(arena: Arena, cpu: Any) -> None:
    def inside() -> None:
        refused(capi.ggml_backend_sched_free, sched)
        refused(capi.ggml_backend_free, cpu)
        with pytest.raises(ValueError, match="the scheduler is computing"):
            capi.ggml_backend_sched_reset(sched)
        with pytest.raises(ValueError, match="the scheduler is computing"):
            capi.ggml_backend_sched_split_graph(sched, operation.graph)

    sched = scheduler(arena)
    operation = Operation(arena, inside, allocate=False)
    for _ in range(2):
        capi.ggml_backend_sched_graph_compute(sched, operation.graph)
    assert operation.n_calls == 2


def test_a_scheduler_in_its_eval_callback(arena: Arena) -> None:
    calls: list[bool] = []

    def function(tensor: Any, ask: bool) -> bool:
        refused(capi.ggml_backend_sched_free, sched)
        calls.append(ask)
        return True

    sched = scheduler(arena)
    operation = Operation(arena, lambda: None, allocate=False)
    capi.ggml_backend_sched_set_eval_callback(sched, function)
    for _ in range(2):  # the refusal has not taken the function away
        capi.ggml_backend_sched_graph_compute(sched, operation.graph)
    assert calls == [True, False] * 2
    address = _callbacks._address(sched)
    assert len(_callbacks.owners[address]) == 1


def test_closing_a_backend_object_in_its_operation(arena: Arena) -> None:
    def inside() -> None:
        for close in (backend.close, lambda: backend.__exit__(None, None, None)):
            refused(close)
            assert not backend.closed

    backend = Backend(device("CPU"), 1)
    operation = Operation(arena, inside)
    capi.ggml_backend_graph_compute(backend.handle, operation.graph)
    assert operation.n_calls == 1
    check_product(backend.handle)
    backend.close()
    assert backend.closed


def test_a_backend_object_that_was_not_closed_is_collected(arena: Arena) -> None:
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    backend = Backend(device("CPU"), 1)
    held = [backend]
    operation = Operation(arena, lambda: refused(held[0].close))
    capi.ggml_backend_graph_compute(backend.handle, operation.graph)
    assert operation.n_calls == 1
    del held[:], backend
    gc.collect()
    assert diagnostics.live_handles()["ggml_backend"] == before.get("ggml_backend", 0)


def test_a_backend_object_that_is_collected_in_its_operation_is_lost(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could catch an exception: it is logged, and the computation goes on."""

    def inside() -> None:
        held.clear()
        gc.collect()

    held = [Backend(device("CPU"), 1)]
    handle = held[0].handle
    operation = Operation(arena, inside)
    capi.ggml_backend_graph_compute(handle, operation.graph)
    assert (operation.n_calls, held) == (1, [])
    assert USED in caplog.text
    check_product(handle)
    assert _handles._lost.pop().handle == handle
    capi.ggml_backend_free(handle)


# ---- training


def all_of(rig: EpochTrain, result: Any) -> None:
    """All that an epoch uses."""
    refused(capi.ggml_backend_free, rig.arena.backend)
    refused(capi.ggml_backend_sched_free, rig.sched)
    refused(capi.ggml_opt_free, rig.optimizer)
    refused(capi.ggml_opt_dataset_free, rig.dataset)
    refused(capi.ggml_opt_result_free, result)


def test_what_an_epoch_uses_between_its_steps(arena: Arena) -> None:
    rig = EpochTrain(arena)
    result = capi.ggml_opt_result_init()
    steps: list[int] = []

    def function(*args: Any) -> None:
        all_of(rig, result)
        steps.append(1)
        if len(steps) == 2:
            capi.ggml_backend_sched_reset(rig.sched)  # the next step plans anew anyhow

    capi.ggml_opt_epoch(rig.optimizer, rig.dataset, result, None, 8, callback_train=function)
    assert steps == [1] * 4
    capi.ggml_opt_result_free(result)


def test_what_an_epoch_uses_within_a_step(arena: Arena) -> None:
    rig = EpochTrain(arena)
    result = capi.ggml_opt_result_init()
    nodes: list[bool] = []

    def function(tensor: Any, ask: bool) -> bool:
        if not nodes:
            all_of(rig, result)
            for use in (
                lambda: capi.ggml_backend_sched_reset(rig.sched),
                lambda: capi.ggml_opt_alloc(rig.optimizer, True),
                lambda: capi.ggml_opt_epoch(rig.optimizer, rig.dataset, None, None, 8),
            ):
                with pytest.raises(ValueError, match="the scheduler is computing"):
                    use()
        nodes.append(ask)
        return True

    capi.ggml_backend_sched_set_eval_callback(rig.sched, function)
    capi.ggml_opt_epoch(rig.optimizer, rig.dataset, result, None, 8)
    capi.ggml_opt_alloc(rig.optimizer, True)
    before = len(nodes)
    capi.ggml_opt_eval(rig.optimizer, result)
    assert len(nodes) > before > 0
    capi.ggml_opt_result_free(result)


def test_what_a_fit_uses(arena: Arena) -> None:
    rig = EpochTrain(arena)
    epochs: list[int] = []

    def function(epoch: int) -> Any:
        refused(capi.ggml_backend_free, arena.backend)
        refused(capi.ggml_backend_sched_free, rig.sched)
        refused(capi.ggml_opt_dataset_free, rig.dataset)
        with pytest.raises(ValueError, match="the scheduler is computing"):
            capi.ggml_backend_sched_reset(rig.sched)
        epochs.append(epoch)
        return {"adamw": {"alpha": 0.25, "wd": 0.0}}

    capi.ggml_opt_fit(
        rig.sched,
        rig.ctx_compute,
        rig.x,
        rig.y,
        rig.dataset,
        capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
        capi.GGML_OPT_OPTIMIZER_TYPE_ADAMW,
        function,
        1,
        2,
    )
    assert set(epochs) == {1}
