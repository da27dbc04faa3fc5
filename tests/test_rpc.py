"""ggml's RPC: workers that compute, and all that can happen to them."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import Arena, check_product
from _proxy import Proxy, Speaker

from ggml_cffi import MetaDevice, SplitState, capi, diagnostics, meta, ops, rpc
from ggml_cffi.context import Context
from ggml_cffi.errors import AbortError, GGMLError, NotSupportedError, RPCError
from ggml_cffi.graph import Graph
from ggml_cffi.meta import policies

needs_rpc = pytest.mark.rpc
PATIENCE = 4.0  # seconds that an answer may take
BOUND = 3 * PATIENCE  # within which every fault is an exception


class Model:
    """A product on a device: weights, a compiled graph, and what it must give."""

    def __init__(self, device: Any, n: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.a = rng.standard_normal((n, n), np.float32)
        self.x = rng.standard_normal((3, n), np.float32)
        self.weights = Context()
        self.weight = self.weights.tensor((n, n), "f32", name="a")
        self.weights.allocate(device)
        self.weight.set(self.a)
        self.context = Context()
        x = self.context.tensor((3, n), "f32", name="x")
        self.compiled = Graph([ops.mul_mat(self.weight, x)]).compile(device)

    def run(self) -> Any:
        (found,) = self.compiled(x=self.x)
        return found

    def check(self) -> None:
        np.testing.assert_allclose(self.run(), self.x @ self.a.T, rtol=1e-4, atol=1e-4)

    def close(self) -> None:
        self.compiled.close()
        self.context.close()
        self.weights.close()


@pytest.fixture
def workers() -> Iterator[rpc.LocalWorkers]:
    with rpc.LocalWorkers(2, response_timeout=PATIENCE) as started:
        yield started
        gc.collect()


def lost(action: Callable[[], object], endpoint: str, bound: float = BOUND) -> RPCError:
    """The exception of an action, which comes in time and names the worker."""
    begin = time.monotonic()
    with pytest.raises(RPCError) as caught:
        action()
    assert time.monotonic() - begin < bound
    assert endpoint in str(caught.value)
    assert caught.value.endpoint == endpoint
    assert isinstance(caught.value, ConnectionError)
    return caught.value


@needs_rpc
def test_devices_of_workers_compute(workers: rpc.LocalWorkers) -> None:
    assert len(workers) == 2
    for device in workers:
        assert device.memory.total > 0
        assert device.description.split("#")[0] in workers.endpoints
        model = Model(device)
        model.check()
        model.close()


@needs_rpc
@pytest.mark.parametrize("n", [2, 4])
def test_a_meta_device_over_workers(n: int) -> None:
    def split(tensor: Any, n_devs: int) -> Any:
        if tensor.name == "up":
            shares = [4, 12, 0, 0][:n_devs] if n_devs == 4 else [6, 10]
            return SplitState.split(1, shares)
        if tensor.name == "down":
            shares = [4, 12, 0, 0][:n_devs] if n_devs == 4 else [6, 10]
            return SplitState.split(0, shares)
        return SplitState.mirrored()

    with rpc.LocalWorkers(n) as started, MetaDevice(list(started), split) as device:
        backend = capi.ggml_backend_dev_init(device.handle, None)
        try:
            check_product(backend)
        finally:
            capi.ggml_backend_free(backend)
        gc.collect()


@needs_rpc
def test_a_state_is_compared_and_stays_as_it_is(workers: rpc.LocalWorkers) -> None:
    """Written by what depends on it, once for each run: all runs begin with the same."""
    with MetaDevice(list(workers), policies.mirror()) as device, Context() as ctx:
        before = np.arange(64, dtype=np.float32).reshape(1, 64)
        state = ctx.from_numpy(before, name="state")
        ctx.allocate(device)
        x = ctx.input((1, 64), name="x")
        half = state * 0.5
        new = ops.cpy(half + x, state)
        found = meta.compare(Graph([new, half]), device)
        assert found.agrees and max(one.relative for one in found.nodes) == 0
        np.testing.assert_array_equal(state.numpy(), before)


@needs_rpc
def test_an_abort_of_the_cpu_beside_a_worker(workers: rpc.LocalWorkers) -> None:
    """A worker's threads are another process's: the abort need not end this one."""

    def split(tensor: Any, n_devs: int) -> Any:
        return SplitState.split(0, [16, 16])  # through a block of the result

    with (
        MetaDevice(["CPU", workers[0]], split) as device,
        device.init_backend(1) as backend,
        Arena(backend.handle) as arena,
    ):
        weight, ctx = arena.weight(32, 2), arena.context()
        graph = arena.graph(ctx, capi.ggml_cast(ctx, weight, capi.GGML_TYPE_Q4_0))
        with pytest.raises(AbortError, match="not implemented"):
            capi.ggml_backend_graph_compute(backend.handle, graph)
    for one in workers:
        model = Model(one)
        model.check()
        model.close()


@needs_rpc
@pytest.mark.parametrize("n", [2, 4])
def test_a_kv_cache_on_a_meta_device_over_workers(n: int) -> None:
    """Written by set_rows, cut by heads in uneven shares, token by token."""
    heads, dim, length = 8, 4, 6
    shares = {2: [3, 5], 4: [1, 2, 4, 1]}[n]

    def split(tensor: Any, n_devs: int) -> Any:
        axis = {"cache": 0, "projection": 1}[tensor.name]
        return SplitState.split(axis, [share * dim for share in shares])

    rng = np.random.default_rng(n)
    tokens = rng.standard_normal((length, heads * dim)).astype(np.float32)
    order = rng.permutation(length)
    with rpc.LocalWorkers(n) as started, MetaDevice(list(started), split) as device:
        backend = capi.ggml_backend_dev_init(device.handle, None)
        with Arena(backend) as arena:
            cache = arena.weight(heads * dim, length, name="cache")
            projection = arena.weight(heads * dim, heads * dim, name="projection")
            capi.ggml_backend_tensor_set(cache, np.zeros((length, heads * dim), np.float32), 0)
            capi.ggml_backend_tensor_set(projection, np.eye(heads * dim, dtype=np.float32), 0)
            for row, token in zip(order, tokens, strict=True):
                ctx = arena.context()
                new = arena.tensor(heads * dim, 1, name="new", ctx=ctx)
                index = arena.tensor(1, type=capi.GGML_TYPE_I64, name="index", ctx=ctx)
                for tensor in (new, index):
                    capi.ggml_set_input(tensor)
                cut = capi.ggml_mul_mat(ctx, projection, new)  # column-parallel: as the cache is
                graph = arena.graph(ctx, capi.ggml_set_rows(ctx, cache, cut, index))
                capi.ggml_backend_tensor_set(new, token, 0)
                capi.ggml_backend_tensor_set(index, np.array([row], np.int64), 0)
                capi.ggml_backend_graph_compute(backend, graph)
            found = np.empty((length, heads * dim), np.float32)
            capi.ggml_backend_tensor_get(cache, found, 0)
            np.testing.assert_array_equal(found[order], tokens)
        capi.ggml_backend_free(backend)
        gc.collect()


# ---- faults


def strike(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    """Kill or stop a process. It goes on until one of its threads takes note of that."""
    os.kill(process.pid, how)
    tasks = f"/proc/{process.pid}/task"
    while how == signal.SIGSTOP and not all(
        state(f"{tasks}/{task}/stat") == "T" for task in os.listdir(tasks)
    ):
        time.sleep(0.001)


def state(path: str) -> str:
    with open(path, encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def others_go_on(workers: rpc.LocalWorkers) -> None:
    """The other worker and the CPU compute, and nothing has leaked."""
    other = Model(workers[1])
    other.check()
    other.close()
    works_on_cpu()


def works_on_cpu() -> None:
    cpu = capi.ggml_backend_cpu_init()
    check_product(cpu)
    capi.ggml_backend_free(cpu)


def works_again(workers: rpc.LocalWorkers) -> None:
    """A worker on the same port as the lost one's, connected to anew."""
    host, port = workers.endpoints[0].split(":")
    with rpc_server("--port", port) as address:
        assert address == f"{host}:{port}"
        with rpc.connect(address) as connection:
            model = Model(connection[0])
            model.check()
            model.close()


class rpc_server:
    """The command, as a process of its own; gives its address."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        command = [sys.executable, "-m", "ggml_cffi", "rpc-server", *arguments]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> str:
        if not self.address:
            _, said = self.process.communicate()
            raise RuntimeError(said)
        return self.address

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@needs_rpc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_idle_worker_is_lost(workers: rpc.LocalWorkers, how: signal.Signals) -> None:
    leaked = diagnostics.leaked_handles()
    model = Model(workers[0])
    model.check()
    strike(workers.processes[0], how)
    endpoint = workers.endpoints[0]
    first = lost(model.run, endpoint)
    for action in (model.run, model.weight.numpy, lambda: model.weight.set(model.a)):
        again = lost(action, endpoint, 0.5)  # at once
        assert again.reason == first.reason
    lost(lambda: workers[0].memory, endpoint, 0.5)
    model.close()  # what lay there is gone with it
    assert diagnostics.leaked_handles() == leaked
    others_go_on(workers)
    workers.processes[0].kill()
    workers.processes[0].wait()
    works_again(workers)


def stalls(ctx: Any, x: Any) -> Any:
    """A computation of some seconds."""
    for _ in range(40):
        x = capi.ggml_mul_mat(ctx, x, x)
    return x


@needs_rpc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_is_lost_while_it_computes(workers: rpc.LocalWorkers, how: signal.Signals) -> None:
    n, endpoint = 1024, workers.endpoints[0]
    backend = capi.ggml_backend_dev_init(workers[0].handle, None)
    with Arena(backend) as arena:
        ctx = arena.context()
        x = arena.tensor(n, n, name="x", ctx=ctx)
        capi.ggml_set_input(x)
        result = stalls(ctx, x)
        graph = arena.graph(ctx, result)
        capi.ggml_backend_tensor_set(x, np.eye(n, dtype=np.float32), 0)
        timer = threading.Timer(0.2, strike, (workers.processes[0], how))
        timer.start()

        def compute() -> None:
            capi.ggml_backend_graph_compute(backend, graph)  # is sent, not waited for
            capi.ggml_backend_tensor_get(result, np.empty((n, n), np.float32), 0)

        lost(compute, endpoint)
        timer.join()
    capi.ggml_backend_free(backend)
    others_go_on(workers)


@needs_rpc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_is_lost_while_it_loads(workers: rpc.LocalWorkers, how: signal.Signals) -> None:
    n, endpoint = 32 << 20, workers.endpoints[0]
    weights = Context()
    weight = weights.tensor((n,), "f32", name="large")
    weights.allocate(workers[0])
    data = np.ones(n, np.float32)
    timer = threading.Timer(0.05, strike, (workers.processes[0], how))
    timer.start()

    def load() -> None:
        for _ in range(1000):
            weight.set(data)

    lost(load, endpoint, BOUND + 2)
    timer.join()
    weights.close()
    others_go_on(workers)


@needs_rpc
@pytest.mark.parametrize("way", ["to_worker", "to_client"])
def test_a_connection_is_cut_half_way_through_a_message(
    workers: rpc.LocalWorkers, way: str
) -> None:
    workers.connections[0].close()
    with Proxy(workers.endpoints[0]) as proxy:
        connection = rpc.connect(proxy.address, response_timeout=PATIENCE)
        model = Model(connection[0], 1024)
        model.check()
        begin: dict[str, int] = {}

        def cut(data: bytes, passed: int) -> bytes | None:
            start = begin.setdefault("at", passed)
            if passed - start > 100_000:
                return None
            return data

        setattr(proxy, way, cut)
        endpoint = proxy.address
        action = (lambda: model.weight.set(model.a)) if way == "to_worker" else model.weight.numpy

        def until_lost() -> None:
            for _ in range(10):
                action()

        lost(until_lost, endpoint)
        lost(model.run, endpoint, 0.5)
        model.close()
        connection.close()
    others_go_on(workers)
    with rpc.connect(workers.endpoints[0]) as anew:
        model = Model(anew[0])
        model.check()
        model.close()


@needs_rpc
@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack("<Q", 1 << 40) + b"x" * 64],
    ids=["ones", "http", "huge"],
)
def test_garbage_instead_of_answers(workers: rpc.LocalWorkers, garbage: bytes) -> None:
    workers.connections[0].close()
    with Proxy(workers.endpoints[0]) as proxy:
        connection = rpc.connect(proxy.address, response_timeout=PATIENCE)
        model = Model(connection[0])
        model.check()
        proxy.to_client = lambda data, passed: garbage
        error = lost(model.run, proxy.address)
        assert "malformed" in error.reason
        proxy.to_client = None
        lost(model.run, proxy.address, 0.5)  # nobody knows where the next answer begins
        model.close()
        connection.close()
    others_go_on(workers)


@needs_rpc
@pytest.mark.own_memory
def test_a_worker_is_out_of_memory() -> None:
    script = """
import re, resource, sys
from ggml_cffi.__main__ import main
have = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (have + (600 << 20),) * 2)
sys.exit(main(["rpc-server", "--threads", "1"]))
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        with rpc.connect(address, response_timeout=PATIENCE) as connection:
            weights = Context()
            weights.tensor((1 << 30,), "f32", name="too large")
            begin = time.monotonic()
            with pytest.raises((MemoryError, GGMLError)):
                weights.allocate(connection[0])
            assert time.monotonic() - begin < BOUND
            model = Model(connection[0])  # it serves on
            model.check()
            model.close()
            weights.close()
    finally:
        process.kill()
        process.communicate()


@needs_rpc
def test_a_signal_does_not_end_a_wait() -> None:
    """ggml takes EINTR for the end of the connection."""
    workers = rpc.LocalWorkers(1)
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        n = 512
        backend = capi.ggml_backend_dev_init(workers[0].handle, None)
        with Arena(backend) as arena:
            ctx = arena.context()
            x = arena.tensor(n, n, name="x", ctx=ctx)
            capi.ggml_set_input(x)
            result = stalls(ctx, x)
            graph = arena.graph(ctx, result)
            found = np.empty((n, n), np.float32)
            for _ in range(3):
                capi.ggml_backend_tensor_set(x, np.eye(n, dtype=np.float32), 0)
                capi.ggml_backend_graph_compute(backend, graph)
                capi.ggml_backend_tensor_get(result, found, 0)
                np.testing.assert_array_equal(found, np.eye(n))
        capi.ggml_backend_free(backend)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        workers.close()
    assert len(seen) > 5


@needs_rpc
def test_ctrl_c_ends_a_wait_for_a_stopped_worker() -> None:
    with rpc.LocalWorkers(1, response_timeout=60) as workers:
        model = Model(workers[0])
        strike(workers.processes[0], signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()

        def wait() -> None:
            model.run()
            timer.join()  # it has come too late

        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - begin < BOUND
        error = lost(model.run, workers.endpoints[0], 0.5)
        assert "interrupted" in error.reason
        model.close()


@needs_rpc
def test_ctrl_c_ends_a_wait_for_another_threads_answer(workers: rpc.LocalWorkers) -> None:
    """What was not sent loses nothing."""
    first, second = Model(workers[0]), Model(workers[0], seed=1)
    strike(workers.processes[0], signal.SIGSTOP)
    failures: list[BaseException] = []

    def other() -> None:
        try:
            first.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.5)  # it waits for its answer
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()

    def wait() -> None:
        second.run()
        timer.join()  # it has come too late

    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - begin < PATIENCE / 2
    finally:
        workers.processes[0].send_signal(signal.SIGCONT)
        thread.join()
    assert not failures
    second.check()
    first.close()
    second.close()


@needs_rpc
def test_signals_within_signals_do_not_speak_to_whom_is_waited_for() -> None:
    """A function that interrupts another one: the first worker's answer is still to come."""
    refused: list[str] = []

    def outer(number: int, frame: object) -> None:
        timer.start()
        with pytest.raises(RPCError, match="no answer within"):
            models[1].run()

    def inner(number: int, frame: object) -> None:
        with pytest.raises(RPCError) as caught:
            models[0].run()
        refused.append(caught.value.reason)

    with rpc.LocalWorkers(2, response_timeout=2.0) as workers:
        models = [Model(device) for device in workers]
        for process in workers.processes:
            strike(process, signal.SIGSTOP)
        before = signal.signal(signal.SIGALRM, outer), signal.signal(signal.SIGUSR1, inner)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            lost(models[0].run, workers.endpoints[0])
        finally:
            signal.signal(signal.SIGALRM, before[0])
            timer.join()
            signal.signal(signal.SIGUSR1, before[1])
        assert len(refused) == 1 and "waited for on this thread" in refused[0]
        for model in models:
            model.close()


@needs_rpc
def test_threads_share_a_worker(workers: rpc.LocalWorkers) -> None:
    """ggml lets the messages of two threads run into each other."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            model = Model(workers[0], 32 + seed, seed)
            for _ in range(30):
                model.check()
            model.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- connecting


@needs_rpc
def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    assert "refused" in lost(lambda: rpc.connect(endpoint), endpoint, 1).reason


@needs_rpc
def test_a_host_without_an_address() -> None:
    error = lost(lambda: rpc.connect("no.such.host.invalid:1"), "no.such.host.invalid:1", 30)
    assert "no IPv4 address" in error.reason


@needs_rpc
def test_a_host_whose_address_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def look_up(*_: object) -> Any:
        go_on.wait()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    endpoint = "slow.example:1"
    try:
        error = lost(lambda: rpc.connect(endpoint, timeout=0.3), endpoint, 2)
        assert "not found in time" in error.reason
    finally:
        go_on.set()


@needs_rpc
@pytest.mark.parametrize("delay", [0.3, 0.7], ids=["the last answers", "the first answers"])
def test_all_steps_of_connecting_take_the_time_together(
    workers: rpc.LocalWorkers, delay: float
) -> None:
    workers.connections[0].close()

    def slowly(data: bytes, passed: int) -> bytes:
        time.sleep(delay)
        return data

    with Proxy(workers.endpoints[0], to_client=slowly) as proxy:
        error = lost(lambda: rpc.connect(proxy.address, timeout=1.5), proxy.address, 3)
        assert "no answer within" in error.reason
        proxy.to_client = None
        until = time.monotonic() + BOUND  # the worker takes note of who has gone
        with rpc.connect(proxy.address, until - time.monotonic()) as connection:
            model = Model(connection[0])
            model.check()
            model.close()


@needs_rpc
def test_connections_wait_for_each_other_no_longer_than_the_time(
    workers: rpc.LocalWorkers,
) -> None:
    workers.connections[0].close()
    opening, done = threading.Event(), threading.Event()

    def open_one() -> None:
        with rpc._connecting:
            opening.set()
            done.wait()

    thread = threading.Thread(target=open_one)
    thread.start()
    opening.wait()
    endpoint = workers.endpoints[0]
    try:
        error = lost(lambda: rpc.connect(endpoint, timeout=0.3), endpoint, 1.5)
        assert "others are being opened" in error.reason
    finally:
        done.set()
        thread.join()


@needs_rpc
@pytest.mark.parametrize(
    ("words", "hang_up", "reason"),
    [
        (b"", False, "no answer to the greeting"),
        (b"", True, "no RPC server"),
        (b"220 smtp.example.org ESMTP\r\n", False, "no RPC server"),
        (struct.pack("<Q", 28), False, "no answer to the greeting"),
        (struct.pack("<QBBBB", 28, 1, 2, 3, 0) + bytes(24), False, "version 1.2.3"),
        (struct.pack("<QBBB", 3, 2, 0, 0), True, "version 2.0.0"),
    ],
    ids=["silent", "hangs up", "smtp", "half a greeting", "another version", "an old version"],
)
def test_what_is_there_is_no_server_for_us(words: bytes, hang_up: bool, reason: str) -> None:
    with Speaker(words, hang_up) as speaker:
        error = lost(lambda: rpc.connect(speaker.address, timeout=1.0), speaker.address, 2.5)
        assert reason in error.reason


@needs_rpc
def test_a_worker_that_serves_somebody_else(workers: rpc.LocalWorkers) -> None:
    endpoint = workers.endpoints[0]
    error = lost(lambda: rpc.connect(endpoint, timeout=0.5), endpoint, 2)
    assert "busy" in error.reason
    workers.connections[0].close()
    with rpc.connect(endpoint) as anew:
        assert len(anew) == 1


@needs_rpc
def test_a_server_that_dies_after_its_greeting() -> None:
    greeting = struct.pack("<QBBBB", 28, *rpc._versions(), 0) + bytes(24)
    with Speaker(greeting) as speaker:
        error = lost(lambda: rpc.connect(speaker.address, timeout=1.0), speaker.address, 3)
        assert "closed" in error.reason or "reset" in error.reason


@needs_rpc
@pytest.mark.parametrize(
    "endpoint", ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "a:b:1", "h\0:1"]
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint is"):
        rpc.connect(endpoint)


@needs_rpc
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_what_is_no_time(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is"):
        rpc.connect("127.0.0.1:1", timeout)


@needs_rpc
def test_a_closed_connection_is_refused(workers: rpc.LocalWorkers) -> None:
    device = workers[0]
    workers.connections[0].close()
    assert workers.connections[0].closed
    with pytest.raises(ValueError, match="is closed"):
        Model(device)


@needs_rpc
def test_a_meta_device_over_a_closed_connection(workers: rpc.LocalWorkers) -> None:
    with MetaDevice(list(workers), lambda tensor, n_devs: SplitState.mirrored()) as meta:
        raw = meta.handle
        workers.connections[0].close()
        with pytest.raises(ValueError, match="is closed"):
            Model(meta)
        # below the objects ggml connects anew, or fails
        kind = capi.ggml_backend_dev_buffer_type(raw)
        buffer = capi.ggml_backend_buft_alloc_buffer(kind, 64)
        capi.ggml_backend_buffer_free(buffer)
        workers.processes[0].kill()
        workers.processes[0].wait()
        lost(lambda: capi.ggml_backend_buft_alloc_buffer(kind, 64), workers.endpoints[0], 1)
        others_go_on(workers)


@needs_rpc
def test_memory_of_a_worker_that_is_gone(workers: rpc.LocalWorkers) -> None:
    """ggml tells 0 bytes."""
    handle = workers[0].handle
    workers.connections[0].close()
    workers.processes[0].kill()
    workers.processes[0].wait()
    lost(lambda: capi.ggml_backend_dev_memory(handle), workers.endpoints[0], 1)


@needs_rpc
def test_a_thousand_connections_leak_no_descriptor(workers: rpc.LocalWorkers) -> None:
    endpoint = workers.endpoints[0]
    workers.connections[0].close()
    for _ in range(10):
        rpc.connect(endpoint).close()
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    handles = diagnostics.live_handles()
    for _ in range(1000):
        rpc.connect(endpoint).close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert diagnostics.live_handles() == handles


@needs_rpc
def test_a_connection_that_is_forgotten_closes_its_socket(workers: rpc.LocalWorkers) -> None:
    endpoint = workers.endpoints[0]
    workers.connections[0].close()
    before = sorted(os.listdir("/proc/self/fd"))
    device = rpc.connect(endpoint)[0]  # keeps the connection
    gc.collect()
    assert device.memory.total > 0
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del device
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- other processes


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:  # the folder's own
            continue
    return found


@needs_rpc
def test_no_socket_is_inherited_by_a_program() -> None:
    before = sockets()
    with rpc.Server(threads=1) as server, rpc.connect(server.address) as connection:
        assert connection[0].memory.total
        ours = sockets() - before
        assert len(ours) == 3  # one listens, and a connection has two ends
        assert not any(os.get_inheritable(each) for each in ours)


class forked:
    """A child that does what it is told to, then waits; `result` is what that gave."""

    def __init__(self, action: Callable[[], int]) -> None:
        begun, say = os.pipe()
        wait, self.end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.end)
                os.write(say, bytes([action()]))
                os.read(wait, 1)
            finally:
                os._exit(0)
        os.close(say)
        os.close(wait)
        said = os.read(begun, 1)
        os.close(begun)
        self.result = said[0] if said else None

    def __enter__(self) -> forked:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.end)
        os.waitpid(self.pid, 0)


with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@needs_rpc
@with_threads
def test_a_forked_child_leaves_the_connection_to_its_parent(workers: rpc.LocalWorkers) -> None:
    model = Model(workers[0])
    model.check()
    tensor, buffer = model.weight.handle, capi.ggml_backend_buft_alloc_buffer(
        capi.ggml_backend_dev_buffer_type(workers[0].handle), 64
    )  # fmt: skip
    device = workers[0].handle

    def use() -> int:
        good = 0
        for action in (
            lambda: capi.ggml_backend_tensor_get(tensor, np.empty(64, np.float32), 0),
            lambda: capi.ggml_backend_dev_memory(device),
        ):
            try:
                action()
            except RPCError as error:
                good += "process that was forked" in error.reason
        try:
            model.run()
        except RuntimeError:
            good += 1
        capi.ggml_backend_buffer_free(buffer)  # of the child's copy
        return good

    with forked(use) as child:
        assert child.result == 3
        model.check()
        capi.ggml_backend_buffer_clear(buffer, 1)
        capi.ggml_backend_buffer_free(buffer)
        model.close()
        workers.connections[0].close()
        gc.collect()
        # the child is there, and the connection has ended all the same: the worker serves the next
        with rpc.connect(workers.endpoints[0], timeout=PATIENCE) as anew:
            again = Model(anew[0])
            again.check()
            again.close()


@needs_rpc
@with_threads
def test_a_forked_child_while_another_thread_waits_for_an_answer(
    workers: rpc.LocalWorkers,
) -> None:
    model = Model(workers[0])
    strike(workers.processes[0], signal.SIGSTOP)
    thread = threading.Thread(target=model.check)
    thread.start()
    time.sleep(0.2)  # it waits
    device = workers[0].handle

    def use() -> int:
        try:
            capi.ggml_backend_dev_memory(device)
        except RPCError:
            return 1
        return 0

    with forked(use) as child:
        assert child.result == 1
        workers.processes[0].send_signal(signal.SIGCONT)
        thread.join()
    model.check()
    model.close()


# ---- the server


@needs_rpc
@with_threads
def test_a_forked_child_does_not_keep_the_port() -> None:
    with rpc.Server(threads=1) as server, rpc.connect(server.address), forked(lambda: 1) as child:
        assert child.result == 1
        server.close()
        error = lost(lambda: rpc.connect(server.address), server.address, 1)
        assert "refused" in error.reason
        rpc.Server(port=server.port, threads=1).close()


@needs_rpc
def test_several_threads_close_a_server() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        server = rpc.Server(threads=1)
        ended: list[bool] = []

        def close(server: rpc.Server = server, ended: list[bool] = ended) -> None:
            server.close()
            ended.append(server.closed and server.wait(0))

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert ended == [True] * 4
    assert sorted(os.listdir("/proc/self/fd")) == before


@needs_rpc
def test_a_server_that_is_forgotten_stops() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    n_threads = threading.active_count()
    server = rpc.Server(threads=1)
    address = server.address
    rpc.connect(address).close()
    del server
    gc.collect()
    until = time.monotonic() + BOUND  # nobody waits for it
    while threading.active_count() > n_threads:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert "refused" in lost(lambda: rpc.connect(address), address, 1).reason


@needs_rpc
def test_a_server_that_is_forgotten_as_the_program_ends() -> None:
    script = "from ggml_cffi import rpc; s = rpc.Server(threads=1); c = rpc.connect(s.address)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)
    assert done.returncode == 0
    assert "Error" not in done.stderr and "Warning" not in done.stderr


@needs_rpc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_on_a_signal(number: signal.Signals) -> None:
    server = rpc_server("--threads", "1")
    with server as address:
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
        connection = rpc.connect(address)
        server.process.send_signal(number)
        said, errors = server.process.communicate(timeout=10)
        assert server.process.returncode == 0
        assert said == ""
        assert "Traceback" not in errors
        connection.close()


@needs_rpc
def test_the_command_serves_several_devices() -> None:
    served = rpc_server("--device", "CPU", "--device", "CPU")
    with served as address, rpc.connect(address) as connection:
        assert len(connection) == 2
        for device in connection:
            model = Model(device)
            model.check()
            model.close()


@needs_rpc
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "no authentication"),
        (["--host", "localhost"], "expected an IPv4 address"),
        (["--device", "no such"], "there is no device"),
        (["--port", "65536"], "expected 0 to 65535"),
        (["--threads", "0"], "threads"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], words: str) -> None:
    server = rpc_server(*arguments)
    assert server.address == ""
    _, said = server.process.communicate(timeout=20)
    assert server.process.returncode in (1, 2)
    assert words in said
    assert "Traceback" not in said


@needs_rpc
def test_the_command_warns_where_others_can_reach_it() -> None:
    server = rpc_server("--host", "0.0.0.0", "--allow-remote")
    assert server.address.startswith("0.0.0.0:")
    server.process.terminate()
    _, said = server.process.communicate(timeout=10)
    assert "no authentication" in said


@needs_rpc
def test_a_server_that_claims_very_many_devices() -> None:
    """ggml would make an object for each."""
    version = struct.pack("<QBBBB", 28, *rpc._versions(), 0) + bytes(24)
    with Speaker(version + struct.pack("<QI", 4, 2**32 - 1), hang_up=False) as speaker:
        error = lost(lambda: rpc.connect(speaker.address, timeout=2.0), speaker.address, 5)
        assert "more than 1024 devices" in error.reason


@needs_rpc
def test_answers_that_come_byte_by_byte() -> None:
    """As TCP may deliver them: no piece is taken for the whole."""

    class Slow(Proxy):
        def _pass_on(self, one: socket.socket, other: socket.socket, change: str) -> None:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                while data := one.recv(1 if change == "to_client" else 65536):
                    other.sendall(data)
                    time.sleep(0.001)
                other.shutdown(socket.SHUT_WR)

    with (
        rpc.Server(threads=1) as server,
        Slow(server.address) as proxy,
        rpc.connect(proxy.address, timeout=20.0) as connection,
    ):
        assert len(connection) == 1
        assert connection[0].memory.total > 0


@needs_rpc
@with_threads
def test_a_fork_that_has_no_descriptor_free(workers: rpc.LocalWorkers) -> None:
    """The child has the parent's connection as little as any other."""
    sockets = {fd: inode for fd in os.listdir("/proc/self/fd") if (inode := socket_behind(fd))}
    assert sockets
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    begun, say = os.pipe()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, sockets)) + 64, limit[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        pid = os.fork()
        if pid == 0:
            kept = 0
            for fd, inode in sockets.items():
                kept += os.fstat(int(fd)).st_ino == inode
            os.write(say, bytes([kept]))
            os._exit(0)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.waitpid(pid, 0)
    assert os.read(begun, 1) == bytes([0])
    os.close(begun)
    os.close(say)


def socket_behind(fd: str) -> int:
    """The number of the socket of a connection that this descriptor is of; 0 for anything else."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
            with socket.socket(fileno=os.dup(int(fd))) as one, contextlib.suppress(OSError):
                one.getpeername()
                return os.fstat(int(fd)).st_ino
    return 0


@needs_rpc
@with_threads
def test_a_server_in_a_forked_child() -> None:
    with rpc.Server(threads=1) as server, rpc.LocalWorkers(1) as workers:
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (server.close, server.wait, workers.close):
                try:
                    call()
                except RuntimeError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        with rpc.connect(server.address) as connection:  # it serves on
            assert connection[0].memory.total > 0
        assert workers[0].memory.total > 0


@needs_rpc
def test_signals_while_a_server_begins() -> None:
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(20):
            rpc.Server(threads=1).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_rpc
def test_a_server_is_closed_whose_client_does_not_read() -> None:
    n = 8 << 20
    with rpc.Server(threads=1) as server:
        begin = time.monotonic()
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(struct.pack("<BQ", 14, 24) + bytes(24))  # a greeting
            assert len(client.recv(36, socket.MSG_WAITALL)) == 36
            client.sendall(struct.pack("<BQIQ", 0, 12, 0, n))  # a buffer
            _, buffer, _ = struct.unpack("<QQQ", client.recv(24, socket.MSG_WAITALL))
            client.sendall(struct.pack("<BQQ", 3, 8, buffer))  # its base
            _, base = struct.unpack("<QQ", client.recv(16, socket.MSG_WAITALL))
            tensor = bytearray(296)  # id, type, buffer, ne, nb, op, op_params, flags, src, ...
            struct.pack_into("<QIQ4I4I", tensor, 0, 1, 0, buffer, n // 4, 1, 1, 1, 4, n, n, n)
            struct.pack_into("<Q", tensor, 220, base)
            client.sendall(struct.pack("<BQ", 8, len(tensor) + 16))
            client.sendall(bytes(tensor) + struct.pack("<QQ", 0, n))  # read it all
            time.sleep(0.2)
            server.close()
        assert time.monotonic() - begin < BOUND


@needs_rpc
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(GGMLError, match="cannot serve on"):
                rpc.Server(port=port)
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == before


@needs_rpc
def test_a_server_in_this_process() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with rpc.Server(threads=1) as server:
            assert not server.wait(0)
            with rpc.connect(server.address) as connection:
                model = Model(connection[0])
                model.check()
                model.close()
        assert server.closed
        assert server.wait(0)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


@needs_rpc
def test_large_tensors_are_cached(tmp_path: Any) -> None:
    with rpc.Server(threads=1, cache_dir=tmp_path / "cache") as server:
        data = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
        with rpc.connect(server.address) as connection:
            for _ in range(2):
                weights = Context()
                weight = weights.tensor(data.shape, "f32")
                weights.allocate(connection[0])
                weight.set(data)
                np.testing.assert_array_equal(weight.numpy(), data)
                weights.close()
        assert [path.stat().st_size for path in (tmp_path / "cache").iterdir()] == [data.nbytes]


@needs_rpc
def test_workers_end_with_their_parent() -> None:
    """However that ends: here it is killed."""
    script = (
        "from ggml_cffi import rpc; import time;"
        "w = rpc.LocalWorkers(2); print(*(p.pid for p in w.processes), flush=True); time.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environ, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return state(f"/proc/{pid}/stat") != "Z"
    except OSError:
        return False


@needs_rpc
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("w = rpc.LocalWorkers(1)", 0),
        ("w = rpc.LocalWorkers(1); 1 / 0", 1),
        ("w = rpc.LocalWorkers(1); w.me = w", 0),
        ("w = rpc.LocalWorkers(1); sys.exit(5)", 5),
        ("w = rpc.LocalWorkers(1); a = w[0].init_backend(); x = w.connections", 0),
        ("w = rpc.LocalWorkers(1); p = os.fork(); p and os.waitpid(p, 0)", 0),
        ("def f():\n    w = rpc.LocalWorkers(1)\nf()", 0),
    ],
    ids=["global", "exception", "circle", "exit", "in use", "fork", "local"],
)
def test_a_program_that_leaves_workers_open_ends_well(body: str, status: int) -> None:
    script = "import os, sys, warnings; warnings.simplefilter('ignore')\n"
    script += "from ggml_cffi import rpc\n" + body
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, timeout=60, check=False, env=environ,
        )  # fmt: skip
        assert ended.returncode == status, ended.stderr
        assert "Fatal" not in ended.stderr and ("ZeroDivision" in ended.stderr) == (status == 1)


@needs_rpc
def test_a_worker_that_says_much_before_it_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than a pipe takes; what it says last is told where it does not start."""
    program = "import os, sys, time; sys.stderr.write('well ' * 50_000 + 'so.'); sys.stderr.flush()"
    program += "; time.sleep(float(os.environ['WAIT']))"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WAIT", "0")
    with rpc.LocalWorkers(1) as workers:
        assert workers[0].memory.total > 0
    monkeypatch.setenv("WAIT", "60")
    with pytest.raises(GGMLError, match=r"did not start in time: .*well so\.$"):
        rpc.LocalWorkers(1, timeout=8)


@needs_rpc
def test_workers_that_cannot_start() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(GGMLError, match="did not start"):
        rpc.LocalWorkers(1, threads=0)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_ggml_without_rpc() -> None:
    if "RPC_PROTO_MAJOR_VERSION" in dir(capi):
        pytest.skip("this ggml has RPC")
    for action in (lambda: rpc.connect("127.0.0.1:1"), rpc.Server, lambda: rpc.LocalWorkers(1)):
        with pytest.raises(NotSupportedError, match="built without RPC"):
            action()
