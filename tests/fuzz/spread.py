"""A graph on a meta device of CPUs, cut in a random way, against the same on one CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import reference
from memory import GuardedMemory
from operations import OPERATIONS
from programs import (
    BF16,
    BLOCKS,
    F16,
    F32,
    I32,
    REFUSALS,
    Builder,
    Call,
    Drawn,
    Leaf,
    Ref,
    execute,
    tensors_of,
)
from single import ARENA, Fault, Program, aborted_in_kernel, fault, graph_of, node_by_node
from splits import MIRRORED, KnownFault, Limit, Refused, State, known_fault, result

from ggml_cffi import capi
from ggml_cffi.meta import MetaDevice, SplitState

#: Where a small error becomes a large one: only of numbers that are the same on all devices.
STEPS = (
    "sgn",
    "step",
    "floor",
    "ceil",
    "round",
    "trunc",
    "argmax",
    "argsort",
    "top_k",
    "count_equal",
    "unary",
)

#: What a split function should not say.
WRONG_ANSWERS: tuple[Any, ...] = (
    None,
    3,
    {},
    {"axis": 98},
    {"axis": 1, "ne": [1], "n_segments": 1},
    {"axis": 0, "ne": [-1, 5, 1, 1], "n_segments": 1},
    {"axis": 4, "ne": [1, 1, 1, 1], "n_segments": 1},
    {"axis": 3, "ne": [1, 1, 1, 1], "n_segments": 1},
    {"axis": 0, "ne": [1.5, 2.5], "n_segments": 1},
    {"axis": 1, "ne": [2**62] * 4, "n_segments": 1},
    {"axis": 1, "ne": [1] * 68, "n_segments": 17},
    {"axis": 10, "ne": [], "n_segments": 2, "nr": [1, 1]},
    {"axis": 11, "ne": [], "n_segments": 1},
    {"axis": 1, "ne": [0, 0, 0, 0], "n_segments": 0},
)


class SpreadBuilder(Builder):
    """Draws what can be had of the operands as they are cut."""

    def __init__(self, ctx: Any, example: dict[str, Any]) -> None:
        super().__init__(ctx, example["dims"], OPERATIONS)
        self.example = example
        self.states: list[State] = []
        self.inexact: set[int] = set()
        self.excluded: Counter[str] = Counter()
        self._leaves = 0
        self._wish: State | None = None

    def keep(self, record: Leaf | Call, handle: Any, limit: int | None = None) -> Drawn:
        drawn = super().keep(record, handle, limit)
        if isinstance(record, Leaf):
            self.states.append(self._leaf_state(record))
        else:
            self.states.append(MIRRORED)  # until it is known
        return drawn

    def of(self, ne: Sequence[int], types: Sequence[int] = (F32,), plain: bool = False) -> Drawn:
        return super().of(ne, types, plain=True)  # other layouts are views of what may be cut

    def weight(self, x: Drawn) -> Drawn:
        """A weight cut as a product with x needs it: row-parallel or column-parallel."""
        state = self.states[x.at]
        types = [t for t in (F32, F16, BF16, *BLOCKS[:3]) if x.ne[0] % capi.ggml_blck_size(t) == 0]
        type, rows = self.one_of(types), self.extent()
        block = capi.ggml_blck_size(type)
        if state.axis == 0 and not any(n % block for n in state.shares):
            self._wish = state
        elif state.axis is None and rows > 1:
            self._wish = State(1, cut(rows, self.example["ratios"], 1))
        return self.leaf(type, self.fitting(type, (x.ne[0], rows)))

    def _leaf_state(self, leaf: Leaf) -> State:
        """As the split function will say."""
        wish, self._wish = self._wish, None
        if 0 in leaf.ne:
            return MIRRORED
        at, self._leaves = self._leaves, self._leaves + 1
        if self.example["wrong"] is not None and at >= self.example["wrong_at"]:
            return MIRRORED  # the latch is closed
        if wish is not None and leaf.ne[wish.axis] == sum(wish.shares) > 1:
            return wish
        choice = self.example["splits"][at % len(self.example["splits"])]
        axis = (None, 1, 0, None, 1, 0, None, 2)[choice % 8]
        ne = (*leaf.ne, 1, 1, 1)
        if axis is None or leaf.limit is not None or ne[axis] == 1:
            return MIRRORED
        shares = cut(
            ne[axis], self.example["ratios"], capi.ggml_blck_size(leaf.type) if axis == 0 else 1
        )
        return State(axis, shares)

    def made(self, function: str, *args: Any) -> Drawn:
        drawn = super().made(function, *args)
        try:
            self.states[drawn.at] = self._state(drawn)
        except (Refused, KnownFault):
            self.states[drawn.at] = MIRRORED  # the next node will be refused
        return drawn

    def _state(self, drawn: Drawn) -> State:
        known = {t.handle: state for t, state in zip(self.tensors, self.states, strict=True)}
        for part in drawn.inner:
            sources = [(s, known.get(s, MIRRORED)) for s in part.src if s]
            state = result(part, sources)
            wrong = known_fault(part, sources, state) or self._put_off(part, sources)
            if wrong:
                raise KnownFault(wrong.value)
            known[part] = state
        return known[drawn.handle]

    def _put_off(self, node: Any, sources: Sequence[tuple[Any, State]]) -> Limit | None:
        if (
            node.op in (capi.GGML_OP_MUL, capi.GGML_OP_VIEW, capi.GGML_OP_ADD_ID)
            and sources[0][1].partial
        ):
            return Limit.SUM_PUT_OFF
        return None

    def arguments(self, function: str) -> Sequence[Any]:
        if function != "ggml_mul_mat" or self.choose(4) == 0:
            return super().arguments(function)
        x = self.any(
            (F32,), lambda t: t.nb[0] == 4 and (self.states[t.at].axis == 0 or t.at % 2 == 0)
        )
        return self.weight(x), x

    def node(self, function: str, choices: bytes) -> Drawn | None:
        drawn = super().node(function, choices)
        if drawn is None:
            return None
        record = self.records[drawn.at]
        used = (
            {a.at for a in record.args if isinstance(a, Ref)} if isinstance(record, Call) else set()
        )
        inexact = bool(used & self.inexact) or any(
            self.states[i].axis is not None or self.states[i].partial for i in used
        )
        try:
            state = self._state(drawn)
            if inexact and any(step in function for step in STEPS):
                raise KnownFault("not compared: a step of inexact numbers")
        except KnownFault as known:
            self.excluded[str(known)] += 1
            return self._drop()
        except Refused:
            if choices[-1] >= 2:
                self.excluded["not to be had of operands that are cut"] += 1
                return self._drop()
            state = MIRRORED
        self.states[drawn.at] = state
        if inexact or state.partial:
            self.inexact.add(drawn.at)
        if state.partial and choices[-1] % 2:
            return self.mend(drawn)
        return drawn

    def mend(self, drawn: Drawn) -> Drawn:
        """A copy, which may be read and used by anybody."""
        copy = self.made("ggml_cont", drawn)
        self.inexact.add(copy.at)
        return copy

    def _drop(self) -> None:
        for items in (self.records, self.tensors, self.states):
            items.pop()
        self.counts["accepted"] -= 1


def cut(n: int, ratios: Sequence[int], step: int) -> tuple[int, ...]:
    """Shares of n in this proportion, of whole steps; the last device takes the rest."""
    total, start, shares = sum(ratios) or 1, 0, []
    for i in range(len(ratios)):
        end = n if i == len(ratios) - 1 else n * sum(ratios[: i + 1]) // total // step * step
        shares.append(end - start)
        start = end
    return tuple(shares)


def run(example: dict[str, Any], counts: Counter[str]) -> None:
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    builder = SpreadBuilder(ctx, example)
    for function, choices in example["nodes"]:
        if function:
            builder.node(function, bytes.fromhex(choices))
    program = Program(builder, example["seed"])
    read = _readable(builder, program)
    counts.update(builder.counts)
    counts.update({f"excluded: {name}": n for name, n in builder.excluded.items()})
    one = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(one, 1)
    try:
        program.alive = [True] * len(program.records)
        wanted, moved = (_on_one(one, program, counts, noise) for noise in (0.0, 1e-6))
        try:
            _on_several(example, program, builder.states, wanted, moved, read, counts)
        except REFUSALS as error:
            if aborted_in_kernel(error):
                raise fault(program, len(program.records) - 1, f"in a kernel: {error}") from error
            counts["outcome: an exception"] += 1
            counts[f"exception: {type(error).__name__}: {str(error)[:150]}"] += 1
    finally:
        capi.ggml_backend_free(one)
        capi.ggml_free(ctx)


def _readable(builder: SpreadBuilder, program: Program) -> list[int]:
    """Copies of the nodes that no other uses: a sum or a tensor with gaps cannot be read."""
    read = []
    for i in program.ends():
        drawn = builder.tensors[i]
        if drawn.type in reference.DTYPES:
            try:
                if builder._state(builder.mend(drawn)).axis == 3:
                    raise Refused("cannot be read")
            except (Refused, KnownFault):
                builder._drop()
                continue
            read.append(len(builder.tensors) - 1)
    return read


def _on_one(
    backend: Any, program: Program, counts: Counter[str], noise: float
) -> list[np.ndarray[Any, Any] | None]:
    """The numbers of all tensors on one device, with some noise in those of the leaves."""
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    try:
        return _noisy(ctx, backend, program, counts, noise)
    finally:
        capi.ggml_free(ctx)


def _noisy(
    ctx: Any, backend: Any, program: Program, counts: Counter[str], noise: float
) -> list[np.ndarray[Any, Any] | None]:
    inner = program.parts(ctx)
    with GuardedMemory([part for parts in inner for part in parts], 0):
        tensors = [parts[-1] for parts in inner]
        program.fill(tensors)
        rng = np.random.default_rng(program.seed)
        for record, t in zip(program.records, tensors, strict=True):
            if noise and isinstance(record, Leaf) and record.type == F32 and 0 not in record.ne:
                numbers = reference.raw(t)
                numbers = numbers * (1 + noise * rng.standard_normal(numbers.shape)).astype("<f4")
                capi.ggml_backend_tensor_set(t, numbers.view(np.uint8), 0)
        node_by_node(ctx, backend, program, inner, Counter() if noise else counts, check=False)
        return [
            reference.values(t) if alive else None
            for t, alive in zip(tensors, program.alive, strict=True)
        ]


def _split_function(example: dict[str, Any], states: dict[str, State], order: list[str]) -> Any:
    def split(info: Any, n_devs: int) -> Any:
        wrong = example["wrong"]
        if wrong is not None and order.index(info.name) == example["wrong_at"]:
            if wrong < 0:
                raise LookupError(f"no wish for {info.name}")
            return WRONG_ANSWERS[wrong % len(WRONG_ANSWERS)]
        state = states[info.name]
        return (
            SplitState.mirrored()
            if state.axis is None
            else SplitState.split(state.axis, state.shares)
        )

    return split


def _on_several(
    example: dict[str, Any],
    program: Program,
    states: Sequence[State],
    wanted: Sequence[Any],
    moved: Sequence[Any],
    read: Sequence[int],
    counts: Counter[str],
) -> None:
    leaves_of = {
        f"leaf{i}": states[i]
        for i, r in enumerate(program.records)
        if isinstance(r, Leaf) and 0 not in r.ne
    }
    split = _split_function(example, leaves_of, list(leaves_of))
    device = MetaDevice(["CPU"] * len(example["ratios"]), split, example["on_error"])
    ctx = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    leaves = capi.ggml_init(mem_size=ARENA, no_alloc=True)
    backend = device.init_backend(example["threads"])
    galloc = buffer = None
    try:
        tensors: list[Any] = []
        for i, (record, alive) in enumerate(zip(program.records, program.alive, strict=True)):
            made = (
                execute(leaves if isinstance(record, Leaf) else ctx, record, tensors)
                if alive
                else None
            )
            tensors.append(made)
            if isinstance(record, Leaf):
                capi.ggml_set_name(made, f"leaf{i}")
        if not leaves_of:
            counts["outcome: nothing to compute"] += 1
            return
        buffer = capi.ggml_backend_alloc_ctx_tensors(leaves, backend.handle)
        capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        program.fill(tensors)
        _check_leaves(program, tensors, counts)
        for i in read:
            if tensors[i] is not None:
                capi.ggml_set_output(tensors[i])
        graph = graph_of(ctx, tensors, program)
        if capi.ggml_graph_n_nodes(graph) == 0:
            counts["outcome: nothing to compute"] += 1
            return
        galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
        capi.ggml_gallocr_alloc_graph(galloc, graph)
        held = next((t for t in tensors_of(ctx) if t.buffer and not t.view_src), None)
        if held is not None:
            capi.ggml_backend_buffer_clear(held.buffer, 0xFF)  # NaN, of what is not computed
        capi.ggml_backend_graph_compute(backend.handle, graph)
        _check_results(program, tensors, wanted, moved, read, counts)
        counts["outcome: right on several devices"] += 1
        if any(s.axis is not None for s in leaves_of.values()):
            counts["of them with something cut"] += 1
        if any(s.partial for s in states):
            counts["of them with a sum over the devices"] += 1
    finally:
        if galloc is not None:
            capi.ggml_gallocr_free(galloc)
        if buffer is not None:
            capi.ggml_backend_buffer_free(buffer)
        backend.close()
        capi.ggml_free(leaves)
        capi.ggml_free(ctx)
        device.close()


def _check_leaves(program: Program, tensors: Sequence[Any], counts: Counter[str]) -> None:
    from memory import data

    for i, (record, t) in enumerate(zip(program.records, tensors, strict=True)):
        if isinstance(record, Leaf) and 0 not in record.ne:
            written = data(record, program.seed + i)
            back = np.zeros(len(written), np.uint8)
            capi.ggml_backend_tensor_get(t, back, 0)
            counts["leaves read back"] += 1
            if back.tobytes() != written:
                raise fault(program, i, "what was written to a leaf does not come back")


def _check_results(
    program: Program,
    tensors: Sequence[Any],
    wanted: Sequence[Any],
    moved: Sequence[Any],
    read: Sequence[int],
    counts: Counter[str],
) -> None:
    for i in read:
        t, x, y = tensors[i], wanted[i], moved[i]
        if t is None or x is None or y is None or x.size == 0:
            continue
        found = np.zeros(list(t.ne)[::-1], reference.DTYPES[int(t.type)])
        capi.ggml_backend_tensor_get(t, found.view(np.uint8).reshape(-1), 0)
        if t.type == capi.GGML_TYPE_BF16:
            found = (found.astype("<u4") << 16).view("<f4")
        with np.errstate(all="ignore"):
            finite = np.isfinite(x) & np.isfinite(y)
            scale = np.abs(x[finite]).max(initial=0)
            change = np.abs(x - y)
            rough = reference.ROUNDING.get(int(t.type), 0) * 10
            if int(t.type) != I32 and not (change[finite] <= 1e-2 * scale + 1e-6).all():
                counts["ill-conditioned, not compared"] += 1
                continue
            bound = rough * (scale + 1e-3) + 100 * change
            wrong = finite & ~(np.abs(found - x) <= bound)
        counts["compared with one device"] += 1
        if wrong.any():
            at = tuple(int(n[0]) for n in np.nonzero(wrong))
            raise fault(
                program,
                i,
                f"{int(wrong.sum())} of {wrong.size} numbers; at {at} {found[at]!r}"
                f" instead of {x[at]!r}",
            )


__all__ = ["Fault", "run"]
