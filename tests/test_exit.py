"""The end of the interpreter, whatever is open or at work then: silent, with the right exit code.

Each test runs in a process of its own, with Python's development mode and without.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import atexit, faulthandler, gc, logging, os, signal, sys, threading, time
# what waits for ever is ended, and says where
faulthandler.register(signal.SIGALRM, chain=True)
signal.alarm(60)
import numpy as np
from ggml_cffi import Buffer, Device, MetaDevice, MultiBuffer, SplitState, capi, device, ffi, lib

F32 = capi.GGML_TYPE_F32
ONES = np.ones((8, 8), np.float32)

def numbers(tensor):
    count = capi.ggml_nelements(tensor)
    return np.frombuffer(ffi.buffer(ffi.cast("float *", tensor.data), 4 * count), np.float32)

def product(backend, function=None, n_tasks=1):
    '''Compute ONES @ ONES + 1 on a backend, the addition by `function`; return what stays open.'''
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    a, b = (capi.ggml_new_tensor_2d(ctx, F32, 8, 8) for _ in range(2))
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    for tensor in (a, b):
        capi.ggml_backend_tensor_set(tensor, ONES, 0)
    graph_ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    result = capi.ggml_mul_mat(graph_ctx, a, b)
    if function is not None:
        result = capi.ggml_map_custom1(graph_ctx, result, function, n_tasks)
    graph = capi.ggml_new_graph(graph_ctx)
    capi.ggml_build_forward_expand(graph, result)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend))
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    capi.ggml_backend_graph_compute(backend, graph)
    found = np.empty((8, 8), np.float32)
    capi.ggml_backend_tensor_get(result, found, 0)
    assert (found == 8 + (function is not None)).all(), found
    return ctx, graph_ctx, buffer, galloc, graph

def plus_one(dst, a, ith, nth):
    numbers(dst)[ith::nth] = numbers(a)[ith::nth] + 1

def mirrored(info, n_devs):
    return SplitState.mirrored()

def cpu_backend(n_threads=1):
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, n_threads)
    return backend

def in_daemons(work, count=2):
    '''Let daemon threads do `work` again and again; return when each has done it once.'''
    begun = [threading.Event() for _ in range(count)]

    def run(event):
        step = work()
        while True:
            step()
            event.set()

    for event in begun:
        threading.Thread(target=run, args=(event,), daemon=True).start()
    for event in begun:
        assert event.wait(30)
"""

modes = pytest.mark.parametrize("mode", ["", "dev"])


def child(body: str, mode: str = "", first: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself; `first` comes before the package is imported."""
    options = ["-X", "dev", "-W", "error"] if mode else []
    code = textwrap.dedent(first) + PRELUDE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def ends_well(body: str, mode: str = "", first: str = "", output: str = "") -> None:
    done = child(body, mode, first)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


# ---- with everything open

OPEN = """
class Circle:
    pass

everything = Circle()
everything.itself = everything
cpu = cpu_backend(2)
everything.product = product(cpu, plus_one, 2)

backend = device("CPU").init_backend(2)
everything.multi = MultiBuffer([Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256))])
everything.buffer = Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
everything.buffer.circle = everything

def failing(info, n_devs):
    raise ValueError("no plan")

meta = MetaDevice(["CPU"] * 2, lambda info, n_devs, held=everything: SplitState.mirrored())
meta_backend = meta.init_backend(1)
everything.on_meta = product(meta_backend.handle)
latched = MetaDevice(["CPU"] * 2, failing)
latched_backend = latched.init_backend(1)
everything.latched = product(latched_backend.handle)
assert isinstance(latched.error, ValueError)

seen = []
def watch(tensor, ask):
    seen.append(ask)
    return True
scheduler = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
capi.ggml_backend_sched_set_eval_callback(scheduler, watch)
capi.ggml_backend_sched_reserve(scheduler, everything.product[-1])
capi.ggml_backend_cpu_set_abort_callback(cpu, lambda: False)
pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_init(2))
capi.ggml_backend_cpu_set_threadpool(cpu, pool)
capi.ggml_backend_graph_compute(cpu, everything.product[-1])
plan = capi.ggml_backend_graph_plan_create(cpu, everything.product[-1])

heard = []
capi.ggml_log_set(lambda level, text: heard.append(text))
capi.ggml_set_abort_callback(lambda text: heard.append(text))
gguf = capi.gguf_init_empty()
capi.gguf_set_val_str(gguf, "key", "value")
dataset = capi.ggml_opt_dataset_init(F32, F32, 8, 1, 4, 1)
result = capi.ggml_opt_result_init()
"""


@modes
def test_with_everything_open(mode: str) -> None:
    ends_well(OPEN, mode)


@modes
def test_with_everything_open_that_a_thread_made(mode: str) -> None:
    """The thread is gone, and with it what the guard kept for it."""
    body = f"""
code = {OPEN!r}
made = dict(globals())
thread = threading.Thread(target=exec, args=(code, made))
thread.start()
thread.join()
assert made["everything"].product
"""
    ends_well(body, mode)


@modes
def test_with_everything_open_in_a_thread_that_goes_on(mode: str) -> None:
    """Python waits for it, and what it computes then is right."""
    body = f"""
code = {OPEN!r}
def work():
    threading.main_thread().join()
    exec(code, dict(globals()))
    print("computed")
threading.Thread(target=work).start()
"""
    ends_well(body, mode, output="computed\n")


# ---- at work

WORK = {
    "products": """
        def work():
            backend = cpu_backend(2)
            graph = product(backend)[-1]
            return lambda: capi.ggml_backend_graph_compute(backend, graph)
    """,
    "functions": """
        def work():
            backend = cpu_backend(1)
            graph = product(backend, plus_one)[-1]
            return lambda: capi.ggml_backend_graph_compute(backend, graph)
    """,
    "functions on ggml's threads": """
        def work():
            backend = cpu_backend(3)
            graph = product(backend, plus_one, 3)[-1]
            return lambda: capi.ggml_backend_graph_compute(backend, graph)
    """,
    "functions on a pool's threads": """
        def work():
            backend = cpu_backend(3)
            pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_init(3))
            capi.ggml_backend_cpu_set_threadpool(backend, pool)
            graph = product(backend, plus_one, 3)[-1]
            return lambda: capi.ggml_backend_graph_compute(backend, graph)
    """,
    "a scheduler": """
        def work():
            backend = cpu_backend(2)
            graph = product(backend)[-1]
            scheduler = capi.ggml_backend_sched_new([backend], None, 64, False, False)
            capi.ggml_backend_sched_set_eval_callback(scheduler, lambda tensor, ask: True)
            return lambda: capi.ggml_backend_sched_graph_compute(scheduler, graph)
    """,
    "stopping": """
        def work():
            backend = cpu_backend(2)
            graph = product(backend)[-1]
            capi.ggml_backend_cpu_set_abort_callback(backend, lambda: False)
            return lambda: capi.ggml_backend_graph_compute(backend, graph)
    """,
    "splitting": """
        def work():
            meta = MetaDevice(["CPU"] * 2, mirrored)
            backend = meta.init_backend(1)

            def step():
                ctx, graph_ctx, buffer, galloc, graph = product(backend.handle)
                capi.ggml_gallocr_free(galloc)
                capi.ggml_backend_buffer_free(buffer)
                capi.ggml_free(graph_ctx)
                capi.ggml_free(ctx)
            return step
    """,
    "aborting": """
        def work():
            ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
            a = capi.ggml_new_tensor_2d(ctx, F32, 3, 3)
            b = capi.ggml_new_tensor_2d(ctx, F32, 5, 5)

            def step():
                try:
                    capi.ggml_mul_mat(ctx, a, b)
                except RuntimeError:
                    pass
            return step
    """,
    "making and freeing": """
        def work():
            def step():
                with device("CPU").init_backend(1) as backend:
                    Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256), keep=(backend,))
            return step
    """,
    "nested": """
        def work():
            backend, inner = cpu_backend(1), cpu_backend(2)
            graph = product(inner)[-1]

            def nested(dst, a, ith, nth):
                capi.ggml_backend_graph_compute(inner, graph)
                plus_one(dst, a, ith, nth)
            outer = product(backend, nested)[-1]
            return lambda: capi.ggml_backend_graph_compute(backend, outer)
    """,
}


@pytest.mark.parametrize("name", WORK)
def test_while_daemon_threads_are_at_work(name: str) -> None:
    ends_well(textwrap.dedent(WORK[name]) + "in_daemons(work)")


@pytest.mark.parametrize("n_threads", [1, 2])
def test_in_the_midst_of_a_long_computation(n_threads: int) -> None:
    """ggml looks at a static table for each operation: exit() must not destroy it meanwhile."""
    body = f"""
def work():
    backend = cpu_backend({n_threads})
    ctx = capi.ggml_init(mem_size=64 << 20, no_alloc=True)
    a = capi.ggml_new_tensor_2d(ctx, F32, 64, 64)
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    capi.ggml_backend_tensor_set(a, np.eye(64, dtype=np.float32), 0)
    graph = capi.ggml_new_graph_custom(ctx, 40_000, False)
    power = a
    for _ in range(20_000):
        power = capi.ggml_mul_mat(ctx, a, power)
    capi.ggml_build_forward_expand(graph, power)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend))
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    begun.release()
    while True:
        capi.ggml_backend_graph_compute(backend, graph)

begun = threading.Semaphore(0)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
for _ in range(2):
    begun.acquire()
time.sleep(0.05)
sys.exit(7)
"""
    for _ in range(4):
        done = child(body)
        assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# ---- from atexit

LATE = """
import atexit

def last():
    work("the last")

atexit.register(last)  # runs after all that was registered since
"""


@modes
@pytest.mark.parametrize("threads", [1, 3])
def test_from_atexit(threads: int, mode: str) -> None:
    """Functions and log receivers work there as ever, before and after the package's own end."""
    body = f"""
def work(name):
    product(cpu_backend({threads}), plus_one, {threads})
    with MetaDevice(["CPU"] * 2, split) as meta, meta.init_backend(1) as backend:
        product(backend.handle)
    capi.ggml_log_set(lambda level, text: said.append(text))
    capi.ggml_graph_print(product(cpu_backend())[-1])
    assert asked and said
    print(name)

def split(info, n_devs):
    asked.append(info.name)
    return SplitState.mirrored()

asked, said = [], []
atexit.register(work, "the first")
"""
    ends_well(body, mode, LATE, "the first\nthe last\n")


@pytest.mark.parametrize("name", WORK)
def test_from_atexit_while_daemon_threads_are_at_work(name: str) -> None:
    body = f"""
def last_work(name):
    product(cpu_backend(2), plus_one, 2)
    time.sleep(0.05)

{textwrap.dedent(WORK[name])}
in_daemons(work, 3)
work = last_work
"""
    ends_well(body, "dev", LATE)


def test_a_log_line_begun_comes_out() -> None:
    body = """
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from ggml_cffi.logs import receive
receive(capi.GGML_LOG_LEVEL_INFO, "begun")
"""
    ends_well(body, output="begun\n")


# ---- what is done while the interpreter takes itself down


@modes
def test_objects_that_are_deleted_late(mode: str) -> None:
    """When they go, the package's modules may be empty: what they call then fails, and no more."""
    body = """
class Late:
    def __init__(self, name):
        self.name = name
        self.capi, self.write = capi, os.write
        self.backend = cpu_backend(2)
        self.made = product(self.backend)
        self.meta = MetaDevice(["CPU"] * 2, mirrored)
        self.meta_backend = self.meta.init_backend(1)

    def __del__(self):
        self.write(1, f"{self.name} begins\\n".encode())
        ctx, graph_ctx, buffer, galloc, graph = self.made
        self.capi.ggml_graph_print(graph)
        self.capi.ggml_backend_graph_compute(self.backend, graph)
        self.capi.ggml_gallocr_free(galloc)
        self.capi.ggml_backend_buffer_free(buffer)
        self.capi.ggml_free(graph_ctx)
        self.capi.ggml_free(ctx)
        self.capi.ggml_backend_free(self.backend)
        self.meta_backend.close()
        self.meta.close()
        self.write(1, f"{self.name} ends\\n".encode())

a_global = Late("global")
in_a_circle = Late("circle")
in_a_circle.itself = in_a_circle
sys.late = Late("sys")
"""
    done = child(body, mode)
    assert (done.returncode, done.stderr) == (0, "")
    said = set(done.stdout.splitlines())
    assert {"global begins", "circle begins"} <= said


@modes
@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_in_a_callback(code: int, mode: str) -> None:
    """SystemExit comes out of the call, and the process ends with its code."""
    functions = {
        "an operation": f"product(cpu_backend(), lambda *_: sys.exit({code}))",
        "a split function": f"""
            meta = MetaDevice(["CPU"] * 2, lambda info, n_devs: sys.exit({code}))
            product(meta.init_backend(1).handle)
        """,
    }
    for body in functions.values():
        done = child(textwrap.dedent(body) + "\nprint('not reached')", mode)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_interrupt_while_a_callback_runs() -> None:
    body = """
def interrupted(dst, a, ith, nth):
    os.kill(os.getpid(), 2)
    for _ in range(1000):
        pass
    plus_one(dst, a, ith, nth)

product(cpu_backend(), interrupted)
"""
    done = child(body)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert "Fatal" not in done.stderr


# ---- in another interpreter

SUBINTERPRETERS = """
try:
    import _interpreters as interpreters
    KINDS, run = [("legacy",), ("isolated",)], interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    KINDS, run = [()], interpreters.run_string

def try_import():
    code = '''if True:
        try:
            import ggml_cffi
        except ImportError as error:
            assert "main interpreter" in str(error), error
        else:
            raise AssertionError
    '''
    for arguments in KINDS:
        other = interpreters.create(*arguments)
        failed = run(other, code)
        assert not failed, failed
        interpreters.destroy(other)
"""


@modes
def test_a_subinterpreter_is_refused(mode: str) -> None:
    """And the main one is not touched by it, whether it had imported the package or not."""
    body = """
try_import()
heard = []
capi.ggml_log_set(lambda level, text: heard.append(text))
capi.ggml_graph_print(product(cpu_backend(2), plus_one, 2)[-1])
assert heard
"""
    ends_well(body, mode, SUBINTERPRETERS + "try_import()\n")


# ---- after a fork

FORKED = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def forked(work):
    '''Do `work` in a child; give its exit code.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fresh():
    product(cpu_backend(2), plus_one, 2)
    with MetaDevice(["CPU"] * 2, mirrored) as meta, meta.init_backend(1) as backend:
        product(backend.handle)
        Buffer(capi.ggml_backend_alloc_buffer(backend.handle, 256)).close()
"""


@modes
def test_after_a_fork_with_everything_open(mode: str) -> None:
    """The child is refused what it has inherited, has things of its own, and ends well."""
    body = """
def work():
    for thing in (backend, meta, meta_backend, everything.multi, everything.buffer, cpu_device):
        try:
            thing.handle
        except RuntimeError as error:
            assert f"before a fork, by process {os.getppid()}" in str(error)
        else:
            raise AssertionError(thing)
    assert device("CPU") == cpu_device
    fresh()
    for thing in (everything.buffer, everything.multi, backend, meta_backend, meta):
        thing.close()  # frees nothing

cpu_device = device("CPU")
assert forked(work) == 0
assert everything.buffer.size == 256
product(cpu, plus_one, 2)
fresh()
"""
    ends_well(OPEN + FORKED + body, mode)


@pytest.mark.parametrize("name", ["making and freeing", "splitting", "functions", "nested"])
def test_forks_while_threads_are_at_work(name: str) -> None:
    """Whatever lock a thread holds in that moment, the child does not wait for it."""
    body = f"""
{FORKED}
{textwrap.dedent(WORK[name])}
in_daemons(work, 3)
assert [forked(fresh) for _ in range(8)] == [0] * 8
"""
    ends_well(body)


def test_forks_of_a_pool_of_processes() -> None:
    body = """
import multiprocessing

def work(i):
    product(cpu_backend(2), plus_one, 2)
    return i
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(6)) == list(range(6))
"""
    ends_well(body)
