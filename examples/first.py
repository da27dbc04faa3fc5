"""A small layer through objects: weights, an input, a graph that is compiled once and run twice."""

import numpy as np

from ggml_cffi import Context, Graph, OperandError, ops

a = np.arange(12, dtype=np.float32).reshape(3, 4)
b = np.arange(8, dtype=np.float32).reshape(2, 4)

with Context() as ctx:
    weight = ctx.from_numpy(a, name="weight")
    ctx.allocate("CPU")  # memory on a device, with the numbers in it
    x = ctx.input((2, 4), name="x")  # given at each run
    y = ops.relu(x @ weight.T - 20)  # to be computed: nothing is yet

    layer = Graph(y).compile("CPU")
    print(layer(x=b))
    print(layer(x=-b))
    assert (layer(x=b) == np.maximum(b @ a.T - 20, 0)).all()

    try:
        ops.mul_mat(weight, y)  # shapes that do not fit: ggml would abort()
    except OperandError as error:
        print("not allowed:", error.message.partition(": ")[0])
