"""Where ggml takes a Python function: one class a place, with what leads ggml to call it.

`PLACES` is the table behind test_callback_kinds.py; `Place.without` says which of the `TRIALS` make
no sense at a place, with the reason in a word or two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from _compute import F32, Arena

from ggml_cffi import GGUFError, MetaDevice, SplitState, capi, ffi

Function = Callable[..., Any]

TRIALS = (
    "works",
    "exception",
    "wrong type",
    "interrupt",
    "abort inside",
    "replaced inside",
    "replaced by another thread",
    "owner collected",
    "worker threads",
)


def floats(tensor: Any) -> Any:
    """The numbers of a contiguous F32 tensor in host memory, in place."""
    size = 4 * capi.ggml_nelements(tensor)
    return np.frombuffer(ffi.buffer(ffi.cast("float *", tensor.data), size), np.float32)


class Place:
    """A place with things of its own; `attach` a function and `run` what leads ggml to call it."""

    kind: ClassVar[str]
    #: The function of capi and its parameter.
    where: ClassVar[tuple[str, str]]
    #: How long the function is kept: call, replaced, object, result.
    lifetime: ClassVar[str]
    #: Values that it must not return: each is a TypeError. Empty: what it returns is ignored.
    wrong: ClassVar[tuple[object, ...]] = ()
    without: ClassVar[dict[str, str]] = {}
    n_threads = 1

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.threads: set[int] = set()
        self.seen: list[tuple[Any, ...]] = []
        self.make()

    def make(self) -> None:
        """What is there before a function is attached."""

    def attach(self, function: Function | None) -> None:
        """Give ggml the function; at a place that keeps it for the call, `run` does."""
        self.function = function

    def run(self) -> Any:
        """Lead ggml to call it. Raises what comes out."""
        raise NotImplementedError

    def nested(self) -> None:
        """From within the function: `run` with another one, where it is kept for the call."""

    def detach(self) -> None:
        """End its life."""
        self.function = None

    def answer(self, *args: Any) -> Any:
        """The right function."""
        raise NotImplementedError

    def recorded(self, *args: Any) -> Any:
        """`answer`, which notes its arguments and its thread."""
        self.threads.add(threading.get_ident())
        self.seen.append(args)
        return self.answer(*args)

    def check(self, result: Any) -> None:
        """What `run` gave is right, and so are the noted arguments."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return type(self).__name__


# ---- the CPU backend's abort callback


class CpuAbort(Place):
    kind = "ggml_abort_callback"
    where = ("ggml_backend_cpu_set_abort_callback", "abort_callback")
    lifetime = "replaced"
    wrong = (None, 1, "yes")
    without: ClassVar[dict[str, str]] = {"worker threads": "caller"}

    def make(self) -> None:
        self.backend = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(self.backend, 2)  # only this one asks
        self.arena.callback(self.detach)
        self.operand = self.arena.weight(4)
        capi.ggml_set_f32(self.operand, 2.0)
        ctx, node = self.arena.context(), self.operand
        for _ in range(3):
            node = capi.ggml_sqr(ctx, node)
        self.result = node
        self.graph = self.arena.graph(ctx, node)

    def attach(self, function: Function | None) -> None:
        capi.ggml_backend_cpu_set_abort_callback(self.backend, function)

    def run(self) -> Any:
        floats(self.result)[:] = 0
        return capi.ggml_backend_graph_compute(self.backend, self.graph)

    def detach(self) -> None:
        if self.backend is not None:
            capi.ggml_backend_free(self.backend)
            self.backend = None

    def answer(self) -> bool:
        return False

    def check(self, result: Any) -> None:
        assert result is capi.GGML_STATUS_SUCCESS
        assert floats(self.result).tolist() == [256.0] * 4
        assert self.seen == [()] * len(self.seen)


class PlanAbort(CpuAbort):
    """A plan keeps asking the function that its backend had when it was made."""

    where = ("ggml_backend_graph_plan_create", "backend")
    plan = None

    def attach(self, function: Function | None) -> None:
        super().attach(function)
        self.free_plan()
        self.plan = capi.ggml_backend_graph_plan_create(self.backend, self.graph)

    def run(self) -> Any:
        floats(self.result)[:] = 0
        return capi.ggml_backend_graph_plan_compute(self.backend, self.plan)

    def free_plan(self) -> None:
        if self.plan is not None:
            capi.ggml_backend_graph_plan_free(self.backend, self.plan)
            self.plan = None

    def detach(self) -> None:
        self.free_plan()
        super().detach()

    without: ClassVar[dict[str, str]] = {
        **CpuAbort.without,
        "replaced inside": "a plan",  # would be freed while it computes
        "replaced by another thread": "a plan",
    }


class OwnPlan(Place):
    """A plan that the caller has made."""

    kind = "ggml_abort_callback"
    where = ("ggml_graph_compute", "abort_callback")
    lifetime = "call"
    wrong = (None, 1, "yes")
    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "the call",
        "worker threads": "caller",
    }

    def make(self) -> None:
        self.graphs = []
        for _ in range(2):
            ctx, node = self.arena.context(), self.arena.weight(4)
            capi.ggml_set_f32(node, 2.0)
            for _ in range(3):
                node = capi.ggml_sqr(ctx, node)
            self.graphs.append((self.arena.graph(ctx, node), node))

    def compute(self, graph: Any, function: Any) -> Any:
        return capi.ggml_graph_compute(graph, capi.ggml_graph_plan(graph, 2), function)

    def run(self) -> Any:
        graph, result = self.graphs[0]
        floats(result)[:] = 0
        return self.compute(graph, self.function)

    def nested(self) -> None:
        asked: list[int] = []
        self.compute(self.graphs[1][0], lambda: bool(asked.append(1)))
        assert len(asked) > 1

    def answer(self) -> bool:
        return False

    def check(self, result: Any) -> None:
        assert result is capi.GGML_STATUS_SUCCESS
        assert floats(self.graphs[0][1]).tolist() == [256.0] * 4
        assert self.seen == [()] * len(self.seen)


# ---- operations


class Custom(Place):
    lifetime = "object"
    without: ClassVar[dict[str, str]] = {
        "replaced inside": "of the tensor",
        "replaced by another thread": "of the tensor",
    }
    n_sources: ClassVar[int]

    def make(self) -> None:
        self.sources = [self.arena.weight(4, 3) for _ in range(self.n_sources)]
        for number, source in enumerate(self.sources):
            floats(source)[:] = np.arange(12) + number
        self.expected = 2.0 * sum(floats(source) for source in self.sources)
        self.ctx: Any = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
        self.arena.callback(self.detach)

    def build(self, function: Function) -> Any:
        raise NotImplementedError

    def attach(self, function: Function | None) -> None:
        assert function is not None
        self.result = self.build(function)
        self.graph = self.arena.graph(self.ctx, self.result)

    def run(self) -> Any:
        for number, source in enumerate(self.sources):
            floats(source)[:] = np.arange(12) + number
        return capi.ggml_backend_graph_compute(self.arena.backend, self.graph)

    def detach(self) -> None:
        if self.ctx is not None:
            capi.ggml_free(self.ctx)
            self.ctx = None

    def answer(self, dst: Any, *rest: Any) -> object:
        *sources, ith, nth = rest
        if self.kind == "ggml_custom_op_t":
            sources = [source for source in dst.src if source]
        assert len(sources) == self.n_sources
        floats(dst)[ith::nth] = 2.0 * sum(floats(source)[ith::nth] for source in sources)
        return "ignored"

    def check(self, result: Any) -> None:
        assert result is capi.GGML_STATUS_SUCCESS
        np.testing.assert_array_equal(floats(self.result), self.expected)
        n_runs = len(self.seen) // self.n_threads
        tasks = [(i, self.n_threads) for i in range(self.n_threads) for _ in range(n_runs)]
        assert sorted(args[-2:] for args in self.seen) == tasks
        assert all(args[0] == self.result for args in self.seen)


def custom(kind: str, function: str, n_sources: int) -> type[Custom]:
    """A place for an operation, by its function in capi."""

    def build(self: Custom, fun: Function) -> Any:
        c = getattr(capi, function)
        if function == "ggml_custom_4d":
            return c(self.ctx, F32, 4, 3, 1, 1, self.sources, fun, self.n_threads)
        if function == "ggml_custom_inplace":
            return c(self.ctx, self.sources[0], self.sources[1:], fun, self.n_threads)
        return c(self.ctx, *self.sources, fun, self.n_threads)

    members = {
        "kind": kind,
        "where": (function, "fun"),
        "n_sources": n_sources,
        "build": build,
    }
    return type(function.removeprefix("ggml_"), (Custom,), members)


# ---- the log, and the end


class Log(Place):
    """Any call that fails with words; here one that finds no file."""

    kind = "ggml_log_callback"
    where = ("ggml_log_set", "callback")
    lifetime = "replaced"
    without: ClassVar[dict[str, str]] = {"owner collected": "no owner"}

    def make(self) -> None:
        self.arena.callback(self.detach)

    def attach(self, function: Function | None) -> None:
        capi.ggml_log_set(function)

    def run(self) -> Any:
        try:
            capi.gguf_init_from_file("/nonexistent")
        except GGUFError as error:
            return error
        raise AssertionError

    def detach(self) -> None:
        capi.ggml_log_set(None)

    def answer(self, level: Any, text: str) -> object:
        return "ignored"

    def check(self, result: Any) -> None:
        assert "failed to open" in str(result)
        level, text = self.seen[0]
        assert level is capi.GGML_LOG_LEVEL_ERROR
        assert "/nonexistent" in text


class ProcessEnd(Place):
    """Called when an abort ends the process: tried in child processes."""

    kind = "ggml_abort_callback_t"
    where = ("ggml_set_abort_callback", "callback")
    lifetime = "replaced"
    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "the end",
        "owner collected": "no owner",
    }


# ---- the scheduler, and comparing


class SchedEval(Place):
    kind = "ggml_backend_sched_eval_callback"
    where = ("ggml_backend_sched_set_eval_callback", "callback")
    lifetime = "replaced"
    wrong = (None, 1, "yes")
    without: ClassVar[dict[str, str]] = {"worker threads": "caller"}

    def make(self) -> None:
        self.sched: Any = capi.ggml_backend_sched_new([self.arena.backend], None, 64, False, False)
        self.arena.callback(self.detach)
        operand = self.arena.weight(4)
        capi.ggml_set_f32(operand, 2.0)
        ctx, node = self.arena.context(), operand
        for number in range(3):
            node = capi.ggml_set_name(capi.ggml_sqr(ctx, node), f"node {number}")
        self.result = node
        self.graph = self.arena.graph(ctx, node, allocate=False)
        capi.ggml_backend_sched_alloc_graph(self.sched, self.graph)

    def attach(self, function: Function | None) -> None:
        capi.ggml_backend_sched_set_eval_callback(self.sched, function)

    def run(self) -> Any:
        floats(self.result)[:] = 0
        return capi.ggml_backend_sched_graph_compute(self.sched, self.graph)

    def detach(self) -> None:
        if self.sched is not None:
            capi.ggml_backend_sched_free(self.sched)
            self.sched = None

    def answer(self, tensor: Any, ask: bool) -> bool:
        return True

    def check(self, result: Any) -> None:
        assert result is capi.GGML_STATUS_SUCCESS
        assert floats(self.result).tolist() == [256.0] * 4
        for tensor, ask in self.seen:
            assert capi.ggml_get_name(tensor).startswith("node ")
            assert ask in (True, False)


class Compare(Place):
    kind = "ggml_backend_eval_callback"
    where = ("ggml_backend_compare_graph_backend", "callback")
    lifetime = "call"
    wrong = (None, 1, "yes")
    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "the call",
        "worker threads": "caller",
    }

    def make(self) -> None:
        self.other = capi.ggml_backend_cpu_init()
        self.arena.callback(capi.ggml_backend_free, self.other)
        operand = self.arena.weight(4)
        capi.ggml_set_f32(operand, 2.0)
        ctx = self.arena.context()
        first = capi.ggml_sqr(ctx, operand)
        capi.ggml_set_output(first)  # the second one does not take its memory
        self.graph = self.arena.graph(ctx, capi.ggml_sqr(ctx, first))

    def compare(self, function: Any) -> Any:
        return capi.ggml_backend_compare_graph_backend(
            self.arena.backend, self.other, self.graph, function
        )

    def run(self) -> Any:
        return self.compare(self.function)

    def nested(self) -> None:
        indices: list[int] = []
        self.compare(lambda index, t1, t2: bool(indices.append(index)) or True)
        assert indices == [0, 1]

    def answer(self, index: int, t1: Any, t2: Any) -> bool:
        np.testing.assert_array_equal(floats(t1), floats(t2))
        return True

    def check(self, result: Any) -> None:
        assert result is True
        indices = [args[0] for args in self.seen]
        assert indices == [0, 1] * (len(indices) // 2)


# ---- training


class Training(Place):
    """Fits y = w x to eight pairs, in batches of two."""

    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "the call",
        "worker threads": "caller",
    }

    def make(self) -> None:
        arena = self.arena
        ctx = arena.context()
        self.ctx_compute = arena.context(8 << 20)
        self.x = arena.tensor(1, 2, name="x", ctx=ctx)
        weight = arena.tensor(1, 1, name="w", ctx=ctx)
        capi.ggml_set_input(self.x)
        capi.ggml_set_param(weight)
        arena.allocate(ctx)
        capi.ggml_set_f32(weight, 0.5)
        self.weight = weight
        self.y = capi.ggml_mul_mat(self.ctx_compute, weight, self.x)
        capi.ggml_set_output(self.y)
        self.sched = capi.ggml_backend_sched_new([arena.backend], None, 2048, False, False)
        arena.callback(capi.ggml_backend_sched_free, self.sched)
        self.dataset = capi.ggml_opt_dataset_init(F32, F32, 1, 1, 8, 1)
        arena.callback(capi.ggml_opt_dataset_free, self.dataset)
        for tensor in (
            capi.ggml_opt_dataset_data(self.dataset),
            capi.ggml_opt_dataset_labels(self.dataset),
        ):
            capi.ggml_set_f32(tensor, 1.0)
        self.optimizer: Any = None
        arena.callback(self.free)

    def free(self) -> None:
        if self.optimizer is not None:
            capi.ggml_opt_free(self.optimizer)
            self.optimizer = None

    def optimise(self, function: Function | None) -> None:
        self.free()
        self.optimizer = capi.ggml_opt_init(
            backend_sched=self.sched,
            ctx_compute=self.ctx_compute,
            inputs=self.x,
            outputs=self.y,
            loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
            get_opt_pars=function,
        )

    def epoch(self, **callbacks: Function) -> None:
        capi.ggml_opt_epoch(self.optimizer, self.dataset, None, None, 6, **callbacks)


class OptInit(Training):
    kind = "ggml_opt_get_optimizer_params"
    where = ("ggml_opt_init", "get_opt_pars")
    lifetime = "result"
    wrong = (3, "fast", {"adam": {}}, None)
    without: ClassVar[dict[str, str]] = {
        "replaced inside": "of the optimiser",
        "replaced by another thread": "of the optimiser",
        "worker threads": "caller",
    }

    def attach(self, function: Function | None) -> None:
        self.optimise(function)

    def run(self) -> Any:
        capi.ggml_set_f32(self.weight, 0.5)
        self.epoch()
        return floats(self.weight)[0]

    def detach(self) -> None:
        self.free()

    def answer(self) -> Any:
        return {"adamw": {"alpha": 0.25, "wd": 0.0}}

    def check(self, result: Any) -> None:
        assert result > 0.6  # the default would have moved it by a hundredth
        assert self.seen == [()] * len(self.seen)


class OptFit(OptInit):
    where = ("ggml_opt_fit", "get_opt_pars")
    lifetime = "call"
    wrong = (3, "fast", {"adam": {}}, None)
    without: ClassVar[dict[str, str]] = {
        "replaced inside": "one scheduler",  # the inner one would take it from the outer
        "replaced by another thread": "the call",
        "worker threads": "caller",
    }

    def attach(self, function: Function | None) -> None:
        self.function = function

    def run(self) -> Any:
        capi.ggml_set_f32(self.weight, 0.5)
        capi.ggml_opt_fit(
            self.sched,
            self.ctx_compute,
            self.x,
            self.y,
            self.dataset,
            capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
            capi.GGML_OPT_OPTIMIZER_TYPE_ADAMW,
            self.function,
            2,
            2,
        )
        return floats(self.weight)[0]

    def detach(self) -> None:
        self.function = None

    def answer(self, epoch: int) -> Any:
        assert epoch in (1, 2)
        return super().answer()

    def check(self, result: Any) -> None:
        assert result > 0.6
        assert [args[0] for args in self.seen[:8]] == [1] * 4 + [2] * 4


class EpochTrain(Training):
    kind = "ggml_opt_epoch_callback"
    where = ("ggml_opt_epoch", "callback_train")
    lifetime = "call"
    batches: ClassVar[list[tuple[bool, int, int]]] = [(True, 1, 3), (True, 2, 3), (True, 3, 3)]

    def make(self) -> None:
        super().make()
        self.optimise(None)

    def run(self) -> Any:
        return self.epoch(**{self.where[1]: self.function})

    def nested(self) -> None:
        calls: list[bool] = []
        look = lambda train, *rest: calls.append(train)  # noqa: E731
        self.epoch(callback_train=look, callback_eval=look)
        assert calls == [True, True, True, False]

    def answer(self, train: bool, context: Any, dataset: Any, result: Any, *rest: int) -> object:
        assert (context, dataset) == (self.optimizer, self.dataset)
        return "ignored"

    def check(self, result: Any) -> None:
        assert result is None
        batches = [(args[0], *args[4:6]) for args in self.seen]
        assert batches == self.batches * (len(batches) // len(self.batches))


class EpochEval(EpochTrain):
    where = ("ggml_opt_epoch", "callback_eval")
    batches: ClassVar[list[tuple[bool, int, int]]] = [(False, 1, 1)]


# ---- reading


class Reader(Place):
    kind = "gguf_reader_callback_t"
    where = ("gguf_init_from_callback", "callback")
    lifetime = "call"
    wrong = (None, "4", 1.5)
    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "the call",
        "worker threads": "caller",
    }

    def make(self) -> None:
        gguf = self.arena.gguf()
        capi.gguf_set_val_u32(gguf, "answer", 42)
        self.content: bytes = capi.gguf_get_meta_data(gguf)

    def read(self, function: Any) -> int:
        gguf = capi.gguf_init_from_callback(function, 16, len(self.content))
        try:
            return int(capi.gguf_get_val_u32(gguf, capi.gguf_find_key(gguf, "answer")))
        finally:
            capi.gguf_free(gguf)

    def run(self) -> Any:
        return self.read(self.function)

    def nested(self) -> None:
        assert self.read(self.answer) == 42

    def answer(self, output: Any, offset: int, length: int) -> int:
        piece = self.content[offset : offset + length]
        ffi.memmove(output, piece, len(piece))
        return len(piece)

    def check(self, result: Any) -> None:
        assert result == 42
        assert all(0 < length <= 16 for _, _, length in self.seen)


# ---- split functions


class Split(Place):
    """A meta device over two CPUs, whose errors come out of the call that asked."""

    kind = "ggml_backend_meta_get_split_state_t"
    where = ("ggml_backend_meta_device", "split_fn")
    lifetime = "object"
    on_error = "raise"
    without: ClassVar[dict[str, str]] = {
        "replaced by another thread": "for good",
        "worker threads": "caller",
    }
    device: MetaDevice | None = None

    def make(self) -> None:
        self.arena.callback(self.detach)

    def attach(self, function: Function | None) -> None:
        assert function is not None
        self.detach()
        self.device = MetaDevice(["CPU", "CPU"], function, on_error=self.on_error)

    def run(self) -> Any:
        assert self.device is not None
        buft = capi.ggml_backend_dev_buffer_type(self.device.handle)
        with Arena(None) as arena:
            ctx = arena.context()
            tensor = arena.tensor(8, 6, name="w", ctx=ctx)
            buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
            arena.callback(capi.ggml_backend_buffer_free, buffer)
            data = np.arange(48, dtype=np.float32)
            capi.ggml_backend_tensor_set(tensor, data, 0)
            back = np.zeros_like(data)
            capi.ggml_backend_tensor_get(tensor, back, 0)
            assert (back == data).all()
            return capi.ggml_backend_buffer_get_size(buffer)

    def detach(self) -> None:
        if self.device is not None:
            self.device.close()

    def answer(self, info: Any, n_devs: int) -> Any:
        assert (info.name, info.shape, n_devs) == ("w", (6, 8), 2)
        return SplitState.split(1, [4, 2])

    def check(self, result: Any) -> None:
        assert 4 * 8 * 4 <= result < 6 * 8 * 4  # the larger share, not the whole
        assert self.device is not None
        assert self.device.error is None


class SplitMirror(Split):
    """One whose errors are latched."""

    on_error = "mirror"


PLACES: tuple[type[Place], ...] = (
    CpuAbort,
    PlanAbort,
    OwnPlan,
    custom("ggml_custom1_op_t", "ggml_map_custom1", 1),
    custom("ggml_custom1_op_t", "ggml_map_custom1_inplace", 1),
    custom("ggml_custom2_op_t", "ggml_map_custom2", 2),
    custom("ggml_custom2_op_t", "ggml_map_custom2_inplace", 2),
    custom("ggml_custom3_op_t", "ggml_map_custom3", 3),
    custom("ggml_custom3_op_t", "ggml_map_custom3_inplace", 3),
    custom("ggml_custom_op_t", "ggml_custom_4d", 5),
    custom("ggml_custom_op_t", "ggml_custom_inplace", 4),
    Log,
    ProcessEnd,
    SchedEval,
    Compare,
    OptInit,
    OptFit,
    EpochTrain,
    EpochEval,
    Reader,
    Split,
    SplitMirror,
)
