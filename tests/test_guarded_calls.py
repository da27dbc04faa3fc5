"""What stands around a call: functions that C calls itself, threads set behind our back, forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena

from ggml_cffi import _callbacks, capi


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
