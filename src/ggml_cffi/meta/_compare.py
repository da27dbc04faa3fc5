"""A graph on a meta device against the same on one device, result by result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    from ..graph import Graph
    from ..tensor import Tensor
    from .device import MetaDevice

#: How far results of a type may be apart, relative to the largest number of either: devices add up
#: in another order, which costs some roundings of the type that the sums are kept in.
TOLERANCES = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}
_QUANTIZED = 1e-1


@dataclass(frozen=True)
class Difference:
    """How far the two results of an operation are apart.

    ``relative`` is the largest difference by the largest number of the reference; both are NaN
    where one has NaN, or an infinity, that the other has not.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    tolerance: float
    label: str = ""
    """The name; without one what it is made of, as in ``MUL_MAT of 'w', 'x'``."""

    @property
    def agrees(self) -> bool:
        """Whether it is within the tolerance of the type; it is not where one alone is NaN."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        words = "" if self.agrees else "  differs"
        told = beside(self.op, self.name, self.label)
        return f"{self.op:<14} {told:<28} {self.absolute:.3g} ({self.relative:.3g}){words}"


@dataclass(frozen=True)
class Comparison:
    """The differences of all results that are no views, in order of computation."""

    nodes: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first result that differs by more than its type's tolerance."""
        return next((one for one in self.nodes if not one.agrees), None)

    @property
    def agrees(self) -> bool:
        """Whether no result differs by more than its type's tolerance."""
        return self.first is None

    def __str__(self) -> str:
        """A line for each result: the largest difference, absolute and relative."""
        return "\n".join(map(str, self.nodes))


def compare(
    graph: Graph,
    meta: MetaDevice,
    reference: Device | str = "CPU",
    inputs: Mapping[str, npt.ArrayLike] | None = None,
    seed: int = 0,
    progress: Progress = None,
) -> Comparison:
    """Compute a graph on a meta device and on one device, and compare all results.

    The weights are read from the meta device. `inputs` are as in a run of the compiled graph; what
    is missing is random by `seed`: normal floats, and integers that are good indices and
    positions. It takes the memory of all results on each device at once.

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
    if not isinstance(graph, Graph):
        raise TypeError(f"graph is {graph!r} ({type(graph).__name__}), expected a Graph")
    if not isinstance(meta, MetaDevice):
        raise TypeError(f"meta is {meta!r} ({type(meta).__name__}), expected a MetaDevice")
    with graph._open(), Context() as context:
        tensors = graph.tensors
        order = [tensor.handle for tensor in tensors]
        chosen = [i for i, tensor in enumerate(order) if _is_result(tensor)]
        given = dict(inputs or {})
        if strange := given.keys() - {tensor.name for tensor in graph.inputs}:
            raise TypeError(f"unknown inputs: {', '.join(map(repr, sorted(strange)))}")
        for tensor in graph.inputs:
            if tensor.name not in given:
                given[tensor.name] = _random(tensor, order, np.random.default_rng(seed))
        if not chosen:
            return Comparison(())
        everything = Graph({str(i): tensors[i] for i in chosen})
        with everything.compile(meta) as compiled:
            split = compiled.run(**_of(compiled.inputs, given))
        again, copies = _on(one, meta, order, context, progress)
        for old, new in zip(tensors, copies, strict=True):
            constant = graph._constant(old)
            if constant is not None:
                context._pending[address(new)] = constant
        try:
            homes = {str(i): _at_home(copies[i], context) for i in chosen}
            with Graph(homes).compile(one) as compiled:
                whole = compiled.run(**_of(compiled.inputs, given))
        finally:
            capi.ggml_free(again)
        nodes = nodes_of(order)
        return Comparison(
            tuple(
                _difference(order[i], split[str(i)], whole[str(i)], label(nodes, i)) for i in chosen
            )
        )


def _of(names: Iterable[str], given: Mapping[str, npt.ArrayLike]) -> dict[str, npt.ArrayLike]:
    """What no result needs is no input of all of them."""
    return {name: value for name, value in given.items() if name in set(names)}


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
    progress: Progress,
) -> tuple[types.ggml_context, list[types.ggml_tensor]]:
    """Copies of tensors of a meta device, on another; the context of the copies is to free."""
    weights: dict[int, Any] = {}
    for one in order:
        if one.buffer and not one.view_src:
            made = context.tensor(tuple(reversed(list(one.ne))), ggml_type(one.type))
            weights[address(one)] = made.handle
    context.allocate(device)
    read = [one for one in order if address(one) in weights and not capi.ggml_is_empty(one)]
    total, done = sum(map(capi.ggml_nbytes, read)), 0
    with telling(total, progress) as tell:
        for one in read:
            data = np.empty(capi.ggml_nbytes(one), np.uint8)
            if split_function(meta.handle).frozen(address(one)) == SplitState.partial():
                name = capi.ggml_get_name(one)
                raise SplitError(f"{name!r} is PARTIAL: ggml cannot read it back, to compare")
            capi.ggml_backend_tensor_get(one, data, 0)
            capi.ggml_backend_tensor_set(weights[address(one)], data, 0)
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
    return again, copies


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
    told: str = "",
) -> Difference:
    name, kind = capi.ggml_get_name(tensor), ggml_type(tensor.type)
    short = kind.name.removeprefix("GGML_TYPE_").lower()
    exact = split.dtype.kind in "iu"
    a, b = split.astype(np.float64), whole.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        apart = np.where(np.isfinite(apart), apart, np.nan)
    finite = np.abs(b[np.isfinite(b)])
    largest = float(finite.max(initial=0.0))
    absolute = float(apart.max(initial=0.0))
    relative = absolute / largest if largest else (0.0 if absolute == 0 else np.nan)
    tolerance = 0.0 if exact else TOLERANCES.get(short, _QUANTIZED)
    op = op_name(tensor)
    return Difference(name, op, split.shape, absolute, float(relative), tolerance, told)
