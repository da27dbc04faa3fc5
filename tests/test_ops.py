"""Every operation that the CPU computes, with real numbers, against NumPy."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import _backends
import _references as ref
import _release
import numpy as np
import pytest
from op_table import CASES, WITHOUT_REFERENCE

from ggml_cffi import MetaDevice, SplitState, capi, device, enums, ops, quants
from ggml_cffi.context import Context
from ggml_cffi.dtypes import element_type, is_quantized, type_name
from ggml_cffi.errors import OperandError
from ggml_cffi.graph import Graph

CPU = device("CPU")
#: One case of each operation, which two threads compute as well.
LARGEST = {
    max((c for c in CASES if c.op == op), key=lambda c: sum(o.size for o in c.operands.values()))
    for op in {c.op for c in CASES}
}


def as_held(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that a tensor of this type has when it is given these."""
    if is_quantized(element_type(dtype)):
        return quants.dequantize(quants.quantize(np.float32(numbers), dtype), dtype).astype(float)
    if dtype == "bf16":
        import ml_dtypes

        return numbers.astype(ml_dtypes.bfloat16).astype(float)
    if dtype in ("f32", "f16"):
        return numbers.astype(dtype.replace("32", "4").replace("16", "2")).astype(float)
    return numbers


def four(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label[:80])
def test_against_numpy(case, target):
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    given = {name: one.numbers(rng) for name, one in case.operands.items()}
    held = {name: as_held(given[name], one.dtype) for name, one in case.operands.items()}
    ctx = Context()
    tensors = {
        name: ctx.input(one.shape, one.dtype, name=name) for name, one in case.operands.items()
    }
    for name in case.parameters:
        capi.ggml_set_param(tensors[name].handle)
    call = dict(case.arguments) if tensors else {**case.arguments, "ctx": ctx}
    operation = getattr(ops, case.op)
    with pytest.deprecated_call() if "Deprecated" in operation.__doc__ else nullcontext():
        result = operation(**tensors, **call)
    expected = np.asarray(case.reference(**held, **case.arguments))
    graph = Graph(result)
    inputs = {t.name: given[t.name] for t in graph.inputs}
    _backends.require_support(target, graph.nodes)
    rtol, atol = (_backends.KIND.slack * error for error in (case.rtol, case.atol))
    if _backends.KIND.on_gpu:
        rtol, atol = map(max, (rtol, atol), case.error_on_gpu)
    for n_threads in (1, 2) if case in LARGEST else (1,):
        with _backends.refusing(case.op), graph.compile(target, n_threads) as compiled:
            for _ in range(2):  # what works in place must not spoil the next run
                found = compiled(**inputs)
                assert four(found).shape == four(expected).shape
                if case.unordered:
                    found, expected = np.sort(found), np.sort(expected)
                np.testing.assert_allclose(four(found).astype(float), four(expected), rtol, atol)


def test_every_operation_is_in_the_table_or_is_named_without_reference(capsys):
    tested = {case.op for case in CASES}
    with capsys.disabled():
        print(f"\n{len(tested)} operations against NumPy: {', '.join(sorted(tested))}")
        for name, why in WITHOUT_REFERENCE.items():
            print(f"without reference: {name} ({why})")
    assert not tested & set(WITHOUT_REFERENCE)
    assert tested | set(WITHOUT_REFERENCE) == set(ops.__all__)
    assert len(tested) >= 90


# ---- what is set of a result: a precision, sinks


def prepared(ctx: Context, **arrays: np.ndarray) -> list[Any]:
    made = [ctx.from_numpy(array, name) for name, array in arrays.items()]
    ctx.allocate(CPU)
    return made


def with_sinks(scores: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, and over one score more for each head, which is left out."""
    more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return ref.soft_max(np.concatenate([scores, more], -1))[..., :-1]


@_release.needs("ggml_flash_attn_ext_add_sinks", "ggml_soft_max_add_sinks")
@pytest.mark.parametrize(
    ("operation", "devices"), [("soft_max", 1), ("soft_max_ext", 1), ("flash", 1), ("flash", 2)]
)
def test_attention_with_sinks(operation, devices):
    """The sinks of another context, too, which then stays open; in parts on a meta device."""
    if devices > 1:
        _release.require("ggml_backend_meta_device")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((4, n, 32), np.float32) for n in (6, 5, 5))
    sinks = rng.standard_normal(4).astype(np.float32)
    model, ctx = Context(), Context()
    s = model.from_numpy(sinks, "sinks")
    tensors = [ctx.from_numpy(a, name) for name, a in (("q", q), ("k", k), ("v", v))]
    tensors.append(ctx.from_numpy(np.zeros((6, 5), np.float16), "mask"))
    if devices > 1:
        split = {name: SplitState.split(2, [2, 2]) for name in "qkv"}
        split |= {"sinks": SplitState.split(0, [2, 2]), "mask": SplitState.mirrored()}
        target = MetaDevice([device("CPU")] * 2, lambda tensor, _: split[tensor.name], "raise")
    else:
        target = device("CPU")
    for one in (ctx, model):
        one.allocate(target)
    wanted = with_sinks(0.2 * (q @ k.swapaxes(-1, -2)), sinks)
    if operation == "flash":
        result = ops.flash_attn_ext(*tensors, scale=0.2, sinks=s)
        wanted = (wanted @ v).swapaxes(0, 1)
    else:
        scores = ops.mul_mat(tensors[1], tensors[0])
        if operation == "soft_max":
            result = ops.soft_max(ops.scale(scores, 0.2), sinks=s)
        else:
            result = ops.soft_max_ext(scores, scale=0.2, sinks=s)
    assert result.context is ctx
    with Graph(result).compile(target) as compiled:
        np.testing.assert_allclose(compiled().reshape(wanted.shape), wanted, rtol=2e-2, atol=2e-3)
    model.close()
    assert ctx.closed  # which needed it


@_release.needs("ggml_soft_max_add_sinks")
def test_sinks_that_do_not_fit():
    ctx = Context()
    scores, sinks, three = prepared(
        ctx, scores=np.ones((4, 2, 8), np.float32), sinks=np.ones(4, np.float32),
        three=np.ones(3, np.float32),
    )  # fmt: skip
    with pytest.raises(OperandError, match=r"a 'scores' is f32 .* sinks 'three' is f32 .* \(3,\)"):
        ops.soft_max(scores, sinks=three)
    with pytest.raises((TypeError, ValueError), match="sinks"):
        ops.soft_max(scores, sinks=np.ones(4, np.float32))
    other = Context()
    closed = other.tensor(4)
    other.close()
    with pytest.raises(ValueError, match="closed"):
        ops.soft_max(scores, sinks=closed)
    result = ops.soft_max(scores, sinks=sinks)
    with pytest.raises(ValueError, match="not made of the result"):
        capi.ggml_soft_max_add_sinks(result.handle, result.handle)
    capi.ggml_soft_max_add_sinks(result.handle, None)
    own = ops.reshape_1d(ops.sum_rows(ops.cont(result[:, 0])), 4)
    with pytest.raises(ValueError, match="not made of the result"):
        capi.ggml_soft_max_add_sinks(result.handle, own.handle)
    with pytest.raises(ValueError, match=r"requires a->op == GGML_OP_SOFT_MAX"):
        capi.ggml_soft_max_add_sinks(ops.neg(scores).handle, None)
    ctx.close()
    with pytest.raises(ValueError, match="Context is closed"):
        ops.soft_max(scores, sinks=sinks)


def test_precision_of_products():
    rng = np.random.default_rng(4)
    w, x = (rng.standard_normal((n, 64), np.float32) for n in (5, 3))
    ctx, most = Context(), enums.ggml_prec.GGML_PREC_F32
    w_, x_ = prepared(ctx, w=w, x=x)
    exact = ops.mul_mat(w_, x_, prec=most)
    assert exact.handle.op_params[0] == most
    assert ops.mul_mat(w_, x_).handle.op_params[0] == enums.ggml_prec.GGML_PREC_DEFAULT
    q, k, v = (ctx.tensor((2, n, 32), "f16" if n == 4 else "f32") for n in (3, 4, 4))
    attention = ops.flash_attn_ext(q, k, v, scale=1.0, prec=most)
    assert capi.ggml_flash_attn_ext_get_prec(attention.handle) == most
    with Graph(exact).compile(CPU) as compiled:
        np.testing.assert_allclose(compiled(), x @ w.T, rtol=1e-4, atol=1e-4)
    with pytest.raises((TypeError, ValueError), match="prec"):
        ops.mul_mat(w_, x_, prec=77)


@_release.needs("ggml_mul_mat_set_hint")
def test_hint_of_products():
    ctx, hint = Context(), max(enums.ggml_op_hint)
    product = ops.mul_mat(ctx.tensor((5, 64)), ctx.tensor((3, 64)), hint=hint)
    assert product.handle.op_params[1] == hint


def test_cast_which_ggml_makes_an_operand_of_itself():
    ctx = Context()
    x = ctx.input((3,), name="x")
    again = ops.cast(ops.cast(x, element_type("f16")), element_type("f32"))
    with Graph(ops.scale(again, 2.0)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(x=np.float32([1, 2, 3])), [2, 4, 6])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda a: ops.reshape_2d(a, 12, 2), (2, 12)),
        (lambda a: ops.cont_4d(a, 12, 2, 1, 1), (1, 1, 2, 12)),
        (lambda a: ops.view_1d(a, 5), (5,)),
        (lambda a: ops.pool_1d(a, 0, 2, 2), (2, 3, 2)),
        (lambda a: ops.pad_reflect_1d(a, 1, 1), (2, 3, 6)),
        (lambda a: ops.set_1d(a, a.context.tensor((2,)), 0), (2, 3, 4)),
        (lambda a: ops.sum_rows(a), (2, 3, 1)),
        (lambda a: ops.sum(a), (1, 1, 1)),
        (lambda a: ops.get_rows(a.context.tensor((9, 4)), a.context.tensor((1,), "i32")), (1, 4)),
        (lambda a: ops.interpolate(a, 8, 6, 2, 1), (1, 2, 6, 8)),
    ],
)
def test_axes_of_the_result(make, shape):
    """As many as are asked for by ne0, ne1 and so on, else as many as the operands have."""
    assert make(Context().tensor((2, 3, 4))).shape == shape


A, B = np.float32(np.arange(24).reshape(2, 3, 4) % 7), np.float32(np.arange(12).reshape(3, 4) % 5)
IMAGE, KERNEL = A.reshape(1, 2, 3, 4), np.float16(np.arange(16).reshape(2, 2, 2, 2))
QKV = {
    name: np.float32(np.arange(64).reshape(1, 1, 2, 32) % n)
    for name, n in zip("qkv", (3, 5, 7), strict=True)
}


@pytest.mark.parametrize(
    ("make", "inputs", "expected"),
    [
        (lambda a: ops.norm(a), {"a": A}, ref.norm(A, 1e-5)),
        (lambda a: ops.rms_norm(a), {"a": A}, ref.rms_norm(A, 1e-5)),
        (lambda a: ops.l2_norm(a), {"a": A}, ref.l2_norm(A, 1e-12)),
        (lambda a: ops.group_norm(a, 2), {"a": A}, ref.group_norm(A, 2, 1e-6)),
        (lambda a: ops.soft_max_ext(a), {"a": A}, ref.soft_max(A)),
        (lambda a: ops.soft_max_ext(a, scale=0.5), {"a": A}, ref.soft_max(A * 0.5)),
        (lambda a: ops.argsort(a), {"a": B[:1, :4]}, np.argsort(B[:1, :4])),
        (lambda a: ops.diag_mask_zero(a), {"a": B}, np.tril(B)),
        (lambda a: ops.pad(a, p1=2), {"a": B}, np.pad(B, ((0, 2), (0, 0)))),
        (lambda a: ops.roll(a, shift1=1), {"a": B}, np.roll(B, 1, 0)),
        (lambda a: ops.view_1d(a, 5), {"a": B}, B.ravel()[:5]),
        (lambda a: ops.leaky_relu(a, 0.1), {"a": B - 2}, np.where(B > 2, B - 2, 0.1 * (B - 2))),
        (lambda a: ops.upscale(a, 2), {"a": B}, B.repeat(2, 0).repeat(2, 1)),
        (
            lambda a, p: ops.rope_ext(a, p, n_dims=4),
            {"a": A, "p": np.arange(2)},
            ref.rope(A, np.arange(2), n_dims=4),
        ),
        (
            lambda x, k: ops.conv_2d(k, x),
            {"x": IMAGE, "k": KERNEL},
            ref.conv(IMAGE, KERNEL, [1, 1], [0, 0], [1, 1]),
        ),
        (
            lambda q, k, v: ops.flash_attn_ext(q, k, v, scale=0.1),
            QKV,
            ref.flash_attn_ext(**QKV, scale=0.1),
        ),
    ],
)
def test_defaults(make, inputs, expected):
    ctx = Context()
    dtypes = {np.dtype(np.int64): "i32"}
    tensors = [ctx.input(x.shape, dtypes.get(x.dtype, x.dtype), name=n) for n, x in inputs.items()]
    with Graph(make(*tensors)).compile(CPU, 1) as compiled:
        found = compiled(**inputs)
    np.testing.assert_allclose(four(found), four(np.asarray(expected)), 1e-2, 1e-5)


def test_what_has_no_default_behind_one_that_has_is_given_by_keyword():
    ctx = Context()
    x = ctx.tensor((1, 2, 4))
    with pytest.raises(TypeError, match="n_dims"):
        ops.rope_ext(x, ctx.tensor((1,), "i32"))
    with pytest.raises(TypeError, match="positional"):
        ops.rope_ext(x, ctx.tensor((1,), "i32"), None, 4)


MISFITS = {
    "mul_mat": lambda a, b: ops.mul_mat(a, b),
    "add": lambda a, b: ops.add(a, b),
    "concat": lambda a, b: ops.concat(a, b, 0),
    "cpy": lambda a, b: ops.cpy(a, b),
    "reshape": lambda a, b: ops.reshape(a, b),
    "repeat": lambda a, b: ops.repeat(a, b),
    "get_rows": lambda a, b: ops.get_rows(a, b),
    "soft_max_ext": lambda a, b: ops.soft_max_ext(a, b),
    "rope": lambda a, b: ops.rope(a, b, 4),
    "out_prod": lambda a, b: ops.out_prod(a, b),
    "swiglu_split": lambda a, b: ops.swiglu_split(a, b),
    "silu_back": lambda a, b: ops.silu_back(a, b),
    "set_1d": lambda a, b: ops.set_1d(a, b, 1 << 20),
    "conv_2d": lambda a, b: ops.conv_2d(a, b),
    "cross_entropy_loss": lambda a, b: ops.cross_entropy_loss(a, b),
}


@pytest.mark.parametrize("name", MISFITS)
def test_operands_that_do_not_fit_are_named_with_their_shapes(name):
    ctx = Context()
    a, b = ctx.tensor((3, 4), name="left"), ctx.tensor((2, 5), name="right")
    with pytest.raises(OperandError) as error:
        MISFITS[name](a, b)
    assert isinstance(error.value, ValueError)
    assert "'left' is f32 of shape (3, 4)" in str(error.value)
    assert "'right' is f32 of shape (2, 5)" in str(error.value)
    assert f"ggml_{name}" in str(error.value)


def test_numbers_that_do_not_fit_are_told():
    x = Context().tensor((5, 64), name="x")
    told = r"a 'x' is f32 of shape \(5, 64\); ne0 is 5; ne1 is 4; ne2 is 15: .*GGML_ASSERT"
    with pytest.raises(OperandError, match=told):
        ops.reshape_3d(x, 5, 4, 15)
    with pytest.raises(OperandError, match=r"of shape \(5, 64\); dim is 7: .*dim < GGML_MAX_DIMS"):
        ops.concat(x, x, 7)
    with pytest.raises(
        OperandError, match=r"shape \(5, 64\): requires view\(.*, ne0 = 500, offset"
    ):
        ops.view_1d(x, 500, 0)


def test_types_that_do_not_fit_are_named():
    ctx = Context()
    a, b = ctx.tensor((3, 32), "q8_0", name="w"), ctx.tensor((3, 32), "i32")
    with pytest.raises(OperandError, match=r"a 'w' is q8_0 of shape \(3, 32\); b is i32 of shape"):
        ops.concat(a, b, 1)


def test_an_argument_that_is_no_operand_is_no_matter_of_the_operands():
    x = Context().tensor((3, 4))
    with pytest.raises(ValueError, match="order is 7") as error:
        ops.argsort(x, 7)
    assert not isinstance(error.value, OperandError)
    with pytest.raises(TypeError):
        ops.mul_mat(x, np.zeros((3, 4)))


def test_clamp_leaves_its_operand_alone():
    """ggml's works in place, though its name does not say so."""
    x = Context().input((3,), name="x")
    y = ops.relu(x)
    with Graph(y + ops.clamp(y, 0, 1)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(x=np.float32([1, 2, 3])), [2, 3, 4])


def test_what_writes_in_an_operand_says_so_by_its_name():
    """But for those that are there to write, and what a flag makes do so."""
    views = {"GGML_OP_VIEW", "GGML_OP_RESHAPE", "GGML_OP_PERMUTE", "GGML_OP_TRANSPOSE"}
    writing = set()
    for case in {c.op: c for c in CASES if not c.arguments.get("inplace")}.values():
        ctx = Context()
        tensors = {name: ctx.tensor(one.shape, one.dtype) for name, one in case.operands.items()}
        for name in case.parameters:
            capi.ggml_set_param(tensors[name].handle)
        operation = getattr(ops, case.op)
        with pytest.deprecated_call() if "Deprecated" in operation.__doc__ else nullcontext():
            result = operation(**tensors, **case.arguments, ctx=ctx)
        given = {t for t in tensors.values() if result.handle.view_src == t.handle}
        if given and result.op.name not in views:
            writing.add(case.op)
    to_write = {"cpy", "set_rows", "opt_step_adamw", "opt_step_sgd"}
    assert {name for name in writing if not name.endswith("_inplace")} == to_write
    assert {name for name in ops.__all__ if name.endswith("_inplace")} <= writing


def test_types_go_by_name() -> None:
    """As in `Context.tensor`: ggml's names and NumPy's dtypes too."""
    with Context() as ctx:
        x = ctx.input((2, 32), name="x")
        for given, name in (("q8_0", "q8_0"), (np.float16, "f16"), (capi.GGML_TYPE_F16, "f16")):
            assert type_name(ops.cast(x, given).type) == name
        with pytest.raises(ValueError, match="'f33' is no type of ggml's; these are: f32"):
            ops.cast(x, "f33")
        with pytest.raises(ValueError, match="no type for NumPy's uint64"):
            ops.cast(x, "uint64")
