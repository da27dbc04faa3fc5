"""Workers on other hosts: networks of their own, with a bandwidth and a delay.

They need the right to make network namespaces; GGML_CFFI_EXPECT=machines says that it is there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from _backends import EXPECTED
from test_rpc import Model, lost, works_on_cpu

from benchmarks import hosts
from benchmarks.stack import Stack, split
from ggml_cffi import MetaDevice, device, rpc

pytestmark = pytest.mark.rpc
PATIENCE = 3.0  # seconds that an answer may take, where a link is cut
BOUND = 3 * PATIENCE
SHAPE: dict[str, Any] = {"width": 64, "hidden": 96, "n_layers": 3, "n_tokens": 5}
#: Bits a second and seconds each way.
LINKS = {"fast": (0.0, 0.0), "gigabit": (1e9, 0.0), "slow and far": (50e6, 0.005)}


def network(n: int, rate: float = 0, delay: float = 0) -> hosts.Network:
    missing = hosts.lacking(delay > 0)
    if missing:
        (pytest.fail if "machines" in EXPECTED else pytest.skip)(f"there is no {missing} here")
    return hosts.Network(n, rate=rate, delay=delay)


@contextlib.contextmanager
def connected(net: hosts.Network, patience: float = 60) -> Iterator[list[rpc.Connection]]:
    """Connections to all workers of a network, on whose client's host this thread is.

    `patience`: seconds that an answer may take.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(net.client.inside())
        yield [
            held.enter_context(rpc.connect(endpoint, response_timeout=patience))
            for endpoint in net.endpoints
        ]
        gc.collect()


def numbers(where: Any) -> Any:
    stack = Stack(where, **SHAPE, n_threads=1)
    try:
        return stack.run()
    finally:
        stack.close()


@pytest.mark.parametrize("link", LINKS)
def test_workers_on_hosts_give_the_numbers_of_one_process(link: str) -> None:
    """To the last bit: the same kernels sum up the same shares."""
    rate, delay = LINKS[link]
    alone = numbers(device("CPU"))
    with MetaDevice([device("CPU")] * 2, split) as meta:
        shared = numbers(meta)
    np.testing.assert_allclose(shared, alone, rtol=1e-4, atol=1e-4)
    with network(2, rate, delay) as net, connected(net) as (first, second):
        np.testing.assert_array_equal(numbers(first[0]), alone)
        with MetaDevice([first[0], second[0]], split) as meta:
            np.testing.assert_array_equal(numbers(meta), shared)
        if delay:
            model = Model(first[0])
            begin = time.monotonic()
            model.weight.numpy()
            assert time.monotonic() - begin >= 2 * delay  # it was on its way
            model.close()


def test_a_link_has_its_bandwidth() -> None:
    with network(1, 50e6) as net, connected(net) as (connection,):
        model = Model(connection[0], 1024)
        begin = time.monotonic()
        model.weight.numpy()
        taken = time.monotonic() - begin
        assert taken > 0.8 * (model.a.nbytes - (128 << 10)) * 8 / 50e6  # but for what it lets pass
        model.close()


@pytest.mark.parametrize("delay", [0, 0.005], ids=["near", "far"])
def test_a_link_that_is_cut(delay: float) -> None:
    with network(2, delay=delay) as net, connected(net, PATIENCE) as (first, second):
        models = [Model(first[0]), Model(second[0])]
        with MetaDevice([first[0], second[0]], split) as meta:
            stack = Stack(meta, **SHAPE)
            before = stack.run()
            net.workers[0].cut()
            error = lost(stack.run, net.endpoints[0], BOUND)
            lost(models[0].run, net.endpoints[0], 0.5)  # at once, from then on
            assert lost(models[0].weight.numpy, net.endpoints[0], 0.5).reason == error.reason
            models[1].check()  # others go on
            works_on_cpu()
            stack.close()
            models[0].close()
        first.close()
        net.workers[0].mend()
        with (
            rpc.connect(net.endpoints[0], timeout=20) as again,
            MetaDevice([again[0], second[0]], split) as meta,
        ):
            stack = Stack(meta, **SHAPE)
            np.testing.assert_array_equal(stack.run(), before)
            stack.close()
        models[1].close()


def test_nobody_is_reached_through_a_cut_link() -> None:
    with network(1) as net, net.client.inside():
        net.workers[0].cut()
        endpoint = net.endpoints[0]
        lost(lambda: rpc.connect(endpoint, timeout=0.5), endpoint, 2)
        net.workers[0].mend()
        rpc.connect(endpoint).close()


def test_a_worker_on_a_host_is_out_of_reach_of_others() -> None:
    with network(1) as net:
        endpoint = net.endpoints[0]
        lost(lambda: rpc.connect(endpoint, timeout=0.5), endpoint, 2)


def gone(there: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while there():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_hosts_leave_nothing_behind() -> None:
    """Their namespaces end with a program that is killed: the workers in them have ended."""
    network(0).close()  # or there is nothing to see
    descriptors = sorted(os.listdir("/proc/self/fd"))
    own = os.readlink("/proc/thread-self/ns/net")
    with network(2, delay=0.001 if not hosts.lacking(True) else 0):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert os.readlink("/proc/thread-self/ns/net") == own
    script = (
        "import time; from benchmarks import hosts; n = hosts.Network(2);"
        "print(*(w.process.pid for w in n.workers), flush=True); time.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environ, text=True
    )
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2
    spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    assert len(spaces - {own}) == 2
    program.kill()
    program.communicate()

    def there() -> bool:
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{name}/ns/net"))
        return bool(found & spaces)

    assert gone(there)
