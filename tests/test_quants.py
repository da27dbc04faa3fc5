"""Quantisation and back: ggml's bytes, whatever the array's layout and the number of threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants as reference

from ggml_cffi import Context, Graph, capi, dtypes, lib, ops, quants
from ggml_cffi.enums import ggml_type
from ggml_cffi.errors import AbortError, NotSupportedError

TARGETS = [
    kind
    for kind in ggml_type
    if not kind.name.endswith("_COUNT")
    and (capi.ggml_is_quantized(kind) or dtypes.type_name(kind) in ("f32", "f16", "bf16"))
]
BOTH_WAYS = [kind for kind in TARGETS if dtypes.type_name(kind) not in ("q8_1", "q8_K")]
NAMES = {kind: dtypes.type_name(kind) for kind in TARGETS}

every = pytest.mark.parametrize("kind", TARGETS, ids=NAMES.get)
both_ways = pytest.mark.parametrize("kind", BOTH_WAYS, ids=NAMES.get)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def by_c(array: Any, kind: ggml_type, imatrix: Any = None) -> Any:
    """What ggml makes of a matrix in one call."""
    rows, n = array.shape
    size = n // capi.ggml_blck_size(kind) * capi.ggml_type_size(kind)
    result = np.zeros((rows, size), np.uint8)
    capi.ggml_quantize_chunk(kind, np.ascontiguousarray(array), result, 0, rows, n, imatrix)
    return result


def weights_for(kind: ggml_type, n: int) -> Any:
    return np.ones(n, np.float32) if capi.ggml_quantize_requires_imatrix(kind) else None


@both_ways
@pytest.mark.parametrize("threads", [1, 3])
def test_the_bytes_are_those_of_ggml(
    kind: ggml_type, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quants, "_CHUNK", 1024)  # several chunks, the last one shorter
    array = numbers(7, 512)
    imatrix = weights_for(kind, 512)
    made = quants.quantize(array, kind, imatrix, threads)
    assert made.dtype == np.uint8
    np.testing.assert_array_equal(made, by_c(array, kind, imatrix))


@both_ways
def test_the_bytes_with_weights(kind: ggml_type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "_CHUNK", 512)
    array = numbers(3, 4, 256)
    weights = np.abs(numbers(3, 256, seed=1)) + 0.01
    made = quants.quantize(array, kind, weights, 2)
    for one, matrix, row in zip(made, array, weights, strict=True):
        np.testing.assert_array_equal(one, by_c(matrix, kind, row))
    shared = quants.quantize(array, kind, weights[0], 2)
    np.testing.assert_array_equal(
        shared.reshape(12, -1), by_c(array.reshape(12, 256), kind, weights[0])
    )


def test_q8_0_of_any_numbers() -> None:
    """Our own C++ makes it: halves, numbers from the smallest to the largest, NaN and infinity."""
    kind, rng = ggml_type.GGML_TYPE_Q8_0, np.random.default_rng(7)
    scales = 2.0 ** rng.integers(-149, 127, (20_000, 1))
    with np.errstate(over="ignore"):
        arrays = [(rng.uniform(-2, 2, (20_000, 64)) * scales).astype(np.float32)]
    halves = np.arange(-127, 127.5, 0.5, np.float32)[:508].reshape(-1, 4)
    with_largest = np.repeat(np.tile(halves, (1, 8)), 2, 0)
    with_largest[:, 0] = 127  # so that the scale is 1
    arrays.append(with_largest)
    arrays += [np.nextafter(with_largest, np.float32(end)) for end in (0, 200)]
    special = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, 3e38, 1, -1])
    arrays.append(rng.choice(special, (20_000, 32), p=[0.01] * 4 + [0.16] * 6))
    for array in arrays:
        np.testing.assert_array_equal(quants.quantize(array, kind), by_c(array, kind))


@every
def test_what_comes_back_is_near(kind: ggml_type) -> None:
    """A check against mixing up rows or blocks: each number against itself."""
    array = numbers(5, 768, seed=2)
    made = quants.quantize(array, kind, np.ones(768))
    back = quants.dequantize(made, kind)
    assert back.dtype == np.float32 and back.shape == array.shape
    bits = 8 * made.nbytes / array.size
    likeness = np.corrcoef(back.ravel(), array.ravel())[0, 1]
    assert likeness > {1: 0.65, 2: 0.65, 3: 0.97, 4: 0.99}.get(int(bits), 0.997)


@pytest.mark.parametrize(("name", "size", "scale"), [("q8_1", 36, "f2"), ("q8_K", 292, "f4")])
def test_q8_1_and_q8_k_come_back(
    name: str, size: int, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml only multiplies with them: ``block_q8_1`` and ``block_q8_K``, taken apart here."""
    monkeypatch.setattr(quants, "_CHUNK", 1024)
    array = numbers(3, 2, 1024, seed=3)
    made = quants.quantize(array, name)
    blocks = made.reshape(-1, size)
    begin, n = np.dtype(scale).itemsize * (2 if name == "q8_1" else 1), 32 if size == 36 else 256
    scales = blocks[:, : np.dtype(scale).itemsize].copy().view(scale).astype(np.float32)
    wanted = (scales * blocks[:, begin : begin + n].view(np.int8)).reshape(array.shape)
    for threads in (1, 3):
        np.testing.assert_array_equal(quants.dequantize(made, name, threads), wanted)
    assert np.abs(wanted - array).max() < 0.02
    assert quants.dequantize(made[:0], name).shape == (0, 2, 1024)
    with pytest.raises(ValueError, match=f"multiple of {size}: the bytes of a block of {name}"):
        quants.dequantize(made[..., 1:], name)


@pytest.mark.parametrize(("name", "other"), [("q8_1", "q4_1"), ("q8_K", "q4_K")])
def test_q8_1_and_q8_k_are_what_products_take(name: str, other: str, need: Any) -> None:
    need(hasattr(lib, "ggml_get_type_traits_cpu"), "linkable CPU library")
    w, x = numbers(1, 512, seed=5), numbers(1, 512, seed=6)
    traits = capi.ggml_get_type_traits_cpu(dtypes.element_type(other))
    assert traits.vec_dot_type == dtypes.element_type(name)
    blocks, factors = quants.quantize(w, other), quants.quantize(x, name)
    with Context() as ctx:
        held = ctx.from_numpy(w, dtype=other)
        ctx.allocate("CPU")
        product = Graph(ops.mul_mat(held, ctx.input(x.shape, name="x"))).compile("CPU", 1)(x=x)
    wanted = quants.dequantize(factors, name) @ quants.dequantize(blocks, other).T
    np.testing.assert_allclose(product, wanted, rtol=1e-3, atol=5e-2)


def test_against_the_gguf_package() -> None:
    """Both ways where that has the type; most it only reads."""
    array = numbers(6, 1024, seed=4)
    theirs = {one.value: one for one in gguf.GGMLQuantizationType}
    compared: dict[str, list[str]] = {"quantize": [], "dequantize": []}
    for kind in BOTH_WAYS:
        if int(kind) not in theirs:
            continue
        made = quants.quantize(array, kind, weights_for(kind, 1024))
        with contextlib.suppress(NotImplementedError):
            expected = reference.quantize(array, theirs[int(kind)])
            np.testing.assert_array_equal(made, expected.view(np.uint8).reshape(made.shape))
            compared["quantize"].append(NAMES[kind])
        with contextlib.suppress(NotImplementedError):
            expected = reference.dequantize(made, theirs[int(kind)])
            back = quants.dequantize(made, kind)
            np.testing.assert_array_equal(back, expected.reshape(array.shape), err_msg=NAMES[kind])
            compared["dequantize"].append(NAMES[kind])
    print(compared)
    assert {"f32", "f16", "bf16", "q4_0", "q5_1", "q8_0", "tq1_0"} <= set(compared["quantize"])
    assert len(compared["dequantize"]) >= 23


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:, ::2],
        lambda a: a[::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a.T[:512].T,
        lambda a: a.astype(">f4"),
        lambda a: a.astype(np.float64),
        lambda a: a.astype(np.float16),
        lambda a: (a * 100).astype(np.int16),
        lambda a: a.reshape(2, 4, 1024)[:, :, :512],
        lambda a: a > 0,
    ],
)
def test_any_array(change: Any) -> None:
    array = change(numbers(8, 1024))
    flat = np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1])
    made = quants.quantize(array, "q5_0", threads=2)
    assert made.shape[:-1] == array.shape[:-1]
    np.testing.assert_array_equal(made.reshape(len(flat), -1), by_c(flat, capi.GGML_TYPE_Q5_0))


def test_bytes_that_are_not_contiguous() -> None:
    made = quants.quantize(numbers(6, 64), "q4_0")
    np.testing.assert_array_equal(
        quants.dequantize(made[::-2], "q4_0"), quants.dequantize(made, "q4_0")[::-2]
    )


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (2, 0, 32)])
def test_nothing(shape: tuple[int, ...]) -> None:
    made = quants.quantize(np.zeros(shape), "q4_0")
    assert made.shape == (*shape[:-1], shape[-1] // 32 * 18)
    assert quants.dequantize(made, "q4_0").shape == shape


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "_CHUNK", 64)
    for threads in (1, 2):
        told: list[tuple[int, int]] = []
        here = set()

        def progress(done: int, total: int, told: Any = told, here: Any = here) -> None:
            told.append((done, total))
            here.add(threading.get_ident())

        made = quants.quantize(numbers(9, 64), "q8_0", threads=threads, progress=progress)
        quants.dequantize(made, "q8_0", threads=threads, progress=progress)
        assert told == [(n, 9) for n in range(1, 10)] * 2
        assert here == {threading.get_ident()}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_progress_raises_ends_the_work(
    kind: type[BaseException], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quants, "_CHUNK", 32)
    calls = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        raise kind("enough")

    with pytest.raises(kind, match="enough"):
        quants.quantize(numbers(50, 32), "q8_0", threads=threads, progress=progress)
    assert calls == [1]


def test_errors() -> None:
    array = numbers(2, 64)
    with pytest.raises(ValueError, match=r"rows of 48, expected a multiple of 32: a block of q4_0"):
        quants.quantize(numbers(2, 48), "q4_0")
    with pytest.raises(ValueError, match="array is a single number"):
        quants.quantize(1.0, "q4_0")
    with pytest.raises(TypeError, match="array has dtype complex64, expected real numbers"):
        quants.quantize(array.astype(np.complex64), "q4_0")
    with pytest.raises(TypeError, match="array has dtype object"):
        quants.quantize([None], "q4_0")
    with pytest.raises(ValueError, match="imatrix must not be None for iq2_xxs"):
        quants.quantize(numbers(1, 256), "iq2_xxs")
    with pytest.raises(ValueError, match=r"imatrix has shape \(32,\), expected one that"):
        quants.quantize(array, "q4_0", np.ones(32))
    with pytest.raises(ValueError, match="negative or not finite"):
        quants.quantize(array, "q4_0", np.full(64, np.nan))
    with pytest.raises(ValueError, match="negative or not finite, as float32"):
        quants.quantize(array, "q4_0", np.full(64, 1e300))
    with pytest.raises(OverflowError, match="has 70000, which float16 of f16 cannot hold"):
        quants.quantize(np.full((2, 4), 70000), "f16")
    with pytest.raises(ValueError, match="ggml cannot quantise to GGML_TYPE_I32"):
        quants.quantize(array, "i32")
    with pytest.raises(ValueError, match="'q9_9' is no type of ggml's; these are: f32, f16, q4_0"):
        quants.quantize(array, "q9_9")
    with pytest.raises(TypeError, match="threads is True, expected an int"):
        quants.quantize(array, "q4_0", threads=True)
    with pytest.raises(ValueError, match="threads is 0, expected 1 or more"):
        quants.quantize(array, "q4_0", threads=0)
    with pytest.raises(ValueError, match="rows of 17 bytes, expected a multiple of 18"):
        quants.dequantize(np.zeros((2, 17), np.uint8), "q4_0")
    with pytest.raises(TypeError, match="data has dtype int8, expected uint8"):
        quants.dequantize(np.zeros((2, 18), np.int8), "q4_0")
    with pytest.raises(NotSupportedError, match="cannot convert i32 to numbers"):
        quants.dequantize(np.zeros((2, 4), np.uint8), "i32")


def test_an_abort_on_a_thread_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers(4, 256)
    array[3, 5] = np.nan
    monkeypatch.setattr(quants, "_CHUNK", 256)
    with pytest.raises(AbortError, match="GGML_ASSERT"):
        quants.quantize(array, "iq3_xxs", threads=2)


def test_what_has_failed_on_a_thread_keeps_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers(64, 256)
    array[63, 5] = np.nan
    monkeypatch.setattr(quants, "_CHUNK", 256)
    kept = weakref.ref(array)
    gc.disable()
    try:
        with pytest.raises(AbortError):
            quants.quantize(array, "iq3_xxs", threads=4)
        del array
        assert kept() is None
    finally:
        gc.enable()


# ---- types by what they are called


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("q4_K", "q4_K"), ("Q4_k", "q4_K"), (capi.GGML_TYPE_F16, "f16"), (0, "f32"),
        (np.float32, "f32"), ("float32", "f32"), (np.dtype(">i4"), "i32"), (float, "f64"),
        ("bf16", "bf16"), (np.int64, "i64"),
    ],
)  # fmt: skip
def test_a_type_by_name_number_or_dtype(given: object, name: str) -> None:
    assert dtypes.type_name(dtypes.element_type(given)) == name


def test_bfloat16() -> None:
    assert dtypes.element_type(ml_dtypes.bfloat16) == capi.GGML_TYPE_BF16
    assert dtypes.element_type("bfloat16") == capi.GGML_TYPE_BF16
    assert dtypes.numpy_dtype(capi.GGML_TYPE_BF16) == np.dtype(ml_dtypes.bfloat16)
    array = numbers(3, 64).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        quants.quantize(array, "bf16"), array.view(np.uint8).reshape(3, 128)
    )


def test_no_type() -> None:
    with pytest.raises(ValueError, match="no type for NumPy's complex128"):
        dtypes.element_type(complex)
    with pytest.raises(ValueError, match="999 is no ggml_type"):
        dtypes.element_type(999)
    with pytest.raises(TypeError, match=r"3.5 \(float\) is no type"):
        dtypes.element_type(3.5)
    assert dtypes.numpy_dtype(capi.GGML_TYPE_Q4_0) is None
    assert dtypes.is_quantized(capi.GGML_TYPE_Q4_0)
