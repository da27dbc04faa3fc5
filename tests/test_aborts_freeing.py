"""Freeing what ggml gives up on: it is left as it is, for good, and counted; the process goes on.

The streams and buffers of a device of the tests are poisoned: what frees them calls ggml_abort.
Each case is tried in a process of its own, where nothing but its own handles is counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _fake_backend import poison, require_layout
from _native import compiler

TESTS = Path(__file__).resolve().parent

SETUP = """
import gc, json, logging, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from _compute import F32, Arena, check_product
from _fake_backend import FakeDevice, buffer_type, poison
from _threads import idle, threads_of_process
from ggml_cffi import capi, diagnostics, ffi, lib
from ggml_cffi.errors import AbortError
from ggml_cffi.meta import MetaDevice, SplitState

poisoned = poison(Path(sys.argv[2]))
cpu = capi.ggml_backend_cpu_init()
capi.ggml_backend_cpu_set_n_threads(cpu, 2)
check_product(cpu)
arena = Arena(cpu)
bad_buffers = buffer_type(True, buffer_free=poisoned)
device = FakeDevice("Bad0", buffers=bad_buffers, stream_free=poisoned)
everything = []  # what the graphs and tensors of the cases are made of

def tensors(buffers, n=1):
    ctx = arena.context()
    made = [arena.tensor(8, 4, ctx=ctx) for _ in range(n)]
    return ctx, capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buffers)

def graph():
    ctx = arena.context()
    x = arena.tensor(4, ctx=ctx)
    return arena.graph(ctx, capi.ggml_sqr(ctx, x), allocate=False)

def meta():
    # both kinds, the poisoned first and last
    healthy = capi.ggml_backend_dev_by_name("CPU")
    devices = [device.pointer, healthy, device.pointer]
    return capi.ggml_backend_meta_device(devices, lambda info, n: SplitState.mirrored())

def counts():
    return diagnostics.live_handles(), diagnostics.leaked_handles(), diagnostics.caught_aborts()

def lost(free, *handles):
    # each is a handle less that lives, one more that is lost, an exception and no more
    before, threads = counts(), threads_of_process()
    for handle in handles:
        try:
            free(handle)
        except AbortError as error:
            assert "is poisoned" in error.message and error.file == "poison.c", error
        else:
            raise AssertionError("nothing was raised")
    after = counts()
    assert after[2] - before[2] == len(handles)
    assert idle(threads)
    check_product(cpu)
    changed = {
        what: {kind: n - old[kind] for kind, n in new.items() if n != old[kind]}
        for what, old, new in zip(("live", "leaked"), before, after)
    }
    print(json.dumps(changed))
"""


@pytest.fixture(scope="module")
def process(
    need: Callable[[object, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a case in a process of its own."""
    require_layout()
    need(compiler(), "C compiler")
    library = tmp_path_factory.mktemp("poison") / "poison.so"
    poison(library)

    def run(body: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SETUP + textwrap.dedent(body), str(TESTS), str(library)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )

    return run


@pytest.fixture
def case(process: Callable[[str], subprocess.CompletedProcess[str]]) -> Callable[[str], list[Any]]:
    """What a case, which must not end its process, printed, line by line."""

    def run(body: str) -> list[Any]:
        done = process(body)
        assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


#: Code that makes a handle, the function that frees it, and what kind of handle it is.
CASES = {
    "a buffer of the tensors of a context": (
        "tensors(bad_buffers)[1]",
        "ggml_backend_buffer_free",
        "ggml_backend_buffer",
    ),
    "a buffer of a meta device": (
        "tensors(capi.ggml_backend_dev_buffer_type(meta()))[1]",
        "ggml_backend_buffer_free",
        "ggml_backend_buffer",
    ),
    "a bare buffer of a meta device": (
        "capi.ggml_backend_buft_alloc_buffer(capi.ggml_backend_dev_buffer_type(meta()), 64)",
        "ggml_backend_buffer_free",
        "ggml_backend_buffer",
    ),
    "a multi buffer": (
        "capi.ggml_backend_multi_buffer_alloc_buffer("
        "[capi.ggml_backend_alloc_buffer(cpu, 64), tensors(bad_buffers)[1]])",
        "ggml_backend_buffer_free",
        "ggml_backend_buffer",
    ),
    "a backend": (
        "capi.ggml_backend_dev_init(device.pointer)",
        "ggml_backend_free",
        "ggml_backend",
    ),
    "a meta backend": ("capi.ggml_backend_dev_init(meta())", "ggml_backend_free", "ggml_backend"),
    "a graph allocator": ("allocator(bad_buffers)", "ggml_gallocr_free", "ggml_gallocr"),
    "a graph allocator on a meta device": (
        "allocator(capi.ggml_backend_dev_buffer_type(meta()))",
        "ggml_gallocr_free",
        "ggml_gallocr",
    ),
    "a scheduler": ("scheduler()", "ggml_backend_sched_free", "ggml_backend_sched"),
    "an optimisation context": ("optimizer()", "ggml_opt_free", "ggml_opt_context"),
}
MAKERS = """
def allocator(buffers):
    made = capi.ggml_gallocr_new(buffers)
    capi.ggml_gallocr_alloc_graph(made, graph())
    return made

def scheduler(graph=graph()):
    backends = [capi.ggml_backend_dev_init(device.pointer), cpu]
    made = capi.ggml_backend_sched_new(backends, [bad_buffers] * 2, 256, False, False)
    capi.ggml_backend_sched_reserve(made, graph)
    return made

def optimizer():
    weights, buffer = tensors(capi.ggml_backend_cpu_buffer_type(), 2)
    weight, inputs = (capi.ggml_get_first_tensor(weights),) * 2
    inputs = capi.ggml_get_next_tensor(weights, weight)
    capi.ggml_set_param(weight)
    ctx = arena.context(1 << 24)
    return capi.ggml_opt_init(
        backend_sched=scheduler(),
        loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
        ctx_compute=ctx,
        inputs=inputs,
        outputs=capi.ggml_mul_mat(ctx, weight, inputs),
    )
"""


@pytest.mark.parametrize(("make", "free", "kind"), CASES.values(), ids=CASES)
def test_what_is_poisoned_is_lost_and_counted(
    case: Callable[[str], list[Any]], make: str, free: str, kind: str
) -> None:
    (found,) = case(f"{MAKERS}\nlost(capi.{free}, *[{make} for _ in range(3)])")
    assert found == {"live": {kind: -3}, "leaked": {kind: 3}}


def test_a_context_is_freed_though_the_buffer_of_its_tensors_is_lost(
    case: Callable[[str], list[Any]],
) -> None:
    lines = case("""
        ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
        tensor = arena.tensor(8, 4, ctx=ctx)
        buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, bad_buffers)
        lost(capi.ggml_backend_buffer_free, buffer)
        # the memory is there still, and what was in it
        capi.ggml_backend_tensor_set(tensor, bytes(range(128)), 0)
        found = bytearray(128)
        capi.ggml_backend_tensor_get(tensor, found, 0)
        assert found == bytes(range(128))
        live = diagnostics.live_handles()["ggml_context"]
        capi.ggml_free(ctx)
        print(diagnostics.live_handles()["ggml_context"] - live)
    """)
    assert lines == [
        {"live": {"ggml_backend_buffer": -1}, "leaked": {"ggml_backend_buffer": 1}},
        -1,
    ]


def test_objects_are_closed_though_what_they_stand_for_is_lost(
    case: Callable[[str], list[Any]],
) -> None:
    """`close` raises, the collector logs; neither tries again."""
    lines = case("""
        from ggml_cffi import Buffer, Device
        logged = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("ggml_cffi").addHandler(handler)

        def buffers():
            return Buffer(tensors(capi.ggml_backend_dev_buffer_type(meta()))[1])

        def backends():
            return Device(device.pointer).init_backend()

        for make in (buffers, backends):
            made = make()
            lost(lambda owner: owner.close(), made)
            assert made.closed
            made.close()
            before = diagnostics.leaked_handles()
            made = make()
            del made
            gc.collect()
            after = diagnostics.leaked_handles()
            print(sum(after.values()) - sum(before.values()))
        assert len(logged) == 2 and all("is poisoned" in line for line in logged), logged
    """)
    assert lines == [
        {"live": {"ggml_backend_buffer": -1}, "leaked": {"ggml_backend_buffer": 1}},
        1,
        {"live": {"ggml_backend": -1}, "leaked": {"ggml_backend": 1}},
        1,
    ]


def test_what_is_not_poisoned_is_freed(case: Callable[[str], list[Any]]) -> None:
    """A count that never moves, or always does, would show."""
    lines = case("""
        before = diagnostics.leaked_handles()
        live = diagnostics.live_handles()
        backend = capi.ggml_backend_cpu_init()
        ctx, buffer = tensors(capi.ggml_backend_cpu_buffer_type())
        print(diagnostics.live_handles()["ggml_backend"] - live["ggml_backend"])
        print(diagnostics.live_handles()["ggml_backend_buffer"] - live["ggml_backend_buffer"])
        capi.ggml_backend_buffer_free(buffer)
        capi.ggml_backend_free(backend)
        now = diagnostics.live_handles()
        assert now["ggml_backend"] == live["ggml_backend"]
        assert now["ggml_backend_buffer"] == live["ggml_backend_buffer"]
        assert diagnostics.leaked_handles() == before
    """)
    assert lines == [1, 1]


def test_on_several_threads_at_once(case: Callable[[str], list[Any]]) -> None:
    (found,) = case("""
        from concurrent.futures import ThreadPoolExecutor
        buffers = capi.ggml_backend_dev_buffer_type(meta())
        made = [[tensors(buffers)[1] for _ in range(10)] for _ in range(4)]

        def free_all(some):
            for buffer in some:
                try:
                    capi.ggml_backend_buffer_free(buffer)
                except AbortError as error:
                    assert "is poisoned" in error.message
                else:
                    raise AssertionError("nothing was raised")

        before = counts()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(free_all, made))
        after = counts()
        check_product(cpu)
        kind = "ggml_backend_buffer"
        print(json.dumps([after[0][kind] - before[0][kind], after[1][kind] - before[1][kind]]))
    """)
    assert found == [-40, 40]


# ---- what another call frees on its way

GROWS = """
def raised(function, *arguments):
    try:
        function(*arguments)
    except AbortError as error:
        return error.function, error.message, error.lost
    return None

ctx = arena.context()
larger = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(4096, ctx=ctx)), allocate=False)
made = {maker}
kind = {kind!r}
print(json.dumps(raised({grow}, made, larger)))
again = [raised({grow}, made, larger)]
live, leaked, _ = counts()
again += [raised({free}, made), raised({free}, made)]
print(json.dumps(again))
after = counts()
print(json.dumps([after[0][kind] - live[kind], after[1][kind] - leaked[kind]]))
check_product(cpu)
"""

META = "capi.ggml_backend_dev_buffer_type(meta())"
META_SCHEDULER = """capi.ggml_backend_sched_new(
    [capi.ggml_backend_dev_init(meta()), cpu], None, 256, False, False
)
capi.ggml_backend_sched_reserve(made, graph())
"""


@pytest.mark.parametrize(
    ("maker", "kind", "grow", "free"),
    [
        pytest.param(maker, kind, f"capi.{grow}", f"capi.{free}", id=name)
        for name, maker, kind, grow, free in [
            ("an allocator", "allocator(bad_buffers)", "ggml_gallocr",
             "ggml_gallocr_alloc_graph", "ggml_gallocr_free"),
            ("an allocator of a meta device", f"allocator({META})", "ggml_gallocr",
             "ggml_gallocr_reserve", "ggml_gallocr_free"),
            ("a scheduler of a meta device", META_SCHEDULER, "ggml_backend_sched",
             "ggml_backend_sched_alloc_graph", "ggml_backend_sched_free"),
        ]
    ],
)  # fmt: skip
def test_a_poisoned_buffer_that_another_call_frees(
    case: Callable[[str], list[Any]], maker: str, kind: str, grow: str, free: str
) -> None:
    """A meta device's has a destructor, which nothing can be thrown through.

    What was to grow is half freed then: it is lost, whatever is done with it.
    """
    first, again, counted = case(
        MAKERS + GROWS.format(maker=maker, kind=kind, grow=grow, free=free)
    )
    assert first[0] == grow.removeprefix("capi.") and "is poisoned" in first[1]
    lost = "it is lost: an earlier abort has left it half freed"
    assert [text for _, text, _ in again] == [lost] * 3
    assert {what for *_, what in (first, *again)} == {kind}
    assert counted == [-1, 1]  # once, though it was freed twice
