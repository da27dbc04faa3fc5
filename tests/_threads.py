"""Whether a process is at rest: no more threads than before, and none that runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path


def threads_of_process() -> int:
    """The number of threads, those of C included."""
    return len(os.listdir("/proc/self/task"))


def demand() -> tuple[dict[str, float], bool]:
    """Seconds that each other thread has run or waited for a processor; whether one does now."""
    spent, now = {}, False
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(threading.get_native_id()):
            with contextlib.suppress(OSError):  # it has just ended
                ran, waited, _ = (task / "schedstat").read_text().split()
                spent[task.name] = (int(ran) + int(waited)) / 1e9
                now |= (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return spent, now


def idle(threads: int, seconds: float = 5.0) -> bool:
    """Whether the process comes to rest with so many threads, or fewer, within `seconds`.

    Threads that are ending are given time to; then, while this one sleeps, hardly any other may
    run or, where the processors are busy, want to.
    """
    end = time.monotonic() + seconds
    while True:
        began, (before, _) = time.monotonic(), demand()
        time.sleep(0.02)
        after, now = demand()
        wanted = sum(spent - before.get(name, 0) for name, spent in after.items())
        share = wanted / (time.monotonic() - began)
        if threads_of_process() <= threads and share < 0.2 and not now:
            return True
        if time.monotonic() > end:
            return False
