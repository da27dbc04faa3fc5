"""The functions of capi that are written by hand."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from _compute import F32, Arena
from _release import needs

from ggml_cffi import _overrides, capi, enums, ffi, lib
from ggml_cffi.errors import AbortError, GGMLError, NotSupportedError
from ggml_cffi.meta import MetaDevice, SplitAxis

TOO_MUCH = 1 << 44  # numbers: more than any machine has


@pytest.fixture
def cpu(one_thread):
    return one_thread  # four threads on few cores wait for each other


def run(code: str) -> subprocess.CompletedProcess[str]:
    program = "from ggml_cffi import capi\n" + textwrap.dedent(code)
    where = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=where
    )


# ---- all of them


def test_every_override_of_the_annotations_is_written():
    """What codegen leaves to this package is here, and nothing else that capi has generated."""
    from ggml_cffi._gen.tables import DOCS

    assert set(DOCS) <= set(_overrides.__all__)
    assert set(_overrides.__all__).isdisjoint(capi.__coverage__.left_out)


@pytest.mark.parametrize("name", _overrides.__all__)
def test_documented(name):
    function = getattr(capi, name)
    assert function is getattr(_overrides, name)
    assert function.__name__ == name
    if not hasattr(lib, name):
        with pytest.raises(NotSupportedError, match=name):
            function()
        return
    first, *rest = function.__doc__.splitlines()
    assert first.startswith("``")
    assert f" {name}(" in first or f" *{name}(" in first
    text = "\n".join(rest)
    assert "Guard: " in text
    assert ".h:" in text
    own = next(c for c in vars(_overrides).values() if getattr(c, "__name__", "") == name)
    assert own is function


# ---- copies in pieces


@pytest.fixture
def matrix(arena):
    tensor = arena.weight(6, 4)
    capi.ggml_backend_tensor_set(tensor, np.arange(24, dtype=np.float32), 0)
    return tensor


def whole(tensor):
    found = np.empty(24, np.float32)
    capi.ggml_backend_tensor_get(tensor, found, 0)
    return found.reshape(4, 6)


@pytest.mark.parametrize("is_async", [False, True])
@needs("ggml_backend_tensor_set_2d")
def test_2d_copies(cpu, matrix, is_async):
    suffix, first = ("_async", (cpu,)) if is_async else ("", ())
    set_2d = getattr(capi, "ggml_backend_tensor_set_2d" + suffix)
    get_2d = getattr(capi, "ggml_backend_tensor_get_2d" + suffix)
    # columns 1 and 2 of rows 1 to 3, from rows of five
    source = -np.arange(15, dtype=np.float32).reshape(3, 5)
    set_2d(*first, matrix, source, 4 * 7, 8, 3, 24, 20)
    expected = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected[1:, 1:3] = source[:, :2]
    capi.ggml_backend_synchronize(cpu)
    np.testing.assert_array_equal(whole(matrix), expected)

    found = np.zeros((3, 4), np.float32)
    get_2d(*first, matrix, found, 4 * 7, 8, 3, 24, 16)
    capi.ggml_backend_synchronize(cpu)
    np.testing.assert_array_equal(found[:, :2], source[:, :2])
    assert not found[:, 2:].any()


@needs("ggml_backend_tensor_set_2d")
def test_2d_copies_take_any_buffer_and_bare_pointers(matrix):
    capi.ggml_backend_tensor_set_2d(matrix, b"\0" * 8, 0, 4, 2, 24, 4)
    assert whole(matrix)[:2, 0].tolist() == [0, 0]
    numbers = ffi.new("float[2]", [7, 8])
    capi.ggml_backend_tensor_set_2d(matrix, ffi.cast("void *", numbers), 0, 4, 2, 24, 4)
    assert whole(matrix)[:2, 0].tolist() == [7, 8]
    target = bytearray(8)
    capi.ggml_backend_tensor_get_2d(matrix, target, 0, 4, 2, 24, 4)
    assert np.frombuffer(target, np.float32).tolist() == [7, 8]


@pytest.mark.parametrize(("size", "n_copies"), [(0, 5), (8, 0), (0, 1 << 60)])
@needs("ggml_backend_tensor_set_2d")
def test_2d_copies_of_nothing(matrix, size, n_copies):
    before = whole(matrix)
    capi.ggml_backend_tensor_set_2d(matrix, b"", 4, size, n_copies, 1, 1)
    capi.ggml_backend_tensor_get_2d(matrix, bytearray(), 4, size, n_copies, 1, 1)
    np.testing.assert_array_equal(whole(matrix), before)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((80, 8, 2, 24, 8), "last copy ends at byte 112 of tensor's 96"),
        ((0, 8, 2, 89, 8), "last copy ends at byte 97 of tensor's 96"),
        ((0, 8, 2, 8, 57), "data has 64 bytes, fewer than the 65 asked for"),
        ((0, 8, 1 << 62, 1 << 62, 0), "last copy ends at byte"),
        ((0, 1, 1 << 70, 0, 1), "data has 64 bytes"),
        ((-1, 8, 2, 24, 8), "offset must not be negative, not -1"),
        ((0, -8, 2, 24, 8), "size must not be negative"),
        ((0, 8, -2, 24, 8), "n_copies must not be negative"),
        ((0, 8, 2, -24, 8), "stride_tensor must not be negative"),
        ((0, 8, 2, 24, -8), "stride_data must not be negative"),
    ],
)
@pytest.mark.parametrize("name", ["set", "get"])
@needs("ggml_backend_tensor_set_2d")
def test_2d_copies_out_of_bounds(cpu, matrix, numbers, words, name):
    before = whole(matrix)
    data = np.zeros(16, np.float32)
    for suffix, first in (("", ()), ("_async", (cpu,))):
        function = getattr(capi, f"ggml_backend_tensor_{name}_2d{suffix}")
        with pytest.raises(ValueError, match=words):
            function(*first, matrix, data, *numbers)
    np.testing.assert_array_equal(whole(matrix), before)


@needs("ggml_backend_tensor_set_2d")
def test_2d_copies_with_wrong_arguments(cpu, arena, matrix):
    data = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="tensor must not be"):
        capi.ggml_backend_tensor_set_2d(None, data, 0, 4, 1, 0, 0)
    with pytest.raises(TypeError, match="tensor"):
        capi.ggml_backend_tensor_set_2d(cpu, data, 0, 4, 1, 0, 0)
    with pytest.raises(ValueError, match="data must not be"):
        capi.ggml_backend_tensor_set_2d(matrix, None, 0, 4, 1, 0, 0)
    with pytest.raises(TypeError, match="size must be an integer, not float"):
        capi.ggml_backend_tensor_set_2d(matrix, data, 0, 4.0, 1, 0, 0)
    with pytest.raises((TypeError, ValueError), match="data"):
        capi.ggml_backend_tensor_get_2d(matrix, b"1234", 0, 4, 1, 0, 0)
    with pytest.raises(ValueError, match="backend must not be NULL or None"):
        capi.ggml_backend_tensor_set_2d_async(None, matrix, data, 0, 4, 1, 0, 0)
    with pytest.raises(ValueError, match="data has 8 bytes, fewer than the 16"):
        capi.ggml_backend_tensor_set_2d(matrix, ffi.new("float[2]"), 0, 8, 2, 8, 8)
    nowhere = arena.tensor(6, 4)
    with pytest.raises(ValueError, match="tensor is in no buffer"):
        capi.ggml_backend_tensor_set_2d_async(cpu, nowhere, data, 0, 4, 1, 0, 0)
    with pytest.raises(ValueError, match="tensor is in no buffer"):
        capi.ggml_backend_tensor_get_2d_async(cpu, nowhere, data, 0, 4, 1, 0, 0)
    with pytest.raises(AbortError, match="tensor buffer not set"):
        capi.ggml_backend_tensor_set_2d(nowhere, data, 0, 4, 1, 0, 0)


@pytest.mark.parametrize("suffix", ["", "_async"])
@needs("ggml_backend_tensor_set_2d")
def test_2d_copies_into_a_partial_weight_are_whole(suffix):
    """ggml reads all of what a tensor needs from the first piece, whatever the piece's size."""
    with MetaDevice(["CPU", "CPU"], lambda info, n_devs: {"axis": SplitAxis.PARTIAL}) as device:
        meta = capi.ggml_backend_dev_init(device.handle)
        with Arena(meta) as arena:
            bias, data = arena.weight(8), np.arange(8, dtype=np.float32)
            set_2d = getattr(capi, f"ggml_backend_tensor_set_2d{suffix}")
            first = (meta,) if suffix else ()
            for numbers in ((0, 4, 1, 0, 0), (4, 4, 1, 0, 0), (0, 16, 2, 16, 16)):
                with pytest.raises(ValueError, match=r"meta_(writes|moves_async)"):
                    set_2d(*first, bias, data, *numbers)
            set_2d(*first, bias, data, 0, 0, 1, 0, 0)
            if not suffix:  # ggml cannot write partial weights asynchronously
                set_2d(*first, bias, data, 0, 32, 1, 0, 0)
        capi.ggml_backend_free(meta)


# ---- allocators and the scheduler


def chain(arena, n=64):
    """A graph of one leaf and two nodes, not allocated."""
    ctx = arena.context()
    x = arena.tensor(n, ctx=ctx)
    capi.ggml_set_input(x)
    first = capi.ggml_add(ctx, x, x)
    last = capi.ggml_mul(ctx, first, x)
    capi.ggml_set_output(last)
    return arena.graph(ctx, last, allocate=False), x, last


@pytest.fixture
def galloc(arena, cpu):
    buft = capi.ggml_backend_get_default_buffer_type(cpu)
    other = capi.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", 4096), 4096)
    arena.callback(capi.ggml_backend_buffer_free, other)
    made = capi.ggml_gallocr_new_n([buft, capi.ggml_backend_buffer_get_type(other)])
    arena.callback(capi.ggml_gallocr_free, made)
    return made


def compute(cpu, graph, x, last, n=64):
    values = np.linspace(-1, 1, n, dtype=np.float32)
    capi.ggml_backend_tensor_set(x, values, 0)
    capi.ggml_backend_graph_compute(cpu, graph)
    found = np.empty(n, np.float32)
    capi.ggml_backend_tensor_get(last, found, 0)
    np.testing.assert_allclose(found, 2 * values * values, rtol=1e-6)


@pytest.mark.parametrize("leafs", [None, [1], [0], []])
@pytest.mark.parametrize("nodes", [None, [0, 1], [1, 0], np.array([1, 1])])
def test_gallocr_reserve_n(cpu, arena, galloc, nodes, leafs):
    graph, x, last = chain(arena)
    capi.ggml_gallocr_reserve_n(galloc, graph, nodes, leafs)
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    compute(cpu, graph, x, last)


@pytest.mark.parametrize(
    ("nodes", "leafs", "words"),
    [
        ([0], None, "node_buffer_ids must have 2 elements, not 1"),
        ([0, 0, 0], None, "node_buffer_ids must have 2 elements, not 3"),
        ([0, 2], None, r"node_buffer_ids\[1\] is 2, expected 0 to 1"),
        ([-1, 0], None, r"node_buffer_ids\[0\] is -1"),
        (None, [7], r"leaf_buffer_ids\[0\] is 7"),
        (None, [0] * 5000, "leaf_buffer_ids must have at most"),
    ],
)
def test_gallocr_wrong_ids(arena, galloc, nodes, leafs, words):
    graph = chain(arena)[0]
    for function in (capi.ggml_gallocr_reserve_n, capi.ggml_gallocr_reserve_n_size):
        with pytest.raises(ValueError, match=words):
            function(galloc, graph, nodes, leafs)
        with pytest.raises(TypeError, match=r"\[0\] is 0.0: an integer is required"):
            function(galloc, graph, [0.0, 1.0])
        with pytest.raises(ValueError, match="galloc must not be"):
            function(None, graph)
        with pytest.raises(ValueError, match="graph must not be"):
            function(galloc, None)


def test_gallocr_reserve_n_size(cpu, arena, galloc):
    graph, x, last = chain(arena, 1000)
    sizes = capi.ggml_gallocr_reserve_n_size(galloc, graph)
    assert len(sizes) == 2
    assert 4000 <= sizes[0] <= 16384
    # nothing was allocated, and a graph that was measured only can be allocated afterwards
    assert capi.ggml_gallocr_get_buffer_size(galloc, 0) == 0
    with pytest.raises(GGMLError, match="reserve"):
        capi.ggml_gallocr_alloc_graph(galloc, graph)  # two buffers: not by itself
    capi.ggml_gallocr_reserve_n(galloc, graph)
    assert capi.ggml_gallocr_get_buffer_size(galloc, 0) == sizes[0]
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    compute(cpu, graph, x, last, 1000)


def test_gallocr_measures_then_allocates(cpu, arena):
    graph, x, last = chain(arena, 1000)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(cpu))
    arena.callback(capi.ggml_gallocr_free, galloc)
    [size] = capi.ggml_gallocr_reserve_n_size(galloc, graph)
    capi.ggml_gallocr_alloc_graph(galloc, graph)
    assert capi.ggml_gallocr_get_buffer_size(galloc, 0) == size
    compute(cpu, graph, x, last, 1000)


def test_gallocr_without_memory(arena, galloc):
    graph = chain(arena, TOO_MUCH)[0]
    assert capi.ggml_gallocr_reserve_n_size(galloc, graph)[0] >= 4 * TOO_MUCH
    for _ in range(2):
        with pytest.raises(GGMLError, match="failed to allocate"):
            capi.ggml_gallocr_reserve_n(galloc, graph)
        with pytest.raises(GGMLError, match="reserve"):
            capi.ggml_gallocr_alloc_graph(galloc, graph)


@pytest.fixture
def sched(arena, cpu):
    made = capi.ggml_backend_sched_new([cpu], None, 2048, False, False)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def test_sched_reserve_size(cpu, arena, sched):
    graph, x, last = chain(arena, 1000)
    sizes = capi.ggml_backend_sched_reserve_size(sched, graph)
    assert len(sizes) == 1
    assert 4000 <= sizes[0] <= 16384
    assert capi.ggml_backend_sched_get_buffer_size(sched, cpu) == 0
    capi.ggml_backend_sched_alloc_graph(sched, graph)
    assert capi.ggml_backend_sched_get_buffer_size(sched, cpu) == sizes[0]
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    capi.ggml_backend_tensor_set(x, values, 0)
    capi.ggml_backend_sched_graph_compute(sched, graph)
    found = np.empty(1000, np.float32)
    capi.ggml_backend_tensor_get(last, found, 0)
    np.testing.assert_allclose(found, 2 * values * values, rtol=1e-6)


def test_sched_reserve_size_refuses(arena, sched):
    with pytest.raises(ValueError, match="sched must not be NULL or None"):
        capi.ggml_backend_sched_reserve_size(None, chain(arena)[0])
    with pytest.raises(ValueError, match="measure_graph must not be NULL or None"):
        capi.ggml_backend_sched_reserve_size(sched, None)


# ---- gguf


@pytest.fixture
def gguf(arena):
    return arena.gguf()


def stored(gguf, key):
    index = capi.gguf_find_key(gguf, key)
    kind = capi.gguf_get_arr_type(gguf, index)
    n = capi.gguf_get_arr_n(gguf, index)
    names = {"FLOAT32": "f4", "FLOAT64": "f8", "BOOL": "?"}
    word = kind.name.removeprefix("GGUF_TYPE_")
    dtype = names.get(word) or word.lower()
    if not n:
        return kind, []
    size = n * np.dtype(dtype).itemsize
    data = ffi.buffer(ffi.cast("char *", capi.gguf_get_arr_data(gguf, index)), size)
    return kind, np.frombuffer(data, dtype).tolist()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("UINT8", [0, 255]),
        ("INT8", [-128, 127]),
        ("UINT16", [0, 65535]),
        ("INT16", [-32768, 32767]),
        ("UINT32", [0, 2**32 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FLOAT32", [0.5, -2.0]),
        ("FLOAT64", [0.1, 1e300]),
        ("BOOL", [True, False, True]),
    ],
)
def test_gguf_arrays(gguf, kind, values):
    dtype = {"FLOAT32": np.float32, "FLOAT64": np.float64, "BOOL": np.bool_}.get(kind, kind.lower())
    kind = capi.gguf_type[f"GGUF_TYPE_{kind}"]
    capi.gguf_set_arr_data(gguf, "list", kind, values)
    assert stored(gguf, "list") == (kind, values)
    capi.gguf_set_arr_data(gguf, "array", kind, np.array(values, dtype))
    assert stored(gguf, "array") == (kind, values)
    raw = np.array(values, dtype).tobytes()
    for data in (raw, bytearray(raw), memoryview(raw)):
        capi.gguf_set_arr_data(gguf, "bytes", kind, data)
        assert stored(gguf, "bytes") == (kind, values)
    capi.gguf_set_arr_data(gguf, "first", kind, values, 1)
    capi.gguf_set_arr_data(gguf, "first bytes", kind, raw, n=1)
    assert stored(gguf, "first") == stored(gguf, "first bytes") == (kind, values[:1])
    for nothing in ([], b"", None):
        capi.gguf_set_arr_data(gguf, "nothing", kind, nothing)
        assert stored(gguf, "nothing") == (kind, [])


def test_gguf_arrays_refuse(gguf):
    int8, int32 = capi.GGUF_TYPE_INT8, capi.GGUF_TYPE_INT32
    for kind, data, n, error, words in [
        (int32, [1, 2], 3, ValueError, "data has 2 elements, fewer than the 3"),
        (int32, b"1234", 2, ValueError, "data has 4 bytes, fewer than the 8"),
        (int32, b"12345", None, ValueError, "data has 5 bytes, no multiple of 4"),
        (int32, [1], -1, ValueError, "n must not be negative"),
        (int32, None, 2, ValueError, "data must not be"),
        (int8, [200], None, OverflowError, "200"),
        (int8, np.array([200]), None, OverflowError, "do not fit int8"),
        (int8, [1.0], None, TypeError, "an integer is required"),
        (int8, np.array([1.0]), None, TypeError, "int8"),
        (int8, 3, None, TypeError, "data"),
        (capi.GGUF_TYPE_STRING, ["a"], None, ValueError, "GGUF_TYPE_STRING"),
        (capi.GGUF_TYPE_ARRAY, [1], None, ValueError, "GGUF_TYPE_ARRAY"),
        (99, [1], None, ValueError, "type is 99, which is no gguf_type"),
    ]:
        with pytest.raises(error, match=words):
            capi.gguf_set_arr_data(gguf, "key", kind, data, n)
        assert capi.gguf_find_key(gguf, "key") == -1
    with pytest.raises(ValueError, match="ctx must not be NULL or None"):
        capi.gguf_set_arr_data(None, "key", int8, [1])
    with pytest.raises(ValueError, match="key must not be"):
        capi.gguf_set_arr_data(gguf, None, int8, [1])
    with pytest.raises(ValueError, match="NUL"):
        capi.gguf_set_arr_data(gguf, "a\0b", int8, [1])


def test_gguf_meta_data(gguf, tmp_path):
    capi.gguf_set_val_str(gguf, "general.name", "tiny")
    capi.gguf_set_arr_data(gguf, "numbers", capi.GGUF_TYPE_UINT16, range(1000))
    data = capi.gguf_get_meta_data(gguf)
    assert type(data) is bytes
    assert len(data) == capi.gguf_get_meta_size(gguf)
    assert data.startswith(b"GGUF")
    path = tmp_path / "meta.gguf"
    path.write_bytes(data)
    back = capi.gguf_init_from_file(path, no_alloc=True)
    try:
        assert stored(back, "numbers")[1] == list(range(1000))
    finally:
        capi.gguf_free(back)
    with pytest.raises(ValueError, match="ctx must not be NULL or None"):
        capi.gguf_get_meta_data(None)


# ---- numbers


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_quantize_chunk(name):
    kind = capi.ggml_type[f"GGML_TYPE_{name}"]
    rng = np.random.default_rng(3)
    src = rng.standard_normal((6, 256), np.float32)
    row = capi.ggml_row_size(kind, 256)
    dst = np.zeros(6 * row, np.uint8)
    assert capi.ggml_quantize_chunk(kind, src, dst, 0, 6, 256) == 6 * row
    # in two chunks, and through other kinds of buffers
    other = bytearray(6 * row)
    pointer = ffi.cast("float *", ffi.from_buffer(src))
    assert capi.ggml_quantize_chunk(kind, src.tobytes(), other, 2 * 256, 4, 256) == 4 * row
    assert not any(other[: 2 * row])
    assert capi.ggml_quantize_chunk(kind, pointer, other, 0, 2, 256) == 2 * row
    assert bytes(other) == dst.tobytes()
    weights = np.ones(256, np.float32)
    assert capi.ggml_quantize_chunk(kind, src, dst, 0, 6, 256, weights) == 6 * row
    assert capi.ggml_quantize_chunk(kind, src, dst, 0, 0, 256) == 0


def test_quantize_chunk_needs_an_imatrix():
    kind = capi.GGML_TYPE_IQ2_XXS
    src, dst = np.ones((1, 256), np.float32), bytearray(4096)
    with pytest.raises(ValueError, match="imatrix must not be None for GGML_TYPE_IQ2_XXS"):
        capi.ggml_quantize_chunk(kind, src, dst, 0, 1, 256)
    with pytest.raises(ValueError, match="imatrix has 1020 bytes, fewer than the 1024"):
        capi.ggml_quantize_chunk(kind, src, dst, 0, 1, 256, np.ones(255, np.float32))
    weights = np.ones(256, np.float32)
    written = capi.ggml_quantize_chunk(kind, src, dst, 0, 1, 256, weights)
    assert written == capi.ggml_row_size(kind, 256)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"type": 999}, ValueError, "type is 999, which is no ggml_type"),
        ({"type": capi.GGML_TYPE_I32}, ValueError, "cannot quantise to GGML_TYPE_I32"),
        ({"type": capi.GGML_TYPE_Q8_K}, ValueError, "cannot quantise to GGML_TYPE_Q8_K"),
        ({"type": capi.GGML_TYPE_COUNT}, ValueError, "cannot quantise to GGML_TYPE_COUNT"),
        ({"start": -32}, ValueError, "start must not be negative"),
        ({"start": 32}, ValueError, "start is 32, no multiple of n_per_row 64"),
        ({"start": 64}, ValueError, "src has 512 bytes, fewer than the 768"),
        ({"nrows": -1}, ValueError, "nrows must not be negative"),
        ({"nrows": 3}, ValueError, "src has 512 bytes, fewer than the 768"),
        ({"nrows": 1 << 62}, ValueError, "src has 512 bytes"),
        ({"n_per_row": 0}, ValueError, "n_per_row is 0, expected a multiple of 32"),
        ({"n_per_row": 33}, ValueError, "n_per_row is 33, expected a multiple of 32"),
        ({"dst": bytearray(71)}, ValueError, "dst has 71 bytes, fewer than the 72"),
        ({"dst": ffi.new("char[71]")}, ValueError, "dst has 71 bytes, fewer than the 72"),
        ({"dst": b"1" * 72}, (TypeError, ValueError), "dst"),
        ({"dst": None}, ValueError, "dst must not be"),
        ({"src": None}, ValueError, "src must not be"),
        ({"src": np.zeros((2, 64))}, TypeError, "src must be an array of float32, not float64"),
        ({"imatrix": np.zeros(64, int)}, TypeError, "imatrix must be an array of float32"),
    ],
)
def test_quantize_chunk_refuses(changes, error, words):
    arguments = {
        "type": capi.GGML_TYPE_Q4_0,
        "src": np.zeros((2, 64), np.float32),
        "dst": bytearray(72),
        "start": 0,
        "nrows": 2,
        "n_per_row": 64,
    }
    assert capi.ggml_quantize_chunk(**arguments) == 72
    with pytest.raises(error, match=words):
        capi.ggml_quantize_chunk(**{**arguments, **changes})


def test_rope_yarn_corr_dims():
    start, end = capi.ggml_rope_yarn_corr_dims(128, 4096, 10000.0, 32.0, 1.0)

    def dim(beta):  # the paper's formula
        return 128 * np.log(4096 / (beta * 2 * np.pi)) / (2 * np.log(10000.0))

    assert (start, end) == (np.floor(dim(32.0)), np.ceil(dim(1.0)))


# ---- training


def line(arena, n_batch=4):
    """A linear model of one input and one weight for data y = 3 x, with its data set of 16."""
    ctx, ctx_compute = arena.context(), arena.context(64 << 20)
    inputs = arena.tensor(1, n_batch, name="x", ctx=ctx)
    weight = arena.tensor(1, 1, name="w", ctx=ctx)
    capi.ggml_set_input(inputs)
    capi.ggml_set_param(weight)
    arena.allocate(ctx)
    capi.ggml_backend_tensor_set(weight, np.zeros(1, np.float32), 0)
    outputs = capi.ggml_mul_mat(ctx_compute, weight, inputs)
    capi.ggml_set_output(outputs)
    dataset = capi.ggml_opt_dataset_init(F32, F32, 1, 1, 16, 1)
    arena.callback(capi.ggml_opt_dataset_free, dataset)
    x = np.linspace(-1, 1, 16, dtype=np.float32)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_data(dataset), x, 0)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_labels(dataset), 3 * x, 0)
    return inputs, weight, outputs, ctx_compute, dataset


def slope(weight):
    found = np.empty(1, np.float32)
    capi.ggml_backend_tensor_get(weight, found, 0)
    return float(found[0])


MSE = capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR
SGD = capi.GGML_OPT_OPTIMIZER_TYPE_SGD
ADAMW = capi.GGML_OPT_OPTIMIZER_TYPE_ADAMW


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_opt_fit(arena, sched, optimizer, capfd):
    inputs, weight, outputs, ctx_compute, dataset = line(arena)
    epochs = []

    def parameters(epoch):
        epochs.append(epoch)
        return {"adamw": {"alpha": 0.3}, "sgd": {"alpha": 0.3}}

    capi.ggml_opt_fit(
        sched, ctx_compute, inputs, outputs, dataset, MSE, optimizer, parameters, 60, 8
    )
    assert slope(weight) == pytest.approx(3, abs=0.1)
    assert sorted(set(epochs)) == list(range(1, 61))
    assert epochs == sorted(epochs)
    assert capfd.readouterr() == ("", "")


def test_opt_fit_with_defaults_and_progress(arena, sched, capfd):
    inputs, weight, outputs, ctx_compute, dataset = line(arena)
    capi.ggml_opt_fit(
        sched, ctx_compute, inputs, outputs, dataset, MSE, ADAMW, None, 2, 4, 0.25, silent=False
    )
    assert 0 < slope(weight) < 0.1
    shown = capfd.readouterr().err
    assert "ggml_opt_fit: epoch 0001/0002:" in shown
    assert "ggml_opt_fit: epoch 0002/0002:" in shown
    assert "train: [" in shown
    assert "val: " in shown
    assert "ggml_opt_fit: training took 00:00:0" in shown


def test_opt_fit_raises_what_its_function_raises(arena, sched):
    inputs, weight, outputs, ctx_compute, dataset = line(arena)

    def parameters(epoch):
        if epoch == 2:
            raise KeyError("enough")
        return {"sgd": {"alpha": 0.1}}

    with pytest.raises(KeyError, match="enough"):
        capi.ggml_opt_fit(sched, ctx_compute, inputs, outputs, dataset, MSE, SGD, parameters, 5, 8)
    assert slope(weight) != 0  # the first epoch was done


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"nbatch_logical": 0}, ValueError, "16 data, no multiple of nbatch_logical 0"),
        ({"nbatch_logical": 5}, ValueError, "16 data, no multiple of nbatch_logical 5"),
        ({"nbatch_logical": 2}, ValueError, r"no multiple of inputs.ne\[1\] 4"),
        ({"val_split": 1.0}, ValueError, "val_split is 1.0, expected 0 to below 1"),
        ({"val_split": -0.1}, ValueError, "val_split is -0.1"),
        ({"val_split": float("nan")}, ValueError, "val_split is nan"),
        ({"nepoch": -1}, ValueError, "nepoch must not be negative"),
        ({"inputs": None}, ValueError, "inputs must not be"),
        ({"dataset": None}, ValueError, "dataset must not be"),
        ({"backend_sched": None}, ValueError, "backend_sched must not be"),
        ({"get_opt_pars": 3}, TypeError, "get_opt_pars must be a function or None, not int"),
        ({"loss_type": 99}, ValueError, "loss_type"),
        ({"optimizer": 99}, ValueError, "optimizer"),
    ],
)
def test_opt_fit_refuses(arena, sched, changes, error, words):
    inputs, _, outputs, ctx_compute, dataset = line(arena)
    arguments = {
        "backend_sched": sched,
        "ctx_compute": ctx_compute,
        "inputs": inputs,
        "outputs": outputs,
        "dataset": dataset,
        "loss_type": MSE,
        "optimizer": SGD,
        "get_opt_pars": None,
        "nepoch": 1,
        "nbatch_logical": 8,
    }
    with pytest.raises(error, match=words):
        capi.ggml_opt_fit(**{**arguments, **changes})


def train_once(context, dataset, n_batches=4):
    result = capi.ggml_opt_result_init()
    try:
        capi.ggml_opt_epoch(context, dataset, result, None, 16)
        return capi.ggml_opt_result_ndata(result), capi.ggml_opt_result_pred(result)
    finally:
        capi.ggml_opt_result_free(result)


def test_opt_init(arena, sched):
    inputs, weight, outputs, ctx_compute, dataset = line(arena)
    asked = []

    def parameters():
        asked.append(1)
        made = capi.ggml_opt_get_default_optimizer_params()
        made.sgd.alpha = 0.5
        return made

    context = capi.ggml_opt_init(
        backend_sched=sched,
        ctx_compute=ctx_compute,
        inputs=inputs,
        outputs=outputs,
        loss_type=MSE,
        optimizer=SGD,
        opt_period=2,
        get_opt_pars=parameters,
    )
    try:
        assert capi.ggml_opt_static_graphs(context)
        assert capi.ggml_opt_context_optimizer_type(context) == SGD
        n_data, predictions = train_once(context, dataset)
        assert (n_data, predictions) == (16, [])  # no classes, so no predictions
        assert len(asked) == 2  # four batches, two for a step
        assert slope(weight) > 0.5
    finally:
        capi.ggml_opt_free(context)
    from ggml_cffi import _callbacks

    assert not any(r.function is parameters for r in _callbacks._table.values())


def test_opt_init_from_a_struct_or_defaults(arena, sched):
    params = capi.ggml_opt_default_params(sched, MSE)
    context = capi.ggml_opt_init(params)
    assert not capi.ggml_opt_static_graphs(context)
    capi.ggml_opt_free(context)
    context = capi.ggml_opt_init(backend_sched=sched, loss_type=MSE)
    assert capi.ggml_opt_context_optimizer_type(context) == ADAMW
    capi.ggml_opt_free(context)
    constant = ffi.addressof(lib, "ggml_opt_get_default_optimizer_params")
    context = capi.ggml_opt_init(backend_sched=sched, loss_type=MSE, get_opt_pars=constant)
    capi.ggml_opt_free(context)


def test_opt_init_refuses(arena, sched):
    params = capi.ggml_opt_default_params(sched, MSE)
    for arguments, error, words in [
        ({}, ValueError, "backend_sched must not be"),
        ({"backend_sched": sched}, ValueError, "loss_type must not be None"),
        ({"backend_sched": sched, "loss_type": 77}, ValueError, "loss_type"),
        ({"backend_sched": sched, "loss_type": MSE, "optimizer": 77}, ValueError, "optimizer"),
        ({"backend_sched": sched, "loss_type": MSE, "opt_period": 0}, AbortError, "opt_period"),
        ({"backend_sched": sched, "loss_type": MSE, "opt_period": "x"}, TypeError, "opt_period"),
        ({"backend_sched": sched, "loss_type": MSE, "get_opt_pars": 5}, TypeError, "get_opt_pars"),
        ({"params": {"opt_period": 1}}, TypeError, "params must be a struct, not dict"),
        ({"params": params, "opt_period": 2}, TypeError, "both a struct and the keywords"),
    ]:
        with pytest.raises(error, match=words):
            capi.ggml_opt_init(**arguments)


def test_opt_result_pred(arena, sched):
    """Two classes, told apart by the sign of the one input."""
    ctx, ctx_compute = arena.context(), arena.context(64 << 20)
    inputs = arena.tensor(1, 4, ctx=ctx)
    weight = arena.tensor(1, 2, ctx=ctx)
    capi.ggml_set_input(inputs)
    capi.ggml_set_param(weight)
    arena.allocate(ctx)
    capi.ggml_backend_tensor_set(weight, np.array([-1, 1], np.float32), 0)
    outputs = capi.ggml_mul_mat(ctx_compute, weight, inputs)
    capi.ggml_set_output(outputs)
    dataset = capi.ggml_opt_dataset_init(F32, F32, 1, 2, 8, 1)
    arena.callback(capi.ggml_opt_dataset_free, dataset)
    x = np.array([-4, 3, -2, 1, -1, 2, -3, 4], np.float32)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_data(dataset), x, 0)
    labels = np.eye(2, dtype=np.float32)[(x > 0).astype(int)]
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_labels(dataset), labels, 0)
    context = capi.ggml_opt_init(
        backend_sched=sched,
        ctx_compute=ctx_compute,
        inputs=inputs,
        outputs=outputs,
        loss_type=capi.GGML_OPT_LOSS_TYPE_CROSS_ENTROPY,
        build_type=capi.GGML_OPT_BUILD_TYPE_FORWARD,
    )
    arena.callback(capi.ggml_opt_free, context)
    result = capi.ggml_opt_result_init()
    arena.callback(capi.ggml_opt_result_free, result)
    assert capi.ggml_opt_result_pred(result) == []
    capi.ggml_opt_epoch(context, dataset, None, result, 0)
    assert capi.ggml_opt_result_pred(result) == (x > 0).astype(int).tolist()
    with pytest.raises(ValueError, match="result must not be NULL or None"):
        capi.ggml_opt_result_pred(None)


def test_opt_dataset_get_batch_host(arena):
    dataset = capi.ggml_opt_dataset_init(F32, F32, 3, 2, 8, 2)
    arena.callback(capi.ggml_opt_dataset_free, dataset)
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    labels = -np.arange(16, dtype=np.float32).reshape(8, 2)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_data(dataset), data, 0)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_labels(dataset), labels, 0)
    data_batch, labels_batch = np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32)
    for batch in (1, 0):
        capi.ggml_opt_dataset_get_batch_host(dataset, data_batch, labels_batch, batch)
        np.testing.assert_array_equal(data_batch, data[4 * batch : 4 * batch + 4])
        np.testing.assert_array_equal(labels_batch, labels[4 * batch : 4 * batch + 4])
    small = np.zeros(7, np.float32)
    for arguments, error, words in [
        ((dataset, data_batch, small, 0), ValueError, "labels_batch has 28 bytes, fewer than the"),
        ((dataset, data_batch, None, 0), ValueError, "labels_batch must not be None"),
        ((dataset, None, labels_batch, 0), ValueError, "data_batch must not be"),
        ((dataset, data_batch, labels_batch, -1), ValueError, "ibatch is -1"),
        ((dataset, data_batch, labels_batch, 8), ValueError, "ibatch is 8"),
        ((dataset, data_batch, labels_batch, 2), AbortError, "ibatch"),
        ((dataset, small, labels_batch, 0), AbortError, "nb_data_batch"),
        ((dataset, bytes(48), labels_batch, 0), (TypeError, ValueError), "data_batch"),
        ((None, data_batch, labels_batch, 0), ValueError, "dataset must not be"),
    ]:
        with pytest.raises(error, match=words):
            capi.ggml_opt_dataset_get_batch_host(*arguments)

    bare = capi.ggml_opt_dataset_init(F32, F32, 3, 0, 8, 2)
    arena.callback(capi.ggml_opt_dataset_free, bare)
    capi.ggml_backend_tensor_set(capi.ggml_opt_dataset_data(bare), data, 0)
    capi.ggml_opt_dataset_get_batch_host(bare, data_batch, None, 1)
    np.testing.assert_array_equal(data_batch, data[4:])
    with pytest.raises(ValueError, match="labels_batch must be None, the data set has no labels"):
        capi.ggml_opt_dataset_get_batch_host(bare, data_batch, labels_batch, 1)


def backward(arena, accumulators):
    """The graph of sum(x * w), and what stands for the gradient of w."""
    ctx, ctx_graph = arena.context(), arena.context(8 << 20)
    x, w = arena.tensor(4, ctx=ctx), arena.tensor(4, ctx=ctx)
    capi.ggml_set_param(w)
    arena.allocate(ctx)
    capi.ggml_backend_tensor_set(x, np.arange(4, dtype=np.float32), 0)
    loss = capi.ggml_sum(ctx_graph, capi.ggml_mul(ctx_graph, x, w))
    capi.ggml_set_loss(loss)
    graph = capi.ggml_new_graph_custom(ctx_graph, 128, True)
    capi.ggml_build_forward_expand(graph, loss)
    n = capi.ggml_graph_n_nodes(graph)
    nodes = [capi.ggml_graph_node(graph, i) for i in range(n)]
    given = accumulators(ctx_graph, nodes, w)
    capi.ggml_build_backward_expand(ctx_graph, graph, given)
    return graph, w, n


def test_build_backward_expand(arena):
    graph, w, n = backward(arena, lambda ctx, nodes, w: None)
    assert capi.ggml_graph_n_nodes(graph) > n
    assert capi.ggml_graph_get_grad(graph, w) is not None
    assert capi.ggml_graph_get_grad_acc(graph, w) is None


def test_build_backward_expand_with_accumulators(arena):
    made = []

    def accumulators(ctx, nodes, w):
        made.append(capi.ggml_dup_tensor(ctx, w))
        return [made[0] if node == w else None for node in nodes]

    graph, w, n = backward(arena, accumulators)
    assert capi.ggml_graph_n_nodes(graph) > n
    assert capi.ggml_graph_get_grad_acc(graph, w) == made[0]


def test_build_backward_expand_refuses(arena):
    with pytest.raises(ValueError, match=r"grad_accs must have \d elements, not 1"):
        backward(arena, lambda ctx, nodes, w: [None])
    with pytest.raises(TypeError, match="grad_accs"):
        backward(arena, lambda ctx, nodes, w: [1] * len(nodes))
    with pytest.raises(ValueError, match="cgraph must not be NULL or None"):
        capi.ggml_build_backward_expand(arena.context(), None)
    with pytest.raises(ValueError, match="cgraph must not be NULL or None"):
        capi.ggml_build_backward_expand(arena.context(), None, [])


# ---- the log and the end


@pytest.fixture
def restored_log():
    yield
    capi.ggml_log_set(None)


def complain():
    """Have ggml log an error."""
    with pytest.raises(GGMLError) as caught:
        capi.ggml_backend_load("/nowhere/libggml-none.so")
    return str(caught.value)


@pytest.mark.usefixtures("restored_log")
def test_log_set(caplog):
    lines = []

    def receiver(level, text):
        lines.append((level, text))

    assert capi.ggml_log_get() is None
    capi.ggml_log_set(receiver)
    assert capi.ggml_log_get() is receiver
    with caplog.at_level(logging.DEBUG, logger="ggml"):
        message = complain()
        assert not caplog.records
        assert "/nowhere/libggml-none.so" in message  # the guard reads the log all the same
        [(level, text)] = lines
        assert level is enums.ggml_log_level.GGML_LOG_LEVEL_ERROR
        assert "failed to load /nowhere/libggml-none.so" in text
        assert text.endswith("\n")

        capi.ggml_log_set(None)
        assert capi.ggml_log_get() is None
        complain()
        assert len(lines) == 1
        assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.usefixtures("restored_log")
def test_log_receiver_that_raises(monkeypatch):
    caught = []
    monkeypatch.setattr(sys, "unraisablehook", caught.append)

    def receiver(level, text):
        raise ZeroDivisionError("in the log")

    capi.ggml_log_set(receiver)
    assert "libggml-none.so" in complain()
    [unraisable] = caught
    assert unraisable.exc_type is ZeroDivisionError
    assert unraisable.object is receiver
    assert "log" in unraisable.err_msg


@pytest.mark.usefixtures("restored_log")
def test_log_receiver_that_is_interrupted():
    def receiver(level, text):
        raise KeyboardInterrupt

    capi.ggml_log_set(receiver)
    with pytest.raises(KeyboardInterrupt):
        capi.ggml_backend_load("/nowhere/libggml-none.so")


def test_log_set_refuses():
    with pytest.raises(TypeError, match="callback must be a function or None, not int"):
        capi.ggml_log_set(3)
    assert capi.ggml_log_get() is None


def test_log_receiver_that_raises_prints_by_default():
    done = run("""
        capi.ggml_log_set(lambda level, text: 1 / 0)
        try:
            capi.ggml_backend_load("/nowhere/libggml-none.so")
        except RuntimeError:
            print("raised")
    """)
    assert (done.returncode, done.stdout) == (0, "raised\n")
    assert "Exception ignored in the receiver of ggml's log: <function" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_set_abort_callback():
    def one(message):
        pass

    assert capi.ggml_set_abort_callback(one) is None
    assert capi.ggml_set_abort_callback(print) is one
    assert capi.ggml_set_abort_callback(None) is print
    assert capi.ggml_set_abort_callback(None) is None
    with pytest.raises(TypeError, match="callback must be a function or None, not str"):
        capi.ggml_set_abort_callback("x")


#: An abort in a kernel that runs on two threads, which nobody can catch: rows by numbers that the
#: graph makes of others, higher than there are rows.
FATAL = """
import numpy as np
def observe(message):
    {body}
capi.ggml_set_abort_callback(observe)
cpu = capi.ggml_backend_cpu_init()
capi.ggml_backend_cpu_set_n_threads(cpu, 2)
ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
numbers = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 64)
table = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 3)
order = capi.ggml_cast(ctx, numbers, capi.GGML_TYPE_I32)
graph = capi.ggml_new_graph(ctx)
capi.ggml_build_forward_expand(graph, capi.ggml_get_rows(ctx, table, order))
capi.ggml_backend_alloc_ctx_tensors(ctx, cpu)
capi.ggml_backend_tensor_set(numbers, np.arange(64, dtype=np.float32), 0)
capi.ggml_backend_graph_compute(cpu, graph)
"""


def test_abort_callback_hears_of_the_end():
    done = run(FATAL.format(body="print('observed:', message.splitlines()[0], flush=True)"))
    assert done.returncode == -signal.SIGABRT
    assert "observed: " in done.stdout
    assert "GGML_ASSERT" in done.stdout


def test_abort_callback_that_raises():
    done = run(FATAL.format(body="raise ZeroDivisionError('at the end')"))
    assert done.returncode == -signal.SIGABRT
    assert "Exception ignored in the abort callback: <function" in done.stderr
    assert "ZeroDivisionError: at the end" in done.stderr


def test_abort_callback_does_not_hear_of_what_is_raised(arena):
    heard = []
    capi.ggml_set_abort_callback(heard.append)
    try:
        ctx = arena.context()
        with pytest.raises(AbortError):
            capi.ggml_mul_mat(ctx, arena.tensor(3, 3), arena.tensor(4, 4))
    finally:
        capi.ggml_set_abort_callback(None)
    assert heard == []
