"""A graph on a meta device against the same on one device, result by result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import capi
from .._copies import copy
from .._handles import address
from .._loader import ffi
from .._progress import Progress, telling
from ..capi import types
from ..device import Device
from ..device import device as find_device
from ..enums import ggml_type
from ..errors import SplitError
from ._create import split_function
from ._nodes import nodes_of, op_name
from ._planner import beside, label
from ._rules import VIEWS
from ._split import SplitState

if TYPE_CHECKING:
    from ..context import Context
    from ..graph import Compiled, Graph
    from ..tensor import Tensor
    from .device import MetaDevice

#: How far results of a type may be apart, relative to the largest number of the reference's:
#: devices add up in another order, which costs some roundings of the type that sums are kept in.
TOLERANCES = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}
_QUANTIZED = 1e-1


@dataclass(frozen=True)
class Difference:
    """How far the two results of an operation are apart.

    ``relative`` is the largest difference by the largest number of the reference (infinite where
    that has zeros alone); both are NaN where one has NaN, or an infinity, that the other has not.
    Roundings add up from one result to the next, and more so where activations are rounded to a
    type of few bits, as products with quantised weights do: ``own`` is what `relative` is if the
    reference computes this one result from the operands that the meta device has.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    own: float
    tolerance: float
    label: str = ""
    """The name; without one what it is made of, as in ``MUL_MAT of 'w', 'x'``."""

    @property
    def agrees(self) -> bool:
        """Whether `own` is within the tolerance of the type; it is not where one alone is NaN."""
        return self.own <= self.tolerance

    def __str__(self) -> str:
        words = "" if self.agrees else f"  differs by {self.own:.3g} of its own"
        told = beside(self.op, self.name, self.label)
        return f"{self.op:<14} {told:<28} {self.absolute:.3g} ({self.relative:.3g}){words}"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences of all results that are no views, in order of computation."""

    nodes: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first result that differs, of its own, by more than its type's tolerance."""
        return next((one for one in self.nodes if not one.agrees), None)

    @property
    def agrees(self) -> bool:
        """Whether no result differs, of its own, by more than its type's tolerance."""
        return self.first is None

    def __str__(self) -> str:
        """A line for each result: the largest difference, absolute and relative; and a verdict."""
        return "\n".join([*map(str, self.nodes), self._verdict()])

    def __repr__(self) -> str:
        return f"<Comparison: {self._verdict()}>"

    def _verdict(self) -> str:
        n = len(self.nodes)
        if self.first is None:
            return {0: "no results", 1: "1 result, which agrees"}.get(
                n, f"{n} results, which all agree"
            )
        strange = sum(not one.agrees for one in self.nodes)
        told = beside(self.first.op, self.first.name, self.first.label)
        return f"{strange} of {n} results differ, the first is {self.first.op} {told}"


def compare(
    graph: Graph,
    meta: MetaDevice,
    reference: Device | str = "CPU",
    inputs: Mapping[str, npt.ArrayLike] | None = None,
    seed: int = 0,
    progress: Progress = None,
) -> Comparison:
    """Compute a graph on a meta device and on one device, and compare all results.

    The weights are read from the meta device; what the graph writes into them is taken back there.
    `inputs` are as in a run of the compiled graph; what is missing is random by `seed`: normal
    floats, and integers that are good indices and positions. It takes the memory of all results on
    each device at once. The reference computes the graph as a whole, and then each result once more
    from the operands that the meta device has: an operation of a Python function is called three
    times.

    `progress(done, total)` is called in bytes of the weights that have been read. Without it a bar
    on stderr shows that with tqdm if it is installed, stderr is a terminal and it takes over a
    second; False: never, True: also where it is no terminal.

    Raises SplitError for what the meta device cannot split or read back, MemoryError where a device
    has too little memory, and what running a compiled graph raises.
    """
    from ..context import Context
    from ..graph import Graph
    from .device import MetaDevice

    one = find_device(reference) if isinstance(reference, str) else reference
    if not isinstance(one, Device):
        raise TypeError(f"reference is {reference!r}, expected a Device or a name")
    if isinstance(one, MetaDevice):
        raise ValueError(f"reference is {reference!r}, expected a single device")
    if not isinstance(graph, Graph):
        raise TypeError(f"graph is {graph!r} ({type(graph).__name__}), expected a Graph")
    if not isinstance(meta, MetaDevice):
        raise TypeError(f"meta is {meta!r} ({type(meta).__name__}), expected a MetaDevice")
    with graph._open(), Context() as context:
        tensors = graph.tensors
        order = [tensor.handle for tensor in tensors]
        chosen = [i for i, tensor in enumerate(order) if _is_result(tensor)]
        everything = _given(graph, order, inputs or {}, np.random.default_rng(seed))
        if not chosen:
            return Comparison(())
        written = {address(order[i].view_src) for i in chosen if order[i].view_src}
        again, copies, before = _on(one, meta, order, context, written, progress)

        def begin(of: Sequence[types.ggml_tensor]) -> None:
            for i, data in before.items():
                capi.ggml_backend_tensor_set(of[i], data, 0)

        try:
            try:
                with Graph({str(i): tensors[i] for i in chosen}).compile(meta) as compiled:
                    given = {name: everything[name] for name in compiled.inputs}
                    split = compiled.run(**given)
            finally:
                begin(order)
            for old, new in zip(tensors, copies, strict=True):
                constant = graph._constant(old)
                if constant is not None:
                    context._pending[address(new)] = constant
            on_one = Graph({str(i): _at_home(copies[i], context) for i in chosen})
            with on_one.compile(one, keep=given) as compiled:
                whole = compiled.run(**given)
                begin(copies)
                compiled._write(given)
                own = compiled._memory.turn.take(lambda: _one_by_one(compiled, split, whole))
        finally:
            capi.ggml_free(again)
        runs = [(split[name], whole[name], own[name]) for name in map(str, chosen)]
        nodes = nodes_of(order)
        return Comparison(
            tuple(
                _difference(order[i], *run, label(nodes, i))
                for i, run in zip(chosen, runs, strict=True)
            )
        )


def _given(
    graph: Graph,
    order: Sequence[types.ggml_tensor],
    inputs: Mapping[str, npt.ArrayLike],
    rng: np.random.Generator,
) -> dict[str, npt.ArrayLike]:
    """Numbers for all inputs: what is given, and random ones."""
    if strange := inputs.keys() - {tensor.name for tensor in graph.inputs}:
        raise TypeError(f"unknown inputs: {', '.join(map(repr, sorted(strange)))}")
    found = dict(inputs)
    for tensor in graph.inputs:
        if tensor.name not in found:
            found[tensor.name] = _random(tensor, order, rng)
    return found


def _one_by_one(
    compiled: Compiled,
    split: Mapping[str, npt.NDArray[Any]],
    whole: Mapping[str, npt.NDArray[Any]],
) -> dict[str, npt.NDArray[Any]]:
    """All results of a compiled graph, each from operands as `split` has them.

    What is written into a result cannot be taken out of it again once it has been read: such a one
    is as in `whole`, where it was read at the same time.
    """
    from ..graph import OnBackend

    memory = compiled._memory
    assert isinstance(memory, OnBackend)
    results = compiled._outputs
    over = {address(one.handle.view_src) for one in results.values() if one.handle.view_src}
    found = {}
    spare = capi.ggml_init(mem_size=capi.ggml_graph_overhead_custom(1, False), no_alloc=True)
    try:
        graph = capi.ggml_new_graph_custom(spare, 1, False)
        for name, tensor in results.items():
            capi.ggml_graph_clear(graph)
            capi.ggml_graph_add_node(graph, tensor.handle)
            capi.ggml_backend_graph_compute(memory.backend.handle, graph)
            if address(tensor.handle) in over:
                found[name] = whole[name]
            else:
                found[name] = np.array(tensor.numpy())
                tensor.set(split[name])
    finally:
        capi.ggml_free(spare)
    return found


def _is_result(tensor: types.ggml_tensor) -> bool:
    op = op_name(tensor)
    return op != "NONE" and op not in VIEWS and not capi.ggml_is_empty(tensor)


def _at_home(handle: types.ggml_tensor, context: Context) -> Tensor:
    from ..tensor import Tensor

    return Tensor(handle, context)


def _on(
    device: Device,
    meta: MetaDevice,
    order: Sequence[types.ggml_tensor],
    context: Context,
    written: Set[int],
    progress: Progress,
) -> tuple[types.ggml_context, list[types.ggml_tensor], dict[int, npt.NDArray[np.uint8]]]:
    """Copies of tensors of a meta device, on another; the context of the copies is to free.

    And the bytes of those weights that are `written` into, by their numbers.
    """
    from ..tensor import outer_first

    weights: dict[int, Any] = {}
    before: dict[int, npt.NDArray[np.uint8]] = {}
    for one in order:
        if one.buffer and not one.view_src:
            made = context.tensor(outer_first(one.ne, len(one.ne)), ggml_type(one.type))
            weights[address(one)] = made.handle
    context.allocate(device)
    read = {
        i: one
        for i, one in enumerate(order)
        if address(one) in weights and not capi.ggml_is_empty(one)
    }
    total, done = sum(map(capi.ggml_nbytes, read.values())), 0
    with telling(total, progress) as tell:
        for i, one in read.items():
            data = np.empty(capi.ggml_nbytes(one), np.uint8)
            if split_function(meta.handle).frozen(address(one)) == SplitState.partial():
                name = capi.ggml_get_name(one)
                raise SplitError(f"{name!r} is PARTIAL: ggml cannot read it back, to compare")
            capi.ggml_backend_tensor_get(one, data, 0)
            capi.ggml_backend_tensor_set(weights[address(one)], data, 0)
            if address(one) in written:
                before[i] = data
            done += data.size
            tell(done, total)
    again, copies = copy(order)
    for i, new in enumerate(copies):
        if address(new) in weights:
            copies[i] = weights[address(new)]
            continue
        for k, operand in enumerate(new.src):
            if operand and address(operand) in weights:
                new.src[k] = weights[address(operand)]
        if new.view_src and address(new.view_src) in weights:
            new.view_src = weights[address(new.view_src)]
            new.data = ffi.cast("char *", new.view_src.data) + new.view_offs
    return again, copies, before


def _random(
    tensor: Tensor, order: Sequence[types.ggml_tensor], rng: np.random.Generator
) -> npt.NDArray[Any]:
    """Numbers for an input: normal, or, for integers, by what they are used for."""
    if tensor.dtype.kind not in "iu":
        return rng.standard_normal(tensor.shape).astype(np.float32)
    count = np.arange(tensor.size).reshape(tensor.shape)
    same = {tensor._address}  # it, its views and copies
    limits = []  # of all that it is an index into
    position = False
    for user in order:
        places = [k for k, one in enumerate(user.src) if one and address(one) in same]
        if not places:
            continue
        op = op_name(user)
        if op in VIEWS or op in ("CONT", "DUP", "CPY"):
            same.add(address(user))
        elif op == "ROPE":
            position = True
        elif op in ("GET_ROWS", "GET_ROWS_BACK") and 1 in places:
            limits.append((user.src[0] if op == "GET_ROWS" else user).ne[1])
        elif op == "SET_ROWS" and 1 in places:
            limits.append(user.src[2].ne[1])
        elif op == "MUL_MAT_ID" and 2 in places:
            limits.append(user.src[0].ne[2])
        elif op == "ADD_ID" and 2 in places:
            limits.append(user.src[1].ne[1])
    limit = min(limits) if limits else tensor.size if position else 1
    return (count % max(limit, 1)).astype(tensor.dtype)


def _difference(
    tensor: types.ggml_tensor,
    split: npt.NDArray[Any],
    whole: npt.NDArray[Any],
    own: npt.NDArray[Any],
    told: str = "",
) -> Difference:
    name, kind = capi.ggml_get_name(tensor), ggml_type(tensor.type)
    short = kind.name.removeprefix("GGML_TYPE_").lower()
    exact = split.dtype.kind in "iu"
    return Difference(
        name,
        op_name(tensor),
        split.shape,
        *_apart(split, whole),
        _apart(split, own)[1],
        0.0 if exact else TOLERANCES.get(short, _QUANTIZED),
        told,
    )


def _apart(split: npt.NDArray[Any], reference: npt.NDArray[Any]) -> tuple[float, float]:
    """The largest difference, and what it is by the largest number of the reference."""
    a, b = split.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    if not np.isfinite(apart).all():
        return np.nan, np.nan
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    absolute = float(apart.max(initial=0.0))
    return absolute, float(absolute / largest) if largest else (np.inf if absolute else 0.0)
