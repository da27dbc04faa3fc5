"""Room for views in the buffers of a meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .. import capi
from .._handles import address
from ..backend import Backend
from ..capi import types
from ..errors import AbortError
from .device import MetaDevice


def is_full(error: AbortError) -> bool:
    """Whether a graph could not be allocated since a buffer has no room for more views.

    ggml keeps what it knows of views in a pool of each buffer, and empties that only when a graph
    is computed: graphs that are allocated, and never computed, fill it.
    """
    return "not enough space in the context's memory pool" in error.log


def lacking(order: Sequence[types.ggml_tensor]) -> str:
    """Why a graph does not fit into pools that are empty: what it has most views of, and how many.

    "" where it has none: then it is another pool.
    ``compute_headroom`` in ggml-backend-meta.cpp is the number of views for each tensor's room in
    the context that the weights are allocated from.
    """
    viewed = [one.view_src for one in order if one.view_src and one.view_src.buffer]
    if not viewed:
        return ""
    (most, count), *_ = Counter(map(address, viewed)).most_common(1)
    name = next(capi.ggml_get_name(one) for one in viewed if address(one) == most)
    return (
        f"it has {len(viewed):,} views of weights, {count:,} of them of {name!r}, and ggml has no "
        f"room for so many: use a view again, rather than make it anew, or compile it in parts"
    )


def make(device: MetaDevice, weights: Iterable[types.ggml_tensor]) -> None:
    """Have ggml empty the pools of the buffers that these tensors are in, by a small computation.

    Graphs that are allocated stay what they are: their views are made known again when they are
    computed.
    """
    buffers = {address(one.buffer): one for one in weights}
    size = 16 * capi.ggml_tensor_overhead() + capi.ggml_graph_overhead_custom(
        len(buffers) + 8, False
    )
    context = capi.ggml_init(mem_size=size, no_alloc=True)
    allocator = capi.ggml_gallocr_new(capi.ggml_backend_dev_buffer_type(device.handle))
    try:
        given = capi.ggml_new_tensor_1d(context, capi.GGML_TYPE_F32, 1)
        capi.ggml_set_input(given)
        graph = capi.ggml_new_graph_custom(context, len(buffers) + 8, False)
        capi.ggml_build_forward_expand(graph, capi.ggml_cont(context, given))
        for one in buffers.values():  # a leaf that nothing is made of
            capi.ggml_build_forward_expand(graph, one)
        with Backend(device, 1) as backend:
            capi.ggml_gallocr_alloc_graph(allocator, graph)
            capi.ggml_backend_tensor_set(given, np.zeros(1, np.float32), 0)
            capi.ggml_backend_graph_compute(backend.handle, graph)
    finally:
        capi.ggml_gallocr_free(allocator)
        capi.ggml_free(context)
