"""Locks are given back whenever an interrupt comes.

Python looks for signals between the steps of its own functions. What takes a lock here is C's, and
has been interrupted by the time that it is done: Python sees that with the next step.
"""

from __future__ import annotations

import collections
import functools
import operator
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cffi
import numpy as np
import pytest

from ggml_cffi import Backend, Context, Graph, MetaDevice, _callbacks, capi, device, rpc
from ggml_cffi._locks import with_all, with_or_without
from ggml_cffi.backend import Turn
from ggml_cffi.meta import policies
from ggml_cffi.training import Trainer

_call = operator.methodcaller("__call__")


@pytest.fixture
def interrupt() -> Iterator[Callable[[], object]]:
    """A function of C's after which the process has been interrupted."""
    ffi = cffi.FFI()
    ffi.cdef("int raise(int);")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield functools.partial(getattr(ffi.dlopen(None), "raise"), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def in_one(*functions: Callable[..., object]) -> Callable[[], list[object]]:
    """A function of C's that calls these, once."""
    return functools.partial(list, map(_call, functions))


def is_free(lock: Any) -> bool:
    """Whether another thread can have it."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout=0.2))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def interrupted_when_taken(lock: Any, interrupt: Callable[[], object]) -> Any:
    """The lock, which is taken and interrupted in one step."""
    take = in_one(lock.acquire, interrupt)
    # called with any arguments: `min` has a key for each, the dictionary makes it by calling `take`
    acquire = functools.partial(min, key=collections.defaultdict(take).__getitem__)
    members = {
        "__enter__": staticmethod(take),  # which partial is not from Python 3.14 on
        "__exit__": lambda *_: lock.release(),
        "acquire": staticmethod(acquire),
        "release": lambda _: lock.release(),
        "locked": lambda _: not is_free(lock),
    }
    return type("Lock", (), members)()


def test_what_the_tests_count_on(interrupt: Callable[[], object]) -> None:
    """A lock that is taken in a line of its own stays taken."""
    real = threading.RLock()
    lock = interrupted_when_taken(real, interrupt)
    taken = False
    with pytest.raises(KeyboardInterrupt):
        taken = lock.acquire(True, -1)
    assert not taken and not is_free(real)
    real.release()


@pytest.mark.parametrize("at", range(3))
def test_all_locks_are_given_back(interrupt: Callable[[], object], at: int) -> None:
    locks = [threading.RLock() for _ in range(3)]
    taken: list[Any] = list(locks)
    taken[at] = interrupted_when_taken(locks[at], interrupt)
    called: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        with_all(taken, functools.partial(called.append, 1))
    assert called == []
    assert all(map(is_free, locks))


def test_locks_are_held_meanwhile_and_given_back_after_any_end() -> None:
    locks = [threading.Lock() for _ in range(3)]
    assert with_all(locks, lambda: [one.locked() for one in locks]) == [True] * 3
    with pytest.raises(ZeroDivisionError):
        with_all(locks, lambda: 1 // 0)
    assert not any(one.locked() for one in locks)


def test_a_lock_that_is_tried_is_given_back(interrupt: Callable[[], object]) -> None:
    lock, called = threading.RLock(), []
    with pytest.raises(KeyboardInterrupt):
        with_or_without(interrupted_when_taken(lock, interrupt), called.append)
    assert called == []
    assert is_free(lock)


def test_a_lock_that_another_thread_has() -> None:
    lock = threading.Lock()
    assert with_or_without(lock, lambda held: (held, lock.locked())) == (True, True)
    with lock:
        assert not with_or_without(lock, lambda held: held)
        assert not with_or_without(lock, lambda held: held, timeout=0.01)
        assert lock.locked()
        with pytest.raises(ZeroDivisionError):
            with_or_without(lock, lambda held: 1 // held)
        threading.Timer(0.05, lock.release).start()
        assert with_or_without(lock, lambda held: held, timeout=60)
        lock.acquire()


def test_locks_are_given_back_after_an_interrupt_at_the_very_end(
    interrupt: Callable[[], object],
) -> None:
    """Python sees it where the function has returned."""
    end = type("End", (), {"__neg__": staticmethod(interrupt)})()
    locks = [threading.RLock() for _ in range(3)]
    calls: list[Callable[[], object]] = [
        lambda: with_all(locks, lambda: -end),
        lambda: with_or_without(locks[0], lambda held: -end),
    ]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert all(map(is_free, locks))


@pytest.mark.parametrize("at", ["one", "two", "shared", "within"])
def test_backends_and_devices_go_on(
    interrupt: Callable[[], object], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whatever their turn is interrupted in."""
    with (
        MetaDevice(["CPU"], policies.mirror()) as meta,
        Backend(meta) as one,
        Backend(device("CPU")) as two,
    ):
        turn, shared = Turn([one, two]), meta._shared
        assert shared is not None
        real = {"one": one._lock, "two": two._lock, "shared": shared._lock}
        owner = {"one": one, "two": two, "shared": shared}
        for _ in range(2):
            called: list[bool] = []
            with monkeypatch.context() as patch:
                if at in owner:
                    patch.setattr(owner[at], "_lock", interrupted_when_taken(real[at], interrupt))
                with pytest.raises(KeyboardInterrupt):
                    turn.take(functools.partial(called.append, True) if at in owner else interrupt)
            assert called == []
            assert all(map(is_free, real.values()))
        assert turn.take(lambda: [is_free(one) for one in real.values()]) == [False] * 3


def test_what_is_closed_is_closed_after_an_interrupt(interrupt: Callable[[], object]) -> None:
    """A lock that were not given back would keep it open for ever."""
    with Context() as ctx:
        x, w = ctx.input((2, 3), name="x"), ctx.from_numpy(np.ones((4, 3), np.float32), name="w")
        ctx.allocate("CPU")
        made = Graph(x @ w.T).compile("CPU", 1)
        trainer = Trainer(x, x @ w.T, loss="mean_squared_error")
        for one in (made, trainer):
            real = one._lock
            one._lock = interrupted_when_taken(real, interrupt)  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                one.close()
            one._lock = real
            assert not one.closed and is_free(real)
            one.close()
            assert one.closed


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python's with statement has a gap there")
def test_callbacks_that_take_the_place_of_others(
    interrupt: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _callbacks.replacing
    monkeypatch.setattr(_callbacks, "replacing", interrupted_when_taken(real, interrupt))
    with Backend(device("CPU")) as backend, pytest.raises(KeyboardInterrupt):
        capi.ggml_backend_cpu_set_abort_callback(backend.handle, None)
    monkeypatch.undo()
    assert is_free(real)


@pytest.mark.rpc
def test_connections_are_opened_after_an_interrupt(
    interrupt: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rpc._connecting
    monkeypatch.setattr(rpc, "_connecting", interrupted_when_taken(real, interrupt))
    with pytest.raises(KeyboardInterrupt):
        rpc.LocalWorkers(1, 1)
    monkeypatch.undo()
    assert is_free(real)
    with rpc.LocalWorkers(1, 1) as workers:
        assert len(workers.devices) == 1


def test_a_graph_is_told_of_its_views_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes between must not make it look as if it had been told."""
    w = np.arange(12, dtype=np.float32).reshape(2, 6)
    ones = np.ones((3, 6), np.float32)
    tell = capi.ggml_backend_buffer_init_tensor

    told: list[object] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def noted(*arguments: Any) -> None:
        told.append(tell(*arguments))

    with MetaDevice(["CPU", "CPU"], policies.mirror()) as meta, Context() as ctx:
        weight = ctx.from_numpy(w, name="w")
        ctx.allocate(meta)
        x = ctx.input((3, 6), name="x")
        first, other = (Graph(y).compile(meta) for y in (x * weight[0], x + weight[1]))
        for n in range(3):
            other(x=ones)
            monkeypatch.setattr(capi, tell.__name__, interrupted)
            with pytest.raises(KeyboardInterrupt):
                first(x=ones)
            monkeypatch.setattr(capi, tell.__name__, noted)
            np.testing.assert_array_equal(first(x=n * ones), n * ones * w[0])
            assert told
            told.clear()
            np.testing.assert_array_equal(first(x=ones), ones * w[0])
            assert not told
            monkeypatch.undo()
