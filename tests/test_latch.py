"""The error latch and the frozen answers of a split function, without a device."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
import weakref

import pytest

from ggml_cffi.errors import SplitError
from ggml_cffi.meta._latch import MAX_NESTING, ErrorLatch, SplitFunction
from ggml_cffi.meta._split import SplitState, TensorInfo

MIRRORED = SplitState.mirrored()
HALVES = SplitState.split(1, [6, 6])


def info(name: str = "w", *ne: int, type_: int = 0) -> TensorInfo:
    return TensorInfo(name, type_, (*(ne or (8, 12)), 1, 1, 1)[:4], op=0, flags=0)


class Asker:
    """Asks like the C callback does, and keeps what is to be raised after the C call."""

    def __init__(self, function, n_devs=2, on_error="mirror"):
        self.split = SplitFunction(function, n_devs, on_error)
        self.raised: list[BaseException] = []

    def __call__(self, tensor, address=1, allocated=False, **more):
        more.setdefault("raise_later", self.raised.append)
        return self.split.answer(tensor, address, allocated, **more)


class Recorder:
    """A split function that answers in turn with what it was given, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, tensor, n_devs):
        self.asked.append(tensor.name)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


# --- frozen answers


def test_the_function_gets_info_and_number_of_devices():
    got = []

    def function(tensor, n_devs):
        got.append((tensor, n_devs))
        return SplitState.split(1, [4, 4, 4])

    asker = Asker(function, n_devs=3)
    tensor = info()
    assert asker(tensor).ne == (4, 4, 4)
    assert got == [(tensor, 3)]


def test_an_answer_is_frozen_from_allocation_on():
    function = Recorder(HALVES, SplitState.split(1, [4, 8]))
    asker = Asker(function)
    assert asker(info()) == HALVES
    for _ in range(3):
        assert asker(info(), allocated=True) == HALVES
    assert function.asked == ["w"]
    assert asker.split.frozen(1) == HALVES


def test_a_renamed_tensor_keeps_its_answer():
    function = Recorder(HALVES, MIRRORED)
    asker = Asker(function)
    asker(info("w"))
    assert asker(info("renamed"), allocated=True) == HALVES
    assert function.asked == ["w"]


def test_a_tensor_that_is_allocated_anew_is_asked_again():
    function = Recorder(HALVES, SplitState.split(1, [4, 8]))
    asker = Asker(function)
    asker(info())
    asker(info(), allocated=True)
    assert asker(info()).ne == (4, 8)
    assert asker(info(), allocated=True).ne == (4, 8)
    assert function.asked == ["w", "w"]


def test_asked_twice_before_its_memory_is_there():
    function = Recorder(HALVES, MIRRORED)
    asker = Asker(function)
    assert asker(info()) == asker(info()) == HALVES
    assert function.asked == ["w"]


def test_another_buffer_means_another_allocation():
    function = Recorder(HALVES, SplitState.split(1, [4, 8]), MIRRORED)
    asker = Asker(function)
    assert asker(info(), buffer=100) == HALVES
    assert asker(info(), buffer=200).ne == (4, 8)
    assert asker(info(), allocated=True, buffer=200).ne == (4, 8)
    assert asker(info(), allocated=True, buffer=300) == MIRRORED


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("other", [info("w", 8, 6), info("w", 8, 12, type_=1)])
def test_an_address_that_is_used_again_for_another_tensor(other, allocated):
    function = Recorder(HALVES, {"axis": 10})
    asker = Asker(function)
    asker(info())
    assert asker(other, allocated=allocated) == MIRRORED
    assert function.asked == ["w", "w"]


def test_an_address_that_is_used_again_for_another_name():
    function = Recorder(HALVES, MIRRORED)
    asker = Asker(function)
    asker(info("old"))
    assert asker(info("new")) == MIRRORED
    assert function.asked == ["old", "new"]


# --- on_error="mirror"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ZeroDivisionError("the user's"), ZeroDivisionError),
        (None, TypeError),
        ("mirrored", TypeError),
        ({"axis": 1, "ne": [8, 8]}, ValueError),
        ({"axis": 1, "ne": [8, True]}, TypeError),
        ({"axis": 4, "ne": [6, 6]}, ValueError),
        (SplitState.split(1, [4, 4, 4]), ValueError),
    ],
)
def test_the_latch_closes(answer, error, caplog):
    function = Recorder(HALVES, answer, HALVES)
    asker = Asker(function)
    with caplog.at_level(logging.DEBUG, logger="ggml_cffi"):
        states = [asker(info(name), address) for address, name in enumerate("abcd")]
    assert states == [HALVES, MIRRORED, MIRRORED, MIRRORED]
    assert function.asked == ["a", "b"]
    assert type(asker.split.error) is error
    assert asker.split.tensor_name == "b"
    assert asker.split.latch.closed
    assert not asker.split.closed
    assert asker.raised == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "ggml_cffi"
    assert "'b'" in record.getMessage()
    assert error.__name__ in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.exc_info is None


def test_nothing_is_printed(capfd):
    Asker(Recorder(ValueError("x\ny")))(info())
    assert capfd.readouterr() == ("", "")


def test_what_was_split_before_stays_split():
    asker = Asker(Recorder(HALVES, ValueError()))
    asker(info("a"), 1)
    asker(info("b"), 2)
    assert asker(info("a"), 1, allocated=True) == HALVES
    assert asker(info("b"), 2, allocated=True) == MIRRORED
    assert asker(info("a"), 1) == MIRRORED  # allocated anew
    assert asker(info("a"), 1, allocated=True) == MIRRORED


def test_the_error_keeps_its_traceback():
    def function(tensor, n_devs):
        return {}[tensor.name]

    asker = Asker(function)
    asker(info())
    assert isinstance(asker.split.error, KeyError)
    frames = traceback.extract_tb(asker.split.error.__traceback__)
    assert [frame.name for frame in frames] == ["function"]


def test_a_latch_keeps_the_first_error():
    latch = ErrorLatch()
    first = ValueError("first")
    assert not latch.closed
    assert latch.error is None
    assert latch.tensor_name is None
    assert latch.close(first, "a")
    assert not latch.close(ValueError("second"), "b")
    assert latch.closed
    assert latch.error is first
    assert latch.tensor_name == "a"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("str() fails")


@pytest.mark.parametrize("on_error", ["mirror", "raise"])
def test_an_error_that_cannot_be_shown(on_error):
    asker = Asker(Recorder(Unprintable()), on_error=on_error)
    assert asker(info()) == MIRRORED
    error = asker.split.error if on_error == "mirror" else asker.raised[0].__cause__
    assert type(error) is Unprintable


def test_a_logging_handler_that_fails():
    class Failing(logging.Handler):
        def emit(self, record):
            raise RuntimeError("no log today")

    handler = Failing()
    logging.getLogger("ggml_cffi").addHandler(handler)
    try:
        asker = Asker(Recorder(ValueError()))
        assert asker(info()) == MIRRORED
    finally:
        logging.getLogger("ggml_cffi").removeHandler(handler)
    assert asker.split.latch.closed
    assert asker.raised == []


# --- on_error="raise"


def test_raise_comes_out_of_the_call():
    cause = ZeroDivisionError("the user's")
    function = Recorder(cause, HALVES)
    asker = Asker(function, on_error="raise")
    assert asker(info()) == MIRRORED
    (error,) = asker.raised
    assert isinstance(error, SplitError)
    assert error.__cause__ is cause
    assert "'w'" in str(error)
    assert "ZeroDivisionError: the user's" in str(error)
    assert asker.split.error is None
    assert asker.split.frozen(1) is None
    assert asker(info()) == HALVES  # the next call asks again
    assert function.asked == ["w", "w"]


def test_raise_with_an_invalid_answer():
    asker = Asker(Recorder({"axis": 1, "ne": [1, 1]}), on_error="raise")
    asker(info())
    (error,) = asker.raised
    assert isinstance(error, SplitError)
    assert isinstance(error.__cause__, ValueError)
    assert "sums up to 2, expected ne[1] = 12" in str(error)


def test_a_failing_call_asks_no_more():
    function = Recorder(HALVES, ValueError(), HALVES)
    asker = Asker(function, on_error="raise")
    asker(info("a"), 1, buffer=100)
    asker(info("b"), 2, buffer=100)
    assert asker(info("c"), 3, buffer=100, failing=True) == MIRRORED
    assert function.asked == ["a", "b"]
    # the buffer is thrown away: in the next one every tensor is asked about, "a" as well
    for address, name in enumerate("abc", start=1):
        assert asker(info(name), address, buffer=100) == HALVES
    assert function.asked == ["a", "b", "a", "b", "c"]


def test_a_failing_call_leaves_other_buffers_alone():
    function = Recorder(HALVES, HALVES, ValueError(), HALVES)
    asker = Asker(function, on_error="raise")
    asker(info("live"), 1, buffer=100)
    asker(info("live"), 1, allocated=True, buffer=100)
    asker(info("other"), 2, buffer=200)
    asker(info("b"), 3, buffer=100)
    assert asker.split.frozen(1) == HALVES
    assert asker.split.frozen(2) == HALVES


# --- what is no Exception


@pytest.mark.parametrize("on_error", ["mirror", "raise"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_come_out_as_they_are(kind, on_error, caplog):
    interrupt = kind()
    function = Recorder(interrupt, HALVES)
    asker = Asker(function, on_error=on_error)
    assert asker(info()) == MIRRORED
    assert asker.raised == [interrupt]
    assert asker.split.error is None
    assert asker.split.frozen(1) is None
    assert not caplog.records
    assert asker(info()) == HALVES


# --- closing


def test_close_drops_the_function():
    class Big:
        pass

    def make():
        big = Big()

        def function(tensor, n_devs):
            assert big
            return HALVES

        return function, weakref.ref(big)

    function, big = make()
    asker = Asker(function)
    asker(info("a"), 1)
    del function
    assert big() is not None
    asker.split.close()
    asker.split.close()
    assert big() is None
    assert asker.split.closed
    assert asker(info("a"), 1, allocated=True) == HALVES  # frozen
    assert asker(info("b"), 2) == MIRRORED
    assert asker(info("a"), 1) == MIRRORED  # allocated anew
    assert asker.raised == []
    assert asker.split.error is None


@pytest.mark.parametrize("chained", [False, True])
def test_close_drops_what_the_traceback_holds(chained):
    class Big:
        pass

    def make():
        big = Big()

        def function(tensor, n_devs):
            inside = [big]
            try:
                raise KeyError(len(inside))
            except KeyError as error:
                if chained:
                    raise ValueError("second") from error
                raise

        return function, weakref.ref(big)

    function, big = make()
    asker = Asker(function)
    asker(info())
    del function
    error = asker.split.error
    assert big() is not None
    assert error.__traceback__ is not None
    asker.split.close()
    gc.collect()
    assert big() is None
    assert asker.split.error is error
    assert asker.split.tensor_name == "w"
    text = "".join(traceback.format_exception(error))
    assert "KeyError" in text
    assert "in function" in text or sys.version_info < (3, 11)  # which has no notes


def test_close_from_inside_the_function():
    def function(tensor, n_devs):
        asker.split.close()
        return HALVES

    asker = Asker(function)
    assert asker(info("a"), 1) == HALVES
    assert asker(info("b"), 2) == MIRRORED


@pytest.mark.parametrize("function", [None, 1, "split", {"axis": 10}])
def test_a_function_that_cannot_be_called(function):
    with pytest.raises(TypeError, match=r"split_fn is .*expected a function"):
        SplitFunction(function, 2)


@pytest.mark.parametrize("on_error", ["", "Mirror", "ignore", None, 0])
def test_another_on_error(on_error):
    with pytest.raises(ValueError, match=r"on_error is .*expected 'mirror' or 'raise'"):
        SplitFunction(Recorder(HALVES), 2, on_error)


# --- a function that leads to further questions, and threads


def test_a_function_that_leads_to_a_question_about_another_tensor():
    def function(tensor, n_devs):
        if tensor.name == "outer":
            assert asker(info("inner"), 2) == MIRRORED
            return HALVES
        return MIRRORED

    asker = Asker(function)
    assert asker(info("outer"), 1) == HALVES
    assert asker.split.error is None
    assert asker.split.frozen(2) == MIRRORED


def test_a_function_that_leads_to_its_own_question():
    def function(tensor, n_devs):
        asker(tensor, 1)
        return HALVES

    asker = Asker(function)
    assert asker(info()) == MIRRORED
    assert "'w' before it had its split" in str(asker.split.error)


def test_a_chain_of_questions_without_end():
    depth = []

    def function(tensor, n_devs):
        depth.append(tensor.name)
        asker(info(), len(depth) + 1)
        return HALVES

    asker = Asker(function)
    assert asker(info()) == MIRRORED
    assert isinstance(asker.split.error, RecursionError)
    assert len(depth) == MAX_NESTING


def test_many_threads():
    barrier = threading.Barrier(8)
    calls = []

    def function(tensor, n_devs):
        calls.append(tensor.name)
        k = len(calls) % 13
        return SplitState.split(1, [k, 12 - k])

    asker = Asker(function)
    seen: list[list[SplitState]] = []

    def work():
        barrier.wait()
        seen.append([asker(info(f"t{i}"), i, allocated=bool(i % 2)) for i in range(200)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asker.split.error is None
    assert len(seen) == 8
    assert all(states == seen[0] for states in seen)  # one answer for a tensor, for all threads


def test_the_lock_is_free_while_the_function_runs():
    inside, go_on = threading.Event(), threading.Event()

    def function(tensor, n_devs):
        if tensor.name == "slow":
            inside.set()
            assert go_on.wait(10)
        return HALVES

    asker = Asker(function)
    states = []
    thread = threading.Thread(target=lambda: states.append(asker(info("slow"), 1)))
    thread.start()
    assert inside.wait(10)
    assert asker(info("quick"), 2) == HALVES
    go_on.set()
    thread.join()
    assert states == [HALVES]


def test_many_threads_close_the_latch_once(caplog):
    barrier = threading.Barrier(8)

    def function(tensor, n_devs):
        barrier.wait(10)
        raise ValueError(tensor.name)

    asker = Asker(function)
    threads = [threading.Thread(target=asker, args=(info(f"t{i}"), i + 1)) for i in range(8)]
    with caplog.at_level(logging.WARNING, logger="ggml_cffi"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert str(asker.split.error) == asker.split.tensor_name
    assert len(caplog.records) == 1
    assert asker.raised == []
    assert all(asker.split.frozen(i + 1) == MIRRORED for i in range(8))
