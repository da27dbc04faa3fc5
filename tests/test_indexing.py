"""``tensor[...]``: views by NumPy's basic indexing, as far as ggml can view."""

from __future__ import annotations

import numpy as np
import pytest
from _release import needs_meta
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from ggml_cffi import OperandError, capi, device, ops
from ggml_cffi.context import Context
from ggml_cffi.graph import Graph
from ggml_cffi.meta import MetaDevice, SplitState

CPU = device("CPU")
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
SHAPE = (4, 5, 6)
NUMBERS = np.arange(120, dtype=np.float32).reshape(SHAPE)


def allocated(array, **words):
    ctx = Context()
    tensor = ctx.from_numpy(array, name="a", **words)
    ctx.allocate(CPU)
    return tensor


def check(array, key):
    """The view has NumPy's shape and numbers, shares the memory, and a graph reads it right."""
    tensor = allocated(array)
    view, expected = tensor[key], array[key]
    assert view.shape == expected.shape
    np.testing.assert_array_equal(view.numpy(), expected)
    if not expected.size:
        return
    with Graph(ops.cont(view)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(), expected)
    view.set(np.full(expected.shape, -1, array.dtype))
    changed = array.copy()
    changed[key] = -1
    np.testing.assert_array_equal(tensor.numpy(), changed)


@pytest.mark.parametrize(
    "key",
    [
        0, -1, np.int64(2), slice(1, 3), (slice(None), 2), (slice(None), slice(None), 3),
        (Ellipsis, slice(1, 4)), (1, 2, 3), (slice(None, None, 2), slice(1, None, 2)), (None, 1),
        (slice(None), None, slice(2, 4)), (Ellipsis, None), (1, Ellipsis, 0), slice(2, 2), (0, 0),
        Ellipsis, (), None, slice(-3, None), slice(10, 20), slice(3, 1), slice(0, 99, 3),
        (None, Ellipsis), (0, None, slice(None), None), (slice(3, 2, -1), 1),
        (Ellipsis, slice(2, 3, 5)), (Ellipsis, slice(1, None, 2)), (1, slice(None), slice(0, 5, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_key(key):
    check(NUMBERS, key)


@EXAMPLES
@given(st.data())
def test_any_basic_index(data):
    shape = data.draw(stn.array_shapes(min_dims=1, max_dims=4, max_side=5))
    key = data.draw(stn.basic_indices(shape, max_dims=4, allow_newaxis=True))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    terms = key if isinstance(key, tuple) else (key,)
    assume(all(t.step is None or t.step > 0 for t in terms if isinstance(t, slice)))
    result = array[key]
    if (
        array.size
        and result.ndim == 4
        and terms
        and result.strides[-1] > 4
        and min(result.shape) > 1
    ):
        with pytest.raises(ValueError, match="a step along the last axis"):
            allocated(array)[key]
        return
    check(array, key)


@EXAMPLES
@given(st.data())
def test_view_of_a_view(data):
    """Also of what is transposed or permuted, whose rows lie apart."""
    array, tensor = NUMBERS, allocated(NUMBERS)
    for _ in range(3):
        how = data.draw(st.sampled_from(["T", "permute", "index"]))
        if how == "T" and array.ndim > 1:
            array, tensor = np.swapaxes(array, -1, -2), tensor.T
        elif how == "permute" and array.ndim == 3:
            array, tensor = array.transpose(1, 0, 2), ops.permute(tensor, 0, 2, 1, 3)
        elif array.ndim:
            key = data.draw(stn.basic_indices(array.shape))
            terms = key if isinstance(key, tuple) else (key,)
            steps = [t for t in terms if isinstance(t, slice) and t.step not in (None, 1)]
            assume(not steps and array[key].size)
            array, tensor = array[key], tensor[key]
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
    with Graph(ops.cont(tensor)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(), array)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i32", "i8", "i64", "f64"])
def test_types(dtype):
    tensor = allocated(NUMBERS.astype("i1"), dtype=dtype)
    view = tensor[1:3, ::2, 2:5]
    np.testing.assert_array_equal(view.numpy().astype(np.float32), NUMBERS[1:3, ::2, 2:5])
    assert view.type == tensor.type


def test_of_a_result():
    ctx = Context()
    x = ctx.input((3, 4), name="x")
    gate, up = (x * 2)[:, :2], (x + 1)[:, 2:]
    with Graph(gate * up).compile(CPU, 1) as compiled:
        numbers = NUMBERS.ravel()[:12].reshape(3, 4)
        np.testing.assert_array_equal(
            compiled(x=numbers), (numbers * 2)[:, :2] * (numbers + 1)[:, 2:]
        )


def test_of_an_input_as_output():
    x = Context().input(SHAPE, name="x")
    with Graph(x[1:, 2]).compile(CPU, 1) as compiled:
        for scale in (1, 2):
            np.testing.assert_array_equal(compiled(x=NUMBERS * scale), NUMBERS[1:, 2] * scale)


def test_tensors_of_no_axes_and_of_no_elements():
    check(np.full((), 3, np.float32), ())
    check(np.full((), 3, np.float32), (None, Ellipsis, None))
    check(np.zeros((2, 0, 3), np.float32), 1)
    check(np.zeros((2, 0, 3), np.float32), (slice(None), slice(None), slice(1, 2)))
    assert Context().tensor((0, 32), "q8_0")[:, :32].numpy().shape == (0, 32)


# ---- blocks


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize(
    "key",
    [
        0, -1, slice(1, 3), slice(None, None, 2), (Ellipsis, slice(32, 64)), slice(2, 2),
        (Ellipsis, slice(-32, None)), (1, slice(0, 32)), (None, 1, None), (Ellipsis, slice(0, 0)),
        (Ellipsis, slice(32, 99)),
    ],
    ids=str,
)  # fmt: skip
def test_whole_blocks_of_a_quantised_tensor(key, dtype):
    rng = np.random.default_rng(0)
    tensor = allocated(rng.standard_normal((3, 64), np.float32), dtype=dtype)
    whole = tensor.numpy()
    view = tensor[key]
    assert view.shape == whole[key].shape
    np.testing.assert_array_equal(view.numpy(), whole[key])


def test_a_part_of_a_quantised_tensor_in_a_product_and_set():
    rng = np.random.default_rng(0)
    tensor = allocated(rng.standard_normal((3, 64), np.float32), dtype="q8_0")
    x = rng.standard_normal((2, 32), np.float32)
    part = tensor[1:, 32:]
    product = tensor.context.input((2, 32), name="x") @ part.T
    with Graph(product).compile(CPU, 1) as compiled:
        np.testing.assert_allclose(compiled(x=x), x @ part.numpy().T, 0.02, 0.05)
    before = tensor.numpy()
    part.set(np.full((2, 32), 2, np.float32))
    expected = before.copy()
    expected[1:, 32:] = 2
    np.testing.assert_allclose(tensor.numpy(), expected, 1e-3)


@pytest.mark.parametrize(
    "key", [(Ellipsis, 3), (Ellipsis, slice(1, 33)), (Ellipsis, slice(0, 31)), (0, slice(0, 64, 2))]
)
def test_a_block_cannot_be_cut(key):
    tensor = Context().tensor((3, 64), "q8_0", name="w")
    with pytest.raises(ValueError, match="blocks of q8_0 have 32 elements, and cannot be cut"):
        tensor[key]


# ---- errors


def test_a_step_along_the_last_of_four_axes():
    tensor = Context().tensor((2, 3, 4, 5))
    with pytest.raises(ValueError, match="a step along the last axis"):
        tensor[..., ::2]
    assert tensor[..., 1, ::2].shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (4, IndexError, "4 is out of range for axis 0 of 4"),
        (-5, IndexError, "-5 is out of range for axis 0 of 4"),
        ((0, 0, 6), IndexError, "6 is out of range for axis 2 of 6"),
        ((0, 0, 0, 0), IndexError, "4 indices for 3 axes"),
        ((Ellipsis, 0, Ellipsis), IndexError, r"one \.\.\. only"),
        ((None, None), IndexError, "5 axes in the result, expected at most 4"),
        (slice(None, None, -1), ValueError, "a step of -1 along axis 0"),
        ([0, 1], TypeError, "get_rows"),
        (np.array([0, 1]), TypeError, "get_rows"),
        (True, TypeError, "True is no integer"),
        (1.0, TypeError, "1.0 is no integer"),
        ("a", TypeError, "'a' is no integer"),
        (slice(None, None, 0), ValueError, "zero"),
        (slice(0.5, 1), TypeError, "slice indices"),
    ],
)
def test_errors(key, error, words):
    tensor = Context().tensor(SHAPE, name="a")
    with pytest.raises(error, match=words):
        tensor[key]


def test_indexing_a_tensor_of_a_closed_context():
    ctx = Context()
    tensor = ctx.tensor(SHAPE)
    ctx.close()
    with pytest.raises(ValueError, match="closed"):
        tensor[0]


def test_it_can_be_iterated_and_ends():
    rows = list(allocated(NUMBERS))
    assert [row.shape for row in rows] == [(5, 6)] * 4
    np.testing.assert_array_equal(rows[2].numpy(), NUMBERS[2])


def assigned(array, key, value, **words):
    """What is there after ``tensor[key] = value``, in memory that NumPy shares or not."""
    tensor = allocated(array, **words)
    before = capi.ggml_used_mem(tensor.context._arenas()[-1])
    tensor[key] = value
    assert capi.ggml_used_mem(tensor.context._arenas()[-1]) == before
    return tensor.numpy()


KEYS = [
    0, -1, slice(1, 3), (slice(None), 2), (Ellipsis, slice(1, 4)), (1, 2, 3), Ellipsis, (),
    (slice(None, None, 2), slice(1, None, 2)), (None, 1), (1, slice(None), slice(0, 5, 4)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("value", [7, 2.5, "row", "whole"])
def test_numbers_are_written_into_a_part(key, value):
    wanted = NUMBERS.copy()
    if value == "row":
        value = -np.arange(wanted[key].shape[-1] if wanted[key].ndim else 1, dtype=np.float64)
        value = value if wanted[key].ndim else value[0]
    elif value == "whole":
        value = -wanted[key]
    wanted[key] = value
    np.testing.assert_array_equal(assigned(NUMBERS, key, value), wanted)


@pytest.mark.parametrize("key", [0, slice(1, 3), (slice(None), slice(32, 64)), Ellipsis], ids=str)
def test_numbers_are_written_into_a_part_of_blocks(key):
    array = np.random.default_rng(0).standard_normal((4, 96), np.float32)
    wanted = array.copy()
    wanted[key] = -3
    found = assigned(array, key, -3, dtype="q8_0")
    np.testing.assert_allclose(found, wanted, atol=0.05)
    with pytest.raises(ValueError, match="have 32 elements, and cannot be cut"):
        assigned(array, (slice(None), slice(1, 3)), 0, dtype="q8_0")


@needs_meta
def test_numbers_are_written_into_a_part_of_a_meta_device():
    def split(tensor, n_devs):
        return SplitState.by_ratio(tensor, axis=1, ratios=[3, 1], granularity=1)

    with MetaDevice(["CPU", "CPU"], split) as meta, Context() as ctx:
        tensor = ctx.from_numpy(NUMBERS[0], name="w")
        ctx.allocate(meta)
        before, wanted = capi.ggml_used_mem(ctx._arenas()[0]), NUMBERS[0].copy()
        for key, value in ((slice(1, 3), 5), ((slice(None), 2), np.arange(5)), ((4, 5), -1)):
            tensor[key] = wanted[key] = value
            np.testing.assert_array_equal(tensor.numpy(), wanted)
        tensor[...] = 0
        assert not tensor.numpy().any()
        assert capi.ggml_used_mem(ctx._arenas()[0]) == before


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        (4, 0, IndexError, "4 is out of range for axis 0 of 4"),
        ((0, 0, 0, 0), 0, IndexError, "4 indices for 3 axes"),
        ([0, 1], 0, TypeError, "is no integer, slice"),
        (True, 0, TypeError, "is no integer, slice"),
        (np.True_, 0, TypeError, "is no integer, slice"),
        (
            0,
            np.zeros((6, 5)),
            ValueError,
            r"shape \(6, 5\), expected one that broadcasts to \(5, 6\)",
        ),
        (0, 1j, TypeError, "complex128, which cannot be cast to float32"),
        (0, "a", TypeError, "which cannot be cast to float32"),
    ],
)
def test_what_cannot_be_written_into_a_part(key, value, error, words):
    tensor = allocated(NUMBERS)
    with pytest.raises(error, match=words):
        tensor[key] = value
    np.testing.assert_array_equal(tensor.numpy(), NUMBERS)


def test_a_part_of_what_has_no_memory_or_takes_a_graph_to_write():
    ctx = Context()
    tensor = ctx.tensor((3, 4), name="t")
    with pytest.raises(ValueError, match=r"has no memory: Context\.allocate gives it some"):
        tensor[0] = 1
    ctx.allocate(CPU)
    with pytest.raises(TypeError, match=r"is written by a graph: ops.cpy, ops.set_rows"):
        tensor[0] = tensor[1]
    ids = ctx.from_numpy(np.zeros(3, np.int8), "ids")
    ctx.allocate(CPU)
    with pytest.raises(OverflowError, match="the array has 300"):
        ids[1] = 300


@pytest.mark.parametrize("key", [slice(2), slice(1, 3), 2, -1, slice(3, 4)])
def test_what_looks_at_all_strides_takes_whole_rows(key):
    """ggml_scale asks for those of a new tensor along axes of one element, too."""
    array = NUMBERS[0]
    with Graph(ops.scale(allocated(array)[key], 2)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(), 2 * array[key])


@pytest.mark.parametrize("key", [slice(1, 3), slice(None, None, 2), (slice(None), slice(1, 3)), 1])
def test_strides_of_axes_that_a_meta_device_knows_them_by(key):
    """Those along axes of which the tensor has more than one element are the tensor's, or steps."""
    tensor = allocated(NUMBERS)
    view, strides = tensor[key], NUMBERS[key].strides
    assert list(view.handle.nb)[: len(strides)] == list(strides[::-1])


def test_the_way_out_of_gaps_is_told():
    part = allocated(NUMBERS[0])[1:3, 1:3]
    told = r"a 'a \(view\)' is .*is_contiguous\(a\).*; it has gaps .*, and ops.cont gives"
    with pytest.raises(OperandError, match=told):
        ops.soft_max(part)
    with pytest.raises(ValueError, match=r"CPU cannot .*SCALE .*: of copies without gaps it could"):
        Graph(ops.scale(part, 2)).compile(CPU, 1)
    wide = ops.argsort(ops.cast(part, "f16"))
    with pytest.raises(ValueError, match=r"ARGSORT .*f16\[2,2,1,1\]$"):  # copies are no way out
        Graph(wide).compile(CPU, 1)()


# ---- a meta device


@needs_meta
def test_views_of_tensors_of_a_meta_device_in_a_graph():
    """Of a mirrored tensor, and of the axis along which another is not split."""
    w, x = NUMBERS[0, :4] / 120, NUMBERS[1, :3] / 120

    def split(tensor, n_devs):
        if tensor["name"] == "w":
            return SplitState.by_ratio(tensor, axis=1, ratios=[1] * n_devs)
        return SplitState.mirrored()

    with MetaDevice(["CPU", "CPU"], split) as meta:
        ctx = Context()
        weight, mirrored = ctx.from_numpy(w, name="w"), ctx.from_numpy(w, name="m")
        ctx.allocate(meta)
        given = ctx.input((3, 6), name="x")
        with Graph([given @ weight.T, given @ mirrored[1:3].T]).compile(meta) as compiled:
            split_up, part = compiled(x=x)
        np.testing.assert_array_equal(weight[1:3].numpy(), w[1:3])
        weight[1:3].set(np.zeros((2, 6), np.float32))
        np.testing.assert_array_equal(weight.numpy(), np.r_[w[:1], 0 * w[1:3], w[3:]])
        assert not mirrored[0].shares_memory
        ctx.close()
    np.testing.assert_allclose(split_up, x @ w.T, 1e-5)
    np.testing.assert_allclose(part, x @ w[1:3].T, 1e-5)
