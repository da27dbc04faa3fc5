"""What training has of ggml: an optimisation context, and the graphs and memory that it needs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _kept, capi
from .._handles import Loans, address
from .._loader import ffi, lib
from .._memory import raises_memory_error
from .._runtime import helper
from ..backend import Turn
from ..capi import types
from ..enums import ggml_op
from ..errors import AbortError, NotSupportedError, StatusMemoryError
from ..graph import Graph
from ..scheduler import Scheduler
from ..tensor import Tensor
from ._model import Model

GRAPH_SIZE: int = capi.GGML_DEFAULT_GRAPH_SIZE
"""Nodes that ggml makes its graphs for: results, gradients and steps together."""

_NAMED = 8
"""Parameters that an error names."""

_STEPS = ggml_op.GGML_OP_OPT_STEP_ADAMW, ggml_op.GGML_OP_OPT_STEP_SGD


class Moments(NamedTuple):
    """What AdamW knows of a parameter: running means of its gradient, and of its square."""

    m: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]


class _Snapshot(NamedTuple):
    """What a step may change, and how many data ggml had counted before."""

    counted: int
    parameters: list[npt.NDArray[Any]]
    moments: dict[int, Moments]


class Engine:
    """An optimisation context of ggml's for a model, which makes a step of `period` batches.

    The graph is a copy of the caller's, and the parameters stand-ins that share memory with his: so
    nothing of his is marked as a parameter, and he may go on building with it. `steps` is what had
    been made before.
    """

    closed = False  # as for the home of tensors

    def __init__(self, model: Model, scheduler: Scheduler, period: int, steps: int) -> None:
        self.model = model
        self.scheduler = scheduler
        self.period = period
        self.first_step = steps
        self.broken = False
        self.kept = False  # somebody keeps arrays that share its memory
        self._before: _Snapshot | None = None  # of a step that may have to be undone
        self._undone = 0  # data that ggml counts, whose step has been undone
        self._lock = threading.RLock()
        self._lent = Loans()
        self._made = contextlib.ExitStack()
        self._end = weakref.finalize(self, self._made.close)  # an interrupt may come at any time
        self._end.atexit = False
        try:
            self._build()
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Free it all; its parameters stay as they are."""
        self.closed = True
        with self._lock:
            self._lent.views.clear()
        self._end()

    # ---- building

    def _build(self) -> None:
        made, graph = self._made, Graph(self.model.outputs)
        order = graph._order()
        self._calls_python = any("CUSTOM" in ggml_op(one.op).name for one in order)
        size = (len(order) + len(self.model.parameters) + 4 * GRAPH_SIZE) * (
            capi.ggml_tensor_overhead()
        ) + 3 * capi.ggml_graph_overhead_custom(GRAPH_SIZE, True)
        self._context = capi.ggml_init(mem_size=size, no_alloc=True)
        made.callback(capi.ggml_free, self._context)
        stand_ins = {one._address: self._stand_in(one) for one in self.model.parameters}
        copies = self._copy(order, stand_ins)

        self._scheduler = capi.ggml_backend_sched_new(
            [one.handle for one in self.scheduler.backends],
            self.scheduler._buffer_types,
            2 * GRAPH_SIZE,  # nodes and leaves
            False,
            self.scheduler._op_offload,
        )
        made.callback(capi.ggml_backend_sched_free, self._scheduler)
        self.inputs = copies[self.model.inputs._address]
        self._allocate_inputs()
        self.context = self._optimisation(copies[self.model.outputs._address])
        made.callback(capi.ggml_opt_free, self.context)
        self.labels = capi.ggml_opt_labels(self.context)
        self._reserve()

    def _stand_in(self, parameter: Tensor) -> types.ggml_tensor:
        original = parameter.handle
        made = capi.ggml_new_tensor(self._context, original.type, list(original.ne))
        capi.ggml_set_name(made, parameter.name)
        capi.ggml_backend_tensor_alloc(original.buffer, made, original.data)
        capi.ggml_set_param(made)
        return made

    def _copy(
        self, order: Sequence[types.ggml_tensor], stand_ins: Mapping[int, types.ggml_tensor]
    ) -> dict[int, types.ggml_tensor]:
        originals = ffi.new("struct ggml_tensor *[]", list(order))
        copies = ffi.new("struct ggml_tensor *[]", len(order))
        helper("ggml_cffi_copy_tensors", self._context, originals, len(order), copies)
        found = {}
        for old, copy in zip(originals, copies, strict=True):
            found[address(old)] = stand_ins.get(address(old), copy)
            if copy == old:
                continue  # it has memory, and no operands
            for i in range(capi.GGML_MAX_SRC):
                if copy.src[i]:
                    copy.src[i] = stand_ins.get(address(copy.src[i]), copy.src[i])
            if copy.view_src:
                copy.view_src = stand_ins.get(address(copy.view_src), copy.view_src)
        return found

    def _tensor(self, handle: types.ggml_tensor, ndim: int) -> Tensor:
        return Tensor(handle, self, ndim)  # type: ignore[arg-type] # as good a home

    def _allocate_inputs(self) -> None:
        kind = capi.ggml_backend_get_default_buffer_type(self.scheduler.backends[0].handle)
        size = capi.ggml_backend_buft_get_alloc_size(kind, self.inputs)
        with raises_memory_error():
            buffer = capi.ggml_backend_buft_alloc_buffer(kind, size)
        self._made.callback(capi.ggml_backend_buffer_free, buffer)
        base = capi.ggml_backend_buffer_get_base(buffer)
        assert base is not None  # inputs are not empty
        capi.ggml_backend_tensor_alloc(buffer, self.inputs, base)

    def _optimisation(self, outputs: types.ggml_tensor) -> types.ggml_opt_context:
        """The context. It gets the optimiser's parameters from `_values` before each step."""
        params: Any = capi.ggml_opt_default_params(self._scheduler, self.model.loss.type)
        default = capi.ggml_opt_get_default_optimizer_params(None)
        self._values: Any = ffi.new("struct ggml_opt_optimizer_params *", default)
        params.ctx_compute = self._context
        params.inputs = self.inputs
        params.outputs = outputs
        params.opt_period = self.period
        params.optimizer = self.model.optimizer.type
        params.get_opt_pars = ffi.addressof(lib, "ggml_opt_get_constant_optimizer_params")
        params.get_opt_pars_ud = self._values
        try:
            return capi.ggml_opt_init(params)
        except ValueError as error:
            if "can_train" in str(error):
                told = str(error).rpartition("): ")[2]
                raise NotSupportedError(
                    f"ggml makes no gradient that can be used: {told}"
                ) from error
            raise
        except AbortError as error:
            if "failed to allocate" in error.log:  # what is as large as the parameters, for each
                raise StatusMemoryError(str(error), capi.GGML_STATUS_ALLOC_FAILED) from error
            if "n_nodes < cgraph->size" in error.message:
                raise NotSupportedError(
                    f"ggml trains graphs of at most {GRAPH_SIZE} results, gradients and steps; "
                    "with those this one has more"
                ) from error
            if isinstance(error, MemoryError):
                raise
            raise NotSupportedError(self._no_gradient(error)) from error

    def _no_gradient(self, error: AbortError) -> str:
        """What ggml builds no gradients of, and what it says about it."""
        trained = {one._address for one in self.model.parameters}
        operations = set()
        for node in Graph(self.model.outputs).nodes:
            if any(one and address(one) in trained for one in node.handle.src):
                trained.add(node._address)
                operations.add(str(capi.ggml_op_desc(node.handle)))
        names = [repr(one.name) for one in self.model.parameters]
        if len(names) > _NAMED:
            names[_NAMED:] = [f"{len(names) - _NAMED} more"]
        told = " ".join(f"{error.message} {error.log}".split())
        if told.endswith("fatal error"):
            told += ", after what it wrote to stderr"  # which names the operation
        return (
            f"ggml builds no gradients of what {', '.join(sorted(operations))} make of the "
            f"parameters {', '.join(names)}; parameters=[...] leaves out those that are not to be "
            f"trained. ggml says: {told}"
        )

    def _reserve(self) -> None:
        """Have the memory for a step, without which ggml would go on and crash."""
        measured = (capi.ggml_opt_loss, capi.ggml_opt_pred, capi.ggml_opt_ncorrect)
        results = [*(function(self.context) for function in measured), *self._nodes(*_STEPS)]
        spare = capi.ggml_init(
            mem_size=capi.ggml_graph_overhead_custom(2 * GRAPH_SIZE, False), no_alloc=True
        )
        try:
            graph = capi.ggml_new_graph_custom(spare, 2 * GRAPH_SIZE, False)
            for one in results:
                if one is not None:
                    capi.ggml_build_forward_expand(graph, one)
            count = capi.ggml_graph_n_nodes(graph)
            nodes: list[Any] = [capi.ggml_graph_node(graph, i) for i in range(count)]
            operands = [list(node.src) for node in nodes]
            try:
                with raises_memory_error():
                    capi.ggml_backend_sched_reserve(self._scheduler, graph)
            except AbortError as error:
                if "cur_backend_id != -1" not in error.message:
                    raise
                raise NotSupportedError(
                    "none of the target's backends computes a gradient that is needed: there is "
                    "none of weights in memory that has an order of its own"
                ) from error
            finally:  # it has put copies of operands, on other backends, in their place
                for node, sources in zip(nodes, operands, strict=True):
                    node.src = sources
        finally:
            capi.ggml_free(spare)

    def _nodes(self, *operations: ggml_op) -> list[types.ggml_tensor]:
        """Those of the graphs that are made by these operations."""
        found = []
        tensor = capi.ggml_get_first_tensor(self._context)
        while tensor is not None:
            if tensor.op in operations:
                found.append(tensor)
            tensor = capi.ggml_get_next_tensor(self._context, tensor)
        return found

    # ---- computing

    def add(
        self,
        data: npt.NDArray[Any],
        labels: npt.NDArray[np.float32] | None,
        result: types.ggml_opt_result,
        step: int,
        last: bool,
    ) -> None:
        """Add the gradients of a batch; the last one of a period makes the step.

        Data and labels are contiguous and have the dtypes of the tensors that they go into. After
        an exception it is broken: ggml knows no way back to before the batch. A function of
        Python's that raises does not keep ggml from making the step, which is undone then.

        Raises ValueError where it has been freed.
        """
        if self.closed:
            raise ValueError(
                "the Trainer was trained or loaded within an epoch, which cannot go on"
            )
        values = self.model.optimizer._values(step, step - self.first_step)
        for kind, fields in values.items():
            for name, value in fields.items():
                setattr(getattr(self._values, kind), name, value)

        def compute() -> None:
            since = _kept.newest()
            capi.ggml_opt_alloc(self.context, True)
            _write(self.inputs, data)
            if self.labels is not None and labels is not None:
                _write(self.labels, labels)
            if last and self._calls_python:
                counted = capi.ggml_opt_result_ndata(result)
                weights = [one.numpy(copy=True) for one in self.model.parameters]
                self._before = _Snapshot(counted, weights, self.moments())
            try:
                capi.ggml_opt_eval(self.context, result)
                self._before = None
            except BaseException:
                try:
                    self.kept = self.kept or any(True for _ in _kept.alive(since))
                finally:
                    self._undo(result)
                raise

        Turn(self.scheduler.backends).take(compute)

    def settle(self, result: types.ggml_opt_result) -> int:
        """How many data have been added of those that ggml counts in `result`.

        Completes what an interrupt has come into; to call it once more changes nothing.
        """
        self._undo(result)
        return capi.ggml_opt_result_ndata(result) - self._undone

    def _undo(self, result: types.ggml_opt_result) -> None:
        """Undo a step that failed, which ggml has counted unless it refused it."""
        before = self._before
        if before is None:
            return
        for parameter, numbers in zip(self.model.parameters, before.parameters, strict=True):
            parameter.set(numbers)
        self.set_moments(before.moments)
        self._undone = capi.ggml_opt_result_ndata(result) - before.counted
        self._before = None  # last: until then it can be done again

    # ---- the optimiser's state

    def moments(self) -> dict[int, Moments]:
        """The state of AdamW, by the numbers of the parameters; of SGD there is none."""
        return {n: Moments(m.numpy(True), v.numpy(True)) for n, (m, v) in self._moments().items()}

    @property
    def with_moments(self) -> frozenset[int]:
        """The numbers of the parameters that have a state."""
        return frozenset(self._moments())

    def set_moments(self, moments: Mapping[int, Moments]) -> None:
        """Write what another one had."""
        for number, (m, v) in self._moments().items():
            m.set(moments[number].m)
            v.set(moments[number].v)

    def _moments(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Operands of the steps in the graph, for ggml has no function that gives them."""
        numbers = {address(one.handle.data): i for i, one in enumerate(self.model.parameters)}
        found = {}
        for node in self._nodes(ggml_op.GGML_OP_OPT_STEP_ADAMW):
            parameter, m, v = (node.src[i] for i in (0, 2, 3))
            number = numbers[address(parameter.data)]
            ndim = self.model.parameters[number].ndim
            found[number] = self._tensor(m, ndim), self._tensor(v, ndim)
        return found


def _write(tensor: types.ggml_tensor, numbers: npt.NDArray[Any]) -> None:
    capi.ggml_backend_tensor_set(tensor, numbers.view(np.uint8), 0)
