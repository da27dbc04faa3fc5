"""Gradients of graphs that ``ggml_build_backward_expand`` makes, against finite differences."""

from __future__ import annotations

import zlib

import _references as ref
import numpy as np
import pytest
from _compute import Arena
from op_table import CASES
from op_table.case import Case

from ggml_cffi import capi
from ggml_cffi.errors import AbortError

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
