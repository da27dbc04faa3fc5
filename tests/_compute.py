"""What several test modules need: ggml things that are freed in the end, and a checked product."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ggml_cffi import capi

F32 = capi.GGML_TYPE_F32


class Arena(contextlib.ExitStack):
    """Makes contexts, tensors, buffers and the like; frees them when it is closed."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.backend = backend

    def context(self, mem_size: int = 1 << 20, no_alloc: bool = True) -> Any:
        ctx = capi.ggml_init(mem_size=mem_size, no_alloc=no_alloc)
        self.callback(capi.ggml_free, ctx)
        return ctx

    def tensor(self, *ne: int, type: int = F32, name: str = "", ctx: Any = None) -> Any:
        """A tensor without memory, in a context of its own unless one is given."""
        tensor = capi.ggml_new_tensor(self.context() if ctx is None else ctx, type, list(ne))
        capi.ggml_set_name(tensor, name)
        return tensor

    def allocate(self, ctx: Any) -> Any:
        """Allocate the tensors of a context on the backend, as weights."""
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, self.backend)
        self.callback(capi.ggml_backend_buffer_free, buffer)
        capi.ggml_backend_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        return buffer

    def weight(self, *ne: int, type: int = F32, name: str = "") -> Any:
        """A tensor with memory on the backend."""
        ctx = self.context()
        tensor = self.tensor(*ne, type=type, name=name, ctx=ctx)
        self.allocate(ctx)
        return tensor

    def graph(self, ctx: Any, *results: Any, allocate: bool = True) -> Any:
        """A graph of these results, by default with memory on the backend for what has none."""
        graph = capi.ggml_new_graph(ctx)
        for result in results:
            capi.ggml_build_forward_expand(graph, result)
        if allocate:
            galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(self.backend))
            self.callback(capi.ggml_gallocr_free, galloc)
            capi.ggml_gallocr_alloc_graph(galloc, graph)
        return graph

    def gguf(self) -> Any:
        gguf = capi.gguf_init_empty()
        self.callback(capi.gguf_free, gguf)
        return gguf


def check_product(backend: Any, seed: int = 0) -> None:
    """Compute down @ up @ x on a backend, compare with NumPy, free everything.

    On a meta device `up` may be split column-parallel and `down` row-parallel, by their names.
    """
    rng = np.random.default_rng(seed)
    up = rng.standard_normal((16, 8), np.float32)
    down = rng.standard_normal((6, 16), np.float32)
    x = rng.standard_normal((4, 8), np.float32)
    with Arena(backend) as arena:
        ctx, ctx_graph = arena.context(), arena.context()
        t_up = arena.tensor(8, 16, name="up", ctx=ctx)
        t_down = arena.tensor(16, 6, name="down", ctx=ctx)
        arena.allocate(ctx)
        capi.ggml_backend_tensor_set(t_up, up, 0)
        capi.ggml_backend_tensor_set(t_down, down, 0)
        t_x = arena.tensor(8, 4, name="x", ctx=ctx_graph)
        capi.ggml_set_input(t_x)
        hidden = capi.ggml_mul_mat(ctx_graph, t_up, t_x)
        result = capi.ggml_cont(ctx_graph, capi.ggml_mul_mat(ctx_graph, t_down, hidden))
        graph = arena.graph(ctx_graph, result)
        capi.ggml_backend_tensor_set(t_x, x, 0)
        capi.ggml_backend_graph_compute(backend, graph)
        found = np.empty((4, 6), np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
    np.testing.assert_allclose(found, x @ up.T @ down.T, rtol=1e-4, atol=1e-4)
