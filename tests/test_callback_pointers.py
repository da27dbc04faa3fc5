"""The kinds of functions that ggml hands out: called through the guard, as `_runtime.invoke` does.

Those that the CPU backend has are ggml's own; of the others there is none here, and a C function of
the same type stands for one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import Arena, check_product

from ggml_cffi import AbortError, _callbacks, capi, ffi, lib
from ggml_cffi._gen.tables import KINDS
from ggml_cffi._runtime import invoke

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ANNOTATIONS = Path(__file__).resolve().parent.parent / "ggml" / "annotations"
Q8_0 = capi.GGML_TYPE_Q8_0
ROW = np.linspace(-1, 1, 64, dtype=np.float32)


def registry(name: str) -> Any:
    """What the CPU backend's registry hands out under a name."""
    device = capi.ggml_backend_dev_by_type(capi.GGML_BACKEND_DEVICE_TYPE_CPU)
    found = capi.ggml_backend_reg_get_proc_address(capi.ggml_backend_dev_backend_reg(device), name)
    assert found, name
    return found


def floats(array: Any) -> Any:
    return ffi.cast("float *", ffi.from_buffer(array))


def quantised() -> Any:
    made = np.zeros(64 // 32 * 34, np.uint8)
    capi.ggml_quantize_chunk(Q8_0, ROW, made, 0, 1, 64)
    return made


# ---- each kind at work: (kind, what it does)


def to_float(backend: Any) -> None:
    row = np.zeros(64, np.float32)
    pointer = capi.ggml_get_type_traits(Q8_0).to_float
    invoke("ggml_to_float_t", pointer, ffi.from_buffer(quantised()), floats(row), 64)
    np.testing.assert_allclose(row, ROW, atol=0.01)


def from_float(backend: Any) -> None:
    row = np.zeros(68, np.uint8)
    pointer = capi.ggml_get_type_traits(Q8_0).from_float_ref
    invoke("ggml_from_float_t", pointer, floats(ROW), ffi.from_buffer(row), 64)
    np.testing.assert_array_equal(row, quantised())


def vec_dot(backend: Any) -> None:
    found, row = ffi.new("float *"), ffi.from_buffer(ROW)
    pointer = capi.ggml_get_type_traits_cpu(capi.GGML_TYPE_F32).vec_dot
    invoke("ggml_vec_dot_t", pointer, 64, found, 0, row, 0, row, 0, 1)
    assert found[0] == pytest.approx(float(ROW @ ROW), rel=1e-5)


def set_n_threads(backend: Any) -> None:
    with Arena(backend) as arena:
        threads: set[int] = set()
        ctx = arena.context()
        look = lambda dst, src, ith, nth: threads.add(threading.get_ident())  # noqa: E731
        graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, arena.weight(4), look, 2))
        setter = registry("ggml_backend_set_n_threads")
        for count in (2, 1):
            invoke("ggml_backend_set_n_threads_t", setter, backend, count)
            threads.clear()
            capi.ggml_backend_graph_compute(backend, graph)
            assert len(threads) == count


def set_abort_callback(backend: Any) -> None:
    kind, setter = "ggml_backend_set_abort_callback_t", registry("ggml_backend_set_abort_callback")
    asked: list[int] = []

    def function() -> bool:
        asked.append(1)
        if len(asked) > 1:
            raise KeyError("asked")
        return False

    registration = _callbacks.Registration(function)
    trampoline = getattr(lib, KINDS["ggml_abort_callback"].trampolines[0])
    invoke(kind, setter, backend, trampoline, registration.userdata)
    with pytest.raises(KeyError, match="asked"):
        check_product(backend)
    assert len(asked) == 2
    registration.drop()
    check_product(backend)  # nobody is there: it goes on
    invoke(kind, setter, backend, ffi.NULL, ffi.NULL)
    check_product(backend)
    assert len(asked) == 2


def get_features(backend: Any) -> None:
    device = capi.ggml_backend_dev_by_type(capi.GGML_BACKEND_DEVICE_TYPE_CPU)
    reg = capi.ggml_backend_dev_backend_reg(device)
    feature = invoke("ggml_backend_get_features_t", registry("ggml_backend_get_features"), reg)
    names = []
    while feature.name:
        names.append(ffi.string(feature.name).decode())
        feature += 1
    assert names == list(dict.fromkeys(names)) != []


def get_extra_bufts(backend: Any) -> None:
    device = capi.ggml_backend_dev_by_type(capi.GGML_BACKEND_DEVICE_TYPE_CPU)
    getter = registry("ggml_backend_dev_get_extra_bufts")
    bufts = invoke("ggml_backend_dev_get_extra_bufts_t", getter, device)
    index = 0
    while bufts and bufts[index]:
        assert capi.ggml_backend_buft_name(bufts[index])
        index += 1


def stand_in(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this type that is not ggml's."""
    made = ffi.callback(kind, function)
    return invoke(kind, made, *arguments)


def comm_init(backend: Any) -> None:
    def init(backends: Any, n: int) -> Any:
        assert backends[0] == backend
        return ffi.cast("void *", n)

    backends = ffi.new("struct ggml_backend *[]", [backend])
    found = stand_in("ggml_backend_comm_init_t", init, backends, 1)
    assert int(ffi.cast("uintptr_t", found)) == 1


def comm_free(backend: Any) -> None:
    freed: list[Any] = []
    stand_in("ggml_backend_comm_free_t", freed.append, ffi.cast("void *", 7))
    assert freed == [ffi.cast("void *", 7)]


def comm_allreduce_tensor(backend: Any) -> None:
    with Arena(backend) as arena:
        tensors = ffi.new("struct ggml_tensor *[]", [arena.tensor(4, name="t")])
        names = []

        def reduce(comm: Any, given: Any) -> bool:
            names.append(capi.ggml_get_name(given[0]))
            return True

        kind = "ggml_backend_comm_allreduce_tensor_t"
        assert stand_in(kind, reduce, ffi.NULL, tensors) is True
        assert names == ["t"]


def split_buffer_type(backend: Any) -> None:
    cpu = capi.ggml_backend_cpu_buffer_type()
    shares = ffi.new("float[]", [0.25, 0.75])

    def split(main_device: int, given: Any) -> Any:
        assert (main_device, given[1]) == (3, 0.75)
        return cpu

    assert stand_in("ggml_backend_split_buffer_type_t", split, 3, shares) == cpu


#: Each kind: what it does when it works.
POINTERS: dict[str, Callable[[Any], None]] = {
    "ggml_to_float_t": to_float,
    "ggml_from_float_t": from_float,
    "ggml_vec_dot_t": vec_dot,
    "ggml_backend_comm_init_t": comm_init,
    "ggml_backend_comm_free_t": comm_free,
    "ggml_backend_comm_allreduce_tensor_t": comm_allreduce_tensor,
    "ggml_backend_split_buffer_type_t": split_buffer_type,
    "ggml_backend_set_n_threads_t": set_n_threads,
    "ggml_backend_dev_get_extra_bufts_t": get_extra_bufts,
    "ggml_backend_set_abort_callback_t": set_abort_callback,
    "ggml_backend_get_features_t": get_features,
}
HERE = [kind for kind in POINTERS if hasattr(lib, f"ggml_cffi_invoke_{kind}")]
each = pytest.mark.parametrize("kind", HERE)


def zeros(kind: str) -> list[Any]:
    """Arguments of NULL and 0 for a function of this type."""
    return [
        ffi.NULL if argument.kind in ("pointer", "function") else 0
        for argument in ffi.typeof(ffi.getctype(kind)).args
    ]


def test_the_table_is_complete() -> None:
    tables = tomllib.loads((ANNOTATIONS / "callbacks.toml").read_text(encoding="utf-8"))
    assert set(POINTERS) == {k for k, table in tables.items() if not table.get("used", True)}
    print(f"{len(HERE)} of {len(POINTERS)} kinds are in this ggml")


@each
def test_works(kind: str, one_thread: Any) -> None:
    POINTERS[kind](one_thread)


@each
def test_null_is_refused(kind: str, one_thread: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind}: function must not be NULL"):
        invoke(kind, ffi.NULL, *zeros(kind))
    check_product(one_thread)


@each
def test_an_abort_inside_is_an_exception(kind: str, one_thread: Any) -> None:
    """The same C function stands for all: the CPU's, of a backend that is NULL."""
    aborts = registry("ggml_backend_set_n_threads")
    for _ in range(2):
        with pytest.raises(AbortError, match="GGML_ASSERT") as caught:
            invoke(kind, aborts, *zeros(kind))
        assert caught.value.function == kind
    check_product(one_thread)


@each
def test_arguments_of_another_type_are_refused(kind: str, one_thread: Any) -> None:
    aborts = registry("ggml_backend_set_n_threads")
    with pytest.raises(TypeError):
        invoke(kind, aborts, *zeros(kind)[:-1])
    with pytest.raises(TypeError):
        invoke(kind, aborts, *([object()] * len(zeros(kind))))
    check_product(one_thread)
