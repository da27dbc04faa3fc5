"""Gradients of graphs that ``ggml_build_backward_expand`` makes, against finite differences."""

from __future__ import annotations

import zlib

import _references as ref
import numpy as np
import pytest
from _compute import Arena
from op_table import CASES
from op_table.case import Case

from ggml_cffi import Context, capi, ops
from ggml_cffi.errors import AbortError, NotSupportedError
from ggml_cffi.training import SGD, Dataset, Trainer

#: What ggml can differentiate, by which of its operands.
DIFFERENTIABLE = {
    **dict.fromkeys(("dup", "sqr", "sqrt", "log", "sin", "cos", "sum", "sum_rows", "mean"), "a"),
    **dict.fromkeys(("abs", "sgn", "neg", "step", "relu", "silu", "exp", "expm1", "softplus"), "a"),
    **dict.fromkeys(("scale", "scale_bias", "cont", "permute", "transpose", "repeat"), "a"),
    **dict.fromkeys(("reshape_1d", "reshape_2d", "reshape_3d", "reshape_4d", "view_1d"), "a"),
    **dict.fromkeys(("cont_1d", "cont_2d", "view_2d", "view_4d", "repeat_4d", "repeat_back"), "a"),
    **dict.fromkeys(("rms_norm", "soft_max", "soft_max_ext", "cross_entropy_loss"), "a"),
    **dict.fromkeys(
        ("get_rows", "diag_mask_zero", "rope_ext", "rope", "rope_multi", "pool_2d"), "a"
    ),
    **dict.fromkeys(("add", "sub", "mul", "div", "acc", "set", "mul_mat", "swiglu_split"), "ab"),
    "im2col": "b",
}
TYPES = {"f32": capi.GGML_TYPE_F32, "i32": capi.GGML_TYPE_I32}
LARGEST = 600  # numbers of an operand: two evaluations each


def is_refused(case: Case, by: str) -> bool:
    """Whether ggml gives up: where an operand was repeated, and for stacks of rows."""
    a, b = case.operands.get("a"), case.operands.get("b")
    if case.op in ("sub", "div"):
        return by == "b" and a.shape != b.shape
    if case.op == "get_rows":
        return len(a.shape) > 2
    return case.op == "mul_mat" and by == "a" and len(a.shape) > 3 and a.shape[:2] != b.shape[:2]


def differentiated() -> list[tuple[Case, str]]:
    """The cases of these operations that are small and of float32 throughout."""
    found = []
    for case in CASES:
        operands = case.operands.values()
        if any(o.dtype not in ("f32", "i32") or o.size > LARGEST for o in operands):
            continue
        if case.arguments.get("max_bias") or int(case.arguments.get("dst_type", 0)):
            continue
        found += [(case, by) for by in DIFFERENTIABLE.get(case.op, "") if by in case.operands]
    return found


def gradient_of_ggml(backend, case, values, by, weights):
    """Of sum(operation * weights), by the operand `by`."""
    with Arena(backend) as arena:
        ctx = arena.context(8 << 20)
        tensors = {
            name: arena.tensor(*reversed(one.shape), type=TYPES[one.dtype], name=name, ctx=ctx)
            for name, one in case.operands.items()
        }
        capi.ggml_set_param(tensors[by])
        result = getattr(capi, f"ggml_{case.op}")(ctx, **tensors, **case.arguments)
        weight = capi.ggml_dup_tensor(ctx, result)
        loss = capi.ggml_sum(ctx, capi.ggml_mul(ctx, capi.ggml_cont(ctx, result), weight))
        capi.ggml_set_loss(loss)
        graph = capi.ggml_new_graph_custom(ctx, 512, True)
        capi.ggml_build_forward_expand(graph, loss)
        capi.ggml_build_backward_expand(ctx, graph, None)
        arena.allocate(ctx)
        for name, tensor in tensors.items():
            kind = np.float32 if case.operands[name].dtype == "f32" else np.int32
            capi.ggml_backend_tensor_set(tensor, np.ascontiguousarray(values[name], kind), 0)
        capi.ggml_backend_tensor_set(weight, np.ascontiguousarray(weights, np.float32), 0)
        capi.ggml_graph_reset(graph)
        capi.ggml_backend_graph_compute(backend, graph)
        gradient = capi.ggml_graph_get_grad(graph, tensors[by])
        if gradient is None:  # nothing depends on it, but for jumps
            return np.zeros(case.operands[by].shape)
        data = np.empty(capi.ggml_nbytes(gradient), np.uint8)
        capi.ggml_backend_tensor_get(gradient, data, 0)
        shape, strides = tuple(gradient.ne)[::-1], tuple(gradient.nb)[::-1]
        return np.ndarray(shape, np.float32, data, strides=strides).reshape(case.operands[by].shape)


@pytest.mark.parametrize(
    ("case", "by"), differentiated(), ids=lambda p: p.label[:70] if isinstance(p, Case) else p
)
def test_gradient(case, by, one_thread):
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    values = {name: one.numbers(rng) for name, one in case.operands.items()}
    values = {
        n: np.float32(v).astype(float) if v.dtype.kind == "f" else v for n, v in values.items()
    }
    value = np.asarray(case.reference(**values, **case.arguments))
    weights = np.float32(rng.uniform(-1, 1, value.shape)).astype(float)

    def function(x):
        return case.reference(**{**values, by: x}, **case.arguments)

    if is_refused(case, by):
        with pytest.raises(AbortError, match="GGML_ASSERT"):
            gradient_of_ggml(one_thread, case, values, by, weights)
        return
    found = gradient_of_ggml(one_thread, case, values, by, weights)
    expected = ref.gradient(function, values[by], weights)
    np.testing.assert_allclose(found, expected, 1e-3, 1e-4)


def test_gradients_of_all_that_is_listed():
    assert {case.op for case, _ in differentiated()} == set(DIFFERENTIABLE)


#: Graphs of a parameter p of ones and of x that write in place, and whether training is refused.
IN_PLACE = {
    "what a product has read": (lambda x, p: (s := 2 * x) * p + ops.sqr_inplace(s), True),
    "a view of that": (
        lambda x, p: (s := 2 * x) * p + ops.sum_rows(ops.sqr_inplace(s[:, 1:])),
        True,
    ),
    "an input that a product has read": (lambda x, p: x * p + ops.sqr_inplace(x), True),
    "what is copied over": (lambda x, p: (s := 2 * x) * p + ops.cpy(ops.sqr(x), s), True),
    "what a sum has read": (lambda x, p: (s := 2 * x) + p + ops.sqr_inplace(s), False),
    "before it is read": (lambda x, p: ops.sqr_inplace(2 * x) * p, False),
    "another part": (
        lambda x, p: (
            (s := ops.reshape_2d(ops.repeat_4d(2 * x, 3, 4, 1, 1), 3, 4))[:2] * p
            + ops.sqr_inplace(s[2:])
        ),
        False,
    ),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_gradients_of_what_is_written_over(what):
    """A gradient that would be computed from other numbers than the result was is refused."""
    make, is_refused = IN_PLACE[what]
    rng = np.random.default_rng(3)
    data = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    with Context() as ctx:
        x = ctx.input((2, 3), name="x")
        p = ctx.from_numpy(np.ones((1, 3), np.float32), name="p")
        y = make(x, p)
        ctx.allocate("CPU")

        def train():
            with Trainer(x, y, "sum", SGD(1.0), parameters=[p], n_threads=1) as trainer:
                trainer.fit(Dataset(data), progress=False)

        if is_refused:
            with pytest.raises(NotSupportedError, match=r"writes over .* a gradient is computed"):
                train()
            np.testing.assert_array_equal(p.numpy(), np.ones((1, 3)))
            return
        factor = {"what a sum has read": 1 + 0 * data, "another part": 2 * data}
        wanted = factor.get(what, (2 * data) ** 2).sum(0)
        train()
        # the loss is a sum over each batch, of one batch here
        np.testing.assert_allclose(1 - p.numpy()[0], wanted, 1e-5)


def test_a_graph_of_capi_that_is_written_over(one_thread):
    with Arena(one_thread) as arena:
        ctx = arena.context(1 << 20)
        p, x = arena.tensor(3, ctx=ctx), arena.tensor(3, ctx=ctx)
        capi.ggml_set_param(p)
        product = capi.ggml_mul(ctx, p, s := capi.ggml_sqr(ctx, x))
        loss = capi.ggml_sum(ctx, capi.ggml_add(ctx, product, capi.ggml_sqr_inplace(ctx, s)))
        capi.ggml_set_loss(loss)
        graph = capi.ggml_new_graph_custom(ctx, 512, True)
        capi.ggml_build_forward_expand(graph, loss)
        n = capi.ggml_graph_n_nodes(graph)
        with pytest.raises(
            ValueError, match=r"SQR .* writes over SQR 'node_\d+', which a gradient"
        ):
            capi.ggml_build_backward_expand(ctx, graph, None)
        assert capi.ggml_graph_n_nodes(graph) == n


@pytest.mark.filterwarnings("ignore:ggml_add1 is deprecated")
@pytest.mark.parametrize("shape", [(1, 4), (2, 3)])
def test_the_gradient_of_the_number_that_add1_adds_is_refused(shape):
    """ggml takes the mean of a row for the sum of all."""
    with Context() as ctx:
        x = ctx.input(shape, name="x")
        b = ctx.from_numpy(np.zeros(1, np.float32), name="b")
        y = ops.add1(x, b)
        ctx.allocate("CPU")
        with pytest.raises(NotSupportedError, match=r"'b' is a parameter, .* ADD adds as well"):
            Trainer(x, y, "sum", SGD())
        with Trainer(x, x + b, "sum", SGD(1.0), n_threads=1) as trainer:  # as it says
            trainer.fit(Dataset(np.zeros(shape, np.float32)), progress=False)
        np.testing.assert_allclose(b.numpy(), [-np.prod(shape)])


def test_the_gradient_of_a_view_of_infinite_numbers(one_thread):
    """That of what is not viewed is 0 times the numbers: ggml makes NaN of what is infinite."""
    with Arena(one_thread) as arena:
        ctx = arena.context(1 << 20)
        p, mask = arena.tensor(4, ctx=ctx), arena.tensor(4, ctx=ctx)
        capi.ggml_set_param(p)
        part = capi.ggml_view_1d(ctx, capi.ggml_add(ctx, p, mask), 2, 4)
        loss = capi.ggml_sum(ctx, capi.ggml_sqr(ctx, part))
        capi.ggml_set_loss(loss)
        graph = capi.ggml_new_graph_custom(ctx, 512, True)
        capi.ggml_build_forward_expand(graph, loss)
        capi.ggml_build_backward_expand(ctx, graph, None)
        arena.allocate(ctx)
        capi.ggml_backend_tensor_set(p, np.arange(4, dtype=np.float32), 0)
        capi.ggml_backend_tensor_set(mask, np.array([0, 0, 0, -np.inf], np.float32), 0)
        capi.ggml_graph_reset(graph)
        capi.ggml_backend_graph_compute(one_thread, graph)
        found = np.empty(4, np.float32)
        capi.ggml_backend_tensor_get(capi.ggml_graph_get_grad(graph, p), found, 0)
        # when the last is 0, the row in docs/limits.md can go
        np.testing.assert_array_equal(found, [0, 2, 4, np.nan])
