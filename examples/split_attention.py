"""Attention with grouped queries, split between heads: each device computes some of them whole."""

import numpy as np

from ggml_cffi import Context, Graph, MetaDevice, ops
from ggml_cffi.meta import compare, policies

HEADS, KV_HEADS, LENGTH, TOKENS = 8, 4, 32, 16
WIDTH = HEADS * LENGTH

rng = np.random.default_rng(0)
weights = {
    "wq": rng.standard_normal((WIDTH, WIDTH), np.float32) / 16,
    "wk": rng.standard_normal((KV_HEADS * LENGTH, WIDTH), np.float32) / 16,
    "wv": rng.standard_normal((KV_HEADS * LENGTH, WIDTH), np.float32) / 16,
    "wo": rng.standard_normal((WIDTH, WIDTH), np.float32) / 16,
}

# All are cut at the same places: between KV heads, with the query heads that belong to each.
rules = policies.Rules(
    [
        policies.Rule("wq|wk|wv", policies.Column("heads")),
        policies.Rule("wo", policies.Row("heads")),
    ],
    ratios=[3, 1],
    groups={"heads": policies.Group(WIDTH, granularity=HEADS // KV_HEADS * LENGTH)},
)


def attention(ctx, w):
    """The graph; heads that are cut have to be computed by flash_attn_ext."""
    x = ctx.input((TOKENS, WIDTH), name="x")
    mask = ctx.input((TOKENS, TOKENS), "f16", name="mask")

    def heads(name, n):  # from rows of tokens to heads of tokens
        return ops.permute(ops.reshape_3d(x @ w[name].T, LENGTH, n, TOKENS), 0, 2, 1, 3)

    q, k, v = heads("wq", HEADS), heads("wk", KV_HEADS), heads("wv", KV_HEADS)
    y = ops.flash_attn_ext(q, k, v, mask, scale=LENGTH**-0.5)
    return ops.reshape_2d(y, WIDTH, TOKENS) @ w["wo"].T


with MetaDevice(["CPU", "CPU"], rules, on_error="raise") as device, Context() as ctx:
    held = {name: ctx.from_numpy(array, name) for name, array in weights.items()}
    ctx.allocate(device)
    graph = Graph(attention(ctx, held))
    plan = device.plan(graph)
    for name in held:
        print(name, plan[name].split, plan[name].shapes)
    print("sums over the devices:", len(plan.all_reduces))

    causal = np.triu(np.full((TOKENS, TOKENS), -np.inf, np.float16), 1)
    x = rng.standard_normal((TOKENS, WIDTH), np.float32)
    found = compare(graph, device, inputs={"x": x, "mask": causal})
    print("agrees with one device:", found.agrees)
    y = graph.compile(device)(x=x, mask=causal)
    print("result:", y.shape)
