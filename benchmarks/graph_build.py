"""Building the graph of a transformer: through objects, capi, C and ggml-python (ctypes).

    python -m benchmarks.graph_build [--rounds N] [--layers N] [--json] [--check]
                                     [--without-ggml-python]

32 layers are about 1,200 tensors, 932 of them nodes. Each subject makes a context, the weights and
inputs in it, the operations, and puts the nodes in order, which are counted in the end; then all is
given up. The C is compiled on the spot (graph_build.c) and linked to the very libraries that
ggml_cffi runs on; ggml-python brings a ggml of its own. Time is the thread's own CPU time, a ratio
that of two subjects of one round.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from ggml_cffi import Context, Graph, Tensor, capi, ops

LAYERS = 32
WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY, TOKENS = 64, 4, 16, 192, 256, 8  # as in graph_build.c
F32, I32 = 0, 26
PASSES = 5

#: Of medians.
MOST = {("objects", "ggml-python"): 1.0, ("capi", "ggml-python"): 0.6}


def build_objects(n_layers: int) -> int:
    """Through objects; gives the number of nodes, as the others do."""
    ctx = Context()
    tensor = ctx.tensor

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return ops.mul(ops.rms_norm(x, 1e-6), weight)

    def heads(weight: Tensor, x: Tensor) -> Tensor:
        return ops.reshape_3d(ops.mul_mat(weight, x), HEAD, HEADS, TOKENS)

    def rope(x: Tensor) -> Tensor:
        return ops.rope_ext(x, positions, n_dims=HEAD)  # the rest is what the others are given

    tokens = ctx.input((TOKENS,), "i32", "tokens")
    positions = ctx.input((TOKENS,), "i32", "positions")
    mask = ctx.input((TOKENS, TOKENS), "f32", "mask")
    embedding = tensor((VOCABULARY, WIDTH))
    output_norm = tensor((WIDTH,))
    x = ops.get_rows(embedding, tokens)
    for _ in range(n_layers):
        attn_norm = tensor((WIDTH,))
        wq, wk = tensor((WIDTH, WIDTH)), tensor((WIDTH, WIDTH))
        wv, wo = tensor((WIDTH, WIDTH)), tensor((WIDTH, WIDTH))
        ffn_norm = tensor((WIDTH,))
        gate, up = tensor((HIDDEN, WIDTH)), tensor((HIDDEN, WIDTH))
        down = tensor((WIDTH, HIDDEN))

        h = norm(x, attn_norm)
        q = ops.permute(rope(heads(wq, h)), 0, 2, 1, 3)
        k = ops.permute(rope(heads(wk, h)), 0, 2, 1, 3)
        v = ops.cont(ops.permute(heads(wv, h), 1, 2, 0, 3))
        scores = ops.soft_max_ext(ops.mul_mat(k, q), mask, 0.25, 0.0)
        mixed = ops.permute(ops.mul_mat(v, scores), 0, 2, 1, 3)
        x = ops.add(x, ops.mul_mat(wo, ops.cont_2d(mixed, WIDTH, TOKENS)))
        h = norm(x, ffn_norm)
        hidden = ops.mul(ops.silu(ops.mul_mat(gate, h)), ops.mul_mat(up, h))
        x = ops.add(x, ops.mul_mat(down, hidden))
    x = ops.mul_mat(embedding, norm(x, output_norm))
    n_nodes = Graph(x).n_nodes
    ctx.close()
    return n_nodes


def build_raw(n_layers: int, ggml: Any, init: Callable[[int], Any], encode: Any) -> int:
    """Through functions under their C names: those of capi or of ggml-python."""
    n = 8 + 48 * n_layers
    ctx = init(n * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(n, False))
    new_1d, new_2d = ggml.ggml_new_tensor_1d, ggml.ggml_new_tensor_2d

    def norm(x: Any, weight: Any) -> Any:
        return ggml.ggml_mul(ctx, ggml.ggml_rms_norm(ctx, x, 1e-6), weight)

    def heads(weight: Any, x: Any) -> Any:
        return ggml.ggml_reshape_3d(ctx, ggml.ggml_mul_mat(ctx, weight, x), HEAD, HEADS, TOKENS)

    def rope(x: Any) -> Any:
        return ggml.ggml_rope_ext(
            ctx, x, positions, None, HEAD, 0, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0
        )

    tokens, positions = new_1d(ctx, I32, TOKENS), new_1d(ctx, I32, TOKENS)
    mask = new_2d(ctx, F32, TOKENS, TOKENS)
    for one, name in ((tokens, "tokens"), (positions, "positions"), (mask, "mask")):
        ggml.ggml_set_name(one, encode(name))
    embedding = new_2d(ctx, F32, WIDTH, VOCABULARY)
    output_norm = new_1d(ctx, F32, WIDTH)
    x = ggml.ggml_get_rows(ctx, embedding, tokens)
    for _ in range(n_layers):
        attn_norm = new_1d(ctx, F32, WIDTH)
        wq, wk = new_2d(ctx, F32, WIDTH, WIDTH), new_2d(ctx, F32, WIDTH, WIDTH)
        wv, wo = new_2d(ctx, F32, WIDTH, WIDTH), new_2d(ctx, F32, WIDTH, WIDTH)
        ffn_norm = new_1d(ctx, F32, WIDTH)
        gate, up = new_2d(ctx, F32, WIDTH, HIDDEN), new_2d(ctx, F32, WIDTH, HIDDEN)
        down = new_2d(ctx, F32, HIDDEN, WIDTH)

        h = norm(x, attn_norm)
        q = ggml.ggml_permute(ctx, rope(heads(wq, h)), 0, 2, 1, 3)
        k = ggml.ggml_permute(ctx, rope(heads(wk, h)), 0, 2, 1, 3)
        v = ggml.ggml_cont(ctx, ggml.ggml_permute(ctx, heads(wv, h), 1, 2, 0, 3))
        scores = ggml.ggml_soft_max_ext(ctx, ggml.ggml_mul_mat(ctx, k, q), mask, 0.25, 0.0)
        mixed = ggml.ggml_permute(ctx, ggml.ggml_mul_mat(ctx, v, scores), 0, 2, 1, 3)
        packed = ggml.ggml_cont_2d(ctx, mixed, WIDTH, TOKENS)
        x = ggml.ggml_add(ctx, x, ggml.ggml_mul_mat(ctx, wo, packed))
        h = norm(x, ffn_norm)
        gated = ggml.ggml_silu(ctx, ggml.ggml_mul_mat(ctx, gate, h))
        hidden = ggml.ggml_mul(ctx, gated, ggml.ggml_mul_mat(ctx, up, h))
        x = ggml.ggml_add(ctx, x, ggml.ggml_mul_mat(ctx, down, hidden))
    x = ggml.ggml_mul_mat(ctx, embedding, norm(x, output_norm))
    graph = ggml.ggml_new_graph_custom(ctx, n, False)
    ggml.ggml_build_forward_expand(graph, x)
    n_nodes: int = ggml.ggml_graph_n_nodes(graph)
    ggml.ggml_free(ctx)
    return n_nodes


def build_capi(n_layers: int) -> int:
    """Through capi."""
    return build_raw(n_layers, capi, lambda n: capi.ggml_init(mem_size=n, no_alloc=True), str)


def build_ggml_python(ggml: Any, n_layers: int) -> int:
    """Through ggml-python."""

    def init(size: int) -> Any:
        params = ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True)
        return ggml.ggml_init(params)

    return build_raw(n_layers, ggml, init, str.encode)


def subjects(folder: Path, n_layers: int, other: Any = None) -> dict[str, Callable[[], float]]:
    """What is measured; all make the same number of nodes, which is checked."""
    native = common.build_extension(folder, "_graph_build", "graph_build")
    count = native.ffi.new("int64_t *")
    found: dict[str, Callable[[], float]] = {
        "C": lambda: native.lib.build_transformer(n_layers, count),
        "objects": common.cpu(lambda: build_objects(n_layers)),
        "capi": common.cpu(lambda: build_capi(n_layers)),
    }
    found["C"]()
    made = [build_objects(n_layers), build_capi(n_layers)]
    if other is not None:
        found["ggml-python"] = common.cpu(lambda: build_ggml_python(other, n_layers))
        made.append(build_ggml_python(other, n_layers))
    if set(made) != {count[0]}:
        raise RuntimeError(f"the subjects made {made} nodes and C {count[0]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and tell whether the limits hold."""
    parser = common.parser(__doc__, 20)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--without-ggml-python", action="store_true", help="leave it out")
    options = parser.parse_args(arguments)
    other = None if options.without_ggml_python else importlib.import_module("ggml.ggml")
    with tempfile.TemporaryDirectory() as folder:
        measured = subjects(Path(folder), options.layers, other)
        rounds = common.measure(measured, options.rounds, PASSES)
    pairs = [("objects", "C"), ("capi", "C"), ("objects", "capi")]
    if other is not None:
        pairs += [("objects", "ggml-python"), ("capi", "ggml-python")]
    found = {pair: rounds.ratio(*pair) for pair in pairs}
    limits = [
        common.Limit(" / ".join(pair), found[pair], most=most)
        for pair, most in MOST.items()
        if pair in found
    ]
    title = f"a transformer of {options.layers} layers: how many times as long it takes to build"
    return common.report(title, {" / ".join(p): one for p, one in found.items()}, limits, options)


if __name__ == "__main__":
    sys.exit(main())
