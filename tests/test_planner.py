"""What a meta device makes of graphs: right, with copies where ggml needs them, or refused.

tests/fuzz/test_planned.py compares random graphs with ggml; here is what it has found, and each
kind of graph that ggml would let pass and get wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _release import PINNED, needs, needs_meta, not_here

from ggml_cffi import Context, Graph, SplitError, capi, enums, ffi, ops
from ggml_cffi._handles import address
from ggml_cffi.device import device
from ggml_cffi.meta import MetaDevice, Plan, SplitState, _rules, policies
from ggml_cffi.meta import plan as _plan
from ggml_cffi.meta._layout import chunks, folded, layout_of, repeated, reshaped, unpermuted
from ggml_cffi.meta._nodes import nodes_of
from ggml_cffi.meta._rules import RULES
from ggml_cffi.tensor import Tensor

pytestmark = needs_meta

WHOLE = SplitState.mirrored()
split, segments = SplitState.split, SplitState.segments


class Case:
    """A graph with weights that are cut over CPU devices, and its numbers on one of them."""

    def __init__(
        self, n_devs: int = 2, dtype: str | None = None, **weights: tuple[Any, SplitState]
    ) -> None:
        self.dtype = dtype
        self.states = {name: state for name, (_, state) in weights.items()}
        self.arrays = {
            name: self._array(shape, i) for i, (name, (shape, _)) in enumerate(weights.items())
        }
        self.meta = MetaDevice(["CPU"] * n_devs, lambda info, n: self.states[info.name], "raise")

    @staticmethod
    def _array(shape: Any, seed: int) -> np.ndarray:
        if isinstance(shape, np.ndarray):
            return shape
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def graph(self, context: Context, target: Any, build: Callable[..., Any]) -> Graph:
        tensors = {
            name: context.from_numpy(a, name, dtype=self.dtype) for name, a in self.arrays.items()
        }
        context.allocate(target)
        made = build(**tensors)
        return Graph(list(made) if isinstance(made, tuple) else [made])

    def computed(
        self, target: Any, build: Callable[..., Any], **more: Any
    ) -> tuple[np.ndarray, ...]:
        with Context() as context:
            graph = self.graph(context, target, build)
            with graph.compile(target, n_threads=1, **more) as run:
                first, second = (run.run() for _ in range(2))
                for name, found in first.items():
                    np.testing.assert_array_equal(found, second[name])
                return tuple(first.values())

    def check(self, build: Callable[..., Any]) -> None:
        """The numbers are those of one device."""
        wanted = self.computed(device("CPU"), build)
        for found, right in zip(self.computed(self.meta, build), wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)

    def refused(self, build: Callable[..., Any], words: str, **more: Any) -> None:
        with Context() as context:
            graph = self.graph(context, self.meta, build)
            with pytest.raises(SplitError, match=words):
                self.meta.plan(graph, **more)
            with pytest.raises(SplitError, match=words):
                graph.compile(self.meta, **more)

    def mended(self, build: Callable[..., Any], words: str = "before they are added up") -> None:
        """Right with copies, refused without."""
        self.check(build)
        self.refused(build, words, mend=False)


# ---- the table


#: Operations that ggml's meta backend has no rule for: it aborts over them.
WITHOUT_A_RULE = {"NONE", "COUNT", "COL2IM_1D", "LIGHTNING_INDEXER"}


def test_every_operation_has_a_rule_or_is_known_to_have_none() -> None:
    if not PINNED:
        not_here("all operations, known of the pinned release only")
    ops = {op.name.removeprefix("GGML_OP_") for op in enums.ggml_op}
    assert set(RULES) == ops - WITHOUT_A_RULE


# ---- layouts


def test_the_order_in_which_segments_are_written() -> None:
    state = segments(0, [[2, 1], [1, 0]], [2, 1])  # |0 0 1|0 0 1|0|
    assert list(chunks(state)) == [(0, 0, 2), (1, 2, 1), (0, 3, 2), (1, 5, 1), (0, 6, 1)]
    assert layout_of(state) == (((0, 2), (3, 5), (6, 7)), ((2, 3), (5, 6)))


def test_a_repeated_layout_is_folded_again() -> None:
    layout = layout_of(split(0, [3, 1]))
    twice = repeated(layout, 4, 2)
    assert twice == (((0, 3), (4, 7)), ((3, 4), (7, 8)))
    assert folded(twice, 4, 2) == layout
    assert folded(layout_of(split(0, [6, 2])), 4, 2) is None


def test_reshapes_of_whole_rows_keep_their_layout_and_others_have_none() -> None:
    layout = layout_of(split(0, [8, 4]))
    assert reshaped(layout, 0, (12, 5, 1, 1), 1, (4, 3, 5, 1)) == (((0, 2),), ((2, 3),))
    assert reshaped(layout, 0, (12, 5, 1, 1), 1, (3, 4, 5, 1)) is None


def test_what_ggml_reads_of_permuted_elements_is_put_in_order() -> None:
    held = layout_of(segments(0, [[2, 1], [1, 1]]))  # elements 0 1 3, and 2 4
    order = unpermuted(split(0, [3, 2]), held)
    assert order is not None
    read = np.array([0, 1, 3, 2, 4])  # device by device
    np.testing.assert_array_equal(read[order], np.arange(5))
    assert unpermuted(split(0, [3, 2]), layout_of(split(0, [3, 2]))) is None


# ---- what is read of tensors, and how often


def test_tensors_are_read_as_ggml_has_them() -> None:
    with Context() as ctx:
        a = ctx.input((4, 64), "q8_0", "wéights")
        x = ctx.input((3, 64), name="x" * 63)
        y = ops.mul_mat(a, x)
        view = ops.view_2d(y, 2, 2, y.handle.nb[1], y.handle.nb[1])
        scaled = ops.scale(view, 0.5)
        scaled.handle.src[capi.GGML_MAX_SRC - 1] = x.handle  # with NULLs before it
        capi.ggml_set_name(scaled.handle, b"\xff".decode("utf-8", "surrogateescape"))
        order = [one.handle for one in (a, x, y, view, scaled)]
        nodes = nodes_of(order)
        places = {address(one): i for i, one in enumerate(order)}
        for node, one in zip(nodes, order, strict=True):
            assert node.name == capi.ggml_get_name(one)
            assert node.op == enums.ggml_op(one.op).name.removeprefix("GGML_OP_")
            assert (node.kind.type, node.ne, node.nb) == (one.type, tuple(one.ne), tuple(one.nb))
            assert node.block_size == capi.ggml_blck_size(enums.ggml_type(one.type))
            assert node.kind.params == bytes(ffi.buffer(one.op_params))
            assert node.offset == one.view_offs
            assert node.root == (places[address(one.view_src)] if one.view_src else None)
            operands = [places[address(src)] if src else None for src in one.src]
            assert list(node.operands) == operands[: len(node.operands)]
            assert not any(operand is not None for operand in operands[len(node.operands) :])
        assert (nodes[3].root, nodes[3].offset) == (2, y.handle.nb[1])
        assert nodes[4].operands == (3, *[None] * (capi.GGML_MAX_SRC - 2), 1)


def test_layers_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    apply = _rules.apply
    monkeypatch.setattr(_rules, "apply", lambda step: asked.append(step.node.op) or apply(step))
    n = 20
    case = Case(**_weights(n))
    with Context() as context:
        plan = case.meta.plan(case.graph(context, case.meta, _layers))
    assert sum(one.op != "NONE" for one in plan.tensors) == 3 * n
    assert len(asked) <= 6  # the first layer's input is a weight
    assert len(plan.all_reduces) == n


def test_a_layer_that_is_cut_otherwise_than_those_before_it_is_named() -> None:
    down2 = (8, 8), split(0, [3, 5])
    Case(**_weights(4) | {"down2": down2}).refused(_layers, r"MUL_MAT 'product2' of 'down2'")


def _weights(n_layers: int) -> dict[str, tuple[Any, SplitState]]:
    found: dict[str, tuple[Any, SplitState]] = {"x": ((3, 8), WHOLE)}
    for i in range(n_layers):
        found[f"up{i}"] = (8, 8), split(1, [6, 2])
        found[f"down{i}"] = (8, 8), split(0, [6, 2])
    return found


def _layers(**weights: Tensor) -> Tensor:
    x = weights["x"]
    for i in range(len(weights) // 2):
        product = ops.mul_mat(weights[f"down{i}"], ops.mul_mat(weights[f"up{i}"], x))
        product.name = f"product{i}"
        x = x + product
    return x


def test_a_compiled_graph_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    mended = _plan.mended
    monkeypatch.setattr(_plan, "mended", lambda *told: planned.append(told) or mended(*told))
    case = row_parallel()
    with Context() as context:
        graph = case.graph(context, case.meta, lambda w, x: ops.mul_mat(w, x))
        with graph.compile(case.meta) as first, graph.compile(case.meta) as second:
            assert len(planned) == 2
            for _ in range(3):  # each is prepared anew after the other one's turn
                np.testing.assert_array_equal(first.run()["0"], second.run()["0"])
            assert len(planned) == 2


# ---- graphs that ggml lets pass and gets wrong


def row_parallel(**more: tuple[Any, SplitState]) -> Case:
    return Case(w=((5, 8), split(0, [6, 2])), x=((3, 8), split(0, [6, 2])), **more)


def test_a_row_parallel_product_that_is_read() -> None:
    row_parallel().mended(lambda w, x: ops.mul_mat(w, x))


def test_a_row_parallel_product_that_is_read_and_used() -> None:
    def build(w: Any, x: Any) -> Any:
        y = ops.mul_mat(w, x)
        return y, ops.sqr(y)

    row_parallel().mended(build)


def test_a_sum_that_is_put_off_past_the_end() -> None:
    row_parallel(s=((5,), WHOLE)).mended(lambda w, x, s: ops.mul(ops.mul_mat(w, x), s))


def test_a_sum_that_is_put_off_past_another_use() -> None:
    def build(w: Any, x: Any, s: Any) -> Any:
        y = ops.mul_mat(w, x)
        return ops.add(ops.sqr(ops.mul(y, s)), y)

    row_parallel(s=((5,), WHOLE)).mended(build)


def test_a_sum_that_is_made_at_once_needs_no_copy() -> None:
    case = row_parallel()
    with Context() as context:
        graph = case.graph(context, case.meta, lambda w, x: ops.sqr(ops.mul_mat(w, x)))
        plan = case.meta.plan(graph, mend=False)
        (made,) = plan.all_reduces
        assert made.tensor == made.after == "MUL_MAT of 'w', 'x'"
        assert not any(one.is_copy for one in plan.tensors)
    case.check(lambda w, x: ops.sqr(ops.mul_mat(w, x)))


def test_a_device_that_is_named_twice_has_its_memory_once() -> None:
    free = 1000
    made = Plan(("CPU", "CPU"), (), (), (0, 0), 501, (free, free))
    assert not made.fits
    assert Plan(("CPU", "GPU"), (), (), (0, 0), 501, (free, free)).fits
    assert Plan(("CPU", "CPU"), (), (), (0, 0), 500, (free, free)).fits
    assert Plan(("a", "a"), (), (), (0, 0), 501, (0, 0)).fits  # which do not say


def test_heads_that_are_multiplied_by_mul_mat() -> None:
    heads = split(2, [2, 1])
    case = Case(k=((3, 4, 8), heads), q=((3, 5, 8), heads))
    case.refused(lambda k, q: ops.mul_mat(k, q), "split by flash_attn_ext alone")


def test_a_view_that_narrows_what_is_cut() -> None:
    case = Case(w=((6, 8), split(0, [4, 4])))
    case.refused(lambda w: ops.sqr(ops.view_2d(w, 4, 6, w.strides[0], 0)), "other elements")


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_a_view_at_an_offset_within_what_is_cut(dtype: str) -> None:
    """By ggml's rule the extent of a row of blocks has the bytes of a block for each number."""

    def half_of_each_row(w: Tensor) -> Tensor:
        rows = ops.reshape_3d(w, 128, 2, 4)
        *_, nb1, nb2 = list(rows.handle.nb)[:3]
        return ops.cast(ops.view_3d(rows, 64, 2, 4, nb1, nb2, nb1 // 2), "f32")

    def rows_of_each_part(w: Tensor) -> Tensor:
        parts = ops.reshape_3d(w, 64, 64, 4)
        row = w.handle.nb[1]
        return ops.cast(ops.view_3d(parts, 64, 16, 4, row, 64 * row, 20 * row), "f32")

    along = Case(w=((4, 256), split(0, [128, 128])), dtype=dtype)
    across = Case(w=((256, 64), split(1, [128, 128])), dtype=dtype)
    if dtype == "f32":
        along.check(half_of_each_row)
        across.refused(rows_of_each_part, "over other elements")
    else:
        along.refused(half_of_each_row, "over other elements")
        across.check(rows_of_each_part)


FUSED = {"x": ((3, 8), WHOLE), "w": ((12, 8), split(1, [8, 4]))}


def test_gate_and_up_that_are_cut_as_one() -> None:
    Case(**FUSED).refused(lambda x, w: ops.swiglu(ops.mul_mat(w, x)), "split it as segments")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(
            segments(1, [[4, 2]], [2]),
            marks=needs("struct ggml_backend_meta_split_state.nr"),
            id="nr",
        ),
        pytest.param(segments(1, [[4, 2], [4, 2]]), id="segments"),
    ],
)
def test_gate_and_up_in_segments(state: SplitState) -> None:
    case = Case(x=FUSED["x"], w=((12, 8), state), down=((5, 6), split(0, [4, 2])))
    case.check(lambda x, w, down: ops.sqr(ops.mul_mat(down, ops.swiglu(ops.mul_mat(w, x)))))
    case.check(lambda x, w, down: ops.swiglu(ops.mul_mat(w, x)))


def test_segments_whose_devices_have_other_shares() -> None:
    case = Case(x=FUSED["x"], w=((12, 8), segments(1, [[4, 2], [2, 4]])))
    case.refused(lambda x, w: ops.swiglu(ops.mul_mat(w, x)), "split it as segments")


@pytest.mark.parametrize("rows", [[[4, 2], [2, 4]], [[1, 2, 3], [2, 0, 1], [0, 0, 3]]], ids=str)
def test_a_product_of_segments_is_read_in_order(rows: list[list[int]]) -> None:
    n = sum(map(sum, rows))
    case = Case(len(rows[0]), x=((3, 8), WHOLE), w=((n, 8), segments(1, rows)))
    case.check(lambda x, w: ops.mul_mat(w, x))
    case.check(lambda x, w: ops.sqr(ops.mul_mat(w, x)))


def test_soft_max_along_the_cut() -> None:
    Case(a=((3, 8), split(0, [6, 2]))).refused(lambda a: ops.soft_max(a), "along axis 0")


def test_soft_max_of_rows_that_are_cut() -> None:
    Case(a=((4, 8), split(1, [3, 1]))).check(lambda a: ops.soft_max(a))


ALIBI = [([8, 0], ""), ([0, 8], ""), ([4, 4], "max_bias"), ([7, 1], "max_bias")]


@pytest.mark.parametrize(("shares", "words"), ALIBI)
def test_alibi_needs_all_heads_on_one_device(shares: list[int], words: str) -> None:
    """Each head's slope goes by its number, and a device counts its own."""
    cut = split(2, shares)
    soft_max = Case(a=((8, 3, 5), cut), m=((8, 3, 5), cut))
    heads = dict.fromkeys("qkv", ((8, 3, 32), cut))
    attention = Case(**heads, m=(np.zeros((3, 3), np.float16), WHOLE))
    attention.arrays["m"] = np.arange(9).reshape(3, 3).astype(np.float16) / 8
    for case, build in (
        (soft_max, lambda a, m: ops.soft_max_ext(a, m, 0.5, 8.0)),
        (attention, lambda q, k, v, m: ops.flash_attn_ext(q, k, v, m, scale=0.2, max_bias=8.0)),
    ):
        if words:
            case.refused(build, words)
        else:
            case.check(build)


def test_a_repetition_along_the_cut_is_read_in_order() -> None:
    Case(a=((3, 8), split(0, [6, 2]))).check(lambda a: ops.repeat_4d(a, 16, 3, 1, 1))


def test_rope_along_the_cut_and_along_the_positions() -> None:
    positions = np.arange(4, dtype=np.int32)
    rope = lambda a, p: ops.rope(a, p, 8, 0)  # noqa: E731
    for axis, words in (
        (0, "pairs of elements along axis 0"),
        (2, "positions are those of axis 2"),
    ):
        case = Case(a=((4, 2, 8), split(axis, [2, (8, 2, 4)[axis] - 2])), p=(positions, WHOLE))
        case.refused(rope, words)
    Case(a=((4, 2, 8), split(1, [1, 1])), p=(positions, WHOLE)).check(rope)


def test_addends_that_go_through_an_operation() -> None:
    case = Case(a=((3, 8), SplitState.partial()))
    for build in (lambda a: ops.sqr(a), lambda a: ops.scale(ops.cont(a), 2.0)):
        case.refused(build, "only a bias behind ADD_ID")


def test_graphs_of_different_sizes() -> None:
    """Each has a backend of its own, which ggml's meta backend makes no room in for others."""
    case = Case(w=((8, 8), split(1, [6, 2])), v=((8, 8), split(0, [6, 2])), x=((3, 8), WHOLE))
    with Context() as context:
        tensors = {name: context.from_numpy(a, name) for name, a in case.arrays.items()}
        context.allocate(case.meta)
        runs, wanted = [], []
        y, right = tensors["x"], case.arrays["x"].astype(np.float64)
        for _ in range(3):
            y = ops.mul_mat(tensors["v"], ops.mul_mat(tensors["w"], y))
            right = right @ case.arrays["w"].T @ case.arrays["v"].T
            runs.append(Graph(ops.cont(y)).compile(case.meta, n_threads=1))
            wanted.append(right)
        for i in (0, 2, 1, 0, 2):
            np.testing.assert_allclose(runs[i](), wanted[i], rtol=1e-3, atol=1e-2)


def test_writing_into_a_weight_in_host_memory() -> None:
    rows = np.array([1, 0], np.int64)
    case = Case(w=((4, 8), split(0, [6, 2])), v=((2, 8), split(0, [6, 2])), i=(rows, WHOLE))
    for build in (
        lambda w, v, i: ops.set_rows(w, v, i),
        lambda w, v, i: ops.relu_inplace(w),
        lambda w, v, i: ops.cpy(v, ops.view_2d(w, 8, 2, w.strides[0], 0)),
    ):
        case.refused(build, "rpc.LocalWorkers")


# ---- what the random graphs have found


def experts(bias: SplitState, shares: list[int]) -> Case:
    ids = np.array([[0, 1], [2, 0], [1, 2]], np.int32)
    return Case(
        w=((3, 5, 8), split(0, shares)),
        x=((3, 2, 8), split(0, shares)),
        b=((3, 5), bias),
        i=(ids, WHOLE),
    )


def add_bias(w: Any, x: Any, b: Any, i: Any) -> Any:
    return ops.sqr(ops.add_id(ops.mul_mat_id(w, x, i), b, i))


def test_a_bias_of_addends_behind_a_row_parallel_product() -> None:
    experts(SplitState.partial(), [6, 2]).check(add_bias)
    experts(WHOLE, [6, 2]).check(add_bias)


def test_a_bias_of_addends_of_which_a_device_leaves_out_its_own() -> None:
    experts(SplitState.partial(), [8, 0]).refused(add_bias, "leaves out its addend")
    experts(WHOLE, [8, 0]).check(add_bias)


def test_repeats_along_the_third_axis_are_not_read() -> None:
    case = Case(a=((4, 1, 32, 32), split(1, [16, 16])))
    case.refused(lambda a: ops.cont_3d(a, 2, 16, 128), "cannot put the parts together")


def test_a_row_parallel_product_of_which_a_device_has_no_share() -> None:
    case = Case(w=((5, 8), split(0, [8, 0])), x=((3, 8), split(0, [8, 0])), m=((3, 3), WHOLE))

    def build(w: Any, x: Any, m: Any) -> Any:
        nothing = ops.log(ops.scale(ops.sqr(m), -1.0))  # NaN in memory that may be used again
        return nothing, ops.sqr(ops.mul_mat(w, x))

    case.check(build)


def meanwhile(w: Any, x: Any, m: Any) -> Any:
    """What is computed between a product and its sum is used after the sum as well."""
    product, other = ops.mul_mat(w, x), ops.relu(m)
    return product * other + other


def meanwhile_in_place(w: Any, x: Any, m: Any) -> Any:
    """What is written between a product and its sum is seen after the sum by another view."""
    before = ops.scale(m, 2.0)
    used = ops.sqr(before)
    written = ops.mul_mat(w, x) * ops.relu_inplace(before)
    return used, written + ops.view_2d(before, 5, 3, before.handle.nb[1], 0)


@pytest.mark.parametrize("build", [meanwhile, meanwhile_in_place])
@pytest.mark.parametrize("shares", [[0, 8], [8, 0], [0, 5, 3]], ids=str)
def test_what_is_computed_before_a_sum_that_a_device_has_no_share_of(
    build: Callable[..., Any], shares: list[int]
) -> None:
    """ggml leaves that out on this device."""
    state = split(0, shares)
    case = Case(len(shares), w=((5, 8), state), x=((3, 8), state), m=((3, 5), WHOLE))
    case.mended(build, "leaves out what is computed")


def test_what_is_computed_before_a_sum_that_all_devices_have_a_share_of() -> None:
    case = row_parallel(m=((3, 5), WHOLE))
    case.check(meanwhile)
    with Context() as context:
        plan = case.meta.plan(case.graph(context, case.meta, meanwhile), mend=False)
    assert not any(one.is_copy for one in plan.tensors)


def test_one_element_that_one_of_the_devices_has_is_not_read() -> None:
    case = Case(a=((8, 4), split(0, [0, 4])))
    narrow = lambda a: ops.view_2d(ops.scale(a, 2.0), 1, 8, a.strides[0], 12)  # noqa: E731
    case.refused(narrow, "cannot put the parts together")


def doubled(n: int) -> Callable[[Any], Any]:
    """An operation of a function, with n operands or any number (0)."""
    if not n:
        return lambda a: ops.custom(lambda result, x: np.multiply(x, 2, out=result), a)

    def call(result: Any, x: Any, *others: Any) -> None:
        array(result)[...] = 2 * array(x)

    def array(tensor: Any) -> np.ndarray:
        count = capi.ggml_nelements(tensor)
        return np.frombuffer(ffi.buffer(ffi.cast("float *", tensor.data), 4 * count), np.float32)

    def build(a: Any) -> Tensor:
        function = getattr(capi, f"ggml_map_custom{n}")
        made = function(a.context._room(), *[a.handle] * n, lambda d, *s: call(d, *s[:n]), 1)
        return Tensor(made, a.context)

    return build


@pytest.mark.parametrize("n", range(4))
def test_an_operation_of_a_function_takes_what_is_whole(n: int) -> None:
    Case(a=((3, 8), WHOLE)).check(doubled(n))
    case = Case(a=((3, 8), split(0, [6, 2])))
    case.refused(doubled(n), "must be mirrored")


def test_a_view_that_is_read_has_what_is_written_into_it_later() -> None:
    """As on one device, where it is read after the run."""
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        made = ctx.input((2, 3), name="x") - 1
        graph = Graph([ops.transpose(made), ops.relu_inplace(made)])
        x = np.float32([[0, 1, 2], [3, 0, 5]])
        expected = np.maximum(x - 1, 0)
        for target in (device, "CPU"):
            with graph.compile(target) as compiled:
                turned, whole = compiled(x=x)
            np.testing.assert_array_equal(whole, expected)
            np.testing.assert_array_equal(turned, expected.T)


@pytest.mark.own_memory  # 1,100 times 1.5 GB of addresses, all of which a sanitizer marks
def test_graphs_with_views_that_are_compiled_and_never_run() -> None:
    """ggml's pool for views is full after 1,024 of them; others that are compiled stay right."""
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        w = ctx.from_numpy(np.arange(12, dtype=np.float32).reshape(2, 6), name="w")
        ctx.allocate(device)
        x = ctx.input((3, 6), name="x")
        first, second = Graph(x * w[0]), Graph(x + w[1])
        ones = np.ones((3, 6), np.float32)
        with first.compile(device) as kept:
            for _ in range(1100):
                second.compile(device).close()
            np.testing.assert_array_equal(kept(x=ones), ones * np.arange(6))
            with second.compile(device) as last:
                np.testing.assert_array_equal(last(x=ones), ones + np.arange(6, 12))
            np.testing.assert_array_equal(kept(x=ones), ones * np.arange(6))


def test_a_plan_says_that_the_split_function_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    def split(info: Any, n_devs: int) -> SplitState:
        if info.name == "second":
            raise RuntimeError("there is no rule")
        return SplitState.by_ratio(info, axis=1, ratios=[1, 1])

    with MetaDevice(["CPU", "CPU"], split) as device, Context() as ctx:
        first = ctx.from_numpy(np.ones((4, 6), np.float32), name="first")
        ctx.allocate(device)
        x = ctx.input((3, 6), name="x")
        fine = device.plan(Graph(x @ first.T))
        assert fine.error == "" and "failed" not in str(fine)
        second = ctx.from_numpy(np.ones((4, 6), np.float32), name="second")
        ctx.allocate(device)
        told = device.plan(Graph(x @ second.T))
        assert "there is no rule" in told.error and not told["second"].split.is_split
        assert str(told).endswith(told.error) and "has failed" in str(told)


def test_more_views_of_weights_than_ggml_has_room_for() -> None:
    """In one graph: to empty the pools does not help."""
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        w = ctx.from_numpy(np.ones((3, 6), np.float32), name="table")
        ctx.allocate(device)
        x = ctx.input((3, 6), name="x")

        def graph(n_views: int) -> Graph:
            y = x + w
            for i in range(n_views):
                y = y + w[i % 2]
            return Graph(y)

        ones = np.ones((3, 6))
        most = 1024  # 16 for each tensor that the Context has room for
        try:
            graph(most).compile(device).close()
        except SplitError:  # a newer release: for each that it has
            assert not PINNED
            most = 16
        with graph(most).compile(device) as made:
            n = f"{most + 1:,}"
            text = f"{n} views of weights, {n} of them of 'table', and ggml has no room"
            with pytest.raises(SplitError, match=text):
                graph(most + 1).compile(device)
            np.testing.assert_array_equal(made(x=ones), (most + 2) * ones)
        with graph(most).compile(device) as made:
            np.testing.assert_array_equal(made(x=ones), (most + 2) * ones)


def test_graphs_with_views_of_weights_are_run_in_any_order() -> None:
    """Item 8: what ggml knows of the views of one is lost when another is allocated and run."""
    rng = np.random.default_rng(0)
    rules = policies.Rules([policies.Rule("w", policies.Column())], [1, 1])
    w, b = rng.standard_normal((8, 6), np.float32), rng.standard_normal((4, 6), np.float32)
    expected = [
        lambda x: (x * b[1]) @ w.T,
        lambda x: (x + b[2]) @ w.T,
        lambda x: (x - b[0] * b[3]) @ w.T,
    ]
    with MetaDevice(["CPU", "CPU"], rules) as device, Context() as ctx:
        weight, bias = ctx.from_numpy(w, name="w"), ctx.from_numpy(b, name="b")
        ctx.allocate(device)
        x = ctx.input((3, 6), name="x")
        results = [x * bias[1], x + bias[2], x - bias[0] * bias[3]]
        graphs = [Graph(one @ weight.T) for one in results]
        made = [graph.compile(device) for graph in graphs]
        for _ in range(60):
            i = int(rng.integers(3))
            if rng.random() < 0.3:
                made[i].close()
                made[i] = graphs[i].compile(device)
            given = rng.standard_normal((3, 6), np.float32)
            np.testing.assert_allclose(made[i](x=given), expected[i](given), atol=1e-4)


def test_threads_take_turns_on_a_meta_device() -> None:
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    wrong: list[object] = []
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        weight = ctx.from_numpy(w, name="w")
        ctx.allocate(device)
        x = ctx.input((3, 6), name="x")
        graphs = [Graph(x + weight[i]) for i in range(4)]

        def work(i: int) -> None:
            try:
                with graphs[i].compile(device, n_threads=1) as made:
                    for k in range(100):
                        given = np.full((3, 6), k, np.float32)
                        np.testing.assert_array_equal(made(x=given), given + w[i])
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert wrong == []


def test_a_run_within_a_run_on_a_meta_device_is_refused() -> None:
    with MetaDevice(["CPU", "CPU"], policies.mirror()) as device, Context() as ctx:
        x = ctx.input((2, 3), name="x")
        inner = Graph(x * 2).compile(device)

        def nested(out: Any, a: Any) -> None:
            out[...] = inner(x=a)

        outer = Graph(ops.custom(nested, x, n_tasks=1)).compile(device, n_threads=1)
        given = np.ones((2, 3), np.float32)
        with pytest.raises(ValueError, match="is computing what this is called by"):
            outer(x=given)
        np.testing.assert_array_equal(inner(x=given), given * 2)
        with Graph(x * 3).compile("CPU") as elsewhere:
            inner = elsewhere
            np.testing.assert_array_equal(outer(x=given), given * 3)
