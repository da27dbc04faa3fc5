"""Every operation that the CPU computes, with real numbers, against NumPy."""

from __future__ import annotations

import zlib
from contextlib import nullcontext

import numpy as np
import pytest
from op_table import CASES, WITHOUT_REFERENCE

from ggml_cffi import capi, device, ops, quants
from ggml_cffi.context import Context
from ggml_cffi.dtypes import element_type, is_quantized
from ggml_cffi.graph import Graph

CPU = device("CPU")
#: One case of each operation, which two threads compute as well.
LARGEST = {
    max((c for c in CASES if c.op == op), key=lambda c: sum(o.size for o in c.operands.values()))
    for op in {c.op for c in CASES}
}


def as_held(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that a tensor of this type has when it is given these."""
    if is_quantized(element_type(dtype)):
        return quants.dequantize(quants.quantize(np.float32(numbers), dtype), dtype).astype(float)
    if dtype == "bf16":
        import ml_dtypes

        return numbers.astype(ml_dtypes.bfloat16).astype(float)
    if dtype in ("f32", "f16"):
        return numbers.astype(dtype.replace("32", "4").replace("16", "2")).astype(float)
    return numbers


def four(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label[:80])
def test_against_numpy(case):
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    given = {name: one.numbers(rng) for name, one in case.operands.items()}
    held = {name: as_held(given[name], one.dtype) for name, one in case.operands.items()}
    ctx = Context()
    tensors = {
        name: ctx.input(one.shape, one.dtype, name=name) for name, one in case.operands.items()
    }
    for name in case.parameters:
        capi.ggml_set_param(tensors[name].handle)
    call = dict(case.arguments) if tensors else {**case.arguments, "ctx": ctx}
    operation = getattr(ops, case.op)
    with pytest.deprecated_call() if "Deprecated" in operation.__doc__ else nullcontext():
        result = operation(**tensors, **call)
    expected = np.asarray(case.reference(**held, **case.arguments))
    inputs = {t.name: given[t.name] for t in Graph(result).inputs}
    for n_threads in (1, 2) if case in LARGEST else (1,):
        with Graph(result).compile(CPU, n_threads) as compiled:
            for _ in range(2):  # what works in place must not spoil the next run
                found = compiled(**inputs)
                assert four(found).shape == four(expected).shape
                if case.unordered:
                    found, expected = np.sort(found), np.sort(expected)
                np.testing.assert_allclose(
                    four(found).astype(float), four(expected), case.rtol, case.atol
                )


def test_every_operation_is_in_the_table_or_is_named_without_reference(capsys):
    tested = {case.op for case in CASES}
    with capsys.disabled():
        print(f"\n{len(tested)} operations against NumPy: {', '.join(sorted(tested))}")
        for name, why in WITHOUT_REFERENCE.items():
            print(f"without reference: {name} ({why})")
    assert not tested & set(WITHOUT_REFERENCE)
    assert tested | set(WITHOUT_REFERENCE) == set(ops.__all__)
    assert len(tested) >= 90


def test_cast_which_ggml_makes_an_operand_of_itself():
    ctx = Context()
    x = ctx.input((3,), name="x")
    again = ops.cast(ops.cast(x, element_type("f16")), element_type("f32"))
    with Graph(ops.scale(again, 2.0)).compile(CPU, 1) as compiled:
        np.testing.assert_array_equal(compiled(x=np.float32([1, 2, 3])), [2, 4, 6])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda a: ops.reshape_2d(a, 12, 2), (2, 12)),
        (lambda a: ops.cont_4d(a, 12, 2, 1, 1), (1, 1, 2, 12)),
        (lambda a: ops.view_1d(a, 5), (5,)),
        (lambda a: ops.pool_1d(a, 0, 2, 2), (2, 3, 2)),
        (lambda a: ops.pad_reflect_1d(a, 1, 1), (2, 3, 6)),
        (lambda a: ops.set_1d(a, a.context.tensor((2,)), 0), (2, 3, 4)),
        (lambda a: ops.sum_rows(a), (2, 3, 1)),
        (lambda a: ops.sum(a), (1, 1, 1)),
        (lambda a: ops.get_rows(a.context.tensor((9, 4)), a.context.tensor((1,), "i32")), (1, 4)),
        (lambda a: ops.interpolate(a, 8, 6, 2, 1), (1, 2, 6, 8)),
    ],
)
def test_axes_of_the_result(make, shape):
    """As many as are asked for by ne0, ne1 and so on, else as many as the operands have."""
    assert make(Context().tensor((2, 3, 4))).shape == shape
