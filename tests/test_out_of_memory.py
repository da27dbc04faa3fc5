"""No memory: a MemoryError, or what ggml itself says of it, and the process works on.

Each case runs in a process whose address space is limited, with what is too large for it, and
after it another that is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from _release import require

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.own_memory

SETUP = """
import json, re, resource, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from _compute import F32, Arena, check_product
from ggml_cffi import capi, ffi
from ggml_cffi.meta import MetaDevice, SplitState

MiB = 1 << 20
Q8_0, UINT8 = capi.GGML_TYPE_Q8_0, capi.GGUF_TYPE_UINT8
cpu = capi.ggml_backend_cpu_init()
capi.ggml_backend_cpu_set_n_threads(cpu, 1)
arena = Arena(cpu)
check_product(cpu)

def limit(room):
    size = re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    resource.setrlimit(resource.RLIMIT_AS, (int(size) * 1024 + room, resource.RLIM_INFINITY))

# Less than 32 MiB glibc may have left over from before; more it asks the system for.
def tried(name, function, room=24 * MiB):
    limit(room)
    try:
        function()
    except Exception as error:
        found = [name, isinstance(error, MemoryError), type(error).__name__, str(error)]
    else:
        found = [name, None, None, "nothing was raised"]
    check_product(cpu)  # within the limit as well
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_product(cpu)
    print(json.dumps(found), flush=True)
"""


def run(body: str) -> list[list[object]]:
    """What the cases of a process ended in: name, whether it is a MemoryError, type, text."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(body), str(TESTS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CASES = {
    "work of a computation": """
        # what is multiplied is quantised first: 1 byte for each of 64 Mi numbers
        ctx = arena.context()
        a, b = arena.tensor(1 << 14, 1, type=Q8_0, ctx=ctx), arena.tensor(1 << 14, 4096, ctx=ctx)
        result = capi.ggml_mul_mat(ctx, a, b)
        graph = arena.graph(ctx, result, allocate=False)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
        capi.ggml_backend_buffer_clear(buffer, 0)
        for name in ("ggml_backend_graph_compute", "ggml_backend_graph_plan_create"):
            tried(name, lambda: getattr(capi, name)(cpu, graph))
        sched = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
        capi.ggml_backend_sched_alloc_graph(sched, graph)
        compute = capi.ggml_backend_sched_graph_compute
        tried("ggml_backend_sched_graph_compute", lambda: compute(sched, graph))
        found = np.empty(4096, np.float32)
        capi.ggml_backend_graph_compute(cpu, graph)
        capi.ggml_backend_tensor_get(result, found, 0)
        assert not found.any()
        capi.ggml_backend_free(cpu)  # its work buffer is one that it has
    """,
    "work of a computation on a meta device": """
        device = MetaDevice(["CPU", "CPU"], lambda info, n_devs: SplitState.mirrored())
        backend = capi.ggml_backend_dev_init(device.handle)
        for index in range(2):
            child = capi.ggml_backend_meta_simple_backend(backend, index)
            capi.ggml_backend_cpu_set_n_threads(child, 1)
        check_product(backend)
        ctx = arena.context()
        a, b = arena.tensor(1 << 14, 1, type=Q8_0, ctx=ctx), arena.tensor(1 << 14, 2048, ctx=ctx)
        result = capi.ggml_mul_mat(ctx, a, b)
        graph = arena.graph(ctx, result, allocate=False)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
        capi.ggml_backend_buffer_clear(buffer, 0)
        compute = capi.ggml_backend_graph_compute
        tried("ggml_backend_graph_compute", lambda: compute(backend, graph))
        check_product(backend)
        compute(backend, graph)
    """,
    "gguf": """
        large, small = arena.gguf(), arena.gguf()
        capi.gguf_set_arr_data(large, "key", UINT8, np.full(32 * MiB, 7, np.uint8))
        capi.gguf_set_val_u32(small, "number", 3)
        tried("gguf_set_kv", lambda: capi.gguf_set_kv(small, large))
        tried("gguf_get_meta_size", lambda: capi.gguf_get_meta_size(large))
        assert capi.gguf_get_val_u32(small, capi.gguf_find_key(small, "number")) == 3
        assert capi.gguf_find_key(small, "key") == -1
    """,
    "data set": """
        new = capi.ggml_opt_dataset_init
        tried("ggml_opt_dataset_init", lambda: new(F32, F32, 1, 1, 1 << 26, 1))
        capi.ggml_opt_dataset_free(new(F32, F32, 1, 1, 1 << 10, 1))
    """,
    "addends on a meta device": """
        device = MetaDevice(["CPU", "CPU"], lambda info, n_devs: SplitState.partial())
        backend = capi.ggml_backend_dev_init(device.handle)
        ctx = arena.context(1 << 14)
        weight = arena.tensor(8 * MiB, ctx=ctx)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
        numbers = np.ones(8 * MiB, np.float32)
        tried("ggml_backend_tensor_set", lambda: capi.ggml_backend_tensor_set(weight, numbers, 0))
        capi.ggml_backend_tensor_set(weight, numbers, 0)
    """,
    "scheduler": """
        new = capi.ggml_backend_sched_new
        tried("ggml_backend_sched_new", lambda: new([cpu], None, 1 << 14, False, False))
        tried("ggml_backend_sched_new", lambda: new([cpu], None, 1 << 20, True, False))
        capi.ggml_backend_sched_free(new([cpu], None, 1 << 14, False, False))
    """,
}


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_bad_alloc_is_a_memory_error(body: str) -> None:
    if "MetaDevice" in body:
        require("ggml_backend_meta_device")
    found = run(body)
    assert found
    for function, memory_error, _, text in found:
        assert memory_error, found
        assert text == f"{function}: out of memory (std::bad_alloc)"


def test_what_ggml_notices_itself_is_told_in_its_words() -> None:
    """Where ggml looks at what it got, its message says how much was asked for."""
    found = run("""
        ctx = arena.context()
        large = arena.tensor(64 * MiB, ctx=ctx)
        graph = arena.graph(ctx, capi.ggml_sqr(ctx, large), allocate=False)
        galloc = capi.ggml_gallocr_new(capi.ggml_backend_cpu_buffer_type())
        sched = capi.ggml_backend_sched_new([cpu], None, 64, False, False)
        tried("a context", lambda: capi.ggml_init(mem_size=256 * MiB))
        tried("a buffer", lambda: capi.ggml_backend_alloc_buffer(cpu, 256 * MiB))
        tried("tensors", lambda: capi.ggml_backend_alloc_ctx_tensors(ctx, cpu))
        tried("a graph", lambda: capi.ggml_gallocr_alloc_graph(galloc, graph))
        tried("a scheduler's graph", lambda: capi.ggml_backend_sched_reserve(sched, graph))
        capi.ggml_free(capi.ggml_init(mem_size=256 * MiB))
    """)
    assert [name for name, *_ in found] == [
        "a context", "a buffer", "tensors", "a graph", "a scheduler's graph",
    ]  # fmt: skip
    for name, no_memory, kind, text in found:
        assert no_memory
        assert kind == ("AbortMemoryError" if name == "a context" else "StatusMemoryError")
        assert "insufficient memory (attempted to allocate " in str(text)


def test_a_gguf_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """ggml takes that for an invalid file, and says why."""
    (found,) = run(f"""
        large = arena.gguf()
        capi.gguf_set_arr_data(large, "key", UINT8, np.full(32 * MiB, 7, np.uint8))
        capi.gguf_write_to_file(large, {str(tmp_path / "large.gguf")!r}, False)
        read = lambda: capi.gguf_init_from_file({str(tmp_path / "large.gguf")!r}, no_alloc=True)
        tried("file", read)
        capi.gguf_free(read())
    """)
    assert found[2] == "GGUFError"
    assert "bad_alloc error while reading value for key 'key'" in str(found[3])
