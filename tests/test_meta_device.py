"""`MetaDevice` and its split function, asked by ggml itself."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import capi
from ggml_cffi.device import Device, device
from ggml_cffi.errors import AbortError, SplitError
from ggml_cffi.meta import MetaDevice, SplitAxis, SplitState, TensorInfo, split_function

pytestmark = needs_meta

F32, Q4_0 = capi.GGML_TYPE_F32, capi.GGML_TYPE_Q4_0
MIRRORED = SplitState.mirrored()


def mirrored(info, n_devs):
    return MIRRORED


def rows(info, n_devs):
    """Equal shares of the rows."""
    return SplitState.by_ratio(info, 1, [1] * n_devs)


class Weights:
    """Tensors in a context of their own, to be allocated on a device."""

    def __init__(self, **shapes):
        self.ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
        self.tensors = {}
        for name, (type_, *ne) in shapes.items():
            self.tensors[name] = capi.ggml_new_tensor(self.ctx, type_, ne)
            capi.ggml_set_name(self.tensors[name], name)
        self.buffer = None

    def allocate(self, target):
        buft = capi.ggml_backend_dev_buffer_type(getattr(target, "handle", target))
        self.buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(self.ctx, buft)
        return self

    @property
    def size(self):
        return capi.ggml_backend_buffer_get_size(self.buffer)

    def round_trip(self):
        """Write every tensor, and check that the same is read."""
        for tensor in self.tensors.values():
            data = np.random.default_rng(0).integers(0, 256, capi.ggml_nbytes(tensor), np.uint8)
            capi.ggml_backend_tensor_set(tensor, data, 0)
            back = np.zeros_like(data)
            capi.ggml_backend_tensor_get(tensor, back, 0)
            np.testing.assert_array_equal(back, data)

    def free(self):
        if self.buffer is not None:
            capi.ggml_backend_buffer_free(self.buffer)
        capi.ggml_free(self.ctx)


@contextmanager
def weights(**shapes):
    made = Weights(**shapes)
    try:
        yield made
    finally:
        made.free()


W = (F32, 64, 48)
W_BYTES = 64 * 48 * 4


# --- making one


@pytest.mark.parametrize("n_devs", [1, 2, 3, 5, 8, 16])
def test_one_to_sixteen_devices(n_devs):
    got = []

    def split(info, n):
        got.append(n)
        return rows(info, n)

    with MetaDevice(["CPU"] * n_devs, split) as meta, weights(w=W) as w:
        assert meta.devices == (device("CPU"),) * n_devs
        assert meta.name == f"Meta({','.join(['CPU'] * n_devs)})"
        assert meta.type == capi.GGML_BACKEND_DEVICE_TYPE_META
        w.allocate(meta).round_trip()
        assert w.size == 64 * 4 * -(-48 // n_devs)  # the largest share
        assert got == [n_devs]
        assert meta.error is None


@pytest.mark.parametrize("n_devs", [0, 17, 100])
def test_other_numbers_of_devices(n_devs):
    with pytest.raises(ValueError, match=f"{n_devs} devices, expected 1 to 16"):
        MetaDevice(["CPU"] * n_devs, mirrored)


def test_devices_may_be_objects_names_and_pointers():
    cpu = device("CPU")
    with MetaDevice([cpu, "cpu", cpu.handle], mirrored) as meta:
        assert meta.devices == (cpu, cpu, cpu)
        assert meta.memory.total == 3 * cpu.memory.total
        assert meta.description == f"Meta({','.join([cpu.description] * 3)})"
        assert repr(meta) == f"<MetaDevice Meta(CPU,CPU,CPU): {meta.description}>"


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        (None, (TypeError, ValueError)),
        ("CPU", TypeError),
        (1, TypeError),
        ([1], TypeError),
        ([None], ValueError),
        (["GPU17"], ValueError),
    ],
)
def test_what_is_no_device(devices, error):
    with pytest.raises(error):
        MetaDevice(devices, mirrored)


def test_a_pointer_to_something_else():
    with device("CPU").init_backend() as backend, pytest.raises(TypeError, match="ggml_backend "):
        MetaDevice([backend.handle], mirrored)


def test_meta_in_meta():
    with MetaDevice(["CPU"], mirrored) as inner:
        for one in (inner, inner.handle, Device(inner.handle)):
            with pytest.raises(ValueError, match=r"devs\[1\] is a meta device"):
                MetaDevice(["CPU", one], mirrored)


@pytest.mark.parametrize("function", [None, 1, {"axis": 10}])
def test_what_is_no_function(function):
    with pytest.raises(TypeError, match="split_fn is"):
        MetaDevice(["CPU"], function)
    with pytest.raises(TypeError, match="split_fn is"):
        capi.ggml_backend_meta_device([device("CPU").handle], function)


def test_what_is_no_on_error():
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        MetaDevice(["CPU"], mirrored, on_error="ignore")


def test_the_same_arguments_make_another_device():
    with MetaDevice(["CPU"], mirrored) as a, MetaDevice(["CPU"], mirrored) as b:
        assert a != b


def test_a_meta_device_supports_what_its_devices_do():
    with weights(w=W) as w, MetaDevice(["CPU", "CPU"], mirrored) as meta:
        product = capi.ggml_mul_mat(w.ctx, w.tensors["w"], w.tensors["w"])
        assert meta.supports_op(product)


# --- what is asked


def test_what_the_function_is_told():
    got = {}

    def split(info, n):
        got[info.name] = info
        return MIRRORED

    with MetaDevice(["CPU"], split) as meta, weights(a=(F32, 7), b=(Q4_0, 64, 3, 2)) as w:
        capi.ggml_set_param(w.tensors["a"])
        w.allocate(meta)
    a, b = got["a"], got["b"]
    assert isinstance(a, TensorInfo)
    assert (a.ne, a.shape, a.type, a.block_size, a.nbytes) == ((7, 1, 1, 1), (7,), F32, 1, 28)
    assert (b.ne, b.shape, b.block_size) == ((64, 3, 2, 1), (2, 3, 64), 32)
    assert b["nbytes"] == 2 * 3 * 2 * 18
    assert type(b.type) is type(Q4_0)
    assert b.type is Q4_0
    assert a.op is capi.GGML_OP_NONE
    assert a.flags == capi.GGML_TENSOR_FLAG_PARAM
    assert b.flags == 0


def test_each_weight_is_asked_about_once():
    asked = []

    def split(info, n):
        asked.append(info.name)
        return rows(info, n)

    with MetaDevice(["CPU", "CPU"], split) as meta, weights(a=W, b=W, c=W) as w:
        w.allocate(meta)
        for _ in range(3):
            w.round_trip()
        assert asked == ["a", "b", "c"]


def test_a_name_that_is_no_utf8():
    asked = []

    def split(info, n):
        asked.append(info.name)
        return MIRRORED

    with MetaDevice(["CPU"], split) as meta, weights(w=W) as w:
        capi.ggml_set_name(w.tensors["w"], "\u00e4" * 40)  # ggml cuts it inside a character
        w.allocate(meta)
    assert asked[0].startswith("\u00e4" * 31)


def test_a_renamed_weight_keeps_its_split():
    asked = []

    def split(info, n):
        asked.append(info.name)
        return rows(info, n) if info.name == "w" else MIRRORED

    with MetaDevice(["CPU", "CPU"], split) as meta, weights(w=W, v=W) as w:
        w.allocate(meta).round_trip()
        capi.ggml_set_name(w.tensors["w"], "renamed")
        w.round_trip()
        assert asked == ["w", "v"]


def test_a_function_that_changes_its_mind():
    answers = iter([rows, mirrored] * 50)

    def split(info, n):
        return next(answers)(info, n)

    with MetaDevice(["CPU", "CPU"], split) as meta, weights(a=W, b=W) as w:
        w.allocate(meta)
        for _ in range(3):
            w.round_trip()
        assert meta.error is None


def test_each_allocation_is_asked_about():
    asked = []

    def split(info, n):
        asked.append(info.name)
        return [rows, mirrored][len(asked) % 2](info, n)

    with MetaDevice(["CPU", "CPU"], split) as meta:
        for _ in range(10):  # contexts at the same address, most likely
            with weights(w=W) as w:
                w.allocate(meta).round_trip()
    assert asked == ["w"] * 10


@pytest.mark.parametrize("axis", [98, 99, SplitAxis.NONE, SplitAxis.UNKNOWN])
def test_no_wish_is_mirrored(axis):
    with MetaDevice(["CPU"] * 2, lambda info, n: {"axis": axis}) as meta, weights(w=W) as w:
        w.allocate(meta).round_trip()
        assert w.size == W_BYTES
        assert meta.error is None
        assert split_function(meta).frozen(address(w.tensors["w"])) == MIRRORED


def address(tensor):
    from ggml_cffi import ffi

    return int(ffi.cast("uintptr_t", tensor))


def test_mappings_as_in_the_c_struct():
    def split(info, n):
        return {"axis": 1, "ne": np.array([16.0, 32.0]), "n_segments": 1, "nr": [1]}

    with MetaDevice(["CPU"] * 2, split) as meta, weights(w=W) as w:
        w.allocate(meta).round_trip()
        assert meta.error is None
        assert w.size == 64 * 4 * 32


# --- on_error="mirror"

BAD = {
    "none": None,
    "text": "mirrored",
    "list": [1, [24, 24]],
    "axis 4": {"axis": 4, "ne": [24, 24]},
    "axis -1": {"axis": -1, "ne": [24, 24]},
    "axis 3": {"axis": 3, "ne": [1, 0]},
    "axis of one element": {"axis": 2, "ne": [1, 0]},
    "sum": {"axis": 1, "ne": [24, 25]},
    "negative": {"axis": 1, "ne": [-24, 72]},
    "negative segments": {"axis": 1, "ne": [24, 24], "n_segments": -1},
    "no segments": {"axis": 1, "ne": [], "n_segments": 0},
    "17 segments": {"axis": 1, "ne": [3] * 16 + [0] * 18, "n_segments": 17},
    "many segments": {"axis": 1, "ne": [24, 24], "n_segments": 2**32 - 1},
    "no repeats": {"axis": 1, "ne": [24, 24], "nr": [0]},
    "many repeats": {"axis": 1, "ne": [24, 24, 0, 0], "n_segments": 2, "nr": [1, 2**32 - 1]},
    "repeats that wrap": {"axis": 1, "ne": [24, 24], "nr": [2**32 + 1]},
    "mirrored segments": {"axis": 10, "ne": [], "n_segments": 2},
    "mirrored repeats": {"axis": 10, "ne": [], "nr": [2]},
    "partial repeats": {"axis": 11, "ne": [], "nr": [2]},
    "too few": {"axis": 1, "ne": [48]},
    "too many": {"axis": 1, "ne": [16, 16, 16]},
    "bool": {"axis": 1, "ne": [47, True]},
    "nan": {"axis": 1, "ne": [float("nan"), 48]},
    "infinite": {"axis": 1, "ne": [float("inf"), 48]},
    "fraction": {"axis": 1, "ne": [23.5, 24.5]},
    "huge": {"axis": 1, "ne": [2**63, 48]},
    "key": {"axis": 1, "ne": [24, 24], "data": 1},
    "no axis": {"ne": [24, 24]},
    "no ne": {"axis": 1},
    "state": SplitState.split(1, [24, 23]),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_mirrors_all_that_follows(bad, caplog):
    asked = []

    def split(info, n):
        asked.append(info.name)
        return BAD[bad] if info.name == "b" else rows(info, n)

    with MetaDevice(["CPU"] * 2, split) as meta, weights(a=W, b=W, c=W) as w:
        with caplog.at_level(logging.INFO, logger="ggml_cffi"):
            w.allocate(meta).round_trip()
        assert asked == ["a", "b"]
        assert isinstance(meta.error, (TypeError, ValueError))
        assert "tensor 'b'" in str(meta.error)
        assert meta.error_tensor == "b"
        assert len(caplog.records) == 1
        assert w.size == W_BYTES * 5 // 2  # half of a, and b and c
        with weights(later=W) as later:
            later.allocate(meta).round_trip()
        assert asked == ["a", "b"]


@pytest.mark.parametrize("ne", [[48, 80], [100, 28]])
def test_slices_that_cut_blocks(ne):
    with MetaDevice(["CPU"] * 2, lambda info, n: {"axis": 0, "ne": ne}) as meta:
        with weights(q=(Q4_0, 128, 3)) as w:
            w.allocate(meta).round_trip()
        assert "multiple of 32, the block size of Q4_0" in str(meta.error)


def test_one_block_for_two_devices():
    """ggml would write the device without a share out of bounds."""
    with MetaDevice(["CPU"] * 2, lambda info, n: {"axis": 0, "ne": [32, 0]}) as meta:
        with weights(q=(Q4_0, 32, 3)) as w:
            w.allocate(meta).round_trip()
        assert "more than one block of 32" in str(meta.error)


def test_partial_is_for_f32():
    with MetaDevice(["CPU"] * 2, lambda info, n: {"axis": 11}) as meta:
        with weights(q=(Q4_0, 64, 3)) as w:
            w.allocate(meta).round_trip()
        assert "the type Q4_0, expected F32" in str(meta.error)


def test_a_partial_weight_is_written_whole():
    """ggml reads all of the data, whatever the size: less would be read out of bounds."""
    with MetaDevice(["CPU"] * 2, lambda info, n: SplitState.partial()) as meta, weights(w=W) as w:
        tensor = w.allocate(meta).tensors["w"]
        data = np.ones(64 * 48, np.float32)
        capi.ggml_backend_tensor_set(tensor, data, 0)
        for part, offset in ((data[:64], 0), (data[64:], 0), (data[64:], 64 * 4)):
            with pytest.raises(ValueError, match="ggml_backend_tensor_set"):
                capi.ggml_backend_tensor_set(tensor, part, offset)


def test_random_answers_never_hurt():
    """Whatever the numbers: ggml gets a valid split, or none."""
    rng = np.random.default_rng(0)

    def number():
        pool = (0, 1, 2, 3, 8, 12, 16, 24, 32, 48, -1, 2**31, 2**32, 2**63, 0.5, True, None)
        return pool[int(rng.integers(len(pool)))]

    def split(info, n):
        n_segments = int(rng.integers(1, 4))
        return {
            "axis": (0, 1, 2, 3, 10, 11, 98, 4)[int(rng.integers(8))],
            "ne": [number() for _ in range(n * n_segments)],
            "n_segments": n_segments if rng.random() < 0.9 else number(),
            "nr": [max(1, int(rng.integers(3))) for _ in range(n_segments)],
        }

    taken = 0
    for _ in range(150):
        ne = [int(rng.integers(1, 5)) * 8, int(rng.integers(1, 4)), int(rng.integers(1, 3))]
        with MetaDevice(["CPU"] * 2, split) as meta, weights(w=(F32, *ne)) as w:
            w.allocate(meta)
            state = split_function(meta).frozen(address(w.tensors["w"]))
            if state.axis != SplitAxis.PARTIAL:  # that one cannot be read back
                w.round_trip()
            taken += meta.error is None
    assert 0 < taken < 150


# --- on_error="raise", and interrupts


def test_raise_comes_out_of_the_allocation():
    fail = True

    def split(info, n):
        if fail and info.name == "b":
            raise ZeroDivisionError("the user's")
        return rows(info, n)

    with MetaDevice(["CPU"] * 2, split, on_error="raise") as meta, weights(a=W, b=W) as w:
        with pytest.raises(SplitError, match=r"tensor 'b': ZeroDivisionError: the user's") as e:
            w.allocate(meta)
        assert isinstance(e.value.__cause__, ZeroDivisionError)
        assert e.value.__cause__.__traceback__ is not None
        assert not w.tensors["a"].buffer  # nothing half done
        assert not w.tensors["a"].data
        assert meta.error is None
        fail = False
        w.allocate(meta).round_trip()
        assert w.size == W_BYTES


def test_raise_with_a_bad_answer():
    with MetaDevice(["CPU"] * 2, lambda info, n: {"axis": 7}, "raise") as meta, weights(w=W) as w:
        with pytest.raises(SplitError, match="axis is 7") as caught:
            w.allocate(meta)
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("on_error", ["mirror", "raise"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_come_out(kind, on_error):
    asked = []
    interrupt = kind("stop")

    def split(info, n):
        asked.append(info.name)
        if len(asked) == 2:
            raise interrupt
        return rows(info, n)

    with MetaDevice(["CPU"] * 2, split, on_error) as meta, weights(a=W, b=W, c=W) as w:
        with pytest.raises(kind) as caught:
            w.allocate(meta)
        assert caught.value is interrupt
        assert asked == ["a", "b"]
        assert meta.error is None
        w.allocate(meta).round_trip()
        assert asked == ["a", "b", "a", "b", "c"]
        assert w.size == W_BYTES * 3 // 2


# --- a function that calls ggml


def test_a_function_that_calls_ggml():
    def split(info, n):
        ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=False)
        a = capi.ggml_new_tensor_2d(ctx, F32, 8, 8)
        capi.ggml_mul_mat(ctx, a, a)
        assert capi.ggml_nbytes(a) == 256
        capi.ggml_free(ctx)
        return rows(info, n)

    with MetaDevice(["CPU"] * 2, split, "raise") as meta, weights(a=W, b=W) as w:
        w.allocate(meta).round_trip()


@pytest.mark.parametrize("caught", [True, False])
def test_a_function_in_which_ggml_gives_up(caught):
    def abort():
        ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
        try:
            a = capi.ggml_new_tensor_2d(ctx, F32, 8, 8)
            b = capi.ggml_new_tensor_2d(ctx, F32, 9, 8)
            capi.ggml_mul_mat(ctx, a, b)
        finally:
            capi.ggml_free(ctx)

    def split(info, n):
        if caught:
            with pytest.raises(AbortError):
                abort()
        else:
            abort()
        return rows(info, n)

    with MetaDevice(["CPU"] * 2, split) as meta, weights(a=W, b=W) as w:
        w.allocate(meta).round_trip()
        if caught:
            assert meta.error is None
            assert w.size == W_BYTES
        else:
            assert isinstance(meta.error, AbortError)
            assert w.size == 2 * W_BYTES


def test_a_function_that_allocates_on_another_meta_device():
    def outer(info, n):
        with weights(w=W) as inside:
            inside.allocate(inner).round_trip()
        return rows(info, n)

    with MetaDevice(["CPU"] * 3, rows) as inner, MetaDevice(["CPU"] * 2, outer, "raise") as meta:
        with weights(a=W, b=W) as w:
            w.allocate(meta).round_trip()
        assert inner.error is None


def test_a_function_that_asks_itself_without_end():
    def split(info, n):
        inside = Weights(w=W)
        kept.append(inside)
        inside.allocate(meta)
        return rows(info, n)

    kept = []
    with MetaDevice(["CPU"] * 2, split) as meta:
        with weights(w=W) as w:
            w.allocate(meta).round_trip()
        assert isinstance(meta.error, RecursionError)
        for inside in kept:
            inside.free()


def test_a_function_that_reads_the_tensor_it_is_asked_about():
    """Its memory is not there yet: ggml gives up, and the function may live with that."""

    def split(info, n):
        with pytest.raises(AbortError):
            capi.ggml_backend_tensor_get(w.tensors["w"], np.zeros(10, np.float32), 0)
        return rows(info, n)

    with MetaDevice(["CPU"] * 2, split, "raise") as meta, weights(w=W) as w:
        w.allocate(meta).round_trip()


# --- many at once


def test_many_meta_devices():
    def split(share):
        return lambda info, n: SplitState.split(1, [share, 48 - share])

    metas = [MetaDevice(["CPU"] * 2, split(share)) for share in range(49)]
    try:
        for share, meta in enumerate(metas):
            with weights(w=W) as w:
                w.allocate(meta).round_trip()
                assert w.size == 64 * 4 * max(share, 48 - share)
        assert len({address(meta.handle) for meta in metas}) == 49
    finally:
        for meta in metas:
            meta.close()


def test_many_threads():
    barrier = threading.Barrier(8)
    problems = []

    def work(k):
        try:
            barrier.wait(60)
            for _ in range(10):
                with MetaDevice(["CPU"] * (k % 4 + 1), rows) as meta, weights(a=W, b=W) as w:
                    w.allocate(meta).round_trip()
                    assert meta.error is None
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_threads_that_share_one_meta_device():
    barrier = threading.Barrier(8)
    problems = []

    def work(meta, k):
        try:
            barrier.wait(60)
            for i in range(20):
                with weights(**{f"t{k}_{i}": (F32, 64, 8 * (k + 1))}) as w:
                    w.allocate(meta).round_trip()
                    assert w.size == 64 * 4 * 4 * (k + 1)
        except BaseException as error:
            problems.append(error)

    with MetaDevice(["CPU"] * 2, rows, "raise") as meta:
        threads = [threading.Thread(target=work, args=(meta, k)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []


def test_an_error_in_one_thread_leaves_the_others_alone():
    barrier = threading.Barrier(4)
    raised, problems = [], []

    def split(info, n):
        if info.name == "bad":
            raise LookupError(info.name)
        return rows(info, n)

    def work(meta, name):
        barrier.wait(60)
        for _ in range(20):
            with weights(**{name: W}) as w:
                try:
                    w.allocate(meta).round_trip()
                except SplitError:
                    raised.append(name)
                except BaseException as error:
                    problems.append(error)

    with MetaDevice(["CPU"] * 2, split, "raise") as meta:
        threads = [
            threading.Thread(target=work, args=(meta, name)) for name in ("a", "bad", "c", "bad")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    assert raised == ["bad"] * 40


# --- closing


class Big:
    """Stands for a large object that a split function holds."""


def holding(big, fail=False):
    def split(info, n):
        assert big
        if fail:
            raise LookupError("no plan")
        return rows(info, n)

    return split


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("way", ["MetaDevice", "capi"])
def test_close_frees_what_the_function_holds(way, fail):
    big = Big()
    gone = weakref.ref(big)
    if way == "MetaDevice":
        meta = MetaDevice(["CPU"] * 2, holding(big, fail))
        close = meta.close
    else:
        meta = capi.ggml_backend_meta_device([device("CPU").handle] * 2, holding(big, fail))
        close = split_function(meta).close
    del big
    with weights(w=W) as w:
        w.allocate(meta).round_trip()
        assert gone() is not None
        close()
        gc.collect()
        assert gone() is None
        w.round_trip()  # what was allocated stays usable
    if fail:
        assert isinstance(meta.error if way == "MetaDevice" else split_function(meta).error,
                          LookupError)  # fmt: skip


def test_a_closed_meta_device():
    meta = MetaDevice(["CPU"] * 2, rows)
    handle = meta.handle
    with weights(w=W) as w, weights(late=W) as late:
        w.allocate(meta)
        meta.close()
        meta.close()
        assert meta.closed
        assert meta.devices == (device("CPU"),) * 2
        for use in (lambda: meta.handle, lambda: meta.type, lambda: meta.init_backend()):
            with pytest.raises(ValueError, match="the MetaDevice is closed"):
                use()
        with pytest.raises(ValueError, match="the MetaDevice is closed"):
            MetaDevice([meta], rows)
        w.round_trip()
        late.allocate(handle).round_trip()  # ggml still knows the device: it mirrors
        assert late.size == W_BYTES
        assert w.size == W_BYTES // 2


def test_interrupts_while_closing_leave_no_trace_at_exit():
    """An open meta device, a closed latch and an open backend at interpreter exit."""
    code = """
from ggml_cffi.meta import MetaDevice
from ggml_cffi import capi
def split(info, n):
    raise ValueError("no plan")
meta = MetaDevice(["CPU"] * 2, split)
backend = meta.init_backend()
ctx = capi.ggml_init(mem_size=10000, no_alloc=True)
capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 8)
buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
assert isinstance(meta.error, ValueError)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- through capi


def test_capi_takes_a_list_of_devices():
    cpu = capi.ggml_backend_dev_by_name("CPU")
    meta = capi.ggml_backend_meta_device([cpu, cpu], rows)
    assert capi.ggml_backend_dev_type(meta) == capi.GGML_BACKEND_DEVICE_TYPE_META
    with weights(w=W) as w:
        w.allocate(meta).round_trip()
        assert w.size == W_BYTES // 2
    function = split_function(meta)
    assert function.error is None
    assert function.n_devs == 2
    function.close()


@pytest.mark.parametrize(
    ("devs", "error"),
    [
        (None, ValueError),
        ([], ValueError),
        ([None], ValueError),
        ("CPU", TypeError),
        (["CPU"], TypeError),
        (1, TypeError),
    ],
)
def test_capi_refuses(devs, error):
    with pytest.raises(error, match="ggml_backend_meta_device"):
        capi.ggml_backend_meta_device(devs, mirrored)


def test_capi_refuses_seventeen_and_meta():
    cpu = capi.ggml_backend_dev_by_name("CPU")
    with pytest.raises(ValueError, match="17 devices, expected 1 to 16"):
        capi.ggml_backend_meta_device([cpu] * 17, mirrored)
    meta = capi.ggml_backend_meta_device([cpu], mirrored)
    with pytest.raises(ValueError, match=r"devs\[0\] is a meta device"):
        capi.ggml_backend_meta_device([meta], mirrored)


def test_capi_has_the_latch():
    cpu = capi.ggml_backend_dev_by_name("CPU")
    calls = []

    def split(info, n):
        calls.append(info.name)
        raise LookupError("no plan")

    meta = capi.ggml_backend_meta_device([cpu, cpu], split)
    with weights(a=W, b=W) as w:
        w.allocate(meta).round_trip()
        assert w.size == 2 * W_BYTES
    assert calls == ["a"]
    assert isinstance(split_function(meta).error, LookupError)
    assert split_function(meta).tensor_name == "a"


def test_capi_raises():
    cpu = capi.ggml_backend_dev_by_name("CPU")
    meta = capi.ggml_backend_meta_device([cpu], lambda info, n: 1 / 0, on_error="raise")
    with weights(w=W) as w, pytest.raises(SplitError) as caught:
        w.allocate(meta)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_device_without_a_split_function():
    with pytest.raises(ValueError, match="no meta device"):
        split_function(device("CPU"))
