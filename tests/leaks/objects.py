"""Objects that own what they stand for: closed, forgotten, and not quite made."""

from __future__ import annotations

from ggml_cffi import Backend, Buffer, MetaDevice, MultiBuffer, capi

from .harness import raises
from .shared import S, buffer, split, weight


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
}
