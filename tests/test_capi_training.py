"""Training by capi alone: steps against NumPy, and what ggml would get wrong without an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from _compute import Arena

from ggml_cffi import AbortError, capi

Numbers = npt.NDArray[np.float32]

F32 = capi.GGML_TYPE_F32
MEAN_SQUARED_ERROR = capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR
SGD = capi.GGML_OPT_OPTIMIZER_TYPE_SGD
RATE = {"sgd": {"alpha": 1.0}}
N_IN, N_OUT, N_DATA = 6, 4, 8


class Bench:
    """A product of a parameter and data, fitted by one step to labels."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        rng = np.random.default_rng(0)
        self.w0 = rng.standard_normal((N_OUT, N_IN), np.float32)
        self.x0 = rng.standard_normal((N_DATA, N_IN), np.float32)
        self.y0 = rng.standard_normal((N_DATA, N_OUT), np.float32)
        self.sched = capi.ggml_backend_sched_new([arena.backend], None, 2048, False, False)
        arena.callback(capi.ggml_backend_sched_free, self.sched)
        self.ctx = arena.context(1 << 24)

    def parameter(self, numbers: Numbers) -> Any:
        w = self.arena.weight(*numbers.shape[::-1], name="w")
        capi.ggml_set_param(w)
        capi.ggml_backend_tensor_set(w, numbers, 0)
        return w

    def inputs(self, n: int = N_DATA) -> Any:
        return self.arena.weight(N_IN, n)

    def data(self) -> Any:
        made = capi.ggml_opt_dataset_init(F32, F32, N_IN, N_OUT, N_DATA, 2)
        self.arena.callback(capi.ggml_opt_dataset_free, made)
        capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_data(made), self.x0, 0)
        capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_labels(made), self.y0, 0)
        return made

    def fit(self, x: Any, y: Any) -> None:
        """One step, over all of the data, however many go through the graph at once."""
        capi.ggml_opt_fit(
            self.sched, self.ctx, x, y, self.data(), MEAN_SQUARED_ERROR, SGD, lambda _: RATE, 1,
            N_DATA,
        )  # fmt: skip

    def init(self, **options: Any) -> Any:
        default = {"optimizer": SGD, "get_opt_pars": lambda: RATE}
        made = capi.ggml_opt_init(
            backend_sched=self.sched, loss_type=MEAN_SQUARED_ERROR, **{**default, **options}
        )
        self.arena.callback(capi.ggml_opt_free, made)
        return made

    def evaluate(self, training: Any, x: Any, backward: bool = True) -> None:
        capi.ggml_opt_alloc(training, backward)
        capi.ggml_backend_tensor_set(x, self.x0, 0)
        capi.ggml_backend_tensor_set(capi.ggml_opt_labels(training), self.y0, 0)
        capi.ggml_opt_eval(training, None)

    def stepped(self) -> Numbers:
        """What the parameter is to be, (out, in)."""
        return self.w0 - 2 * (self.x0 @ self.w0.T - self.y0).T @ self.x0 / self.y0.size


def numbers_of(tensor: Any) -> Numbers:
    found = np.empty(list(tensor.ne)[1::-1], np.float32)
    capi.ggml_backend_tensor_get(tensor, found, 0)
    return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    cpu = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    with Arena(cpu) as arena:
        arena.callback(capi.ggml_backend_free, cpu)
        yield Bench(arena)


def turned(bench: Bench, w: Any) -> Any:
    """An (in, out) parameter as ggml_mul_mat takes it: its gradient would be (out, in)."""
    return capi.ggml_cont(bench.ctx, capi.ggml_transpose(bench.ctx, w))


REFUSED = (
    r"can_train.*: the CPU cannot compute OPT_STEP_SGD 'step for w' of f32\[4,6,1,1\], .* with "
    r"gaps or permuted, .*; a parameter lies as it is used, .*: x @ w\.T, ggml_mul_mat\(w, x\)$"
)


def test_a_step(bench: Bench) -> None:
    w, x = bench.parameter(bench.w0), bench.inputs()
    bench.fit(x, capi.ggml_mul_mat(bench.ctx, w, x))
    np.testing.assert_allclose(numbers_of(w), bench.stepped(), rtol=1e-4, atol=1e-5)


def test_a_parameter_that_is_used_transposed(bench: Bench) -> None:
    """Its gradient is transposed, and the step would read it as it lies."""
    w, x = bench.parameter(bench.w0.T.copy()), bench.inputs()
    used = turned(bench, w)
    y = capi.ggml_mul_mat(bench.ctx, used, x)
    before = capi.ggml_used_mem(bench.ctx), used.flags, used.name, y.flags, y.name, w.flags
    with pytest.raises(ValueError, match=REFUSED):
        bench.fit(x, y)
    with pytest.raises(ValueError, match=f"ggml_opt_init: requires {REFUSED}"):
        bench.init(ctx_compute=bench.ctx, inputs=x, outputs=y)
    after = capi.ggml_used_mem(bench.ctx), used.flags, used.name, y.flags, y.name, w.flags
    assert after == before
    np.testing.assert_array_equal(numbers_of(w), bench.w0.T)


@pytest.mark.parametrize("at_once", [2, 4])
def test_gradients_that_are_summed_lie_as_the_parameter(bench: Bench, at_once: int) -> None:
    """Where several evaluations make a step, they are added up in tensors of their own."""
    w, x = bench.parameter(bench.w0.T.copy()), bench.inputs(at_once)
    bench.fit(x, capi.ggml_mul_mat(bench.ctx, turned(bench, w), x))
    np.testing.assert_allclose(numbers_of(w).T, bench.stepped(), rtol=1e-4, atol=1e-5)


def test_a_transposed_parameter_that_is_only_evaluated(bench: Bench) -> None:
    """Without a step nothing reads the gradient as it lies."""
    w, x = bench.parameter(bench.w0.T.copy()), bench.inputs()
    y = capi.ggml_mul_mat(bench.ctx, turned(bench, w), x)
    kind = capi.GGML_OPT_BUILD_TYPE_FORWARD
    training = bench.init(ctx_compute=bench.ctx, inputs=x, outputs=y, build_type=kind)
    bench.evaluate(training, x, backward=False)
    loss = np.empty(1, np.float32)
    capi.ggml_backend_tensor_get(capi.ggml_opt_loss(training), loss, 0)
    right = np.square(bench.x0 @ bench.w0.T - bench.y0).mean()
    np.testing.assert_allclose(loss, right, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_graph_for_each_evaluation(bench: Bench, transposed: bool) -> None:
    """Gradients are summed then, also those of one evaluation."""
    w = bench.parameter(bench.w0.T.copy() if transposed else bench.w0)
    x = bench.inputs()
    y = capi.ggml_mul_mat(bench.ctx, turned(bench, w) if transposed else w, x)
    graph = capi.ggml_new_graph_custom(bench.ctx, 64, True)
    capi.ggml_build_forward_expand(graph, y)
    training = bench.init()
    capi.ggml_opt_prepare_alloc(training, bench.ctx, graph, x, y)
    bench.evaluate(training, x)
    found = numbers_of(w).T if transposed else numbers_of(w)
    np.testing.assert_allclose(found, bench.stepped(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("period", [1, 2])
def test_gradients_of_a_step_are_those_of_its_evaluations(bench: Bench, period: int) -> None:
    """Of graphs that come one by one, ggml would add up the gradients of all steps before."""
    w, x = bench.parameter(bench.w0), bench.inputs()
    training = bench.init(opt_period=period)
    wanted = bench.w0
    for _ in range(3):
        for _ in range(period):
            ctx = bench.arena.context(1 << 20)
            y = capi.ggml_mul_mat(ctx, w, x)
            graph = capi.ggml_new_graph_custom(ctx, 64, True)
            capi.ggml_build_forward_expand(graph, y)
            capi.ggml_opt_prepare_alloc(training, ctx, graph, x, y)
            bench.evaluate(training, x)
        wanted = wanted - 2 * (bench.x0 @ wanted.T - bench.y0).T @ bench.x0 / bench.y0.size
        np.testing.assert_allclose(numbers_of(w), wanted, rtol=1e-3, atol=1e-4)


def test_results_that_are_in_one_graph_after_the_other(bench: Bench) -> None:
    """The scheduler has freed the memory that they had, when it needed more."""
    w, x = bench.parameter(bench.w0), bench.inputs()
    y = capi.ggml_mul_mat(bench.ctx, w, x)
    training = bench.init()
    for backward in (False, True, True, False, True):
        graph = capi.ggml_new_graph_custom(bench.ctx, 64, True)
        capi.ggml_build_forward_expand(graph, y)
        capi.ggml_opt_prepare_alloc(training, bench.arena.context(1 << 20), graph, x, y)
        before = numbers_of(w)
        bench.evaluate(training, x, backward)
        error = bench.x0 @ before.T - bench.y0
        after = before - 2 * error.T @ bench.x0 / bench.y0.size if backward else before
        np.testing.assert_allclose(numbers_of(w), after, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("at_once", [N_DATA, N_DATA // 2])
@pytest.mark.parametrize("softmax_first", [False, True])
def test_a_softmax_whose_result_is_read_for_its_gradient(
    bench: Bench, at_once: int, softmax_first: bool
) -> None:
    """An allocator would put the gradient over it, where the other addend comes first."""
    w, other, x = (
        bench.parameter(bench.w0),
        bench.parameter(bench.w0[::-1].copy()),
        bench.inputs(at_once),
    )
    a = capi.ggml_soft_max(bench.ctx, capi.ggml_mul_mat(bench.ctx, w, x))
    b = capi.ggml_mul_mat(bench.ctx, other, x)
    bench.fit(x, capi.ggml_add(bench.ctx, *((a, b) if softmax_first else (b, a))))
    p = np.exp(bench.x0 @ bench.w0.T)
    p /= p.sum(1, keepdims=True)
    slope = 2 * (p + bench.x0 @ bench.w0[::-1].T - bench.y0) / bench.y0.size
    inner = p * (slope - (slope * p).sum(1, keepdims=True))
    np.testing.assert_allclose(numbers_of(w), bench.w0 - inner.T @ bench.x0, rtol=1e-3, atol=1e-4)


def test_more_parameters_than_ggml_has_room_for(bench: Bench) -> None:
    """It copies the graph into room for so many nodes, and has the leaves there as well."""
    x = bench.inputs()
    adamw = {"optimizer": capi.GGML_OPT_OPTIMIZER_TYPE_ADAMW, "get_opt_pars": None}
    for n, fits in ((338, True), (342, False)):
        ctx = bench.arena.context(1 << 24)
        y = x
        for _ in range(n):
            y = capi.ggml_add(ctx, y, bench.parameter(bench.x0[:1]))
        if not fits:
            with pytest.raises(ValueError, match=r"it has 20\d\d tensors, .* has room for 2048$"):
                bench.init(ctx_compute=ctx, inputs=x, outputs=y, **adamw)
            continue
        training = bench.init(ctx_compute=ctx, inputs=x, outputs=y, **adamw)
        capi.ggml_opt_alloc(training, True)
        capi.ggml_backend_tensor_set(x, bench.x0, 0)
        labels = np.zeros((N_DATA, N_IN), np.float32)
        capi.ggml_backend_tensor_set(capi.ggml_opt_labels(training), labels, 0)
        capi.ggml_opt_eval(training, None)


def test_a_graph_for_each_evaluation_is_looked_at(bench: Bench) -> None:
    """Parts that overlap would be added up by threads at once."""
    w, x = bench.parameter(np.ones((6, 8), np.float32)), bench.inputs()
    part = capi.ggml_cont(bench.ctx, capi.ggml_view_2d(bench.ctx, w, N_IN, N_OUT, 2 * 4, 0))
    y = capi.ggml_mul_mat(bench.ctx, part, x)
    graph = capi.ggml_new_graph_custom(bench.ctx, 64, True)
    capi.ggml_build_forward_expand(graph, y)
    training = bench.init()
    told = "ggml_opt_prepare_alloc: requires can_train.* ACC 'grad for w' of "
    with pytest.raises(ValueError, match=told):
        capi.ggml_opt_prepare_alloc(training, bench.ctx, graph, x, y)


def test_an_operation_without_a_gradient(bench: Bench) -> None:
    """ggml's own abort, before it has made anything."""
    w, x = bench.parameter(bench.w0), bench.inputs()
    y = capi.ggml_gelu(bench.ctx, capi.ggml_mul_mat(bench.ctx, w, x))
    used = capi.ggml_used_mem(bench.ctx)
    with pytest.raises(AbortError, match="ggml_opt_init"):
        bench.init(ctx_compute=bench.ctx, inputs=x, outputs=y)
    assert capi.ggml_used_mem(bench.ctx) == used
