"""A linear layer with float32 weights and with quantised ones: their size and their error."""

import numpy as np

from ggml_cffi import Context, Graph

rng = np.random.default_rng(0)
w = rng.standard_normal((256, 512), np.float32)  # outputs by inputs, as PyTorch has it
b = rng.standard_normal(256, np.float32)
x = rng.standard_normal((10, 512), np.float32)
wanted = x @ w.T + b

print("type     bytes  error")
for dtype in ("f32", "f16", "q8_0", "q4_K", "q2_K"):
    with Context() as ctx:
        weight = ctx.from_numpy(w, name="weight", dtype=dtype)
        bias = ctx.from_numpy(b, name="bias")
        ctx.allocate("CPU")
        layer = Graph(ctx.input((10, 512), name="x") @ weight.T + bias).compile("CPU")
        found = layer(x=x)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        print(f"{dtype:5} {weight.nbytes:8} {error:6.1%}")
