// Functions that ggml exports but declares only in its private headers. One that a release lacks is
// simply not bound.
#ifndef GGML_CFFI_SUPPLEMENT_H
#define GGML_CFFI_SUPPLEMENT_H

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// A buffer that consists of others. It owns them from then on and frees them with itself; its
// size is their sum, its type, host flag and alignment are those of the first. No tensor can be
// allocated in it.
ggml_backend_buffer_t ggml_backend_multi_buffer_alloc_buffer(ggml_backend_buffer_t * buffers, size_t n_buffers);

// Whether a buffer was made by ggml_backend_multi_buffer_alloc_buffer (ggml itself makes one where
// an allocation exceeds the largest buffer of a device).
bool ggml_backend_buffer_is_multi_buffer(ggml_backend_buffer_t buffer);

// Sets the usage of the buffers inside a multi buffer, but not of the multi buffer itself.
void ggml_backend_multi_buffer_set_usage(ggml_backend_buffer_t buffer, enum ggml_backend_buffer_usage usage);

// Whether a backend, a buffer or a buffer type belongs to a meta device.
bool ggml_backend_is_meta(ggml_backend_t backend);
bool ggml_backend_buffer_is_meta(ggml_backend_buffer_t buf);
bool ggml_backend_buft_is_meta(ggml_backend_buffer_type_t buft);

// The backends that a meta backend drives, one for each of its devices, in their order.
size_t ggml_backend_meta_n_backends(ggml_backend_t meta_backend);
ggml_backend_t ggml_backend_meta_simple_backend(ggml_backend_t meta_backend, size_t index);

// What ggml_backend_alloc_ctx_tensors_from_buft does for the buffer type of a meta device.
struct ggml_backend_buffer * ggml_backend_meta_alloc_ctx_tensors_from_buft(struct ggml_context * ctx, ggml_backend_buffer_type_t buft);

// Whether the graph allocator may let an operation write over its first source.
bool ggml_op_can_inplace(enum ggml_op op);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // GGML_CFFI_SUPPLEMENT_H
