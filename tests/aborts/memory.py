"""Contexts, buffers, and the data of tensors."""

from __future__ import annotations

from _compute import F32

from ggml_cffi import capi, ffi

from ._site import ACCESS, ALLOC, site

Q4_0 = capi.GGML_TYPE_Q4_0

# ---- allocation


@site(ALLOC, "ggml_new_tensor_1d", "obj_new")
def context_that_is_full(arena):
    ctx = arena.context(1024)
    for _ in range(9):
        capi.ggml_new_tensor_1d(ctx, F32, 4)


@site(ALLOC, "ggml_backend_alloc_ctx_tensors", "ggml_get_no_alloc(ctx) == true")
def buffer_for_a_context_with_memory(arena):
    ctx = arena.context(no_alloc=False)
    arena.tensor(4, ctx=ctx)
    capi.ggml_backend_alloc_ctx_tensors(ctx, arena.backend)


@site(ALLOC, "ggml_tallocr_alloc", "not enough space in the buffer")
def buffer_that_is_full(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_tallocr_alloc(capi.ggml_tallocr_new(buffer), arena.tensor(1024))


@site(ALLOC, "ggml_backend_tensor_alloc", "tensor->buffer == NULL")
def tensor_that_has_its_memory(arena):
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_alloc(tensor.buffer, tensor, tensor.data)


@site(ALLOC, "ggml_backend_tensor_alloc", "ggml_backend_buffer_get_size(buffer)")
def address_behind_the_buffer(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    base = ffi.cast("char *", capi.ggml_backend_buffer_get_base(buffer))
    capi.ggml_backend_tensor_alloc(buffer, arena.tensor(4), base + 4096)


@site(ALLOC, "ggml_backend_tensor_alloc", "addr >= ")
def address_before_the_buffer(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_backend_tensor_alloc(buffer, arena.tensor(4), ffi.cast("void *", 64))


@site(ALLOC, "ggml_backend_cpu_buffer_from_ptr", "buffer pointer must be aligned")
def memory_that_is_not_aligned(arena):
    memory = ffi.new("char[4096]")
    aligned = memory + (-int(ffi.cast("uintptr_t", memory)) % 64)
    capi.ggml_backend_cpu_buffer_from_ptr(aligned + 1, 1024)


@site(ALLOC, "ggml_backend_multi_buffer_set_usage", "ggml_backend_buffer_is_multi_buffer(buffer)")
def usage_of_the_parts_of_a_plain_buffer(arena):
    buffer = arena.weight(4).buffer
    capi.ggml_backend_multi_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)


# ---- reads and writes


@site(ACCESS, "ggml_backend_tensor_set", "tensor write out of bounds")
def write_behind_the_end(arena):
    capi.ggml_backend_tensor_set(arena.weight(4), bytes(16), 4)


@site(ACCESS, "ggml_backend_tensor_get", "tensor read out of bounds")
def read_behind_the_end(arena):
    capi.ggml_backend_tensor_get(arena.weight(4), bytearray(17), 0)


@site(ACCESS, "ggml_backend_tensor_memset", "tensor write out of bounds")
def fill_behind_the_end(arena):
    capi.ggml_backend_tensor_memset(arena.weight(4), 0, 12, 8)


@site(ACCESS, "ggml_backend_tensor_set_async", "tensor write out of bounds")
def asynchronous_write_behind_the_end(arena):
    capi.ggml_backend_tensor_set_async(arena.backend, arena.weight(4), bytes(20), 0)


@site(ACCESS, "ggml_backend_tensor_get_async", "tensor read out of bounds")
def asynchronous_read_behind_the_end(arena):
    capi.ggml_backend_tensor_get_async(arena.backend, arena.weight(4), bytearray(20), 0)


@site(ACCESS, "ggml_backend_tensor_set", "tensor buffer not set")
def write_without_memory(arena):
    capi.ggml_backend_tensor_set(arena.tensor(4), bytes(16), 0)


@site(ACCESS, "ggml_backend_tensor_get", "tensor buffer not set")
def read_without_memory(arena):
    capi.ggml_backend_tensor_get(arena.tensor(4), bytearray(16), 0)


@site(ACCESS, "ggml_backend_tensor_copy", "cannot copy tensors with different layouts")
def copy_to_another_layout(arena):
    capi.ggml_backend_tensor_copy(arena.weight(4), arena.weight(5))


@site(ACCESS, "ggml_get_f32_1d", "fatal error")
def element_of_a_quantized_tensor(arena):
    capi.ggml_get_f32_1d(arena.weight(32, type=Q4_0), 0)
