"""An operation written in Python, on NumPy arrays, in the midst of a graph; and what it raises."""

import numpy as np

from ggml_cffi import Context, Graph, ops


def median(result, x, task, n_tasks):
    """The median of each row; called on each of ggml's threads, for a share of the rows."""
    if np.isnan(x).any():
        raise ValueError("a row with NaN has no median")
    rows = slice(task, None, n_tasks)
    result[rows] = np.median(x[rows], axis=1, keepdims=True)


with Context() as ctx:
    x = ctx.input((6, 101), name="x")
    middle = ops.custom(median, x, shape=(6, 1), n_tasks=None)  # as many as there are threads
    centred = x - middle
    run = Graph({"median": middle, "centred": centred}).compile("CPU", n_threads=2)

    data = np.random.default_rng(0).exponential(size=(6, 101)).astype(np.float32)
    found = run.run(x=data)
    print("medians:", *found["median"][:, 0].round(3))
    print("as NumPy has them:", np.array_equal(found["median"][:, 0], np.median(data, axis=1)))
    print("below and above:", (found["centred"] < 0).sum(1), (found["centred"] > 0).sum(1))

    data[3, 7] = np.nan
    try:
        run(x=data)
    except ValueError as error:
        print("it raised:", error)
