"""Callbacks, by kind: called, raising, and left where they are when their owner goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ggml_cffi import Buffer, capi, ffi
from ggml_cffi._handles import Owned
from ggml_cffi.errors import GGUFError, SplitError

from .harness import raises
from .shared import F32, MSE, Refused, S, allocate, context, graph, optimizer, refuse, weight

Cycle = Callable[[], object]


class Callback(NamedTuple):
    """A use of a kind of callback, one in which it raises, one that leaves it where it is."""

    use: Callable[[], object]
    fail: Callable[[], object]
    forget: Callable[[], object]


def custom(build: Callable[..., Any]) -> Callback:
    """`build(ctx, x, function)` makes the tensor of an operation of Python's."""

    def compute(function: Any) -> None:
        ctx = context()
        made = graph(ctx, build(ctx, S.x, function))
        galloc = allocate(made)
        try:
            capi.ggml_backend_graph_compute(S.cpu, made)
        finally:
            capi.ggml_gallocr_free(galloc)
            capi.ggml_free(ctx)

    def forget() -> None:
        ctx = Owned(context(), capi.ggml_free)
        build(ctx.handle, S.x, lambda *args: None)

    return Callback(
        lambda: compute(lambda *args: None), lambda: raises(Refused, compute, refuse), forget
    )


def abort_callback(function: Any) -> None:
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, 1)
    capi.ggml_backend_cpu_set_abort_callback(backend, function)
    try:
        capi.ggml_backend_graph_compute(backend, S.graph)
    finally:
        capi.ggml_backend_free(backend)


def abort_callback_forgotten() -> None:
    backend = Owned(capi.ggml_backend_cpu_init(), capi.ggml_backend_free)
    for _ in range(2):  # the second takes the place of the first
        capi.ggml_backend_cpu_set_abort_callback(backend.handle, lambda: False)


def eval_callback(function: Any) -> None:
    ctx = context()
    made = graph(ctx, capi.ggml_sqr(ctx, S.x))
    sched = capi.ggml_backend_sched_new([S.cpu], None, 16, False, False)
    capi.ggml_backend_sched_set_eval_callback(sched, function)
    try:
        capi.ggml_backend_sched_graph_compute(sched, made)
    finally:
        capi.ggml_backend_sched_free(sched)
        capi.ggml_free(ctx)


def eval_callback_forgotten() -> None:
    sched = Owned(
        capi.ggml_backend_sched_new([S.cpu], None, 16, False, False), capi.ggml_backend_sched_free
    )
    for _ in range(2):
        capi.ggml_backend_sched_set_eval_callback(sched.handle, lambda tensor, ask: True)


def split_weights(name: str, forget: bool = False) -> None:
    with Owned(weight(name), capi.ggml_free) as ctx:
        made = Buffer(capi.ggml_backend_alloc_ctx_tensors(ctx.handle, S.meta_backend.handle))
        if not forget:
            made.close()
        del made


def compare(function: Any) -> None:
    capi.ggml_backend_compare_graph_backend(S.cpu, S.other, S.graph, function)


def optimizer_params(function: Any) -> None:
    ctx = context(1 << 22)
    made = optimizer(ctx, function)
    try:
        capi.ggml_opt_epoch(made, S.dataset, None, None, 4)
    finally:
        capi.ggml_opt_free(made)
        capi.ggml_free(ctx)


def optimizer_params_forgotten() -> None:
    made = capi.ggml_opt_init(
        backend_sched=S.sched, loss_type=MSE, get_opt_pars=lambda: {"sgd": {"alpha": 0.1}}
    )
    Owned(made, capi.ggml_opt_free)


def epoch(function: Any) -> None:
    capi.ggml_opt_epoch(S.optimizer, S.dataset, None, None, 2, function, function)


def read_gguf(function: Any) -> None:
    capi.gguf_free(capi.gguf_init_from_callback(function, 64, len(S.gguf)))


def reader(output: Any, offset: int, length: int) -> int:
    piece = S.gguf[offset : offset + length]
    ffi.memmove(output, piece, len(piece))
    return len(piece)


def log_to(function: Any, error: Any) -> None:
    capi.ggml_log_set(function)
    try:
        raises(error, capi.gguf_init_from_buffer, b"no GGUF, and ggml says so")
    finally:
        capi.ggml_log_set(None)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def log_forgotten() -> None:
    for _ in range(2):
        capi.ggml_log_set(lambda level, text: None)


CALLBACKS = {
    "ggml_abort_callback_t": Callback(
        lambda: [capi.ggml_set_abort_callback(f) for f in (lambda message: None, None)],
        lambda: raises(TypeError, capi.ggml_set_abort_callback, 5),
        lambda: capi.ggml_set_abort_callback(lambda message: None),
    ),
    "ggml_abort_callback": Callback(
        lambda: abort_callback(lambda: False),
        lambda: raises(Refused, abort_callback, refuse),
        abort_callback_forgotten,
    ),
    "ggml_custom1_op_t": custom(lambda ctx, x, f: capi.ggml_map_custom1(ctx, x, f)),
    "ggml_custom2_op_t": custom(lambda ctx, x, f: capi.ggml_map_custom2(ctx, x, x, f)),
    "ggml_custom3_op_t": custom(lambda ctx, x, f: capi.ggml_map_custom3(ctx, x, x, x, f)),
    "ggml_custom_op_t": custom(lambda ctx, x, f: capi.ggml_custom_4d(ctx, F32, 4, 1, 1, 1, [x], f)),
    "ggml_log_callback": Callback(
        lambda: log_to(lambda level, text: None, GGUFError),
        lambda: log_to(interrupt, KeyboardInterrupt),
        log_forgotten,
    ),
    "ggml_backend_sched_eval_callback": Callback(
        lambda: eval_callback(lambda tensor, ask: True),
        lambda: raises(Refused, eval_callback, refuse),
        eval_callback_forgotten,
    ),
    "ggml_backend_meta_get_split_state_t": Callback(
        lambda: [split_weights(name) for name in ("cut", "partial")],
        lambda: raises(SplitError, split_weights, "refused"),
        lambda: split_weights("cut", forget=True),
    ),
    "ggml_backend_eval_callback": Callback(
        lambda: compare(lambda index, t1, t2: True),
        lambda: raises(Refused, compare, refuse),
        lambda: raises(TypeError, compare, "nobody"),
    ),
    "ggml_opt_get_optimizer_params": Callback(
        lambda: optimizer_params(lambda: {"sgd": {"alpha": 0.1}}),
        lambda: raises(Refused, optimizer_params, refuse),
        optimizer_params_forgotten,
    ),
    "ggml_opt_epoch_callback": Callback(
        lambda: epoch(lambda *args: None),
        lambda: raises(Refused, epoch, refuse),
        lambda: raises(TypeError, epoch, "nobody"),
    ),
    "gguf_reader_callback_t": Callback(
        lambda: read_gguf(reader),
        lambda: raises(Refused, read_gguf, refuse),
        lambda: raises(GGUFError, read_gguf, lambda *args: 0),
    ),
}


def fit(function: Any) -> None:
    """It makes an optimiser and two results itself."""
    ctx = context(1 << 22)
    outputs = capi.ggml_mul_mat(ctx, S.parameter, S.inputs)
    capi.ggml_set_output(outputs)
    rest = S.dataset, MSE, capi.GGML_OPT_OPTIMIZER_TYPE_SGD, function, 1, 4
    try:
        capi.ggml_opt_fit(S.train_sched, ctx, S.inputs, outputs, *rest)
    finally:
        capi.ggml_free(ctx)


def thread_that_fails() -> None:
    """What the guard keeps of each thread goes with it."""
    thread = threading.Thread(target=CALLBACKS["ggml_custom1_op_t"].fail)
    thread.start()
    thread.join()


def cases() -> Iterator[tuple[str, Cycle]]:
    yield "thread: fail", thread_that_fails
    yield "ggml_opt_fit: use", lambda: fit(lambda epoch: {"sgd": {"alpha": 0.1}})
    yield "ggml_opt_fit: fail", lambda: raises(Refused, fit, refuse)
    for name, callback in CALLBACKS.items():
        for way, cycle in callback._asdict().items():
            yield f"{name}: {way}", cycle
