"""A failed call fails whatever Python runs before its caller hears of it.

A profiler, a signal handler and a `__del__` that the collector runs may call capi and lib on the
same thread, between a C call and the next line of the function around it. Every kind of result is
called with each of them about; what comes out must be what comes out without.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _compute import F32, Arena
from _release import needs

from ggml_cffi import AbortError, GGMLError, StatusError, _runtime, capi, ffi, lib
from ggml_cffi._gen.tables import SPECS
from ggml_cffi.errors import GGUFError

NULL = ffi.NULL


class Case(NamedTuple):
    """A call that fails, and how."""

    kind: str  # of result, or what else is special about it
    call: Callable[[], object]
    error: type[BaseException]
    text: str


class Undone(Exception):
    """What a callback raises."""


def cases(arena: Arena, folder: Path) -> dict[str, Case]:
    """One for each kind of result and way to fail, by the name of the function."""
    ctx = arena.context()
    a, b = arena.tensor(3, 4, ctx=ctx), arena.tensor(4, 4, ctx=ctx)
    ours = arena.context()
    graph = arena.graph(ours, capi.ggml_sqr(ours, arena.weight(4)))
    gguf = arena.gguf()
    wrong = folder / "wrong.gguf"
    wrong.write_bytes(b"not a model at all")
    nowhere = folder / "no folder" / "x.gguf"
    plan = capi.ggml_graph_plan(graph, 1)
    plan.n_threads = 100_000

    def stopped() -> None:
        capi.ggml_backend_cpu_set_abort_callback(arena.backend, lambda: True)
        try:
            capi.ggml_backend_graph_compute(arena.backend, graph)
        finally:
            capi.ggml_backend_cpu_set_abort_callback(arena.backend, None)

    def raising(*_: object) -> int:
        try:
            raise LookupError("why")
        except LookupError as why:
            raise Undone("a callback") from why

    def in_operation() -> None:
        one = arena.context()
        made = capi.ggml_map_custom1(one, arena.weight(8), raising)
        capi.ggml_backend_graph_compute(arena.backend, arena.graph(one, made))

    set_n_threads = capi.ggml_backend_reg_get_proc_address(
        capi.ggml_backend_dev_backend_reg(capi.ggml_backend_get_device(arena.backend)),
        "ggml_backend_set_n_threads",
    )
    null = "must not be NULL or None"
    listed = [
        Case(
            "void", lambda: capi.ggml_set_input(NULL), ValueError, f"ggml_set_input: tensor {null}"
        ),
        Case(
            "number",
            lambda: capi.ggml_nelements(NULL),
            ValueError,
            f"ggml_nelements: tensor {null}",
        ),
        Case(
            "void, frees", lambda: capi.ggml_opt_dataset_free(NULL), ValueError, f"dataset {null}"
        ),
        Case("bool", lambda: capi.ggml_is_contiguous(NULL), ValueError, f"tensor {null}"),
        Case("enum", lambda: capi.ggml_get_unary_op(NULL), ValueError, f"tensor {null}"),
        Case("string", lambda: capi.ggml_get_name(NULL), ValueError, f"tensor {null}"),
        Case(
            "string, a bad enumerator",
            lambda: capi.ggml_type_name(9999),
            ValueError,
            "type is 9999, which is no ggml_type",
        ),
        Case(
            "pointer",
            lambda: capi.ggml_mul_mat(ctx, a, b),
            AbortError,
            r"GGML_ASSERT\(ggml_can_mul_mat",
        ),
        Case(
            "pointer, NULL is an error",
            lambda: capi.gguf_init_from_file(wrong),
            GGUFError,
            "invalid magic characters",
        ),
        Case(
            "pointer, NULL with errno",
            lambda: capi.gguf_init_from_file(nowhere),
            GGUFError,
            "No such file or directory",
        ),
        Case(
            "pointer, NULL is None",
            lambda: capi.ggml_get_tensor(NULL, "x"),
            ValueError,
            f"ctx {null}",
        ),
        Case("struct", lambda: capi.ggml_tallocr_new(NULL), ValueError, f"buffer {null}"),
        Case(
            "success", lambda: capi.ggml_gallocr_reserve(NULL, graph), ValueError, f"galloc {null}"
        ),
        Case(
            "success, false",
            lambda: capi.gguf_write_to_file(gguf, nowhere, False),
            GGMLError,
            "could not be|failed to open",
        ),
        Case(
            "status",
            lambda: capi.ggml_backend_graph_compute(NULL, graph),
            ValueError,
            f"backend {null}",
        ),
        Case("status, not success", stopped, StatusError, "ggml_backend_graph_compute: .*abort"),
        Case(
            "out-parameters", lambda: capi.ggml_unravel_index(NULL, 1), ValueError, f"tensor {null}"
        ),
        Case("string, an abort", lambda: capi.gguf_get_key(gguf, 7), AbortError, "key_id"),
        Case("an array", lambda: capi.ggml_new_tensor(NULL, F32, [1]), ValueError, f"ctx {null}"),
        Case(
            "void, override",
            lambda: capi.gguf_set_arr_data(gguf, "k", capi.GGUF_TYPE_STRING, None),
            ValueError,
            "requires type != GGUF_TYPE_STRING",
        ),
        Case(
            "status, override",
            lambda: capi.ggml_graph_compute(graph, plan),
            ValueError,
            "requires cplan->n_threads <=",
        ),
        Case("an exception of a callback", in_operation, Undone, "^a callback$"),
        Case(
            "the same, a pointer",
            lambda: capi.gguf_init_from_callback(raising, 0, 1000),
            Undone,
            "^a callback$",
        ),
        Case(
            "a callback's setter",
            lambda: capi.ggml_backend_sched_set_eval_callback(NULL, lambda t, ask: True),
            ValueError,
            f"sched {null}",
        ),
        Case(
            "a function pointer",
            lambda: _runtime.invoke("ggml_backend_set_n_threads_t", set_n_threads, NULL, 1),
            AbortError,
            "ggml_backend_is_cpu",
        ),
    ]
    return {case.kind: case for case in listed}


KINDS = [
    "void", "number", "void, frees", "bool", "enum", "string", "string, a bad enumerator",
    "pointer", "pointer, NULL is an error", "pointer, NULL with errno", "pointer, NULL is None",
    "struct", "success", "success, false", "status", "status, not success", "out-parameters",
    "string, an abort", "an array", "void, override", "status, override",
    "an exception of a callback", "the same, a pointer", "a callback's setter",
    "a function pointer",
]  # fmt: skip
#: What not every release has.
NEEDS = {"the same, a pointer": needs("gguf_init_from_callback")}
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS.get(kind, ())) for kind in KINDS]
)


@pytest.fixture
def failing(arena: Arena, tmp_path: Path) -> dict[str, Case]:
    made = cases(arena, tmp_path)
    assert list(made) == KINDS
    return made


def failure(case: Case) -> BaseException:
    """What comes out of the call."""
    try:
        case.call()
    except BaseException as error:
        return error
    pytest.fail(f"the failure of a call was lost: {case.kind}")


def seen(error: BaseException) -> tuple[object, ...]:
    """All that a caller sees of an exception: class, text, cause, context and way."""
    cause, context = error.__cause__, error.__context__
    way = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return (
        type(error), str(error), vars(error), type(cause), str(cause), type(context), str(context),
        error.__suppress_context__, way,
    )  # fmt: skip


class Noise:
    """Calls of all sorts: that succeed, that fail, that log and that leave an error at lib."""

    def __init__(self) -> None:
        self.made = 0
        self._busy = False
        ctx = capi.ggml_init(mem_size=4096, no_alloc=True)
        self._free = weakref.finalize(self, capi.ggml_free, ctx)
        self._tensor = capi.ggml_new_tensor_1d(ctx, F32, 4)
        self._gguf = capi.gguf_init_empty()
        self._free_gguf = weakref.finalize(self, capi.gguf_free, self._gguf)

    def __call__(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            assert capi.ggml_nelements(self._tensor) == 4
            with contextlib.suppress(ValueError):
                capi.ggml_nrows(None)
            with contextlib.suppress(GGUFError):  # logs, and leaves an errno of its own
                capi.gguf_init_from_file("/dev/null/nothing")
            with contextlib.suppress(GGMLError):
                capi.gguf_write_to_file(self._gguf, "/proc/nothing", False)
            assert lib.ggml_nbytes(NULL) == 0
            if self.made % 2:
                lib.ggml_cffi_clear()
            self.made += 1
        finally:
            self._busy = False


@pytest.fixture
def noise() -> Noise:
    return Noise()


# ---- without anything


@each_kind
def test_the_failure_as_it_is(failing: dict[str, Case], kind: str) -> None:
    error = failure(failing[kind])
    assert type(error) is failing[kind].error
    assert error.__context__ is None or error.__context__ is error.__cause__
    with pytest.raises(failing[kind].error, match=failing[kind].text):
        raise error
    assert lib.ggml_cffi_error() == 0


@each_kind
def test_a_failure_leaves_no_circle(failing: dict[str, Case], kind: str) -> None:
    """What a call was given goes with the exception, without the collector."""
    gc.collect()
    gc.disable()
    try:
        error: BaseException | None = failure(failing[kind])
        assert error is not None
        frames = [weakref.ref(error)] if hasattr(error, "__weakref__") else []
        in_capi = [t.tb_frame for t in _steps(error) if "_gen" in t.tb_frame.f_code.co_filename]
        assert all(error not in frame.f_locals.values() for frame in in_capi)
        del error, in_capi
        assert [ref() for ref in frames] == [None] * len(frames)
    finally:
        gc.enable()


def _steps(error: BaseException) -> Iterator[Any]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


@needs("gguf_init_from_callback")
def test_the_private_exception_never_comes_out(failing: dict[str, Case]) -> None:
    private = sys.modules["ggml_cffi._loader"].Failed  # type: ignore[attr-defined]
    for case in failing.values():
        error = failure(case)
        assert not isinstance(error, private)
        assert not isinstance(error.__context__, private)


@needs("gguf_init_from_callback")
def test_a_callbacks_exception_keeps_its_cause(failing: dict[str, Case]) -> None:
    for kind in ("an exception of a callback", "the same, a pointer"):
        error = failure(failing[kind])
        assert isinstance(error.__cause__, LookupError)
        assert "raising" in seen(error)[-1]  # type: ignore[operator]


# ---- with a profiler


@contextlib.contextmanager
def profiled(noise: Noise) -> Iterator[None]:
    def handle(frame: object, event: str, argument: object) -> None:
        if event in ("c_return", "c_exception"):
            noise()

    sys.setprofile(handle)
    try:
        yield
    finally:
        sys.setprofile(None)


@each_kind
def test_a_profiler_that_calls_ggml(failing: dict[str, Case], kind: str, noise: Noise) -> None:
    before = seen(failure(failing[kind]))
    for _ in range(2):  # with an error left at lib, and without
        with profiled(noise):
            error = failure(failing[kind])
        assert seen(error) == before
    assert noise.made >= 2


def test_a_profiler_that_calls_ggml_disturbs_no_call_that_succeeds(
    arena: Arena, noise: Noise
) -> None:
    ctx = arena.context()
    with profiled(noise):
        tensor = capi.ggml_new_tensor_2d(ctx, F32, 3, 4)
        assert capi.ggml_nelements(tensor) == 12
        assert capi.ggml_get_tensor(ctx, "nobody") is None
        assert capi.ggml_set_input(tensor) is None
        assert capi.ggml_unravel_index(tensor, 4) == (1, 1, 0, 0)
        assert capi.ggml_get_name(tensor) == ""
        assert not capi.ggml_is_transposed(tensor)
    assert noise.made > 7


# ---- with a signal


@each_kind
def test_a_signal_handler_that_calls_ggml(
    failing: dict[str, Case], kind: str, noise: Noise
) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = seen(failure(failing[kind]))
    old = signal.signal(signal.SIGALRM, lambda number, frame: noise())
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 3e-4)
    try:
        for _ in range(100):
            error = failure(failing[kind])
            assert seen(error) == before
            if noise.made >= 20:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert noise.made


# ---- with the collector


class Garbage:
    """In a circle of its own; when it is collected it calls ggml, and there is more of it."""

    def __init__(self, noise: Noise, more: list[bool]) -> None:
        self.circle = self
        self.noise, self.more = noise, more

    def __del__(self) -> None:
        if self.more:
            self.noise()
            Garbage(self.noise, self.more)


@each_kind
def test_a_finaliser_that_calls_ggml(failing: dict[str, Case], kind: str, noise: Noise) -> None:
    before = seen(failure(failing[kind]))
    thresholds, more = gc.get_threshold(), [True]
    gc.collect()
    gc.set_threshold(1, 1, 1)
    try:
        Garbage(noise, more)
        for _ in range(3):
            error = failure(failing[kind])
            assert seen(error) == before
    finally:
        more.clear()
        gc.set_threshold(*thresholds)
        gc.collect()
    assert noise.made


# ---- the functions that raise


def test_the_raw_level_does_not_raise(arena: Arena, failing: dict[str, Case]) -> None:
    """Its functions are others than those that capi calls."""
    assert lib.ggml_nelements(NULL) == 0
    assert lib.ggml_cffi_error() != 0
    lib.ggml_cffi_clear()
    assert lib.gguf_init_from_file(b"/nowhere/x.gguf", (False, NULL)) == NULL
    assert lib.ggml_cffi_error() == 0


def test_there_is_one_that_raises_for_each_function() -> None:
    generated = sys.modules["ggml_cffi._gen.capi"]
    for name, spec in SPECS.items():
        made = getattr(generated, f"_c_{name}")
        assert made is _runtime.raising(name, spec.fails)
        assert made.__name__ == name
        assert made is not getattr(lib, name)
