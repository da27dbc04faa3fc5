"""The rpc-server command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ._demo import UsageError
from .errors import GGMLError
from .rpc import Server

_WARNING = (
    "warning: ggml's RPC has no authentication and no encryption: whoever reaches {} can read and "
    "write this process's memory"
)


def run(
    host: str,
    port: int,
    devices: Sequence[str] | None,
    threads: int | None,
    cache_dir: Path | None,
    *,
    allow_remote: bool,
    until_eof: bool,
) -> int:
    """Serve until a signal, or the end of standard input; returns the exit status."""
    # ggml tells of its clients on the standard output: that is for the address alone
    output = os.dup(1)
    os.dup2(2, 1)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    try:
        server = Server(host, port, devices, threads, cache_dir, allow_remote=allow_remote)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    if allow_remote:
        print(_WARNING.format(server.address), file=sys.stderr, flush=True)
    os.write(output, f"{server.address}\n".encode())
    os.close(output)
    if until_eof:
        threading.Thread(target=_watch_input, args=(ending,), daemon=True).start()
    while not ending.wait(0.2):
        if server.wait(0):
            raise GGMLError("the server has stopped by itself")
    # A computation may go on, on threads that nobody can stop; nothing has to be put in order.
    sys.stderr.flush()
    os._exit(0)


def _watch_input(ending: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ending.set()
