"""What there is before and after: memory, native handles, Python objects, tables of the package."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggml_cffi import _callbacks, buffer, diagnostics, lib, meta

#: At most: what malloc cannot give back because a neighbour is in use comes and goes, and it may
#: take as long until it goes.
BATCHES = 12

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
_PAGE = os.sysconf("SC_PAGESIZE")
FEW_PAGES = 4 * _PAGE  # no reason to look again
#: A sanitizer's malloc keeps what is freed for a while, and glibc's knows nothing of it.
SANITIZED = "libasan" in Path("/proc/self/maps").read_text(encoding="utf-8")
#: Cycles. Under a sanitizer they take several times as long, and find what each does wrong at once.
N = 100 if SANITIZED else 1000
EXACT = not SANITIZED and hasattr(libc, "mallinfo2")  # glibc 2.33
if EXACT:
    libc.mallinfo2.restype = _MallInfo


def resident() -> int:
    """Bytes of memory that the process has, once what is free is given back."""
    gc.collect()
    libc.malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def allocated() -> int:
    """Bytes that malloc has handed out: to C, and to Python for what is large."""
    info = libc.mallinfo2() if EXACT else _MallInfo()
    return int(info.uordblks + info.hblkhd)


def tables() -> dict[str, int]:
    """How many files and threads there are, and entries of the package about its handles."""
    found = {
        f"_callbacks.{name}": len(value)
        for name, value in vars(_callbacks).items()
        if isinstance(value, dict | list) and not name.startswith("__")
    }
    found["_callbacks.owners, in all"] = sum(map(len, _callbacks.owners.values()))
    for name in ("fd", "task"):
        found[f"/proc/self/{name}"] = len(os.listdir(f"/proc/self/{name}"))
    found["buffer._taken"] = len(buffer._taken)
    found["memory.hpp"] = lib.ggml_cffi_remembered()
    for function in _callbacks._meta.values():
        for name, value in vars(function).items():
            if isinstance(value, dict | set):
                key = f"{meta.__name__}.{name}"
                found[key] = found.get(key, 0) + len(value)
    return found


@dataclass
class Left:
    """What a batch of `n` cycles left.

    Of memory the least of all batches: a leak is in each. Of all else the mean, rounded up: what is
    left over once is seen, however many batches there are.
    """

    name: str
    n: int = 0
    error: str = ""
    missing: str = ""  # what this ggml does not have
    seconds: float = 0.0
    resident: int = 0
    allocated: int | None = None
    objects: int = 0
    handles: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    aborts: int = 0


def _mean(grown: int, batches: int) -> int:
    """Away from zero, where it does not divide."""
    return math.ceil(abs(grown) / batches) * (1 if grown > 0 else -1)


def _grown(after: dict[str, int], before: dict[str, int], batches: int) -> dict[str, int]:
    now = {key: _mean(value - before.get(key, 0), batches) for key, value in after.items()}
    return {key: value for key, value in now.items() if value}


def measure(name: str, cycle: Callable[[], object], n: int = N, batches: int = BATCHES) -> Left:
    """Go through `n` cycles, and again while memory has grown, which may be chance once."""
    left = Left(name, n)
    begun = time.monotonic()
    for _ in range(n // 10):
        cycle()  # what is made once: caches, pools, the first size of a table
    gc.collect()
    handles, lost = diagnostics.live_handles(), diagnostics.leaked_handles()
    entries, aborts = tables(), diagnostics.caught_aborts()
    objects = len(gc.get_objects())
    for batch in range(batches):
        pages, had = resident(), allocated()
        for _ in range(n):
            cycle()
        grown, more = resident() - pages, allocated() - had
        left.resident = grown if batch == 0 else min(left.resident, grown)
        left.allocated = more if left.allocated is None else min(left.allocated, more)
        left.objects = _mean(len(gc.get_objects()) - objects, batch + 1)
        left.handles = _grown(diagnostics.live_handles(), handles, batch + 1)
        left.lost = _grown(diagnostics.leaked_handles(), lost, batch + 1)
        left.tables = _grown(tables(), entries, batch + 1)
        left.aborts = _mean(diagnostics.caught_aborts() - aborts, batch + 1)
        if SANITIZED or (left.resident <= FEW_PAGES and left.allocated <= 0):
            break
    if not EXACT:
        left.allocated = None
    left.seconds = round(time.monotonic() - begun, 3)
    return left


def raises(error: Any, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """The call must raise `error`."""
    try:
        function(*args, **kwargs)
    except error:
        return
    raise AssertionError(f"{function} raised nothing")
