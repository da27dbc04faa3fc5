"""A typed program against the public API: mypy --strict and pyright check it, and it runs."""

# pyright: strict

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

import ggml_cffi
from ggml_cffi import AbortError, Backend, MetaDevice, MultiBuffer, SplitState, capi, enums, ffi
from ggml_cffi.capi import types

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:
    _T = TypeVar("_T")

    def assert_type(value: _T, kind: object) -> _T:
        return value


F32 = enums.ggml_type.GGML_TYPE_F32


def multiply(backend: types.ggml_backend, a: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Give the product of `a` with itself, transposed, as the backend computes it."""
    rows, columns = a.shape
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    tensor = capi.ggml_new_tensor(ctx, F32, [columns, rows])
    capi.ggml_set_name(tensor, "a")
    product = assert_type(capi.ggml_mul_mat(ctx, tensor, tensor), types.ggml_tensor)
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, product)
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    capi.ggml_backend_tensor_set(tensor, np.ascontiguousarray(a), 0)
    status = capi.ggml_backend_graph_compute(backend, graph)
    assert assert_type(status, enums.ggml_status) is enums.ggml_status.GGML_STATUS_SUCCESS
    result = np.empty((rows, rows), np.float32)
    capi.ggml_backend_tensor_get(product, result, 0)

    assert assert_type(capi.ggml_get_name(tensor), str) == "a"
    found = assert_type(capi.ggml_get_tensor(ctx, b"no such tensor"), "types.ggml_tensor | None")
    assert found is None
    assert assert_type(tensor.ne[0], int) == columns
    message = ""
    try:
        capi.ggml_mul_mat(ctx, tensor, capi.ggml_new_tensor_1d(ctx, F32, columns + 1))
    except AbortError as error:
        message = assert_type(error.message, str)
    assert "ggml_can_mul_mat" in message
    capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)
    return result


def describe(device: types.ggml_backend_device) -> str:
    """Give one line about a device."""
    free, total = assert_type(capi.ggml_backend_dev_memory(device), "tuple[int, int]")
    kind = assert_type(capi.ggml_backend_dev_type(device), enums.ggml_backend_dev_type)
    return f"{capi.ggml_backend_dev_name(device)} ({kind.name}): {free} of {total} bytes"


def halves(tensor: ggml_cffi.TensorInfo, n_devs: int) -> SplitState:
    """Cut the rows into equal parts."""
    rows = assert_type(tensor.ne[1], int)
    return SplitState.split(1, [rows // n_devs] * n_devs)


def custom(dst: types.ggml_tensor, a: types.ggml_tensor, ith: int, nth: int) -> None:
    """Do nothing, as a custom operation."""


def callbacks() -> None:
    """Give Python functions to C."""
    ctx = capi.ggml_init(mem_size=1 << 16, no_alloc=True)
    tensor = capi.ggml_new_tensor_1d(ctx, F32, 4)
    assert_type(capi.ggml_map_custom1(ctx, tensor, custom, 1), types.ggml_tensor)
    capi.ggml_free(ctx)


def out_pointers(path: str) -> None:
    """Let C fill in a pointer of the caller's."""
    made = ffi.new("struct ggml_context **")
    try:
        capi.gguf_free(capi.gguf_init_from_file(path, no_alloc=False, ctx=made))
    except ggml_cffi.GGUFError:
        assert made[0] == ffi.NULL


def objects() -> None:
    """Use the classes."""
    cpu = ggml_cffi.device("cpu")
    with Backend(cpu) as backend:
        made = [capi.ggml_backend_alloc_buffer(backend.handle, size) for size in (64, 128)]
        with MultiBuffer(made) as multi:
            assert assert_type(multi.size, int) >= 192
    with MetaDevice([cpu, cpu], halves) as meta:
        assert assert_type(meta.error, "Exception | None") is None
        assert [device.name for device in meta.devices] == [cpu.name] * 2


def objects_at_the_top() -> None:
    """Compute with objects, which are imported when they are asked for."""
    with ggml_cffi.Context() as ctx:
        x = assert_type(ctx.input((2, 3), name="x"), ggml_cffi.Tensor)
        w = ctx.from_numpy(np.ones((4, 3), np.float32), name="w")
        graph = ggml_cffi.Graph(ggml_cffi.ops.relu(ggml_cffi.ops.mul_mat(w, x)))
        with assert_type(graph.compile("CPU"), ggml_cffi.Compiled) as compiled:
            results = compiled.run(x=np.ones((2, 3), np.float32))
            assert [one.shape for one in results.values()] == [(2, 4)]
    blocks = assert_type(
        ggml_cffi.quantize(np.ones((1, 32), np.float32), "q8_0"), "npt.NDArray[np.uint8]"
    )
    assert ggml_cffi.dequantize(blocks, "q8_0").shape == (1, 32)


def main() -> None:
    """Run all of it."""
    backend = capi.ggml_backend_cpu_init()
    a: npt.NDArray[np.float32] = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 1, 0, 1]], np.float32)
    assert np.array_equal(multiply(backend, a), np.matmul(a, np.transpose(a)))
    capi.ggml_backend_free(backend)
    for index in range(capi.ggml_backend_dev_count()):
        assert "bytes" in describe(capi.ggml_backend_dev_get(index))
    callbacks()
    out_pointers(__file__)
    objects()
    objects_at_the_top()
    assert assert_type(capi.GGML_MAX_DIMS, int) == 4
    assert "ggml_mul_mat" in capi.__coverage__.bound


if __name__ == "__main__":
    main()
