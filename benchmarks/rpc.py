"""A feed-forward stack over workers: its speed next to one process's, and the model of its cost.

With ``--model`` nothing is measured: the model's table for larger networks is printed, as
docs/scaling.md has it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ggml_cffi import Context, Device, MetaDevice, capi, device, rpc
from ggml_cffi.backend import usable_cores
from ggml_cffi.meta.plan import copies_of_sum as n_copies

from . import common, hosts
from .common import Ratio, Rounds
from .stack import Stack, split

# ---- the model


@dataclass(frozen=True)
class Link:
    """What is between the client and each worker."""

    rate: float  # bits a second, each way
    round_trip: float  # seconds that the smallest read takes, ggml's own part included

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes are on their way."""
        return nbytes * 8 / self.rate


def n_waits(n: int) -> int:
    """How many of the ways out of an all-reduce's copies are waited for.

    A copy comes in from one worker and goes out to another one, while the next comes in: but for
    the last of each step, whose sum is wanted. Of two workers the second one's copy can be asked
    for only after the first one's is there.
    """
    n_steps = n.bit_length() - 1
    return n_steps + (n.bit_length() == 2) + 2 * (n != 1 << n_steps)


TENSOR = 304  # bytes that a tensor has in the message of a graph: 296, and 8 for its place
ADDITION = 3 * TENSOR  # the graph that adds what was copied


def all_reduce(n: int, nbytes: int, n_tensors: int, link: Link) -> float:
    """Seconds of an all-reduce of `n` workers, and of telling them the graph before it.

    `nbytes`: of the whole result, which each copy has. `n_tensors`: of the graph.
    """
    copies = n_copies(n)
    graphs = n * n_tensors * TENSOR + copies * ADDITION
    return copies * link.round_trip + link.seconds((copies + n_waits(n)) * nbytes + graphs)


@dataclass(frozen=True)
class Transformer:
    """What a model like Llama is made of."""

    name: str
    width: int
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocabulary: int

    def seconds(self, n: int, n_tokens: int, machine: Machine, link: Link) -> float:
        """How long a step of `n_tokens` takes on `n` workers, with the logits of the last token."""
        kv = self.width * self.n_kv_heads // self.n_heads
        attention = self.n_layers * (2 * self.width * self.width + 2 * self.width * kv)
        inner = self.n_layers * 3 * self.width * self.hidden
        output = self.width * self.vocabulary
        cut = n <= self.n_kv_heads  # else each worker has all of the attention
        own = (attention if cut else 0) + inner
        compute = machine.seconds(own, n_tokens) / n + machine.seconds(output, 1) / n
        if not cut:
            compute += machine.seconds(attention, n_tokens)
        # a layer has about 52 tensors, weights and inputs among them
        nbytes, n_tensors = 4 * n_tokens * self.width, 26 if cut else 52
        n_all_reduces = self.n_layers * (2 if cut else 1)
        reduced = n_all_reduces * all_reduce(n, nbytes, n_tensors, link)
        return compute + reduced + link.round_trip + link.seconds(4 * self.vocabulary)


@dataclass(frozen=True)
class Machine:
    """What a worker's machine can do."""

    memory: float = 50e9  # bytes a second that are read
    speed: float = 1e12  # operations a second of float32
    weight: float = 34 / 32  # bytes of a weight: Q8_0

    def seconds(self, n_weights: int, n_tokens: int) -> float:
        """Products with so many weights: they are read, or it is computed, which takes longer."""
        return max(n_weights * self.weight / self.memory, 2 * n_weights * n_tokens / self.speed)


MODELS = (
    Transformer("1B", 2048, 8192, 16, 32, 8, 128256),
    Transformer("8B", 4096, 14336, 32, 32, 8, 128256),
)
STEPS = (("1 token", 1), ("512 tokens", 512))
GBITS = (1, 10, 100)
WORKERS = (2, 4, 8, 16)
ROUND_TRIP = 100e-6


def table() -> list[str]:
    """The model's speeds relative to such a machine alone, without any link, in Markdown."""
    machine = Machine()
    head = ["model", "step", "Gbit/s", *(f"{n} workers" for n in WORKERS)]
    rows = [head, ["---"] * len(head)]
    for model in MODELS:
        for name, n_tokens in STEPS:
            for gbits in GBITS:
                link = Link(gbits * 1e9, ROUND_TRIP)
                alone = model.seconds(1, n_tokens, machine, Link(math.inf, 0.0))
                times = (model.seconds(n, n_tokens, machine, link) for n in WORKERS)
                row = [model.name, name, str(gbits), *(f"{alone / time:.2f}" for time in times)]
                rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


# ---- the measurement

LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 10e9, "no limit": 0.0}
SHAPE = {"width": 1024, "hidden": 4096, "n_layers": 4}


LARGE = 1 << 20  # numbers of the read that a link's rate is told by


@contextlib.contextmanager
def reads(where: Device) -> Iterator[dict[str, Callable[[], object]]]:
    """The smallest read from a device, and a large one: they tell what the link is like."""
    with Context() as context:
        little, much = context.tensor((1,), "f32"), context.tensor((LARGE,), "f32")
        context.allocate(where)
        for tensor in (little, much):
            tensor.set(np.zeros(tensor.shape, np.float32))
        yield {"smallest read": little.numpy, "large read": much.numpy}


def link_of(found: dict[str, float]) -> Link:
    """The link, by a round's reads."""
    transfer = max(found["large read"] - found["smallest read"], 1e-9)
    return Link(8 * 4 * LARGE / transfer, found["smallest read"])


def over(n: int) -> str:
    """What is measured, by its name."""
    return f"{n} worker{'s' * (n > 1)}"


@contextlib.contextmanager
def subjects(
    workers: Sequence[Device], counts: Sequence[int], n_tokens: int, shape: dict[str, int]
) -> Iterator[dict[str, Callable[[], object]]]:
    """The stack on one thread of this process, over workers, and without reduction.

    The latter is each worker's share on its own, all at once: what they compute, and what is
    written to them and read in the end.
    """
    with contextlib.ExitStack() as held:

        def make(where: Device, share: int = 1) -> Stack:
            sizes = {**shape, "hidden": shape["hidden"] // share}
            made = Stack(where, **sizes, n_tokens=n_tokens, n_threads=1)
            held.callback(made.close)
            return made

        alone = make(device("CPU"))
        want = alone.run()
        made: dict[str, Callable[[], object]] = {"one process": alone.run}
        pool = held.enter_context(ThreadPoolExecutor(max(counts)))
        for n in counts:
            if n == 1:  # nothing is cut
                made[over(n)] = (stack := make(workers[0])).run
            else:
                cut = held.enter_context(MetaDevice(workers[:n], split))
                made[over(n)] = (stack := make(cut)).run
                shares = [make(worker, n) for worker in workers[:n]]
                made[f"shares of {n}"] = partial(_all_at_once, pool, shares)
            np.testing.assert_allclose(stack.run(), want, rtol=1e-3, atol=1e-3)
        yield made


def _all_at_once(pool: ThreadPoolExecutor, stacks: Sequence[Stack]) -> None:
    for _ in pool.map(Stack.run, stacks):
        pass


def with_model(rounds: Rounds, counts: Sequence[int], n_tokens: int, shape: dict[str, int]) -> None:
    """Add to each round what the model says: the round's shares, and reductions on its link."""
    for found in rounds:
        for n in counts:
            if n > 1:
                # a layer: four operations, two weights and the input
                one = all_reduce(n, 4 * n_tokens * shape["width"], 7, link_of(found))
                found[f"model of {n}"] = found[f"shares of {n}"] + shape["n_layers"] * one


def measure(
    counts: Sequence[int],
    links: dict[str, float],
    n_tokens: int,
    n_rounds: int,
    passes: int = 3,
    shape: dict[str, int] = SHAPE,
) -> tuple[dict[str, Ratio], list[str]]:
    """The ratios for each link and number of workers, and what the links were found to be."""
    ratios: dict[str, Ratio] = {}
    said: list[str] = []
    with hosts.Network(max(counts)) as network, contextlib.ExitStack() as held:
        with network.client.inside():
            connections = [held.enter_context(rpc.connect(e)) for e in network.endpoints]
        workers = [connection[0] for connection in connections]
        with subjects(workers, counts, n_tokens, shape) as made, reads(workers[0]) as told:
            timed = {name: common.wall(run) for name, run in (made | told).items()}
            for name, rate in links.items():
                network.limit(rate)
                rounds = common.measure(timed, n_rounds, passes)
                with_model(rounds, counts, n_tokens, shape)
                found = [link_of(one) for one in rounds]
                rate_found = statistics.median(link.rate for link in found)
                round_trip = statistics.median(link.round_trip for link in found)
                said.append(f"{name}: {rate_found / 1e9:.2f} Gbit/s, {round_trip * 1e6:.0f} µs")
                for n in counts:
                    where = f"{name}, {over(n)}"
                    ratios[f"{where}: speed"] = rounds.ratio("one process", over(n))
                    if n > 1:
                        model = f"model of {n}"
                        ratios[f"{where}: without reduction"] = rounds.ratio(
                            "one process", f"shares of {n}"
                        )
                        ratios[f"{where}: the model's speed"] = rounds.ratio("one process", model)
                        ratios[f"{where}: time / the model's"] = rounds.ratio(over(n), model)
    return ratios, said


def _lacking_rpc() -> str:
    return "" if hasattr(capi, "RPC_PROTO_MAJOR_VERSION") else "RPC in this ggml"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print, or print the model's table."""
    options = common.parser(__doc__, 7)
    options.add_argument("--model", action="store_true", help="print the table of the model")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="how many")
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 64], help="of a step")
    chosen = options.parse_args(arguments)
    if chosen.model:
        print(*table(), sep="\n")
        return 0
    if missing := hosts.lacking() or _lacking_rpc():
        print(f"there is no {missing} here: nothing is measured", file=sys.stderr)
        return 0
    for n_tokens in chosen.tokens:
        ratios, said = measure(chosen.workers, LINKS, n_tokens, chosen.rounds)
        title = (
            f"a feed-forward stack, {SHAPE['n_layers']} layers of {SHAPE['width']} x "
            f"{SHAPE['hidden']}, float32, {n_tokens} token{'s' * (n_tokens > 1)}; workers of one "
            f"thread each, all on this machine's {usable_cores()} cores, next to one process of "
            f"one thread; links, by a large and the smallest read: {'; '.join(said)}"
        )
        common.report(title, ratios, [], chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
