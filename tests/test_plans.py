"""What allocators, schedulers, plans and trainings are ready for, and graphs that change after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena, check_product
from _fake_backend import FakeDevice, buffer_type, require_layout
from _release import needs, needs_meta

from ggml_cffi import AbortError, GGMLError, Graph, capi, lib, ops
from ggml_cffi.backend import Backend
from ggml_cffi.context import Context
from ggml_cffi.device import device
from ggml_cffi.scheduler import Scheduler

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def one_thread(cpu: Any) -> None:
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)


def fill(tensor: Any, value: float) -> None:
    capi.ggml_backend_tensor_set(tensor, np.full(capi.ggml_nelements(tensor), value, np.float32), 0)


def first(tensor: Any) -> float:
    found = np.empty(capi.ggml_nelements(tensor), np.float32)
    capi.ggml_backend_tensor_get(tensor, found, 0)
    assert (found == found[0]).all()
    return float(found[0])


class Allocator:
    """A graph allocator, and the backend that computes."""

    name = "ggml_gallocr_alloc_graph"

    def __init__(self, arena: Arena) -> None:
        self.backend = arena.backend
        self.handle = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(self.backend))
        arena.callback(capi.ggml_gallocr_free, self.handle)

    def reserve(self, graph: Any) -> None:
        capi.ggml_gallocr_reserve(self.handle, graph)

    def allocate(self, graph: Any) -> None:
        capi.ggml_gallocr_alloc_graph(self.handle, graph)

    def compute(self, graph: Any) -> None:
        capi.ggml_backend_graph_compute(self.backend, graph)


class OnScheduler:
    name = "ggml_backend_sched_alloc_graph"

    def __init__(self, arena: Arena, *backends: Any) -> None:
        used = list(backends) or [arena.backend]
        self.handle = capi.ggml_backend_sched_new(used, None, 256, False, False)
        arena.callback(capi.ggml_backend_sched_free, self.handle)

    def reserve(self, graph: Any) -> None:
        capi.ggml_backend_sched_reserve(self.handle, graph)

    def allocate(self, graph: Any) -> None:
        capi.ggml_backend_sched_reset(self.handle)
        capi.ggml_backend_sched_alloc_graph(self.handle, graph)

    def compute(self, graph: Any) -> None:
        capi.ggml_backend_sched_graph_compute(self.handle, graph)


@pytest.fixture(params=[Allocator, OnScheduler], ids=["allocator", "scheduler"])
def memory(request: Any, arena: Arena) -> Any:
    return request.param(arena)


# ---- a plan is for graphs of one structure


class Chain:
    """x ** 4 * 2, or with `wide` x ** 2 * 2: as many nodes, of the same sizes."""

    def __init__(self, arena: Arena, wide: bool = False, n: int = 8) -> None:
        ctx = self.ctx = arena.context()
        self.x = capi.ggml_new_tensor_1d(ctx, F32, n)
        capi.ggml_set_input(self.x)
        one = capi.ggml_sqr(ctx, self.x)
        two = capi.ggml_sqr(ctx, self.x if wide else one)
        self.result = capi.ggml_add(ctx, two, one if wide else two)
        capi.ggml_set_output(self.result)
        self.graph = arena.graph(ctx, one, self.result, allocate=False)
        self.right = 2 * 3.0 ** (2 if wide else 4)

    def check(self, memory: Any) -> None:
        memory.allocate(self.graph)
        fill(self.x, 3.0)
        memory.compute(self.graph)
        assert first(self.result) == self.right


@pytest.mark.parametrize("reserved", [False, True], ids=["allocated", "reserved"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_graph_as_large_as_the_one_before(
    arena: Arena, memory: Any, wide: bool, reserved: bool
) -> None:
    before = Chain(arena, wide)
    if reserved:
        memory.reserve(before.graph)
    else:
        before.check(memory)
    for _ in range(2):
        Chain(arena, not wide).check(memory)
    Chain(arena, wide).check(memory)


@pytest.mark.parametrize("alone", [False, True], ids=["by an operation", "by themselves"])
def test_leaves_in_another_order(arena: Arena, memory: Any, alone: bool) -> None:
    """The nodes are the same, in the same order; leaves get their memory in that of theirs."""
    for swapped in (False, True):
        ctx = arena.context()
        left, right = (capi.ggml_new_tensor_1d(ctx, F32, 8) for _ in range(2))
        square = capi.ggml_sqr(ctx, right)
        result = capi.ggml_add(ctx, left, square)
        graph = capi.ggml_new_graph(ctx)
        if swapped:
            capi.ggml_build_forward_expand(graph, right if alone else square)
        elif alone:
            capi.ggml_build_forward_expand(graph, left)
        capi.ggml_build_forward_expand(graph, result)
        memory.allocate(graph)
        fill(left, 2.0)
        fill(right, 3.0)
        memory.compute(graph)
        assert first(result) == 11.0


def test_a_result_that_is_to_be_kept(arena: Arena, memory: Any) -> None:
    """Flags decide whose memory is used again."""
    for kept in (False, True):
        ctx = arena.context()
        x = capi.ggml_new_tensor_1d(ctx, F32, 8)
        capi.ggml_set_input(x)
        square = capi.ggml_sqr(ctx, x)
        if kept:
            capi.ggml_set_output(square)
        result = capi.ggml_sqr(ctx, square)
        graph = arena.graph(ctx, result, allocate=False)
        memory.allocate(graph)
        fill(x, 3.0)
        memory.compute(graph)
        assert first(result) == 81.0
    assert first(square) == 9.0


def test_a_row_in_place_of_a_column(arena: Arena, memory: Any) -> None:
    """An operation that may write over its operand may not where that is transposed."""
    numbers = np.arange(12, dtype=np.float32)
    for transposed in (False, True):
        ctx = arena.context()
        x = capi.ggml_new_tensor_2d(ctx, F32, 4, 3)
        square = capi.ggml_sqr(ctx, x)
        turned = capi.ggml_transpose(ctx, square)
        viewed = turned if transposed else capi.ggml_view_2d(ctx, square, 4, 3, 16, 0)
        result = capi.ggml_cont(ctx, viewed)
        graph = arena.graph(ctx, result, allocate=False)
        memory.allocate(graph)
        capi.ggml_backend_tensor_set(x, numbers, 0)
        memory.compute(graph)
        found = np.empty(12, np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
        squares = numbers.reshape(3, 4) ** 2
        np.testing.assert_array_equal(found, (squares.T if transposed else squares).ravel())


@pytest.fixture
def two_buffers(arena: Arena, cpu: Any) -> Any:
    kind = capi.ggml_backend_get_default_buffer_type(cpu)
    made = capi.ggml_gallocr_new_n([kind, kind])
    arena.callback(capi.ggml_gallocr_free, made)
    return made


def test_an_allocator_of_several_buffers_takes_a_graph_like_that_it_was_reserved_for(
    arena: Arena, cpu: Any, two_buffers: Any
) -> None:
    capi.ggml_gallocr_reserve_n(two_buffers, Chain(arena).graph, [0, 1, 1])
    for n in (8, 4, 8):
        chain = Chain(arena, n=n)
        for _ in range(2):  # and the same once more
            capi.ggml_gallocr_alloc_graph(two_buffers, chain.graph)
            fill(chain.x, 3.0)
            capi.ggml_backend_graph_compute(cpu, chain.graph)
            assert first(chain.result) == chain.right
    other = Chain(arena, wide=True)
    with pytest.raises(ValueError, match="ggml_gallocr_reserve_n must come first"):
        capi.ggml_gallocr_alloc_graph(two_buffers, other.graph)
    with pytest.raises(GGMLError, match="ggml_gallocr_reserve_n must come first"):
        capi.ggml_gallocr_alloc_graph(two_buffers, Chain(arena, n=LARGE).graph)
    capi.ggml_gallocr_reserve_n(two_buffers, other.graph, [1, 0, 0])
    capi.ggml_gallocr_alloc_graph(two_buffers, other.graph)
    fill(other.x, 3.0)
    capi.ggml_backend_graph_compute(cpu, other.graph)
    assert first(other.result) == other.right


def test_backends_that_results_were_assigned_to_outlast_a_new_plan(arena: Arena, cpu: Any) -> None:
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    kinds = [buffer_type(is_host=True), capi.ggml_backend_get_default_buffer_type(cpu)]
    sched = capi.ggml_backend_sched_new([other, cpu], kinds, 64, False, False)
    arena.callback(capi.ggml_backend_sched_free, sched)
    for wide in (False, True):
        chain = Chain(arena, wide)
        capi.ggml_backend_sched_reset(sched)
        for number, backend in ((0, cpu), (1, other), (2, cpu)):
            node = capi.ggml_graph_node(chain.graph, number)
            capi.ggml_backend_sched_set_tensor_backend(sched, node, backend)
        capi.ggml_backend_sched_alloc_graph(sched, chain.graph)
        second = capi.ggml_graph_node(chain.graph, 1)
        assert capi.ggml_backend_sched_get_tensor_backend(sched, second) == other
        assert capi.ggml_backend_sched_get_n_splits(sched) == 3
        fill(chain.x, 3.0)
        capi.ggml_backend_sched_graph_compute(sched, chain.graph)
        assert first(chain.result) == chain.right


# ---- memory that is replaced


def test_a_graph_after_a_larger_one(arena: Arena, memory: Any) -> None:
    small, large = Chain(arena), Chain(arena, n=LARGE)
    for chain in (small, large, small, large):
        chain.check(memory)


def test_graphs_that_take_turns_in_the_memory_of_an_allocator(arena: Arena) -> None:
    memory = Allocator(arena)
    chains = [Chain(arena), Chain(arena, wide=True)]
    memory.reserve(Chain(arena, n=64).graph)
    for chain in chains:
        memory.allocate(chain.graph)
    for chain in chains * 2:
        fill(chain.x, 3.0)
        memory.compute(chain.graph)
        assert first(chain.result) == chain.right


def test_a_result_that_another_graph_has_written_over(arena: Arena) -> None:
    """Graphs may take turns in an allocator's memory, so that nothing says so."""
    memory, chain, other = Allocator(arena), Chain(arena), Chain(arena)
    chain.check(memory)
    memory.allocate(other.graph)
    fill(other.x, 2.0)
    memory.compute(other.graph)
    assert first(chain.result) == first(other.result) == 32.0 != chain.right


def test_a_result_whose_memory_is_gone(arena: Arena, cpu: Any, memory: Any) -> None:
    chain = Chain(arena)
    chain.check(memory)
    other = arena.context()
    viewed = capi.ggml_view_1d(chain.ctx, chain.result, 4, 0)
    later = arena.graph(other, capi.ggml_sqr(other, viewed))
    memory.allocate(Chain(arena, n=LARGE).graph)
    for tensor in (chain.result, chain.x, viewed):
        with pytest.raises(AbortError, match=r"buffer.* not (set|allocated)"):
            first(tensor)
    for graph in (chain.graph, later):
        with pytest.raises(ValueError, match="allocated"):
            capi.ggml_backend_graph_compute(cpu, graph)
    chain.check(memory)


@pytest.mark.parametrize("measure", [False, True], ids=["reserved", "measured"])
def test_a_result_in_memory_that_is_given_to_a_graph_beforehand(
    arena: Arena, memory: Any, measure: bool
) -> None:
    chain, large = Chain(arena), Chain(arena, n=LARGE)
    chain.check(memory)
    if not measure:
        memory.reserve(large.graph)
    elif isinstance(memory, Allocator):
        capi.ggml_gallocr_reserve_n_size(memory.handle, large.graph)
    else:
        capi.ggml_backend_sched_reserve_size(memory.handle, large.graph)
    with pytest.raises(AbortError, match="buffer"):
        first(chain.result)
    chain.check(memory)


def test_a_result_of_an_allocator_that_is_freed(arena: Arena, cpu: Any) -> None:
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(cpu))
    chain = Chain(arena)
    capi.ggml_gallocr_alloc_graph(galloc, chain.graph)
    capi.ggml_gallocr_free(galloc)
    with pytest.raises(AbortError, match="buffer"):
        first(chain.result)
    with pytest.raises(ValueError, match="allocated"):
        capi.ggml_backend_graph_compute(cpu, chain.graph)


def test_a_context_that_goes_before_the_memory_does(arena: Arena, memory: Any) -> None:
    with Arena(arena.backend) as before:
        Chain(before).check(memory)
    taken = [arena.context() for _ in range(4)]  # at the address of the one that is gone, perhaps
    weights = [arena.tensor(8, ctx=ctx) for ctx in taken]
    for ctx in taken:
        arena.allocate(ctx)
    for weight in weights:
        fill(weight, 5.0)
    Chain(arena, n=LARGE).check(memory)
    assert [first(weight) for weight in weights] == [5.0] * 4


def test_nothing_is_remembered_of_graphs_and_allocators_that_are_gone(cpu: Any) -> None:
    before = lib.ggml_cffi_remembered()
    for kind in (Allocator, OnScheduler):
        with Arena(cpu) as arena:
            memory = kind(arena)
            for n in (8, LARGE):
                Chain(arena, n=n).check(memory)
            assert lib.ggml_cffi_remembered() > before
        assert lib.ggml_cffi_remembered() == before


# ---- an earlier result in the next graph


def test_an_earlier_result_of_the_same_memory_is_no_input(arena: Arena, memory: Any) -> None:
    chain = Chain(arena)
    chain.check(memory)
    x = capi.ggml_new_tensor_1d(chain.ctx, F32, 8)
    for operand in (chain.x, chain.result, capi.ggml_view_1d(chain.ctx, chain.x, 8, 0)):
        result = capi.ggml_add(chain.ctx, capi.ggml_sqr(chain.ctx, x), operand)
        graph = arena.graph(chain.ctx, result, allocate=False)
        if isinstance(memory, OnScheduler):
            capi.ggml_backend_sched_reset(memory.handle)
        with pytest.raises(ValueError, match="has memory of it from another graph"):
            memory.allocate(graph)
    if isinstance(memory, OnScheduler):
        with pytest.raises(ValueError, match="has memory of it from another graph"):
            capi.ggml_backend_sched_graph_compute(memory.handle, graph)


def test_an_earlier_result_of_other_memory_is_an_input(arena: Arena, memory: Any) -> None:
    chain = Chain(arena)
    chain.check(Allocator(arena))
    ctx = arena.context()
    x = capi.ggml_new_tensor_1d(ctx, F32, 8)
    result = capi.ggml_sub(ctx, capi.ggml_sqr(ctx, x), capi.ggml_view_tensor(ctx, chain.result))
    graph = arena.graph(ctx, result, allocate=False)
    memory.allocate(graph)
    fill(chain.x, 3.0)
    fill(x, 2.0)
    memory.compute(graph)
    assert first(result) == 4.0 - chain.right


def test_a_graph_that_has_grown_since_it_was_allocated(arena: Arena, memory: Any) -> None:
    chain = Chain(arena)
    chain.check(memory)
    capi.ggml_build_forward_expand(chain.graph, capi.ggml_sqr(chain.ctx, chain.result))
    with pytest.raises(ValueError, match="has memory of it from another graph"):
        memory.allocate(chain.graph)


# ---- a scheduler and the operands that it replaces


@pytest.fixture
def far(arena: Arena) -> Iterator[Any]:
    """A backend whose memory the CPU does not reach."""
    require_layout()
    made = FakeDevice("Far0", buffers=buffer_type(is_host=False))
    backend = capi.ggml_backend_dev_init(made.pointer)
    yield backend
    capi.ggml_backend_free(backend)


def crossing(arena: Arena, memory: OnScheduler, far: Any) -> Callable[[float], float]:
    """(x ** 2) ** 2, each square on a backend of its own."""
    chain = Chain(arena)
    one = capi.ggml_graph_node(chain.graph, 0)

    def run(value: float) -> float:
        capi.ggml_backend_sched_reset(memory.handle)
        assert chain.result.src[0].src[0] == one
        capi.ggml_backend_sched_set_tensor_backend(memory.handle, one, far)
        capi.ggml_backend_sched_set_tensor_backend(memory.handle, chain.x, far)
        for node in (chain.result.src[0], chain.result):
            capi.ggml_backend_sched_set_tensor_backend(memory.handle, node, arena.backend)
        capi.ggml_backend_sched_alloc_graph(memory.handle, chain.graph)
        assert chain.result.src[0].src[0] != one
        fill(chain.x, value)
        capi.ggml_backend_sched_graph_compute(memory.handle, chain.graph)
        return first(chain.result)

    return run


def test_a_scheduler_gives_operands_back_when_it_is_reset(arena: Arena, far: Any) -> None:
    with Arena(arena.backend) as inner:
        memory = OnScheduler(inner, far, arena.backend)
        runs = [crossing(inner, memory, far) for _ in range(2)]
        for value in (2.0, 3.0, 1.0):
            assert [run(value) for run in runs] == [2 * value**4] * 2


def test_a_scheduler_gives_operands_back_when_it_goes(arena: Arena, far: Any) -> None:
    chain = Chain(arena)
    with Arena(arena.backend) as inner:
        memory = OnScheduler(inner, far, arena.backend)
        capi.ggml_backend_sched_set_tensor_backend(memory.handle, chain.x, far)
        capi.ggml_backend_sched_set_tensor_backend(
            memory.handle, capi.ggml_graph_node(chain.graph, 0), far
        )
        for node in (chain.result.src[0], chain.result):
            capi.ggml_backend_sched_set_tensor_backend(memory.handle, node, arena.backend)
        capi.ggml_backend_sched_alloc_graph(memory.handle, chain.graph)
    chain.check(Allocator(arena))


def test_a_graph_that_a_scheduler_has_measured_or_split(arena: Arena, far: Any) -> None:
    with Arena(arena.backend) as inner:
        memory = OnScheduler(inner, far, arena.backend)
        chain = Chain(inner)
        operands = [list(capi.ggml_graph_node(chain.graph, i).src) for i in range(3)]
        one = capi.ggml_graph_node(chain.graph, 0)
        for use in (
            capi.ggml_backend_sched_reserve,
            capi.ggml_backend_sched_reserve_size,
            capi.ggml_backend_sched_split_graph,
        ):
            capi.ggml_backend_sched_set_tensor_backend(memory.handle, one, far)
            use(memory.handle, chain.graph)
            assert [list(capi.ggml_graph_node(chain.graph, i).src) for i in range(3)] == operands
        memory.allocate(chain.graph)
        fill(chain.x, 3.0)
        memory.compute(chain.graph)
        assert first(chain.result) == chain.right


@pytest.mark.parametrize("n", [1, 2])
def test_a_scheduler_with_several_copies_of_its_inputs(arena: Arena, cpu: Any, n: int) -> None:
    backends = [capi.ggml_backend_cpu_init() for _ in range(n - 1)]
    sched = capi.ggml_backend_sched_new([*backends, cpu], None, 64, True, False)
    for chain in [Chain(arena), Chain(arena, wide=True)] * 3:
        capi.ggml_backend_sched_reset(sched)
        capi.ggml_backend_sched_alloc_graph(sched, chain.graph)
        fill(chain.x, 3.0)
        capi.ggml_backend_sched_graph_compute(sched, chain.graph)
        assert first(chain.result) == chain.right
    capi.ggml_backend_sched_free(sched)
    for backend in backends:
        capi.ggml_backend_free(backend)


# ---- graphs that change, or go, after something was made ready for them


def clear(arena: Arena, chain: Chain) -> None:
    capi.ggml_graph_clear(chain.graph)
    other = capi.ggml_sqr(chain.ctx, capi.ggml_new_tensor_1d(chain.ctx, F32, 8))
    for _ in range(2):
        other = capi.ggml_sqr(chain.ctx, other)
    capi.ggml_build_forward_expand(chain.graph, other)


def expand(arena: Arena, chain: Chain) -> None:
    capi.ggml_build_forward_expand(chain.graph, capi.ggml_sqr(chain.ctx, chain.result))


def select(arena: Arena, chain: Chain) -> None:
    capi.ggml_build_forward_select(chain.graph, [capi.ggml_sqr(chain.ctx, chain.result)], 0)


def add_node(arena: Arena, chain: Chain) -> None:
    capi.ggml_graph_add_node(chain.graph, capi.ggml_sqr(chain.ctx, chain.result))


def copy(arena: Arena, chain: Chain) -> None:
    other = Chain(arena)
    capi.ggml_graph_clear(chain.graph)
    capi.ggml_graph_cpy(other.graph, chain.graph)


CHANGES = pytest.mark.parametrize(
    "change",
    [
        clear,
        expand,
        add_node,
        copy,
        pytest.param(select, marks=needs("ggml_build_forward_select")),
    ],
)


@CHANGES
def test_the_graph_of_a_plan(arena: Arena, cpu: Any, change: Callable[..., None]) -> None:
    chain = Chain(arena)
    chain.check(Allocator(arena))
    plan = capi.ggml_backend_graph_plan_create(cpu, chain.graph)
    capi.ggml_backend_graph_plan_compute(cpu, plan)
    change(arena, chain)
    with pytest.raises(ValueError, match="graph_is_as_planned"):
        capi.ggml_backend_graph_plan_compute(cpu, plan)
    capi.ggml_backend_graph_plan_free(cpu, plan)


@pytest.mark.parametrize("reset", [False, True], ids=["freed", "reset"])
def test_the_graph_of_a_plan_is_gone(arena: Arena, cpu: Any, reset: bool) -> None:
    ctx, ctx_graph = arena.context(), capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    graph = capi.ggml_new_graph(ctx_graph)
    result = capi.ggml_sqr(ctx, arena.weight(4))
    capi.ggml_build_forward_expand(graph, result)
    Allocator(arena).allocate(graph)
    plan = capi.ggml_backend_graph_plan_create(cpu, graph)
    if reset:
        capi.ggml_reset(ctx_graph)
        assert capi.ggml_new_graph(ctx_graph) == graph
    else:
        capi.ggml_free(ctx_graph)
    with pytest.raises(ValueError, match="graph_is_as_planned"):
        capi.ggml_backend_graph_plan_compute(cpu, plan)
    capi.ggml_backend_graph_plan_free(cpu, plan)
    if reset:
        capi.ggml_free(ctx_graph)


@CHANGES
def test_the_graph_of_a_scheduler(arena: Arena, change: Callable[..., None]) -> None:
    memory = OnScheduler(arena)
    chain = Chain(arena)
    chain.check(memory)
    change(arena, chain)
    for use in (
        capi.ggml_backend_sched_graph_compute,
        capi.ggml_backend_sched_graph_compute_async,
        capi.ggml_backend_sched_alloc_graph,
    ):
        with pytest.raises(ValueError, match="reset_or_allocated_for"):
            use(memory.handle, chain.graph)


def test_a_graph_rebuilt_at_its_address(arena: Arena, memory: Any) -> None:
    chain = Chain(arena)
    chain.check(memory)
    for exponent in (1, 2, 3):
        capi.ggml_graph_clear(chain.graph)
        x = result = capi.ggml_new_tensor_1d(chain.ctx, F32, 8)
        for _ in range(exponent):
            result = capi.ggml_sqr(chain.ctx, result)
        capi.ggml_build_forward_expand(chain.graph, result)
        memory.allocate(chain.graph)
        fill(x, 2.0)
        memory.compute(chain.graph)
        assert first(result) == 2.0**2**exponent


# ---- within a computation


def within(arena: Arena, memory: Any, inside: Callable[[Any, Any], None]) -> None:
    """Call it with the graph that is computed and its context, from an operation of it."""
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(1)
        inside(graph, ctx)

    ctx = arena.context()
    x = capi.ggml_new_tensor_1d(ctx, F32, 8)
    result = capi.ggml_sqr(ctx, capi.ggml_map_custom1(ctx, x, function, 1))
    graph = arena.graph(ctx, result, allocate=False)
    memory.allocate(graph)
    memory.compute(graph)
    assert calls == [1]


def test_the_memory_of_a_graph_that_is_computed(arena: Arena) -> None:
    memory, large = Allocator(arena), Chain(arena, n=LARGE)

    def inside(graph: Any, ctx: Any) -> None:
        for use in (
            lambda: capi.ggml_gallocr_reserve(memory.handle, large.graph),
            lambda: capi.ggml_gallocr_reserve_n(memory.handle, large.graph),
            lambda: capi.ggml_gallocr_reserve_n_size(memory.handle, large.graph),
            lambda: capi.ggml_gallocr_alloc_graph(memory.handle, large.graph),
            lambda: capi.ggml_gallocr_free(memory.handle),
        ):
            with pytest.raises(ValueError, match="a computation that has not ended uses"):
                use()
        Chain(arena).check(Allocator(arena))  # other memory is free

    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)

    class Elsewhere(Allocator):
        def compute(self, graph: Any) -> None:
            capi.ggml_backend_graph_compute(other, graph)

    elsewhere = Elsewhere(arena)
    elsewhere.handle = memory.handle
    within(arena, elsewhere, inside)


def test_a_graph_that_is_computed_and_its_context(arena: Arena, memory: Any) -> None:
    def inside(graph: Any, ctx: Any) -> None:
        free = capi.ggml_new_graph(ctx)
        node = capi.ggml_graph_node(graph, -1)
        for use in (
            lambda: capi.ggml_graph_clear(graph),
            lambda: capi.ggml_build_forward_expand(graph, node),
            lambda: capi.ggml_graph_add_node(graph, node),
            lambda: capi.ggml_graph_cpy(free, graph),
            lambda: capi.ggml_free(ctx),
            lambda: capi.ggml_reset(ctx),
        ):
            with pytest.raises(ValueError, match=r"computation that has not ended|n_nodes\(dst\)"):
                use()
        assert capi.ggml_graph_n_nodes(graph) == 2
        capi.ggml_build_forward_expand(free, node)
        capi.ggml_graph_clear(free)

    within(arena, memory, inside)


def test_the_context_of_an_operand_in_a_computation(arena: Arena, memory: Any) -> None:
    operands = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    x = capi.ggml_new_tensor_1d(operands, F32, 8)
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(1)
        with pytest.raises(ValueError, match="a computation that has not ended uses it"):
            capi.ggml_free(operands)

    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, x, function, 1), allocate=False)
    memory.allocate(graph)
    memory.compute(graph)
    assert calls == [1]
    capi.ggml_free(operands)


def test_the_graph_of_a_plan_that_is_computed(arena: Arena, cpu: Any) -> None:
    calls = []

    def function(dst: Any, src: Any, ith: int, nth: int) -> None:
        calls.append(1)
        with pytest.raises(ValueError, match="a computation that has not ended uses it"):
            capi.ggml_graph_clear(graph)

    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, arena.weight(8), function, 1))
    plan = capi.ggml_backend_graph_plan_create(cpu, graph)
    capi.ggml_backend_graph_plan_compute(cpu, plan)
    capi.ggml_backend_graph_plan_free(cpu, plan)
    capi.ggml_graph_compute_with_ctx(arena.context(no_alloc=False), graph, 1)
    capi.ggml_graph_compute(graph, capi.ggml_graph_plan(graph, 1))
    assert calls == [1] * 3


# ---- nodes that are added one by one


def test_a_node_that_is_added_is_computed(arena: Arena, cpu: Any) -> None:
    ctx = arena.context()
    x = arena.weight(4)
    fill(x, 3.0)
    one = capi.ggml_sqr(ctx, x)
    two = capi.ggml_sqr(ctx, one)
    graph = capi.ggml_new_graph(ctx)
    for node in (one, two):
        capi.ggml_graph_add_node(graph, node)
    arena.allocate(ctx)
    capi.ggml_backend_graph_compute(cpu, graph)
    assert (first(one), first(two)) == (9.0, 81.0)


def test_a_node_that_is_added_to_a_graph_with_others(arena: Arena, cpu: Any) -> None:
    ctx = arena.context()
    x = arena.weight(4)
    fill(x, 3.0)
    one = capi.ggml_sqr(ctx, x)
    graph = arena.graph(ctx, one, allocate=False)
    two = capi.ggml_sqr(ctx, one)
    capi.ggml_graph_add_node(graph, two)
    arena.allocate(ctx)
    capi.ggml_backend_graph_compute(cpu, graph)
    assert first(two) == 81.0


# ---- training


def rate() -> Any:
    return {"adamw": {"alpha": 0.125, "wd": 0.0}}


class Training:
    """w = (1, 1, 1, 1) is trained to become smaller."""

    def __init__(self, arena: Arena, sched: Any, static: bool = True, **parameters: Any) -> None:
        self.arena, self.sched = arena, sched
        weights = arena.context()
        self.w, self.x = arena.tensor(4, 1, ctx=weights), arena.tensor(4, 2, ctx=weights)
        capi.ggml_set_param(self.w)
        arena.allocate(weights)
        fill(self.w, 1.0)
        fill(self.x, 1.0)
        given: dict[str, Any] = {"get_opt_pars": rate, "opt_period": 1, **parameters}
        if static:
            ctx, outputs = self.outputs()
            given.update(ctx_compute=ctx, inputs=self.x, outputs=outputs)
        self.handle = capi.ggml_opt_init(
            backend_sched=sched,
            loss_type=capi.GGML_OPT_LOSS_TYPE_SUM,
            **given,
        )
        arena.callback(capi.ggml_opt_free, self.handle)

    def outputs(self) -> tuple[Any, Any]:
        ctx = self.arena.context(1 << 22)
        return ctx, capi.ggml_mul_mat(ctx, self.w, self.x)

    def prepare(self) -> Any:
        ctx, outputs = self.outputs()
        graph = capi.ggml_new_graph_custom(ctx, 256, True)
        capi.ggml_build_forward_expand(graph, outputs)
        capi.ggml_opt_prepare_alloc(self.handle, ctx, graph, self.x, outputs)
        return graph

    def step(self, backward: bool = True) -> float:
        capi.ggml_opt_alloc(self.handle, backward)
        capi.ggml_opt_eval(self.handle, None)
        found = np.empty(4, np.float32)
        capi.ggml_backend_tensor_get(self.w, found, 0)
        return float(round(found[0], 3))


@pytest.fixture
def sched(arena: Arena) -> Any:
    made = capi.ggml_backend_sched_new([arena.backend], None, 1024, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


SHARED = "its scheduler has been used for another graph since"


def use(arena: Arena, sched: Any, n: int = 8) -> None:
    """Compute another graph on it."""
    chain = Chain(arena, n=n)
    capi.ggml_backend_sched_reset(sched)
    capi.ggml_backend_sched_alloc_graph(sched, chain.graph)
    fill(chain.x, 3.0)
    capi.ggml_backend_sched_graph_compute(sched, chain.graph)
    assert first(chain.result) == chain.right


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("n", [8, LARGE])
def test_a_scheduler_that_a_training_shares_with_a_graph(
    arena: Arena, sched: Any, n: int, reset: bool
) -> None:
    training = Training(arena, sched)
    assert [training.step() for _ in range(2)] == [0.875, 0.75]
    use(arena, sched, n)
    if reset:
        capi.ggml_backend_sched_reset(sched)
    for _ in range(2):
        with pytest.raises(ValueError, match=SHARED):
            training.step()
    # it allocates another kind of graph anew
    assert [training.step(False), training.step()] == [0.75, 0.625]
    another = Training(arena, sched)
    assert [another.step() for _ in range(2)] == [0.875, 0.75]
    with pytest.raises(ValueError, match=SHARED):
        training.step()


def test_a_scheduler_that_is_used_between_allocation_and_evaluation(
    arena: Arena, sched: Any
) -> None:
    for static in (True, False):
        training = Training(arena, sched, static)
        if not static:
            training.prepare()
        capi.ggml_opt_alloc(training.handle, True)
        use(arena, sched)
        with pytest.raises(ValueError, match=SHARED):
            capi.ggml_opt_eval(training.handle, None)
        assert first(training.w) == 1.0


def test_a_graph_on_the_scheduler_of_a_training(arena: Arena, sched: Any) -> None:
    training = Training(arena, sched)
    training.step()
    chain = Chain(arena)
    with pytest.raises(ValueError, match="reset_or_allocated_for"):
        capi.ggml_backend_sched_graph_compute(sched, chain.graph)
    assert training.step() == 0.75


def given_each_time(arena: Arena) -> list[float]:
    """What a training is right to do that is given a graph for each of three steps."""
    sched = capi.ggml_backend_sched_new([arena.backend], None, 1024, False, False)
    arena.callback(capi.ggml_backend_sched_free, sched)
    training = Training(arena, sched, static=False)
    found = []
    for _ in range(3):
        training.prepare()
        found.append(training.step())
    assert found[0] == 0.875
    assert sorted(found, reverse=True) == found
    return found


def test_trainings_that_are_given_graphs_share_a_scheduler(arena: Arena, sched: Any) -> None:
    trainings = [Training(arena, sched, static=False) for _ in range(2)]
    for right in given_each_time(arena):
        for training in trainings:
            training.prepare()
            assert training.step() == right
            use(arena, sched)


def dataset(arena: Arena) -> Any:
    made = capi.ggml_opt_dataset_init(F32, F32, 4, 0, 4, 1)
    arena.callback(capi.ggml_opt_dataset_free, made)
    fill(capi.ggml_opt_dataset_data(made), 1.0)
    return made


def test_epochs_on_a_scheduler_that_is_shared(arena: Arena, sched: Any) -> None:
    data = dataset(arena)
    training = Training(arena, sched)
    refused = []

    def callback(*args: Any) -> None:
        chain = Chain(arena)
        other = Training(arena, sched)
        for attempt in (
            lambda: capi.ggml_backend_sched_alloc_graph(sched, chain.graph),
            lambda: capi.ggml_backend_sched_reserve(sched, chain.graph),
            lambda: capi.ggml_backend_sched_reserve_size(sched, chain.graph),
            lambda: other.step(),
        ):
            capi.ggml_backend_sched_reset(sched)
            with pytest.raises(ValueError, match="a training that has not ended uses"):
                attempt()
            refused.append(1)

    for _ in range(2):
        capi.ggml_opt_epoch(training.handle, data, None, None, 2, callback, callback)
        use(arena, sched)  # between them there is no harm: an epoch with two parts begins anew
    assert round(first(training.w), 3) == 0.75
    assert len(refused) == 2 * 2 * 4
    capi.ggml_opt_epoch(training.handle, data, None, None, 4)
    use(arena, sched)
    with pytest.raises(ValueError, match=SHARED):
        capi.ggml_opt_epoch(training.handle, data, None, None, 4)


def test_an_evaluation_that_an_abort_has_ended(arena: Arena, sched: Any) -> None:
    """ggml takes it for one that is still to be evaluated: that comes first, then."""
    alpha = 0.125

    def parameters() -> Any:
        return {"adamw": {"alpha": alpha, "wd": 0.0}}

    training, data = Training(arena, sched, get_opt_pars=parameters), dataset(arena)
    assert training.step() == 0.875
    alpha = -1.0
    with pytest.raises(AbortError, match=r"alpha > 0\.0f"):
        capi.ggml_opt_epoch(training.handle, data, None, None, 4)
    alpha = 0.125
    for use in (
        lambda: capi.ggml_opt_alloc(training.handle, True),
        lambda: capi.ggml_opt_epoch(training.handle, data, None, None, 4),
    ):
        with pytest.raises(AbortError, match="!opt_ctx->eval_ready"):
            use()
    capi.ggml_opt_eval(training.handle, None)
    assert training.step() == 0.625
    capi.ggml_opt_epoch(training.handle, data, None, None, 4)
    assert round(first(training.w), 3) == 0.375


def test_a_graph_is_given_for_each_evaluation(arena: Arena, sched: Any) -> None:
    right = given_each_time(arena)
    training = Training(arena, sched, static=False)
    training.prepare()
    assert training.step() == right[0]
    for backward in (True, False):
        with pytest.raises(ValueError, match="ggml_opt_prepare_alloc gives it another one"):
            capi.ggml_opt_alloc(training.handle, backward)
    training.prepare()
    assert training.step() == right[1]


def test_the_graph_of_a_training_changes(arena: Arena, sched: Any) -> None:
    training = Training(arena, sched, static=False)
    graph = training.prepare()
    capi.ggml_opt_alloc(training.handle, True)
    capi.ggml_graph_clear(graph)
    with pytest.raises(ValueError, match="its graph has been changed since"):
        capi.ggml_opt_eval(training.handle, None)


def test_the_graph_of_a_training_is_gone(arena: Arena, sched: Any) -> None:
    with Arena(arena.backend) as inner:
        training = Training(arena, sched, static=False)
        training.arena = inner
        training.prepare()
    with pytest.raises(ValueError, match="the graph that it was given is gone"):
        capi.ggml_opt_alloc(training.handle, True)


@pytest.mark.parametrize("static", [True, False])
def test_accumulated_gradients_without_a_graph_for_them(
    arena: Arena, sched: Any, static: bool
) -> None:
    missing = "it has no graph for the optimiser"
    forward = Training(arena, sched, static, build_type=capi.GGML_OPT_BUILD_TYPE_FORWARD)
    with pytest.raises(ValueError, match=missing):
        capi.ggml_opt_grad_acc(forward.handle, forward.w)
    training = Training(arena, sched, static, opt_period=2)
    if not static:
        with pytest.raises(ValueError, match=missing):
            capi.ggml_opt_grad_acc(training.handle, training.w)
        training.prepare()
        capi.ggml_opt_alloc(training.handle, True)
    assert capi.ggml_opt_grad_acc(training.handle, training.w) is not None
    assert capi.ggml_opt_grad_acc(training.handle, arena.tensor(4)) is None
    if not static:
        capi.ggml_opt_eval(training.handle, None)
        with pytest.raises(ValueError, match=missing):
            capi.ggml_opt_grad_acc(training.handle, training.w)


# ---- the objects


@needs_meta  # as the objects do
def test_graphs_compiled_on_one_backend_keep_their_memory() -> None:
    with Context() as ctx, Backend(device("CPU"), 1) as backend:
        x = ctx.input((8,), name="x")
        square = ops.sqr(x)
        compiled = [Graph(ops.sqr(square)).compile(backend), Graph(ops.sqr(x)).compile(backend)]
        numbers = np.full(8, 3.0, np.float32)
        for _ in range(2):
            assert [one(x=numbers)[0] for one in compiled] == [81.0, 9.0]
        for one in compiled:
            one.close()
        check_product(backend.handle)


@needs_meta
def test_a_compiled_graph_is_not_closed_by_its_own_operation() -> None:
    closed = []

    def function(result: Any, x: Any) -> None:
        with pytest.raises(ValueError, match="is being run, and stays open"):
            compiled.close()
        closed.append(compiled.closed)
        result[...] = x + 1

    with Context() as ctx, Backend(device("CPU"), 1) as backend, Scheduler([backend]) as scheduler:
        x = ctx.input((8,), name="x")
        for target in (backend, scheduler, "CPU"):
            compiled = Graph(ops.custom(function, x) * 2).compile(target)
            for _ in range(2):
                assert compiled(x=np.ones(8, np.float32)).tolist() == [4.0] * 8
            compiled.close()
            assert compiled.closed
        assert closed == [False] * 6


def test_a_graph_that_two_allocators_are_given_in_turn(cpu: Any) -> None:
    """The second one has nothing to place, until the first one takes its memory away."""
    with Arena(cpu) as arena:
        one, other = Allocator(arena), Allocator(arena)
        made = []
        for n in (LARGE, 2 * LARGE, 3 * LARGE):
            ctx = arena.context()
            x = arena.tensor(n, ctx=ctx)
            capi.ggml_set_input(x)
            result = capi.ggml_sqr(ctx, x)
            made.append((x, result, arena.graph(ctx, result, allocate=False)))

        def run(number: int, value: float) -> float:
            x, result, graph = made[number]
            fill(x, value)
            one.compute(graph)
            return first(result)

        for allocator in (one, other):
            allocator.allocate(made[0][2])
            assert run(0, 3) == 9
        one.allocate(made[1][2])  # the first graph has no memory any more
        other.allocate(made[0][2])
        assert (run(0, 3), run(1, 4)) == (9, 16)
        other.allocate(made[2][2])  # and again
        with pytest.raises(GGMLError):
            run(0, 2)
        assert (run(1, 4), run(2, 5)) == (16, 25)


def test_contexts_go_while_graphs_of_others_are_computed() -> None:
    """Each thread has its own: what one frees is compared with what the others compute."""
    ends = threading.Event()
    errors: list[BaseException] = []

    def work(computes: bool) -> None:
        try:
            backend = capi.ggml_backend_cpu_init()
            capi.ggml_backend_cpu_set_n_threads(backend, 1)
            while not ends.is_set():
                with Arena(backend) as arena:
                    ctx = arena.context(1 << 18)
                    x = arena.tensor(8, ctx=ctx)
                    capi.ggml_set_input(x)
                    result = capi.ggml_sqr(ctx, x)
                    if computes:
                        graph = arena.graph(ctx, result)
                        fill(x, 3)
                        capi.ggml_backend_graph_compute(backend, graph)
                        assert first(result) == 9
            capi.ggml_backend_free(backend)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    ends.wait(2.0)
    ends.set()
    for thread in threads:
        thread.join()
    assert not errors
