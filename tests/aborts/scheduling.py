"""The scheduler, and events."""

from __future__ import annotations

import os

from _fake_backend import event_of

from ggml_cffi import capi, ffi

from ._site import EVENTS, SCHEDULER, raw, site


def scheduler(arena, *backends, size=64):
    made = capi.ggml_backend_sched_new(list(backends) or [arena.backend], None, size, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def chain(arena, length=1):
    """A graph without memory of `length` nodes, one after the other."""
    ctx = arena.context()
    node = arena.tensor(4, ctx=ctx)
    for _ in range(length):
        node = capi.ggml_sqr(ctx, node)
    return arena.graph(ctx, node, allocate=False)


def other_cpu(arena):
    backend = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, backend)
    return backend


@site(SCHEDULER, "ggml_backend_sched_new", "n_backends <= GGML_SCHED_MAX_BACKENDS")
def scheduler_of_seventeen(arena):
    scheduler(arena, *[arena.backend] * 17)


@site(SCHEDULER, "ggml_backend_sched_new", "n_backends > 0")
def scheduler_of_none(arena):
    backends = ffi.new("struct ggml_backend *[1]", [arena.backend])
    raw("ggml_backend_sched_new", backends, ffi.NULL, 0, 64, False, False)


@site(SCHEDULER, "ggml_backend_sched_alloc_graph", "sched->hash_set.size >= graph->n_nodes")
def graph_larger_than_its_scheduler(arena):
    capi.ggml_backend_sched_alloc_graph(scheduler(arena, size=1), chain(arena, 16))


@site(SCHEDULER, "ggml_backend_sched_reserve", "sched->hash_set.size >= measure_graph->n_nodes")
def reserve_for_a_graph_larger_than_its_scheduler(arena):
    capi.ggml_backend_sched_reserve(scheduler(arena, size=1), chain(arena, 16))


@site(
    SCHEDULER, "ggml_backend_sched_reserve_size", "sched->hash_set.size >= measure_graph->n_nodes"
)
def size_of_a_graph_larger_than_its_scheduler(arena):
    capi.ggml_backend_sched_reserve_size(scheduler(arena, size=1), chain(arena, 16))


@site(SCHEDULER, "ggml_backend_sched_graph_compute", "sched->hash_set.size >= graph->n_nodes")
def computation_of_a_graph_larger_than_its_scheduler(arena):
    capi.ggml_backend_sched_graph_compute(scheduler(arena, size=1), chain(arena, 16))


@site(SCHEDULER, "ggml_backend_sched_alloc_graph", "!sched->is_alloc")
def graph_allocated_twice(arena):
    made, graph = scheduler(arena), chain(arena)
    capi.ggml_backend_sched_alloc_graph(made, graph)
    capi.ggml_backend_sched_alloc_graph(made, graph)


@site(SCHEDULER, "ggml_backend_sched_get_backend", "i >= 0 && i < sched->n_backends")
def backend_that_is_not_there(arena):
    capi.ggml_backend_sched_get_backend(scheduler(arena), 1)


@site(SCHEDULER, "ggml_backend_sched_get_buffer_type", "backend_index >= 0")
def buffer_type_of_another_backend(arena):
    capi.ggml_backend_sched_get_buffer_type(scheduler(arena), other_cpu(arena))


@site(SCHEDULER, "ggml_backend_sched_get_buffer_size", "backend_index >= 0")
def buffer_size_of_another_backend(arena):
    capi.ggml_backend_sched_get_buffer_size(scheduler(arena), other_cpu(arena))


@site(SCHEDULER, "ggml_backend_sched_set_tensor_backend", "backend_index >= 0")
def tensor_on_another_backend(arena):
    made = scheduler(arena)
    capi.ggml_backend_sched_set_tensor_backend(made, arena.tensor(4), other_cpu(arena))


@site(SCHEDULER, "ggml_backend_sched_alloc_graph", "unexpected graph reallocation", alone=True)
def reallocation_that_is_forbidden(arena):
    os.environ["GGML_SCHED_DEBUG_REALLOC"] = "2"
    arena.callback(os.environ.pop, "GGML_SCHED_DEBUG_REALLOC")
    made = scheduler(arena, other_cpu(arena), arena.backend)
    capi.ggml_backend_sched_alloc_graph(made, chain(arena))


# ---- events: the CPU has none


@site(EVENTS, "ggml_backend_event_record", "backend->iface.event_record")
def event_recorded_on_the_cpu(arena):
    event = event_of(capi.ggml_backend_get_device(arena.backend))
    capi.ggml_backend_event_record(event, arena.backend)


@site(EVENTS, "ggml_backend_event_wait", "backend->iface.event_wait")
def event_waited_for_by_the_cpu(arena):
    event = event_of(capi.ggml_backend_get_device(arena.backend))
    capi.ggml_backend_event_wait(arena.backend, event)


@site(EVENTS, "ggml_backend_event_synchronize", "event->device->iface.event_synchronize")
def event_of_the_cpu_waited_for(arena):
    capi.ggml_backend_event_synchronize(event_of(capi.ggml_backend_get_device(arena.backend)))
