"""Tensor objects that C++ makes are those that Python makes, and refused where Python refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import signal
import threading
import warnings
import weakref
from typing import Any

import pytest
from op_table import CASES

from ggml_cffi import Context, Graph, OperandError, Tensor, capi, lib, ops
from ggml_cffi._building import build

BY_NAME = {case.op: case for case in CASES}


def prepared() -> Context:
    """A context that has room: from now on C++ makes its tensors."""
    ctx = Context()
    ops.add(ctx.tensor((2, 3)), ctx.tensor((2, 3)))
    ctx.input((1,))
    return ctx


def described(tensor: Tensor) -> tuple[object, ...]:
    handle = tensor.handle
    parameters = bytes(memoryview(lib_buffer(handle)))
    return tensor.op, tensor.type, tensor.shape, tensor.strides, tensor.ndim, parameters


def lib_buffer(handle: object) -> object:
    from ggml_cffi import ffi

    return ffi.buffer(handle.op_params)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_an_operation_is_the_same_with_room_and_without(name: str) -> None:
    case = BY_NAME[name]
    made = []
    for ctx in (Context(), prepared()):
        tensors = {n: ctx.input(one.shape, one.dtype) for n, one in case.operands.items()}
        for parameter in case.parameters:
            capi.ggml_set_param(tensors[parameter].handle)
        call = dict(case.arguments) if tensors else {**case.arguments, "ctx": ctx}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made.append(described(getattr(ops, name)(**tensors, **call)))
    assert made[0] == made[1]


def test_a_deprecated_operation_warns_each_time() -> None:
    ctx = prepared()
    a, positions = ctx.tensor((2, 4, 8)), ctx.tensor((2,), "i32")
    for _ in range(2):
        with pytest.deprecated_call(match="ggml_rope_custom"):
            ops.rope_custom(a, positions, 8)


def test_operands_that_do_not_fit_are_named_with_their_shapes() -> None:
    told = []
    for ctx in (Context(), prepared()):
        a, b = ctx.tensor((2, 3), name="left"), ctx.tensor((2, 4))
        with pytest.raises(OperandError) as caught:
            ops.mul_mat(a, b)
        assert "a 'left' is f32 of shape (2, 3); b is f32 of shape (2, 4)" in str(caught.value)
        told.append(str(caught.value))
        with pytest.raises(OperandError, match=r"a is f32 of shape \(2, 4\): requires"):
            ops.reshape_2d(b, -1, 8)
    assert told[0] == told[1]


def test_arguments_go_by_position_and_by_name() -> None:
    ctx = prepared()
    a, b, positions = ctx.tensor((2, 4, 8)), ctx.tensor((8,)), ctx.tensor((2,), "i32")
    for made in (ops.add(a, b), ops.add(a, b=b), ops.add(b=b, a=a), ops.add(a, b, ctx=ctx)):
        assert made.shape == (2, 4, 8) and made.context is ctx
    assert described(ops.scale(a, 2.0)) == described(ops.scale(s=2.0, a=a))
    by_default = ops.rope_ext(a, positions, n_dims=8)
    assert described(by_default) == described(
        ops.rope_ext(a, positions, None, n_dims=8, mode=0, freq_base=10000.0, beta_fast=32.0)
    )
    assert described(by_default) != described(ops.rope_ext(a, positions, n_dims=8, beta_fast=9.0))


def test_arguments_that_no_function_of_python_takes() -> None:
    ctx = prepared()
    a = ctx.tensor((2,))
    wrong: list[tuple[Any, str]] = [
        (lambda: ops.add(a), "missing 1 required positional argument: 'b'"),
        (lambda: ops.add(a, a, ctx), "takes 2 positional arguments but 3 were given"),
        (lambda: ops.add(a, a, c=a), "unexpected keyword argument 'c'"),
        (lambda: ops.add(a, a, b=a), "multiple values for argument 'b'"),
        (lambda: ops.rope_ext(a, a), "missing 1 required keyword-only argument: 'n_dims'"),
        (lambda: ops.add(a, a, ctx=1), "expected a Context"),
    ]
    for call, told in wrong:
        with pytest.raises(TypeError, match=told):
            call()


def test_an_operation_tells_what_it_takes() -> None:
    assert str(inspect.signature(ops.add)) == "(a, b, *, ctx=None)"
    assert str(inspect.signature(ops.rope)) == "(a, b, n_dims, mode=0, *, ctx=None)"
    for name in ops.__all__:
        operation = getattr(ops, name)
        assert operation.__name__ == name and "ctx" in inspect.signature(operation).parameters
        assert operation.__doc__ and copy.deepcopy(operation) is operation
    assert (ops.mul_mat.__doc__ or "").startswith("``struct ggml_tensor *ggml_mul_mat(")


@pytest.mark.parametrize("wrong", [None, 1, "a", object()])
def test_what_is_no_operand_is_refused(wrong: object) -> None:
    ctx = prepared()
    for given in ((ctx.tensor((2,)), wrong), (wrong, ctx.tensor((2,)))):
        with pytest.raises((TypeError, ValueError), match="ggml_add"):
            ops.add(*given)  # type: ignore[arg-type]


def test_numbers_that_c_has_no_room_for_are_refused() -> None:
    ctx = prepared()
    a = ctx.tensor((2, 3))
    for number in (1e300, 10**40, "1", None):
        with pytest.raises((TypeError, OverflowError, ValueError), match="scale"):
            ops.scale(a, number)  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="ne0"):
        ops.reshape_2d(a, 1 << 70, 1)
    with pytest.raises(TypeError, match="ne0"):
        ops.reshape_2d(a, 2.5, 1)  # type: ignore[arg-type]
    assert ops.scale(a, 2).op == ops.scale(a, 2.0).op
    assert ops.scale(a, float("inf")).shape == (2, 3)


def test_an_operand_of_another_context_is_kept() -> None:
    other, ctx = prepared(), prepared()
    result = ops.add(ctx.tensor((2,)), other.tensor((2,)))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert result.context is ctx and gone() is not None


def test_shapes_that_are_refused_with_room_too() -> None:
    ctx = prepared()
    for shape in ((1, 2, 3, 4, 5), (-1,), (-1, -1), (1 << 40, 1 << 40), (1 << 61,), (0, 1 << 61)):
        with pytest.raises(ValueError, match="shape is"):
            ctx.tensor(shape)
    for wrong in ("ab", 1.5, (1.5,), None, (None,)):
        with pytest.raises(TypeError, match="expected integers"):
            ctx.tensor(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32"):
        ctx.tensor((2, 33), "q8_0")
    assert ctx.tensor((0, 3)).shape == (0, 3) and ctx.tensor(()).ndim == 0
    assert ctx.tensor((2, 64), "q8_0").type == capi.GGML_TYPE_Q8_0


def test_more_tensors_than_an_arena_has_room_for() -> None:
    ctx = Context()
    a = x = ctx.tensor((2,))
    for _ in range(5000):
        x = ops.add(x, ctx.tensor((2,)))
    image, kernel = ctx.tensor((1, 2, 8, 8)), ctx.tensor((2, 2, 3, 3), "f16")
    for _ in range(500):  # several tensors each
        convolved = ops.conv_2d(kernel, image, p0=1, p1=1)
    assert Graph(x).n_nodes == 5000 == len(Graph(x).nodes)
    assert convolved.shape == (1, 2, 8, 8)
    assert a.shape == (2,)


def test_a_closed_context_takes_no_more() -> None:
    ctx = prepared()
    a = ctx.tensor((2,))
    ctx.close()
    with pytest.raises(ValueError, match="closed"):
        ops.sqr(a)
    for make in (ctx.tensor, ctx.input):
        with pytest.raises(ValueError, match="closed"):
            make((2,))


def test_no_other_thread_gets_in_between() -> None:
    ctx = prepared()
    a = ctx.tensor((4,))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            x = a
            for i in range(2000):
                x = ops.add(x, ctx.tensor((4,)))
                if i % 100 == 0:
                    build(capi.ggml_sqr, {"a": x})
            assert Graph(x).n_nodes == 2000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_context_that_is_closed_while_threads_make_tensors_in_it() -> None:
    for _ in range(20):
        ctx = prepared()
        begun = threading.Barrier(3)
        ends: list[str] = []

        def work(x: Tensor, begun: threading.Barrier = begun, ends: list[str] = ends) -> None:
            begun.wait()
            try:
                while True:
                    x = ops.add(x, x)
            except ValueError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=work, args=(ctx.tensor((4,)),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun.wait()
        ctx.close()
        for thread in threads:
            thread.join()
        assert len(ends) == 2 and all("closed" in end for end in ends)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_it_is_refused_whoever_had_the_lock() -> None:
    ctx = prepared()
    a = ctx.tensor((2,))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ctx._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        status = 1
        try:
            for make in (lambda: ops.sqr(a), lambda: ctx.tensor((2,)), lambda: ctx.input((2,))):
                with pytest.raises(RuntimeError, match="before a fork"):
                    make()
            fresh = Context()
            status = 0 if ops.sqr(fresh.tensor((2,))).shape == (2,) else 2
        finally:
            os._exit(status)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ops.sqr(a).shape == (2,)


def test_tensors_are_given_up_with_their_context() -> None:
    ctx = prepared()
    x = ops.sqr(ops.sqr(ctx.tensor((2,))))
    gone = weakref.ref(ctx)
    before = {kind: lib.ggml_cffi_live_handles(kind) for kind in range(lib.ggml_cffi_n_handles())}
    del ctx, x
    gc.collect()
    assert gone() is None
    after = {kind: lib.ggml_cffi_live_handles(kind) for kind in range(lib.ggml_cffi_n_handles())}
    contexts = next(k for k in before if b"ggml_context" in _name(k) and b"gguf" not in _name(k))
    assert after[contexts] < before[contexts]


def _name(kind: int) -> bytes:
    from ggml_cffi import ffi

    return ffi.string(lib.ggml_cffi_handle_name(kind))


def test_a_tensor_counts_its_context_and_handle_once() -> None:
    import sys

    ctx = prepared()
    a = ctx.tensor((2,))
    before = sys.getrefcount(ctx), sys.getrefcount(a._handle), sys.getrefcount(ctx._lock)
    for _ in range(100):
        ops.add(a, a)
        ctx.tensor((2,))
        with pytest.raises(OperandError):
            ops.mul_mat(a, ctx.tensor((3,)))
        with pytest.raises(TypeError):
            ops.add(a, 3)  # type: ignore[arg-type]
    gc.collect()
    assert (sys.getrefcount(ctx), sys.getrefcount(a._handle), sys.getrefcount(ctx._lock)) == before


def test_arguments_that_somebody_else_has_in_his_hands() -> None:
    """A memory profiler in another thread, while an operation waits for the context."""
    ctx = prepared()
    a, b = ctx.tensor((4, 4)), ctx.tensor((4, 4))
    locked, kept = threading.Event(), []

    def hold() -> None:
        with ctx._lock:
            locked.set()
            while not kept:
                kept.extend(
                    found
                    for found in gc.get_objects()
                    if type(found) is tuple
                    and len(found) == 3
                    and any(part is a._handle for part in gc.get_referents(found))
                )

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    assert ops.add(a, b).shape == (4, 4)
    thread.join()
    assert kept[0][0] is None  # no hole


def test_what_a_signal_raises_while_an_operation_waits() -> None:
    ctx = prepared()
    a = ctx.tensor((4, 4))
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ctx._lock:
            locked.set()
            done.wait(10)

    def raise_it(number: int, frame: Any) -> None:
        done.set()
        raise TypeError("of a signal")

    before = signal.signal(signal.SIGALRM, raise_it)
    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TypeError, match="of a signal"):
            ops.scale(a, 2.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join()
