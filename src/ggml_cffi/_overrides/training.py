"""ggml-opt.h: callbacks inside structs, and arrays as long as a data set or a graph."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from .. import _runtime
from .._callbacks import Attached
from .._gen import capi
from .._handles import raw
from .._loader import ffi, lib
from ._base import bound, call, count

if TYPE_CHECKING:
    from .._gen import enums, types

    OptimizerParams: TypeAlias = (
        "types.ggml_opt_optimizer_params | Mapping[str, Mapping[str, float]]"
    )

_CData = ffi.CData
_GET_PARAMS = "ggml_opt_get_optimizer_params"


def _optimizer_params(value: Any) -> Any:
    """What cffi takes for a struct ggml_opt_optimizer_params."""
    if isinstance(value, Mapping):
        return {key: dict(fields) for key, fields in value.items()}
    return value


@bound
def ggml_opt_init(
    params: types.ggml_opt_params | None = None,
    *,
    backend_sched: types.ggml_backend_sched | None = None,
    ctx_compute: types.ggml_context | None = None,
    inputs: types.ggml_tensor | None = None,
    outputs: types.ggml_tensor | None = None,
    loss_type: enums.ggml_opt_loss_type | int | None = None,
    build_type: enums.ggml_opt_build_type | int | None = None,
    opt_period: int | None = None,
    get_opt_pars: Callable[[], OptimizerParams] | types.FunctionP | None = None,
    optimizer: enums.ggml_opt_optimizer_type | int | None = None,
) -> types.ggml_opt_context:
    """Make an optimisation context, from a struct or from keywords.

    `backend_sched` and `loss_type` must be given, the others have the values of
    ggml_opt_default_params. `get_opt_pars` is asked before each step of the optimiser: a function
    without arguments that gives a struct ggml_opt_optimizer_params, or a mapping as
    ``{"adamw": {"alpha": 1e-3}}``, where what is not named keeps its default. It is kept until
    ggml_opt_free.
    """
    function = "ggml_opt_init"
    fields = {
        "ctx_compute": ctx_compute,
        "inputs": inputs,
        "outputs": outputs,
        "build_type": build_type,
        "opt_period": opt_period,
        "optimizer": optimizer,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    needed = {"backend_sched": backend_sched, "loss_type": loss_type}
    callback = None if get_opt_pars is None else {"get_opt_pars": get_opt_pars}
    if params is not None:
        named = [*(n for n, v in needed.items() if v is not None), *given, *(callback or ())]
        if named:
            words = ", ".join(named)
            raise TypeError(f"{function}: both a struct and the keywords {words} were given")
        if not isinstance(params, _CData):  # cffi would leave undefined what a dict does not name
            raise TypeError(f"{function}: params must be a struct, not {type(params).__name__}")
        return cast("types.ggml_opt_context", call(function, params))
    raw(backend_sched, "struct ggml_backend_sched *", f"{function}: backend_sched")
    if loss_type is None:
        raise ValueError(f"{function}: loss_type must not be None")
    made: Any = ffi.new(
        "struct ggml_opt_params *", call("ggml_opt_default_params", backend_sched, loss_type)
    )
    for name, value in given.items():
        try:
            setattr(made, name, value)
        except (TypeError, OverflowError) as error:
            raise type(error)(f"{function}: {name}: {error}") from None
    if get_opt_pars is None or isinstance(get_opt_pars, _CData):
        if get_opt_pars is not None:
            made.get_opt_pars = get_opt_pars
        return cast("types.ggml_opt_context", call(function, made[0]))
    asked: Any = get_opt_pars
    answer = (lambda: _optimizer_params(asked())) if callable(asked) else asked
    with Attached() as attached:
        made.get_opt_pars, made.get_opt_pars_ud = attached.add(
            _GET_PARAMS, answer, "result", None, function, "get_opt_pars", None
        )
        context = call(function, made[0])
        attached.result(context)
    return cast("types.ggml_opt_context", context)


@bound
def ggml_opt_fit(
    backend_sched: types.ggml_backend_sched,
    ctx_compute: types.ggml_context,
    inputs: types.ggml_tensor,
    outputs: types.ggml_tensor,
    dataset: types.ggml_opt_dataset,
    loss_type: enums.ggml_opt_loss_type | int,
    optimizer: enums.ggml_opt_optimizer_type | int,
    get_opt_pars: Callable[[int], OptimizerParams] | None,
    nepoch: int,
    nbatch_logical: int,
    val_split: float = 0.0,
    silent: bool = True,
) -> None:
    """Fit a model, given by `inputs` and `outputs`, to a data set in `nepoch` epochs.

    `nbatch_logical`: data per step of the optimiser, a multiple of those in `inputs` (its second
    dimension), of which that of the data set is a multiple. `val_split`: the part of the data set
    kept for validation, from 0 to below 1. `get_opt_pars(epoch)`, with epoch from 1, gives a struct
    ggml_opt_optimizer_params or a mapping as ``{"adamw": {"alpha": 1e-3}}``; None: the defaults.
    Without `silent`, progress is printed on stderr.

    The loop is Python's, over ggml_opt_epoch: the callback of C would get an address of ggml's own.
    Raises ValueError for numbers that do not divide and for another `val_split`.
    """
    function = "ggml_opt_fit"
    raw(ctx_compute, "struct ggml_context *", f"{function}: ctx_compute")
    raw(inputs, "struct ggml_tensor *", f"{function}: inputs")
    raw(outputs, "struct ggml_tensor *", f"{function}: outputs")
    raw(dataset, "struct ggml_opt_dataset *", f"{function}: dataset")
    if get_opt_pars is not None and not callable(get_opt_pars):
        kind = type(get_opt_pars).__name__
        raise TypeError(f"{function}: get_opt_pars must be a function or None, not {kind}")
    nepoch = count(function, "nepoch", nepoch)
    period, split, total = _batches(
        function, capi.ggml_opt_dataset_ndata(dataset), nbatch_logical, inputs.ne[1], val_split
    )
    epoch = 1
    ask = None if get_opt_pars is None else (lambda: get_opt_pars(epoch))
    progress = (
        None if silent else ffi.addressof(lib, "ggml_opt_epoch_callback_progress_bar")
    )  # fmt: skip
    began = time.monotonic()
    with contextlib.ExitStack() as made:
        context = ggml_opt_init(
            backend_sched=backend_sched,
            ctx_compute=ctx_compute,
            inputs=inputs,
            outputs=outputs,
            loss_type=loss_type,
            opt_period=period,
            get_opt_pars=ask,
            optimizer=optimizer,
        )
        made.callback(capi.ggml_opt_free, context)
        if nbatch_logical < total:
            capi.ggml_opt_dataset_shuffle(context, dataset, -1)
        train = capi.ggml_opt_result_init()
        made.callback(capi.ggml_opt_result_free, train)
        validation = capi.ggml_opt_result_init()
        made.callback(capi.ggml_opt_result_free, validation)
        for epoch in range(1, nepoch + 1):
            if nbatch_logical < split:
                capi.ggml_opt_dataset_shuffle(context, dataset, split)
            capi.ggml_opt_result_reset(train)
            capi.ggml_opt_result_reset(validation)
            if not silent:
                print(f"{function}: epoch {epoch:04}/{nepoch:04}:", file=sys.stderr, flush=True)
            capi.ggml_opt_epoch(context, dataset, train, validation, split, progress, progress)
            if not silent:
                print(file=sys.stderr, flush=True)
        if not silent:
            seconds = int(time.monotonic() - began)
            clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            print(f"{function}: training took {clock}", file=sys.stderr, flush=True)


def _batches(
    function: str, n_data: int, logical: int, physical: int, val_split: float
) -> tuple[int, int, int]:
    """Batches of `inputs` per step, the first datum for validation, and how many data there are."""
    logical = count(function, "nbatch_logical", logical)
    if logical == 0 or n_data % logical:
        raise ValueError(
            f"{function}: the data set has {n_data} data, no multiple of nbatch_logical {logical}"
        )
    if physical <= 0 or logical % physical:
        raise ValueError(
            f"{function}: nbatch_logical is {logical}, no multiple of inputs.ne[1] {physical}"
        )
    if not 0.0 <= val_split < 1.0:
        raise ValueError(f"{function}: val_split is {val_split}, expected 0 to below 1")
    part = np.float32(1.0) - np.float32(val_split)  # as C rounds
    split = int(part * np.float32(n_data // logical)) * logical
    return logical // physical, split, n_data


@bound
def ggml_opt_dataset_get_batch_host(
    dataset: types.ggml_opt_dataset,
    data_batch: types.WritableBuffer,
    labels_batch: types.WritableBuffer | None,
    ibatch: int,
) -> None:
    """Copy batch `ibatch` into host memory.

    `data_batch` and `labels_batch` are writable buffers; the bytes of the first say how many data a
    batch has. `labels_batch` is None for a data set without labels.

    Raises ValueError for buffers that are too small and for `ibatch` that is no batch.
    """
    function = "ggml_opt_dataset_get_batch_host"
    raw(dataset, "struct ggml_opt_dataset *", f"{function}: dataset")
    data = capi.ggml_opt_dataset_data(dataset)
    labels = capi.ggml_opt_dataset_labels(dataset)
    if data is None or not data.data:
        raise ValueError(f"{function}: the data set has no memory")
    if not 0 <= ibatch < capi.ggml_opt_dataset_ndata(dataset):
        raise ValueError(f"{function}: ibatch is {ibatch}, which is no batch of the data set")
    if (labels is None) != (labels_batch is None):
        words = "must be None, the data set has no labels" if labels is None else "must not be None"
        raise ValueError(f"{function}: labels_batch {words}")
    pointer, size = _runtime.buffer(
        data_batch, None, function, "data_batch", nullable=False, writes=True
    )
    target = ffi.NULL
    if labels is not None:
        needed = -(-size * capi.ggml_nbytes(labels) // capi.ggml_nbytes(data))
        target, _ = _runtime.buffer(
            labels_batch, needed, function, "labels_batch", nullable=False, writes=True
        )
    call(function, dataset, pointer, size, target, ibatch)


@bound
def ggml_opt_result_pred(result: types.ggml_opt_result) -> list[int]:
    """Give the predictions, one for each datum; none where the loss makes no predictions."""
    n = capi.ggml_opt_result_ndata(result)
    made = ffi.new("int32_t[]", [-1] * max(n, 1))
    call("ggml_opt_result_pred", result, made)
    predictions = list(made[0:n])
    return predictions[: predictions.index(-1)] if -1 in predictions else predictions


@bound
def ggml_build_backward_expand(
    ctx: types.ggml_context,
    cgraph: types.ggml_cgraph,
    grad_accs: Sequence[types.ggml_tensor | None] | None = None,
) -> None:
    """Add the backward pass to a graph that was made with gradients.

    `grad_accs`: a tensor for each node of the graph that accumulates its gradient, None for a node
    without; None: none has. Raises ValueError for another number of them.
    """
    function = "ggml_build_backward_expand"
    accumulators = ffi.NULL
    if grad_accs is not None:
        n = call("ggml_graph_n_nodes", cgraph)
        if len(grad_accs) != n:
            raise ValueError(
                f"{function}: grad_accs must have {n} elements, not {len(grad_accs)}: "
                "one for each node"
            )
        items = [ffi.NULL if item is None else item for item in grad_accs]
        try:
            accumulators = ffi.new("struct ggml_tensor *[]", items)
        except TypeError as error:
            raise TypeError(f"{function}: grad_accs: {error}") from None
    call(function, ctx, cgraph, accumulators)
