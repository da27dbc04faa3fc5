"""Asynchronous transfers, events, offload and graph plans: on CPU, meta device and streams.

The CPU does all at once and has no events. So `_fake_backend` brings a backend with streams, on
which what a call does, and when, can be seen.
"""

from __future__ import annotations

import numpy as np
import pytest
from _compute import Arena, check_product
from _fake_backend import FakeDevice, event_of, require_layout
from _release import require

from ggml_cffi import capi, diagnostics, ffi
from ggml_cffi.errors import AbortError, NotSupportedError
from ggml_cffi.meta import MetaDevice, SplitState


@pytest.fixture
def arena(cpu):
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    with Arena(cpu) as arena:
        yield arena


@pytest.fixture
def meta():
    require("ggml_backend_meta_device")
    """A backend over two CPU devices that mirrors all tensors."""
    with MetaDevice(["CPU", "CPU"], lambda info, n_devs: SplitState.mirrored()) as device:
        backend = capi.ggml_backend_dev_init(device.handle)
        yield backend
        capi.ggml_backend_free(backend)


@pytest.fixture(scope="module")
def device():
    """A device with streams and events."""
    require_layout()
    return FakeDevice()


@pytest.fixture
def streams(device):
    made = device.stream(), device.stream()
    yield made
    for stream in made:
        stream.queue.clear()
        capi.ggml_backend_free(stream.pointer)
        assert stream.freed == 1


def read(tensor, n=4):
    found = np.empty(n, np.float32)
    capi.ggml_backend_tensor_get(tensor, found, 0)
    return found.tolist()


# ---- transfers


def test_transfers_on_the_cpu_are_done_at_once(cpu, arena):
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_set_async(cpu, tensor, np.array([1, 2, 3, 4], np.float32), 0)
    capi.ggml_backend_tensor_set_async(cpu, tensor, np.array([9, 8], np.float32), 4, 4)
    assert read(tensor) == [1, 9, 3, 4]
    found = np.zeros(4, np.float32)
    capi.ggml_backend_tensor_get_async(cpu, tensor, found, 0)
    capi.ggml_backend_synchronize(cpu)
    assert found.tolist() == [1, 9, 3, 4]
    part = bytearray(4)
    capi.ggml_backend_tensor_get_async(cpu, tensor, part, 8)
    assert np.frombuffer(part, np.float32).tolist() == [3]


def test_transfers_on_a_meta_device(meta):
    with Arena(meta) as arena:
        tensor = arena.weight(4)
        capi.ggml_backend_tensor_set_async(meta, tensor, np.array([1, 2, 3, 4], np.float32), 0)
        capi.ggml_backend_synchronize(meta)
        found = np.zeros(4, np.float32)
        capi.ggml_backend_tensor_get_async(meta, tensor, found, 0)
        capi.ggml_backend_synchronize(meta)
        assert found.tolist() == [1, 2, 3, 4]


def test_transfers_on_a_stream_are_done_when_somebody_waits(arena, streams):
    stream = streams[0]
    tensor = arena.weight(4)
    capi.ggml_backend_buffer_clear(tensor.buffer, 0)
    source, found = np.array([1, 2, 3, 4], np.float32), np.zeros(4, np.float32)
    capi.ggml_backend_tensor_set_async(stream.pointer, tensor, source, 0)
    capi.ggml_backend_tensor_get_async(stream.pointer, tensor, found, 0)
    assert len(stream.queue) == 2
    assert read(tensor) == [0, 0, 0, 0]
    assert found.tolist() == [0, 0, 0, 0]
    source[3] = 5  # the source is read when the work is done: it must stay as it is
    capi.ggml_backend_synchronize(stream.pointer)
    assert not stream.queue
    assert read(tensor) == found.tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("name", ["set", "get"])
def test_transfers_out_of_bounds(cpu, arena, name):
    function = getattr(capi, f"ggml_backend_tensor_{name}_async")
    tensor, data = arena.weight(4), np.zeros(8, np.float32)
    for offset, size in ((4, 16), (16, 4), (0, 20)):
        with pytest.raises(AbortError, match="out of bounds"):
            function(cpu, tensor, data, offset, size)
    with pytest.raises(ValueError, match="requires offset"):
        function(cpu, tensor, data, 2**64 - 8, 16)
    with pytest.raises(ValueError, match="fewer than the 64 asked for"):
        function(cpu, tensor, data, 0, 64)
    with pytest.raises(AbortError, match="tensor not allocated"):
        function(cpu, arena.tensor(4), data, 0, 16)
    with pytest.raises(ValueError, match="backend must not be NULL or None"):
        function(None, tensor, data, 0, 16)
    with pytest.raises(ValueError, match="tensor must not be NULL or None"):
        function(cpu, None, data, 0, 16)
    with pytest.raises(ValueError, match="data must not be"):
        function(cpu, tensor, None, 0, 16)


def test_get_async_needs_a_writable_buffer(cpu, arena):
    with pytest.raises((TypeError, ValueError), match="data"):
        capi.ggml_backend_tensor_get_async(cpu, arena.weight(4), bytes(16), 0)


# ---- copies


def test_copies_between_backends(cpu, arena):
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    src, dst = arena.weight(4), arena.weight(4)
    capi.ggml_backend_tensor_set(src, np.array([1, 2, 3, 4], np.float32), 0)
    capi.ggml_backend_tensor_copy_async(cpu, other, src, dst)
    capi.ggml_backend_synchronize(other)
    assert read(dst) == [1, 2, 3, 4]
    capi.ggml_backend_tensor_copy_async(cpu, cpu, src, src)
    assert read(src) == [1, 2, 3, 4]
    with pytest.raises(AbortError, match="different layouts"):
        capi.ggml_backend_tensor_copy_async(cpu, other, src, arena.weight(5))
    with pytest.raises(ValueError, match="requires"):
        capi.ggml_backend_tensor_copy_async(cpu, other, src, arena.tensor(4))
    for missing in range(4):
        arguments = [cpu, other, src, dst]
        arguments[missing] = None
        with pytest.raises(ValueError, match="must not be NULL or None"):
            capi.ggml_backend_tensor_copy_async(*arguments)


def test_copies_on_a_stream(cpu, arena, streams):
    one, two = streams
    src, dst, far = arena.weight(4), arena.weight(4), arena.weight(4)
    for tensor in (src, dst, far):
        capi.ggml_backend_buffer_clear(tensor.buffer, 0)
    data = np.array([1, 2, 3, 4], np.float32)
    capi.ggml_backend_tensor_set(src, data, 0)
    capi.ggml_backend_tensor_copy_async(one.pointer, two.pointer, src, dst)
    assert read(dst) == [0, 0, 0, 0]
    capi.ggml_backend_synchronize(two.pointer)
    assert read(dst) == [1, 2, 3, 4]
    # a backend that cannot is waited for, and ggml copies itself
    capi.ggml_backend_tensor_set_async(two.pointer, dst, -data, 0)
    capi.ggml_backend_tensor_copy_async(two.pointer, cpu, dst, far)
    assert not two.queue
    assert read(far) == [-1, -2, -3, -4]


# ---- events


def test_no_events_on_the_cpu(cpu):
    device = capi.ggml_backend_get_device(cpu)
    assert not capi.ggml_backend_dev_get_props(device).caps.events
    with pytest.raises(NotSupportedError, match="ggml_backend_event_new: the device has no events"):
        capi.ggml_backend_event_new(device)
    event = event_of(device)
    with pytest.raises(NotSupportedError, match="the backend has no event_record"):
        capi.ggml_backend_event_record(event, cpu)
    with pytest.raises(NotSupportedError, match="the backend has no event_wait"):
        capi.ggml_backend_event_wait(cpu, event)
    with pytest.raises(NotSupportedError, match="has no event_synchronize"):
        capi.ggml_backend_event_synchronize(event)
    check_product(cpu)


def test_no_events_on_a_meta_device(meta):
    device = capi.ggml_backend_get_device(meta)
    with pytest.raises(NotSupportedError, match="the device has no events"):
        capi.ggml_backend_event_new(device)
    with pytest.raises(NotSupportedError, match="the backend has no event_record"):
        capi.ggml_backend_event_record(event_of(device), meta)
    with pytest.raises(NotSupportedError, match="the backend has no event_wait"):
        capi.ggml_backend_event_wait(meta, event_of(device))


def test_no_event_given(cpu):
    capi.ggml_backend_event_free(None)
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_event_new(None)
    with pytest.raises(ValueError, match="event must not be NULL or None"):
        capi.ggml_backend_event_record(None, cpu)
    with pytest.raises(ValueError, match="event must not be NULL or None"):
        capi.ggml_backend_event_wait(cpu, None)
    with pytest.raises(ValueError, match="event must not be NULL or None"):
        capi.ggml_backend_event_synchronize(None)
    with pytest.raises(ValueError, match="event must not be NULL or None"):
        capi.ggml_backend_event_synchronize(ffi.cast("struct ggml_backend_event *", 0))


def test_an_event_is_waited_for(device, arena, streams):
    one, two = streams
    tensor = arena.weight(4)
    capi.ggml_backend_buffer_clear(tensor.buffer, 0)
    assert capi.ggml_backend_dev_get_props(device.pointer).caps.events
    event = capi.ggml_backend_event_new(device.pointer)
    assert len(device.events) == 1
    data, found = np.array([1, 2, 3, 4], np.float32), np.zeros(4, np.float32)

    # the second stream reads what the first writes before the event, not what it writes after it
    capi.ggml_backend_tensor_set_async(one.pointer, tensor, data, 0)
    capi.ggml_backend_event_record(event, one.pointer)
    capi.ggml_backend_tensor_set_async(one.pointer, tensor, np.zeros(4, np.float32), 0)
    capi.ggml_backend_event_wait(two.pointer, event)
    capi.ggml_backend_tensor_get_async(two.pointer, tensor, found, 0)
    assert (len(one.queue), len(two.queue)) == (3, 2)
    assert read(tensor) == found.tolist() == [0, 0, 0, 0]
    capi.ggml_backend_synchronize(two.pointer)
    assert found.tolist() == [1, 2, 3, 4]
    assert len(one.queue) == 1
    one.queue.clear()

    # and so does the host
    capi.ggml_backend_tensor_set_async(one.pointer, tensor, -data, 0)
    capi.ggml_backend_event_record(event, one.pointer)
    capi.ggml_backend_event_synchronize(event)
    assert read(tensor) == [-1, -2, -3, -4]
    assert not one.queue

    capi.ggml_backend_event_free(event)
    assert not device.events


# ---- offload


def product(arena, n):
    ctx = arena.context()
    return capi.ggml_mul_mat(ctx, arena.tensor(8, 4, ctx=ctx), arena.tensor(8, n, ctx=ctx))


def test_offload(cpu, arena, device, streams):
    """A device says which operations are worth moving their weights; the CPU never does."""
    large, small = product(arena, 64), product(arena, 2)
    other = capi.ggml_sqr(arena.context(), arena.tensor(8, 64))
    assert capi.ggml_backend_dev_offload_op(device.pointer, large) is True
    assert capi.ggml_backend_dev_offload_op(device.pointer, small) is False
    assert capi.ggml_backend_dev_offload_op(device.pointer, other) is False
    assert capi.ggml_backend_offload_op(streams[0].pointer, large) is True
    assert capi.ggml_backend_dev_offload_op(capi.ggml_backend_get_device(cpu), large) is False
    assert capi.ggml_backend_offload_op(cpu, large) is False
    with pytest.raises(ValueError, match="op must not be NULL or None"):
        capi.ggml_backend_dev_offload_op(device.pointer, None)
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_dev_offload_op(None, large)


# ---- plans


def test_a_plan_is_computed_again_and_again(cpu, arena):
    ctx = arena.context()
    x = arena.tensor(4, ctx=ctx)
    capi.ggml_set_input(x)
    result = capi.ggml_sqr(ctx, x)
    graph = arena.graph(ctx, result)
    plan = capi.ggml_backend_graph_plan_create(cpu, graph)
    for factor in (1, 2, 3):
        capi.ggml_backend_tensor_set(x, factor * np.arange(4, dtype=np.float32), 0)
        status = capi.ggml_backend_graph_plan_compute(cpu, plan)
        assert status is capi.ggml_status.GGML_STATUS_SUCCESS
        assert read(result) == [(factor * i) ** 2 for i in range(4)]
    capi.ggml_backend_graph_plan_free(cpu, plan)


def test_a_plan_needs_memory_for_its_graph(cpu, arena):
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(4, ctx=ctx)), allocate=False)
    with pytest.raises(ValueError, match="requires allocated"):
        capi.ggml_backend_graph_plan_create(cpu, graph)


def test_no_plan_given(cpu):
    for function in (capi.ggml_backend_graph_plan_compute, capi.ggml_backend_graph_plan_free):
        with pytest.raises(ValueError, match="plan must not be NULL or None"):
            function(cpu, None)
    with pytest.raises(ValueError, match="cgraph must not be NULL or None"):
        capi.ggml_backend_graph_plan_create(cpu, None)


def test_what_is_no_plan(cpu, arena):
    """C has no type for a plan: those that there are are remembered."""
    ctx = arena.context()
    plan = capi.ggml_backend_graph_plan_create(cpu, arena.graph(ctx, arena.tensor(4, ctx=ctx)))
    capi.ggml_backend_graph_plan_free(cpu, plan)
    for wrong in (plan, ffi.cast("void *", 8), ffi.cast("void *", ctx)):
        for function in (capi.ggml_backend_graph_plan_compute, capi.ggml_backend_graph_plan_free):
            with pytest.raises(ValueError, match=r"requires is_plan\(plan, backend\)"):
                function(cpu, wrong)


def test_no_plans_on_a_meta_device(meta):
    with Arena(meta) as arena:
        ctx = arena.context()
        graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.weight(4)))
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_create"):
            capi.ggml_backend_graph_plan_create(meta, graph)
        plan = ffi.cast("void *", 24)
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_compute"):
            capi.ggml_backend_graph_plan_compute(meta, plan)
        plans = diagnostics.live_handles().get("ggml_backend_graph_plan", 0)
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_free"):
            capi.ggml_backend_graph_plan_free(meta, plan)
        assert diagnostics.live_handles().get("ggml_backend_graph_plan", 0) == plans
    check_product(meta)
