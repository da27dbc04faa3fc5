"""ggml's scheduler: a graph over several backends, each operation on the one that suits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import capi
from ._copies import copied
from ._handles import Owned, address, holding
from ._memory import raises_memory_error
from .backend import Backend, Turn, name_or_closed
from .capi import types
from .device import Device, device
from .enums import ggml_backend_dev_type
from .meta.device import MetaDevice

if TYPE_CHECKING:
    from .graph import Compiled, Graph
    from .tensor import Tensor

__all__ = ["Scheduler"]


class Scheduler(Owned[object]):
    """Several backends that compute a graph together; the last one is a CPU's.

    ggml computes an operation where its weights are, else on the first backend that can, and copies
    between them. Compile a graph on it: ``graph.compile(scheduler)``; each has memory of its own.
    `reserve` says how much, `assignment` which backend computes what, and a function that
    `set_eval_callback` is given sees all results.

    `buffer_types` are the kinds of memory (`Device.buffer_type`) for results on each backend, its
    own by default. Of backends with the same kind ggml takes the first for everything. `op_offload`
    lets it copy weights in the CPU's memory to a faster device for large products.

    Raises TypeError for what is no backend, ValueError for none, for one that is named twice, for a
    meta device's, which plans graphs as a whole, and where the last is no CPU's.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        buffer_types: Sequence[types.ggml_backend_buffer_type] | None = None,
        op_offload: bool = False,
    ) -> None:
        if isinstance(backends, Backend) or not isinstance(backends, Sequence):
            raise TypeError(f"backends is {backends!r}, expected a sequence of Backends")
        for one in backends:
            if not isinstance(one, Backend):
                raise TypeError(f"backends has {one!r} ({type(one).__name__}), expected a Backend")
            if isinstance(one.device, MetaDevice):
                raise ValueError(f"backends has {one!r}, a meta device's: that plans whole graphs")
        if not backends:
            raise ValueError("backends is empty")
        if len({id(one) for one in backends}) < len(backends):
            raise ValueError("backends has one twice")
        if backends[-1].device.type != ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU:
            raise ValueError(f"the last of the backends is {backends[-1]!r}, expected a CPU's")
        if buffer_types is not None and len(buffer_types) != len(backends):
            raise ValueError(
                f"buffer_types has {len(buffer_types)}, expected one for each of {len(backends)}"
            )
        super().__init__(None, lambda _: None, tuple(backends))  # ggml has one for each graph
        self._backends = tuple(backends)
        self._buffer_types = None if buffer_types is None else list(buffer_types)
        self._op_offload = op_offload
        self._eval_callback: Callable[[str, npt.NDArray[Any]], object] | None = None

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends, the preferred ones first."""
        return self._backends

    def reserve(
        self, graph: Graph, assign: Mapping[Tensor, Backend] | None = None
    ) -> dict[Backend, int]:
        """The bytes that a graph's inputs and results take on each backend; they can be had.

        Nothing is kept of it. `assign` is that of `Graph.compile`, and so is what this raises:
        MemoryError where a backend has too little memory.
        """
        with graph.compile(self, assign=assign) as compiled:
            memory = compiled._memory
            assert isinstance(memory, OnScheduler)
            with holding((compiled,)):
                return dict(zip(self._backends, memory.sizes(), strict=True))

    def assignment(self, compiled: Compiled) -> dict[str, list[str]]:
        """For each backend's name and number, what of the graph it computes, in order.

        A result without a name is called by its operation and its number in the graph. Raises
        ValueError for what is not compiled on this scheduler.
        """
        memory = self._memory_of(compiled)
        with holding((self, compiled)):
            places = memory.places(compiled._graph)
            found: dict[str, list[str]] = {name: [] for name in self._labels().values()}
            for label, node in _labelled(compiled._graph):
                if address(node) in places:
                    found[places[address(node)]].append(label)
            return found

    def _labels(self) -> dict[int, str]:
        """The backends' names and numbers, by address."""
        return {
            address(one.handle): f"{one.name} {number}" for number, one in enumerate(self._backends)
        }

    def set_eval_callback(self, callback: Callable[[str, npt.NDArray[Any]], object] | None) -> None:
        """See each result of the graphs compiled on this, in every run, as soon as it is computed.

        ``callback(name, array)`` has names as `assignment` does and arrays of its own. What it
        raises ends the run and comes out of it. It makes runs slower: each result is computed by
        itself. None: no callback any more.

        Raises TypeError for what is no function.
        """
        if callback is not None and not callable(callback):
            kind = type(callback).__name__
            raise TypeError(f"callback is {callback!r} ({kind}), expected a function or None")
        self.handle  # noqa: B018 # raises where it is closed
        self._eval_callback = callback

    def _memory_of(self, compiled: Compiled) -> OnScheduler:
        memory = compiled._memory
        if not isinstance(memory, OnScheduler) or memory.scheduler is not self:
            raise ValueError(f"{compiled!r} is not compiled on this Scheduler")
        compiled.handle  # noqa: B018 # raises where it is closed
        return memory

    def __repr__(self) -> str:
        names = "closed" if self.closed else ", ".join(map(name_or_closed, self._backends))
        return f"<Scheduler {names}>"


def _labelled(graph: types.ggml_cgraph) -> list[tuple[str, types.ggml_tensor]]:
    """The nodes of a graph, with a name for each."""
    found = []
    for number in range(capi.ggml_graph_n_nodes(graph)):
        node = capi.ggml_graph_node(graph, number)
        found.append((capi.ggml_get_name(node) or f"{capi.ggml_op_name(node.op)} {number}", node))
    return found


class OnScheduler:
    """Memory of a compiled graph on a scheduler of ggml's, which is for that graph alone.

    ggml puts copies of operands into the graph that it is given, so that no other can take turns.
    """

    def __init__(self, scheduler: Scheduler, size: int, assign: Mapping[Any, Backend]) -> None:
        for backend in assign.values():
            if backend not in scheduler.backends:
                raise ValueError(f"assign names {backend!r}, which is none of the Scheduler's")
        self.scheduler = scheduler
        self.turn: Turn = Turn(scheduler.backends)
        self.done: bool = False
        self.assign: dict[int, Backend] = {
            address(tensor): backend for tensor, backend in assign.items()
        }
        self.handle: types.ggml_backend_sched = capi.ggml_backend_sched_new(
            [one.handle for one in scheduler.backends],
            scheduler._buffer_types,
            2 * max(size, 16),
            False,
            scheduler._op_offload,
        )

    def allocate(self, compiled: Compiled) -> bool:
        if self.done:
            return False
        tensors = compiled._tensors
        # ggml aborts over memory that it cannot have but where it reserves it; and it changes the
        # graph that it reserves for, so that it gets one more copy of it
        with copied(tensors) as (again, graph):
            self._pin(zip(tensors, again, strict=True))
            with raises_memory_error():
                capi.ggml_backend_sched_reserve(self.handle, graph)
        self._pin((one, one) for one in tensors)
        capi.ggml_backend_sched_alloc_graph(self.handle, compiled._graph)
        self.done = True
        return True

    def _pin(self, tensors: Iterable[tuple[Any, Any]]) -> None:
        """Say where the second of each two is computed, as the user says it of the first."""
        for one, same in tensors if self.assign else ():
            backend = self.assign.get(address(one))
            if backend is not None:
                capi.ggml_backend_sched_set_tensor_backend(self.handle, same, backend.handle)

    def compute(self, compiled: Compiled) -> None:
        callback = self.scheduler._eval_callback
        if callback is None:
            capi.ggml_backend_sched_graph_compute(self.handle, compiled._graph)
            return
        from .tensor import Tensor

        labels = {address(node): label for label, node in _labelled(compiled._graph)}

        def told(node: types.ggml_tensor, ask: bool) -> bool:
            if ask:
                return address(node) in labels
            array = np.array(Tensor(node, compiled).numpy())  # type: ignore[arg-type]
            callback(labels[address(node)], array)
            return True

        capi.ggml_backend_sched_set_eval_callback(self.handle, told)
        try:
            capi.ggml_backend_sched_graph_compute(self.handle, compiled._graph)
        finally:
            capi.ggml_backend_sched_set_eval_callback(self.handle, None)

    def places(self, graph: types.ggml_cgraph) -> dict[int, str]:
        """The name and number of the backend that computes a result, by the result's address."""
        names = self.scheduler._labels()
        found = {}
        for _, node in _labelled(graph):
            backend = capi.ggml_backend_sched_get_tensor_backend(self.handle, node)
            if backend is not None:
                found[address(node)] = names[address(backend)]
        return found

    def sizes(self) -> list[int]:
        """The bytes on each backend."""
        return [
            capi.ggml_backend_sched_get_buffer_size(self.handle, one.handle)
            for one in self.scheduler.backends
        ]

    def nbytes(self) -> int:
        return sum(self.sizes())

    def free(self) -> None:
        capi.ggml_backend_sched_free(self.handle)


def as_target(
    target: Device | Backend | Scheduler | str, n_threads: int | None
) -> Device | Backend | Scheduler:
    """What a graph is to be computed on, a device by its name too.

    Raises TypeError for what is no target, ValueError for `n_threads` of what has its own.
    """
    found = device(target) if isinstance(target, str) else target
    if not isinstance(found, (Device, Backend, Scheduler)):
        raise TypeError(f"target is {found!r}, expected a Device, a Backend, a Scheduler or a name")
    if n_threads is not None and not isinstance(found, Device):
        raise ValueError(f"n_threads is the {type(found).__name__}'s to have")
    return found
