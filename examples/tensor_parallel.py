"""Two layers whose weights are spread over two devices, as a Python function says."""

import numpy as np

from ggml_cffi import MetaDevice, SplitState, capi

rng = np.random.default_rng(0)
x = rng.standard_normal((5, 64), np.float32)
w1 = rng.standard_normal((256, 64), np.float32)
w2 = rng.standard_normal((32, 256), np.float32)


def split(info, n_devs):
    """Give three quarters of each weight to the first device; asked for all in `ctx` below."""
    if info.name == "w1":  # column-parallel: each device makes its part of the hidden layer ...
        return SplitState.by_ratio(info, axis=1, ratios=[3, 1])
    if info.name == "w2":  # row-parallel: ... and one addend of the result; ggml adds them up
        return SplitState.by_ratio(info, axis=0, ratios=[3, 1])
    return SplitState.mirrored()


with MetaDevice(["CPU", "CPU"], split) as device, device.init_backend() as backend:
    ctx = capi.ggml_init(mem_size=100_000, no_alloc=True)
    tensors = []
    for name, array in {"x": x, "w1": w1, "w2": w2}.items():
        tensors.append(capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, *array.shape[::-1]))
        capi.ggml_set_name(tensors[-1], name)
    weights = capi.ggml_backend_alloc_ctx_tensors(ctx, backend.handle)
    capi.ggml_backend_buffer_set_usage(weights, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    for tensor, array in zip(tensors, (x, w1, w2), strict=True):
        capi.ggml_backend_tensor_set(tensor, array, 0)

    hidden = capi.ggml_relu(ctx, capi.ggml_mul_mat(ctx, tensors[1], tensors[0]))
    product = capi.ggml_mul_mat(ctx, tensors[2], hidden)
    result = capi.ggml_cont(ctx, product)  # a row-parallel product cannot be read itself
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, result)
    memory = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(backend.handle))
    capi.ggml_gallocr_alloc_graph(memory, graph)
    capi.ggml_backend_graph_compute(backend.handle, graph)
    got = np.empty((5, 32), np.float32)
    capi.ggml_backend_tensor_get(result, got, 0)

    capi.ggml_gallocr_free(memory)
    capi.ggml_backend_buffer_free(weights)
    capi.ggml_free(ctx)

assert device.error is None  # of split(): the first one is kept, and all further tensors mirrored
wanted = np.maximum(x @ w1.T, 0) @ w2.T
print("agrees with NumPy:", np.allclose(got, wanted, rtol=1e-4, atol=1e-2))
