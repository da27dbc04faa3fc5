"""ggml's log as Python logging: logger "ggml", its levels, whole lines, and no harm done."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _compute import Arena

from ggml_cffi import capi, logs
from ggml_cffi.errors import AbortError, GGUFError

CONT, DEBUG, INFO, WARN, ERROR = (
    capi.GGML_LOG_LEVEL_CONT,
    capi.GGML_LOG_LEVEL_DEBUG,
    capi.GGML_LOG_LEVEL_INFO,
    capi.GGML_LOG_LEVEL_WARN,
    capi.GGML_LOG_LEVEL_ERROR,
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What ggml logs during the test, at any level."""
    caplog.set_level(logging.DEBUG, "ggml")
    return caplog


def fail_to_open(path: str = "/nowhere/x.gguf") -> None:
    with pytest.raises(GGUFError, match="No such file or directory"):
        capi.gguf_init_from_file(path)


def fill(ctx: Any) -> None:
    """Make tensors until ggml warns that the context is full, and aborts."""
    for _ in range(9):
        capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)


def child(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from ggml_cffi import capi\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )


# ---- levels and lines


def test_an_error(lines: pytest.LogCaptureFixture) -> None:
    fail_to_open()
    (record,) = lines.records
    assert record.name == "ggml" and record.levelno == logging.ERROR
    assert record.getMessage().startswith("gguf_init_from_file: failed to open GGUF file")
    assert not record.getMessage().endswith("\n")


def test_a_warning(arena: Arena, lines: pytest.LogCaptureFixture) -> None:
    ctx = arena.context(1024)
    with pytest.raises(AbortError):
        fill(ctx)
    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert "not enough space in the context's memory pool" in record.getMessage()


def test_information_line_by_line(arena: Arena, lines: pytest.LogCaptureFixture) -> None:
    ctx = arena.context()
    tensor = arena.tensor(4, name="100% %s {} \\n größe")
    capi.ggml_graph_print(arena.graph(ctx, capi.ggml_sqr(ctx, tensor), allocate=False))
    messages = [record.getMessage() for record in lines.records]
    assert {record.levelno for record in lines.records} == {logging.INFO}
    assert messages[0] == "=== GRAPH ===" and messages[1] == "n_nodes = 1"
    assert not any("\n" in message for message in messages) and all(messages)
    assert any("100% %s {} \\n größe" in message for message in messages)


def test_text_that_is_no_utf8(arena: Arena, lines: pytest.LogCaptureFixture) -> None:
    ctx, tensor = arena.context(), arena.tensor(4)
    capi.ggml_set_name(tensor, b"\xff\xfe")
    capi.ggml_graph_print(arena.graph(ctx, capi.ggml_sqr(ctx, tensor), allocate=False))
    assert any("\ufffd\ufffd" in record.getMessage() for record in lines.records)


def test_debug_in_pieces_makes_whole_lines(
    arena: Arena, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler writes a node, its sources and the end of the line one by one."""
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    scheduler = capi.ggml_backend_sched_new([arena.backend], None, 64, False, False)
    arena.callback(capi.ggml_backend_sched_free, scheduler)
    ctx = arena.context()
    a, b = arena.tensor(4, 3, name="left"), arena.tensor(4, 5, name="right")
    product = capi.ggml_set_name(capi.ggml_mul_mat(ctx, a, b), "product")
    capi.ggml_backend_sched_alloc_graph(scheduler, arena.graph(ctx, product, allocate=False))
    assert {record.levelno for record in lines.records} == {logging.DEBUG}
    (line,) = [r.getMessage() for r in lines.records if r.getMessage().startswith("node #")]
    assert "product" in line and "left" in line and "right" in line


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_continuations_are_joined(lines: pytest.LogCaptureFixture) -> None:
    for level, text in (
        (WARN, "one"),
        (CONT, " two"),
        (CONT, " three\n"),
        (ERROR, "four\nfive\n\n"),
        (INFO, "begun"),
        (ERROR, "another\n"),
        (CONT, "six\n"),
        (capi.GGML_LOG_LEVEL_NONE, "seven\n"),
    ):
        logs.receive(level, text)
    assert records(lines) == [
        (logging.WARNING, "one two three"),
        (logging.ERROR, "four"),
        (logging.ERROR, "five"),
        (logging.INFO, "begun"),
        (logging.ERROR, "another"),
        (logging.ERROR, "six"),
        (logging.INFO, "seven"),
    ]


def test_a_line_that_never_ends_comes_out_in_the_end(lines: pytest.LogCaptureFixture) -> None:
    logs.receive(INFO, "half a line")
    assert not lines.records
    logs.flush()
    assert records(lines) == [(logging.INFO, "half a line")]


def test_lines_of_two_threads_are_kept_apart(lines: pytest.LogCaptureFixture) -> None:
    logs.receive(INFO, "mine")
    thread = threading.Thread(target=lambda: [logs.receive(INFO, "theirs"), logs.flush()])
    thread.start()
    thread.join()
    logs.receive(CONT, " too\n")
    assert records(lines) == [(logging.INFO, "theirs"), (logging.INFO, "mine too")]


def test_from_another_thread(lines: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=fail_to_open, name="a thread of its own")
    thread.start()
    thread.join()
    assert [record.threadName for record in lines.records] == ["a thread of its own"]


def test_levels_filter(caplog: pytest.LogCaptureFixture, arena: Arena) -> None:
    caplog.set_level(logging.ERROR, "ggml")
    capi.ggml_graph_print(capi.ggml_new_graph(arena.context()))
    fail_to_open()
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


# ---- nothing is printed, nothing is harmed


def test_nothing_is_printed_by_default(tmp_path: Path) -> None:
    result = child("""
        ctx = capi.ggml_init(mem_size=1 << 20)
        capi.ggml_graph_print(capi.ggml_new_graph(ctx))
        for call in (lambda: capi.gguf_init_from_file("nobody"), lambda: capi.ggml_get_f32_1d(
                capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_Q4_0, 32), 0)):
            try:
                call()
            except Exception as error:
                print(type(error).__name__)
    """)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "GGUFError\nAbortError\n"


def test_a_configured_logger_prints_each_line_once() -> None:
    result = child("""
        import logging
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        try:
            capi.gguf_init_from_file("nobody")
        except Exception:
            pass
    """)
    assert result.returncode == 0
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ERROR ggml: gguf_init_from_file: failed to open")


def test_the_reason_is_known_though_nobody_logs() -> None:
    logging.disable(logging.CRITICAL)
    try:
        fail_to_open()
    finally:
        logging.disable(logging.NOTSET)


class Handler(logging.Handler):
    """Does something with each record, and raises what that raises."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act
        self.seen = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.seen += 1
        self.act(record)


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler(lambda record: None)
    logging.getLogger("ggml").addHandler(made)
    yield made
    logging.getLogger("ggml").removeHandler(made)


def test_a_handler_that_raises_does_no_harm(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def act(record: logging.LogRecord) -> None:
        raise ValueError("the handler is broken")

    handler.act = act
    for _ in range(2):
        fail_to_open()
    assert handler.seen == 2
    assert [str(one.exc_value) for one in unraisable] == ["the handler is broken"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_handler_comes_out(handler: Handler, error: type[BaseException]) -> None:
    def act(record: logging.LogRecord) -> None:
        raise error

    handler.act = act
    with pytest.raises(error):
        capi.gguf_init_from_file("/nowhere/x.gguf")
    handler.act = lambda record: None
    fail_to_open()


def test_a_handler_that_uses_ggml(handler: Handler, arena: Arena) -> None:
    """A call inside the log of another changes neither its error nor its reason."""
    ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
    caught: list[str] = []

    def act(record: logging.LogRecord) -> None:
        assert capi.ggml_nelements(a) == 12
        with pytest.raises(AbortError) as abort:
            capi.ggml_mul_mat(ctx, a, b)
        with pytest.raises(ValueError, match="must not be"):
            capi.ggml_nelements(None)
        caught.append(abort.value.function or "")

    handler.act = act
    fail_to_open()
    assert caught == ["ggml_mul_mat"]
    handler.act = lambda record: fail_to_open("/nowhere/else") if handler.seen < 5 else None
    fail_to_open()


def test_a_handler_of_an_abort(handler: Handler, arena: Arena) -> None:
    """ggml logs, the handler calls ggml, and only then ggml aborts."""
    other = arena.tensor(4)
    handler.act = lambda record: capi.ggml_get_name(other)
    ctx = arena.context(1024)
    with pytest.raises(AbortError, match="obj_new") as caught:
        fill(ctx)
    assert caught.value.function == "ggml_new_tensor_1d"
    assert handler.seen == 1


# ---- a receiver in place of logging


def test_a_receiver_of_ones_own(lines: pytest.LogCaptureFixture) -> None:
    got: list[tuple[int, str]] = []
    assert capi.ggml_log_get() is None
    receive = lambda level, text: got.append((level, text))  # noqa: E731
    capi.ggml_log_set(receive)
    try:
        assert capi.ggml_log_get() is receive
        fail_to_open()
    finally:
        capi.ggml_log_set(None)
    assert not lines.records
    ((level, text),) = got
    assert level is ERROR and text.endswith("\n")
    fail_to_open()
    assert len(lines.records) == 1 and len(got) == 1


# ---- the end of the process


def test_the_end_is_silent() -> None:
    """What is left over is freed, or not, without a word; a line that was begun comes out."""
    result = child("""
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.DEBUG)
        from ggml_cffi import logs
        backend = capi.ggml_backend_cpu_init()
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)

        class Last:
            def __del__(self):
                capi.ggml_graph_print(capi.ggml_new_graph(ctx))
                capi.ggml_free(ctx)

        last = Last()
        logs.receive(capi.GGML_LOG_LEVEL_INFO, "begun")
    """)
    assert (result.returncode, result.stderr) == (0, "")
    assert "begun\n" in result.stdout


@pytest.mark.no_sanitizer
def test_the_end_while_a_thread_logs() -> None:
    result = child("""
        import threading, time
        ctx = capi.ggml_init(mem_size=1 << 20)
        graph = capi.ggml_new_graph(ctx)
        started = threading.Event()

        def work():
            while True:
                capi.ggml_graph_print(graph)
                started.set()

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        started.wait()
        time.sleep(0.1)
    """)
    assert (result.returncode, result.stderr) == (0, "")
