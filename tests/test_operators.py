"""Python's operators on tensors: NumPy's rules, whatever ggml's are."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from _release import needs_meta
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_cffi import device
from ggml_cffi.context import Context
from ggml_cffi.dtypes import type_name
from ggml_cffi.errors import OperandError
from ggml_cffi.graph import Graph
from ggml_cffi.meta import MetaDevice, SplitState

CPU = device("CPU")
BINARY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Between 0.5 and 2: to divide by."""
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)


def compute(function, *arrays):
    """The shape that the tensor says it has, and what a graph computes."""
    ctx = Context()
    tensors = [ctx.input(a.shape, a.dtype, name=f"x{i}") for i, a in enumerate(arrays)]
    result = function(*tensors)
    used = {t.name for t in Graph(result).inputs}
    with Graph(result).compile(CPU, 1) as compiled:
        found = compiled(**{f"x{i}": a for i, a in enumerate(arrays) if f"x{i}" in used})
    assert found.shape == result.shape
    return found


def check(function, *arrays):
    expected = np.asarray(function(*arrays))
    found = compute(function, *arrays)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, 1e-4, 1e-5)


@st.composite
def broadcastable(draw):
    """Two shapes that broadcast, in any way, to at most four axes."""
    result = draw(st.lists(st.integers(1, 4), max_size=4))
    shapes = []
    for _ in range(2):
        kept = draw(st.integers(0, len(result)))
        shape = [n if draw(st.booleans()) else 1 for n in result[len(result) - kept :]]
        shapes.append(tuple(shape))
    return shapes


@EXAMPLES
@given(broadcastable(), st.sampled_from(sorted(BINARY)))
def test_broadcasting(shapes, sign):
    check(BINARY[sign], numbers(*shapes[0]), numbers(*shapes[1], seed=1))


@st.composite
def matrices(draw):
    """Shapes that NumPy multiplies: of one axis, of matrices, of stacks that broadcast."""
    m, k, n = (draw(st.integers(1, 6)) for _ in range(3))
    left, right = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stack = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))

    def shape(axes, rows, columns, alone):
        if axes == 1:
            return (alone,)
        front = [p if draw(st.booleans()) else 1 for p in stack[4 - axes :]]
        return (*front, rows, columns)

    return shape(left, m, k, k), shape(right, k, n, k)


@EXAMPLES
@given(matrices())
def test_matmul(shapes):
    check(operator.matmul, numbers(*shapes[0]), numbers(*shapes[1], seed=1))


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)),
        ((1, 3, 4), (7, 4, 5)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)),
    ],
)  # fmt: skip
def test_matmul_of_a_transpose_and_of_what_is_not(shapes):
    left, right = numbers(*shapes[0]), numbers(*shapes[1], seed=1)
    check(operator.matmul, left, right)
    if right.ndim > 1:
        turned = np.ascontiguousarray(np.swapaxes(right, -1, -2))
        found = compute(lambda x, y: x @ y.T, left, turned)
        np.testing.assert_allclose(found, left @ right, 1e-4, 1e-5)
    if left.ndim > 1:
        turned = np.ascontiguousarray(np.swapaxes(left, -1, -2))
        found = compute(lambda x, y: x.T @ y, turned, right)
        np.testing.assert_allclose(found, left @ right, 1e-4, 1e-5)


def test_matmul_with_a_transposed_weight_copies_nothing():
    ctx = Context()
    w, x = ctx.tensor((5, 4)), ctx.tensor((3, 4))
    assert [t.op.name for t in Graph(x @ w.T).nodes] == ["GGML_OP_MUL_MAT"]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_K", "f16"])
def test_matmul_with_a_quantised_weight(dtype):
    w, x = numbers(6, 256), numbers(3, 256, seed=1)
    ctx = Context()
    weight = ctx.from_numpy(w, name="w", dtype=dtype)
    ctx.allocate(CPU)
    with Graph(ctx.input((3, 256), name="x") @ weight.T).compile(CPU, 1) as compiled:
        found = compiled(x=x)
    np.testing.assert_allclose(found, x @ weight.numpy().astype(np.float32).T, 0.01)


NUMBERS = {
    "x + 2": lambda x: x + 2,
    "2 + x": lambda x: 2 + x,
    "x - 1.5": lambda x: x - 1.5,
    "2 - x": lambda x: 2 - x,
    "x * 3": lambda x: x * 3,
    "float32(2) * x": lambda x: np.float32(2) * x,
    "x * int64(2)": lambda x: x * np.int64(2),
    "x / 4": lambda x: x / 4,
    "1 / x": lambda x: 1 / x,
    "float64(1) / x": lambda x: np.float64(1) / x,
    "-x": lambda x: -x,
    "x * 0": lambda x: x * 0,
    "-(x - x) + 2 * x / x": lambda x: -(x - x) + 2 * x / x,
}


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (1, 2, 1, 3)])
def test_with_numbers(text, shape):
    check(NUMBERS[text], numbers(*shape))


def test_with_views_that_are_not_contiguous():
    a, b = numbers(4, 6), numbers(6, 4, seed=1)
    for function in (
        lambda x, y: x.T + y,
        lambda x, y: x[::2] * y[1:3, :1],
        lambda x, y: x[:, 1:4] - y.T[:, 1:4],
        lambda x, y: x[1] @ y,
        lambda x, y: x[:, 1:4] @ y[1:4],
        lambda x, y: -x[:, 2:5],
        lambda x, y: x[:, 2:5] * 2 + 1,
        lambda x, y: 1 / x.T,
        lambda x, y: x.T / y[:, 1:2],
        lambda x, y: y[:, 1] / x[0],
    ):
        check(function, a, b)


def test_an_array_of_numpy_is_no_operand():
    """It would be unclear what a run has to be given; from_numpy says it."""
    x = Context().tensor((3,))
    for function in (*BINARY.values(), operator.matmul):
        for other, told in (
            (numbers(3), r"an array of shape \(3,\) is no operand .* from_numpy"),
            *((one, None) for one in ("2", None, True, 1j)),
        ):
            with pytest.raises(TypeError, match=told):
                function(x, other)
            with pytest.raises(TypeError, match=told):
                function(other, x)


@pytest.mark.parametrize("sign", BINARY)
def test_shapes_that_do_not_broadcast(sign):
    ctx = Context()
    a, b = ctx.tensor((3, 4), name="left"), ctx.tensor((3, 5), name="right")
    with pytest.raises(OperandError, match=r"'left' f32 \(3, 4\).*'right' f32 \(3, 5\)"):
        BINARY[sign](a, b)


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ((3, 4), (5, 6), "4 columns meet 5 rows"),
        ((4,), (5, 6), "4 columns meet 5 rows"),
        ((4,), (5,), "4 columns meet 5 rows"),
        ((2, 3, 4), (3, 4, 5), "stacks do not broadcast"),
        ((), (4, 5), "each needs an axis"),
        ((4, 5), (), "each needs an axis"),
    ],
)
def test_shapes_that_do_not_multiply(left, right, words):
    ctx = Context()
    a, b = ctx.tensor(left, name="left"), ctx.tensor(right, name="right")
    with pytest.raises(OperandError, match=words) as error:
        a @ b
    assert "'left'" in str(error.value) and "'right'" in str(error.value)


def test_division_by_zero():
    x = Context().tensor((3,))
    with pytest.raises(ZeroDivisionError):
        x / 0


def test_numbers_do_not_change_what_a_tensor_is_equal_to():
    ctx = Context()
    x, y = ctx.tensor((3,)), ctx.tensor((3,))
    assert x == x and x != y and x != 3 and len({x, y, x}) == 2


def test_operands_of_two_contexts():
    weights, inputs = Context(), Context()
    w = weights.from_numpy(numbers(4, 5))
    weights.allocate(CPU)
    x = inputs.input((3, 4), name="x")
    with Graph((x @ w + 1) * 2).compile(CPU, 1) as compiled:
        found = compiled(x=numbers(3, 4, seed=1))
    np.testing.assert_allclose(found, (numbers(3, 4, seed=1) @ w.numpy() + 1) * 2, 1e-5)


@needs_meta
def test_on_a_meta_device():
    w, x, b = numbers(8, 6), numbers(3, 6, seed=1), numbers(8, seed=2)

    def split(tensor, n_devs):
        axis = {"w": 1, "b": 0}[tensor["name"]]
        return SplitState.by_ratio(tensor, axis=axis, ratios=[1] * n_devs)

    with MetaDevice(["CPU", "CPU"], split) as meta:
        ctx = Context()
        weight, bias = ctx.from_numpy(w, name="w"), ctx.from_numpy(b, name="b")
        ctx.allocate(meta)
        assert meta.error is None
        product = ctx.input((3, 6), name="x") @ weight.T
        with Graph((product + bias) * 2 - 1).compile(meta) as compiled:
            found = compiled(x=x)
        ctx.close()
    np.testing.assert_allclose(found, (x @ w.T + b) * 2 - 1, 1e-5)


def test_axes_of_no_elements():
    check(lambda x, y: x @ y.T, numbers(2, 3), numbers(0, 3))
    check(lambda x, y: x + y, numbers(2, 1), numbers(1, 3))
    ctx = Context()
    assert (ctx.tensor((0, 3)) * 2).shape == (0, 3)
    assert (ctx.tensor((3, 0)) + ctx.tensor((1,))).shape == (3, 0)


# ---- types


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("text", NUMBERS)
def test_half_precision_with_numbers_stays_what_it_is(dtype, text):
    ctx = Context()
    x = ctx.from_numpy(numbers(3, 4), name="x", dtype=dtype)
    ctx.allocate(CPU)
    held = x.numpy().astype(np.float32)
    result = NUMBERS[text](x)
    assert result.type == x.type
    with Graph(result).compile(CPU, 1) as compiled:
        found = compiled().astype(np.float32)
    np.testing.assert_allclose(found, NUMBERS[text](held), {"f16": 4e-3, "bf16": 3e-2}[dtype], 1e-3)


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("f16", "f32", "f32"), ("f32", "f16", "f32"), ("bf16", "f32", "f32"),
        ("f16", "bf16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "bf16"),
        ("q8_0", "f32", "f32"), ("f32", "q8_0", "f32"), ("q8_0", "q8_0", "f32"),
        ("q4_0", "q8_0", "f32"), ("i32", "f32", "f32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", BINARY)
def test_types_of_two_tensors(sign, left, right, result):
    """ggml gives the type of the first; here half precision and float32 are float32, by NumPy."""
    ctx = Context()
    arrays = [np.ceil(numbers(3, 64, seed=i) * 3).astype(np.int32) for i in range(2)]
    x, y = (ctx.from_numpy(a, dtype=t) for a, t in zip(arrays, (left, right), strict=True))
    ctx.allocate(CPU)
    expected = BINARY[sign](x.numpy().astype(np.float32), y.numpy().astype(np.float32))
    made = BINARY[sign](x, y)
    assert type_name(made.type) == result
    with Graph(made).compile(CPU, 1) as compiled:
        found = compiled().astype(np.float32)
    np.testing.assert_allclose(found, expected, {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2}[result])


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f16", "bf16"])
def test_products_of_any_type_are_float32(dtype):
    ctx = Context()
    w = ctx.from_numpy(numbers(6, 32), name="w", dtype=dtype)
    x = ctx.from_numpy(numbers(32, 5, seed=1), name="x")
    ctx.allocate(CPU)
    held = w.numpy().astype(np.float32)
    for made, expected in (
        (w @ x, held @ x.numpy()),
        (x.T @ w.T, x.numpy().T @ held.T),
        (w.T @ w, held.T @ held),
        (w @ x[:, 0], held @ x.numpy()[:, 0]),
        (x[:, 0] @ w.T, x.numpy()[:, 0] @ held.T),
    ):
        assert type_name(made.type) == "f32"
        with Graph(made).compile(CPU, 1) as compiled:
            np.testing.assert_allclose(compiled(), expected, 0.01)


def test_a_quantised_tensor_with_numbers_and_turned_is_its_numbers():
    ctx = Context()
    w = ctx.from_numpy(numbers(6, 32), name="w", dtype="q8_0")
    ctx.allocate(CPU)
    held = w.numpy()
    for made, expected in ((w * 2, held * 2), (1 / w, 1 / held), (-w, -held), (w.T, held.T)):
        with Graph(made).compile(CPU, 1) as compiled:
            np.testing.assert_allclose(compiled(), expected, 1e-6)


def test_a_quantised_weight_in_a_product_is_not_turned_into_float32():
    ctx = Context()
    w, x = ctx.tensor((6, 32), "q8_0"), ctx.tensor((3, 32))
    assert [t.op.name for t in Graph(x @ w.T).nodes] == ["GGML_OP_MUL_MAT"]
    assert [t.op.name for t in Graph(x @ w[2:4].T).nodes] == ["GGML_OP_VIEW", "GGML_OP_MUL_MAT"]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1, 1, 4), (2, 1, 4)])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: -(a.T),
        lambda a: a.T * a.T,
        lambda a: a.T - 1,
        lambda a: a.T * 2,
        lambda a: 1 / a.T,
    ],
    ids=["negative", "product", "less one", "twice", "inverse"],
)
def test_transposes_with_an_axis_of_one(kind, shape, function) -> None:
    """ggml calls them contiguous, and refuses to compute with them."""
    array = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)

    class Last:  # the last two axes, as Tensor.T
        T = np.swapaxes(array, -1, -2)

    with Context() as ctx:
        x = ctx.from_numpy(array, dtype=kind)
        ctx.allocate("CPU")
        found = Graph(function(x)).compile("CPU", 1)()
    np.testing.assert_allclose(found.astype(float), function(Last), rtol=0.01)
