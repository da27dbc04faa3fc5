"""Backends, graphs and data that the cycles use, each made when it is first asked for."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from _fake_backend import FakeDevice, Mark

from ggml_cffi import Backend, Device, MetaDevice, SplitState, capi, device, ffi

F32 = capi.GGML_TYPE_F32
MSE = capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR
HUGE = 1 << 60


class Refused(Exception):
    """Raised by callbacks."""


def refuse(*args: object) -> Any:
    raise Refused


def split(info: Any, n_devs: int) -> Any:
    """How the shared meta device cuts: by the tensor's name."""
    if info.name == "refused":
        raise Refused
    if info.name == "partial":
        return SplitState.partial()
    if info.name == "wrong":
        return {"axis": 1, "ne": [1] * n_devs, "n_segments": 1}
    if info.name in ("cut", "rows"):
        return SplitState.by_ratio(info, 1 if info.name == "cut" else 0, [1] * n_devs)
    return SplitState.mirrored()


def address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Pooled(FakeDevice):
    """A device whose events are made of memory that is used again; it makes no backends."""

    def __init__(self) -> None:
        self.pool: list[Any] = []
        self.refuses = False
        super().__init__("Pooled0")

    def _event_new(self, dev: Any) -> Any:
        if self.refuses:
            return ffi.NULL
        if len(self.events) == len(self.pool):
            made = ffi.new("void *[2]", [ffi.cast("void *", self.pointer), ffi.NULL])
            self.pool.append(made)
        else:
            made = next(free for free in self.pool if address(free) not in self.events)
        self.events[address(made)] = Mark()
        return made

    def _init(self, dev: Any, params: Any) -> Any:
        return ffi.NULL


def context(size: int = 1 << 13) -> Any:
    return capi.ggml_init(mem_size=size, no_alloc=True)


def tensor(ctx: Any, name: str, *ne: int) -> Any:
    return capi.ggml_set_name(capi.ggml_new_tensor(ctx, F32, list(ne)), name)


def weight(name: str) -> Any:
    """A context with one weight of this name."""
    ctx = context(1 << 12)
    tensor(ctx, name, 8, 4)
    return ctx


def graph(ctx: Any, result: Any) -> Any:
    made = capi.ggml_new_graph_custom(ctx, 16, False)
    capi.ggml_build_forward_expand(made, result)
    return made


def buffer(size: int = 256) -> Any:
    return capi.ggml_backend_alloc_buffer(S.cpu, size)


def allocate(made: Any) -> Any:
    """An allocator in which a graph has its memory."""
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_cpu_buffer_type())
    capi.ggml_gallocr_alloc_graph(galloc, made)
    return galloc


def optimizer(ctx_compute: Any, get_opt_pars: Any = None) -> Any:
    """For y = w x, in batches of two."""
    outputs = capi.ggml_mul_mat(ctx_compute, S.parameter, S.inputs)
    capi.ggml_set_output(outputs)
    return capi.ggml_opt_init(
        backend_sched=S.train_sched,
        ctx_compute=ctx_compute,
        inputs=S.inputs,
        outputs=outputs,
        loss_type=MSE,
        get_opt_pars=get_opt_pars,
    )


def _backend() -> Any:
    made = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(made, 1)
    return made


class Shared:
    """Nothing of it is ever freed."""

    cpu = functools.cached_property(lambda self: _backend())
    other = functools.cached_property(lambda self: _backend())
    train_sched = functools.cached_property(lambda self: self._sched(2048))
    sched = functools.cached_property(lambda self: self._sched(64))
    refused = functools.cached_property(lambda self: weight("refused"))
    wrong = functools.cached_property(lambda self: weight("wrong"))
    empty = functools.cached_property(lambda self: context(1 << 12))
    ctx = functools.cached_property(lambda self: context(1 << 16))

    def _sched(self, size: int) -> Any:
        return capi.ggml_backend_sched_new([self.cpu], None, size, False, False)

    @functools.cached_property
    def device(self) -> Device:
        return device("CPU")

    @functools.cached_property
    def backend(self) -> Backend:
        return Backend(self.device, 1)

    @functools.cached_property
    def meta(self) -> MetaDevice:
        return MetaDevice(["CPU", "CPU"], split, on_error="raise")

    @functools.cached_property
    def meta_backend(self) -> Backend:
        return self.meta.init_backend(1)

    @functools.cached_property
    def train_backend(self) -> Backend:
        return Backend(self.device, 1)

    @functools.cached_property
    def fake(self) -> Pooled:
        return Pooled()

    @functools.cached_property
    def threads(self) -> Any:
        params = capi.ggml_threadpool_params_init(2)
        params.paused = True  # its thread waits, and does not poll
        return params

    def _allocated(self, name: str, *ne: int) -> Any:
        ctx = context(1 << 12)
        made = tensor(ctx, name, *ne)
        if name == "inputs":
            capi.ggml_set_input(made)
        if name == "parameter":
            capi.ggml_set_param(made)
        capi.ggml_backend_buffer_clear(capi.ggml_backend_alloc_ctx_tensors(ctx, self.cpu), 0)
        return made

    @functools.cached_property
    def x(self) -> Any:
        return self._allocated("x", 4)

    @functools.cached_property
    def inputs(self) -> Any:
        return self._allocated("inputs", 1, 2)

    @functools.cached_property
    def parameter(self) -> Any:
        return self._allocated("parameter", 1, 1)

    def _graph(self, of: Any, allocated: bool = True) -> Any:
        made = graph(self.ctx, capi.ggml_sqr(self.ctx, of))
        if allocated:
            allocate(made)
        return made

    @functools.cached_property
    def graph(self) -> Any:
        return self._graph(self.x)

    @functools.cached_property
    def refused_graph(self) -> Any:
        return self._graph(self._allocated("refused", 4))

    @functools.cached_property
    def bare_graph(self) -> Any:
        return self._graph(self.x, allocated=False)

    @functools.cached_property
    def too_large(self) -> Any:
        ctx = context(1 << 12)
        tensor(ctx, "large", HUGE >> 8)
        return ctx

    @functools.cached_property
    def too_large_graph(self) -> Any:
        return self._graph(capi.ggml_get_first_tensor(self.too_large), allocated=False)

    @functools.cached_property
    def dataset(self) -> Any:
        made = capi.ggml_opt_dataset_init(F32, F32, 1, 1, 4, 1)
        for numbers in (capi.ggml_opt_dataset_data(made), capi.ggml_opt_dataset_labels(made)):
            capi.ggml_set_f32(numbers, 1.0)
        return made

    @functools.cached_property
    def optimizer(self) -> Any:
        return optimizer(context(1 << 22))

    @functools.cached_property
    def gguf(self) -> bytes:
        gguf = capi.gguf_init_empty()
        capi.gguf_set_val_str(gguf, "question", "?" * 100)
        data: bytes = capi.gguf_get_meta_data(gguf)
        capi.gguf_free(gguf)
        return data

    @functools.cached_property
    def files(self) -> tuple[bytes, bytes]:
        """A GGUF with a tensor, and one cut off within its data."""
        gguf = capi.gguf_init_empty()
        capi.gguf_add_tensor(gguf, self.x)
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        whole, cut = (Path(folder.name, name) for name in ("whole.gguf", "cut.gguf"))
        capi.gguf_write_to_file(gguf, whole, False)
        cut.write_bytes(whole.read_bytes()[:-8])
        capi.gguf_free(gguf)
        return os.fsencode(whole), os.fsencode(cut)


S = Shared()
