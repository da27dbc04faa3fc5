"""A meta device: asking for splits, planning, computing and mending, against what is without them.

    python -m benchmarks.meta [--rounds N] [--layers N] [--json] [--check]

37 layers are 336 weights and 1,003 nodes. What is computed over workers needs a ggml with RPC.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ggml_cffi import Backend, Device, Graph, MetaDevice, Tensor, capi, device, ffi, ops, rpc
from ggml_cffi._copies import copied
from ggml_cffi._handles import address
from ggml_cffi.backend import usable_cores
from ggml_cffi.meta import plan, policies

from . import common, stack
from .common import Limit, Ratio
from .transformer import Shape, Transformer, split

LAYERS = 37
N_DEVICES = 2
COUNTS = (1, 2, 4)
STACK = {"width": 1024, "hidden": 4096, "n_layers": 4, "n_tokens": 16}
MENDED = Shape(4, 512, 8, 1536, 512, 32)

#: Of medians: how many times ggml's own allocation planning may take.
MOST = {"planning / ggml's allocation": 3.0}


@contextlib.contextmanager
def spread(n: int, split_fn: Callable[..., Any] = split) -> Iterator[MetaDevice]:
    """A meta device of n times the CPU."""
    with MetaDevice(["CPU"] * n, split_fn, on_error="raise") as made:
        yield made


# ---- asking how weights are split


def split_in_c(folder: Path, n: int) -> Any:
    """A meta device of n times the CPU, whose split function is in C and answers as `split`."""
    native = common.build_extension(folder, "_meta", "meta")
    if native.lib.state_size() != ffi.sizeof("struct ggml_backend_meta_split_state"):
        raise RuntimeError("meta.c has the split states of another ggml")
    cpu = native.ffi.cast("void *", address(device("CPU").handle))
    made = native.lib.make_meta_device(native.ffi.new("void *[]", [cpu] * n), n)
    return ffi.cast("struct ggml_backend_device *", int(native.ffi.cast("uintptr_t", made)))


def allocation(where: Any, shape: Shape, sizes: set[int]) -> Callable[[], float]:
    """Times ggml as it gives all weights memory on a device; adds to `sizes` how much that is."""
    kind = capi.ggml_backend_dev_buffer_type(where)
    named = [(name, tuple(reversed(dims))) for name, dims in shape.weights()]

    def timed() -> float:
        room = len(named) * capi.ggml_tensor_overhead()
        context = capi.ggml_init(mem_size=room, no_alloc=True)
        try:
            for name, dims in named:
                one = capi.ggml_new_tensor(context, capi.GGML_TYPE_F32, dims)
                capi.ggml_set_name(one, name)
            start = time.thread_time_ns()
            buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
            taken = time.thread_time_ns() - start
            sizes.add(capi.ggml_backend_buffer_get_size(buffer))
            capi.ggml_backend_buffer_free(buffer)
        finally:
            capi.ggml_free(context)
        return taken

    return timed


def asking(folder: Path, shape: Shape, n_rounds: int, passes: int = 3) -> dict[str, Ratio]:
    """What the split function costs, in C, in Python and as a policy."""

    def nothing() -> None:
        pass

    calls = 10_000
    n = sum(1 for _ in shape.weights())
    policy = policies.hugging_face(shape.config, [1] * N_DEVICES)
    sizes: set[int] = set()
    with spread(N_DEVICES) as python, spread(N_DEVICES, policy) as ruled:
        subjects = {
            "in C": allocation(split_in_c(folder, N_DEVICES), shape, sizes),
            "in Python": allocation(python.handle, shape, sizes),
            "a policy": allocation(ruled.handle, shape, sizes),
            "one device": allocation(device("CPU").handle, shape, set()),
            "empty function": common.cpu(lambda: [nothing() for _ in range(calls)]),
        }
        rounds = common.measure(subjects, n_rounds, passes)
    if len(sizes) != 1:
        raise RuntimeError(f"the split functions differ: ggml has taken {sizes} bytes")
    for found in rounds:
        found["empty function"] /= calls
        for name in ("in Python", "a policy"):
            found[f"{name}, of a weight"] = (found[name] - found["in C"]) / n
        found["in C, of a weight"] = (found["in C"] - found["one device"]) / n
    pairs = {
        "a split function in C / one device": ("in C", "one device"),
        "a split function in Python / in C": ("in Python", "in C"),
        "a policy / a split function in C": ("a policy", "in C"),
    } | {
        f"{name}: more for a weight, in calls of an empty function": (
            f"{name}, of a weight",
            "empty function",
        )
        for name in ("in C", "in Python", "a policy")
    }
    return {name: rounds.ratio(*pair) for name, pair in pairs.items()}


# ---- planning


def allocated(where: MetaDevice, graph: Graph) -> Callable[[], float]:
    """Times ggml's own allocation of a graph, on a backend of its own and with a new allocator."""

    def timed() -> float:
        with copied(graph._order()) as (tensors, made), Backend(where, 1) as backend:
            for one in tensors:
                if one.op == capi.GGML_OP_NONE and not one.buffer:
                    capi.ggml_set_input(one)
            kind = capi.ggml_backend_get_default_buffer_type(backend.handle)
            allocator = capi.ggml_gallocr_new(kind)
            start = time.thread_time_ns()
            capi.ggml_gallocr_alloc_graph(allocator, made)
            taken = time.thread_time_ns() - start
            capi.ggml_gallocr_free(allocator)
        return taken

    return timed


def planned(where: MetaDevice, graph: Graph) -> Callable[[], object]:
    """What compiling does before it allocates: the order of the tensors, and the plan of them."""

    def made() -> object:
        order = graph._order()
        return plan.make(where, order, [len(order) - 1], mend=True)

    return made


def compiled(where: MetaDevice, graph: Graph) -> Callable[[], float]:
    """Times compiling, without the end of what is made."""

    def timed() -> float:
        start = time.thread_time_ns()
        made = graph.compile(where, n_threads=1)
        taken = time.thread_time_ns() - start
        made.close()
        return taken

    return timed


def planning(shape: Shape, n_rounds: int, passes: int = 3) -> dict[str, Ratio]:
    """What planning costs, next to ggml's own allocation of the same graph."""
    with spread(N_DEVICES) as where, contextlib.ExitStack() as held:
        model = Transformer(where, shape)
        held.callback(model.close)
        subjects = {
            "allocation": allocated(where, model.graph),
            "planning": common.cpu(planned(where, model.graph)),
            "table": common.cpu(lambda: where.plan(model.graph)),
            "compile": compiled(where, model.graph),
        }
        rounds = common.measure(subjects, n_rounds, passes)
    pairs = {
        "planning / ggml's allocation": ("planning", "allocation"),
        "MetaDevice.plan / ggml's allocation": ("table", "allocation"),
        "Graph.compile / ggml's allocation": ("compile", "allocation"),
    }
    return {name: rounds.ratio(*pair) for name, pair in pairs.items()}


# ---- computing


def devices_of(n: int, what: str) -> str:
    """A number of devices, or workers, in words."""
    return f"{n} {what}{'s' * (n > 1)}"


def computing(
    counts: Sequence[int],
    n_rounds: int,
    passes: int = 3,
    shape: dict[str, int] = STACK,
    with_workers: bool = True,
) -> dict[str, Ratio]:
    """A feed-forward stack over devices of one thread, against one device.

    That has one thread too, or, where there are so many cores, as many as they have together.
    """
    plain = [1, *(n for n in counts if 1 < n <= usable_cores())]
    with contextlib.ExitStack() as held:
        want = None
        subjects = {}

        def add(name: str, where: Device, n_threads: int = 1) -> None:
            nonlocal want
            made = stack.Stack(where, **shape, n_threads=n_threads)
            held.callback(made.close)
            found = made.run()
            want = found if want is None else want
            np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3, err_msg=name)
            subjects[name] = common.wall(made.run)

        for n in plain:
            add(f"{n} threads", device("CPU"), n)
        places: list[tuple[str, Sequence[Any]]] = [("CPU device", ["CPU"] * max(counts))]
        if with_workers:
            workers = held.enter_context(rpc.LocalWorkers(max(counts), threads=1))
            places.append(("worker", workers))
        for what, devices in places:
            for n in counts:
                where = held.enter_context(MetaDevice(devices[:n], stack.split, "raise"))
                add(devices_of(n, what), where)
        rounds = common.measure(subjects, n_rounds, passes)
    ratios = {}
    for what, _ in places:
        for n in counts:
            for threads in (1, n) if n > 1 and n in plain else (1,):
                name = f"{devices_of(n, what)} / one device of {devices_of(threads, 'thread')}"
                ratios[name] = rounds.ratio(devices_of(n, what), f"{threads} threads")
    return ratios


# ---- mending


def needs_copies(x: Tensor, product: Tensor, gain: Tensor) -> Tensor:
    """The product is used by itself, after its sum has been put off past the first addition."""
    return x + product * gain + product


def by_hand(x: Tensor, product: Tensor, gain: Tensor) -> Tensor:
    """The same with the copies that it needs."""
    return needs_copies(x, ops.cont(product), gain)


def needs_none(x: Tensor, product: Tensor, gain: Tensor) -> Tensor:
    """One operation less: the sum may be put off."""
    return x + product * gain


ADDED = {"mended": needs_copies, "by hand": by_hand, "no copies": needs_none}


def mending(
    shape: Shape, small: Shape, n_rounds: int, passes: int = 3
) -> tuple[dict[str, Ratio], int]:
    """What mending costs on compiling (`small`) and on running, and how many copies it puts in."""
    with spread(N_DEVICES) as where, contextlib.ExitStack() as held:
        compiling, running = {}, {}
        results = {}
        n_copies = {}
        for name, added in ADDED.items():
            model = Transformer(where, small, added)
            held.callback(model.close)
            n_copies[name] = sum(one.is_copy for one in where.plan(model.graph).tensors)
            compiling[name] = compiled(where, model.graph)
            large = Transformer(where, shape, added)
            held.callback(large.close)
            run = held.enter_context(large.graph.compile(where, n_threads=1))
            given = large.inputs()
            results[name] = run(**given)
            running[name] = common.cpu(lambda run=run, given=given: run(**given))
        np.testing.assert_array_equal(results["mended"], results["by hand"])
        if n_copies["by hand"] or n_copies["no copies"] or not n_copies["mended"]:
            raise RuntimeError(f"the graphs have other copies than they should: {n_copies}")
        measured = {
            "compiling": common.measure(compiling, n_rounds, passes),
            "running": common.measure(running, n_rounds, passes),
        }
    ratios = {
        f"{what}, {other}": rounds.ratio("mended", base)
        for what, rounds in measured.items()
        for other, base in (("mended / by hand", "by hand"), ("mended / no copies", "no copies"))
    }
    return ratios, n_copies["mended"]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and tell whether the limits hold."""
    parser = common.parser(__doc__, 9)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args(arguments)
    shape = Shape(options.layers)
    n_weights = sum(1 for _ in shape.weights())

    with tempfile.TemporaryDirectory() as folder:
        asked = asking(Path(folder), shape, options.rounds)
    over = f"a meta device of {N_DEVICES} CPU devices"
    common.report(f"memory for {n_weights} weights, {over}", asked, [], options)

    found = planning(shape, options.rounds)
    title = f"{n_weights} weights and {4 + 27 * shape.n_layers} nodes, {over}"
    limits = [Limit(name, found[name], most=most) for name, most in MOST.items()]
    failed = common.report(title, found, limits, options)

    workers = hasattr(capi, "RPC_PROTO_MAJOR_VERSION")
    if not workers:
        print("there is no RPC in this ggml: nothing is measured on workers", file=sys.stderr)
    ratios = computing(COUNTS, options.rounds, with_workers=workers)
    sizes = f"{STACK['n_layers']} layers of {STACK['width']} x {STACK['hidden']}, float32"
    title = (
        f"a feed-forward stack, {sizes}, {STACK['n_tokens']} tokens, over devices of one thread on "
        f"this machine's {usable_cores()} cores; times"
    )
    common.report(title, ratios, [], options)

    ratios, n_copies = mending(MENDED, shape, options.rounds)
    title = (
        f"{n_copies} copies that make {shape.n_layers} layers right on compiling, "
        f"{2 * MENDED.n_layers} in {MENDED.n_layers} larger ones on running, {over}; times"
    )
    common.report(title, ratios, [], options)
    return failed


if __name__ == "__main__":
    sys.exit(main())
