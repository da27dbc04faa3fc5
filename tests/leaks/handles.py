"""Handles of ggml, by type: made and freed, not quite made, made and forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ggml_cffi import capi, ffi
from ggml_cffi._handles import Owned
from ggml_cffi.errors import GGMLError, GGUFError, NotSupportedError, SplitError

from .harness import raises
from .shared import F32, HUGE, MSE, S, context

Cycle = Callable[[], object]


class Handle(NamedTuple):
    """How a type of handle is made and freed, and calls that fail to make one."""

    make: Callable[[], Any]
    free: Callable[[Any], object]
    fails: tuple[Callable[[], object], ...]


def context_of_no_size() -> None:
    raises(TypeError, capi.ggml_init, mem_size="large")


def gguf_cut_off() -> None:
    raises(GGUFError, capi.gguf_init_from_buffer, S.gguf[:-100])


def gguf_without_its_tensors() -> None:
    """Header and context are made by then."""
    made = ffi.new("struct ggml_context **")
    raises(GGUFError, capi.gguf_init_from_file, S.files[1], no_alloc=False, ctx=made)


def gguf_that_is_not_there() -> None:
    raises(GGUFError, capi.gguf_init_from_file, "/nowhere/nobody.gguf")


def gguf_with_its_tensors() -> None:
    made = ffi.new("struct ggml_context **")
    gguf = capi.gguf_init_from_file(S.files[0], no_alloc=False, ctx=made)
    capi.ggml_free(made[0])
    capi.gguf_free(gguf)


def backend_of_nobody() -> None:
    raises(GGMLError, capi.ggml_backend_init_by_name, "nobody")


def backend_that_the_device_refuses() -> None:
    raises(GGMLError, capi.ggml_backend_dev_init, S.fake.pointer)


def buffer_too_large() -> None:
    raises((MemoryError, GGMLError), capi.ggml_backend_alloc_buffer, S.cpu, HUGE)


def tensors_too_large() -> None:
    call = capi.ggml_backend_alloc_ctx_tensors
    raises((MemoryError, GGMLError), call, S.too_large, S.cpu)


def tensors_that_are_none() -> None:
    raises(GGMLError, capi.ggml_backend_alloc_ctx_tensors, S.empty, S.cpu)


def weight_that_is_refused() -> None:
    """The buffer is made by then."""
    call = capi.ggml_backend_alloc_ctx_tensors
    raises(SplitError, call, S.refused, S.meta_backend.handle)


def weight_with_a_wrong_answer() -> None:
    call = capi.ggml_backend_alloc_ctx_tensors
    raises(SplitError, call, S.wrong, S.meta_backend.handle)


def event_that_is_refused() -> None:
    S.fake.refuses = True
    try:
        raises(NotSupportedError, capi.ggml_backend_event_new, S.fake.pointer)
    finally:
        S.fake.refuses = False


def copy_that_is_refused() -> None:
    """The copy is made by then."""
    call = capi.ggml_backend_graph_copy
    raises(SplitError, call, S.meta_backend.handle, S.refused_graph)


def plan_without_memory() -> None:
    raises(ValueError, capi.ggml_backend_graph_plan_create, S.cpu, S.bare_graph)


def scheduler_of_no_size() -> None:
    raises(ValueError, capi.ggml_backend_sched_new, [S.cpu], None, 0, False, False)


def scheduler_too_small() -> None:
    made = capi.ggml_backend_sched_new([S.cpu], None, 64, False, False)
    raises((MemoryError, GGMLError), capi.ggml_backend_sched_reserve, made, S.too_large_graph)
    capi.ggml_backend_sched_free(made)


def allocator_of_nothing() -> None:
    raises(ValueError, capi.ggml_gallocr_new_n, [])


def allocator_too_small() -> None:
    made = capi.ggml_gallocr_new(capi.ggml_backend_cpu_buffer_type())
    raises((MemoryError, GGMLError), capi.ggml_gallocr_reserve, made, S.too_large_graph)
    capi.ggml_gallocr_free(made)


def allocator_of_a_buffer_that_is_not_there() -> None:
    made = capi.ggml_gallocr_new(capi.ggml_backend_cpu_buffer_type())
    raises(ValueError, capi.ggml_gallocr_reserve_n, made, S.graph, [1])
    capi.ggml_gallocr_free(made)


def optimizer_without_a_loss() -> None:
    raises(ValueError, capi.ggml_opt_init, backend_sched=S.sched)


def optimizer_with_what_is_no_function() -> None:
    call = capi.ggml_opt_init
    raises(TypeError, call, backend_sched=S.sched, loss_type=MSE, get_opt_pars=5)


def data_set_too_large() -> None:
    raises(ValueError, capi.ggml_opt_dataset_init, F32, F32, HUGE, 1, HUGE, 1)


def result_of_something() -> None:
    raises(TypeError, capi.ggml_opt_result_init, 1)


def threads_that_are_none() -> None:
    params = capi.ggml_threadpool_params_init(0)
    raises(ValueError, capi.ggml_threadpool_new, params)


HANDLES = {
    "ggml_context": Handle(
        lambda: capi.ggml_init(mem_size=4096),
        capi.ggml_free,
        (context_of_no_size,),
    ),
    "gguf_context": Handle(
        capi.gguf_init_empty,
        capi.gguf_free,
        (gguf_cut_off, gguf_without_its_tensors, gguf_that_is_not_there),
    ),
    "ggml_backend": Handle(
        lambda: capi.ggml_backend_cpu_init(),
        capi.ggml_backend_free,
        (backend_of_nobody, backend_that_the_device_refuses),
    ),
    "ggml_backend_buffer": Handle(
        lambda: capi.ggml_backend_alloc_buffer(S.cpu, 256),
        capi.ggml_backend_buffer_free,
        (
            buffer_too_large,
            tensors_too_large,
            tensors_that_are_none,
            weight_that_is_refused,
            weight_with_a_wrong_answer,
        ),
    ),
    "ggml_backend_event": Handle(
        lambda: capi.ggml_backend_event_new(S.fake.pointer),
        capi.ggml_backend_event_free,
        (event_that_is_refused,),
    ),
    "ggml_backend_graph_copy": Handle(
        lambda: capi.ggml_backend_graph_copy(S.cpu, S.graph),
        capi.ggml_backend_graph_copy_free,
        (copy_that_is_refused,),
    ),
    "ggml_backend_graph_plan": Handle(
        lambda: capi.ggml_backend_graph_plan_create(S.cpu, S.graph),
        lambda plan: capi.ggml_backend_graph_plan_free(S.cpu, plan),
        (plan_without_memory,),
    ),
    "ggml_backend_sched": Handle(
        lambda: capi.ggml_backend_sched_new([S.cpu], None, 16, False, False),
        capi.ggml_backend_sched_free,
        (scheduler_of_no_size, scheduler_too_small),
    ),
    "ggml_gallocr": Handle(
        lambda: capi.ggml_gallocr_new(capi.ggml_backend_cpu_buffer_type()),
        capi.ggml_gallocr_free,
        (
            allocator_of_nothing,
            allocator_too_small,
            allocator_of_a_buffer_that_is_not_there,
        ),
    ),
    "ggml_opt_context": Handle(
        lambda: capi.ggml_opt_init(backend_sched=S.sched, loss_type=MSE),
        capi.ggml_opt_free,
        (optimizer_without_a_loss, optimizer_with_what_is_no_function),
    ),
    "ggml_opt_dataset": Handle(
        lambda: capi.ggml_opt_dataset_init(F32, F32, 1, 1, 4, 1),
        capi.ggml_opt_dataset_free,
        (data_set_too_large,),
    ),
    "ggml_opt_result": Handle(
        capi.ggml_opt_result_init, capi.ggml_opt_result_free, (result_of_something,)
    ),
    "ggml_threadpool": Handle(
        lambda: capi.ggml_threadpool_new(S.threads),
        capi.ggml_threadpool_free,
        (threads_that_are_none,),
    ),
}


def forgotten(handle: Handle) -> Callable[[], object]:
    """It and what it needs are dropped, as plain garbage and as a circle in turn."""
    count = 0

    def cycle() -> None:
        nonlocal count
        count += 1
        needed: Owned[Any] = Owned(context(1 << 10), capi.ggml_free)
        made: Any = Owned(handle.make(), handle.free, (needed,))
        if count % 2:
            made.circle = [made, needed]
            needed.circle = made
        if count % 100 == 0:
            gc.collect()

    return cycle


def cases() -> Iterator[tuple[str, Cycle]]:
    for name, handle in HANDLES.items():
        yield f"{name}: free", lambda h=handle: h.free(h.make())
        yield f"{name}: forget", forgotten(handle)
        for fail in handle.fails:
            yield f"{name}: fail, {fail.__name__.replace('_', ' ')}", fail
    yield "gguf_context: free, with its tensors", gguf_with_its_tensors
