"""Objects that own what they stand for: closed, forgotten, and not quite made."""

from __future__ import annotations

import numpy as np

from ggml_cffi import Backend, Buffer, Context, MetaDevice, MultiBuffer, capi
from ggml_cffi.training import AdamW, Dataset, Trainer

from .harness import raises
from .shared import Refused, S, buffer, refuse, split, weight


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

OBJECTS = {
    "Buffer: close": lambda: Buffer(buffer()).close(),
    "Buffer: forget": lambda: Buffer(buffer(), keep=(bytearray(10),)),
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
