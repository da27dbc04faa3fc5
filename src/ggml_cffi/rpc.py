"""Devices of other processes and machines: ggml's RPC, with time limits and clear errors.

A *worker* is a process that serves its devices, `Server` or ``python -m ggml_cffi rpc-server``;
`connect` gives its devices to this process. A worker that is lost (it died, stopped answering, or
the network failed) is an `RPCError` in every call that needs it, within the connection's time
limit; other devices go on, and another `connect` to the same endpoint begins anew.

ggml's RPC neither authenticates nor encrypts, and whoever reaches a worker can have it read and
write its memory: serve on loopback or in a network whose members you trust.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import operator
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

from . import capi
from ._handles import Closing, Owned, _check_process, _each, renew_after_fork
from ._loader import lib
from ._locks import with_or_without
from .backend import usable_cores
from .capi import types
from .device import Device, device, devices
from .errors import GGMLError, NotSupportedError, RPCError

__all__ = ["Connection", "LocalWorkers", "RemoteDevice", "Server", "connect", "serve"]

_rpc: Any = capi  # with the functions of a header that not every build has
_HELLO = 14  # the one command whose number never changes
_MOST_SECONDS = 1_000_000.0
_connecting = threading.RLock()
renew_after_fork(globals(), "_connecting")
_numbers = itertools.count(1)


class RemoteDevice(Device):
    """A device of a worker. It keeps the connection open."""

    def __init__(self, handle: types.ggml_backend_device, connection: Connection) -> None:
        super().__init__(handle)
        self._connection = connection

    @property
    def connection(self) -> Connection:
        """The connection that it is reached through."""
        return self._connection

    @property
    def handle(self) -> types.ggml_backend_device:
        """The pointer, for `capi`. Raises ValueError once the connection is closed."""
        if self._connection.closed:
            raise ValueError(f"the connection to {self._connection.endpoint} is closed")
        return super().handle


class Connection(Sequence[RemoteDevice], Owned[types.ggml_backend_buffer]):
    """The devices of a worker, as a sequence; made by `connect`.

    Closing it frees nothing that was made on the devices, but no more can be made; the socket is
    closed with the last buffer. A worker serves one process at a time: others wait until then.
    """

    def __init__(self, endpoint: str, timeout: float, response_timeout: float) -> None:
        _require_rpc()
        timeout = _seconds("timeout", timeout)
        response_timeout = _seconds("response_timeout", response_timeout)
        host, port = parse_endpoint(endpoint)
        until = time.monotonic() + timeout
        address = _resolve(endpoint, host, until)
        _greet(endpoint, address, port, until)
        self.endpoint: str = f"{host}:{port}"
        self.timeout: float = timeout
        self.response_timeout: float = response_timeout
        # Its name is its own: ggml gives the socket of a name to whoever asks for it, a dead one
        # as well, and reads the port up to the first character that is no digit.
        number = next(_numbers)
        name = f"{address}:{port}" if number == 1 else f"{address}:{port}#{number}"
        limits = f"{address}:{port}".encode()
        # the limits are those of the address
        handles, held = with_or_without(
            _connecting, lambda alone: self._open(name, limits, until, alone), _left(until)
        )
        Owned.__init__(self, held, capi.ggml_backend_buffer_free)
        self._devices = tuple(RemoteDevice(handle, self) for handle in handles)

    def _open(
        self, name: str, limits: bytes, until: float, alone: bool
    ) -> tuple[list[types.ggml_backend_device], types.ggml_backend_buffer]:
        """Connect, `alone`, for one connection is opened at a time: devices, and what holds it."""
        if not alone:
            reason = "no connection in time: others are being opened"
            raise RPCError(f"{self.endpoint}: {reason}", self.endpoint, reason)
        # until the worker is ours, it may serve somebody else, who came first
        if not lib.ggml_cffi_net_limits(limits, _left(until), self.response_timeout, True):
            raise MemoryError(f"no memory for a connection to {self.endpoint}")
        try:
            registry = _rpc.ggml_backend_rpc_add_server(name)
            count = capi.ggml_backend_reg_dev_count(registry)
            handles = [capi.ggml_backend_reg_dev_get(registry, i) for i in range(count)]
            # ggml keeps the socket as long as there is a buffer, and connects anew after that
            kind = capi.ggml_backend_dev_buffer_type(handles[0])
            held = capi.ggml_backend_buft_alloc_buffer(kind, 1)
        except RPCError as error:
            raise _named(error, self.endpoint) from None
        finally:
            lib.ggml_cffi_net_limits(limits, self.timeout, self.response_timeout, False)
        return handles, held

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        """The devices, in the worker's order."""
        return self._devices

    @overload
    def __getitem__(self, index: int) -> RemoteDevice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RemoteDevice, ...]: ...
    def __getitem__(self, index: int | slice) -> RemoteDevice | tuple[RemoteDevice, ...]:
        return self._devices[index]

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)} device{'s' * (len(self) != 1)}"
        return f"<Connection {self.endpoint}: {state}>"


def connect(endpoint: str, timeout: float = 10.0, response_timeout: float = 300.0) -> Connection:
    """The devices of the worker at ``endpoint``, "host:port".

    `timeout`: seconds for all of it together: the host's address is found, the worker is connected
    to, greets and tells its devices. `response_timeout`: seconds that each answer may take from
    then on, a computation's included; longer ones lose the worker.

    Raises RPCError where nobody is there, or answers in time, or what answers is no RPC server, or
    one of another version; NotSupportedError where this ggml was built without RPC; ValueError for
    what is no endpoint or time.
    """
    return Connection(endpoint, timeout, response_timeout)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ValueError for what is none, TypeError for no str."""
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint is {endpoint!r} ({type(endpoint).__name__}), expected a str")
    host, _, digits = endpoint.rpartition(":")
    good = host and ":" not in host and digits.isascii() and digits.isdigit()
    if not good or not 1 <= int(digits) <= 65535 or host != host.strip() or "\0" in host:
        raise ValueError(
            f'endpoint is {endpoint!r}, expected "host:port" with a port of 1 to 65535'
        )
    return host, int(digits)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected seconds")
    if not 0 < value <= _MOST_SECONDS:
        raise ValueError(f"{name} is {value!r}, expected more than 0 and at most {_MOST_SECONDS:g}")
    return float(value)


def _require_rpc() -> None:
    """Raise NotSupportedError unless this ggml has RPC, as a library or as a module."""
    devices()  # loads the modules
    if not hasattr(lib, "ggml_backend_rpc_add_server"):
        raise NotSupportedError(
            "this ggml was built without RPC; build the package for one that has it, such as "
            'libggml-python from its source release with CMAKE_ARGS="-DGGML_RPC=ON"'
        )


def _named(error: RPCError, endpoint: str) -> RPCError:
    return RPCError(f"{endpoint}: {error.reason}", endpoint, error.reason)


def _left(until: float) -> float:
    """The seconds until then; a moment, where it is over."""
    return max(until - time.monotonic(), 0.001)


def _resolve(endpoint: str, host: str, until: float) -> str:
    """The IPv4 address of a host: ggml knows no other kind."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.IPv4Address(host))
    found: list[str] = []
    reasons = ["its address is not found in time"]

    def look_up() -> None:
        try:
            several = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            found.append(str(several[0][4][0]))
        except (OSError, UnicodeError) as error:
            said = getattr(error, "strerror", error)
            reasons.append(f"the host {host!r} has no IPv4 address ({said})")

    # It has no time limit, and what it waits for cannot be interrupted: it is left to itself.
    thread = threading.Thread(target=look_up, name=f"address of {host}", daemon=True)
    thread.start()
    thread.join(_left(until))
    if not found:
        raise RPCError(f"{endpoint}: {reasons[-1]}", endpoint, reasons[-1])
    return found[0]


def _versions() -> tuple[int, int, int]:
    names = (f"RPC_PROTO_{part}_VERSION" for part in ("MAJOR", "MINOR", "PATCH"))
    major, minor, patch = (int(getattr(capi, name)) for name in names)
    return major, minor, patch


def _greet(endpoint: str, address: str, port: int, until: float) -> None:
    """Ask what is there for its version: ggml would wait for ever, and abort over nonsense."""
    ours = _versions()
    # Capabilities of the transport came with version 4. A server of another version hangs up on a
    # greeting that is too long or too short: it is asked in its own way then, for the message.
    sizes = (24, 0) if ours[0] >= 4 else (0, 24)
    found = None
    reason = "it closes the connection instead of answering: it is no RPC server"
    for size in sizes:
        try:
            found = _ask_version(address, port, size, until)
        except ConnectionRefusedError:
            reason = "nobody is there (connection refused)"
        except TimeoutError as error:
            reason = f"no answer to the greeting in time: {error}"
        except ConnectionError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        break
    if found == ours:
        return
    if found is not None:
        theirs, mine = (".".join(map(str, version)) for version in (found, ours))
        reason = f"it speaks version {theirs} of ggml's RPC, and this ggml version {mine}"
    raise RPCError(f"{endpoint}: {reason}", endpoint, reason)


def _ask_version(address: str, port: int, size: int, until: float) -> tuple[int, int, int]:
    """The version that a server tells; `size`: bytes that the greeting has."""
    try:
        link = socket.create_connection((address, port), _left(until))
    except TimeoutError:
        raise TimeoutError("there is no connection") from None
    with link:
        link.sendall(struct.pack("<BQ", _HELLO, size) + bytes(size))
        length = int.from_bytes(_receive(link, 8, until), "little")
        if not 3 <= length <= 64:  # three numbers and, in time, more
            raise ValueError("what it answers is no greeting: it is no RPC server")
        major, minor, patch = _receive(link, length, until)[:3]
    return major, minor, patch


def _receive(link: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        link.settimeout(_left(until))
        try:
            more = link.recv(size - len(data))
        except TimeoutError:
            raise TimeoutError("it is no RPC server, or is busy with another client") from None
        if not more:
            raise ConnectionResetError
        data += more
    return data


# ---- the other side


class Server(Closing):
    """Serves devices of this process to one client after the other, on a thread of its own.

    `host` is an IPv4 address of this machine, `port` 0 for a free one; `address` tells which.
    `devices`: devices or their names, by default the first CPU. `threads`: those that each CPU
    computes with, by default all usable cores. `cache_dir`: a folder where large tensors are kept,
    for the next time the same ones are sent.

    Raises ValueError for an address that is not loopback, unless `allow_remote`: ggml's RPC has no
    authentication, and its clients can read and write this process's memory. GGMLError where the
    port cannot be had.

    `close()` ends a client's connection between two of its messages; it waits until a computation
    is over. ggml keeps the memory of the backends for the life of the process.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        devices: Sequence[Device | str] | None = None,
        threads: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        allow_remote: bool = False,
    ) -> None:
        _require_rpc()
        _check_host(host, allow_remote)
        if isinstance(port, bool) or not 0 <= operator.index(port) <= 65535:
            raise ValueError(f"port is {port!r}, expected 0 to 65535")
        if isinstance(devices, str) or (devices is not None and not devices):
            raise ValueError(f"devices is {devices!r}, expected at least one device or name")
        served = [device(d) if isinstance(d, str) else d for d in devices or ["CPU"]]
        count = usable_cores() if threads is None else operator.index(threads)
        if cache_dir is not None:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        self._service = _Service(f"{host}:{port}", cache_dir, count, served)
        self._finalizer = weakref.finalize(self, self._service.stop)
        self._finalizer.atexit = False  # the system takes all back anyway
        try:
            found = self._service.start()
        except BaseException:
            self.close()
            raise
        if found > 65535:
            self.close()
            error: BaseException | None = self._service.error  # set by the thread
            reason = "the address or the port cannot be had" if error is None else str(error)
            raise GGMLError(f"cannot serve on {host}:{port}: {reason}") from error
        self.host: str = host
        self.port: int = found

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        return f"{self.host}:{self.port}"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has stopped, or for so many seconds; whether it has.

        Raises what has made it stop, if that was an error, and RuntimeError in a forked child.
        """
        _check_process(self, self._pid)
        if not self._service.wait(timeout):
            return False
        if self._service.error is not None:
            raise self._service.error
        return True

    @property
    def closed(self) -> bool:
        """Whether it serves no more."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop serving, and wait until that is so, whichever thread has closed it.

        Closing twice is fine. Raises RuntimeError in a forked child.
        """
        if not self.closed:
            _check_process(self, self._pid)
            self._finalizer()
        self._service.wait(None)

    def __repr__(self) -> str:
        return f"<Server {self.address}{' (closed)' * self.closed}>"


class _Service:
    """The thread of a server, which refers to this and not to the server: that can be forgotten."""

    def __init__(
        self, endpoint: str, cache_dir: Any, threads: int, served: Sequence[Device]
    ) -> None:
        self.error: BaseException | None = None
        self._lock = threading.RLock()  # around the descriptors, which the thread closes
        self._pid = os.getpid()
        self._stop, self._ready = os.eventfd(0), os.eventfd(0)
        self._told = threading.Event()
        self._thread = threading.Thread(
            target=self._serve,
            args=(endpoint, cache_dir, threads, served),
            name=f"ggml rpc server {endpoint}",
            daemon=True,
        )

    def start(self) -> int:
        """Begin to serve; the port, or a number that is none where that failed."""
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise
        try:
            return _read(self._ready)
        finally:
            self._told.set()

    def _serve(self, endpoint: str, cache_dir: Any, threads: int, served: Sequence[Device]) -> None:
        try:
            lib.ggml_cffi_net_serve(self._stop, self._ready)
            handles = [item.handle for item in served]
            _rpc.ggml_backend_rpc_start_server(endpoint, cache_dir, threads, handles)
        except BaseException as error:
            self.error = error
        finally:
            lib.ggml_cffi_net_serve(-1, -1)
            os.eventfd_write(self._ready, 1 << 32)  # in case nobody has been told
            self._told.wait()
            self._close()

    def _close(self) -> None:
        with self._lock:
            descriptors, self._stop, self._ready = (self._stop, self._ready), -1, -1
            for descriptor in descriptors:
                os.close(descriptor)

    def stop(self) -> None:
        """Tell the thread to end. The garbage collector may do so, on any thread, and cannot wait.

        In a forked child there is none, and the parent's goes on.
        """
        if self._pid == os.getpid():
            with self._lock:
                if self._stop >= 0:
                    os.eventfd_write(self._stop, 1)

    def wait(self, timeout: float | None) -> bool:
        """Whether the thread has ended, within so many seconds."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _read(descriptor: int) -> int:
    """What an eventfd is told; a signal does not end the wait."""
    while True:
        with contextlib.suppress(InterruptedError):
            return os.eventfd_read(descriptor)


def _check_host(host: str, allow_remote: bool) -> None:
    if not isinstance(host, str):
        raise TypeError(f"host is {host!r} ({type(host).__name__}), expected a str")
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"host is {host!r}, expected an IPv4 address, such as 127.0.0.1") from None
    if not address.is_loopback and not allow_remote:
        raise ValueError(
            f"host is {host}, which others can reach: ggml's RPC has no authentication, and "
            "whoever connects can read and write this process's memory. With allow_remote "
            "(--allow-remote) it is served all the same"
        )


def serve(
    endpoint: str,
    devices: Sequence[Device | str] | None = None,
    threads: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    allow_remote: bool = False,
) -> None:
    """Serve at ``endpoint``, "host:port", until it is interrupted; see `Server`."""
    host, port = parse_endpoint(endpoint)
    with Server(host, port, devices, threads, cache_dir, allow_remote=allow_remote) as server:
        while not server.wait(1.0):  # a join without an end would take no signal
            pass


class LocalWorkers(Sequence[RemoteDevice], Closing):
    """`n` workers on this machine, child processes that listen on loopback; a context manager.

    A sequence of their devices, one CPU each, that computes with `threads` threads. The processes
    end with `close()`, with the object, and with this process, however that ends.

    Raises GGMLError for a worker that does not start within `timeout` seconds, with what it said.
    """

    def __init__(
        self,
        n: int,
        threads: int = 1,
        *,
        timeout: float = 60.0,
        response_timeout: float = 300.0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _require_rpc()
        if isinstance(n, bool) or operator.index(n) < 1:
            raise ValueError(f"n is {n!r}, expected at least 1")
        until = time.monotonic() + _seconds("timeout", timeout)
        self._closed = False
        self._pid = os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        _started.add(self)
        self._connections: list[Connection] = []
        self.endpoints: list[str] = []
        self._said: list[tuple[_Said, _Said]] = []
        more = [] if cache_dir is None else ["--cache-dir", os.fspath(cache_dir)]
        command = [
            sys.executable,
            "-m",
            __package__,
            "rpc-server",
            "--port",
            "0",
            "--device",
            "CPU",
        ]
        command += ["--threads", str(operator.index(threads)), "--until-eof", *more]
        try:
            for _ in range(n):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        bufsize=0,  # a buffer has a lock, which a thread that reads holds for good
                        stdin=subprocess.PIPE,  # closed with this process: that ends the worker
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
                )
                process = self._processes[-1]
                assert process.stdout is not None and process.stderr is not None
                self._said.append((_Said(process.stdout), _Said(process.stderr)))
            for process, (out, err) in zip(self._processes, self._said, strict=True):
                self.endpoints.append(_first_line(process, out, err, until))
            for endpoint in self.endpoints:
                left = max(until - time.monotonic(), 1.0)
                self._connections.append(connect(endpoint, left, response_timeout))
        except BaseException:
            self.close()
            raise

    @property
    def connections(self) -> tuple[Connection, ...]:
        """A connection for each worker."""
        return tuple(self._connections)

    @property
    def processes(self) -> tuple[subprocess.Popen[bytes], ...]:
        """The processes."""
        return tuple(self._processes)

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        """All devices, in the order of the workers."""
        return tuple(found for connection in self._connections for found in connection)

    @overload
    def __getitem__(self, index: int) -> RemoteDevice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RemoteDevice, ...]: ...
    def __getitem__(self, index: int | slice) -> RemoteDevice | tuple[RemoteDevice, ...]:
        return self.devices[index]

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[RemoteDevice]:
        return iter(self.devices)

    @property
    def closed(self) -> bool:
        """Whether the processes have been ended."""
        return self._closed

    def close(self) -> None:
        """Close the connections and end the processes. Closing twice is fine.

        Raises RuntimeError in a forked child.
        """
        _check_process(self, self._pid)
        self._closed = True
        steps: list[Callable[[], object]] = [c.close for c in self._connections]
        steps += [lambda p=p: _end(p) for p in self._processes]  # type: ignore[misc]
        steps += [lambda s=s: s.text(1) for s in itertools.chain(*self._said)]  # type: ignore[misc]
        _each(steps)

    def __del__(
        self,
        getpid: Callable[[], int] = os.getpid,
        ends: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        try:
            if getattr(self, "_pid", None) == getpid():
                for process in self._processes:
                    _end(process)
        except (AttributeError, TypeError):
            if not ends():  # then modules may be empty: the worker ends as its input does
                raise


_started: weakref.WeakSet[LocalWorkers] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child does not keep its parent's workers alive, which read from the parent."""
    for workers in _started:
        for process in workers._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class _Said:
    """What a worker writes into a pipe: read by a thread, for the worker must not wait for that.

    The thread closes the pipe: nobody closes what another one is reading.
    """

    KEPT = 65536  # bytes, from the end; the first line by itself

    def __init__(self, pipe: IO[bytes]) -> None:
        self.first_line = b""
        self.begun = threading.Event()  # the first line is there, or never will be
        self._pipe = pipe
        self._last = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe, contextlib.suppress(OSError):
            while data := self._pipe.read(65536):
                self._last += data
                if not self.begun.is_set() and b"\n" in self._last:
                    self.first_line = bytes(self._last[: self._last.index(b"\n")])
                    self.begun.set()
                del self._last[: -self.KEPT]
        self.begun.set()

    def text(self, wait: float) -> str:
        """What it has said; all, if it has ended within so many seconds."""
        self._thread.join(wait)
        return bytes(self._last).decode(errors="replace").strip()


def _first_line(process: subprocess.Popen[bytes], out: _Said, err: _Said, until: float) -> str:
    """The address that a worker prints once it listens."""
    if not out.begun.wait(max(until - time.monotonic(), 0)):
        said = err.text(0)
        raise GGMLError(f"a worker did not start in time{said and ': '}{said}")
    if not out.first_line:
        status = process.wait()
        raise GGMLError(f"a worker did not start (status {status}): {err.text(5)}")
    return out.first_line.decode().strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
