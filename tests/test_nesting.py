"""Calls inside callbacks, failures on other threads, interrupts: nothing gets lost or mixed up.

Each of these was once wrong.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.ma  # now: an interrupt in the midst of its import would be seen
import pytest
from _compute import Arena
from _release import needs

from ggml_cffi import AbortError, Backend, GGUFError, _callbacks, capi, device, ffi, lib

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
            for _ in range(40):
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


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT is a KeyboardInterrupt, also where a shell has started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
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


# ---- where an exception comes out


def test_what_a_worker_raised_after_the_caller_is_not_kept_for_later(
    arena: Arena, cpu: Any
) -> None:
    """The caller's part of the second operation is skipped; its workers' is not."""
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    fail = [True]

    def first(dst: Any, src: Any, ith: int, nth: int) -> None:
        if fail and ith == 0:
            raise KeyError("caller")

    def second(dst: Any, src: Any, ith: int, nth: int) -> None:
        if fail and ith:
            raise ValueError("worker")

    ctx = arena.context()
    middle = capi.ggml_map_custom1(ctx, arena.weight(8), first, 2)
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, middle, second, 2))
    for _ in range(2):
        with pytest.raises(KeyError, match="caller"):
            capi.ggml_backend_graph_compute(cpu, graph)
    fail.clear()
    assert capi.ggml_backend_graph_compute(cpu, graph) is capi.GGML_STATUS_SUCCESS
    assert _callbacks._errors == {}


def test_what_a_worker_raises_before_its_function_begins(
    arena: Arena, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory that runs out on the way into Python: it comes out, and but once."""
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    here = threading.get_ident()
    graph, _, _ = custom(arena, lambda dst, src, ith, nth: None, n_tasks=2)

    class Table(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            if threading.get_ident() != here:
                raise MemoryError("on the way in")
            return super().get(key, default)

    with monkeypatch.context() as patch:
        patch.setattr(_callbacks, "_table", Table(_callbacks._table))
        with pytest.raises(MemoryError, match="on the way in"):
            capi.ggml_backend_graph_compute(cpu, graph)
    assert capi.ggml_backend_graph_compute(cpu, graph) is capi.GGML_STATUS_SUCCESS


@pytest.fixture
def out_of_range(arena: Arena, cpu: Any) -> Callable[[BaseException], Any]:
    """A graph of an operation that raises, and then of a row that is not there: ggml aborts."""
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)

    def build(error: BaseException) -> Any:
        def function(dst: Any, src: Any, ith: int, nth: int) -> None:
            floats(dst)[:] = 7
            raise error

        ctx = arena.context()
        number = capi.ggml_map_custom1(ctx, arena.weight(1), function)
        rows = capi.ggml_get_rows(ctx, arena.weight(4, 2), capi.ggml_cast(ctx, number, I32))
        return arena.graph(ctx, rows)

    return build


def test_an_abort_after_an_exception_names_it_as_its_cause(out_of_range: Any, cpu: Any) -> None:
    error = KeyError("operation")
    graph = out_of_range(error)
    for _ in range(2):
        with pytest.raises(AbortError) as caught:
            capi.ggml_backend_graph_compute(cpu, graph)
        assert caught.value.__cause__ is error
    assert _callbacks._errors == {}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_abort_after_an_interrupt_does_not_hide_it(
    out_of_range: Any, cpu: Any, kind: type[BaseException]
) -> None:
    error = kind()
    with pytest.raises(kind) as caught:
        capi.ggml_backend_graph_compute(cpu, out_of_range(error))
    assert caught.value is error
    assert isinstance(error.__context__, AbortError)
    assert _callbacks._errors == {}


@needs("gguf_init_from_callback")
def test_an_interrupt_after_an_exception_of_the_same_call_is_not_lost() -> None:
    """The reader raises, ggml logs that, and the receiver of the log is interrupted."""

    def read(output: Any, offset: int, length: int) -> int:
        raise KeyError("reader")

    def receive(level: int, text: str) -> None:
        raise KeyboardInterrupt

    capi.ggml_log_set(receive)
    try:
        with pytest.raises(KeyboardInterrupt):
            capi.gguf_init_from_callback(read, 0, 1000)
    finally:
        capi.ggml_log_set(None)
    with pytest.raises(KeyError, match="reader"):
        capi.gguf_init_from_callback(read, 0, 1000)


@needs("gguf_init_from_callback")
def test_a_failing_call_in_the_log_receiver_takes_no_exception_of_the_outer_call() -> None:
    failed = []

    def read(output: Any, offset: int, length: int) -> int:
        raise KeyError("reader")

    def receive(level: int, text: str) -> None:
        with pytest.raises(ValueError, match="must not be NULL"):
            capi.ggml_nelements(None)
        failed.append(text)

    capi.ggml_log_set(receive)
    try:
        for _ in range(2):
            with pytest.raises(KeyError, match="reader"):
                capi.gguf_init_from_callback(read, 0, 1000)
    finally:
        capi.ggml_log_set(None)
    assert failed


def test_what_a_call_in_the_log_receiver_logs_is_not_the_outer_calls(tmp_path: Path) -> None:
    (tmp_path / "outer").write_bytes(b"not a model at all")
    inner = []

    def receive(level: int, text: str) -> None:
        if not inner:
            inner.append(text)
            with pytest.raises(GGUFError, match="nowhere"):
                capi.gguf_init_from_file("/nowhere.gguf")

    capi.ggml_log_set(receive)
    try:
        with pytest.raises(GGUFError, match="invalid magic characters") as caught:
            capi.gguf_init_from_file(tmp_path / "outer")
    finally:
        capi.ggml_log_set(None)
    assert inner
    assert "nowhere" not in str(caught.value)


def test_an_error_that_a_callback_leaves_unread_is_not_the_outer_calls(
    arena: Arena, cpu: Any
) -> None:
    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        lib.ggml_get_data_f32(ffi.NULL)
        assert lib.ggml_cffi_error()

    graph, _, _ = custom(arena, function)
    assert capi.ggml_backend_graph_compute(cpu, graph) is capi.GGML_STATUS_SUCCESS


def test_what_comes_out_of_lib_unread_does_not_come_out_elsewhere(arena: Arena, cpu: Any) -> None:
    fail = [True]

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        if fail:
            raise KeyError("unread")

    graph, _, _ = custom(arena, function)
    lib.ggml_backend_graph_compute(cpu, graph)
    assert lib.ggml_cffi_error()
    with pytest.raises(ValueError, match="must not be NULL"):
        capi.ggml_nelements(None)
    fail.clear()
    assert capi.ggml_backend_graph_compute(cpu, graph) is capi.GGML_STATUS_SUCCESS
    fail.append(True)
    with pytest.raises(KeyError):
        capi.ggml_backend_graph_compute(cpu, graph)
    assert _callbacks._errors == {}


@pytest.mark.parametrize("way", ["unread", "put aside", "on the way"])
def test_what_a_thread_leaves_unread_goes_with_it(arena: Arena, cpu: Any, way: str) -> None:
    """The exception, its traceback and its frames."""
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    raised: list[weakref.ref[BaseException]] = []

    class Unread(Exception):
        pass

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        error = Unread()
        raised.append(weakref.ref(error))
        raise error

    def compute() -> None:
        lib.ggml_backend_graph_compute(cpu, graph)
        if way == "put aside":
            lib.ggml_cffi_keep_error()

    def on_the_way(dst: Any, src: Any, ith: int, nth: int) -> None:
        capi.ggml_backend_graph_compute(other, inner)

    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    capi.ggml_backend_cpu_set_n_threads(other, 1)
    inner, _, _ = custom(arena, function)
    graph, _, _ = custom(arena, on_the_way if way == "on the way" else function)
    for _ in range(5):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    deadline = time.monotonic() + 30
    while True:  # join() returns a moment before the thread has ended
        with pytest.raises(Unread):
            capi.ggml_backend_graph_compute(cpu, graph)
        if not _callbacks._errors or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert _callbacks._errors == {}
    gc.collect()
    assert [watch() for watch in raised if watch() is not None] == []


# ---- functions that are gone


def test_an_operation_whose_function_is_gone_says_so(arena: Arena, cpu: Any) -> None:
    """A copy of a graph outlives the context of its original, but not the functions in it."""
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    result = capi.ggml_map_custom1(ctx, arena.weight(8), lambda dst, src, ith, nth: None)
    copy = capi.ggml_backend_graph_copy(cpu, arena.graph(ctx, result))
    capi.ggml_backend_graph_compute(cpu, copy.graph)
    capi.ggml_free(ctx)
    with pytest.raises(RuntimeError, match="the function behind a ggml_custom1_op_t is gone"):
        capi.ggml_backend_graph_compute(cpu, copy.graph)
    capi.ggml_backend_graph_copy_free(copy)


def test_the_functions_of_a_context_that_is_reset_are_let_go(arena: Arena) -> None:
    ctx = arena.context()
    before = len(_callbacks._table)
    for _ in range(3):
        tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
        capi.ggml_map_custom1(ctx, tensor, lambda dst, src, ith, nth: None)
        assert len(_callbacks._table) == before + 1
        capi.ggml_reset(ctx)
    assert len(_callbacks._table) == before


def test_an_object_at_the_address_of_a_freed_one_keeps_its_functions(arena: Arena) -> None:
    """Another thread may have made it before the first one has let the old functions go."""
    ctx = arena.context()
    tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
    capi.ggml_map_custom1(ctx, tensor, lambda dst, src, ith, nth: None)
    last = _callbacks.newest()
    capi.ggml_map_custom1(ctx, tensor, lambda dst, src, ith, nth: None)
    address = int(ffi.cast("uintptr_t", ctx))
    old, new = _callbacks.owners[address]
    _callbacks.release(ctx, last)
    assert (old.function, old.number in _callbacks._table) == (None, False)
    assert _callbacks.owners[address] == [new]
    assert new.number in _callbacks._table


def test_two_threads_that_set_a_callback_leave_the_one_that_ggml_has(
    arena: Arena, cpu: Any
) -> None:
    graph, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    start = threading.Barrier(2)

    def replace() -> None:
        start.wait()
        for _ in range(200):
            capi.ggml_backend_cpu_set_abort_callback(cpu, lambda: bool(asked.append(1)))

    asked: list[int] = []
    for _ in range(5):
        threads = [threading.Thread(target=replace) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asked.clear()
        capi.ggml_backend_graph_compute(cpu, graph)
        assert asked


def test_schedulers_that_many_threads_make_and_free(
    arena: Arena, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a replaced callback; nobody looks at the table of those without its lock."""
    unlocked: list[str] = []

    class Table(dict[Any, Any]):
        def __getattribute__(self, name: str) -> Any:
            if not _callbacks._lock._is_owned():  # type: ignore[attr-defined]
                unlocked.append(name)
            return super().__getattribute__(name)

    def work() -> None:
        try:
            for _ in range(25):
                sched = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
                capi.ggml_backend_sched_set_eval_callback(sched, lambda node, ask: True)
                capi.ggml_backend_sched_free(sched)
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    table = Table()
    monkeypatch.setattr(_callbacks, "_replaced", table)
    kept = scheduler(arena)
    capi.ggml_backend_sched_set_eval_callback(kept, lambda node, ask: True)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert unlocked == []
    assert len(table) == 1
    capi.ggml_backend_sched_set_eval_callback(kept, None)


def test_an_eval_callback_is_taken_away_though_another_computation_goes_on(
    arena: Arena, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may never be idle: only that of its own scheduler has to end."""
    entered: list[int] = []

    class Table(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            entered.append(key)
            return super().get(key, default)

    def callback(node: Any, ask: bool) -> bool:
        capi.ggml_backend_sched_set_eval_callback(sched, None)
        return True

    def outer(dst: Any, src: Any, ith: int, nth: int) -> None:
        capi.ggml_backend_sched_graph_compute(sched, graph)
        del entered[:]
        capi.ggml_backend_sched_graph_compute(sched, graph)
        n_entered.append(len(entered))

    n_entered: list[int] = []
    sched = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
    capi.ggml_backend_sched_set_eval_callback(sched, callback)
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_scale(ctx, arena.weight(4), 2.0), allocate=False)
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    arena.callback(capi.ggml_backend_sched_free, sched)
    capi.ggml_backend_cpu_set_n_threads(other, 1)
    computation, _, _ = custom(arena, outer)
    with monkeypatch.context() as patch:
        patch.setattr(_callbacks, "_table", Table(_callbacks._table))
        capi.ggml_backend_graph_compute(other, computation)
    assert n_entered == [0]


def test_an_eval_callback_that_comes_after_none_in_the_same_run_stays(arena: Arena) -> None:
    """What waits to take the old one's place must not take the new one's."""
    sched = scheduler(arena)
    seen: list[bool] = []

    def last(node: Any, ask: bool) -> bool:
        seen.append(ask)
        return True

    def first(node: Any, ask: bool) -> bool:
        capi.ggml_backend_sched_set_eval_callback(sched, None)
        capi.ggml_backend_sched_set_eval_callback(sched, last)
        return False

    capi.ggml_backend_sched_set_eval_callback(sched, first)
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_scale(ctx, arena.weight(4), 2.0), allocate=False)
    for _ in range(2):
        capi.ggml_backend_sched_graph_compute(sched, graph)
    assert seen[-2:] == [True, False]


# ---- a backend at work


def test_within_an_operation_its_backend_computes_nothing_else(arena: Arena, cpu: Any) -> None:
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    inner, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(ith)
        with pytest.raises(ValueError, match=r"requires idle.*is computing what this is called by"):
            capi.ggml_backend_graph_compute(cpu, inner)

    graph, _, _ = custom(arena, function)
    capi.ggml_backend_graph_compute(cpu, graph)
    sched = scheduler(arena)
    capi.ggml_backend_sched_graph_compute(sched, custom_unallocated(arena, function))
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    both, _, _ = custom(arena, function, n_tasks=2)
    capi.ggml_backend_graph_compute(cpu, both)
    assert sorted(calls) == [0, 0, 0, 1]
    capi.ggml_backend_graph_compute(cpu, inner)


def custom_unallocated(arena: Arena, function: Callable[..., None]) -> Any:
    ctx = arena.context()
    return arena.graph(ctx, capi.ggml_map_custom1(ctx, arena.weight(8), function), allocate=False)


def test_within_an_abort_callback_its_backend_computes_nothing_else(arena: Arena, cpu: Any) -> None:
    inner, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    calls = []

    def function() -> bool:
        calls.append(1)
        with pytest.raises(ValueError, match="requires idle"):
            capi.ggml_backend_graph_compute(cpu, inner)
        return False

    capi.ggml_backend_cpu_set_abort_callback(cpu, function)
    graph, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    capi.ggml_backend_graph_compute(cpu, graph)
    assert calls


def test_within_an_operation_its_threads_compute_nothing_else(arena: Arena, cpu: Any) -> None:
    """Not for another backend that has the same, nor for a plan with them."""
    pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_default(2))
    arena.callback(capi.ggml_threadpool_free, pool)
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    for backend in (cpu, other):
        capi.ggml_backend_cpu_set_n_threads(backend, 2)
        capi.ggml_backend_cpu_set_threadpool(backend, pool)
    inner, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(ith)
        for use in (
            lambda: capi.ggml_backend_graph_compute(other, inner),
            lambda: capi.ggml_graph_compute(inner, capi.ggml_graph_plan(inner, 2, pool)),
        ):
            with pytest.raises(ValueError, match="the threads are computing"):
                use()
        capi.ggml_graph_compute(inner, capi.ggml_graph_plan(inner, 2))

    graph, _, _ = custom(arena, function, n_tasks=2)
    capi.ggml_backend_graph_compute(cpu, graph)
    assert sorted(calls) == [0, 1]
    for backend in (cpu, other):
        capi.ggml_backend_cpu_set_threadpool(backend, None)
    capi.ggml_backend_graph_compute(other, inner)


def test_within_an_eval_callback_the_backend_computes_and_the_scheduler_does_not(
    arena: Arena, cpu: Any
) -> None:
    inner, _, _ = custom(arena, lambda dst, src, ith, nth: None)
    sched = scheduler(arena)
    calls = []

    def callback(node: Any, ask: bool) -> bool:
        calls.append(ask)
        capi.ggml_backend_graph_compute(cpu, inner)
        for use in (
            lambda: capi.ggml_backend_sched_reset(sched),
            lambda: capi.ggml_backend_sched_reserve(sched, graph),
            lambda: capi.ggml_backend_sched_alloc_graph(sched, graph),
            lambda: capi.ggml_backend_sched_graph_compute(sched, graph),
        ):
            with pytest.raises(ValueError, match="the scheduler is computing"):
                use()
        return True

    graph = custom_unallocated(arena, lambda dst, src, ith, nth: None)
    capi.ggml_backend_sched_set_eval_callback(sched, callback)
    capi.ggml_backend_sched_graph_compute(sched, graph)
    assert calls == [True, False]
    capi.ggml_backend_sched_reset(sched)


def test_a_function_that_leads_to_itself_is_a_recursion_error(arena: Arena, cpu: Any) -> None:
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_scale(ctx, arena.weight(4), 2.0))
    depth = []

    def callback(index: int, t1: Any, t2: Any) -> bool:
        depth.append(index)
        capi.ggml_backend_compare_graph_backend(cpu, other, graph, callback)
        return True

    with pytest.raises(RecursionError):
        callback(0, None, None)
    assert len(depth) > 50
    assert _callbacks._errors == {}


# ---- the garbage collector


class Unreachable:
    """Backends in circles: `collect` frees one of them."""

    def __init__(self) -> None:
        self.backends = [Backend(device("CPU"), 1) for _ in range(3)]
        self.freed: list[Any] = []
        for backend in self.backends:
            weakref.finalize(backend, self.freed.append, 1)

    def collect(self) -> None:
        if self.backends:
            garbage: list[Any] = [self.backends.pop()]
            garbage.append(garbage)
            del garbage
            gc.collect()


def test_what_the_collector_frees_after_a_call_does_not_take_its_error_away(arena: Arena) -> None:
    """It may run right after a call, from Python 3.12 on at any time."""
    unreachable = Unreachable()
    graph, _, _ = custom(arena, lambda dst, src, ith, nth: 1 // 0)
    tensor = arena.tensor(4)
    capi.ggml_backend_cpu_set_n_threads(arena.backend, 1)

    def profile(frame: object, event: str, function: Any) -> None:
        if event == "c_exception" and function.__name__.startswith("ggml_"):
            unreachable.collect()

    sys.setprofile(profile)
    try:
        with pytest.raises(ValueError, match="data_in_host_memory"):
            capi.ggml_set_f32(tensor, 1.0)
        with pytest.raises(AbortError, match="GGML_ASSERT"):
            capi.ggml_backend_tensor_memset(tensor, 0, 0, 16)
        with pytest.raises(ZeroDivisionError):
            capi.ggml_backend_graph_compute(arena.backend, graph)
    finally:
        sys.setprofile(None)
    assert unreachable.freed == [1, 1, 1]


def test_what_the_collector_frees_does_not_take_an_error_of_lib_away(arena: Arena) -> None:
    unreachable = Unreachable()
    graph, _, _ = custom(arena, lambda dst, src, ith, nth: 1 // 0)
    tensor = arena.tensor(4)
    capi.ggml_backend_cpu_set_n_threads(arena.backend, 1)
    for call, text in (
        (lambda: lib.ggml_set_f32(tensor, 1.0), b"data_in_host_memory"),
        (lambda: lib.ggml_backend_tensor_memset(tensor, 0, 0, 16), b"GGML_ASSERT"),
        (lambda: lib.ggml_backend_graph_compute(arena.backend, graph), b""),
    ):
        call()
        unreachable.collect()
        assert lib.ggml_cffi_error() != 0
        assert text in ffi.string(lib.ggml_cffi_error_text())
    assert [type(error) for error in _callbacks.take_raised()] == [ZeroDivisionError]
    assert unreachable.freed == [1, 1, 1]
    lib.ggml_cffi_clear()


def test_the_collector_may_free_an_owner_while_callbacks_are_entered(arena: Arena) -> None:
    """It runs wherever a list or a dictionary grows: a lock that waits for itself would hang."""
    ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
    tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
    capi.ggml_map_custom1(ctx, tensor, lambda dst, src, ith, nth: None)
    freed = threading.Event()

    def free() -> None:
        with _callbacks._lock:
            capi.ggml_free(ctx)
        freed.set()

    threading.Thread(target=free, daemon=True).start()
    assert freed.wait(10)
    assert int(ffi.cast("uintptr_t", ctx)) not in _callbacks.owners
