"""Python functions that ggml calls: what they are given, what they return, and what they raise."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena, check_product
from _release import needs

from ggml_cffi import _callbacks, capi, ffi
from ggml_cffi.errors import GGMLError, GGUFError, StatusError
from ggml_cffi.meta import MetaDevice

NUMBERS = np.arange(12, dtype=np.float32)


class Broken(Exception):
    """Raised by the callbacks of this module."""


@pytest.fixture
def cpu(one_thread: Any) -> Any:
    return one_thread


@pytest.fixture
def arena(cpu: Any) -> Iterator[Arena]:
    gc.collect()  # what other tests have left
    before = len(_callbacks._table)
    with Arena(cpu) as made:
        yield made
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    assert len(_callbacks._table) == before, "a callback outlives what it belongs to"


def array(tensor: Any) -> np.ndarray:
    """The numbers of a contiguous float tensor of the CPU, not copied."""
    count = capi.ggml_nelements(tensor)
    return np.frombuffer(ffi.buffer(ffi.cast("float *", tensor.data), 4 * count), np.float32)


def filled(arena: Arena, *ne: int, times: float = 1.0) -> Any:
    tensor = arena.weight(*ne)
    capi.ggml_backend_tensor_set(tensor, times * NUMBERS[: int(np.prod(ne))], 0)
    return tensor


def compute(arena: Arena, ctx: Any, result: Any) -> np.ndarray:
    capi.ggml_backend_graph_compute(arena.backend, arena.graph(ctx, result))
    return array(result).copy()


def forgotten(owner: Callable[[], Callable[..., Any]]) -> weakref.ref[Any]:
    """Have `owner` give a function away, and look at what becomes of it."""
    return weakref.ref(owner())


# ---- operations written in Python


def one(dst, a, ith, nth):
    assert (ith, nth) == (0, 1)
    array(dst)[:] = 2 * array(a) + 1


def two(dst, a, b, ith, nth):
    array(dst)[:] = array(a) * array(b)


def three(dst, a, b, c, ith, nth):
    array(dst)[:] = array(a) * array(b) - array(c)


def any_number(dst, ith, nth):
    sources = [array(source) for source in dst.src if source]
    array(dst)[:] = np.sum(sources, axis=0)


#: By name: the operation of two tensors, its function, the right result for x and 3x.
CUSTOM: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "map_custom1": (
        lambda ctx, x, y, f: capi.ggml_map_custom1(ctx, x, f),
        one,
        lambda x: 2 * x + 1,
    ),
    "map_custom1_inplace": (
        lambda ctx, x, y, f: capi.ggml_map_custom1_inplace(ctx, x, f),
        one,
        lambda x: 2 * x + 1,
    ),
    "map_custom2": (
        lambda ctx, x, y, f: capi.ggml_map_custom2(ctx, x, y, f),
        two,
        lambda x: 3 * x * x,
    ),
    "map_custom2_inplace": (
        lambda ctx, x, y, f: capi.ggml_map_custom2_inplace(ctx, x, y, f),
        two,
        lambda x: 3 * x * x,
    ),
    "map_custom3": (
        lambda ctx, x, y, f: capi.ggml_map_custom3(ctx, x, y, y, f),
        three,
        lambda x: 3 * x * x - 3 * x,
    ),
    "map_custom3_inplace": (
        lambda ctx, x, y, f: capi.ggml_map_custom3_inplace(ctx, x, y, y, f),
        three,
        lambda x: 3 * x * x - 3 * x,
    ),
    "custom_4d": (
        lambda ctx, x, y, f: capi.ggml_custom_4d(ctx, F32, 4, 3, 1, 1, [x, y, y], f),
        any_number,
        lambda x: 7 * x,
    ),
    "custom_inplace": (
        lambda ctx, x, y, f: capi.ggml_custom_inplace(ctx, x, [y, y], f),
        any_number,
        lambda x: 7 * x,
    ),
}
custom = pytest.mark.parametrize("name", CUSTOM)


@custom
def test_a_custom_operation(arena: Arena, name: str) -> None:
    build, function, expected = CUSTOM[name]
    ctx = arena.context()
    result = build(ctx, filled(arena, 4, 3), filled(arena, 4, 3, times=3), function)
    np.testing.assert_allclose(compute(arena, ctx, result), expected(NUMBERS))


@custom
def test_what_a_custom_operation_raises_comes_out(arena: Arena, name: str) -> None:
    build, function, expected = CUSTOM[name]
    error = Broken(name)
    fail = [True]

    def sometimes(*args):
        if fail:
            raise error
        function(*args)

    ctx = arena.context()
    result = build(ctx, filled(arena, 4, 3), filled(arena, 4, 3, times=3), sometimes)
    graph = arena.graph(ctx, result)
    for _ in range(2):
        with pytest.raises(Broken) as caught:
            capi.ggml_backend_graph_compute(arena.backend, graph)
        assert caught.value is error
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "sometimes" in names
    fail.clear()
    capi.ggml_backend_graph_compute(arena.backend, graph)
    np.testing.assert_allclose(array(result), expected(NUMBERS))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_interrupts_come_out_too(arena: Arena, kind: type[BaseException]) -> None:
    def fail(dst, a, ith, nth):
        raise kind("stop")

    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, filled(arena, 4), fail))
    with pytest.raises(kind, match="stop"):
        capi.ggml_backend_graph_compute(arena.backend, graph)
    check_product(arena.backend)


def test_the_first_of_several_exceptions_comes_out(arena: Arena) -> None:
    ctx, x = arena.context(), filled(arena, 4)

    def numbered(number):
        def fail(dst, a, ith, nth):
            raise Broken(number)

        return fail

    for number in range(3):
        x = capi.ggml_map_custom1(ctx, x, numbered(number))
    graph = arena.graph(ctx, x)
    with pytest.raises(Broken) as caught:
        capi.ggml_backend_graph_compute(arena.backend, graph)
    assert caught.value.args == (0,)
    assert capi.ggml_backend_graph_compute(arena.backend, arena.graph(ctx, filled(arena, 4))) == 0


def test_tasks_on_several_threads(arena: Arena) -> None:
    capi.ggml_backend_cpu_set_n_threads(arena.backend, 2)
    seen: list[tuple[int, int, int]] = []

    def half(dst, a, ith, nth):
        seen.append((ith, nth, threading.get_ident()))
        array(dst)[ith::nth] = 2 * array(a)[ith::nth]

    ctx = arena.context()
    result = capi.ggml_map_custom1(ctx, filled(arena, 4, 3), half, 2)
    np.testing.assert_allclose(compute(arena, ctx, result), 2 * NUMBERS)
    assert sorted(call[:2] for call in seen) == [(0, 2), (1, 2)]
    assert len({thread for _, _, thread in seen}) == 2


def test_an_exception_on_a_thread_of_ggml_comes_out(arena: Arena) -> None:
    capi.ggml_backend_cpu_set_n_threads(arena.backend, 2)
    here = threading.get_ident()

    def fail(dst, a, ith, nth):
        if threading.get_ident() != here:
            raise Broken(ith)

    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, filled(arena, 4, 3), fail, 2))
    for _ in range(2):
        with pytest.raises(Broken):
            capi.ggml_backend_graph_compute(arena.backend, graph)
    check_product(arena.backend)


def test_a_callback_may_compute_itself(arena: Arena) -> None:
    def work(dst, a, ith, nth):
        backend = capi.ggml_backend_cpu_init()
        check_product(backend)
        capi.ggml_backend_free(backend)
        array(dst)[:] = array(a)

    ctx = arena.context()
    result = capi.ggml_map_custom1(ctx, filled(arena, 4), work)
    np.testing.assert_allclose(compute(arena, ctx, result), NUMBERS[:4])


def test_an_exception_inside_a_nested_computation_stays_there(arena: Arena) -> None:
    with Arena(arena.backend) as other:
        backend = capi.ggml_backend_cpu_init()
        other.callback(capi.ggml_backend_free, backend)
        inner = Arena(backend)
        other.enter_context(inner)

        def fail(dst, a, ith, nth):
            raise Broken("inner")

        ctx_inner = inner.context()
        graph = inner.graph(ctx_inner, capi.ggml_map_custom1(ctx_inner, filled(inner, 4), fail))

        def work(dst, a, ith, nth):
            with pytest.raises(Broken, match="inner"):
                capi.ggml_backend_graph_compute(backend, graph)
            array(dst)[:] = array(a)

        ctx = arena.context()
        result = capi.ggml_map_custom1(ctx, filled(arena, 4), work)
        np.testing.assert_allclose(compute(arena, ctx, result), NUMBERS[:4])


def test_a_function_lives_as_long_as_its_context(arena: Arena) -> None:
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    x = filled(arena, 4)

    def attach():
        function = lambda dst, a, ith, nth: one(dst, a, ith, nth)  # noqa: E731
        results.append(capi.ggml_map_custom1(ctx, x, function))
        return function

    results: list[Any] = []
    watch = forgotten(attach)
    gc.collect()
    assert watch() is not None
    with Arena(arena.backend) as inner:
        graph = inner.graph(ctx, results[0])
        capi.ggml_backend_graph_compute(arena.backend, graph)
        np.testing.assert_allclose(array(results[0]), 2 * NUMBERS[:4] + 1)
    capi.ggml_free(ctx)
    gc.collect()
    assert watch() is None


def test_a_function_whose_call_fails_is_forgotten(arena: Arena) -> None:
    def attach():
        function = lambda dst, a, b, ith, nth: None  # noqa: E731
        with pytest.raises(ValueError, match="must not be"):
            capi.ggml_map_custom2(arena.context(), None, arena.tensor(4), function)
        return function

    watch = forgotten(attach)
    gc.collect()
    assert watch() is None


def test_what_is_no_function(arena: Arena) -> None:
    ctx, x = arena.context(), arena.tensor(4)
    for wrong in (3, "print", object()):
        with pytest.raises(TypeError, match=r"ggml_map_custom1: fun"):
            capi.ggml_map_custom1(ctx, x, wrong)
    for nothing in (None, ffi.NULL):
        with pytest.raises(ValueError, match=r"ggml_map_custom1: fun must not be"):
            capi.ggml_map_custom1(ctx, x, nothing)


def test_a_function_that_takes_other_arguments(arena: Arena) -> None:
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, filled(arena, 4), lambda: None))
    with pytest.raises(TypeError, match="positional argument"):
        capi.ggml_backend_graph_compute(arena.backend, graph)


# ---- abort callback of the CPU backend


@pytest.fixture
def chain(arena: Arena) -> Any:
    """A graph of four nodes."""
    ctx, node = arena.context(), filled(arena, 4)
    for _ in range(4):
        node = capi.ggml_sqr(ctx, node)
    return arena.graph(ctx, node)


@pytest.fixture
def stoppable(arena: Arena) -> Iterator[Callable[[Any], None]]:
    """Sets the abort callback of the backend, and takes it back in the end."""
    yield lambda function: capi.ggml_backend_cpu_set_abort_callback(arena.backend, function)
    capi.ggml_backend_cpu_set_abort_callback(arena.backend, None)


def test_the_abort_callback_stops_a_graph(arena: Arena, chain: Any, stoppable: Any) -> None:
    asked = []

    def stop_at_third():
        asked.append(1)
        return len(asked) == 3

    stoppable(stop_at_third)
    with pytest.raises(StatusError) as caught:
        capi.ggml_backend_graph_compute(arena.backend, chain)
    assert caught.value.status == capi.GGML_STATUS_ABORTED
    assert len(asked) == 3
    for go_on in (False, np.bool_(False)):
        stoppable(lambda answer=go_on: answer)
        assert capi.ggml_backend_graph_compute(arena.backend, chain) is capi.GGML_STATUS_SUCCESS
    stoppable(None)
    assert capi.ggml_backend_graph_compute(arena.backend, chain) is capi.GGML_STATUS_SUCCESS
    assert len(asked) == 3


def test_what_the_abort_callback_raises_comes_out(arena: Arena, chain: Any, stoppable: Any) -> None:
    def fail():
        raise Broken("abort callback")

    stoppable(fail)
    with pytest.raises(Broken, match="abort callback"):
        capi.ggml_backend_graph_compute(arena.backend, chain)


def test_an_exception_in_the_abort_callback_stops_the_graph(
    arena: Arena, chain: Any, stoppable: Any
) -> None:
    asked = []

    def fail():
        asked.append(1)
        raise Broken("abort callback")

    stoppable(fail)
    with pytest.raises(Broken):
        capi.ggml_backend_graph_compute(arena.backend, chain)
    assert len(asked) == 1


@pytest.mark.parametrize("wrong", [None, 1, 0, "yes"], ids=repr)
def test_the_abort_callback_must_return_a_bool(
    arena: Arena, chain: Any, stoppable: Any, wrong: object
) -> None:
    stoppable(lambda: wrong)
    with pytest.raises(TypeError, match="must return a bool"):
        capi.ggml_backend_graph_compute(arena.backend, chain)


@pytest.mark.parametrize("successor", [None, lambda: False], ids=["None", "another"])
def test_an_abort_callback_lives_until_it_is_replaced(stoppable: Any, successor: Any) -> None:
    def attach():
        function = lambda: False  # noqa: E731
        stoppable(function)
        return function

    watch = forgotten(attach)
    gc.collect()
    assert watch() is not None
    stoppable(successor)
    gc.collect()
    assert watch() is None


def test_an_abort_callback_goes_with_its_backend() -> None:
    backend = capi.ggml_backend_cpu_init()

    def attach():
        function = lambda: False  # noqa: E731
        capi.ggml_backend_cpu_set_abort_callback(backend, function)
        return function

    watch = forgotten(attach)
    gc.collect()
    assert watch() is not None
    capi.ggml_backend_free(backend)
    gc.collect()
    assert watch() is None


# ---- eval callback of the scheduler


@pytest.fixture
def scheduler(arena: Arena) -> Any:
    made = capi.ggml_backend_sched_new([arena.backend], None, 64, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def named_chain(arena: Arena) -> Any:
    ctx, node = arena.context(), filled(arena, 4)
    for number in range(3):
        node = capi.ggml_set_name(capi.ggml_sqr(ctx, node), f"node {number}")
    return arena.graph(ctx, node, allocate=False)


def test_the_eval_callback_sees_the_nodes(arena: Arena, scheduler: Any) -> None:
    graph = named_chain(arena)
    seen: list[tuple[str, bool]] = []

    def look(tensor, ask):
        name = capi.ggml_get_name(tensor)
        seen.append((name, ask))
        if not ask:
            values.append(array(tensor).copy())
        return name != "node 1" if ask else True

    values: list[np.ndarray] = []
    capi.ggml_backend_sched_set_eval_callback(scheduler, look)
    capi.ggml_backend_sched_graph_compute(scheduler, graph)
    assert seen == [
        ("node 0", True),
        ("node 0", False),
        ("node 1", True),
        ("node 2", True),
        ("node 2", False),
    ]
    np.testing.assert_allclose(values[0], NUMBERS[:4] ** 2)
    np.testing.assert_allclose(values[1], NUMBERS[:4] ** 8)
    capi.ggml_backend_sched_set_eval_callback(scheduler, None)
    capi.ggml_backend_sched_graph_compute(scheduler, graph)
    assert len(seen) == 5


def test_what_the_eval_callback_raises_comes_out(arena: Arena, scheduler: Any) -> None:
    graph = named_chain(arena)

    def fail(tensor, ask):
        raise Broken(capi.ggml_get_name(tensor))

    capi.ggml_backend_sched_set_eval_callback(scheduler, fail)
    with pytest.raises(Broken, match="node 0"):
        capi.ggml_backend_sched_graph_compute(scheduler, graph)
    capi.ggml_backend_sched_set_eval_callback(scheduler, lambda tensor, ask: None)
    with pytest.raises(TypeError, match="must return a bool"):
        capi.ggml_backend_sched_graph_compute(scheduler, graph)
    capi.ggml_backend_sched_set_eval_callback(scheduler, None)
    assert capi.ggml_backend_sched_graph_compute(scheduler, graph) == 0


# ---- comparing two backends


def test_comparing_two_backends(arena: Arena) -> None:
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    ctx = arena.context()
    result = capi.ggml_sqr(ctx, capi.ggml_sqr(ctx, filled(arena, 4)))
    graph = arena.graph(ctx, result)
    seen: list[int] = []

    def same(index, t1, t2):
        np.testing.assert_array_equal(array(t1), array(t2))
        seen.append(index)
        return True

    compare = capi.ggml_backend_compare_graph_backend
    assert compare(arena.backend, other, graph, same) is True
    assert seen == [0, 1]
    compare(arena.backend, other, graph, lambda index, t1, t2: bool(seen.append(index)))
    assert seen == [0, 1, 0]

    def fail(index, t1, t2):
        raise Broken(index)

    with pytest.raises(Broken):
        compare(arena.backend, other, graph, fail)
    compare(arena.backend, other, graph, same, [result])
    assert seen == [0, 1, 0, 1]


# ---- training


@pytest.fixture
def training(arena: Arena, scheduler: Any) -> tuple[Any, Any]:
    """An optimiser of y = w x and a data set of eight, in batches of two."""
    ctx, ctx_compute = arena.context(), arena.context(64 << 20)
    x, weight = arena.tensor(1, 2, name="x", ctx=ctx), arena.tensor(1, 1, name="w", ctx=ctx)
    capi.ggml_set_input(x)
    capi.ggml_set_param(weight)
    arena.allocate(ctx)
    capi.ggml_set_f32(weight, 0.5)
    y = capi.ggml_mul_mat(ctx_compute, weight, x)
    capi.ggml_set_output(y)
    scheduler = capi.ggml_backend_sched_new([arena.backend], None, 2048, False, False)
    arena.callback(capi.ggml_backend_sched_free, scheduler)
    dataset = capi.ggml_opt_dataset_init(F32, F32, 1, 1, 8, 1)
    arena.callback(capi.ggml_opt_dataset_free, dataset)
    for tensor in (capi.ggml_opt_dataset_data(dataset), capi.ggml_opt_dataset_labels(dataset)):
        capi.ggml_set_f32(tensor, 1.0)
    optimizer = capi.ggml_opt_init(
        backend_sched=scheduler,
        ctx_compute=ctx_compute,
        inputs=x,
        outputs=y,
        loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
    )
    arena.callback(capi.ggml_opt_free, optimizer)
    return optimizer, dataset


def test_the_epoch_callbacks(training: tuple[Any, Any]) -> None:
    optimizer, dataset = training
    seen: list[tuple[bool, int, int]] = []

    def look(train, opt_ctx, data, result, ibatch, ibatch_max, t_start_us):
        assert (opt_ctx, data) == (optimizer, dataset)
        assert 0 < t_start_us <= capi.ggml_time_us()
        seen.append((train, ibatch, ibatch_max))

    results = [capi.ggml_opt_result_init() for _ in range(2)]
    capi.ggml_opt_epoch(optimizer, dataset, *results, 6, look, look)
    assert seen == [(True, 1, 3), (True, 2, 3), (True, 3, 3), (False, 1, 1)]
    assert [capi.ggml_opt_result_ndata(result) for result in results] == [6, 2]
    capi.ggml_opt_epoch(optimizer, dataset, *results, 6, callback_eval=look)
    assert len(seen) == 5
    for result in results:
        capi.ggml_opt_result_free(result)


@pytest.mark.parametrize("which", ["callback_train", "callback_eval"])
def test_what_an_epoch_callback_raises_comes_out(training: tuple[Any, Any], which: str) -> None:
    optimizer, dataset = training

    def fail(*args):
        raise Broken(which)

    with pytest.raises(Broken, match=which):
        capi.ggml_opt_epoch(optimizer, dataset, None, None, 6, **{which: fail})
    capi.ggml_opt_epoch(optimizer, dataset, None, None, 6)


# ---- reading a GGUF


@pytest.fixture
def content(arena: Arena) -> bytes:
    gguf = arena.gguf()
    capi.gguf_set_val_u32(gguf, "answer", 42)
    capi.gguf_set_val_str(gguf, "question", "?" * 100)
    data: bytes = capi.gguf_get_meta_data(gguf)
    return data


@needs("gguf_init_from_callback")
def test_a_gguf_from_a_function(content: bytes) -> None:
    asked: list[int] = []

    def read(output, offset, length):
        piece = content[offset : offset + length]
        ffi.memmove(output, piece, len(piece))
        asked.append(length)
        return len(piece)

    gguf = capi.gguf_init_from_callback(read, 16, len(content))
    assert capi.gguf_get_val_u32(gguf, capi.gguf_find_key(gguf, "answer")) == 42
    assert capi.gguf_get_val_str(gguf, capi.gguf_find_key(gguf, "question")) == "?" * 100
    assert max(asked) <= 16
    capi.gguf_free(gguf)


@needs("gguf_init_from_callback")
def test_what_the_reader_raises_comes_out(content: bytes) -> None:
    def fail(output, offset, length):
        raise Broken(offset)

    with pytest.raises(Broken):
        capi.gguf_init_from_callback(fail, 0, len(content))


@needs("gguf_init_from_callback")
def test_a_reader_that_reads_nothing(content: bytes) -> None:
    with pytest.raises(GGUFError):
        capi.gguf_init_from_callback(lambda output, offset, length: 0, 0, len(content))


@pytest.mark.parametrize("wrong", [None, "4", 1.5, -1, 1 << 70], ids=repr)
@needs("gguf_init_from_callback")
def test_a_reader_that_returns_no_number_of_bytes(
    content: bytes, wrong: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        capi.gguf_init_from_callback(lambda output, offset, length: wrong, 0, len(content))
    assert capfd.readouterr().err == ""


@needs("gguf_init_from_callback")
def test_a_reader_that_claims_to_have_read_more(content: bytes) -> None:
    """It wrote nothing behind the buffer; what it returns must not lead ggml there."""
    with pytest.raises((ValueError, RuntimeError)):
        capi.gguf_init_from_callback(lambda output, offset, length: length + 9, 0, len(content))


# ---- near the end of Python's stack


def depths_near_the_end() -> range:
    """How many calls more there may be, up to more than Python allows."""
    frame, used = inspect.currentframe(), 0
    while frame:
        frame, used = frame.f_back, used + 1
    room = sys.getrecursionlimit() - used
    return range(room - 60, room + 2)


def at_depth(depth: int, call: Callable[[], None]) -> None:
    if depth == 0:
        call()
    else:
        at_depth(depth - 1, call)


@pytest.fixture
def nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cffi says where it could not call: pytest's hook has no stack for it either."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


def test_a_function_that_python_has_no_stack_for_is_an_error(
    arena: Arena, capfd: Any, nobody_told: None
) -> None:
    """Where it cannot be entered, or not left, its operation was not done: that is no success."""
    x = filled(arena, 4)
    ctx = arena.context()

    def write(dst: Any, a: Any, ith: int, nth: int) -> None:
        array(dst)[:] = 7

    result = capi.ggml_map_custom1(ctx, x, write, 1)
    graph = arena.graph(ctx, result)
    found = np.empty(4, np.float32)
    succeeded = raised = 0
    for depth in depths_near_the_end():
        capi.ggml_backend_tensor_memset(result, 0, 0, 16)
        try:
            at_depth(depth, lambda: capi.ggml_backend_graph_compute(arena.backend, graph))
        except (RecursionError, GGMLError):  # the latter where there is stack enough to say so
            raised += 1
        else:
            capi.ggml_backend_tensor_get(result, found, 0)
            assert found.tolist() == [7, 7, 7, 7]
            succeeded += 1
    capfd.readouterr()  # cffi says there what it could not do
    assert succeeded > 10 and raised > 1
    capi.ggml_backend_graph_compute(arena.backend, graph)
    assert _callbacks._errors == {}


def allocate_and_free(ctx: Any, backend: Any) -> None:
    capi.ggml_backend_buffer_free(capi.ggml_backend_alloc_ctx_tensors(ctx, backend))


@needs("ggml_backend_meta_device")
def test_a_split_function_that_python_has_no_stack_for_is_an_error(
    capfd: Any, nobody_told: None
) -> None:
    """It is not that the tensor is mirrored without a word: the latch closes, at least."""
    asked = []

    def split(tensor: Any, n_devs: int) -> dict[str, Any]:
        asked.append(tensor.name)
        return {"axis": 1, "ne": [3, 5]}

    silent = 0
    for depth in depths_near_the_end():
        asked.clear()
        device = MetaDevice(["CPU", "CPU"], split)
        backend = capi.ggml_backend_dev_init(device.handle)
        ctx = capi.ggml_init(mem_size=4096, no_alloc=True)
        capi.ggml_new_tensor_2d(ctx, F32, 4, 8)
        try:
            at_depth(depth, functools.partial(allocate_and_free, ctx, backend))
        except (RecursionError, GGMLError):
            pass
        else:
            silent += not asked and device.error is None
        capi.ggml_backend_free(backend)
        device.close()
        capi.ggml_free(ctx)
    capfd.readouterr()
    assert silent == 0
