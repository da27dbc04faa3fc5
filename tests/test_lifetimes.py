"""Objects that need each other: closed in every order, forgotten in any, shared by threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import has

from ggml_cffi import (
    Backend,
    Buffer,
    Compiled,
    Context,
    GGUFFile,
    GGUFWriter,
    Graph,
    MetaDevice,
    MultiBuffer,
    Scheduler,
    SplitState,
    capi,
    device,
    diagnostics,
    ops,
)
from ggml_cffi._handles import Closing
from ggml_cffi.enums import ggml_op, ggml_type
from ggml_cffi.errors import OperandError
from ggml_cffi.training import SGD, Trainer

CPU = device("CPU")
W = np.arange(12, dtype=np.float32).reshape(3, 4)
X = np.ones((2, 4), np.float32)

#: What each needs: closing that closes it.
NEEDS = {
    "weights": (),
    "sums": ("weights",),
    "backend": (),
    "scheduler": ("backend",),
    "on device": ("sums",),
    "on backend": ("sums", "backend"),
    "on scheduler": ("sums", "scheduler"),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    settled()
    before = diagnostics.live_handles(), diagnostics.leaked_handles()
    yield
    settled()
    assert (diagnostics.live_handles(), diagnostics.leaked_handles()) == before


def settled() -> dict[str, int]:
    """How many handles there are once nothing is left to collect: finalizers free more of them."""
    found, same = diagnostics.live_handles(), 0
    while same < 2:
        gc.collect()
        now = diagnostics.live_handles()
        found, same = now, same + 1 if now == found else 0
    return found


def a_family() -> dict[str, Any]:
    """Contexts of which one needs the other, and what is compiled from them."""
    weights, sums = Context(), Context()
    w = weights.from_numpy(W, name="w")
    b = sums.from_numpy(np.float32([1, 2, 3]), name="b")
    weights.allocate(CPU)
    sums.allocate(CPU)
    y = ops.mul_mat(w, weights.input((2, 4), name="x")) + b
    assert y.context is sums or y.context is weights
    backend = Backend(CPU, 1)
    scheduler = Scheduler([backend])
    made = {
        "weights": w.context if y.context is sums else sums,
        "sums": y.context,
        "backend": backend,
        "scheduler": scheduler,
        "on device": Graph(y).compile(CPU, n_threads=1),
        "on backend": Graph(y).compile(backend),
        "on scheduler": Graph(y).compile(scheduler),
    }
    for name in NEEDS:
        if name.startswith("on "):
            np.testing.assert_array_equal(made[name](x=X), X @ W.T + [1, 2, 3])
    return made


def needing(name: str) -> set[str]:
    """It and all that cannot be without it."""
    found = {name}
    while more := {one for one, needs in NEEDS.items() if found & set(needs)} - found:
        found |= more
    return found


def test_closing_closes_what_needs_it() -> None:
    for name in NEEDS:
        made = a_family()
        made[name].close()
        assert {one for one, thing in made.items() if thing.closed} == needing(name), name
        for thing in made.values():
            if isinstance(thing, Compiled) and not thing.closed:
                np.testing.assert_array_equal(thing(x=X), X @ W.T + [1, 2, 3])
            thing.close()
            thing.close()  # twice is fine


@pytest.mark.parametrize("first", NEEDS)
def test_closing_in_every_order(first: str) -> None:
    """All orders of the others behind each; with what is still open one can compute."""
    others = [name for name in NEEDS if name != first]
    for order in list(itertools.permutations(others))[::17]:
        made = a_family()
        gone: set[str] = set()
        for name in (first, *order):
            made[name].close()
            gone |= needing(name)
            assert {one for one, thing in made.items() if thing.closed} == gone
            for one in {"on device", "on scheduler"} - gone:
                assert made[one](x=X).shape == (2, 3)


def test_forgetting_in_every_order() -> None:
    for order in list(itertools.permutations(NEEDS))[::211]:
        made = a_family()
        for name in order:
            del made[name]
            for one in made.values():  # what is left is whole
                if isinstance(one, Compiled):
                    assert one(x=X).shape == (2, 3)


# ---- arrays that share memory


def test_an_array_outlives_the_object() -> None:
    before = settled()["ggml_backend_buffer"]  # other tests may keep some
    ctx = Context()
    w = ctx.from_numpy(W, name="w")
    ctx.allocate(CPU)
    array, part = w.numpy(), np.from_dlpack(w[1:])
    del ctx, w
    gc.collect()
    np.testing.assert_array_equal(array, W)
    del array
    gc.collect()
    np.testing.assert_array_equal(part, W[1:])
    assert diagnostics.live_handles()["ggml_backend_buffer"] == before + 1
    del part
    assert diagnostics.live_handles()["ggml_backend_buffer"] == before


def test_a_circle_through_an_array_is_collected() -> None:
    """The collector sees no circle that goes through an array of NumPy's."""
    before = settled()["ggml_context"]  # other tests may keep some
    ctx: Any = Context()
    w = ctx.from_numpy(W, name="w")
    ctx.allocate(CPU)
    ctx.circle = w.numpy(), w
    del ctx, w
    gc.collect()
    assert diagnostics.live_handles()["ggml_context"] == before


def test_memory_of_what_needs_a_context_keeps_that_open() -> None:
    """Closing the one would free the memory of the other under the array."""
    made = a_family()
    needed, needs = made["weights"], made["sums"]
    leaf = needs.from_numpy(W, name="leaf")
    needs.allocate(CPU)
    array = leaf.numpy()
    for one in (needed, needs):
        with pytest.raises(
            BufferError, match="arrays share the memory of 1 of the Context's tensors"
        ):
            one.close()
        assert not any(thing.closed for thing in made.values())  # nothing is half done
    np.testing.assert_array_equal(array, W)
    del array
    needed.close()
    assert needs.closed


# ---- entering what is closed


def one_of_each(folder: Path) -> dict[str, Any]:
    with GGUFWriter(folder / "f.gguf") as writer:
        writer.add_tensor("w", W)
    made = a_family()
    handle = capi.ggml_backend_alloc_buffer(made["backend"].handle, 64)
    other = capi.ggml_backend_alloc_buffer(made["backend"].handle, 64)
    found = {  # what needs others comes before them
        "Compiled": made["on scheduler"],
        "Scheduler": made["scheduler"],
        "Context": made["weights"],
        "Backend": made["backend"],
        "Buffer": Buffer(handle),
        "MultiBuffer": MultiBuffer([other]),
        "GGUFFile": GGUFFile(folder / "f.gguf"),
        "GGUFWriter": GGUFWriter(folder / "g.gguf"),
    }
    if has("ggml_backend_meta_device"):
        found["MetaDevice"] = MetaDevice(["CPU"], lambda info, n: SplitState.mirrored())
    return found


def test_what_is_closed_cannot_be_entered(tmp_path: Path) -> None:
    for name, thing in one_of_each(tmp_path).items():
        assert isinstance(thing, Closing) and not thing.closed
        with thing as entered:
            assert entered is thing
        assert thing.closed and repr(thing).startswith(f"<{name} "), name
        assert "closed" in repr(thing)
        with pytest.raises(ValueError, match=f"the {name} is closed"), thing:
            raise AssertionError("it was entered")
        thing.close()


# ---- threads


def at_once(steps: list[Any], seconds: float = 1.0) -> None:
    """Each step again and again on a thread of its own; raises the first exception."""
    errors: list[BaseException] = []
    stop = threading.Event()
    counts = [0] * len(steps)

    def run(number: int) -> None:
        try:
            while not stop.is_set():
                steps[number](counts[number])
                counts[number] += 1
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    while min(counts) < 3 and not errors and any(t.is_alive() for t in threads):
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_eight_threads_on_one_context() -> None:
    """They build, allocate, compile, run, read, write and draw."""
    with Context() as ctx, Backend(CPU, 2) as backend, Scheduler([backend]) as scheduler:
        w = ctx.from_numpy(W, name="w")
        ctx.allocate(CPU)
        shared = Graph(ops.mul_mat(w, ctx.input((2, 4), name="x"))).compile(backend)

        def build(turn: int) -> None:
            t = w
            for i in range(20):
                t = ops.scale(t, 2.0) if i % 2 else t + w
            assert t.shape == (3, 4)

        def compile_and_run(target: Any) -> Any:
            def step(turn: int) -> None:
                x = ctx.input((2, 4), name="x")
                given = np.full((2, 4), turn, np.float32)
                with Graph(ops.mul_mat(w, x) + turn).compile(target) as made:
                    np.testing.assert_array_equal(made(x=given), given @ W.T + turn)

            return step

        def run(turn: int) -> None:
            given = np.full((2, 4), turn % 100, np.float32)
            np.testing.assert_array_equal(shared(x=given), given @ W.T)

        def fill(turn: int) -> None:
            mine = ctx.from_numpy(np.full(3, turn, np.float32), name=f"mine {turn}")
            ctx.allocate(CPU)
            np.testing.assert_array_equal(mine.numpy(), np.full(3, turn))
            mine.set(mine.numpy() + 1)
            assert mine.numpy()[0] == turn + 1

        def look(turn: int) -> None:
            view = w.numpy()
            assert view[2, 3] == 11 and w[1].numpy()[0] == 4
            assert "digraph" in Graph(ops.sqr(w)).to_dot()

        at_once(
            [build, build, compile_and_run(backend), compile_and_run(scheduler),
             compile_and_run(CPU), run, fill, look]
        )  # fmt: skip


def test_closing_what_other_threads_use() -> None:
    """They see that it is closed, or finish before; nothing worse."""
    for _ in range(20):
        with Backend(CPU, 1) as backend:
            ctx = Context()
            w = ctx.from_numpy(W, name="w")
            ctx.allocate(CPU)
            made = Graph(ops.mul_mat(w, ctx.input((2, 4), name="x"))).compile(backend)
            begun, errors = threading.Barrier(5), []

            def use(made: Any = made, w: Any = w, begun: Any = begun, errors: Any = errors) -> None:
                begun.wait(30)
                try:
                    for _ in range(10_000):
                        np.testing.assert_array_equal(made(x=X), X @ W.T)
                        ops.sqr(w)
                except ValueError as error:
                    errors.append(str(error))
                except BaseException as error:
                    errors.append(repr(error))

            threads = [threading.Thread(target=use) for _ in range(4)]
            for thread in threads:
                thread.start()
            begun.wait(30)
            while not made.closed:
                with contextlib.suppress(ValueError):  # it is being run
                    made.close()
            while not ctx.closed:
                with contextlib.suppress(BufferError):
                    ctx.close()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert len(errors) == 4 and all("is closed" in text for text in errors), errors


def test_what_is_being_run_stays_open() -> None:
    """Closed from within a run, on its thread or on another, it would go on with what is gone."""
    ctx, told = Context(), []
    x = ctx.input((2, 4), name="x")

    def close(result: Any, a: Any) -> None:
        result[...] = a
        for one in (made, ctx):
            with pytest.raises(ValueError, match="is being run, and stays open") as caught:
                one.close()
            told.append(str(caught.value))
        other = threading.Thread(target=close_elsewhere)
        other.start()
        other.join(60)

    def close_elsewhere() -> None:
        with pytest.raises(ValueError, match="is being run, and stays open"):
            made.close()
        told.append("elsewhere")

    made = Graph(ops.custom(close, x)).compile(CPU, n_threads=1)
    np.testing.assert_array_equal(made(x=X), X)
    assert len(told) == 3 and not made.closed
    made.close()
    ctx.close()


def test_nothing_is_made_of_what_is_closed() -> None:
    """It has been freed: who needs it then would free it once more."""
    with Context() as ctx, Backend(CPU, 1) as backend, Scheduler([backend]) as scheduler:
        w = ctx.from_numpy(W, name="w")
        ctx.allocate(CPU)
        graph = Graph(w @ w.T)
        scheduler.close()
        with pytest.raises(ValueError, match="the Scheduler is closed"):
            graph.compile(scheduler)
        backend.close()
        for make in (lambda: graph.compile(backend), lambda: Scheduler([backend])):
            with pytest.raises(ValueError, match="the Backend is closed"):
                make()
        ctx.close()
        for use in (lambda: graph.compile(CPU, 1), lambda: graph.n_nodes, graph.to_dot):
            with pytest.raises(ValueError, match="Context is closed"):
                use()
        with Context() as other, pytest.raises(ValueError, match="Context is closed"):
            ops.add(other.input((3, 3), name="x"), graph.outputs[0])


class ClosesWhenAsked(dict[Any, Any]):
    """A mapping whose items, which compiling asks for, are not there before a context is closed."""

    def __init__(self, close: Any) -> None:
        super().__init__({None: None})
        self.close = close

    def items(self) -> Any:
        self.close()
        return ()


def test_a_context_that_is_closed_while_a_graph_is_compiled() -> None:
    """The graph stays as it is compiled, and so does the memory that it needs."""
    told = []

    def close() -> None:
        with pytest.raises(ValueError, match="is being compiled, and stays open") as caught:
            ctx.close()
        told.append(caught.value)

    ctx = Context()
    w = ctx.from_numpy(W, name="w")
    ctx.allocate(CPU)
    y = w
    for _ in range(1000):
        y = y + w
    with Backend(CPU, 1) as backend, Scheduler([backend]) as scheduler:
        made = Graph(y).compile(scheduler, assign=ClosesWhenAsked(close))
        assert told and ctx.closed
        np.testing.assert_array_equal(made(), 1001 * W)


@pytest.mark.parametrize("make", ["compile", "look", "train"])
def test_a_context_that_another_thread_closes_meanwhile(make: str) -> None:
    """What is made of it is made, or it is closed; nothing worse."""

    def use() -> None:
        begun.wait(30)
        try:
            while True:
                if make == "compile":
                    with Graph(y).compile(CPU, 1) as made:
                        np.testing.assert_array_equal(made(), 61 * W)
                elif make == "train":
                    x = ctx.input((2, 4), name="x")
                    Trainer(x, x @ w.T, "sum", SGD(), n_threads=1).close()
                else:
                    assert len(Graph(y).tensors) == 1 + Graph(y).n_nodes
                    Graph(y).to_dot()
        except ValueError as error:
            errors.append(str(error))
        except BaseException as error:
            errors.append(repr(error))

    for _ in range(10):
        ctx, errors, begun = Context(), [], threading.Barrier(3)
        y = w = ctx.from_numpy(W, name="w")
        ctx.allocate(CPU)
        for _ in range(60):
            y = y + w
        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun.wait(30)
        while not ctx.closed:
            with contextlib.suppress(ValueError):  # one is being compiled
                ctx.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(errors) == 2 and all("Context is closed" in text for text in errors), errors


def test_a_run_within_a_run_leaves_the_inputs_of_that_as_they_are() -> None:
    with Context() as ctx:
        x = ctx.input((2, 4), name="x")
        told = []

        def again(result: Any, a: Any) -> None:
            result[...] = a
            with pytest.raises(ValueError, match="is being run") as caught:
                made(x=np.full((2, 4), 100))
            told.append(str(caught.value))

        made = Graph(ops.custom(again, x) + x).compile(CPU, n_threads=1)
        for _ in range(2):
            np.testing.assert_array_equal(made(x=X), 2 * X)
        assert len(told) == 2


@pytest.mark.parametrize("other", ["itself", "on its backend", "on a scheduler of its backend"])
def test_what_a_thread_of_a_run_cannot_wait_for_is_refused(other: str) -> None:
    """The turn is that of the thread which runs, and that one waits for the others."""
    with Context() as ctx, Backend(CPU, 2) as backend, Scheduler([backend]) as scheduler:
        x, told = ctx.input((2, 4), name="x"), []

        def again(result: Any, a: Any, task: int, n_tasks: int) -> None:
            if task == 0:
                result[...] = a
            with pytest.raises(ValueError, match=r"is being run|is computing") as caught:
                others[other](x=X)
            told.append(str(caught.value))

        y = ops.custom(again, x, n_tasks=2)
        others = {
            "itself": Graph(y + x).compile(backend),
            "on its backend": Graph(x + x).compile(backend),
            "on a scheduler of its backend": Graph(x + x).compile(scheduler),
        }
        np.testing.assert_array_equal(others["itself"](x=X), 2 * X)
        assert len(told) == 2


@pytest.mark.parametrize("second", ["scheduler", "another scheduler", "backend"])
def test_graphs_on_the_same_backend_take_turns(second: str) -> None:
    """A backend has one work buffer, in which each would find the other's numbers."""
    rng = np.random.default_rng(0)
    begun, wrong = threading.Barrier(2), []
    with Backend(CPU, 1) as backend:
        targets = {
            "scheduler": Scheduler([backend]),
            "another scheduler": Scheduler([backend]),
            "backend": backend,
        }

        def run(n: int, times: int, target: Any) -> None:
            x = rng.standard_normal((8, n), np.float32)
            with Context() as ctx:
                w = ctx.from_numpy(rng.standard_normal((n, n), np.float32), dtype="q4_0")
                ctx.allocate(CPU)
                with Graph(ctx.input(x.shape, name="x") @ w.T).compile(target) as made:
                    expected = made(x=x)
                    begun.wait(30)
                    wrong.extend(1 for _ in range(times) if (made(x=x) != expected).any())

        threads = [
            threading.Thread(target=run, args=(256, 1000, targets["scheduler"])),
            threading.Thread(target=run, args=(1024, 100, targets[second])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong


#: What is read of a tensor, or written, whoever closes its context meanwhile.
FACTS: dict[str, tuple[Callable[[Any], object], object]] = {
    "name": (lambda t: t.name, "w2999"),
    "type": (lambda t: t.type, ggml_type.GGML_TYPE_F32),
    "dtype": (lambda t: t.dtype, np.float32),
    "ne": (lambda t: t.ne, (4, 3, 1, 1)),
    "shape": (lambda t: t.shape, (3, 4)),
    "strides": (lambda t: t.strides, (16, 4)),
    "nbytes": (lambda t: t.nbytes, 48),
    "size": (lambda t: t.size, 12),
    "op": (lambda t: t.op, ggml_op.GGML_OP_NONE),
    "has_memory": (lambda t: t.has_memory, False),
    "shares_memory": (lambda t: t.shares_memory, False),
    "rename": (lambda t: setattr(t, "name", "new"), None),
    "index": (lambda t: t[1].shape, (4,)),
    "assign": (lambda t: t.__setitem__(0, 1.0), None),
    "set": (lambda t: t.set(W), None),
    "numpy": (lambda t: t.numpy(), None),
    "add": (lambda t: (t + t).shape, (3, 4)),
    "transpose": (lambda t: (t @ t.T).shape, (3, 3)),
}


def closed_at_each_look(
    make: Callable[[], tuple[Any, Callable[[], None]]], ask: Callable[[Any], object]
) -> list[object]:
    """What asking gives where another thread closes after the first, the second, ... look.

    `make` gives a thing and what closes it; a look is one whether it is open.
    """
    answers: list[object] = []
    for look in itertools.count():
        thing, close = make()
        looked, closed = threading.Event(), threading.Event()
        looks, told = [0], []

        def after_looks(frame: Any, event: str, _: object) -> Any:
            if event == "return" and frame.f_code.co_name in ("closed", "_check_open"):
                if looks[0] == look:  # noqa: B023
                    looked.set()  # noqa: B023
                    closed.wait(30)  # noqa: B023
                looks[0] += 1  # noqa: B023
            return after_looks

        def read() -> None:
            sys.settrace(after_looks)
            try:
                told.append(ask(thing))  # noqa: B023
            except (ValueError, OperandError) as error:
                told.append(error)  # noqa: B023
            finally:
                sys.settrace(None)
                looked.set()  # noqa: B023

        thread, closing = threading.Thread(target=read), threading.Thread(target=close)
        thread.start()
        looked.wait(30)
        closing.start()
        closing.join(0.1)  # where the reader has a lock, it closes after that
        # what takes the place of what was freed
        filler = [np.full(size, 0x41, np.uint8) for size in (100_000, 300_000) for _ in range(50)]
        closed.set()
        for one in (thread, closing):
            one.join(30)
            assert not one.is_alive()
        assert len(filler) == 100
        answers += told
        if looks[0] <= look:
            assert look
            return answers


@pytest.mark.parametrize("fact", FACTS)
def test_a_context_that_is_closed_between_the_look_and_the_reading(fact: str) -> None:
    """Nothing freed is read, whoever closes it meanwhile."""
    ask, expected = FACTS[fact]

    def make() -> tuple[Any, Callable[[], None]]:
        ctx = Context()
        for i in range(3000):
            tensor = ctx.tensor((3, 4), name=f"w{i}")
        return tensor, ctx.close

    for answer in closed_at_each_look(make, ask):
        if isinstance(answer, Exception):
            assert "closed" in str(answer) or "has no memory" in str(answer)
        else:
            assert answer == expected


def made_of_all() -> dict[str, Any]:
    ctx, backend = Context(), Backend(CPU, 1)
    w = ctx.from_numpy(W, name="w")
    ctx.allocate(CPU)
    graph = Graph(ctx.input((2, 4), name="x") @ w.T)
    scheduler = Scheduler([backend])
    buffer = Buffer(
        capi.ggml_backend_buft_alloc_buffer(capi.ggml_backend_dev_buffer_type(CPU.handle), 64)
    )
    return {
        "ctx": ctx,
        "backend": backend,
        "scheduler": scheduler,
        "graph": graph,
        "buffer": buffer,
        "compiled": graph.compile(CPU, 1),
        "scheduled": graph.compile(scheduler),
    }


#: What is asked of an object, and what is closed meanwhile.
ASKED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "bytes": ("compiled", lambda m: m["compiled"].nbytes),
    "bytes on a scheduler": ("backend", lambda m: m["scheduled"].nbytes),
    "drawing": ("compiled", lambda m: m["compiled"].to_dot()),
    "drawing on a scheduler": ("scheduler", lambda m: m["scheduled"].to_dot()),
    "assignment": ("scheduled", lambda m: m["scheduler"].assignment(m["scheduled"])),
    "reserve": ("backend", lambda m: m["scheduler"].reserve(m["graph"])),
    "name": ("backend", lambda m: m["backend"].name),
    "children": ("backend", lambda m: m["backend"].children),
    "threads": ("backend", lambda m: m["backend"].set_n_threads(1)),
    "repr": ("backend", lambda m: repr((m["backend"], m["scheduler"], m["compiled"]))),
    "size": ("buffer", lambda m: (m["buffer"].size, m["buffer"].usage, repr(m["buffer"]))),
    "clear": ("buffer", lambda m: (m["buffer"].clear(1), m["buffer"].set_usage(1))),
}


@pytest.mark.parametrize("asked", ASKED)
def test_an_object_that_is_closed_between_the_look_and_the_call(asked: str) -> None:
    closes, ask = ASKED[asked]

    def make() -> tuple[Any, Callable[[], None]]:
        made = made_of_all()

        def close() -> None:
            with contextlib.suppress(ValueError):  # of a graph that is being compiled
                made[closes].close()

        return made, close

    answers = closed_at_each_look(make, ask)
    errors = [str(one) for one in answers if isinstance(one, Exception)]
    assert all("closed" in one for one in errors) and len(errors) < len(answers)
    assert errors or asked == "repr"


@pytest.mark.parametrize("name", ["ctx", "backend", "scheduler", "buffer", "compiled", "scheduled"])
def test_what_owns_something_is_not_copied(name: str) -> None:
    """What it owns would be freed twice, or with the first of the two."""
    made = made_of_all()
    for act, words in (
        (copy.copy, "cannot be copied: what it owns is freed once"),
        (copy.deepcopy, "cannot be copied"),
        (pickle.dumps, "cannot be pickled: it is of this process"),
    ):
        with pytest.raises(TypeError, match=words):
            act(made[name])
    made[name].close()


def test_locks_of_contexts_are_taken_in_the_order_of_closing() -> None:
    """Those that others need come before them, wherever they lie in memory."""

    class Recorded:
        def __init__(self, context: Context) -> None:
            self.context, self.room = context, context._lock

        def __enter__(self) -> None:
            self.room.__enter__()
            taken.append(self.context)

        def __exit__(self, *failure: object) -> None:
            self.room.__exit__(*failure)

    for request_first in (False, True):
        contexts = [Context() for _ in range(8)]
        contexts.sort(key=id)
        model, request = contexts[:: 7 if request_first else -7]
        w = model.from_numpy(W, name="w")
        model.allocate(CPU)
        x = request.input((2, 4), name="x")
        y = ops.mul_mat(w, x, ctx=request)
        taken: list[Context] = []
        for one in (model, request):
            one._lock = Recorded(one)  # type: ignore[assignment]
        with Graph(y).compile(CPU, 1):
            assert [one for one in dict.fromkeys(taken) if one in (model, request)] == [
                model,
                request,
            ]
        taken.clear()
        model.close()
        assert list(dict.fromkeys(taken)) == [model, request]
        assert request.closed
