"""Go through all cycles, or those whose names have one of the arguments in them."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict

from ggml_cffi.errors import NotSupportedError

from . import callbacks, costs, handles, objects
from .harness import BATCHES, SANITIZED, Left, N, measure


def all_cycles() -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Names, cycles, how many, in at most how many batches."""
    for name, cycle in (*handles.cases(), *callbacks.cases()):
        yield name, cycle, N, BATCHES
    for name, cycle in objects.OBJECTS.items():
        # failures go through Python's and ggml's logs, meta devices through Python: both take long
        slow = ": fail" in name or name == "Compiled: close, on a meta device"
        yield name, cycle, N // 5 if slow else N, BATCHES
    for name, cost in costs.ABORTS.items():
        yield f"abort: {name}", cost.cycle, cost.n, 2
    for name, cycle in costs.META_DEVICES.items():
        yield name, cycle, N, 2
    for name, purpose in costs.ON_PURPOSE.items():
        yield f"on purpose: {name}", purpose.cycle, purpose.n, 1


def main(chosen: list[str]) -> None:
    gc.collect()
    gc.freeze()  # collections look at what is new only
    for name, cycle, n, batches in all_cycles():
        if chosen and not any(part in name for part in chosen):
            continue
        try:
            cycle()
            left = measure(name, cycle, min(n, 100) if SANITIZED else n, batches)
        except NotSupportedError as error:
            left = Left(name, missing=str(error))
        except Exception:
            left = Left(name, error=traceback.format_exc())
        print(json.dumps(asdict(left)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
