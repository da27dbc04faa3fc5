"""Reserving memory for graphs: arrays as long as a graph, an allocator or a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _runtime
from .._handles import raw
from .._loader import ffi, lib
from ._base import bound, call

if TYPE_CHECKING:
    from .._gen import types

    Ids: TypeAlias = Sequence[int] | types.NumberArray


def _ids(
    function: str, name: str, value: Ids | None, length: int, exact: bool, n_buffers: int
) -> Any:
    """The C array of `length` buffer numbers, 0 where none is given."""
    made = ffi.new("int[]", max(length, 1))
    if value is None:
        return made
    pointer, n = _runtime.array("int", value, function, name)
    if n > length or (exact and n != length):
        most = "" if exact else "at most "
        raise ValueError(f"{function}: {name} must have {most}{length} elements, not {n}")
    for i in range(n):
        if not 0 <= pointer[i] < n_buffers:
            raise ValueError(
                f"{function}: {name}[{i}] is {pointer[i]}, expected 0 to {n_buffers - 1}: "
                "the number of a buffer of the allocator"
            )
        made[i] = pointer[i]
    return made


def _arguments(
    function: str,
    galloc: Any,
    graph: Any,
    node_ids: Ids | None,
    leaf_ids: Ids | None,
) -> tuple[Any, Any, int]:
    raw(galloc, "struct ggml_gallocr *", f"{function}: galloc")
    raw(graph, "struct ggml_cgraph *", f"{function}: graph")
    n = lib.ggml_cffi_n_buffers(galloc)
    n_nodes = call("ggml_graph_n_nodes", graph)
    n_leafs = call("ggml_graph_size", graph)  # at most that many: nothing tells how many
    nodes = _ids(function, "node_buffer_ids", node_ids, n_nodes, True, n)
    leafs = _ids(function, "leaf_buffer_ids", leaf_ids, n_leafs, False, n)
    return nodes, leafs, n


@bound
def ggml_gallocr_reserve_n(
    galloc: types.ggml_gallocr,
    graph: types.ggml_cgraph,
    node_buffer_ids: Ids | None = None,
    leaf_buffer_ids: Ids | None = None,
) -> None:
    """Allocate memory for a graph like this one.

    `node_buffer_ids` says for each node in which of the allocator's buffers it goes,
    `leaf_buffer_ids` for each leaf (those that are not named go into buffer 0); None: all into
    buffer 0.

    Raises ValueError for a wrong number of ids and for an id that is no buffer's number, GGMLError
    if the memory cannot be allocated.
    """
    function = "ggml_gallocr_reserve_n"
    nodes, leafs, _ = _arguments(function, galloc, graph, node_buffer_ids, leaf_buffer_ids)
    call(function, galloc, graph, nodes, leafs)


@bound
def ggml_gallocr_reserve_n_size(
    galloc: types.ggml_gallocr,
    graph: types.ggml_cgraph,
    node_buffer_ids: Ids | None = None,
    leaf_buffer_ids: Ids | None = None,
) -> list[int]:
    """Give the bytes that `ggml_gallocr_reserve_n` would allocate, one number for each buffer.

    Buffers of the allocator that are smaller are freed: what was allocated in them must not be used
    any more.

    Raises ValueError for a wrong number of ids and for an id that is no buffer's number.
    """
    function = "ggml_gallocr_reserve_n_size"
    nodes, leafs, n = _arguments(function, galloc, graph, node_buffer_ids, leaf_buffer_ids)
    sizes = ffi.new("size_t[]", n)
    call(function, galloc, graph, nodes, leafs, sizes)
    return list(sizes)


@bound
def ggml_backend_sched_reserve_size(
    sched: types.ggml_backend_sched, measure_graph: types.ggml_cgraph
) -> list[int]:
    """Give the bytes that the buffer of each of the scheduler's backends would take for a graph.

    Resets the scheduler. Buffers that are smaller are freed: what was allocated in them must not be
    used any more.
    """
    function = "ggml_backend_sched_reserve_size"
    n = call("ggml_backend_sched_get_n_backends", sched)
    sizes = ffi.new("size_t[]", n)
    call(function, sched, measure_graph, sizes)
    return list(sizes)
