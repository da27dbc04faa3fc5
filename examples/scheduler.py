"""A model split by layers over two backends: a GPU and a CPU, or two CPUs where there is no GPU."""

import mmap

import numpy as np

from ggml_cffi import Backend, Context, Graph, Scheduler, capi, device, devices, ffi, ops

LAYERS, WIDTH = 6, 64
rng = np.random.default_rng(0)
weights = [rng.standard_normal((WIDTH, WIDTH), np.float32) / 8 for _ in range(LAYERS)]
x = rng.standard_normal((5, WIDTH), np.float32)

cpu = device("CPU")
gpu = next((one for one in devices() if one.type.name.endswith("GPU")), None)


def mapped_memory():
    """The kind of memory that files are mapped in, for results on the first of two CPU backends.

    ggml takes backends whose results go into memory of one kind for one and the same.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        buffer = capi.ggml_backend_cpu_buffer_from_ptr(ffi.from_buffer(page), len(page))
        kind = capi.ggml_backend_buffer_get_type(buffer)
        capi.ggml_backend_buffer_free(buffer)
    return kind


with Backend(gpu or cpu) as first, Backend(cpu) as second, Context() as front, Context() as back:
    # each half of the weights lies where it is used
    layers = [(front if i < LAYERS // 2 else back).from_numpy(w) for i, w in enumerate(weights)]
    homes = {front: first, back: second}
    for ctx, backend in homes.items():
        ctx.allocate(backend)

    hidden, where = front.input(x.shape, name="x"), {}
    for i, weight in enumerate(layers):
        product = ops.mul_mat(weight, hidden)  # hidden @ weight.T
        hidden = ops.relu(product)
        product.name, hidden.name = f"product {i}", f"layer {i}"
        where |= {product: homes[weight.context], hidden: homes[weight.context]}

    kinds = None if gpu else [mapped_memory(), cpu.buffer_type()]
    with Scheduler([first, second], kinds) as scheduler:  # the last one is a CPU's
        graph = Graph(hidden)
        sizes = scheduler.reserve(graph, assign=where)
        model = graph.compile(scheduler, assign=where)
        for (name, results), size in zip(
            scheduler.assignment(model).items(), sizes.values(), strict=True
        ):
            print(f"{name}: {size} bytes for {', '.join(results)}")
        found = model(x=x)

wanted = x
for w in weights:
    wanted = np.maximum(wanted @ w.T, 0)
print("largest difference from NumPy:", np.abs(found - wanted).max())
