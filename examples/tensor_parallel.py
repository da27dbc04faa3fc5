"""A two-layer network, spread over two devices as a Python function says."""

import numpy as np

from ggml_cffi import Context, Graph, MetaDevice, SplitState, ops

rng = np.random.default_rng(0)
x = rng.standard_normal((5, 64), np.float32)
w1 = rng.standard_normal((256, 64), np.float32)
w2 = rng.standard_normal((32, 256), np.float32)


def split(info, n_devs):
    """Give three quarters of each weight to the first device."""
    if info.name == "w1":  # column-parallel: each device makes its part of the hidden layer ...
        return SplitState.by_ratio(info, axis=1, ratios=[3, 1])
    if info.name == "w2":  # row-parallel: ... and one addend of the result; ggml adds them up
        return SplitState.by_ratio(info, axis=0, ratios=[3, 1])
    return SplitState.mirrored()


with MetaDevice(["CPU", "CPU"], split) as device, Context() as ctx:
    up, down = ctx.from_numpy(w1, name="w1"), ctx.from_numpy(w2, name="w2")
    ctx.allocate(device)  # asks split() about each of them
    hidden = ops.relu(ctx.input((5, 64), name="x") @ up.T)
    network = Graph(hidden @ down.T).compile(device)
    got = network(x=x)

assert device.error is None  # of split(): the first one is kept, and all further tensors mirrored
wanted = np.maximum(x @ w1.T, 0) @ w2.T
print("agrees with NumPy:", np.allclose(got, wanted, rtol=1e-4, atol=1e-2))
