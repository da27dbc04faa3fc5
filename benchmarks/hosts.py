"""Hosts on this machine, each with a network of its own, linked with a bandwidth and a delay.

A host is a network namespace; nothing of the machine's own network is touched. What is made here
ends with the process, however that ends: the kernel takes namespaces back that nobody is in, and
workers end with their standard input.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)
_TUN = "/dev/net/tun"


def lacking(delay: bool = False) -> str:
    """What there is not on this machine for hosts, with a delay if so wanted; "" for nothing."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"program {program} (of iproute2)"
    if delay and not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} that may be opened"
    try:
        os.close(_namespace())
    except OSError as error:
        return f"right to make network namespaces ({error.strerror})"
    return ""


def _call(function: str, *arguments: int) -> None:
    if getattr(_libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _own() -> int:
    """A descriptor of the network namespace that this thread is in."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _namespace() -> int:
    """A descriptor of a new network namespace."""
    before = _own()
    try:
        _call("unshare", _NEW_NETWORK)
        try:
            return _own()
        finally:
            _call("setns", before, _NEW_NETWORK)
    finally:
        os.close(before)


class Host:
    """A network of its own. In a ``with host.inside()`` block this thread's sockets are of it."""

    def __init__(self) -> None:
        self._namespace = _namespace()
        #: The name of the namespace for `ip`.
        self.path = f"/proc/{os.getpid()}/fd/{self._namespace}"
        self.run("ip", "link", "set", "lo", "up")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is on the host."""
        before = _own()
        try:
            _call("setns", self._namespace, _NEW_NETWORK)
            try:
                yield
            finally:
                _call("setns", before, _NEW_NETWORK)
        finally:
            os.close(before)

    def run(self, *command: str) -> None:
        """Run a program on the host. Raises OSError with what it says where it fails."""
        with self.inside():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        """Leave it; it is there as long as a process is in it."""
        os.close(self._namespace)


class Worker:
    """A host with a worker that listens there, linked with the client's host."""

    def __init__(self, client: Host, number: int, threads: int) -> None:
        self.host = Host()
        self.link = f"to{number}"  # the client's end; the other one is up0
        self._ours, self.ip = f"10.77.{number}.1", f"10.77.{number}.2"
        self._client = client
        self._threads = threads
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def connect_cable(self) -> None:
        """Link the two hosts, as fast as the machine can."""
        peer = ("peer", "name", "up0", "netns", self.host.path)
        self._client.run("ip", "link", "add", self.link, "type", "veth", *peer)

    def address(self) -> None:
        """Give both ends of the link their addresses, and make it work."""
        for host, device, ip in (
            (self._client, self.link, self._ours),
            (self.host, "up0", self.ip),
        ):
            host.run("ip", "address", "add", f"{ip}/30", "dev", device)
            host.run("ip", "link", "set", device, "up")

    def limit(self, rate: float) -> None:
        """Let no more than `rate` bits a second through, each way; 0 for all."""
        for host, device in ((self._client, self.link), (self.host, "up0")):
            with contextlib.suppress(OSError):  # there is none yet
                host.run("tc", "qdisc", "del", "dev", device, "root")
            if rate:
                # what passes at once: what comes while a timer is late, and the largest packet
                burst = max(int(rate / 8 * 500e-6), 68 << 10)
                bucket = ("rate", f"{rate:.0f}bit", "burst", str(burst), "latency", "100ms")
                host.run("tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def cut(self) -> None:
        """Nothing goes through the link any more."""
        self._client.run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """All goes through again."""
        self._client.run("ip", "link", "set", self.link, "up")

    def start(self) -> None:
        """Start the worker, and wait until it listens."""
        command = (sys.executable, "-m", "ggml_cffi", "rpc-server", "--host", self.ip)
        options = ("--allow-remote", "--until-eof", "--device", "CPU")
        with self.host.inside():
            self.process = subprocess.Popen(
                (*command, *options, "--threads", str(self._threads)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def wait_until_it_listens(self) -> None:
        """Learn its port."""
        assert self.process is not None and self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().decode().strip()
        if not self.endpoint:
            raise OSError(f"the worker on {self.ip} did not start ({self.process.wait()})")

    def close(self) -> None:
        """End the worker."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.host.close()


class Network:
    """A client's host and hosts with a worker each, in a star.

    `rate`: bits a second of each link, each way, 0 for no limit. `delay`: seconds that all takes
    on its way, each way.
    """

    def __init__(self, n: int, *, rate: float = 0, delay: float = 0, threads: int = 1) -> None:
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self.client = Host()
            undo.callback(self.client.close)
            self.workers: list[Worker] = []
            for number in range(n):
                worker = Worker(self.client, number, threads)
                self.workers.append(worker)
                undo.callback(worker.close)
                if delay:
                    cable = _SlowCable(self.client, worker, delay)
                    undo.callback(cable.close)
                else:
                    worker.connect_cable()
                worker.address()
                worker.limit(rate)
                worker.start()
            for worker in self.workers:
                worker.wait_until_it_listens()
            self._closing = undo.pop_all()

    @property
    def endpoints(self) -> list[str]:
        """Where the workers listen, on the client's host."""
        return [worker.endpoint for worker in self.workers]

    def limit(self, rate: float) -> None:
        """Let no more than `rate` bits a second through each link from now on; 0 for all."""
        for worker in self.workers:
            worker.limit(rate)

    def close(self) -> None:
        """End the workers, and leave the hosts."""
        self._closing.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _SlowCable:
    """Passes packets on after a delay: `tc` has that only where the kernel was built with netem."""

    def __init__(self, client: Host, worker: Worker, delay: float) -> None:
        self._delay = delay
        self._ends = [_tunnel(client, worker.link), _tunnel(worker.host, "up0")]
        self._stop = os.eventfd(0)
        self._threads = [
            threading.Thread(target=self._pass_on, args=ends, daemon=True)
            for ends in (self._ends, self._ends[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source: int, target: int) -> None:
        on_the_way: collections.deque[tuple[float, bytes]] = collections.deque()
        while True:
            left = max(on_the_way[0][0] - time.monotonic(), 0) if on_the_way else None
            ready, _, _ = select.select([source, self._stop], [], [], left)
            if self._stop in ready:
                return
            if ready:
                on_the_way.append((time.monotonic() + self._delay, os.read(source, 1 << 16)))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # the other end is down: it is lost
                    os.write(target, on_the_way[0][1])
                on_the_way.popleft()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        for thread in self._threads:
            thread.join()
        for descriptor in (*self._ends, self._stop):
            os.close(descriptor)


def _tunnel(host: Host, name: str) -> int:
    """A network device on a host, whose packets are read from the descriptor and written to it."""
    with host.inside():
        descriptor = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        try:
            # TUNSETIFF; IFF_TUN | IFF_NO_PI
            fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))
        except OSError:
            os.close(descriptor)
            raise
    return descriptor
