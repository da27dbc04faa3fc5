"""Examples that are faults, for the tests of the fuzz itself."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import Counter
from typing import Any

from memory import PAGE, GuardedMemory
from programs import BF16, F32, Builder
from single import Program, node_by_node

from ggml_cffi import capi, ffi


def run(example: dict[str, Any], counts: Counter[str]) -> None:
    counts["began"] += 1
    globals()[example["how"]]()


def nothing() -> None:
    pass


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    signal.pause()


def speaks() -> None:
    os.write(1, b"what C prints is no answer\n")


def overruns() -> None:
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    tensor = capi.ggml_new_tensor(ctx, F32, [5])
    with GuardedMemory([tensor], 0):
        start = int(ffi.cast("uintptr_t", tensor.data))
        assert (start + 20) % PAGE == 0
        ctypes.memset(start + 20, 0, 1)


def differs() -> None:
    """A kernel that is off by a little: here, an operand that changes under it."""
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    backend = capi.ggml_backend_cpu_init()
    builder = Builder(ctx, [4, 4, 4, 4], {})
    a, b = builder.leaf(F32, (4, 4)), builder.leaf(BF16, (4, 4))
    builder.made("ggml_add", a, a)
    builder.made("ggml_neg", b)
    program = Program(builder, 3)
    inner = program.parts(capi.ggml_init(mem_size=1 << 20, no_alloc=True))
    with GuardedMemory([part for parts in inner for part in parts], 0):
        program.fill([parts[-1] for parts in inner])
        node_by_node(ctx, backend, program, inner, Counter())  # right
        inner[2][-1].op = capi.GGML_OP_MUL
        node_by_node(ctx, backend, program, inner, Counter())
