"""Objects that own what they stand for: closed, forgotten, and not quite made."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ggml_cffi import (
    Backend,
    Buffer,
    Compiled,
    Context,
    GGUFFile,
    GGUFWriter,
    Graph,
    MetaDevice,
    MultiBuffer,
    Scheduler,
    capi,
    ops,
)
from ggml_cffi.errors import GGUFError, SplitError
from ggml_cffi.training import AdamW, Dataset, Trainer

from .harness import raises
from .shared import HUGE, Refused, S, buffer, refuse, split, weight

NUMBERS = np.arange(32, dtype=np.float32).reshape(4, 8)


def multi() -> MultiBuffer:
    return MultiBuffer([Buffer(buffer()), buffer()])


def buffer_named_twice() -> None:
    child = Buffer(buffer())
    raises(ValueError, MultiBuffer, [child, child])
    raises(ValueError, Buffer, child.handle)
    child.close()


def nested() -> None:
    outer = MultiBuffer([multi(), Buffer(buffer())])
    outer.circle = outer.buffers  # type: ignore[attr-defined] # garbage in a circle


def backend_on_meta() -> None:
    """With work on it, and its children's threads set."""
    with S.meta.init_backend(1) as made:
        ctx = weight("cut")
        with Buffer(capi.ggml_backend_alloc_ctx_tensors(ctx, made.handle), keep=(made,)):
            pass
        capi.ggml_free(ctx)


def backend_forgotten() -> None:
    made = S.device.init_backend(1)
    Buffer(capi.ggml_backend_alloc_buffer(made.handle, 256), keep=(made,))


def meta_devices_that_cannot_be() -> None:
    raises(ValueError, MetaDevice, ["CPU"] * 17, split)
    raises(ValueError, MetaDevice, ["CPU"], split, "sometimes")
    raises(ValueError, MetaDevice, ["CPU", S.meta], split)
    raises(TypeError, MetaDevice, ["CPU"], None)


def trainer() -> Trainer:
    """With a weight of its own, after two steps."""
    ctx = Context()
    w = ctx.from_numpy(WEIGHT, name="w")
    x = ctx.input((2, 3), name="x")
    ctx.allocate(S.device)
    made = Trainer(x, x @ w.T, "sum", AdamW(0.1), target=S.train_backend)
    made.fit(DATA)
    return made


def trainer_closed() -> None:
    made = trainer()
    made.fit(DATA, batch_size=4)  # with another context of ggml's
    made.close()
    made.parameters[0].context.close()


def trainer_that_cannot_be() -> None:
    with Context() as ctx:
        x = ctx.input((2, 3), name="x")
        w = ctx.from_numpy(WEIGHT, name="w")
        ctx.allocate(S.device)
        raises(ValueError, Trainer, x, (x @ w.T).T, target=S.train_backend)
        raises(ValueError, Trainer, x, x @ w.T, target=S.train_backend, parameters=[x])
        with Trainer(x, x @ w.T, "sum", AdamW(refuse), target=S.train_backend) as made:
            raises(Refused, made.fit, DATA)
            made.predict(DATA.data)


WEIGHT = np.ones((4, 3), np.float32)
DATA = Dataset(np.ones((4, 3), np.float32))


def filled(dtype: str = "f32") -> Context:
    """A context with a weight that has memory and numbers."""
    ctx = Context()
    ctx.w = ctx.from_numpy(NUMBERS, name="w", dtype=dtype)  # type: ignore[attr-defined]
    ctx.allocate(S.device)
    return ctx


def result(ctx: Any) -> Any:
    return ops.relu(ops.mul_mat(ctx.w, ctx.input((2, 8), name="x")))


def context_with_views() -> None:
    with filled() as ctx:
        w: Any = ctx.w  # type: ignore[attr-defined]
        view, part = w.numpy(), np.from_dlpack(w[1:])
        raises(BufferError, ctx.close)
        assert part.base is not None and view[1, 0] == part[0, 0]
        del view, part
        w.set(w.numpy(copy=True)[::-1])


def context_in_a_circle() -> None:
    """Whose tensors, and arrays that share their memory, are forgotten with it."""
    ctx: Any = filled()
    other = Context()
    other.sum = ctx.w + other.input((4, 8), name="x")  # type: ignore[attr-defined]
    ctx.circle = [other, ctx.w, ctx.w.numpy()]


def context_that_cannot_be_filled() -> None:
    with Context() as ctx:
        small = ctx.from_numpy(NUMBERS, name="small")
        huge = ctx.tensor((HUGE >> 20, 1 << 10), name="huge")
        raises(MemoryError, ctx.allocate, S.device)
        assert not small.has_memory and huge.shape
    with Context() as ctx:
        ctx.from_numpy(NUMBERS, name="refused")
        raises(SplitError, ctx.allocate, S.meta)
        raises(ValueError, ctx.allocate, "nowhere")


def compiled_and_run() -> None:
    with filled() as ctx:
        made = Graph(result(ctx)).compile(S.backend, keep=["x"])
        made(x=NUMBERS[:2])
        made()


def compiled_in_a_circle() -> None:
    ctx: Any = filled()
    ctx.circle = made = Graph(result(ctx)).compile(S.backend)
    made.circle = made  # type: ignore[attr-defined]


def compiled_on_a_backend_of_its_own() -> None:
    with filled() as ctx:
        Graph(result(ctx)).compile(S.device, n_threads=1)(x=NUMBERS[:2])


def compiled_on_meta() -> None:
    with Context() as ctx:
        ctx.w = ctx.from_numpy(NUMBERS, name="cut")  # type: ignore[attr-defined]
        ctx.allocate(S.meta)
        Graph(result(ctx)).compile(S.meta, n_threads=1)(x=NUMBERS[:2])


def graphs_that_cannot_be_compiled() -> None:
    with filled() as ctx:
        y, x = result(ctx), ctx.input(1 << 16, name="x")
        raises(ValueError, Graph(y).compile, S.backend, keep=["nothing"])
        raises(ValueError, Graph([y, x + 1]).compile, S.backend)  # two inputs of a name
        raises(MemoryError, Graph(ops.repeat_4d(x, 1 << 16, 1 << 24, 1, 1)).compile, S.backend)
        with Graph(y).compile(S.backend) as made:
            raises(TypeError, made)
            raises(ValueError, made, x=NUMBERS)


def custom_operation_that_fails() -> None:
    with filled() as ctx:
        made = Graph(ops.custom(refuse, result(ctx))).compile(S.backend)
        raises(Refused, made, x=NUMBERS[:2])


def scheduled(ctx: Context) -> tuple[Scheduler, Compiled]:
    scheduler = Scheduler([S.backend])
    return scheduler, Graph(result(ctx)).compile(scheduler)


def scheduler_that_computes() -> None:
    with filled() as ctx:
        scheduler, made = scheduled(ctx)
        with scheduler:
            seen: list[str] = []
            scheduler.set_eval_callback(lambda name, array: seen.append(name))
            made(x=NUMBERS[:2])
            assert len(seen) == 2 and len(scheduler.assignment(made)["CPU 0"]) == 2
            scheduler.reserve(Graph(result(ctx)))


def scheduler_in_a_circle() -> None:
    ctx: Any = filled()
    ctx.circle = scheduled(ctx)


def scheduler_that_fails() -> None:
    raises(ValueError, Scheduler, [])
    with filled() as ctx, Scheduler([S.backend]) as scheduler:
        x = ctx.input(1 << 16, name="x")
        huge = Graph(ops.repeat_4d(x, 1 << 16, 1 << 24, 1, 1))
        raises(MemoryError, huge.compile, scheduler)
        made = Graph(result(ctx)).compile(scheduler)
        scheduler.set_eval_callback(refuse)
        raises(Refused, made, x=NUMBERS[:2])


def file(ending: int = 0) -> Path:
    return Path(os.fsdecode(S.files[ending]))


def file_that_is_loaded() -> None:
    with GGUFFile(file()) as opened, Context() as ctx:
        loaded = opened.load_into(ctx, S.device)["x"]
        assert dict(opened.metadata) == {} and loaded.numpy().shape == (4,)
        opened.load_into(ctx, S.device, buffer_type="CPU")
        opened.load_into(ctx, S.meta)


def file_that_is_forgotten() -> None:
    opened: Any = GGUFFile(file())
    ctx: Any = Context()
    ctx.circle = [opened, opened.load_into(ctx, S.device), opened.tensors["x"].numpy(), ctx]


def file_that_is_none() -> None:
    cut = file(1).with_name("cut more.gguf")
    cut.write_bytes(file().read_bytes()[:-24])
    raises(GGUFError, GGUFFile, cut)
    raises(OSError, GGUFFile, "/nowhere/nobody.gguf")
    with GGUFFile(file()) as opened, Context() as ctx:
        raises(GGUFError, opened.load_into, ctx, S.device, ["nothing"])
        raises(Refused, opened.load_into, ctx, S.device, progress=refuse)
        raises(Refused, opened.load_into, ctx, S.meta, progress=refuse)


def target() -> Path:
    return file().with_name("written.gguf")


def file_that_is_written() -> None:
    with GGUFWriter(target()) as writer:
        writer.set("numbers", [1, 2, 3])
        writer.add_tensor("w", NUMBERS)


def writer_that_is_forgotten() -> None:
    writer: Any = GGUFWriter(target())
    writer.add_tensor("w", NUMBERS)
    writer.circle = writer


def writer_that_fails() -> None:
    raises(OSError, GGUFWriter, target().parent / "nowhere" / "nobody.gguf")
    with GGUFWriter(target()) as writer:
        writer.add_tensor("w", NUMBERS)
        raises(ValueError, writer.add_tensor, "w", NUMBERS)
        raises(TypeError, writer.set, "key", object())
    writer = GGUFWriter(target())
    ctx = filled()
    writer.add_tensor("w", ctx.w)  # type: ignore[attr-defined]
    ctx.close()
    raises(ValueError, writer.close)


def collected(cycle: Callable[[], object]) -> Callable[[], object]:
    """What is left in circles is collected now and then: it is large."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1
        cycle()
        if count % 100 == 0:
            gc.collect()

    return counted


OBJECTS = {
    "Context: close": lambda: filled().close(),
    "Context: close, without memory": lambda: Context().from_numpy(NUMBERS).context.close(),
    "Context: close, with views": context_with_views,
    "Context: forget": collected(context_in_a_circle),
    "Context: fail": context_that_cannot_be_filled,
    "Compiled: close": compiled_and_run,
    "Compiled: close, with a backend of its own": compiled_on_a_backend_of_its_own,
    "Compiled: close, on a meta device": compiled_on_meta,
    "Compiled: forget": collected(compiled_in_a_circle),
    "Compiled: fail": graphs_that_cannot_be_compiled,
    "Compiled: fail, in Python": custom_operation_that_fails,
    "Scheduler: close": scheduler_that_computes,
    "Scheduler: forget": collected(scheduler_in_a_circle),
    "Scheduler: fail": scheduler_that_fails,
    "GGUFFile: close": file_that_is_loaded,
    "GGUFFile: forget": collected(file_that_is_forgotten),
    "GGUFFile: fail": file_that_is_none,
    "GGUFWriter: close": file_that_is_written,
    "GGUFWriter: forget": collected(writer_that_is_forgotten),
    "GGUFWriter: fail": writer_that_fails,
    "Buffer: close": lambda: Buffer(buffer()).close(),
    "Buffer: forget": lambda: Buffer(buffer(), keep=(bytearray(10),)),
    "Buffer: fail": lambda: raises(ValueError, Buffer, None),
    "MultiBuffer: close": lambda: multi().close(),
    "MultiBuffer: forget": nested,
    "MultiBuffer: fail": buffer_named_twice,
    "Backend: close": lambda: S.device.init_backend(1).close(),
    "Backend: close, on a meta device": backend_on_meta,
    "Backend: forget": backend_forgotten,
    "Backend: fail": lambda: raises(ValueError, Backend, S.device, 0),
    "MetaDevice: fail": meta_devices_that_cannot_be,
    "Trainer: close": trainer_closed,
    "Trainer: forget": lambda: trainer() and None,
    "Trainer: fail": trainer_that_cannot_be,
}
