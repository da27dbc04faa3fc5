"""Graphs: what is to be computed; and compiled, with memory on a device, to be run many times."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import _kept, capi
from ._building import FLOAT64
from ._copies import copy, filled, graph_of, put_in
from ._handles import Loans, Owned, address, holding, in_use, while_it_stays
from ._loader import ffi
from ._locks import with_or_without
from ._memory import raises_memory_error
from ._placement import check_uses
from ._runtime import helper
from ._splits import naming_the_node
from .backend import Backend, Turn, thread
from .capi import types
from .context import Context, homes_of, needed_first, reachable
from .device import Device
from .dtypes import as_array
from .enums import ggml_op
from .errors import AbortError, SplitError
from .meta import MetaDevice, _room
from .scheduler import OnScheduler, Scheduler, as_target
from .tensor import Tensor, check_numbers, check_readable, is_without_memory

__all__ = ["Compiled", "Graph"]


class Graph:
    """What is to be computed: the outputs, and all that they are made from.

    `outputs` is a tensor, a sequence of them, or a mapping from names to them. Inputs are the
    tensors without memory that are no results: a run needs their numbers, by their names. Numbers
    that `Context.from_numpy` took and that have no memory yet are written once, on compiling.

    Raises ValueError for no outputs, TypeError for what is no tensor.
    """

    def __init__(self, outputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        if isinstance(outputs, Tensor):
            named = {outputs.name: outputs}
        elif isinstance(outputs, Mapping):
            named = dict(outputs)
        else:
            named = {str(i): one for i, one in enumerate(outputs)}
        for one in named.values():
            if not isinstance(one, Tensor):
                raise TypeError(f"outputs has {one!r} ({type(one).__name__}), expected a Tensor")
        if not named:
            raise ValueError("outputs is empty: there is nothing to compute")
        self._named = named
        self._single = isinstance(outputs, Tensor)
        self._contexts = tuple({one.context: None for one in named.values()})

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors to compute."""
        return tuple(self._named.values())

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the outputs are made from, and they, each after its operands."""
        with self._open():
            order = self._order()
            homes = homes_of(self._contexts, order)
            return [
                Tensor(handle, home, home._ndims.get(address(handle)))
                for handle, home in zip(order, homes, strict=True)
            ]

    @property
    def nodes(self) -> list[Tensor]:
        """The results among `tensors`."""
        with self._open():
            return [t for t in self.tensors if t.op != ggml_op.GGML_OP_NONE]

    @property
    def n_nodes(self) -> int:
        """The number of `nodes`, without an object for each."""
        with self._open():
            n: int = helper("ggml_cffi_n_nodes", self._handles(), len(self._named))
            return n

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that a run needs numbers of."""
        with self._open():
            return [t for t in self.tensors if self._is_input(t) and self._constant(t) is None]

    def compile(
        self,
        target: Device | Backend | Scheduler | str,
        n_threads: int | None = None,
        keep: Iterable[str] = (),
        assign: Mapping[Tensor, Backend] | None = None,
        mend: bool = True,
    ) -> Compiled:
        """Give it memory on a device; the same graph may be compiled many times, on several.

        On a `Backend` it runs there, else on one of its own, with `n_threads` (all usable cores by
        default). Instead of that of a meta device, too, it has one of its own, with as many
        threads: ggml has such backends for one graph. `keep` names inputs that keep their numbers
        from one run to the next. `assign` says for results which of a scheduler's backends computes
        them. `mend` says whether copies are put in where a meta device would be wrong without
        (`MetaDevice.plan`).

        Raises SplitError, with the operation and the reason, for what a meta device cannot split
        rightly, ValueError where two inputs have the same name or one has none, MemoryError where
        the device has too little memory, and ValueError for an operation that it cannot compute,
        for a weight whose memory is another device's, and for weights in memory such as CPU_REPACK
        that are anything but the first operand of a product.
        """
        where = target.device if isinstance(target, Backend) else target
        try:
            return Compiled(self, target, n_threads, keep, assign, mend)
        except AbortError as error:
            if not isinstance(where, MetaDevice) or not _room.is_full(error):
                raise
        with self._open():
            order = self._order()
            weights = [t for t in order if t.buffer and not t.view_src]
            assert where._shared is not None
            where._shared.take(lambda: _room.make(where, weights))
            try:
                return Compiled(self, target, n_threads, keep, assign, mend)
            except AbortError as error:
                why = _room.lacking(order) if _room.is_full(error) else ""
                if not why:
                    raise
                raise SplitError(f"{where.name} cannot split the graph: {why}") from error

    def to_dot(self) -> str:
        """The graph in graphviz's language: a node for each tensor, an edge for each operand.

        Weights are boxes, with the split of those on a meta device; inputs are parallelograms,
        results ellipses, and outputs have a double line. In a notebook the graph is drawn by
        itself where graphviz's program ``dot`` is installed.
        """
        from ._drawing import to_dot

        with self._open():
            return to_dot(self.tensors, self.inputs, self._named)

    def _repr_svg_(self) -> str | None:
        from ._drawing import to_svg

        return to_svg(self.to_dot())

    def _open(self) -> contextlib.AbstractContextManager[None]:
        """While what it is made of stays, should another thread close the contexts."""
        return holding(self._contexts)

    def _order(self) -> list[types.ggml_tensor]:
        with self._open():
            outputs = self._handles()
            count = helper("ggml_cffi_order", outputs, len(self._named), ffi.NULL, 0)
            order = ffi.new("struct ggml_tensor *[]", count)
            helper("ggml_cffi_order", outputs, len(self._named), order, count)
            return list(order)

    def _handles(self) -> Any:
        return ffi.new("struct ggml_tensor *[]", [one.handle for one in self.outputs])

    @staticmethod
    def _is_input(tensor: Tensor) -> bool:
        none = ggml_op.GGML_OP_NONE
        return tensor.op == none and is_without_memory(tensor.handle) and not tensor.handle.view_src

    def _constant(self, tensor: Tensor) -> npt.NDArray[Any] | None:
        """The numbers that its context was given for it."""
        for context in reachable(self._contexts):
            if tensor._address in context._pending:
                return context._pending[tensor._address]
        return None

    def __repr__(self) -> str:
        return f"<Graph of {len(self._order())} tensors>"


def _while_still(contexts: Sequence[Context], function: Callable[[], None]) -> None:
    """Call it while nobody allocates these, nor describes tensors in them."""
    if not contexts:
        return function()
    with contexts[0]._lock:
        return _while_still(contexts[1:], function)


class _Memory(Protocol):
    """Where a compiled graph has its memory and is computed."""

    turn: Turn

    def allocate(self, compiled: Compiled) -> bool:
        """Give the graph memory, if it has none; whether it has been given some now."""
        ...

    def compute(self, compiled: Compiled) -> None: ...
    def nbytes(self) -> int: ...
    def free(self) -> None: ...


class OnBackend:
    """Memory of a graph allocator, for one graph and for good."""

    def __init__(self, backend: Backend, own: bool) -> None:
        self.backend = backend
        self.own = own
        self.turn: Turn = Turn([backend])
        kind = capi.ggml_backend_get_default_buffer_type(backend.handle)
        self.allocator: types.ggml_gallocr | None = capi.ggml_gallocr_new(kind)
        self.done: bool = False

    def allocate(self, compiled: Compiled) -> bool:
        if self.done:
            return False
        assert self.allocator is not None
        with raises_memory_error():
            capi.ggml_gallocr_alloc_graph(self.allocator, compiled._graph)
        reason = helper("ggml_cffi_why_not", self.backend.handle, compiled._graph)
        if reason != ffi.NULL:
            told = ffi.string(reason).decode("utf-8", "replace")
            told += f"; {FLOAT64}" if re.search(r"\bf64\[", told) else ""
            raise ValueError(f"{self.backend.name} cannot compute the graph: {told}")
        self.done = True
        return True

    def compute(self, compiled: Compiled) -> None:
        capi.ggml_backend_graph_compute(self.backend.handle, compiled._graph)

    def nbytes(self) -> int:
        assert self.allocator is not None
        return capi.ggml_gallocr_get_buffer_size(self.allocator, 0)

    def free(self) -> None:
        try:
            capi.ggml_gallocr_free(self.allocator)
        finally:
            if self.own:
                self.backend.close()


class _OnMeta(OnBackend):
    """The same on a meta device.

    What ggml knows of views of weights lies with the weights, and is lost when other graphs are
    allocated and computed: so it is told anew whenever another graph has had its turn.
    """

    def __init__(self, backend: Backend, device: MetaDevice) -> None:
        super().__init__(backend, own=True)
        self.device = device
        self.turns = 0  # the last one in which it was told

    def allocate(self, compiled: Compiled) -> bool:
        shared = self.device._shared
        assert shared is not None
        made = self._allocate(compiled, told=self.turns == shared.turns - 1)
        self.turns = shared.turns
        return made

    def _allocate(self, compiled: Compiled, told: bool) -> bool:
        if self.done:
            if compiled._views and not told:
                self._tell(compiled)
            return False
        try:
            return super().allocate(compiled)
        except AbortError as error:  # it says no word of what ggml cannot cut
            named = naming_the_node(error, compiled._tensors)
            if named is error:
                raise
            raise named from error.__cause__

    def _tell(self, compiled: Compiled) -> None:
        weights = {address(one) for one in compiled._weights}
        results = [t for t in compiled._tensors if t.buffer and address(t) not in weights]

        def tell() -> None:
            for one in results:
                capi.ggml_backend_buffer_init_tensor(one.buffer, one)

        try:
            tell()
        except AbortError as error:
            if not _room.is_full(error):
                raise
            _room.make(self.device, compiled._weights)
            tell()


class _Store:
    """What a compiled graph has of ggml."""

    def __init__(self) -> None:
        self.context: types.ggml_context | None = None
        self.memory: _Memory | None = None
        self.graph: types.ggml_cgraph | None = None

    def in_use(self) -> bool:
        return self.graph is not None and in_use(self.graph)

    def free(self) -> None:
        if self.in_use():
            raise ValueError("a computation that has not ended uses it")
        try:
            if self.memory is not None:
                self.memory.free()
        finally:
            if self.context is not None:
                capi.ggml_free(self.context)


class Compiled(Owned[_Store]):
    """A graph with memory on a device, made by `Graph.compile`.

    Call it with an array for each input, by name: it gives the output, or a tuple of them in the
    order of the graph's, as arrays of their own. ggml uses the memory of inputs and of results
    again within a run, so every run needs all inputs but those that were compiled to be kept.
    """

    def __init__(
        self,
        graph: Graph,
        target: Device | Backend | Scheduler | str,
        n_threads: int | None = None,
        keep: Iterable[str] = (),
        assign: Mapping[Tensor, Backend] | None = None,
        mend: bool = True,
    ) -> None:
        target = as_target(target, n_threads)
        if assign and not isinstance(target, Scheduler):
            raise ValueError("assign is for a Scheduler, which has several backends")
        store = _Store()
        needed: tuple[object, ...] = graph._contexts
        fresh = isinstance(target, Device)
        if isinstance(target, Backend):
            # ggml's meta backend is for one graph
            fresh = isinstance(target.device, MetaDevice)
        if not fresh:
            needed = (*needed, target)
        self._lock = threading.RLock()
        self._doing = "compiled"  # what it must stay open for
        self._single = graph._single
        self._kept = set(keep)
        self._written: set[str] = set()
        self._constants: list[tuple[Tensor, npt.NDArray[Any]]] = []
        self._inputs: dict[str, Tensor] = {}
        self._bare: set[str] = set()  # those made by Context.tensor, without memory
        # on a meta device: what is there already, whether any is viewed, what is zero before a run
        self._weights: list[types.ggml_tensor] = []
        self._views = False
        self._zeroed: list[types.ggml_tensor] = []
        self._orders: dict[str, Any] = {}  # of outputs that a meta device has in another order
        with self._lock:  # who closes what it needs finds it in use, from here on
            super().__init__(store, _Store.free, needed)
            self._lent = Loans(self._resource)
            try:
                self._build(store, graph, target, n_threads, assign or {}, mend)
            except BaseException:
                self._doing = ""
                self.close()
                raise
            self._doing = ""

    def _build(
        self,
        store: _Store,
        graph: Graph,
        target: Device | Backend | Scheduler,
        n_threads: int | None,
        assign: Mapping[Tensor, Backend],
        mend: bool,
    ) -> None:
        where = target.device if isinstance(target, Backend) else target
        # what another thread allocates has memory with its numbers by then, or has none
        contexts = needed_first(graph._contexts)
        _while_still(contexts, lambda: self._copy(store, graph, where, mend))
        if any(one._reordered for one in reachable(graph._contexts)):
            self._check_weights(target)
        if isinstance(target, Scheduler):
            store.memory = OnScheduler(target, len(self._tensors) + 2, self._pinned(assign))
        elif isinstance(target, Backend) and not isinstance(where, MetaDevice):
            store.memory = OnBackend(target, own=False)
        else:
            assert isinstance(where, Device)
            count = target._n_threads if isinstance(target, Backend) else n_threads
            backend = Backend(where, count)
            if isinstance(where, MetaDevice):
                store.memory = _OnMeta(backend, where)
            else:
                store.memory = OnBackend(backend, own=True)
        self._memory = store.memory
        self._memory.turn.take(self._allocate)

    def _copy(self, store: _Store, graph: Graph, where: Device | Scheduler, mend: bool) -> None:
        """The graph's tensors once more, but those with memory, in a context of its own."""
        order = graph._order()
        store.context, copies = copy(order, len(order) if isinstance(where, MetaDevice) else 0)
        self._copies = {address(old): new for old, new in zip(order, copies, strict=True)}
        for old in graph.tensors:
            if graph._is_input(old):
                self._add_input(old, graph._constant(old))
        for name in self._kept:
            if name not in self._inputs:
                raise ValueError(f"keep names {name!r}, which is no input; {self._expected()}")
            capi.ggml_set_output(self._inputs[name].handle)
        self._outputs = {name: self._copy_of(one) for name, one in graph._named.items()}
        self._check_constants(copies)
        if isinstance(where, MetaDevice):
            copies = self._split(where, order, store.context, copies, mend)
        for one in self._outputs.values():
            for handle in (one.handle, one.handle.view_src):
                if handle and is_without_memory(handle):
                    capi.ggml_set_output(handle)
        self._tensors = copies
        self._graph = store.graph = graph_of(store.context, filled(store.context, copies))

    def _split(
        self,
        device: MetaDevice,
        order: Sequence[types.ggml_tensor],
        context: types.ggml_context,
        copies: Sequence[types.ggml_tensor],
        mend: bool,
    ) -> list[types.ggml_tensor]:
        """The tensors with the copies among them that make them right on a meta device.

        Raises SplitError for what would not be right.
        """
        from .meta import _planner, plan

        numbers = {address(one): i for i, one in enumerate(copies)}
        outputs = [numbers[one._address] for one in self._outputs.values()]
        found = plan.make(device, order, outputs, mend)
        tensors = put_in(context, copies, found.places, found.barriers)
        for (name, one), i in zip(tuple(self._outputs.items()), found.outputs, strict=True):
            self._outputs[name] = self._home(tensors[i], one.ndim)
            self._orders[name] = plan.reading_order(found, i, one.ndim)
        self._weights = [one for one in order if one.buffer and not one.view_src]
        roots = {address(one.view_src) for one in tensors if one.view_src}
        self._views = any(address(one) in roots for one in self._weights)
        self._zeroed = [tensors[i] for i in _planner.not_computed(found)]
        for handle in tensors if self._zeroed else ():
            capi.ggml_set_output(handle)  # no other tensor uses its memory
        return tensors

    def _pinned(self, assign: Mapping[Tensor, Backend]) -> dict[types.ggml_tensor, Backend]:
        found = {}
        for tensor, backend in assign.items():
            if getattr(tensor, "_address", None) not in self._copies:
                raise ValueError(f"assign names {tensor!r}, which is no tensor of the graph")
            found[self._copies[tensor._address]] = backend
        return found

    def _check_weights(self, target: Device | Backend | Scheduler) -> None:
        """Raise ValueError for what cannot be made of weights in an order of their own."""
        backends = target.backends if isinstance(target, Scheduler) else [target]
        devices = [one.device if isinstance(one, Backend) else one for one in backends]
        count = capi.ggml_graph_n_nodes(self._graph)
        nodes = (capi.ggml_graph_node(self._graph, i) for i in range(count))
        check_uses([one.handle for one in devices], nodes)
        for one in self._outputs.values():
            check_readable(one)

    def _add_input(self, old: Tensor, numbers: npt.NDArray[Any] | None) -> None:
        new = self._copy_of(old)
        capi.ggml_set_input(new.handle)
        if numbers is not None:
            self._constants.append((new, numbers))
            capi.ggml_set_output(new.handle)
            return
        if not old.name:
            if not new.size:
                return
            raise ValueError(f"an input has no name: {old!r}")
        if old.name in self._inputs:
            raise ValueError(f"two inputs have the name {old.name!r}")
        self._inputs[old.name] = new
        if not old.context._has_input(old):
            self._bare.add(old.name)

    def _check_constants(self, copies: Sequence[types.ggml_tensor]) -> None:
        """Raise ValueError for what would be written into, and seen by no other graph."""
        constants = {address(one.handle): one for one, _ in self._constants}
        if not constants:
            return
        from .meta._nodes import op_name
        from .meta._rules import VIEWS

        for node in copies:
            written = constants.get(address(node.view_src)) if node.view_src else None
            if written is not None and op_name(node) not in VIEWS:
                raise ValueError(
                    f"{capi.ggml_op_desc(node)} writes into {written!r}, which has no memory yet "
                    "and is a constant of the graph: allocate its Context before"
                )

    def _copy_of(self, tensor: Tensor) -> Tensor:
        return self._home(self._copies[tensor._address], tensor.ndim)

    def _home(self, handle: types.ggml_tensor, ndim: int | None = None) -> Tensor:
        return Tensor(handle, self, ndim)  # type: ignore[arg-type] # as good a home

    def _allocate(self) -> None:
        if self._memory.allocate(self):
            self._written.clear()
            for one, numbers in self._constants:
                one.set(numbers)

    def _expected(self) -> str:
        return f"the inputs are {', '.join(map(repr, self._inputs)) or 'none'}"

    @while_it_stays
    def to_dot(self) -> str:
        """The graph as `Graph.to_dot` draws it, on a scheduler with a color for each backend."""
        from ._drawing import to_dot

        memory = self._memory
        places = memory.places(self._graph) if isinstance(memory, OnScheduler) else {}
        tensors = map(self._home, self._tensors)
        return to_dot(tensors, self._inputs.values(), self._outputs, places)

    def _repr_svg_(self) -> str | None:
        from ._drawing import to_svg

        return to_svg(self.to_dot())

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, by name."""
        return {name: one.shape for name, one in self._inputs.items()}

    @property
    @while_it_stays
    def nbytes(self) -> int:
        """The bytes of memory that it has on the device, or devices, for inputs and results."""
        return self._memory.nbytes()

    def run(self, /, **inputs: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Compute, and give all outputs by name: those of the graph's mapping, else their numbers.

        Raises as calling it does.
        """
        self.handle  # noqa: B018 # raises where it is closed
        if thread.kernels:  # on another thread, maybe, than the one that runs it
            self._check_idle()
        return self._memory.turn.take(lambda: self._run(inputs))

    def _run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
        with self._lock:
            self.handle  # noqa: B018 # nobody has closed it meanwhile
            self._check_idle()  # before the inputs of that are written over
            since = _kept.newest()
            self._doing = "run"
            try:
                self._allocate()
                self._write(inputs)
                for one in self._zeroed:
                    capi.ggml_backend_tensor_set(one, bytes(capi.ggml_nbytes(one)), 0)
                self._memory.compute(self)
            except BaseException:
                _kept.lend(self._lent, since)
                raise
            finally:
                self._doing = ""
            return {name: self._read(name, one) for name, one in self._outputs.items()}

    def _read(self, name: str, tensor: Tensor) -> npt.NDArray[Any]:
        order = self._orders.get(name)
        found: npt.NDArray[Any] = np.array(tensor.numpy())
        return found if order is None else found.take(order[1], axis=order[0])

    def _check_idle(self) -> None:
        if self._doing:
            raise ValueError(f"{self!r} is being {self._doing}: not once more within that")

    def _close(self) -> None:
        # to wait would be for ever in what is called from the run, on whatever thread
        with_or_without(self._lock, self._close_if)

    def _close_if(self, free: bool) -> None:
        if (not free or self._doing) and not self.closed:
            raise ValueError(f"{self!r} is being {self._doing or 'run'}, and stays open")
        self._lent.views.clear()
        super()._close()

    def __call__(
        self, /, **inputs: npt.ArrayLike
    ) -> npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]:
        """Compute with these inputs; the output, or a tuple of all.

        Raises TypeError for an unknown or a missing input and for a dtype that cannot be converted,
        ValueError for another shape, OverflowError for integers that an input's type cannot hold,
        IndexError for indices out of range, and what a callback raises.
        """
        found = tuple(self.run(**inputs).values())
        return found[0] if self._single else found

    def _write(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        for name in inputs:
            if name not in self._inputs:
                raise TypeError(f"there is no input {name!r}; {self._expected()}")
        had = self._kept & self._written
        missing = [
            name
            for name, one in self._inputs.items()
            if name not in inputs and name not in had and one.size
        ]
        if missing:
            told = f"missing inputs: {', '.join(map(repr, missing))}"
            if bare := [repr(name) for name in missing if name in self._bare]:
                told += f"; the Context of {', '.join(bare)} was not allocated before `compile`"
            raise TypeError(told)
        arrays = {
            name: check_numbers(self._inputs[name], as_array(value), "same_kind")
            for name, value in inputs.items()
        }
        for name, array in arrays.items():
            self._inputs[name]._store(array)
        self._written |= set(arrays)

    def __repr__(self) -> str:
        return f"<Compiled {'closed' if self.closed else self._expected()}>"
