"""Counts of handles and aborts, and what becomes of a handle that ggml could not free."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from _compute import Arena, check_product
from _fake_backend import BUFFER, layout_is_known
from leaks.costs import raw_function

from ggml_cffi import (
    Buffer,
    MetaDevice,
    MultiBuffer,
    SplitState,
    _callbacks,
    _handles,
    capi,
    device,
    diagnostics,
    ffi,
    lib,
)
from ggml_cffi._handles import Owned
from ggml_cffi.errors import AbortError, SplitError


class Counts:
    """What has changed since it was made."""

    def __init__(self) -> None:
        gc.collect()
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[dict[str, int], dict[str, int], int]:
        return (
            diagnostics.live_handles(),
            diagnostics.leaked_handles(),
            diagnostics.caught_aborts(),
        )

    @property
    def live(self) -> dict[str, int]:
        return self._changed(0)

    @property
    def lost(self) -> dict[str, int]:
        return self._changed(1)

    def _changed(self, which: Literal[0, 1]) -> dict[str, int]:
        before = self._before[which]
        now = {kind: n - before[kind] for kind, n in self._now()[which].items()}
        return {kind: n for kind, n in now.items() if n}

    @property
    def aborts(self) -> int:
        return self._now()[2] - self._before[2]


@pytest.fixture
def counts() -> Counts:
    return Counts()


# ---- what counts


def test_handles_are_counted_by_type(counts: Counts) -> None:
    backend = capi.ggml_backend_cpu_init()
    ctx = capi.ggml_init(mem_size=4096)
    buffers = [capi.ggml_backend_alloc_buffer(backend, 256) for _ in range(2)]
    assert counts.live == {"ggml_backend": 1, "ggml_context": 1, "ggml_backend_buffer": 2}
    for buffer in buffers:
        capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)
    capi.ggml_backend_free(backend)
    assert counts.live == {}
    assert (counts.lost, counts.aborts) == ({}, 0)


def test_the_raw_level_counts_too(counts: Counts) -> None:
    backend = lib.ggml_backend_cpu_init()
    assert counts.live == {"ggml_backend": 1}
    lib.ggml_backend_free(backend)
    lib.ggml_backend_free(ffi.NULL)
    assert counts.live == {}


def test_what_is_taken_over_counts_once(counts: Counts) -> None:
    with device("CPU").init_backend(1) as backend:
        pointers = [capi.ggml_backend_alloc_buffer(backend.handle, 256) for _ in range(3)]
        with MultiBuffer([MultiBuffer([Buffer(pointers[0]), pointers[1]]), pointers[2]]):
            assert counts.live == {"ggml_backend": 1, "ggml_backend_buffer": 1}
        assert counts.live == {"ggml_backend": 1}
    assert counts.live == {}


def test_what_fails_makes_nothing(arena: Arena, counts: Counts) -> None:
    with pytest.raises(ValueError, match="must not be"):
        capi.ggml_backend_alloc_buffer(None, 256)
    with pytest.raises((MemoryError, RuntimeError)):
        capi.ggml_backend_alloc_buffer(arena.backend, 1 << 60)
    with pytest.raises(ValueError, match="must not be"):
        capi.ggml_opt_result_free(None)
    capi.ggml_free(None)
    assert counts.live == {}
    assert counts.lost == {}


def test_aborts_are_counted(arena: Arena, counts: Counts) -> None:
    ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
    for _ in range(3):
        with pytest.raises(AbortError):
            capi.ggml_mul_mat(ctx, a, b)
    assert counts.aborts == 3
    assert counts.lost == {}


def test_what_is_only_asked_is_no_abort(arena: Arena, counts: Counts) -> None:
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(4)), allocate=False)
    buft = capi.ggml_backend_get_default_buffer_type(arena.backend)
    galloc = capi.ggml_gallocr_new_n([buft] * 3)
    capi.ggml_gallocr_reserve_n(galloc, graph, [2])
    with pytest.raises(ValueError, match="is 3, expected 0 to 2"):
        capi.ggml_gallocr_reserve_n(galloc, graph, [3])
    capi.ggml_gallocr_free(galloc)
    assert counts.aborts == 0


def test_a_gguf_with_its_tensors_counts_as_two(arena: Arena, tmp_path: Any) -> None:
    gguf = arena.gguf()
    capi.gguf_add_tensor(gguf, arena.weight(4))
    capi.gguf_write_to_file(gguf, tmp_path / "x.gguf", False)
    counts = Counts()
    ctx = ffi.new("struct ggml_context **")
    read = capi.gguf_init_from_file(tmp_path / "x.gguf", no_alloc=False, ctx=ctx)
    assert counts.live == {"gguf_context": 1, "ggml_context": 1}
    capi.gguf_free(read)
    capi.ggml_free(ctx[0])
    assert counts.live == {}


# ---- results that nobody gets, because a callback raised in the call that made them


def refuse(info: Any, n_devs: int) -> Any:
    raise KeyError(info.name)


@pytest.fixture
def refusing() -> Iterator[Any]:
    with MetaDevice(["CPU", "CPU"], refuse, on_error="raise") as meta:
        yield meta.init_backend(1)


def test_a_copy_of_a_graph_that_nobody_gets(arena: Arena, refusing: Any) -> None:
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.weight(4)))
    counts = Counts()
    for _ in range(3):
        with pytest.raises(SplitError) as caught:
            capi.ggml_backend_graph_copy(refusing.handle, graph)
        assert isinstance(caught.value.__cause__, KeyError)
    assert counts.live == {}


def test_a_buffer_that_nobody_gets(arena: Arena, refusing: Any) -> None:
    ctx = arena.context()
    tensor = arena.tensor(4, ctx=ctx)
    counts = Counts()
    with pytest.raises(SplitError):
        capi.ggml_backend_alloc_ctx_tensors(ctx, refusing.handle)
    assert counts.live == {}
    assert not tensor.buffer and not tensor.data
    arena.allocate(ctx)  # its tensors stand as if nothing had happened


def test_a_buffer_that_nobody_gets_at_the_raw_level(arena: Arena, refusing: Any) -> None:
    ctx = arena.context()
    arena.tensor(4, ctx=ctx)
    counts = Counts()
    assert not lib.ggml_backend_alloc_ctx_tensors(ctx, refusing.handle)
    assert counts.live == {}
    assert isinstance(_callbacks.take_raised()[0], SplitError)
    lib.ggml_cffi_clear()


# ---- what is known of an object goes with it


def test_nothing_is_remembered_of_what_is_gone(arena: Arena) -> None:
    def split(info: Any, n_devs: int) -> SplitState:
        return SplitState.partial() if info.name == "partial" else SplitState.mirrored()

    before = lib.ggml_cffi_remembered()
    with MetaDevice(["CPU", "CPU"], split) as meta, meta.init_backend(1) as backend:
        with Arena(backend.handle) as on_meta:
            on_meta.weight(4, name="partial")
            sched = capi.ggml_backend_sched_new([arena.backend], None, 64, False, False)
            ctx = on_meta.context()
            graph = on_meta.graph(ctx, capi.ggml_sqr(ctx, on_meta.tensor(4)), allocate=False)
            capi.ggml_backend_sched_alloc_graph(sched, graph)
            # two children's threads, a partial weight, what the scheduler is allocated for
            assert lib.ggml_cffi_remembered() >= before + 4
            capi.ggml_backend_sched_free(sched)
        function = _callbacks.split_function_of(meta.handle)
        assert function is not None
        assert not function._frozen and not function._buffers
    assert lib.ggml_cffi_remembered() == before


@pytest.mark.parametrize("wrapped", [False, True], ids=["freed", "freed with a multi buffer"])
def test_a_tensor_where_a_partial_one_was(arena: Arena, wrapped: bool) -> None:
    """A partial weight is written as a whole; another tensor at its address need not be."""
    memory = ffi.new("char[]", 4096)
    address = ffi.cast("void *", memory)
    meta = MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.partial())
    with meta, meta.init_backend(1) as backend:
        ctx = capi.ggml_init(mem_size=4096, mem_buffer=address, no_alloc=True)
        partial = arena.tensor(4, ctx=ctx)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
        with pytest.raises(ValueError, match="meta_writes"):
            capi.ggml_backend_tensor_set(partial, bytes(4), 0)
        if wrapped:
            buffer = capi.ggml_backend_multi_buffer_alloc_buffer([buffer])
        capi.ggml_backend_buffer_free(buffer)
        capi.ggml_free(ctx)
    ctx = capi.ggml_init(mem_size=4096, mem_buffer=address, no_alloc=True)
    tensor = arena.tensor(4, ctx=ctx)
    assert tensor == partial
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, arena.backend)
    capi.ggml_backend_tensor_set(tensor, np.ones(1, np.float32), 4)
    capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)


def test_a_graph_copy_is_freed_while_something_has_callbacks(arena: Arena) -> None:
    capi.ggml_map_custom1(arena.context(), arena.weight(4), lambda *args: None)
    assert _callbacks.owners
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.weight(4)))
    counts = Counts()
    capi.ggml_backend_graph_copy_free(capi.ggml_backend_graph_copy(arena.backend, graph))
    assert counts.live == {}


def test_a_callback_that_refers_to_its_owner_keeps_it(counts: Counts) -> None:
    def attach() -> weakref.ref[Any]:
        backend = device("CPU").init_backend(1)
        capi.ggml_backend_cpu_set_abort_callback(backend.handle, lambda: backend is None)
        return weakref.ref(backend)

    watch = attach()
    gc.collect()
    kept = watch()
    assert kept is not None and counts.live == {"ggml_backend": 1}
    kept.close()
    del kept
    gc.collect()
    assert watch() is None and counts.live == {}


# ---- handles that are lost


@pytest.fixture
def spoil(need: Any) -> Iterator[Any]:
    """Spoils buffers, so that ggml aborts while it frees them."""
    need(layout_is_known(), "ggml whose private structs are as in _fake_backend.py")
    bad = raw_function("ggml_backend_multi_buffer_set_usage")  # asserts that it is one

    def apply(buffer: Any) -> Any:
        words = ffi.cast("uintptr_t *", buffer)
        words[BUFFER.index("free_buffer")] = int(ffi.cast("uintptr_t", bad))
        return buffer

    yield apply
    _handles._lost.clear()


def test_capi_says_that_a_handle_is_lost(arena: Arena, spoil: Any) -> None:
    buffer = spoil(capi.ggml_backend_alloc_buffer(arena.backend, 256))
    counts = Counts()
    with pytest.raises(AbortError, match=r"; the ggml_backend_buffer is lost$") as caught:
        capi.ggml_backend_buffer_free(buffer)
    assert caught.value.lost == "ggml_backend_buffer"
    assert pickle.loads(pickle.dumps(caught.value)).lost == "ggml_backend_buffer"
    assert counts.live == {"ggml_backend_buffer": -1}
    assert counts.lost == {"ggml_backend_buffer": 1}
    assert counts.aborts == 1
    check_product(arena.backend)


def test_no_other_abort_speaks_of_a_loss(arena: Arena) -> None:
    with pytest.raises(AbortError) as caught:
        capi.ggml_mul_mat(arena.context(), arena.tensor(4, 3), arena.tensor(5, 3))
    assert caught.value.lost == ""
    assert "lost" not in str(caught.value)


def test_callbacks_of_what_is_lost_are_dropped(arena: Arena, spoil: Any) -> None:
    buffer = spoil(capi.ggml_backend_alloc_buffer(arena.backend, 256))
    registration = _callbacks.Registration(lambda: None)
    _callbacks._own(buffer, registration)
    with pytest.raises(AbortError):
        capi.ggml_backend_buffer_free(buffer)
    assert registration.function is None
    assert int(ffi.cast("uintptr_t", buffer)) not in _callbacks.owners


def lost_buffer(backend: Any, spoil: Any, *keep: Any) -> Buffer:
    """A buffer that cannot be freed, and needs its backend and more."""
    pointer = spoil(capi.ggml_backend_alloc_buffer(backend.handle, 256))
    return Buffer(pointer, keep=(backend, *keep))


class Memory:
    """What Python lends."""


def test_close_raises_and_the_object_is_closed(spoil: Any, caplog: Any) -> None:
    backend, memory = device("CPU").init_backend(1), Memory()
    buffer = lost_buffer(backend, spoil, memory)
    watch = weakref.ref(memory)
    with pytest.raises(AbortError, match="the ggml_backend_buffer is lost"):
        buffer.close()
    assert buffer.closed
    buffer.close()  # not again
    with pytest.raises(ValueError, match="the Buffer is closed"):
        buffer.size  # noqa: B018
    del buffer, memory
    counts = Counts()
    backend.close()  # what is lost may still use it: it is not freed
    assert backend.closed
    assert counts.live == {}
    gc.collect()
    assert watch() is not None
    assert caplog.records == []


def test_closing_a_parent_raises_what_a_child_raised(spoil: Any, caplog: Any) -> None:
    """All are closed, and what nothing needs is freed."""
    backend = device("CPU").init_backend(1)
    first = lost_buffer(backend, spoil)
    healthy = Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
    second = lost_buffer(backend, spoil)
    counts = Counts()
    with pytest.raises(AbortError, match="is lost"):
        backend.close()
    assert all(thing.closed for thing in (first, healthy, second, backend))
    assert counts.live == {"ggml_backend_buffer": -3}
    assert counts.lost == {"ggml_backend_buffer": 2}
    (record,) = caplog.records  # the second one's
    assert (record.name, record.levelno) == ("ggml_cffi", logging.ERROR)
    assert "ggml_backend_buffer is lost" in record.getMessage()


def test_a_with_block_raises_too(spoil: Any) -> None:
    backend = device("CPU").init_backend(1)
    buffer = lost_buffer(backend, spoil)
    with pytest.raises(AbortError, match="is lost"), buffer:
        assert not buffer.closed
    assert buffer.closed


@pytest.mark.parametrize("circle", [False, True], ids=["dropped", "in a circle"])
def test_the_collector_logs_and_raises_nothing(
    spoil: Any, circle: bool, caplog: Any, capfd: Any, monkeypatch: Any
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    backend = device("CPU").init_backend(1)
    buffer = lost_buffer(backend, spoil)
    if circle:
        buffer.circle = buffer  # type: ignore[attr-defined]
    counts = Counts()
    del buffer
    gc.collect()
    assert counts.lost == {"ggml_backend_buffer": 1}
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ggml_cffi", logging.ERROR)
    assert "it is lost, with what it needs: ggml_backend_buffer_free: " in record.getMessage()
    assert unraisable == []
    assert capfd.readouterr() == ("", "")
    backend.close()


def test_a_logger_that_fails_is_no_matter(spoil: Any, monkeypatch: Any) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def fail(record: object) -> bool:
        raise RuntimeError("a filter")

    logger = logging.getLogger("ggml_cffi")
    logger.addFilter(fail)
    try:
        lost_buffer(device("CPU").init_backend(1), spoil)
        gc.collect()
    finally:
        logger.removeFilter(fail)
    assert unraisable == []


def test_a_multi_buffer_that_is_lost(spoil: Any) -> None:
    """Its children are with it, and the backend of one of them is kept."""
    backend = device("CPU").init_backend(1)
    child = Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
    multi = MultiBuffer([child])
    spoil(multi.handle)
    words = ffi.cast("uintptr_t *", multi.handle)
    # no multi buffer for ggml any more, so that its own assertion fails
    assert words[BUFFER.index("free_buffer")]
    counts = Counts()
    with pytest.raises(AbortError, match="is lost"):
        multi.close()
    assert multi.closed and child.closed
    backend.close()
    assert counts.live == {"ggml_backend_buffer": -1}
    assert counts.lost == {"ggml_backend_buffer": 1}


# ---- whatever the free function raises


class Thing(Owned[Any]):
    def __init__(self, error: BaseException | None, log: list[Any], *keep: Any) -> None:
        def free(handle: object) -> None:
            log.append(self_name)
            if error is not None:
                raise error

        self_name = f"{type(error).__name__} {len(keep)}"
        super().__init__(self_name, free, keep)


class Broken(Exception):
    """Raised by what frees."""


@pytest.fixture
def forget_lost() -> Iterator[None]:
    yield
    _handles._lost.clear()


@pytest.mark.usefixtures("forget_lost")
def test_an_interrupt_is_not_lost_behind_an_error(caplog: Any) -> None:
    log: list[Any] = []
    parent = Thing(None, log)
    children = [Thing(ValueError("one"), log, parent), Thing(KeyboardInterrupt(), log, parent)]
    with pytest.raises(KeyboardInterrupt):
        parent.close()
    assert all(thing.closed for thing in (*children, parent))
    assert sorted(log) == ["KeyboardInterrupt 1", "ValueError 1"]  # the parent stays
    assert [record.getMessage().endswith("one") for record in caplog.records] == [True]


@pytest.mark.usefixtures("forget_lost")
def test_what_two_need_is_kept_for_the_one_that_is_lost() -> None:
    log: list[Any] = []
    parent = Thing(None, log)
    lost, healthy = Thing(ValueError("lost"), log, parent), Thing(None, log, parent)
    with pytest.raises(ValueError, match="lost"):
        lost.close()
    healthy.close()
    parent.close()
    assert log == ["ValueError 1", "NoneType 1"]


@pytest.mark.usefixtures("forget_lost")
def test_an_error_leaves_no_circle_of_garbage() -> None:
    def free(handle: object) -> None:
        raise Broken(handle)

    thing = Owned("lost", free)
    gc.collect()
    gc.disable()
    try:
        try:
            thing.close()
        except Broken as error:
            watch = weakref.ref(error)
        assert watch() is None
    finally:
        gc.enable()
