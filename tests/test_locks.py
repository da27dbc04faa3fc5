"""Locks are given back whenever an interrupt comes.

Python looks for signals between the steps of its own functions. What takes a lock here is C's, and
has been interrupted by the time that it is done: Python sees that with the next step.
"""

from __future__ import annotations

import collections
import functools
import operator
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cffi
import numpy as np
import pytest

from ggml_cffi import Backend, Context, Graph, MetaDevice, capi, device
from ggml_cffi._locks import with_all, with_or_without
from ggml_cffi.backend import Turn
from ggml_cffi.meta import policies

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
        "__enter__": take,
        "__exit__": lambda *_: lock.release(),
        "acquire": acquire,
        "release": lambda _: lock.release(),
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


def test_backends_and_devices_go_on(interrupt: Callable[[], object]) -> None:
    """Whatever their turn is interrupted in."""
    with (
        MetaDevice(["CPU"], policies.mirror()) as meta,
        Backend(meta) as one,
        Backend(device("CPU")) as two,
    ):
        turn = Turn([one, two])
        shared = meta._shared
        assert shared is not None
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                turn.take(interrupt)
            assert is_free(one._lock) and is_free(two._lock) and is_free(shared._lock)
        assert turn.take(lambda: (shared._lock.locked(), is_free(one._lock))) == (True, False)


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
