"""Plans: how a meta device will split a graph, what it will add up, and what memory that takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import capi
from .._copies import copy, graph_of, put_in
from .._handles import address, addresses
from ..capi import types
from ..enums import ggml_type
from ..errors import SplitError
from ._create import split_function
from ._layout import unpermuted
from ._nodes import nodes_of
from ._planner import Mended, Refusal, beside, label, mended, not_computed
from ._rules import Kind, State
from ._split import SplitState

if TYPE_CHECKING:
    from ..graph import Graph
    from .device import MetaDevice

#: What is wrong with writing into a static tensor where all devices compute in this process.
IN_PLACE = (
    "it writes into a tensor of a meta device whose devices all are host memory, which ggml gets "
    "wrong: use rpc.LocalWorkers, or another device among them; or read a cache together with its "
    "new rows by CONCAT, and write those between the runs"
)


class Planned(NamedTuple):
    """A tensor of a graph on a meta device.

    ``shapes`` and ``nbytes`` are those of each device's part, shapes in NumPy's order. What is
    MIRRORED is whole on each; of what is PARTIAL each has an addend of the full shape.
    """

    name: str
    op: str
    """The operation, as ggml names it; "NONE" for weights and inputs."""
    type: ggml_type
    split: SplitState
    shapes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    is_static: bool
    """Whether it has memory of its own, as weights and caches do."""
    is_copy: bool = False
    """Whether it is put in: a copy of the tensor before it, which is used in that one's place."""
    label: str = ""
    """The name; without one what it is made of, as in ``MUL_MAT of 'w', 'x'``."""


@dataclass(frozen=True)
class AllReduce:
    """A sum of the addends that the devices have of a partial result."""

    tensor: str
    """The `label` of the partial result."""
    after: str
    """The label of the operation after which ggml does it: `tensor` itself, or a later one."""
    nbytes: int
    """Of the tensor, in F32."""
    n_copies: int
    """How many times that is copied from one device to another by ggml's own routine."""

    @property
    def moved(self) -> int:
        """Bytes copied from device to device."""
        return self.nbytes * self.n_copies


@dataclass(frozen=True)
class Plan:
    """What a meta device makes of a graph.

    Weights have their memory by then; what has none is an input, which is mirrored.
    """

    devices: tuple[str, ...]
    """The names of the devices; one may stand there several times."""
    tensors: tuple[Planned, ...]
    """In order of computation."""
    all_reduces: tuple[AllReduce, ...]
    weights: tuple[int, ...]
    """Bytes of the graph's weights and caches on each device."""
    compute: int
    """Bytes for inputs and results on every device: ggml takes as much as one alone would need."""
    free: tuple[int, ...]
    """Bytes that were free on each device when the plan was made; 0 where it does not say."""
    error: str = ""
    """What the split function raised, which has mirrored all tensors since: `MetaDevice.error`."""

    @property
    def needed(self) -> tuple[int, ...]:
        """Bytes of weights and compute memory on each device."""
        return tuple(n + self.compute for n in self.weights)

    @property
    def fits(self) -> bool:
        """Whether the compute memory is free on every device, as often as that stands there."""
        times = Counter(self.devices)
        return all(
            not free or self.compute * times[name] <= free
            for name, free in zip(self.devices, self.free, strict=True)
        )

    @property
    def moved(self) -> int:
        """Bytes that a run copies from device to device in all-reduces, in all."""
        return sum(one.moved for one in self.all_reduces)

    def __getitem__(self, name: str) -> Planned:
        """The tensor of this name. Raises KeyError where there is none, or are several."""
        found = [one for one in self.tensors if one.name == name and not one.is_copy]
        if len(found) != 1:
            raise KeyError(f"{len(found)} tensors have the name {name!r}")
        return found[0]

    def __str__(self) -> str:
        """A line for each tensor, each all-reduce and each device."""
        lines = []
        for one in self.tensors:
            parts = one.shapes if one.split.is_split else one.shapes[:1]
            shapes = " ".join(f"({', '.join(map(str, shape))})" for shape in parts)
            told = beside(one.op, one.name, one.label)
            lines.append(f"{one.op:<14} {told:<28} {one.split!s:<28} {shapes}".rstrip())
        for sum_ in self.all_reduces:
            lines.append(f"all-reduce of {sum_.tensor}: {sum_.moved:,} bytes moved")
        for name, weights, free in zip(self.devices, self.weights, self.free, strict=True):
            room = f"{free:,}" if free else "unknown"
            lines.append(
                f"{name}: weights {weights:,}, compute {self.compute:,}, free {room} bytes"
            )
        if self.error:
            lines.append(f"the split function has failed, all since is mirrored: {self.error}")
        return "\n".join(lines)


def plan(device: MetaDevice, graph: Graph, mend: bool = True) -> Plan:
    """How the device splits the graph; what `MetaDevice.plan` does."""
    from ..graph import Graph

    if not isinstance(graph, Graph):
        raise TypeError(f"graph is {graph!r} ({type(graph).__name__}), expected a Graph")
    with graph._open():
        order = graph._order()
        numbers = {one: i for i, one in enumerate(addresses(order))}
        found = make(device, order, [numbers[address(one.handle)] for one in graph.outputs], mend)
        compute = _compute_memory(device, order, found)
        return _told(device, found, compute)


def _told(device: MetaDevice, found: Mended, compute: int) -> Plan:
    splits, n = found.splits, len(device.devices)
    nodes = splits.nodes
    alike: dict[int, _Alike] = {}
    tensors = []
    for i, (node, state, number) in enumerate(
        zip(nodes, splits.states, splits.classes, strict=True)
    ):
        if number not in alike:
            alike[number] = _alike(node.kind, state, n)
        static, copied = i in splits.given, i in found.barriers
        tensors.append(Planned(node.name, *alike[number], static, copied, label(nodes, i)))
    copies = copies_of_sum(n)
    sums = tuple(
        AllReduce(label(nodes, i), label(nodes, last), 4 * math.prod(nodes[i].ne), copies)
        for i, last in found.reduces.items()
    )
    weights = [sum(one.nbytes[j] for one in tensors if one.is_static) for j in range(n)]
    free = tuple(child.memory.free for child in device.devices)
    names = tuple(child.name for child in device.devices)
    error = "" if device.error is None else f"{type(device.error).__name__}: {device.error}"
    return Plan(names, tuple(tensors), sums, tuple(weights), compute, free, error)


_Alike: TypeAlias = tuple[str, ggml_type, SplitState, tuple[tuple[int, ...], ...], tuple[int, ...]]
"""What tensors of a kind that are split alike have in common: `op` to `nbytes` of a Planned."""


def _alike(kind: Kind, state: State | None, n_devs: int) -> _Alike:
    split = SplitState.mirrored() if state is None else state.told
    parts = [list(kind.ne) for _ in range(n_devs)]
    if split.is_split:
        for part, share in zip(parts, split.shares, strict=True):
            part[split.axis] = share
    shapes = tuple(map(kind.shape, parts))
    nbytes = tuple(math.prod(ne) // kind.block_size * kind.type_size for ne in parts)
    return kind.op, ggml_type(kind.type), split, shapes, nbytes


def _compute_memory(device: MetaDevice, order: Sequence[types.ggml_tensor], found: Mended) -> int:
    """The bytes that ggml's allocator takes on each device."""
    context, copies = copy(order, 2 * len(found.barriers))
    allocator = capi.ggml_gallocr_new(capi.ggml_backend_dev_buffer_type(device.handle))
    try:
        tensors = put_in(context, copies, found.places, found.barriers)
        apart = bool(not_computed(found))
        for i, (node, one) in enumerate(zip(found.splits.nodes, tensors, strict=True)):
            if node.kind.op == "NONE" and not one.buffer:
                capi.ggml_set_input(one)
            if apart or i in found.outputs:
                capi.ggml_set_output(one)
        return sum(capi.ggml_gallocr_reserve_n_size(allocator, graph_of(context, tensors)))
    finally:
        capi.ggml_gallocr_free(allocator)
        capi.ggml_free(context)


def make(
    device: MetaDevice, order: Sequence[types.ggml_tensor], outputs: Sequence[int], mend: bool
) -> Mended:
    """How a graph is split on a meta device. Raises SplitError where it cannot be."""
    nodes, given = nodes_of(order), _given(device, order)
    host = all(
        capi.ggml_backend_buft_is_host(capi.ggml_backend_dev_buffer_type(child.handle))
        for child in device.devices
    )
    try:
        return mended(nodes, given, len(device.devices), outputs, mend, IN_PLACE if host else "")
    except Refusal as why:
        # what a closed latch has mirrored may be what does not fit
        raise SplitError(f"{device.name} cannot split the graph: {why.reason}") from device.error


def _given(device: MetaDevice, order: Sequence[types.ggml_tensor]) -> dict[int, SplitState]:
    """The splits of the tensors that have memory on the device, by their numbers."""
    handle, mirrored = device.handle, SplitState.mirrored()
    function = split_function(handle)
    places: list[int] = []
    buffers: set[int] = set()  # that are the device's
    for i, tensor in enumerate(order):
        buffer = tensor.buffer
        if not buffer or tensor.view_src:
            continue
        if address(buffer) not in buffers:
            kind = capi.ggml_backend_buffer_get_type(buffer)
            if capi.ggml_backend_buft_get_device(kind) != handle:
                name, place = capi.ggml_get_name(tensor), capi.ggml_backend_buffer_name(buffer)
                raise SplitError(f"{name!r} has its memory on {place}, not on {device.name}")
            buffers.add(address(buffer))
        places.append(i)
    states = function.all_frozen(addresses([order[i] for i in places]))
    return {i: state or mirrored for i, state in zip(places, states, strict=True)}


def copies_of_sum(n_devices: int) -> int:
    """How many copies of a whole tensor an all-reduce makes between devices, by ggml's routine.

    It is a butterfly over the largest power of two; what is left over goes before and after.
    """
    m = 1 << (n_devices.bit_length() - 1)
    return 2 * (n_devices - m) + m * (m.bit_length() - 1)


def reading_order(found: Mended, i: int, ndim: int) -> tuple[int, npt.NDArray[np.int64]] | None:
    """The axis in NumPy's order, and where in what ggml reads each of its elements stands.

    None where each stands in its place.
    """
    state = found.splits.states[i]
    if state is None or state.held is None:
        return None
    order = unpermuted(state.told, state.held)
    return None if order is None else (ndim - 1 - state.axis, order)
