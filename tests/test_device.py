"""`devices()`, `device(name)`, `Device` and `Backend`."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from _release import needs_meta

from ggml_cffi import capi
from ggml_cffi._handles import Borrowed, Owned
from ggml_cffi.backend import Backend, child_backends, set_n_threads, usable_cores
from ggml_cffi.device import Device, device, devices
from ggml_cffi.meta import MetaDevice, SplitState


def mirrored(info, n_devs):
    return SplitState.mirrored()


def test_devices_are_those_of_ggml():
    found = devices()
    assert len(found) == capi.ggml_backend_dev_count()
    names = [capi.ggml_backend_dev_name(capi.ggml_backend_dev_get(i)) for i in range(len(found))]
    assert [one.name for one in found] == names
    assert "CPU" in names


def test_cpu():
    cpu = device("CPU")
    assert cpu.type == capi.GGML_BACKEND_DEVICE_TYPE_CPU
    assert cpu.description
    assert 0 < cpu.memory.free <= cpu.memory.total
    assert repr(cpu) == f"<Device CPU: {cpu.description}>"


def test_equality_is_that_of_the_pointer():
    assert device("CPU") == device("cpu") == Device(device("CPU").handle)
    assert len({device("CPU"), device("CPU")}) == 1
    assert device("CPU") != "CPU"


@needs_meta
def test_two_meta_devices_are_different():
    with MetaDevice(["CPU"], mirrored) as one, MetaDevice(["CPU"], mirrored) as other:
        assert one != other
        assert one != device("CPU")
        assert one == Device(one.handle)


def test_supports_op():
    ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
    a = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 4)
    assert device("CPU").supports_op(capi.ggml_mul_mat(ctx, a, a))
    with pytest.raises(ValueError, match="tensor must not be None"):
        device("CPU").supports_op(None)
    with pytest.raises(TypeError, match="tensor is a struct ggml_context"):
        device("CPU").supports_op(ctx)
    capi.ggml_free(ctx)


def test_no_such_device():
    with pytest.raises(ValueError, match=r"no device 'GPU17'; the devices are: .*CPU"):
        device("GPU17")
    with pytest.raises(TypeError, match="name is 0"):
        device(0)


@pytest.mark.parametrize(
    ("handle", "error"), [(None, ValueError), (0, TypeError), ("CPU", TypeError)]
)
def test_no_device(handle, error):
    with pytest.raises(error, match="Device: handle"):
        Device(handle)


def test_a_pointer_to_something_else():
    with Backend(device("CPU")) as backend, pytest.raises(TypeError, match="struct ggml_backend "):
        Device(backend.handle)


# --- backends and their threads


def threads_used(backend) -> int:
    """How many threads the CPU backend gives to an operation that takes all it can get."""
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    seen = set()

    def count(dst, a, ith, nth, *userdata):
        seen.add(nth)

    a = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 1024)
    capi.ggml_set_input(a)
    out = capi.ggml_map_custom1(ctx, a, count, -1)
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, out)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    capi.ggml_backend_graph_compute(backend.handle, graph)
    capi.ggml_gallocr_free(galloc)
    capi.ggml_free(ctx)
    (n_threads,) = seen
    return n_threads


def test_a_backend_uses_all_cores():
    with device("CPU").init_backend() as backend:
        assert backend.name == "CPU"
        assert backend.children == []
        assert repr(backend) == "<Backend CPU>"
        assert threads_used(backend) == usable_cores()
    assert repr(backend) == "<Backend closed>"


@pytest.mark.parametrize("n_devs", [1, 2, 3])
@needs_meta
def test_so_do_the_children_of_a_meta_backend(n_devs):
    with MetaDevice(["CPU"] * n_devs, mirrored) as meta, meta.init_backend() as backend:
        assert len(backend.children) == n_devs
        assert child_backends(backend.handle) == backend.children
        assert threads_used(backend) == usable_cores()


def check_threads(device):
    with device.init_backend(3) as backend:
        assert threads_used(backend) == 3
        backend.set_n_threads(1)
        assert threads_used(backend) == 1
        set_n_threads(backend, 2)
        assert threads_used(backend) == 2
        set_n_threads(backend.handle, 5)
        assert threads_used(backend) == 5
    with Backend(device, 2) as backend:
        assert threads_used(backend) == 2


def test_the_number_of_threads_can_be_set():
    check_threads(device("CPU"))


@needs_meta
def test_the_number_of_threads_of_a_meta_backend_can_be_set():
    with MetaDevice(["CPU", "CPU"], mirrored) as meta:
        check_threads(meta)


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-1, ValueError), (513, ValueError), (True, TypeError),
                         (2.0, TypeError), ("2", TypeError)],
)  # fmt: skip
def test_a_number_of_threads_that_cannot_be(count, error):
    with pytest.raises(error, match=r"n_threads is .*expected"):
        Backend(device("CPU"), count)
    with device("CPU").init_backend() as backend, pytest.raises(error, match="n_threads is"):
        backend.set_n_threads(count)


def test_usable_cores_are_those_of_the_process():
    before = os.sched_getaffinity(0)
    assert 1 <= usable_cores() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


# --- what owns, and what is owned


class Thing(Owned):
    freed: list[str]

    def __init__(self, name, keep=(), log=None):
        self.log = log if log is not None else []
        super().__init__(name, self.log.append, keep)


def test_close_frees_once():
    thing = Thing("a")
    assert thing.handle == "a"
    assert not thing.closed
    thing.close()
    thing.close()
    assert thing.closed
    assert thing.log == ["a"]
    with pytest.raises(ValueError, match="the Thing is closed"):
        thing.handle  # noqa: B018


def test_a_with_block_closes():
    with Thing("a") as thing:
        assert thing.log == []
    assert thing.log == ["a"]


def test_dropped_things_are_freed():
    log = []
    Thing("a", log=log)
    gc.collect()
    assert log == ["a"]


def test_closing_a_parent_closes_its_children_first():
    log = []
    parent = Thing("parent", log=log)
    child = Thing("child", (parent,), log)
    grandchild = Thing("grandchild", (child,), log)
    parent.close()
    assert log == ["grandchild", "child", "parent"]
    assert child.closed
    assert grandchild.closed


def test_a_child_keeps_its_parent_alive():
    log = []
    parent = Thing("parent", log=log)
    child = Thing("child", (parent,), log)
    del parent
    gc.collect()
    assert log == []
    del child
    gc.collect()
    assert log == ["child", "parent"]


def test_garbage_in_a_circle_is_freed_children_first():
    for _ in range(10):
        log = []
        parent = Thing("parent", log=log)
        child = Thing("child", (parent,), log)
        parent.circle, child.circle = child, parent
        del parent, child
        for _ in range(3):
            gc.collect()
        assert log == ["child", "parent"]


def test_many_threads_close_one_thing():
    thing = Thing("a")
    barrier = threading.Barrier(8)

    def close():
        barrier.wait()
        thing.close()

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert thing.log == ["a"]


def test_after_a_fork_a_thing_is_refused_and_not_freed():
    thing = Thing("a")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            thing.handle  # noqa: B018
            answer = b"usable"
        except RuntimeError as error:
            answer = str(error).encode()
        thing.close()
        os.write(writer, answer + str(thing.log).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    assert "before a fork" in told
    assert told.endswith("[]")
    thing.close()
    assert thing.log == ["a"]


def test_what_is_borrowed_keeps_its_owner():
    owner = Thing("owner")
    cpu = capi.ggml_backend_dev_get(0)
    borrowed = Borrowed(cpu, keep=owner)
    log = owner.log
    del owner
    gc.collect()
    assert log == []
    del borrowed
    gc.collect()
    assert log == ["owner"]
