"""Contexts: tensors of any shape and number, their memory, and who keeps whom."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import MetaDevice, SplitState, capi, device, diagnostics, ops, quants
from ggml_cffi.context import Context, place
from ggml_cffi.errors import SplitError
from ggml_cffi.graph import Graph


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


def meta(split: Any = lambda info, n: SplitState.mirrored(), **kwargs: Any) -> MetaDevice:
    return MetaDevice(["CPU", "CPU"], split, **kwargs)


@pytest.mark.parametrize(
    ("shape", "ne"),
    [
        ((), (1, 1, 1, 1)),
        (5, (5, 1, 1, 1)),
        ((2, 3), (3, 2, 1, 1)),
        ([4, 3, 2, 1], (1, 2, 3, 4)),
        ((1, 1, 5), (5, 1, 1, 1)),
        ((0, 3), (3, 0, 1, 1)),
        (np.int64(3), (3, 1, 1, 1)),
    ],
)
def test_a_shape_is_numpys_order(ctx: Context, shape: Any, ne: tuple[int, ...]) -> None:
    tensor = ctx.tensor(shape, "f16", name="t")
    wanted = np.empty(shape).shape
    assert (tensor.shape, tensor.ne, tensor.ndim, tensor.name) == (wanted, ne, len(wanted), "t")
    assert tensor.size == np.empty(shape).size
    assert tensor.dtype == np.float16 and tensor.type == capi.GGML_TYPE_F16


def test_shapes_that_are_none(ctx: Context) -> None:
    for shape in ((1, 2, 3, 4, 5), (-1,), (1 << 40, 1 << 40)):
        with pytest.raises(ValueError, match="shape is"):
            ctx.tensor(shape)
    for wrong in ("ab", 1.5, (1.5,), None, (None,)):
        with pytest.raises(TypeError, match="expected integers"):
            ctx.tensor(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"multiple of 32, a block of q4_0"):
        ctx.tensor((2, 33), "q4_0")
    with pytest.raises(ValueError, match="is no type of ggml's"):
        ctx.tensor(3, "f33")


def test_it_grows_as_it_needs_to(ctx: Context) -> None:
    leaves = [ctx.tensor(4, name=f"t{i}") for i in range(3000)]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    ctx.allocate("CPU")
    for i, leaf in enumerate(leaves):
        leaf.set(np.full(4, i))
    made = Graph(total).compile("CPU", n_threads=1)
    np.testing.assert_array_equal(made(), np.full(4, sum(range(3000))))


def test_allocating_twice(ctx: Context) -> None:
    first = ctx.from_numpy(np.arange(6, dtype=np.float32), name="first")
    assert not first.has_memory
    assert ctx.allocate("CPU") > 0
    assert ctx.allocate("CPU") == 0
    first.set(np.ones(6))
    second = ctx.from_numpy(np.arange(3, dtype=np.int32))
    assert ctx.allocate("CPU") > 0
    np.testing.assert_array_equal(first.numpy(), np.ones(6))  # not written again
    np.testing.assert_array_equal(second.numpy(), [0, 1, 2])


def test_inputs_and_results_get_no_memory(ctx: Context) -> None:
    given = ctx.input((2, 2), name="x")
    result = ops.sqr(given)
    ctx.tensor(1)
    ctx.allocate("CPU")
    assert not given.has_memory and not result.has_memory


@pytest.mark.parametrize("dtype", ["q8_0", "f16", "bf16", "i32"])
def test_from_numpy_converts(ctx: Context, dtype: str) -> None:
    array = np.arange(64, dtype=np.int16 if dtype == "i32" else np.float32).reshape(2, 32)
    tensor = ctx.from_numpy(array, dtype=dtype)
    ctx.allocate("CPU")
    np.testing.assert_allclose(np.asarray(tensor, np.float32), array, rtol=0.01, atol=0.3)


def test_from_numpy_refuses_at_once(ctx: Context) -> None:
    with pytest.raises(TypeError, match=r"complex64, which cannot be cast to float32"):
        ctx.from_numpy(np.zeros(3, np.complex64), dtype="f32")
    with pytest.raises(TypeError, match="float32, which cannot be cast to int32"):
        ctx.from_numpy(np.zeros(3, np.float32), dtype="i32")
    with pytest.raises(ValueError, match="no type for NumPy's uint64"):
        ctx.from_numpy(np.zeros(3, np.uint64))
    assert ctx.allocate("CPU") >= 0  # nothing of them is left to be written


def test_targets(ctx: Context) -> None:
    ctx.tensor(3)
    with pytest.raises(TypeError, match="expected a Device, a Backend or a name"):
        ctx.allocate(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no device 'no'"):
        ctx.allocate("no")
    with pytest.raises(ValueError, match=r"CPU has no buffer type 'odd'; it has CPU"):
        ctx.allocate("CPU", buffer_type="odd")
    with device("CPU").init_backend(1) as backend:
        assert ctx.allocate(backend) > 0


@pytest.mark.parametrize("where", ["CPU", pytest.param("meta", marks=needs_meta)])
@pytest.mark.parametrize("n_between", [0, 70], ids=["one arena", "two arenas"])
def test_memory_that_cannot_be_had(ctx: Context, where: str, n_between: int) -> None:
    target = meta() if where == "meta" else device("CPU")
    small = ctx.from_numpy(np.ones(4, np.float32), name="small")
    for i in range(n_between):
        ctx.tensor(4, name=f"t{i}")
    huge = ctx.tensor((1 << 30, 1 << 20), name="huge")
    for _ in range(2):
        with pytest.raises(MemoryError):
            ctx.allocate(target)
        for one in (small, huge):  # nothing is half done
            assert not one.has_memory and not one.handle.buffer and not one.handle.data
        with pytest.raises(ValueError, match="has no memory"):
            small.numpy()
        made = Graph(small * 2).compile(target)  # as what it was before: a constant
        np.testing.assert_array_equal(made(), np.full(4, 2))


@pytest.mark.parametrize("where", ["CPU", pytest.param("meta", marks=needs_meta)])
def test_numbers_that_cannot_be_written(ctx: Context, where: str) -> None:
    """All is as it was: with other numbers in their place it can be done again."""
    target = meta() if where == "meta" else device("CPU")
    good = ctx.from_numpy(np.arange(4, dtype=np.float32), name="good")
    numbers = np.full((64, 256), np.nan, np.float32)
    bad = ctx.from_numpy(numbers, name="bad", dtype="q4_K")
    later = ctx.from_numpy(np.ones(4, np.float32), name="later")

    def refuse(*args: Any) -> Any:
        raise RuntimeError("no such numbers")

    before = diagnostics.live_handles()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quants, "quantize", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such numbers"):
                ctx.allocate(target)
            for one in (good, bad, later):
                assert not one.has_memory and not one.handle.buffer and not one.handle.data
    assert diagnostics.live_handles() == before
    numbers[:] = 1
    assert ctx.allocate(target) > 0
    np.testing.assert_array_equal(good.numpy(), np.arange(4))
    np.testing.assert_array_equal(later.numpy(), np.ones(4))
    np.testing.assert_allclose(bad.numpy(), numbers, rtol=1e-3)


def test_what_a_block_raises_comes_out_of_it() -> None:
    """Also where the traceback keeps an array, over which the Context cannot be closed yet."""
    kept: list[Any] = []

    def block(context: Context, error: type[BaseException] | None) -> None:
        with context:
            tensor = context.from_numpy(np.ones(3, np.float32))
            context.allocate("CPU")
            kept.append(tensor.numpy())
            if error is not None:
                raise error

    for error, comes in ((ZeroDivisionError, ZeroDivisionError), (None, BufferError)):
        context = Context()
        with pytest.raises(comes):
            block(context, error)
        assert not context.closed
        kept.clear()
        context.close()


class Overflows:
    """A constant whose numbers overflow as they are written, when something else is done."""

    def __init__(self, ctx: Context, meanwhile: Any) -> None:
        self.first = ctx.from_numpy(np.full((512, 512), 7.0), "first", dtype="f32")
        ctx.from_numpy(np.full(4, 1e300), "large", dtype="f32")
        self.last = ctx.from_numpy(np.full(4, 7.0, np.float32), "last")
        self.ctx, self.meanwhile = ctx, meanwhile

    def allocate(self) -> None:
        with np.errstate(over="call", call=lambda kind, flag: self.meanwhile(self)):
            self.ctx.allocate("CPU")


def test_an_array_that_is_taken_while_allocating_fails_stays_good() -> None:
    ctx, taken = Context(), []

    def take(case: Overflows) -> None:
        taken.append(case.first.numpy())
        raise RuntimeError("writing fails")

    case = Overflows(ctx, take)
    with pytest.raises(RuntimeError, match="writing fails"):
        case.allocate()
    assert not case.first.has_memory and (taken[0] == 7).all()
    with pytest.raises(BufferError, match="arrays share the memory of 1 of"):
        ctx.close()
    case.meanwhile = lambda case: None
    case.allocate()
    assert case.first.numpy() is not taken[0]
    case.first.set(np.zeros((512, 512)))
    assert (taken[0] == 7).all() and not case.first.numpy().any()
    taken.clear()
    ctx.close()


def test_a_graph_is_compiled_before_tensors_have_memory_or_once_they_have_numbers() -> None:
    found: list[Any] = []

    def use(case: Overflows) -> None:
        found.append(Graph(case.last + 1).compile("CPU", 1)())

    def start(case: Overflows) -> None:
        thread = threading.Thread(target=use, args=(case,))
        thread.start()
        thread.join(0.2)
        threads.append(thread)

    threads: list[threading.Thread] = []
    with Context() as ctx:
        case = Overflows(ctx, start)
        case.allocate()
        threads[0].join(30)
        np.testing.assert_array_equal(found[0], np.full(4, 8))


@needs_meta
def test_a_split_that_fails(ctx: Context) -> None:
    def split(info: Any, n: int) -> Any:
        raise RuntimeError("no idea")

    tensor = ctx.from_numpy(np.ones(4, np.float32), name="w")
    with pytest.raises(SplitError) as caught:
        ctx.allocate(meta(split, on_error="raise"))
    assert str(caught.value.__cause__) == "no idea"
    assert not tensor.has_memory
    assert ctx.allocate("CPU") > 0  # and may be tried elsewhere
    np.testing.assert_array_equal(tensor.numpy(), np.ones(4))


# ---- who keeps whom


def test_closing(ctx: Context) -> None:
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    context = Context()
    x = context.from_numpy(np.ones(3, np.float32))
    context.allocate("CPU")
    made = Graph(ops.sqr(x)).compile("CPU")
    np.testing.assert_array_equal(made(), np.ones(3))
    context.close()
    context.close()
    assert made.closed and diagnostics.live_handles() == before
    for use in (lambda: x.shape, lambda: x.numpy(), lambda: context.tensor(3), lambda: ops.sqr(x)):
        with pytest.raises(ValueError, match=r"Context is closed|the Context is closed"):
            use()
    with pytest.raises(ValueError, match="the Compiled is closed"):
        made()
    assert repr(x) == "<Tensor of a closed Context>"


def test_a_tensor_keeps_its_context() -> None:
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()["ggml_context"]
    context = Context()
    kept = weakref.ref(context)
    x = context.from_numpy(np.arange(3, dtype=np.float32))
    context.allocate("CPU")
    del context
    gc.collect()
    np.testing.assert_array_equal(x.numpy(copy=True), [0, 1, 2])
    del x
    gc.collect()
    assert kept() is None and diagnostics.live_handles()["ggml_context"] == before


def test_shared_memory_keeps_it_open() -> None:
    context = Context()
    x = context.from_numpy(np.arange(4, dtype=np.float32))
    context.allocate("CPU")
    view = x.numpy()[1:]
    with pytest.raises(BufferError, match="arrays share the memory of 1 of"):
        context.close()
    assert not context.closed
    view[0] = 7
    np.testing.assert_array_equal(x.numpy(copy=True), [0, 7, 2, 3])
    del x, context
    gc.collect()
    np.testing.assert_array_equal(view, [7, 2, 3])  # the memory is still there
    del view


def test_tensors_of_a_graph_keep_their_own_context_open() -> None:
    one, two = Context(), Context()
    a = one.from_numpy(np.ones(4, np.float32), "a")
    b = two.from_numpy(np.full(4, 2, np.float32), "b")
    for context in (one, two):
        context.allocate("CPU")
    graph = Graph([a + b, ops.neg(a)])
    homes = {tensor.name: tensor.context for tensor in graph.tensors if tensor.name}
    assert homes == {"a": one, "b": two}
    assert {tensor.context for tensor in graph.nodes} == {one, two}
    [view] = [tensor.numpy() for tensor in graph.tensors if tensor.name == "b"]
    with pytest.raises(BufferError, match="arrays share the memory of 1 of"):
        two.close()
    np.testing.assert_array_equal(view, [2] * 4)
    del view
    two.close()


def test_contexts_never_need_each_other() -> None:
    """Whatever two threads make at the same time."""
    for _ in range(100):
        pair = Context(), Context()
        a, b = (context.tensor(3) for context in pair)
        together = threading.Barrier(2)

        def make(ctx: Context, a: Any = a, b: Any = b, together: Any = together) -> None:
            together.wait()
            ops.add(a, b, ctx=ctx)

        threads = [threading.Thread(target=make, args=(ctx,)) for ctx in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        needed = [other in one._needs for one, other in (pair, pair[::-1])]
        assert sum(needed) == 1
        for context in pair:
            context.close()


def test_results_over_several_contexts() -> None:
    """They go into the newest, whichever operand comes first: a request's, not the model's."""
    one, two = Context(), Context()
    a = one.from_numpy(np.ones(3, np.float32))
    b = two.from_numpy(np.full(3, 2, np.float32))
    first = a + b
    assert first.context is two
    assert (b * first).context is (a * first).context is two
    other = Context()
    assert ops.add(a, b, ctx=other).context is other
    assert ops.add(a, b, ctx=one).context is two  # no circle
    other.close()
    assert not one.closed and not two.closed
    for context in (one, two):
        context.allocate("CPU")
    made = Graph(b * first).compile("CPU")
    kept = weakref.ref(one)
    del one, a, context
    gc.collect()
    assert kept() is not None
    np.testing.assert_array_equal(made(), [6, 6, 6])
    older = kept()
    assert older is not None
    older.close()  # closes what needs it
    assert two.closed and made.closed


def test_the_one_that_needs_the_others() -> None:
    contexts = [Context() for _ in range(4)]
    assert place([contexts[0], contexts[1]], contexts[0]) is contexts[0]
    assert place([contexts[1], contexts[2]], contexts[1]) is contexts[1]
    assert place([contexts[2], contexts[0]]) is contexts[0]  # not the newer one
    assert place([contexts[2], contexts[1], contexts[0]]) is contexts[0]
    assert place([contexts[0], contexts[3], contexts[1]]) is contexts[3]
    assert place([contexts[0], contexts[2]], contexts[2]) is contexts[0]
    assert place([contexts[1], contexts[0]], contexts[3]) is contexts[3]


@needs_meta
def test_what_a_meta_device_has_stays_when_more_is_allocated() -> None:
    """ggml gives all tensors of one of its contexts memory there, whatever they have."""
    numbers = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    with meta() as first, meta() as second, Context() as context:
        for target in (second, first):
            weights = [context.from_numpy(numbers), context.from_numpy(2 * numbers)]
            context.allocate(target)
            cache = context.tensor((8, 16))
            context.allocate(first)
            cache.set(np.ones((8, 16), np.float32))
            np.testing.assert_array_equal(weights[0].numpy(), numbers)
            np.testing.assert_array_equal(weights[1].numpy(), 2 * numbers)
            assert cache.numpy().sum() == 8 * 16
        x = context.input((3, 8), name="x")
        with Graph(x @ weights[1].T).compile(first) as compiled:
            found = compiled(x=numbers[:3])
    np.testing.assert_allclose(found, numbers[:3] @ (2 * numbers).T, rtol=1e-5)


@needs_meta
def test_a_split_function_cannot_close_the_context_that_asks_it() -> None:
    context = Context()
    context.tensor((8, 4), name="w")
    told: list[str] = []

    def split(info: Any, n_devs: int) -> SplitState:
        for call in (context.close, lambda: context.allocate("CPU")):
            with pytest.raises(ValueError, match="are being allocated") as error:
                call()
            told.append(str(error.value))
        return SplitState.mirrored()

    with meta(split, on_error="raise") as target:
        context.allocate(target)
        assert told
        context.close()


def test_threads_share_a_context(ctx: Context) -> None:
    def work(number: int) -> None:
        for i in range(200):
            made = ctx.tensor(2, name=f"{number}-{i}")
            results[number].append((made.name, ops.sqr(made).shape))

    results: list[list[Any]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(f"{n}-{i}", (2,)) for i in range(200)] for n in range(4)]


def test_large_memory_is_in_large_pages(need: Any) -> None:
    """As NumPy's own arrays are: else each copy would take longer."""
    need(Path("/sys/kernel/mm/transparent_hugepage").is_dir(), "kernel with large pages")
    with Context() as ctx:
        tensor = ctx.tensor((8 << 18,))
        ctx.allocate("CPU")
        middle = tensor.numpy().ctypes.data + (4 << 20)
        inside = False
        for line in Path("/proc/self/smaps").read_text("ascii", "replace").splitlines():
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(n, 16) for n in head.split("-"))
                inside = start <= middle < end
            elif inside and head == "VmFlags:":
                assert "hg" in line.split()
                return
        pytest.fail("the memory is nowhere")
