"""Every kind of function that ggml takes from Python, at every place, tried in every way.

`_callback_places.py` has the places. What makes no sense at one is named there with its reason; the
counts are printed by `test_the_table_is_complete`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _callback_places import (
    PLACES,
    TRIALS,
    CpuAbort,
    Custom,
    Log,
    Place,
    ProcessEnd,
    SchedEval,
    Split,
    SplitMirror,
)
from _compute import Arena, check_product

from ggml_cffi import AbortError, Backend, SplitError, _callbacks, capi, device, ffi

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ANNOTATIONS = Path(__file__).resolve().parent.parent / "ggml" / "annotations"
BOUND = set(capi.__coverage__.bound)
HERE = [place for place in PLACES if place.where[0] in BOUND]


class Broken(Exception):
    """Raised by the callbacks of this module."""


def of(trial: str, *skip: type[Place]) -> Any:
    """Parametrize a test over the places where a trial makes sense."""
    places = [p for p in HERE if trial not in p.without and p is not ProcessEnd and p not in skip]
    return pytest.mark.parametrize("place", places, ids=lambda place: place.__name__)


def registered() -> tuple[int, int, int]:
    """How many functions are registered, and owners of them, and exceptions on their way out."""
    return len(_callbacks._table), len(_callbacks.owners), len(_callbacks._errors)


@pytest.fixture
def made(one_thread: Any) -> Iterator[Callable[[type[Place]], Place]]:
    """Makes a place; in the end nothing is left of it."""
    before, log = registered(), _callbacks.log_receiver
    with Arena(one_thread) as arena:

        def make(place: type[Place], n_threads: int = 1) -> Place:
            if n_threads > 1:
                arena.backend = capi.ggml_backend_cpu_init()
                arena.callback(capi.ggml_backend_free, arena.backend)
                capi.ggml_backend_cpu_set_n_threads(arena.backend, n_threads)
            found = type(place.__name__, (place,), {"n_threads": n_threads})(arena)
            found.on_meta = isinstance(found, Split)
            n_meta.append(found.on_meta)
            return found

        n_meta: list[bool] = []
        yield make
    # ggml never forgets a meta device: the number of its (closed) function stays
    metas = sum(n_meta)
    table, owners, errors = registered()
    assert (owners, errors) == before[1:]
    assert before[0] <= table <= before[0] + 4 * metas
    assert _callbacks.log_receiver is log


# ---- the table


def annotations(name: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ANNOTATIONS / name).read_text(encoding="utf-8"))
    return found


def test_the_table_is_complete() -> None:
    kinds = {k for k, table in annotations("callbacks.toml").items() if table.get("used", True)}
    assert {place.kind for place in PLACES} == kinds
    files = {path.name for path in ANNOTATIONS.glob("*.toml")} - {"rules.toml", "callbacks.toml"}
    places = {
        (function, parameter)
        for file in files
        for function, table in annotations(file).items()
        for parameter in table.get("callbacks", {})
    }
    assert len(places) > 10
    assert places <= {place.where for place in PLACES}
    known = {trial for place in PLACES for trial in place.without}
    assert known <= set(TRIALS)
    tried = Counter(trial for place in HERE for trial in TRIALS if trial not in place.without)
    why = Counter(f"{trial}: {why}" for place in HERE for trial, why in place.without.items())
    print(f"{len(HERE)} places of {len(kinds)} kinds, {sum(tried.values())} trials:", dict(tried))
    print(f"{sum(why.values())} make no sense:", dict(why))
    assert sum(tried.values()) + sum(why.values()) == len(HERE) * len(TRIALS)


def test_function_pointers_in_structs_are_known() -> None:
    """A struct with a place for a function is not overlooked in a new release."""
    found = set()
    for name in ffi.list_types()[1]:
        try:
            ffi.sizeof(f"struct {name}")  # cffi dies of the fields of an opaque struct
        except ffi.error:
            continue
        for field, facts in ffi.typeof(f"struct {name}").fields:
            if "(*)(" in facts.type.cname:
                found.add((name, field))
    taken = {("ggml_cplan", "abort_callback"), ("ggml_opt_params", "get_opt_pars")}
    handed_out = {
        ("ggml_type_traits", "to_float"),
        ("ggml_type_traits", "from_float_ref"),
        ("ggml_type_traits_cpu", "from_float"),
        ("ggml_type_traits_cpu", "vec_dot"),
    }
    assert found <= taken | handed_out


# ---- it works


@of("works")
def test_works(made: Any, place: type[Place]) -> None:
    rig = made(place)
    rig.attach(rig.recorded)
    for _ in range(2):
        result = rig.run()
        assert rig.seen
        rig.check(result)
    assert rig.threads == {threading.get_ident()}
    rig.detach()


@of("works", Log)
def test_is_kept_as_long_as_it_must_be(made: Any, place: type[Place]) -> None:
    rig = made(place)

    def attach() -> weakref.ref[Any]:
        function = lambda *args: rig.recorded(*args)  # noqa: E731
        if rig.lifetime == "call":
            rig.attach(function)
            rig.check(rig.run())
            rig.attach(None)
        else:
            rig.attach(function)
        return weakref.ref(function)

    watch = attach()
    gc.collect()
    assert (watch() is None) == (rig.lifetime == "call")
    if rig.lifetime != "call":
        rig.check(rig.run())
        rig.detach()
        gc.collect()
        assert watch() is None
    assert rig.seen


# ---- what it raises


def raises(place: Place, error: BaseException) -> None:
    """`run` lets `error` itself out, with its traceback."""
    wrapped = isinstance(place, Split) and isinstance(error, Exception)
    wanted = SplitError if wrapped else type(error)
    with pytest.raises(wanted) as caught:
        place.run()
    found: BaseException | None = caught.value
    if wrapped:
        found = caught.value.__cause__
    assert found is error
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "sometimes" in names


@of("exception", Log, SplitMirror)
def test_an_exception_comes_out(made: Any, place: type[Place]) -> None:
    rig = made(place)
    error: Exception | None = Broken(rig.name)
    calls: list[int] = []

    def sometimes(*args: Any) -> Any:
        if error is not None:
            calls.append(1)
            raise error
        return rig.recorded(*args)

    rig.attach(sometimes)
    for number in range(2):
        raises(rig, error)
        assert len(calls) == number + 1, "it was called again in the same call"
    error = None
    rig.check(rig.run())
    rig.detach()


def test_an_exception_in_the_receiver_of_the_log_is_reported(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = made(Log)
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    error = Broken()

    def sometimes(*args: Any) -> None:
        rig.recorded(*args)
        raise error

    rig.attach(sometimes)
    rig.check(rig.run())
    assert reported[0].exc_value is error
    assert reported[0].object is sometimes
    rig.detach()


def test_an_exception_is_latched(made: Any) -> None:
    rig = made(SplitMirror)
    error = Broken()
    calls: list[int] = []

    def sometimes(*args: Any) -> None:
        calls.append(1)
        raise error

    rig.attach(sometimes)
    for _ in range(2):
        assert rig.run() == 8 * 6 * 4
    assert rig.device.error is error
    assert len(calls) == 1
    rig.detach()


@of("wrong type", SplitMirror)
def test_a_wrong_type_is_an_error_and_what_void_returns_is_ignored(
    made: Any, place: type[Place]
) -> None:
    rig = made(place)
    answer: list[object] = []
    rig.attach(lambda *args: answer[-1] if answer else rig.recorded(*args))
    if isinstance(rig, Split):
        for wrong in (None, 3, "rows", {"axis": 1}):
            answer.append(wrong)
            with pytest.raises(SplitError):
                rig.run()
    elif rig.wrong:
        for wrong in rig.wrong:
            answer.append(wrong)
            with pytest.raises((TypeError, KeyError)):
                rig.run()
    else:
        for ignored in (None, 3, "yes", object()):
            rig.attach(lambda *args, ignored=ignored: (rig.recorded(*args), ignored)[1])
            rig.check(rig.run())
            if isinstance(rig, Custom):
                break  # one function for a tensor
    answer.clear()
    rig.check(rig.run())
    rig.detach()


@of("interrupt")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_comes_out(made: Any, place: type[Place], kind: type[BaseException]) -> None:
    rig = made(place)
    error: BaseException | None = kind()

    def sometimes(*args: Any) -> Any:
        if error is not None:
            raise error
        return rig.recorded(*args)

    rig.attach(sometimes)
    raises(rig, error)
    error = None
    rig.check(rig.run())
    rig.detach()


@of("interrupt")
def test_a_signal_comes_out(made: Any, place: type[Place]) -> None:
    rig = made(place)
    send = [True]

    def sometimes(*args: Any) -> Any:
        if send:
            send.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return rig.recorded(*args)

    rig.attach(sometimes)
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    rig.seen.clear()
    rig.check(rig.run())
    rig.detach()


# ---- calls from within


def abort() -> None:
    """A call that aborts inside ggml."""
    ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
    try:
        tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
        with pytest.raises(AbortError):
            capi.ggml_reshape_1d(ctx, tensor, 3)
    finally:
        capi.ggml_free(ctx)


@of("abort inside")
def test_an_abort_that_is_caught_inside_stays_there(made: Any, place: type[Place]) -> None:
    rig = made(place)

    def function(*args: Any) -> Any:
        abort()
        return rig.recorded(*args)

    rig.attach(function)
    rig.check(rig.run())
    assert rig.seen
    rig.detach()


@of("abort inside", Log, SplitMirror)
def test_an_abort_that_is_not_caught_comes_out(made: Any, place: type[Place]) -> None:
    rig = made(place)
    fail = [True]

    def function(*args: Any) -> Any:
        if fail:
            tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
            capi.ggml_reshape_1d(ctx, tensor, 3)
        return rig.recorded(*args)

    ctx = rig.arena.context()
    rig.attach(function)
    with pytest.raises(SplitError if isinstance(rig, Split) else AbortError) as caught:
        rig.run()
    error = caught.value.__cause__ if isinstance(rig, Split) else caught.value
    assert isinstance(error, AbortError)
    assert error.function == "ggml_reshape_1d"
    fail.clear()
    rig.check(rig.run())
    rig.detach()


class Entries(dict[int, Any]):
    """The table of functions; notes what is looked up, which each entry of Python begins with."""

    def __init__(self, table: dict[int, Any], entered: list[int]) -> None:
        super().__init__(table)
        self.entered = entered

    def get(self, key: int, default: Any = None) -> Any:
        self.entered.append(key)
        return super().get(key, default)


@contextlib.contextmanager
def entries() -> Iterator[list[int]]:
    """The userdata of each entry of Python by ggml, but for the log's."""
    entered: list[int] = []
    table = _callbacks._table
    _callbacks._table = Entries(table, entered)
    try:
        yield entered
    finally:
        table.clear()
        table.update(_callbacks._table)
        _callbacks._table = table


@pytest.mark.parametrize("place", [CpuAbort, SchedEval], ids=lambda place: place.__name__)
def test_python_is_not_entered_after_none(made: Any, place: type[Place]) -> None:
    rig = made(place)
    rig.attach(rig.recorded)
    with entries() as entered:
        rig.check(rig.run())
    assert len(entered) == len(rig.seen) > 0
    rig.attach(None)
    with entries() as entered:
        rig.check(rig.run())
    assert entered == []
    rig.detach()


@of("replaced inside")
def test_replaced_from_within(made: Any, place: type[Place]) -> None:
    rig = made(place)
    if rig.lifetime == "call":
        nested: list[int] = []

        def outer(*args: Any) -> Any:
            if not nested:
                nested.append(1)
                rig.nested()
            return rig.recorded(*args)

        rig.attach(outer)
        rig.check(rig.run())
        assert nested
    elif isinstance(rig, Split):

        def closing(*args: Any) -> Any:
            rig.detach()
            return rig.recorded(*args)

        rig.attach(closing)
        assert rig.run() < 8 * 6 * 4  # the answer counts, though nobody is asked any more
        assert len(rig.seen) == 1
    else:
        replaced(rig, None)
        replaced(rig, rig.recorded)
    rig.detach()


def replaced(rig: Place, successor: Any, how: Callable[[Any], object] | None = None) -> None:
    """While it runs, a function is replaced: it is not called again, and let go.

    Without a successor Python is not even entered once that run has ended.
    """
    calls: list[int] = []

    def attach() -> weakref.ref[Any]:
        def function(*args: Any) -> Any:
            calls.append(1)
            (how or rig.attach)(successor)
            return rig.recorded(*args)

        rig.attach(function)
        return weakref.ref(function)

    watch = attach()
    result = rig.run()
    n_calls = len(calls)
    rig.check(result)
    assert n_calls == 1
    gc.collect()
    assert watch() is None
    rig.seen.clear()
    with entries() as entered:
        result = rig.run()
    assert bool(rig.seen) == (successor is not None)
    if successor is not None:
        rig.check(result)
    elif isinstance(rig, Log):
        assert "failed to open" in str(result)
    else:
        rig.check(result)
        assert entered == []
    assert len(calls) == 1


@of("replaced by another thread")
def test_replaced_by_another_thread(made: Any, place: type[Place]) -> None:
    rig = made(place)

    def elsewhere(successor: Any) -> None:
        thread = threading.Thread(target=rig.attach, args=(successor,))
        thread.start()
        thread.join()

    replaced(rig, None, elsewhere)
    replaced(rig, rig.recorded, elsewhere)
    rig.detach()


# ---- owners


@of("owner collected")
def test_nobody_in_python_holds_the_owner(made: Any, place: type[Place]) -> None:
    """The garbage collector runs while C can still call, and where it is calling."""
    rig = made(place)

    def function(*args: Any) -> Any:
        if len(rig.seen) < 2:
            gc.collect()
        return rig.recorded(*args)

    rig.attach(function)
    watch = weakref.ref(function)
    del function
    if isinstance(rig, Split):
        handle = rig.device.handle
        rig.device = None  # ggml keeps the device, and so its function is kept
        gc.collect()
        buft = capi.ggml_backend_dev_buffer_type(handle)
        ctx = rig.arena.context()
        rig.arena.tensor(8, 6, name="w", ctx=ctx)
        capi.ggml_backend_buffer_free(capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft))
        assert len(rig.seen) == 1
        from ggml_cffi.meta import split_function

        split_function(handle).close()
    else:
        gc.collect()
        rig.check(rig.run())
        assert rig.seen
        rig.detach()
    gc.collect()
    assert watch() is None


def test_a_backend_object_is_collected_with_its_callback() -> None:
    backend = Backend(device("CPU"), 1)

    def function() -> bool:
        return False

    capi.ggml_backend_cpu_set_abort_callback(backend.handle, function)
    watch = weakref.ref(function)
    del function
    gc.collect()
    assert watch() is not None
    del backend
    gc.collect()
    assert watch() is None


# ---- worker threads


@pytest.mark.parametrize("fails", [False, True], ids=["works", "raises"])
@of("worker threads", Log)
def test_worker_threads(made: Any, place: type[Place], fails: bool) -> None:
    rig = made(place, n_threads=2)
    here = threading.get_ident()
    error = Broken()
    fail = [1] if fails else []

    def sometimes(*args: Any) -> Any:
        abort()
        if fail and threading.get_ident() != here:
            raise error
        return rig.recorded(*args)

    rig.attach(sometimes)
    if fails:
        for _ in range(2):
            raises(rig, error)
        fail.clear()
        rig.seen.clear()
    for _ in range(2):
        rig.check(rig.run())
    assert len(rig.threads) >= 2
    assert here in rig.threads
    rig.detach()


def test_a_line_that_is_logged_on_a_worker_thread(made: Any, one_thread: Any) -> None:
    """It is logged by a failing call inside of an operation."""
    log = made(Log)
    operation = made(next(place for place in PLACES if place.__name__ == "map_custom1"), 2)
    here = threading.get_ident()
    log.attach(log.recorded)

    def function(*args: Any) -> None:
        if threading.get_ident() != here:
            log.check(log.run())
        operation.recorded(*args)

    operation.attach(function)
    operation.check(operation.run())
    assert log.threads == operation.threads - {here} != set()
    log.detach()
    operation.detach()
    check_product(one_thread)


# ---- the end of the process


END = """
import sys, threading
import numpy as np
from ggml_cffi import AbortError, capi, ffi

def abort(n_threads, bad):
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, n_threads)
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    number = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 8)
    table = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 64, 2)
    rows = capi.ggml_get_rows(ctx, table, capi.ggml_cast(ctx, number, capi.GGML_TYPE_I32))
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, rows)
    capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    indices = np.zeros(8, np.float32)
    indices[bad] = 7
    capi.ggml_backend_tensor_set(number, indices, 0)
    capi.ggml_backend_graph_compute(backend, graph)

def say(*words):
    print(*words, flush=True)

"""

ENDS = {
    "works": "capi.ggml_set_abort_callback(lambda message: say('heard', message))\n",
    "exception": (
        "def function(message):\n"
        "    say('heard', message)\n"
        "    raise KeyError('mine')\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
    "wrong type": (
        "def function(message):\n"
        "    say('heard', message)\n"
        "    return object()\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
    "interrupt": (
        "def function(message):\n"
        "    say('heard', message)\n"
        "    raise KeyboardInterrupt('mine')\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
    "abort inside": (
        "def function(message):\n"
        "    try:\n"
        "        ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)\n"
        "        capi.ggml_reshape_1d(ctx, capi.ggml_new_tensor_1d(ctx, 0, 4), 3)\n"
        "    except AbortError as error:\n"
        "        say('inside', error)\n"
        "    say('heard', message)\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
    "replaced inside": (
        "def function(message):\n"
        "    assert capi.ggml_set_abort_callback(None) is function\n"
        "    say('heard', message)\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
    "worker threads": (
        "here = threading.get_ident()\n"
        "def function(message):\n"
        "    say('heard', message, 'elsewhere' if threading.get_ident() != here else 'here')\n"
        "capi.ggml_set_abort_callback(function)\n"
    ),
}


def test_all_trials_of_the_end_are_there() -> None:
    assert set(ENDS) == set(TRIALS) - set(ProcessEnd.without)


@pytest.mark.parametrize("bad", [":2", "2:"], ids=["this thread", "another"])
@pytest.mark.parametrize("trial", ENDS)
def test_the_end_of_the_process(trial: str, bad: str) -> None:
    """Of 8 indices the thread that computes takes the first two, another one the rest."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{END}{ENDS[trial]}abort(4, np.s_[{bad}])\n"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    status, out, err = ended.returncode, ended.stdout, ended.stderr
    assert status == -signal.SIGABRT
    heard = [line for line in out.splitlines() if line.startswith("heard")]
    assert len(heard) == 1
    assert "GGML_ASSERT" in heard[0]
    if trial in ("exception", "interrupt"):
        assert "mine" in err
    if trial == "abort inside":
        assert "ggml_reshape_1d" in out
    if trial == "worker threads":
        assert heard[0].endswith("here" if bad == ":2" else "elsewhere")
