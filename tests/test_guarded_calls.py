"""What stands around a call: functions that C calls itself, threads set behind our back, forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena

from ggml_cffi import AbortError, _callbacks, capi, ffi, quants


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("silent", [True, False])
def test_what_is_raised_under_the_progress_bar_comes_out(
    arena: Arena, cpu: Any, capfd: Any, kind: type[BaseException], silent: bool
) -> None:
    """ggml calls its progress bar by the address of a guarded function."""
    scheduler = capi.ggml_backend_sched_new([cpu], None, 4096, False, False)
    arena.callback(capi.ggml_backend_sched_free, scheduler)
    weights, ctx = arena.context(), arena.context(1 << 22)
    weight = arena.tensor(3, 4, ctx=weights)
    capi.ggml_set_param(weight)
    inputs = arena.tensor(3, 2, ctx=weights)
    arena.allocate(weights)
    capi.ggml_backend_tensor_set(weight, np.zeros(12, np.float32), 0)
    outputs = capi.ggml_mul_mat(ctx, weight, inputs)
    data = capi.ggml_opt_dataset_init(F32, F32, 3, 4, 6, 1)
    arena.callback(capi.ggml_opt_dataset_free, data)
    asked = []

    def parameters(epoch: int) -> Any:
        asked.append(epoch)
        if len(asked) == 2:
            raise kind("mine")
        return {"sgd": {"alpha": 0.1}}

    with pytest.raises(kind, match="mine"):
        capi.ggml_opt_fit(
            scheduler, ctx, inputs, outputs, data,
            capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR, capi.GGML_OPT_OPTIMIZER_TYPE_SGD,
            parameters, 2, 2, 0.0, silent,
        )  # fmt: skip
    capfd.readouterr()
    assert _callbacks._errors == {}


def child(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_threads_that_are_set_through_ggml_s_own_function() -> None:
    """The guard hears of them: an abort in a kernel ends the process, it never hangs."""
    ended = child("""
        import numpy as np
        from ggml_cffi import capi
        from ggml_cffi._runtime import invoke
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        reg = capi.ggml_backend_dev_backend_reg(capi.ggml_backend_get_device(cpu))
        setter = capi.ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads")
        invoke("ggml_backend_set_n_threads_t", setter, cpu, 4)
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        numbers = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 64)
        table = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 3)
        rows = capi.ggml_cast(ctx, numbers, capi.GGML_TYPE_I32)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, capi.ggml_get_rows(ctx, table, rows))
        capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_tensor_set(numbers, np.arange(64, dtype=np.float32), 0)
        capi.ggml_backend_graph_compute(cpu, graph)
    """)
    assert ended.returncode == -6, ended.stderr
    assert "GGML_ASSERT" in ended.stderr and "in ggml_backend_graph_compute" in ended.stderr


@pytest.mark.parametrize("computing", [False, True])
def test_a_forked_child_runs_the_exit_handlers_of_c(computing: bool) -> None:
    """Though a thread of the parent computed when it forked."""
    ended = child(f"""
        import ctypes, os, sys, threading
        from ggml_cffi import capi
        started, go = threading.Event(), threading.Event()
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        x = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
        wait = capi.ggml_map_custom1(ctx, x, lambda *_: (started.set(), go.wait())[0], 1)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, wait)
        capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        thread = threading.Thread(target=capi.ggml_backend_graph_compute, args=(cpu, graph))
        if {computing}:
            thread.start()
            started.wait()
        pid = os.fork()
        if pid == 0:
            libc = ctypes.CDLL(None)
            handler = ctypes.cast(libc._exit, ctypes.c_void_p)
            libc.__cxa_atexit(handler, ctypes.c_void_p(42), None)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        go.set()
        if {computing}:
            thread.join()
    """)
    assert (ended.returncode, ended.stdout) == (0, "42\n"), ended.stderr


def test_an_abort_outside_kernels_inside_of_an_operation(arena: Arena, cpu: Any) -> None:
    """Where the kernel on the stack is the outer computation's, nobody waits for this thread."""
    threads = capi.ggml_backend_cpu_init()  # of four threads
    arena.callback(capi.ggml_backend_free, threads)
    scheduler = capi.ggml_backend_sched_new([threads], None, 4, False, False)
    arena.callback(capi.ggml_backend_sched_free, scheduler)
    ctx = arena.context()
    many = arena.tensor(8, ctx=ctx)
    for _ in range(60):
        many = capi.ggml_sqr(ctx, many)
    large = arena.graph(ctx, many, allocate=False)
    caught = []

    def operation(dst: Any, a: Any, ith: int, nth: int) -> None:
        with pytest.raises(AbortError) as error:
            capi.ggml_backend_sched_graph_compute(scheduler, large)
        caught.append(error.value)

    x = arena.weight(64)
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, x, operation, 1))
    capi.ggml_backend_graph_compute(cpu, graph)
    assert len(caught) == 1 and "hash_set" in str(caught[0])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_a_plan_keeps_the_threads_that_it_was_made_for(before: int, after: int) -> None:
    """Whatever its backend has later. With one an abort is an error, with several it is the end."""
    ended = child(f"""
        import numpy as np
        from ggml_cffi import AbortError, capi
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, {before})
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        numbers = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 64)
        table = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 3)
        rows = capi.ggml_get_rows(ctx, table, capi.ggml_cast(ctx, numbers, capi.GGML_TYPE_I32))
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, capi.ggml_mul_mat(ctx, rows, rows))
        capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_tensor_set(numbers, np.arange(64, dtype=np.float32), 0)
        plan = capi.ggml_backend_graph_plan_create(cpu, graph)
        capi.ggml_backend_cpu_set_n_threads(cpu, {after})
        try:
            capi.ggml_backend_graph_plan_compute(cpu, plan)
        except AbortError as error:
            print(type(error).__name__)
    """)
    if before == 1:
        assert (ended.returncode, ended.stdout) == (0, "AbortError\n"), ended.stderr
    else:
        assert ended.returncode == -6, ended.stderr
        assert "GGML_ASSERT" in ended.stderr and "plan_compute" in ended.stderr


@pytest.mark.own_memory
def test_threads_that_cannot_be_started() -> None:
    """Nobody waits for anybody yet: an error, and with fewer threads the computation goes well."""
    ended = child(f"""
        import re, resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from _compute import Arena, check_product
        from ggml_cffi import AbortError, capi
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        check_product(cpu)
        size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 20), resource.RLIM_INFINITY))
        capi.ggml_backend_cpu_set_n_threads(cpu, 8)
        arena = Arena(cpu)
        ctx = arena.context(1 << 17)
        a = arena.tensor(64, 64, ctx=ctx)
        graph = arena.graph(ctx, capi.ggml_mul_mat(ctx, a, a))
        try:
            capi.ggml_backend_graph_compute(cpu, graph)
        except AbortError as error:
            print(error)
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        capi.ggml_backend_graph_compute(cpu, graph)
        check_product(cpu)
        print("computed")
    """)
    assert ended.returncode == 0, ended.stderr
    aborted, computed = ended.stdout.splitlines()
    assert "ggml-cpu.c" in aborted and "rc == 0" in aborted and computed == "computed"


@pytest.mark.no_sanitizer  # ASan's allocator keeps, in the child, what another thread has locked
def test_a_fork_in_an_operation_of_several_threads() -> None:
    """The child has none of the other threads: it leaves the computation, which nobody can end."""
    ended = child("""
        import os, threading
        from ggml_cffi import AbortError, capi
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, 2)
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        x = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 64, 64)
        pids, caller, both = [], threading.get_ident(), threading.Barrier(2)
        def fork(dst, a, ith, nth):
            both.wait(30)  # Python's fork hangs where a thread is about to enter it
            if threading.get_ident() == caller:
                pids.append(os.fork())
        forked = capi.ggml_map_custom1(ctx, capi.ggml_mul_mat(ctx, x, x), fork, 2)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, capi.ggml_mul_mat(ctx, forked, x))
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_buffer_clear(buffer, 0)
        try:
            capi.ggml_backend_graph_compute(cpu, graph)
        except AbortError as error:
            print("child:", error, flush=True)
            os._exit(7)
        print("parent:", os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
    """)
    assert ended.returncode == 0, ended.stderr
    child_says, parent_says = ended.stdout.splitlines()
    assert "forked in the midst of a computation of several threads" in child_says
    assert parent_says == "parent: 7"


@pytest.mark.no_sanitizer  # ASan's allocator keeps, in the child, what another thread has locked
def test_a_fork_on_a_thread_of_ggml_s_own() -> None:
    """In the child that is the only thread, and no call of anybody's is on its stack: it ends."""
    ended = child("""
        import os, threading
        from ggml_cffi import capi
        cpu = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(cpu, 2)
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        x = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 64, 64)
        pids, caller = [], threading.get_ident()
        def fork(dst, a, ith, nth):
            if threading.get_ident() != caller:
                pids.append(os.fork())
        forked = capi.ggml_map_custom1(ctx, x, fork, 2)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, capi.ggml_mul_mat(ctx, forked, x))
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_buffer_clear(buffer, 0)
        capi.ggml_backend_graph_compute(cpu, graph)
        print("parent:", os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
    """)
    assert (ended.returncode, ended.stdout) == (0, "parent: 1\n"), ended.stderr
    assert "forked in the midst of a computation of several threads" in ended.stderr


@pytest.mark.no_sanitizer  # ASan's allocator keeps, in the child, what another thread has locked
def test_threads_of_the_process_that_was_forked() -> None:
    """A child has none of the threads of a pool: neither computing nor freeing waits for them."""
    ended = child("""
        import os
        from ggml_cffi import capi
        cpu = capi.ggml_backend_cpu_init()
        pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_default(2))
        capi.ggml_backend_cpu_set_n_threads(cpu, 2)
        capi.ggml_backend_cpu_set_threadpool(cpu, pool)
        ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        x = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 64, 64)
        graph = capi.ggml_new_graph(ctx)
        capi.ggml_build_forward_expand(graph, capi.ggml_mul_mat(ctx, x, x))
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_buffer_clear(buffer, 0)
        def tried(call, *args):
            try:
                call(*args)
            except ValueError as error:
                print(error, flush=True)
        pid = os.fork()
        if pid == 0:
            tried(capi.ggml_backend_graph_compute, cpu, graph)
            tried(capi.ggml_threadpool_free, pool)
            capi.ggml_backend_cpu_set_threadpool(cpu, None)
            capi.ggml_backend_graph_compute(cpu, graph)
            os._exit(7)
        print("parent:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        capi.ggml_backend_graph_compute(cpu, graph)
        capi.ggml_backend_cpu_set_threadpool(cpu, None)
        capi.ggml_threadpool_free(pool)
    """)
    assert ended.returncode == 0, ended.stderr
    computed, freed, parent_says = ended.stdout.splitlines()
    for line in (computed, freed):
        assert "its threads are those of the process that was forked" in line
    assert parent_says == "parent: 7"


def test_the_tables_of_quantisation_are_freed_when_nobody_uses_them() -> None:
    """Whoever frees them waits for all who quantise: no number is wrong, and nothing aborts."""
    rows = np.random.default_rng(0).standard_normal((4, 1024), np.float32)
    wanted = quants.quantize(rows, "iq3_xxs", threads=1)
    done, failed = threading.Event(), []

    def free() -> None:
        while not done.wait(0.001):
            capi.ggml_quantize_free()

    def quantise() -> None:
        for _ in range(3):
            found = quants.quantize(rows, "iq3_xxs", threads=1)
            failed.extend([found] * (not np.array_equal(found, wanted)))

    freeing = threading.Thread(target=free)
    working = [threading.Thread(target=quantise) for _ in range(2)]
    for thread in (freeing, *working):
        thread.start()
    for thread in working:
        thread.join()
    done.set()
    freeing.join()
    assert not failed


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a: capi.ggml_init(mem_size=1 << 16, mem_buffer=a), "mem_buffer"),
        (lambda a: capi.ggml_backend_cpu_buffer_from_ptr(a, 1 << 16), "ptr"),
        (
            lambda a: capi.ggml_backend_dev_buffer_from_host_ptr(
                capi.ggml_backend_dev_by_type(capi.GGML_BACKEND_DEVICE_TYPE_CPU), a, 65536, 65536
            ),
            "ptr",
        ),
    ],
    ids=["context", "buffer", "buffer of a device"],
)
def test_a_c_array_of_fewer_bytes_than_are_said(call: Callable[[Any], Any], name: str) -> None:
    short = ffi.new("char[64]")
    with pytest.raises(ValueError, match=f"{name} has 64 bytes, fewer than the 65536 of "):
        call(short)


def test_memory_of_an_array_for_a_context() -> None:
    """An array of as many bytes as are said, or a bare pointer, of which nobody knows."""
    memory = ffi.new("char[]", 1 << 16)
    for given in (memory, ffi.cast("void *", memory)):
        ctx = capi.ggml_init(mem_size=1 << 16, mem_buffer=given)
        capi.ggml_free(ctx)


def test_an_array_whose_class_lies_about_its_size() -> None:
    class Lying(np.ndarray):
        size = 50_000_000  # type: ignore[assignment]

    out = np.zeros(4, np.float32).view(Lying)
    with pytest.raises(ValueError, match="must have the same number"):
        capi.ggml_fp16_to_fp32_row(np.zeros(1000, np.uint16), out)
