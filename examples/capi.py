"""A matrix product through the C API: tensors, a graph, its memory, the result in NumPy."""

import numpy as np

from ggml_cffi import AbortError, capi

a = np.arange(12, dtype=np.float32).reshape(3, 4)
b = np.arange(8, dtype=np.float32).reshape(2, 4)

cpu = capi.ggml_backend_cpu_init()
ctx = capi.ggml_init(mem_size=100_000, no_alloc=True)  # for what describes tensors, not for data
ta = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 3)  # ggml: the innermost axis first
tb = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 2)
product = capi.ggml_mul_mat(ctx, ta, tb)  # b @ a.T
graph = capi.ggml_new_graph(ctx)
capi.ggml_build_forward_expand(graph, product)

memory = capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
capi.ggml_backend_tensor_set(ta, a, 0)
capi.ggml_backend_tensor_set(tb, b, 0)
capi.ggml_backend_graph_compute(cpu, graph)
result = np.empty((2, 3), np.float32)
capi.ggml_backend_tensor_get(product, result, 0)
print(result)
assert (result == b @ a.T).all()

try:
    capi.ggml_mul_mat(ctx, ta, product)  # shapes that do not fit: ggml would abort()
except AbortError as error:
    print("not allowed:", error.message.partition(": ")[2])

capi.ggml_backend_buffer_free(memory)
capi.ggml_free(ctx)
capi.ggml_backend_free(cpu)
