"""Leaks on purpose, which must be seen, and those that are known, which must not grow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from _fake_backend import patched

from ggml_cffi import MetaDevice, _loader, capi, ffi
from ggml_cffi._gen import build_info
from ggml_cffi.errors import AbortError

from .handles import HANDLES, Handle
from .harness import N, libc, raises
from .shared import HUGE, MSE, S, allocate, buffer, context, graph, split, tensor, weight

# ---- on purpose


class Purpose(NamedTuple):
    cycle: Callable[[], object]
    n: int


def kept(handle: Handle) -> Callable[[], object]:
    return lambda: handle.make() and None


#: Of the smallest things so many more that they fill whole pages; of threads fewer.
_NUMBERS = {
    "gguf_context": 10_000,
    "ggml_opt_result": 10_000,
    "ggml_backend_event": 5_000,
    "ggml_threadpool": 100,
}
_hoard: list[object] = []
ON_PURPOSE = {
    "malloc": Purpose(lambda: libc.malloc(24), 10_000),
    "objects": Purpose(lambda: _hoard.append([]), N),
    **{name: Purpose(kept(h), _NUMBERS.get(name, N)) for name, h in HANDLES.items()},
}

# ---- per caught abort


def raw_function(name: str) -> Any:
    """A function of ggml's itself, as C calls it: without a guard of its own."""
    base = ctypes.CDLL(str(_loader.library_files(build_info)["ggml-base"]))
    return ffi.cast("void *", ctypes.cast(getattr(base, name), ctypes.c_void_p).value)


def operands_that_do_not_fit() -> None:
    raises(AbortError, capi.ggml_mul_mat, S.ctx, S.x, S.inputs)


def memory_of_a_context() -> None:
    raises(AbortError, capi.ggml_init, mem_size=HUGE)


def alignment_of_a_gguf() -> None:
    gguf = capi.gguf_init_empty()
    raises(AbortError, capi.gguf_set_val_u32, gguf, "general.alignment", 3)
    capi.gguf_free(gguf)


def copy_of_a_graph_without_memory() -> None:
    raises(AbortError, capi.ggml_backend_graph_copy, S.cpu, S.bare_graph)


def sum_along_the_cut() -> None:
    """On a meta device, where a graph is allocated."""
    ctx, weights = context(), weight("rows")
    made = capi.ggml_backend_alloc_ctx_tensors(weights, S.meta_backend.handle)
    result = capi.ggml_rms_norm(ctx, capi.ggml_get_first_tensor(weights), 1e-6)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_buffer_get_type(made))
    raises(AbortError, capi.ggml_gallocr_alloc_graph, galloc, graph(ctx, result))
    capi.ggml_gallocr_free(galloc)
    capi.ggml_backend_buffer_free(made)
    capi.ggml_free(weights)
    capi.ggml_free(ctx)


def free_of_a_buffer() -> None:
    made = buffer()
    with patched(made, free_buffer=raw_function("ggml_backend_multi_buffer_set_usage")):
        raises(AbortError, capi.ggml_backend_buffer_free, made)


def operation_on_one_thread() -> None:
    ctx = context()
    function = ffi.cast("ggml_custom1_op_t", raw_function("ggml_mul_mat_set_prec"))
    made = graph(ctx, capi.ggml_map_custom1(ctx, S.x, function))
    galloc = allocate(made)
    raises(AbortError, capi.ggml_backend_graph_compute, S.cpu, made)
    capi.ggml_gallocr_free(galloc)
    capi.ggml_free(ctx)


def optimiser_without_outputs() -> None:
    call = capi.ggml_opt_init
    raises(AbortError, call, backend_sched=S.sched, loss_type=MSE, inputs=S.inputs)


def file_of_a_tensor_without_data() -> None:
    gguf, ctx = capi.gguf_init_empty(), context()
    capi.gguf_add_tensor(gguf, tensor(ctx, "bare", 4))
    raises(AbortError, capi.gguf_write_to_file, gguf, "/dev/null", False)
    capi.gguf_free(gguf)
    capi.ggml_free(ctx)


def weights_that_a_device_has_no_room_for() -> None:
    call = capi.ggml_backend_alloc_ctx_tensors
    raises(AbortError, call, S.too_large, S.meta_backend.handle)


class Cost(NamedTuple):
    """A site where ggml aborts, and the guard class of the function that is called.

    `entries`: the tables that an abort leaves an entry in, of a buffer half made.
    """

    guard: str
    cycle: Callable[[], object]
    n: int = N
    entries: tuple[str, ...] = ()


_OF_BUFFERS = (
    "_callbacks._table",
    "_callbacks.owners",
    "_callbacks.owners, in all",
    "ggml_cffi.meta._buffers",
)
ABORTS = {
    cost.cycle.__name__.replace("_", " "): cost
    for cost in (
        Cost("throw", operands_that_do_not_fit),
        Cost("throw", memory_of_a_context),
        Cost("throw", alignment_of_a_gguf),
        Cost("throw", sum_along_the_cut, N // 10),  # it reserves gigabytes of addresses
        Cost("throw", copy_of_a_graph_without_memory),
        Cost("throw", optimiser_without_outputs),
        Cost("throw", file_of_a_tensor_without_data, 100),
        Cost("throw", weights_that_a_device_has_no_room_for, 50, _OF_BUFFERS),
        Cost("nothrow", free_of_a_buffer),
        Cost("compute", operation_on_one_thread),
    )
}

# ---- per meta device


def meta_device() -> None:
    MetaDevice(["CPU", "CPU"], split).close()


META_DEVICES = {"meta device": meta_device}
