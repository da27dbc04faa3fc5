"""Graphs: what is to be computed; and compiled, with memory on a device, to be run many times."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import capi
from ._handles import Owned, address
from ._loader import ffi, lib
from .capi import types
from .context import Context
from .device import Backend, Device, device
from .enums import ggml_op
from .meta import MetaDevice
from .tensor import Tensor, check_numbers, is_without_memory

__all__ = ["Compiled", "Graph"]


class Graph:
    """What is to be computed: the outputs, and all that they are made from.

    `outputs` is a tensor, a sequence of them, or a mapping from names to them. Inputs are the tensors
    without memory that are no results: a run needs their numbers, by their names. Numbers that
    `Context.from_numpy` took and that have no memory yet are written once, when it is compiled.

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
        return [self._tensor(handle) for handle in self._order()]

    @property
    def nodes(self) -> list[Tensor]:
        """The results among `tensors`."""
        return [t for t in self.tensors if t.op != ggml_op.GGML_OP_NONE]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that a run needs numbers of."""
        return [t for t in self.tensors if self._is_input(t) and self._constant(t) is None]

    def compile(
        self,
        target: Device | Backend | str,
        n_threads: int | None = None,
        keep: Iterable[str] = (),
    ) -> Compiled:
        """Give it memory on a device; the same graph may be compiled many times, on several.

        On a `Backend` it runs there, else on one of its own, with `n_threads` (all usable cores by
        default). `keep` names inputs that keep their numbers from one run to the next.

        Raises ValueError where two inputs have the same name or one has none, MemoryError where the
        device has too little memory, and what `capi` raises for operations it cannot compute.
        """
        return Compiled(self, target, n_threads, keep)

    def _order(self) -> list[types.ggml_tensor]:
        outputs = ffi.new("struct ggml_tensor *[]", [one.handle for one in self.outputs])
        count = lib.ggml_cffi_order(outputs, len(self._named), ffi.NULL, 0)
        order = ffi.new("struct ggml_tensor *[]", count)
        lib.ggml_cffi_order(outputs, len(self._named), order, count)
        return list(order)

    def _tensor(self, handle: types.ggml_tensor) -> Tensor:
        return Tensor(handle, self._contexts[0])

    @staticmethod
    def _is_input(tensor: Tensor) -> bool:
        none = ggml_op.GGML_OP_NONE
        return tensor.op == none and is_without_memory(tensor.handle) and not tensor.handle.view_src

    def _constant(self, tensor: Tensor) -> npt.NDArray[Any] | None:
        """The numbers that its context was given for it."""
        seen: set[Context] = set()
        todo = list(self._contexts)
        while todo:
            context = todo.pop()
            if tensor._address in context._pending:
                return context._pending[tensor._address]
            if context not in seen:
                seen.add(context)
                todo += context._needs
        return None

    def __repr__(self) -> str:
        return f"<Graph of {len(self._order())} tensors>"


class _Store:
    """What a compiled graph has of ggml."""

    def __init__(self) -> None:
        self.context: types.ggml_context | None = None
        self.allocator: types.ggml_gallocr | None = None
        self.backend: Backend | None = None  # its own

    def free(self) -> None:
        if self.allocator is not None:
            capi.ggml_gallocr_free(self.allocator)
        if self.backend is not None:
            self.backend.close()
        if self.context is not None:
            capi.ggml_free(self.context)


class Compiled(Owned[_Store]):
    """A graph with memory on a device, made by `Graph.compile`.

    Call it with an array for each input, by name: it gives the output, or a tuple of them in the
    order of the graph's, as arrays of their own. ggml uses the memory of inputs and of results again
    within a run, so every run needs all inputs but those that were compiled to be kept.
    """

    def __init__(
        self,
        graph: Graph,
        target: Device | Backend | str,
        n_threads: int | None = None,
        keep: Iterable[str] = (),
    ) -> None:
        target = device(target) if isinstance(target, str) else target
        if not isinstance(target, (Device, Backend)):
            raise TypeError(f"target is {target!r}, expected a Device, a Backend or a name")
        store = _Store()
        shared = target if isinstance(target, Backend) else None
        if shared is not None and isinstance(shared.device, MetaDevice):
            shared = None  # ggml's meta backend is for one graph
        parents: tuple[object, ...] = graph._contexts
        super().__init__(store, _Store.free, parents if shared is None else (*parents, shared))
        self._lock = threading.RLock()
        self._lent = 0
        self._single = graph._single
        try:
            if shared is None:
                where = target.device if isinstance(target, Backend) else target
                shared = store.backend = Backend(where, n_threads)
            elif n_threads is not None:
                raise ValueError("n_threads is the Backend's to have")
            self._backend = shared
            self._allocate(store, graph, set(keep))
        except BaseException:
            self.close()
            raise

    def _allocate(self, store: _Store, graph: Graph, keep: set[str]) -> None:
        order = graph._order()
        n = len(order)
        size = (n + 1) * capi.ggml_tensor_overhead() + capi.ggml_graph_overhead_custom(n + 1, False)
        store.context = capi.ggml_init(mem_size=size, no_alloc=True)
        originals = ffi.new("struct ggml_tensor *[]", order)
        copies = ffi.new("struct ggml_tensor *[]", n)
        lib.ggml_cffi_copy_tensors(store.context, originals, n, copies)
        copy_of = {address(old): new for old, new in zip(order, copies, strict=True)}
        self._inputs: dict[str, Tensor] = {}
        self._written: set[str] = set()
        constants = []
        for old in graph.tensors:
            if not graph._is_input(old):
                continue
            numbers = graph._constant(old)
            new = self._tensor(copy_of[old._address], old.ndim)
            capi.ggml_set_input(new.handle)
            if numbers is not None:
                constants.append((new, numbers))
                capi.ggml_set_output(new.handle)
                continue
            if not old.name:
                raise ValueError(f"an input has no name: {old!r}")
            if old.name in self._inputs:
                raise ValueError(f"two inputs have the name {old.name!r}")
            self._inputs[old.name] = new
        self._kept = keep
        for name in keep:
            if name not in self._inputs:
                raise ValueError(f"keep names {name!r}, which is no input; {self._expected()}")
            capi.ggml_set_output(self._inputs[name].handle)
        self._outputs = {
            name: self._tensor(copy_of[one._address], one.ndim) for name, one in graph._named.items()
        }
        for one in self._outputs.values():
            for handle in (one.handle, one.handle.view_src):
                if handle and is_without_memory(handle):
                    capi.ggml_set_output(handle)
        self._graph = capi.ggml_new_graph_custom(store.context, n + 1, False)
        for copy in copies:  # operands first, so that ggml never goes deep
            capi.ggml_build_forward_expand(self._graph, copy)
        kind = capi.ggml_backend_get_default_buffer_type(self._backend.handle)
        store.allocator = capi.ggml_gallocr_new(kind)
        capi.ggml_gallocr_alloc_graph(store.allocator, self._graph)
        for new, numbers in constants:
            new.set(numbers)

    def _tensor(self, handle: types.ggml_tensor, ndim: int) -> Tensor:
        return Tensor(handle, self, ndim)  # type: ignore[arg-type] # as good a home

    def _expected(self) -> str:
        return f"the inputs are {', '.join(map(repr, self._inputs)) or 'none'}"

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, by name."""
        return {name: one.shape for name, one in self._inputs.items()}

    @property
    def backend(self) -> Backend:
        """The backend that it runs on."""
        return self._backend

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it has on the device, for inputs and results."""
        return capi.ggml_gallocr_get_buffer_size(self.handle.allocator, 0)

    def run(self, **inputs: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Compute, and give all outputs by name: those of the graph's mapping, else their numbers.

        Raises as calling it does.
        """
        with self._backend._lock, self._lock:
            self._write(inputs)
            capi.ggml_backend_graph_compute(self._backend.handle, self._graph)
            return {name: np.array(one.numpy()) for name, one in self._outputs.items()}

    def __call__(self, **inputs: npt.ArrayLike) -> npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]:
        """Compute with these inputs; the output, or a tuple of all.

        Raises TypeError for an unknown or a missing input and for a dtype that cannot be converted,
        ValueError for another shape, IndexError for indices out of range, and what a callback raises.
        """
        found = tuple(self.run(**inputs).values())
        return found[0] if self._single else found

    def _write(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        self.handle  # noqa: B018 # raises where it is closed
        for name in inputs:
            if name not in self._inputs:
                raise TypeError(f"there is no input {name!r}; {self._expected()}")
        had = self._kept & self._written
        missing = [name for name in self._inputs if name not in inputs and name not in had]
        if missing:
            raise TypeError(f"missing inputs: {', '.join(map(repr, missing))}")
        arrays = {
            name: check_numbers(self._inputs[name], np.asarray(value), "same_kind")
            for name, value in inputs.items()
        }
        for name, array in arrays.items():
            self._inputs[name].set(array)
        self._written |= set(arrays)

    def __repr__(self) -> str:
        if self.closed:
            return "<Compiled closed>"
        return f"<Compiled on {self._backend.name}; {self._expected()}>"
