"""docs/limits.md: what ends the process ends a child process, and the ways round hold."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import PINNED, needs

from ggml_cffi import Context, Graph, ops

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = {-signal.SIGSEGV, -signal.SIGABRT}

SETUP = """
from ggml_cffi import capi, ffi, lib
cpu = capi.ggml_backend_cpu_init()
ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)

def graph_of(n):
    result = capi.ggml_sqr(ctx, capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, n))
    graph = capi.ggml_new_graph_custom(ctx, 8, False)
    capi.ggml_build_forward_expand(graph, result)
    return graph
"""


def child(body: str) -> subprocess.CompletedProcess[str]:
    code = SETUP + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.no_sanitizer
def test_a_graph_too_large_for_a_scheduler() -> None:
    body = """
        scheduler = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
        {first}
        print("before")
        capi.ggml_backend_sched_alloc_graph(scheduler, graph_of(1 << 44))
        print("after")
    """
    ended = child(body.format(first=""))
    if PINNED or ended.returncode != 1:
        assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "before\n"), ended.stderr
    else:  # a newer release that looks at its failed allocation
        assert "Error: ggml_backend_sched_alloc_graph: " in ended.stderr
    refused = child(
        body.format(first="capi.ggml_backend_sched_reserve(scheduler, graph_of(1 << 44))")
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "MemoryError: ggml_backend_sched_reserve: " in refused.stderr


@pytest.mark.own_memory
def test_a_handle_freed_twice() -> None:
    ended = child("""
        capi.ggml_free(ctx)
        print("freed")
        capi.ggml_free(ctx)
        for _ in range(64):  # where the second free was not noticed at once
            capi.ggml_init(mem_size=1 << 12)
    """)
    assert ended.stdout.startswith("freed\n")
    assert ended.returncode in ENDINGS, ended.stderr


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("target", ["dst", "ids"])
def test_an_index_that_a_kernel_does_not_look_at(target: str) -> None:
    """One that an operation written in Python computes, or puts over one that was looked at.

    Also with one thread; a number that is there before the computation is looked at.
    """
    body = f"""
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        F32, I32 = capi.GGML_TYPE_F32, capi.GGML_TYPE_I32
        ids = capi.ggml_new_tensor_2d(ctx, I32, 1, 1)
        experts = capi.ggml_new_tensor_3d(ctx, F32, 8, 4, 3)
        x = capi.ggml_new_tensor_3d(ctx, F32, 8, 1, 1)
        def operation(dst, a, ith, nth):
            if {{written}}:
                number = ffi.new("int32_t[1]", [1 << 30])
                capi.ggml_backend_tensor_set({target}, number, 0)
        made = capi.ggml_map_custom1(ctx, ids if {target == "dst"} else x, operation, 1)
        chosen = made if {target == "dst"} else ids
        result = capi.ggml_mul_mat_id(ctx, experts, x if {target == "dst"} else made, chosen)
        graph = capi.ggml_new_graph_custom(ctx, 8, False)
        capi.ggml_build_forward_expand(graph, result)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_buffer_clear(buffer, 0)
        print("before", flush=True)
        capi.ggml_backend_graph_compute(cpu, graph)
        print("after", flush=True)
    """
    ended = child(body.format(written=True))
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "before\n"), ended.stderr
    ended = child(body.format(written=False))
    assert (ended.returncode, ended.stdout) == (0, "before\nafter\n"), ended.stderr


def test_a_normalised_row_that_goes_into_a_product_only() -> None:
    """ggml computes both as one, and writes the product alone; an output it does write."""
    body = """
        import numpy as np
        capi.ggml_backend_cpu_set_n_threads(cpu, 1)
        x = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 8)
        weights = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 8)
        rows = capi.ggml_rms_norm(ctx, x, 0.0)
        {first}
        product = capi.ggml_mul(ctx, rows, weights)
        graph = capi.ggml_new_graph_custom(ctx, 8, False)
        capi.ggml_build_forward_expand(graph, product)
        capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_tensor_set(x, np.full(8, 3, np.float32), 0)
        capi.ggml_backend_tensor_set(weights, np.full(8, 2, np.float32), 0)
        capi.ggml_backend_tensor_set(rows, np.full(8, 7, np.float32), 0)
        capi.ggml_backend_graph_compute(cpu, graph)
        found = np.empty(8, np.float32)
        for tensor in rows, product:
            capi.ggml_backend_tensor_get(tensor, found, 0)
            print(found[0])
    """
    fused = child(body.format(first=""))
    if PINNED:
        assert (fused.returncode, fused.stdout) == (0, "7.0\n2.0\n"), fused.stderr
    apart = child(body.format(first="capi.ggml_set_output(rows)"))
    assert (apart.returncode, apart.stdout) == (0, "1.0\n2.0\n"), apart.stderr


@needs("0.20: convolutions with kernels of float32")
def test_a_convolution_that_computes_in_f16() -> None:
    """ggml gathers the data in f16, whatever its type; the direct ones compute in f32."""
    rng = np.random.default_rng(0)
    lengths = {"n_channels": 3, "n_batch": 1, "n_channels_out": 4}
    in_3d = dict.fromkeys(("s0", "s1", "s2", "d0", "d1", "d2"), 1) | {"p0": 0, "p1": 0, "p2": 0}
    line = (4, 3, 3), (1, 3, 8)
    plane = (4, 3, 3, 3), (1, 3, 8, 8)
    room = (12, 3, 3, 3), (3, 8, 8, 8)

    def computed(make: Any, shapes: Any, factor: float) -> Any:
        kernel, data = (rng.standard_normal(shape, np.float32) for shape in shapes)
        with Context() as ctx:
            held = ctx.from_numpy(kernel, name="kernel")
            ctx.allocate("CPU")
            result = make(held, ctx.input(data.shape, name="x"))
            return Graph(result).compile("CPU", n_threads=1)(x=data * np.float32(factor))

    halves = [
        (ops.conv_1d, line),
        (lambda k, x: ops.conv_1d_ph(k, x, 1, 1), line),
        (ops.conv_1d_dw, ((3, 1, 3), (1, 3, 8))),
        (ops.conv_2d, plane),
        (ops.conv_2d_s1_ph, plane),
        (lambda k, x: ops.conv_3d(k, x, 3), room),
    ]
    direct = [
        (ops.conv_2d_direct, plane),
        (ops.conv_2d_dw_direct, ((3, 1, 3, 3), (1, 3, 8, 8))),
        (lambda k, x: ops.conv_3d_direct(k, x, **in_3d, **lengths), room),
    ]
    for make, shapes in halves:
        assert np.isfinite(computed(make, shapes, 1)).all()
        if PINNED:
            assert not np.isfinite(computed(make, shapes, 1e6)).any()
    for make, shapes in direct:
        assert np.isfinite(computed(make, shapes, 1e6)).all()

    with Context() as ctx:  # what it costs: a kernel of one number
        one = ctx.from_numpy(np.ones((1, 1, 1, 1), np.float32), name="one")
        ctx.allocate("CPU")
        x = ctx.input((1, 1, 1, 1), name="x")
        number = np.full((1, 1, 1, 1), 1 + 2**-12, np.float32)
        assert Graph(ops.conv_2d_direct(one, x)).compile("CPU")(x=number) == number
        if PINNED:
            assert Graph(ops.conv_2d(one, x)).compile("CPU")(x=number) == 1


@pytest.mark.no_sanitizer
def test_a_field_of_a_struct_written_by_hand() -> None:
    ended = child("""
        tensor = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
        capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        tensor.data = ffi.cast("void *", 8)
        print("before")
        capi.ggml_backend_tensor_get(tensor, bytearray(16), 0)
    """)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "before\n"), ended.stderr


@pytest.mark.no_sanitizer
def test_a_graph_too_deep_for_the_stack() -> None:
    """On a small stack, which a few thousand operations in a row are too many for."""
    body = """
        import threading

        def build(n=8000):
            ctx = capi.ggml_init(mem_size=n * 512, no_alloc=True)
            room = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
            graph = capi.ggml_new_graph_custom(room, n, False)
            result = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4)
            for i in range(n):
                result = capi.ggml_neg(ctx, result)
                {step}
            capi.ggml_build_forward_expand(graph, result)
            print(capi.ggml_graph_n_nodes(graph))

        threading.stack_size(256 * 1024)
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    """
    ended = child(body.format(step="pass"))
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, ""), ended.stderr
    step = "i % 1000 or capi.ggml_build_forward_expand(graph, result)"
    built = child(body.format(step=step))
    assert (built.returncode, built.stdout) == (0, "8000\n"), built.stderr


@pytest.mark.own_memory
def test_memory_that_runs_out_in_c_code() -> None:
    """Where not even a few kilobytes are left; more is looked at, or tried, before."""
    ended = child("""
        import ctypes, re, resource
        from pathlib import Path
        malloc = ctypes.CDLL(None).malloc
        malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        kind = int(capi.GGML_TYPE_IQ3_S)
        print("before", flush=True)
        size = re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
        resource.setrlimit(resource.RLIMIT_AS, (int(size) * 1024, resource.RLIM_INFINITY))
        for block in (1 << 20, 1 << 16, 1 << 12):
            while malloc(block):
                pass
        lib.ggml_quantize_init(kind)
    """)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "before\n"), ended.stderr


def test_an_abort_outside_a_guarded_call(tmp_path: Path) -> None:
    """C code that got ggml's own function and calls it on a thread of its own."""
    ended = child("""
        import ctypes, threading
        from ggml_cffi._gen import build_info
        from ggml_cffi import _loader
        base = ctypes.CDLL(str(_loader.library_files(build_info)["ggml-base"]))
        call = base.ggml_new_tensor_1d
        call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        address = int(ffi.cast("uintptr_t", ctx))
        thread = threading.Thread(target=call, args=(address, 999, 4))
        thread.start()
        thread.join()
    """)
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert re.search(r"^\S+:\d+: GGML_ASSERT\(.*\) failed$", ended.stderr, re.M)
    assert "Fatal Python error: Aborted" in ended.stderr


@pytest.mark.no_sanitizer
def test_a_gguf_file_truncated_while_it_is_open(tmp_path: Path) -> None:
    body = f"""
        import os
        import numpy as np
        from ggml_cffi.gguf import GGUFFile, GGUFWriter
        path = {str(tmp_path / "f")!r}
        def write():
            with GGUFWriter(path) as writer:
                writer.add_tensor("a", np.ones(1 << 20, np.float32))
        write()
        with GGUFFile(path) as file:
            {{step}}
            print("before", flush=True)
            print(int(file.tensors["a"].numpy().sum()))
    """
    ended = child(body.format(step="os.truncate(path, 4096)"))
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "before\n"), ended.stderr
    written = child(body.format(step="write()"))
    assert (written.returncode, written.stdout) == (0, f"before\n{1 << 20}\n"), written.stderr


LINES = [
    line
    for line in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:40])
def test_each_limit_has_its_test(line: str) -> None:
    file, name = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)[-1]
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
