"""What is trained: its tensors, which are checked here, its loss and its optimiser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..dtypes import is_quantized
from ..enums import ggml_op, ggml_type
from ..errors import NotSupportedError
from ..graph import Graph
from ..tensor import Tensor, is_meta
from ._losses import Loss
from ._optimizers import Optimizer


class Model(NamedTuple):
    """What is trained, and how."""

    inputs: Tensor
    outputs: Tensor
    parameters: tuple[Tensor, ...]
    loss: Loss
    optimizer: Optimizer


def graph_of(inputs: Tensor, outputs: Tensor) -> Graph:
    """The graph of the outputs, which needs nothing but the inputs."""
    for name, one in {"inputs": inputs, "outputs": outputs}.items():
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} is a {type(one).__name__}, expected a Tensor")
    graph = Graph(outputs)
    tensors = graph.tensors
    if inputs not in tensors or not graph._is_input(inputs) or graph._constant(inputs) is not None:
        raise ValueError(
            f"inputs is {inputs!r}, expected a tensor without memory that outputs are made from"
        )
    if not inputs.ndim or not inputs.size or not inputs.name:
        raise ValueError(f"inputs is {inputs!r}, expected a name and a shape (batch, ...)")
    if is_quantized(inputs.type):
        raise ValueError(f"inputs is {inputs!r}, expected numbers that are not quantised")
    if outputs.ndim != 2 or outputs.shape[0] != inputs.shape[0] or not outputs.size:
        raise ValueError(
            f"outputs has shape {outputs.shape}, expected ({inputs.shape[0]}, k): a row for each "
            "datum of inputs"
        )
    if outputs.type != ggml_type.GGML_TYPE_F32:
        raise ValueError(f"outputs is {outputs!r}, expected f32")
    for one in tensors:
        if one.handle.buffer and is_meta(one.handle.buffer):
            raise NotSupportedError(f"{one!r}: ggml cannot train on a meta device, where it is")
        if one != inputs and graph._is_input(one) and one.size:
            raise ValueError(
                f"outputs are also made from {one!r}, which has no memory; Context.allocate gives "
                "it to weights and constants"
            )
    return graph


def parameters_of(graph: Graph, chosen: Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    """Those that are trained."""
    there = graph.tensors
    if chosen is None:
        found = [one for one in there if not _why_not(one)]
        if not found:
            raise ValueError(
                "outputs are made from no float32 tensor with memory: nothing to train"
            )
        return tuple(found)
    if isinstance(chosen, Tensor) or not isinstance(chosen, Iterable):
        raise TypeError(f"parameters is {chosen!r}, expected several Tensors")
    found = []
    for one in chosen:
        if not isinstance(one, Tensor):
            raise TypeError(f"parameters has a {type(one).__name__}, expected a Tensor")
        if one not in there:
            raise ValueError(f"outputs are not made from the parameter {one!r}")
        if why := _why_not(one):
            raise ValueError(f"the parameter {one!r} {why}")
        if one in found:
            raise ValueError(f"parameters has {one!r} twice")
        found.append(one)
    if not found:
        raise ValueError("parameters is empty: there is nothing to train")
    return tuple(found)


def _why_not(tensor: Tensor) -> str:
    """Why a tensor cannot be trained; an empty text where it can."""
    if tensor.op != ggml_op.GGML_OP_NONE or tensor.handle.view_src:
        return "is a result of others"
    if not tensor.handle.buffer or not tensor.size:
        return "has no memory"
    if tensor.type != ggml_type.GGML_TYPE_F32:
        return "is not of f32"
    return ""
