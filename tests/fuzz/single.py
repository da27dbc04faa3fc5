"""A graph on one device: computed node by node, with several threads, and in reused memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import reference
from memory import GuardedMemory, data
from operations import OPERATIONS
from programs import REFUSALS, STEPS, VIEWS, Builder, Call, Leaf, Ref, execute, tensors_of

from ggml_cffi import AbortError, capi

ARENA = 4 << 20
COMPUTE = int(getattr(capi, "GGML_TENSOR_FLAG_COMPUTE", 0))

#: Operations that add up what their threads have computed, in another order each time.
ORDER_OF_THREADS = ("ggml_cross_entropy_loss", "ggml_flash_attn_ext")


class Fault(AssertionError):
    """Something that may not be."""


class Program:
    """What a builder has drawn, to be made again in other contexts."""

    def __init__(self, builder: Builder, seed: int) -> None:
        self.records = builder.records
        self.seed = seed
        self.alive = [True] * len(self.records)

    def text(self, at: int | None = None) -> list[str]:
        """The program, a line a record; or only what a node has to do with."""
        wanted = set(range(len(self.records)) if at is None else [at])
        for _ in self.records if at is not None else ():
            wanted |= {a.at for i in wanted for a in self.args(i)}
            wanted |= {i for i in range(len(self.records)) if self.in_place(i) in wanted}
        return [
            f"t{i} = {self.records[i]}{'' if self.alive[i] else '  # refused'}"
            for i in sorted(wanted)
        ]

    def args(self, i: int) -> list[Ref]:
        record = self.records[i]
        return [a for a in record.args if isinstance(a, Ref)] if isinstance(record, Call) else []

    def in_place(self, i: int) -> int | None:
        """The tensor that a node writes over."""
        name = getattr(self.records[i], "function", "")
        over = ("ggml_set_rows", "ggml_leaky_relu", "ggml_clamp", *STEPS)
        if name.endswith("_inplace") or name in over:
            return self.args(i)[0].at
        return self.args(i)[1].at if name == "ggml_cpy" else None

    def make(self, ctx: Any, leaves: Any = None) -> list[Any]:
        """The tensors of the records, None for refused ones; leaves in their own context."""
        made: list[Any] = []
        for record, alive in zip(self.records, self.alive, strict=True):
            where = leaves if leaves is not None and isinstance(record, Leaf) else ctx
            made.append(execute(where, record, made) if alive else None)
        return made

    def parts(self, ctx: Any) -> list[list[Any]]:
        """The same in one context, with the tensors that the calls make on the way."""
        made: list[Any] = []
        found, last = [], None
        for record in self.records:
            made.append(execute(ctx, record, made))
            found.append(list(tensors_of(ctx, last)))
            last = found[-1][-1]
        return found

    def fill(self, tensors: Sequence[Any]) -> None:
        for i, (record, t) in enumerate(zip(self.records, tensors, strict=True)):
            if isinstance(record, Leaf) and t is not None and 0 not in record.ne:
                numbers = np.frombuffer(data(record, self.seed + i), np.uint8)
                capi.ggml_backend_tensor_set(t, numbers, 0)

    def ends(self) -> list[int]:
        """The nodes that no other uses."""
        used = {
            a.at for r in self.records if isinstance(r, Call) for a in r.args if isinstance(a, Ref)
        }
        return [i for i, r in enumerate(self.records) if isinstance(r, Call) and i not in used]

    def unordered(self) -> set[int]:
        """The nodes that the order of threads has a part in."""
        found: set[int] = set()
        for i, r in enumerate(self.records):
            if isinstance(r, Call) and (
                r.function in ORDER_OF_THREADS
                or any(isinstance(a, Ref) and a.at in found for a in r.args)
            ):
                found.add(i)
                # what is written in place changes what it is a view of, and its other views
                if r.function.endswith("_inplace") or r.function in ("ggml_cpy", "ggml_set_rows"):
                    found.update(a.at for a in r.args if isinstance(a, Ref))
        return found


def graph_of(ctx: Any, tensors: Sequence[Any], program: Program) -> Any:
    """All nodes, in the order of the program."""
    graph = capi.ggml_new_graph_custom(ctx, 1024, False)
    for record, t in zip(program.records, tensors, strict=True):
        if isinstance(record, Call) and t is not None:
            capi.ggml_build_forward_expand(graph, t)
    return graph


def same(a: bytes, b: bytes, t: Any) -> bool:
    """The same numbers, NaNs alike."""
    if a == b:
        return True
    dtype = {0: "<f4", 1: "<f2"}.get(int(t.type))
    if t.type == capi.GGML_TYPE_BF16:
        x, y = (np.frombuffer(s, "<u2").astype("<u4") << 16 for s in (a, b))
        return np.array_equal(x.view("<f4"), y.view("<f4"), equal_nan=True)
    if dtype is None:
        return False
    return np.array_equal(np.frombuffer(a, dtype), np.frombuffer(b, dtype), equal_nan=True)


def fault(program: Program, at: int, what: str) -> Fault:
    return Fault(f"t{at} = {program.records[at]}: {what}\n" + "\n".join(program.text(at)))


def aborted_in_kernel(error: Exception) -> bool:
    """With several threads that would be the end of the process: it is to be refused before."""
    return isinstance(error, AbortError) and "/ggml-cpu/" in str(error)


def reads_behind(node: Any) -> bool:
    """A rotation of a part of a row reads, and does not use, factors for the whole of it.

    They may lie anywhere in the buffer, but ours has guarded pages in between.
    """
    ropes = capi.GGML_OP_ROPE, capi.GGML_OP_ROPE_BACK
    factors = node.src[2] if node.op in ropes else None
    return bool(factors) and factors.ne[0] < node.ne[0] // 2


def node_by_node(
    ctx: Any,
    backend: Any,
    program: Program,
    inner: Sequence[list[Any]],
    counts: Counter[str],
    check: bool = True,
) -> None:
    """Compute each node by itself and compare it with NumPy; what is refused is dead from then on.

    `inner`: for each record the tensors that its call has made.
    """
    graph = capi.ggml_new_graph_custom(ctx, 64, False)
    tensors = [parts[-1] for parts in inner]
    for i, record in enumerate(program.records):
        if not isinstance(record, Call):
            continue
        sources = [a.at for a in record.args if isinstance(a, Ref)]
        if not all(program.alive[at] for at in sources):
            program.alive[i] = False
            counts["depends on what is refused"] += 1
            continue
        t = tensors[i]
        known = check and record.function in reference.REFERENCES and not record.spoiled
        args = (
            [reference.operand(tensors[a.at]) if isinstance(a, Ref) else a for a in record.args]
            if known
            else []
        )
        if any(reads_behind(part) for part in inner[i]):
            program.alive[i] = False
            counts["reads behind an operand, in its buffer"] += 1
            continue
        if any(part.op not in VIEWS for part in inner[i]):
            capi.ggml_graph_clear(graph)
            for part in inner[i]:
                part.flags |= COMPUTE
                capi.ggml_graph_add_node(graph, part)
            try:
                capi.ggml_backend_graph_compute(backend, graph)
            except REFUSALS as error:
                if aborted_in_kernel(error):
                    raise fault(program, i, f"in a kernel: {error}") from error
                program.alive[i] = False
                counts["refused when computed"] += 1
                counts[f"refused when computed: {str(error)[:90]}"] += 1
                continue
        counts["computed"] += 1
        counts[f"computed: {record.function}"] += 1
        if not known:
            continue
        counts["checked with NumPy"] += 1
        wrong = reference.difference(record.function, args, t)
        if wrong:
            raise fault(program, i, wrong)


def compare(
    program: Program, wanted: Sequence[bytes | None], tensors: Sequence[Any], which: Any, how: str
) -> int:
    unordered = program.unordered()
    n = 0
    for i in which:
        t, before = tensors[i], wanted[i]
        if t is None or before is None or i in unordered:
            continue
        found = np.empty(capi.ggml_nbytes(t), np.uint8)
        if capi.ggml_is_contiguous(t):
            if found.size:
                capi.ggml_backend_tensor_get(t, found, 0)
            now = found.tobytes()
        else:
            now = reference.raw(t).tobytes()
        n += 1
        if not same(before, now, t):
            raise fault(program, i, f"{how}: {_first_difference(before, now)}")
    return n


def _first_difference(a: bytes, b: bytes) -> str:
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    at -= at % 4
    shown = f"{a[at : at + 8].hex()} and {b[at : at + 8].hex()}"
    return f"{len(a)} and {len(b)} bytes, from {at} on {shown}"


def run(example: dict[str, Any], counts: Counter[str]) -> None:
    """Build, compute three times, compare; raises a Fault."""
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    builder = Builder(ctx, example["dims"], OPERATIONS)
    for function, choices in example["nodes"]:
        if function:
            builder.node(function, bytes.fromhex(choices))
    counts.update(builder.counts)
    program = Program(builder, example["seed"])
    one = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(one, 1)
    several = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(several, example["threads"])
    try:
        tensors = [t.handle for t in builder.tensors]
        inner = [t.inner for t in builder.tensors]
        with GuardedMemory([part for parts in inner for part in parts], 0xA5) as memory:
            if memory.size > 1 << 26:
                counts["too much memory"] += 1
                return
            program.fill(tensors)
            node_by_node(ctx, one, program, inner, counts)
            wanted = [
                reference.raw(t).tobytes() if alive else None
                for t, alive in zip(tensors, program.alive, strict=True)
            ]
        counts["compared with several threads"] += _whole(program, several, wanted)
        _reused(program, one, wanted, example["seed"], counts)
    finally:
        capi.ggml_backend_free(several)
        capi.ggml_backend_free(one)
        capi.ggml_free(ctx)


def _whole(program: Program, backend: Any, wanted: Sequence[bytes | None]) -> int:
    """The whole graph at once, with several threads."""
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    try:
        tensors = program.make(ctx)
        with GuardedMemory(list(tensors_of(ctx)), 0x5A):
            program.fill(tensors)
            graph = graph_of(ctx, tensors, program)
            try:
                capi.ggml_backend_graph_compute(backend, graph)
            except REFUSALS as error:
                raise fault(
                    program, len(tensors) - 1, f"node by node, but not as a whole: {error}"
                ) from error
            return compare(program, wanted, tensors, range(len(tensors)), "with several threads")
    finally:
        capi.ggml_free(ctx)


def _reused(
    program: Program, backend: Any, wanted: Sequence[bytes | None], seed: int, counts: Counter[str]
) -> None:
    """In memory that nodes share whose times do not overlap: some can be read in the end."""
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    leaves = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend))
    buffer = None
    try:
        tensors = program.make(ctx, leaves)
        if capi.ggml_get_first_tensor(leaves) is not None:
            try:
                buffer = capi.ggml_backend_alloc_ctx_tensors(leaves, backend)
            except REFUSALS:
                return  # all leaves are empty
        program.fill(tensors)
        read = [i for i in program.ends() if program.alive[i]]
        read += [i for i, t in enumerate(tensors) if t is not None and (i + seed) % 7 == 0]
        read = [i for i in read if isinstance(program.records[i], Call)]
        for i in read:
            capi.ggml_set_output(tensors[i])
            if tensors[i].view_src:
                capi.ggml_set_output(tensors[i].view_src)
        graph = graph_of(ctx, tensors, program)
        if capi.ggml_graph_n_nodes(graph) == 0:
            return
        try:
            capi.ggml_gallocr_alloc_graph(galloc, graph)
            capi.ggml_backend_graph_compute(backend, graph)
        except (AbortError, ValueError) as error:
            bare = [t for t in tensors if t is not None and not t.view_src and not t.data]
            if bare and all(0 in t.ne for t in bare):
                # there is no address for them: ggml takes them for not placed, and places them anew
                told = "tensor->buffer == NULL"
            else:
                told = "would write over"
            if told not in str(error):
                raise
            counts["refused in reused memory"] += 1
            return
        n = compare(program, wanted, tensors, read, "in reused memory")
        counts["compared in reused memory"] += n
    finally:
        capi.ggml_gallocr_free(galloc)
        if buffer is not None:
            capi.ggml_backend_buffer_free(buffer)
        capi.ggml_free(leaves)
        capi.ggml_free(ctx)
