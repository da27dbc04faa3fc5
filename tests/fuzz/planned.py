"""The planner's word on a random graph, against what ggml does on a meta device of CPUs.

What the plan says ggml gives up on must abort there, over the condition that it names. What it
takes must be computed, with the numbers that one device has; without copies, by ggml alone too.
What it refuses as wrong is tried in a process apart, and counted: refusals may be too strict.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
from memory import data
from planned_graphs import Placed, PlannedBuilder
from programs import F16, F32, REFUSALS, Call, Leaf, execute
from single import ARENA, Fault, Program

from ggml_cffi import AbortError, Context, Graph, SplitError, capi, rpc
from ggml_cffi.device import device
from ggml_cffi.meta import MetaDevice
from ggml_cffi.tensor import Tensor

GIVES_UP = re.compile(r"\(ggml would abort: (.*)\)$", re.DOTALL)
REFUSED = re.compile(r"cannot split the graph: ([A-Z][A-Z0-9_]+)\b")

#: Where a small error becomes a large one.
STEPS = ("SGN", "STEP", "FLOOR", "CEIL", "ROUND", "TRUNC", "ARGMAX", "ARGSORT", "TOP_K")


@dataclass
class Made:
    """A graph whose leaves have memory on a device, or are inputs."""

    context: Context
    tensors: list[Any]
    graph: Graph
    inputs: dict[str, np.ndarray[Any, Any]]


class Example:
    """A program, with the places of its leaves; the same whenever it is made."""

    def __init__(self, example: dict[str, Any]) -> None:
        self.n_devs: int = example["devices"]
        ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
        try:
            style = example["style"]
            builder = PlannedBuilder(ctx, example["dims"], self.n_devs, style)
            for function, choices in example["nodes"]:
                if function:
                    builder.node(function, bytes.fromhex(choices))
            self.program = Program(builder, example["seed"])
            self.places: dict[int, Placed] = builder.places
            self.read = self._read(builder, example["more"])
        finally:
            capi.ggml_free(ctx)

    def _read(self, builder: PlannedBuilder, more: int) -> list[int]:
        """What is read: what no other uses, and one more."""
        found = self.program.ends()
        nodes = [i for i, r in enumerate(self.program.records) if isinstance(r, Call)]
        if more and nodes:
            found = sorted({*found, nodes[more % len(nodes)]})
        kinds = reference.DTYPES
        drawn = ((i, builder.tensors[i]) for i in found)
        return [i for i, t in drawn if t.type in kinds and t.elements]

    def text(self) -> str:
        lines = self.program.text()
        lines += [f"t{i} {place}" for i, place in self.places.items() if place.split.axis != 10]
        return "\n".join([*lines, f"{self.n_devs} devices; read: {self.read}"])

    def split(self, info: Any, n_devs: int) -> Any:
        return self.places[int(info.name.removeprefix("leaf"))].split

    def numbers(self, i: int, noise: float = 0.0) -> np.ndarray[Any, Any]:
        """The bytes of a leaf's numbers: none is special."""
        record = self.program.records[i]
        assert isinstance(record, Leaf)
        found = np.frombuffer(data(record, 16 * (self.program.seed + i) + 4), np.uint8)
        if not noise or record.type not in (F32, F16):
            return found
        dtype = np.float32 if record.type == F32 else np.float16
        exact = found.view(dtype).astype(np.float64)
        rng = np.random.default_rng(i)
        step = noise if record.type == F32 else max(noise, 0.0)
        return (exact * (1 + step * rng.standard_normal(len(exact)))).astype(dtype).view(np.uint8)

    @contextlib.contextmanager
    def made(self, target: Any, noise: float = 0.0) -> Iterator[Made]:
        with Context() as context:
            tensors: list[Any] = []
            inputs: dict[str, np.ndarray[Any, Any]] = {}
            for i, record in enumerate(self.program.records):
                if not isinstance(record, Leaf):
                    tensors.append(None)
                    continue
                make = context.tensor if self.places[i].is_static else context.input
                tensors.append(make(record.ne[::-1], record.type, f"leaf{i}").handle)
            context.allocate(target)
            for i, record in enumerate(self.program.records):
                if isinstance(record, Call):
                    tensors[i] = execute(context._room(), record, tensors)
                    continue
                numbers = self.numbers(i, noise)
                if self.places[i].is_static:
                    if numbers.size:
                        capi.ggml_backend_tensor_set(tensors[i], numbers, 0)
                else:
                    dtype = reference.DTYPES.get(int(record.type))
                    if dtype is None or record.type == capi.GGML_TYPE_BF16:
                        wide = np.zeros(record.ne[::-1], np.float32)
                        inputs[f"leaf{i}"] = wide
                    else:
                        inputs[f"leaf{i}"] = numbers.view(dtype).reshape(record.ne[::-1])
            outputs = {str(i): Tensor(tensors[i], context, 4) for i in self.read}
            graph = Graph(outputs)
            used = {one.name for one in graph.inputs}
            yield Made(context, tensors, graph, {k: v for k, v in inputs.items() if k in used})

    def computed(self, target: Any, noise: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
        """The numbers that a compiled graph gives."""
        with self.made(target, noise) as made, made.graph.compile(target, n_threads=1) as run:
            memory = next((t for t in run._tensors if t.buffer and not self._is_static(t)), None)
            if memory is not None and not run._constants:
                capi.ggml_backend_buffer_clear(memory.buffer, 0xFF)  # NaN, of what is not computed
            return run.run(**made.inputs)

    @staticmethod
    def _is_static(tensor: Any) -> bool:
        usage = capi.ggml_backend_buffer_get_usage(tensor.buffer)
        return bool(usage != capi.GGML_BACKEND_BUFFER_USAGE_COMPUTE)

    def by_ggml(self, target: MetaDevice) -> dict[str, np.ndarray[Any, Any] | None]:
        """The numbers that ggml gives without the planner; None where it cannot be read."""
        with self.made(target) as made, target.init_backend(1) as backend:
            order, inputs = made.graph._order(), made.graph.inputs
            ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
            kind = capi.ggml_backend_get_default_buffer_type(backend.handle)
            allocator = capi.ggml_gallocr_new(kind)
            try:
                for one in inputs:
                    capi.ggml_set_input(one.handle)
                graph = capi.ggml_new_graph_custom(ctx, len(order) + 1, False)
                for one in order:
                    capi.ggml_build_forward_expand(graph, one)
                for one in made.graph.outputs:
                    for handle in (one.handle, one.handle.view_src):
                        if handle:
                            capi.ggml_set_output(handle)
                capi.ggml_gallocr_alloc_graph(allocator, graph)
                for one in inputs:
                    numbers = np.ascontiguousarray(made.inputs[one.name])
                    if numbers.dtype == np.float32 and one.type == capi.GGML_TYPE_BF16:
                        numbers = np.zeros(numbers.size, np.uint16)
                    if one.size:
                        bytes_ = numbers.view(np.uint8).reshape(-1)[: one.nbytes]
                        capi.ggml_backend_tensor_set(one.handle, bytes_, 0)
                capi.ggml_backend_graph_compute(backend.handle, graph)
                return {str(i): self._get(made.tensors[i]) for i in self.read}
            finally:
                capi.ggml_gallocr_free(allocator)
                capi.ggml_free(ctx)

    @staticmethod
    def _get(tensor: Any) -> np.ndarray[Any, Any] | None:
        found = np.zeros(list(tensor.ne)[::-1], reference.DTYPES[int(tensor.type)])
        if not capi.ggml_is_contiguous(tensor):
            return None
        try:
            capi.ggml_backend_tensor_get(tensor, found.view(np.uint8).reshape(-1), 0)
        except AbortError:
            return None
        if tensor.type == capi.GGML_TYPE_BF16:
            found = (found.astype("<u4") << 16).view("<f4")
        return found


_workers: list[rpc.LocalWorkers] = []


def on_workers(made: Example) -> MetaDevice:
    """The same devices, but in processes of their own."""
    if not _workers:
        _workers.append(rpc.LocalWorkers(2))
    return MetaDevice([_workers[0][i % 2] for i in range(made.n_devs)], made.split, "raise")


class Reference:
    """The numbers on one CPU, and how far they move with some noise in the leaves."""

    def __init__(self, example: Example) -> None:
        one = device("CPU")
        self.right = example.computed(one)
        self.moved = example.computed(one, 1e-6)
        # products with such weights round what they are given: a small change may be a step of it
        kinds = {int(r.type) for r in example.program.records if isinstance(r, Leaf)}
        halves = kinds & {int(F16), int(capi.GGML_TYPE_BF16)} or any(
            getattr(r, "function", "") == "ggml_flash_attn_ext" for r in example.program.records
        )
        self.rough = 1e-2 if halves else 1e-4
        if any(capi.ggml_is_quantized(kind) for kind in kinds):
            self.rough = 3e-2

    def wrong(self, name: str, found: np.ndarray[Any, Any]) -> str:
        """What differs, in words; nothing if all is right."""
        x = np.asarray(self.right[name], np.float64)
        y = np.asarray(self.moved[name], np.float64)
        found = np.asarray(found, np.float64).reshape(x.shape)
        with np.errstate(all="ignore"):
            finite = np.isfinite(x) & np.isfinite(y)
            scale = np.abs(x[finite]).max(initial=0)
            change = np.abs(x - y)
            if not (change[finite] <= 1e-3 * scale + 1e-9).all():
                return "?"  # the noise alone moves it as much
            bound = self.rough * scale + 100 * change + 1e-6
            wrong = finite & ~(np.abs(found - x) <= bound)
        if not wrong.any():
            return ""
        at = tuple(int(n[0]) for n in np.nonzero(wrong))
        return f"{int(wrong.sum())} of {wrong.size} numbers; at {at} {found[at]} instead of {x[at]}"


def run(example: dict[str, Any], counts: Counter[str]) -> None:
    made = Example(example)
    if not made.read:
        counts["nothing to compute"] += 1
        return
    try:
        judge(made, counts, example["strict"], example["workers"])
    except Fault:
        raise
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}\n{made.text()}") from error


def judge(made: Example, counts: Counter[str], strict: bool, workers: bool) -> None:
    meta = MetaDevice(["CPU"] * made.n_devs, made.split, "raise")
    with made.made(meta) as here:
        ops = {capi.ggml_op_name(t.op) for t in here.graph._order()} - {"NONE"}
        refusal = _plan(meta, here.graph, mend=False)
        mended = refusal and _plan(meta, here.graph, mend=True)
    counts["graphs"] += 1
    word = "refused" if mended or GIVES_UP.search(refusal) else "accepted"
    called = {r.function for r in made.program.records if isinstance(r, Call)}
    counts.update(f"{word} call {function}" for function in called)
    if word == "refused":
        at = f"ggml_{_op(mended or refusal).lower()}"
        counts.update(f"refused at {name}" for name in called if name.startswith(at))
    aborts = GIVES_UP.search(refusal)
    if aborts:
        counts["refused: ggml aborts"] += 1
        counts[f"refused {_op(refusal)}"] += 1
        _check_abort(made, meta, refusal, aborts[1])
    elif mended:
        counts["refused: it would be wrong"] += 1
        counts[f"refused {_op(mended)}"] += 1
        if workers and "rpc.LocalWorkers" in mended:
            counts["accepted on workers alone"] += _check_on_workers(made, counts, ops)
        elif strict:
            _try(made, meta, mended, counts)
    else:
        counts["accepted with copies" if refusal else "accepted as it is"] += 1
        if any(place.split.is_split for place in made.places.values()):
            counts["accepted with something cut"] += 1
        counts.update(f"accepted {op}" for op in ops)
        _check_numbers(made, meta, not refusal, counts)
        if workers:
            counts["computed on workers, too"] += _check_on_workers(made, counts, ops)


def _check_on_workers(made: Example, counts: Counter[str], ops: set[str]) -> bool:
    """Whether it is accepted there; then it is right there."""
    meta = on_workers(made)
    with made.made(meta) as here:
        if _plan(meta, here.graph, mend=True):
            return False
    counts.update(f"accepted {op}" for op in ops)
    _check_numbers(made, meta, False, counts)
    return True


def _plan(meta: MetaDevice, graph: Graph, mend: bool) -> str:
    try:
        meta.plan(graph, mend)
    except SplitError as error:
        return str(error)
    return ""


def _op(refusal: str) -> str:
    found = REFUSED.search(refusal)
    return found[1] if found else "NONE"


def _bare(text: str) -> str:
    return "".join(text.split())


def _check_abort(made: Example, meta: MetaDevice, refusal: str, condition: str) -> None:
    try:
        made.by_ggml(meta)
    except AbortError as error:
        if _bare(condition) in _bare(str(error)) or "src_ss[i].axis" in condition:
            return  # of what is empty, ggml's allocator may say so before
        raise Fault(f"{refusal}\nbut ggml says: {error}\n{made.text()}") from None
    raise Fault(f"{refusal}\nbut ggml computes it\n{made.text()}")


def _check_numbers(made: Example, meta: MetaDevice, plain: bool, counts: Counter[str]) -> None:
    try:
        right = Reference(made)
    except REFUSALS:  # of a kernel, for one device as well
        counts["one device cannot compute it"] += 1
        return
    if plain:
        made.by_ggml(meta)
    for name, found in made.computed(meta).items():
        wrong = right.wrong(name, found)
        if wrong == "?":
            counts["ill-conditioned, not compared"] += 1
        elif wrong:
            raise Fault(f"t{name}: {wrong}\n{made.text()}")
        else:
            counts["compared with one device"] += 1


def _try(made: Example, meta: MetaDevice, refusal: str, counts: Counter[str]) -> None:
    """What ggml makes of a graph that is refused as wrong, in a process that may die of it."""
    why = re.sub(r"'[^']*'", "X", refusal.rsplit(": ", 1)[-1])
    why = re.sub(r"\d+", "N", why)
    try:
        right = Reference(made)
    except REFUSALS:
        return
    child = os.fork()
    if not child:
        _in_child(made, right)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    outcomes = {0: "right", 1: "wrong", 2: "aborts", 3: "not read", 5: "is refused by capi"}
    outcome = outcomes.get(code, "crashes")
    counts[f"strict: {_op(refusal)}: {why}: {outcome}"] += 1


def _in_child(made: Example, right: Reference) -> None:
    signal.alarm(30)
    code = 4
    try:
        meta = MetaDevice(["CPU"] * made.n_devs, made.split, "raise")
        found = made.by_ggml(meta)
        wrong = [one is not None and right.wrong(name, one) for name, one in found.items()]
        code = 1 if any(wrong) else 3 if any(one is None for one in found.values()) else 0
    except REFUSALS as error:
        code = 2 if isinstance(error, AbortError) else 5
    finally:
        os._exit(code)
