"""`Buffer` and `MultiBuffer`, and the functions of `capi` behind them."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import capi
from ggml_cffi.buffer import Buffer, MultiBuffer
from ggml_cffi.device import device
from ggml_cffi.meta import MetaDevice, SplitState

WEIGHTS = capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS


@pytest.fixture
def backend():
    with device("CPU").init_backend() as backend:
        yield backend


@pytest.fixture
def make(backend):
    """Make the pointer of a new buffer."""
    return lambda size=256: capi.ggml_backend_alloc_buffer(backend.handle, size)


def test_a_buffer(make):
    pointer = make(1000)
    with Buffer(pointer) as buffer:
        assert buffer.handle == pointer
        assert buffer.size == 1000
        assert buffer.usage == capi.GGML_BACKEND_BUFFER_USAGE_ANY
        buffer.set_usage(WEIGHTS)
        assert buffer.usage == WEIGHTS
        assert repr(buffer) == "<Buffer of 1000 bytes>"
        assert not buffer.closed
        assert not buffer.spent
    buffer.close()
    assert buffer.closed
    assert repr(buffer) == "<Buffer is closed>"
    with pytest.raises(ValueError, match="the Buffer is closed"):
        buffer.size  # noqa: B018


def test_a_buffer_has_one_owner(make):
    pointer = make()
    with Buffer(pointer), pytest.raises(ValueError, match="belongs to another Buffer"):
        Buffer(pointer)


@pytest.mark.parametrize(("value", "error"), [(None, ValueError), (1, TypeError), ("b", TypeError)])
def test_no_buffer(value, error):
    with pytest.raises(error, match="Buffer: handle"):
        Buffer(value)


def test_clear_sets_bytes(backend):
    ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
    tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_I8, 100)
    with Buffer(capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)) as buffer:
        for value in (0, 7, 255):
            buffer.clear(value)
            data = np.zeros(100, np.uint8)
            capi.ggml_backend_tensor_get(tensor, data, 0)
            assert (data == value).all()
        with pytest.raises(ValueError, match="value is 256, expected 0 to 255"):
            buffer.clear(256)
    capi.ggml_free(ctx)


def test_the_size_is_the_sum(make):
    a, b = Buffer(make(256)), Buffer(make(1024))
    with MultiBuffer([a, b]) as multi:
        assert multi.size == a_and_b(multi) == 1280
        assert multi.buffers == (a, b)
        assert capi.ggml_backend_buffer_is_multi_buffer(multi.handle)
        assert repr(multi) == "<MultiBuffer of 1280 bytes>"


def a_and_b(multi):
    return capi.ggml_backend_buffer_get_size(multi.handle)


def test_pointers_are_taken_over_as_well(make):
    owned, pointer = Buffer(make()), make()
    with MultiBuffer([owned, pointer]) as multi:
        assert multi.size == 512
        assert multi.buffers == (owned,)
        with pytest.raises(ValueError, match="belongs to another Buffer"):
            Buffer(pointer)
        with pytest.raises(ValueError, match=r"buffers\[0\] belongs to a Buffer"):
            MultiBuffer([pointer])
    with MultiBuffer([make()]):  # the address may well be the same, and is free again
        pass


def test_clear_and_usage_reach_the_children(backend):
    ctxs = [capi.ggml_init(mem_size=1000, no_alloc=True) for _ in range(2)]
    tensors = [capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_I8, 100) for ctx in ctxs]
    pointers = [capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle) for ctx in ctxs]
    with MultiBuffer([Buffer(pointer) for pointer in pointers]) as multi:
        multi.clear(9)
        multi.set_usage(WEIGHTS)
        assert multi.usage == WEIGHTS
        for tensor, pointer in zip(tensors, pointers, strict=True):
            data = np.zeros(100, np.uint8)
            capi.ggml_backend_tensor_get(tensor, data, 0)
            assert (data == 9).all()
            assert capi.ggml_backend_buffer_get_usage(pointer) == WEIGHTS
    for ctx in ctxs:
        capi.ggml_free(ctx)


def test_a_spent_buffer_is_not_to_be_used(make):
    child = Buffer(make())
    with MultiBuffer([child]) as multi:
        assert child.spent
        assert child.closed
        assert not multi.spent
        assert repr(child) == "<Buffer belongs to a MultiBuffer>"
        for use in (
            lambda: child.handle,
            lambda: child.size,
            lambda: child.usage,
            lambda: child.clear(),
            lambda: child.set_usage(WEIGHTS),
        ):
            with pytest.raises(ValueError, match="the Buffer belongs to a MultiBuffer"):
                use()


def test_a_spent_buffer_is_not_to_be_freed(make):
    child = Buffer(make())
    multi = MultiBuffer([child])
    with pytest.raises(ValueError, match="belongs to a MultiBuffer, which will free it"):
        child.close()
    multi.close()
    child.close()  # nothing left to free


def test_a_spent_buffer_is_not_to_be_passed_again(make):
    child = Buffer(make())
    with MultiBuffer([child]):
        with pytest.raises(ValueError, match="the Buffer belongs to a MultiBuffer"):
            MultiBuffer([child])
        other = Buffer(make())
        with pytest.raises(ValueError, match="the Buffer belongs to a MultiBuffer"):
            MultiBuffer([other, child])
        assert not other.spent  # nothing is taken over
        other.close()
    with pytest.raises(ValueError, match="belongs to a MultiBuffer"):
        MultiBuffer([child])


def test_leaving_the_block_of_a_spent_buffer(make):
    with Buffer(make()) as child:
        multi = MultiBuffer([child])
    assert not multi.closed
    assert multi.size == 256
    multi.close()


def test_a_closed_buffer(make):
    child = Buffer(make())
    child.close()
    with pytest.raises(ValueError, match="the Buffer is closed"):
        MultiBuffer([child])
    multi = MultiBuffer([make()])
    multi.close()
    multi.close()
    with pytest.raises(ValueError, match="the MultiBuffer is closed"):
        multi.size  # noqa: B018
    with pytest.raises(ValueError, match="the MultiBuffer is closed"):
        MultiBuffer([multi])


def test_a_buffer_that_is_named_twice(make):
    child, pointer = Buffer(make()), make()
    for pair in ([child, child], [pointer, pointer], [child, Buffer.handle.fget(child)]):
        with pytest.raises(ValueError, match=r"are the same buffer|belongs to a Buffer"):
            MultiBuffer(pair)
    assert not child.spent
    child.close()
    capi.ggml_backend_buffer_free(pointer)


@pytest.mark.parametrize(
    ("buffers", "error"),
    [
        (None, ValueError),
        ([], ValueError),
        ([None], ValueError),
        ((), ValueError),
        ("ab", TypeError),
        (1, TypeError),
        (["a"], TypeError),
        ([1], TypeError),
    ],
)
def test_no_list_of_buffers(buffers, error):
    with pytest.raises(error, match="MultiBuffer: buffers"):
        MultiBuffer(buffers)


def test_a_list_that_is_wrong_at_its_end_takes_nothing_over(make):
    child, pointer = Buffer(make()), make()
    for last in (None, "b", child):
        with pytest.raises((ValueError, TypeError)):
            MultiBuffer([child, pointer, last])
    with MultiBuffer([child, pointer]) as multi:
        assert multi.size == 512


def test_nesting(make):
    inner = MultiBuffer([Buffer(make()), make()])
    with MultiBuffer([inner, Buffer(make())]) as outer:
        assert outer.size == 768
        assert inner.spent
        with pytest.raises(ValueError, match="the MultiBuffer belongs to a MultiBuffer"):
            inner.size  # noqa: B018
    gc.collect()


def test_a_dropped_multi_buffer_is_freed_with_what_it_needs(make):
    log = []

    class Needed:
        def __del__(self):
            log.append("gone")

    multi = MultiBuffer([Buffer(make(), keep=(Needed(),))])
    gc.collect()
    assert log == []
    del multi
    gc.collect()
    assert log == ["gone"]


def test_closing_what_a_child_needs_closes_the_multi_buffer():
    backend = device("CPU").init_backend()
    child = Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
    multi = MultiBuffer([child])
    backend.close()
    assert multi.closed


@needs_meta
def test_buffers_of_a_meta_device():
    def halves(info, n_devs):
        return SplitState.by_ratio(info, 1, [1] * n_devs)

    ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
    capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 64, 64)
    with MetaDevice(["CPU", "CPU"], halves) as meta, meta.init_backend() as backend:
        child = Buffer(capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle), keep=(backend,))
        size = child.size  # the most that one device has
        assert 64 * 64 * 4 / 2 <= size < 64 * 64 * 4
        with MultiBuffer([child]) as multi:
            assert multi.size == size
            multi.clear(1)
    capi.ggml_free(ctx)


def test_capi_takes_lists(make):
    a, b = make(256), make(512)
    for bad in (None, [], [None], [a, None], [a, a]):
        with pytest.raises(ValueError, match="buffers"):
            capi.ggml_backend_multi_buffer_alloc_buffer(bad)
    multi = capi.ggml_backend_multi_buffer_alloc_buffer([a, b])
    assert capi.ggml_backend_buffer_get_size(multi) == 768
    assert capi.ggml_backend_buffer_is_multi_buffer(multi)
    assert not capi.ggml_backend_buffer_is_multi_buffer(a)
    capi.ggml_backend_multi_buffer_set_usage(multi, WEIGHTS)  # of the children only
    assert capi.ggml_backend_buffer_get_usage(a) == WEIGHTS
    assert capi.ggml_backend_buffer_get_usage(multi) == capi.GGML_BACKEND_BUFFER_USAGE_ANY
    capi.ggml_backend_buffer_free(multi)


@needs_meta
def test_interpreter_exit_with_all_open():
    """Nothing is freed at exit, in whatever order; and nothing is printed."""
    code = """
from ggml_cffi import capi
from ggml_cffi.buffer import Buffer, MultiBuffer
from ggml_cffi.device import device
from ggml_cffi.meta import MetaDevice, SplitState
backend = device("CPU").init_backend()
multi = MultiBuffer([Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256))])
single = Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
single.circle = [single, multi]
meta = MetaDevice(["CPU"] * 2, lambda info, n: SplitState.mirrored())
meta_backend = meta.init_backend()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
