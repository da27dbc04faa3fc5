"""Whether a process is at rest: no more threads than before, and none that runs."""

from __future__ import annotations

import os
import time


def threads_of_process() -> int:
    """The number of threads, those of C included."""
    return len(os.listdir("/proc/self/task"))


def idle(threads: int, seconds: float = 2.0) -> bool:
    """Whether the process comes to rest with so many threads, or fewer, within `seconds`.

    Threads that are ending are given time to; then, while this one sleeps, next to no processor
    time may go by.
    """
    end = time.monotonic() + seconds
    while True:
        began, used = time.monotonic(), time.process_time()
        time.sleep(0.02)
        burnt = (time.process_time() - used) / (time.monotonic() - began)
        if threads_of_process() <= threads and burnt < 0.2:
            return True
        if time.monotonic() > end:
            return False
