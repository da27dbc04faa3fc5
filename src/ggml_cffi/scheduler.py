"""ggml's scheduler: a graph over several backends, each operation on the one that suits it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import capi
from ._handles import Owned, address
from .backend import Backend
from .capi import types
from .enums import ggml_backend_dev_type

if TYPE_CHECKING:
    from .graph import Compiled, Graph

__all__ = ["Scheduler"]


class Scheduler(Owned[object]):
    """Several backends that compute a graph together; the last one is a CPU's.

    ggml computes an operation where its weights are, else on the first backend that can, and copies
    between them. Compile a graph on it: ``graph.compile(scheduler)``; each has memory of its own.

    `buffer_types` are the kinds of memory (`Device.buffer_type`) for results on each backend, its
    own by default. Of backends with the same kind ggml takes the first for everything. `op_offload`
    lets it copy weights in the CPU's memory to a faster device for large products.

    Raises TypeError for what is no backend, ValueError for none, for one that is named twice and
    where the last is no CPU's.
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
        self._lock = threading.RLock()

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends, the preferred ones first."""
        return self._backends

    def measure(self, graph: Graph) -> dict[Backend, int]:
        """The bytes that a graph's inputs and results would take on each backend.

        Raises as `Graph.compile` does.
        """
        with graph.compile(self) as compiled:
            memory = compiled._memory
            assert isinstance(memory, OnScheduler)
            return dict(zip(self._backends, memory.sizes(), strict=True))

    def assignment(self, compiled: Compiled) -> dict[str, list[str]]:
        """For each backend's name and number, what of the graph it computes, in order.

        A result without a name is called by its operation and its number in the graph. Raises
        ValueError for what is not compiled on this scheduler.
        """
        memory = self._memory_of(compiled)
        names = {
            address(one.handle): f"{one.name} {number}" for number, one in enumerate(self._backends)
        }
        found: dict[str, list[str]] = {name: [] for name in names.values()}
        for label, node in _labelled(compiled._graph):
            backend = capi.ggml_backend_sched_get_tensor_backend(memory.handle, node)
            if backend is not None:
                found[names[address(backend)]].append(label)
        return found

    def watch(
        self, compiled: Compiled, callback: Callable[[str, npt.NDArray[Any]], object], **inputs: Any
    ) -> dict[str, npt.NDArray[Any]]:
        """Run a graph and see each result as it is computed: ``callback(name, array)``.

        Names are those of `assignment`. The callback ends the run by returning False, and what it
        raises comes out. Gives the outputs, as `Compiled.run` does.
        """
        from .tensor import Tensor

        memory = self._memory_of(compiled)
        labels = {address(node): label for label, node in _labelled(compiled._graph)}

        def told(node: types.ggml_tensor, ask: bool) -> bool:
            if ask:
                return address(node) in labels
            array = np.array(Tensor(node, compiled).numpy())  # type: ignore[arg-type]
            return callback(labels[address(node)], array) is not False

        with memory.lock:
            capi.ggml_backend_sched_set_eval_callback(memory.handle, told)
            try:
                return compiled.run(**inputs)
            finally:
                capi.ggml_backend_sched_set_eval_callback(memory.handle, None)

    def _memory_of(self, compiled: Compiled) -> OnScheduler:
        memory = compiled._memory
        if not isinstance(memory, OnScheduler) or memory.scheduler is not self:
            raise ValueError(f"{compiled!r} is not compiled on this Scheduler")
        compiled.handle  # noqa: B018 # raises where it is closed
        return memory

    def __repr__(self) -> str:
        names = "closed" if self.closed else ", ".join(one.name for one in self._backends)
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
        self.lock: threading.RLock = scheduler._lock
        self.done: bool = False
        self.handle: types.ggml_backend_sched = capi.ggml_backend_sched_new(
            [one.handle for one in scheduler.backends],
            scheduler._buffer_types,
            2 * max(size, 16),
            False,
            scheduler._op_offload,
        )
        try:
            for tensor, backend in assign.items():
                capi.ggml_backend_sched_set_tensor_backend(self.handle, tensor, backend.handle)
        except BaseException:
            self.free()
            raise

    def allocate(self, graph: types.ggml_cgraph) -> bool:
        if self.done:
            return False
        capi.ggml_backend_sched_alloc_graph(self.handle, graph)
        self.done = True
        return True

    def compute(self, graph: types.ggml_cgraph) -> None:
        capi.ggml_backend_sched_graph_compute(self.handle, graph)

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
