"""capi as a user sees it: signatures, docstrings, stubs, and how values go in and come out."""

from __future__ import annotations

import ast
import enum
import inspect
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena
from _release import PINNED, needs

import ggml_cffi
from ggml_cffi import capi, enums, ffi, lib
from ggml_cffi._gen.tables import SPECS
from ggml_cffi.errors import AbortError, NotSupportedError

I32 = capi.GGML_TYPE_I32
COVERAGE = capi.__coverage__
BOUND = COVERAGE.bound


@pytest.fixture
def cpu(one_thread: Any) -> Any:
    return one_thread


# ---- what is there


def test_every_declared_function_is_bound_or_left_out_with_a_reason() -> None:
    assert len(COVERAGE.declared) > 600
    assert set(COVERAGE.declared) == set(BOUND) | COVERAGE.left_out.keys()
    assert not set(BOUND) & COVERAGE.left_out.keys()
    assert all(COVERAGE.left_out.values())
    for group in (COVERAGE.declared, BOUND, COVERAGE.absent):
        assert len(set(group)) == len(group)
    assert set(BOUND) == SPECS.keys()


def test_every_bound_function_is_there() -> None:
    for name in BOUND:
        assert inspect.isfunction(getattr(capi, name)), name
        assert getattr(capi, name).__name__ == name
        assert hasattr(lib, name)


def test_what_is_left_out_is_not_there() -> None:
    for name in COVERAGE.left_out.keys() - set(COVERAGE.absent):
        assert not hasattr(capi, name)


def test_what_this_build_lacks_says_so() -> None:
    assert not PINNED or not COVERAGE.absent
    for name in COVERAGE.absent:
        with pytest.raises(NotSupportedError, match=rf"{name} is not in this build"):
            getattr(capi, name)(1, two=2)


def test_enumerators_and_constants() -> None:
    assert capi.GGML_TYPE_F32 is enums.ggml_type.GGML_TYPE_F32
    assert isinstance(capi.GGML_TYPE_Q4_0, enum.IntEnum) and capi.GGML_TYPE_Q4_0 == 2
    assert capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS == 1
    assert capi.GGML_STATUS_ALLOC_FAILED == -2
    assert capi.GGML_MAX_DIMS == 4 and type(capi.GGML_MAX_DIMS) is int
    assert capi.GGUF_MAGIC == "GGUF" and capi.GGUF_KEY_GENERAL_ALIGNMENT == "general.alignment"


def test_no_private_name_leaks() -> None:
    public = [name for name in dir(capi) if not name.startswith("_")]
    strangers = [n for n in public if not n.lower().startswith(("ggml", "gguf"))]
    assert set(strangers) <= {"enums", "types", "annotations"}


# ---- docstrings


@pytest.mark.parametrize("name", BOUND)
def test_docstring(name: str) -> None:
    """C signature, header and line, who owns the result, guard class."""
    doc = inspect.getdoc(getattr(capi, name))
    assert doc is not None
    signature, place = doc.split("\n\n")[:2]
    assert re.fullmatch(rf"``[^`]*\b{name}\([^`]*\)``", signature)
    assert re.match(r"[\w-]+\.h:\d+\.$", place)
    assert re.search(r"^Guard: (throw|compute|nothrow)\.$", doc, re.M)
    if SPECS[name].returns == "pointer":
        ownership = re.search(r"^Result: (.*)\.$", doc, re.M)
        assert ownership is not None
        free = re.search(r"free with (\w+)", ownership[1])
        if free:
            assert free[1] in BOUND
        borrowed = re.search(r"valid as long as `(\w+)` is", ownership[1])
        if borrowed:
            assert borrowed[1] in SPECS[name].c_args
    for argument in SPECS[name].required:
        nullable = re.search(r"^May be None: (.*)\.$", doc, re.M)
        assert nullable is None or argument not in nullable[1].split(", ")


def test_docstring_has_the_comment_of_the_header() -> None:
    doc = inspect.getdoc(capi.ggml_mul_mat)
    assert doc is not None and "A: k columns, n rows => [ne03, ne02, n, k]" in doc
    assert "Result: borrowed: valid as long as `ctx` is." in doc


def test_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    help(capi.ggml_init)
    text = capsys.readouterr().out
    assert re.search(r"ggml_init\(\s*params=None,\s*\*,\s*mem_size=", text)
    assert "struct ggml_context *ggml_init(struct ggml_init_params params)" in text


# ---- stubs

PACKAGE = Path(ggml_cffi.__file__).parent
STUB = ast.parse((PACKAGE / "_gen" / "capi.pyi").read_text("utf-8"))
STUBS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def stub_names() -> set[str]:
    names = set(STUBS)
    for node in STUB.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
    return names


def test_every_public_name_has_a_stub_or_annotations() -> None:
    names = stub_names()
    for name in dir(capi):
        if name.startswith("_") or name in names:
            continue
        found = getattr(capi, name)
        if not inspect.isfunction(found):
            assert name in ("types", "annotations"), name
            continue
        annotations = inspect.get_annotations(found)
        assert annotations.keys() >= {"return", *inspect.signature(found).parameters}, name
        assert not any("Any" in str(annotation) for annotation in annotations.values()), name


def test_the_stub_has_no_name_too_many() -> None:
    imported = {"Callable", "Coverage", "Final", "NoReturn", "Sequence"}
    for name in stub_names() - imported:
        assert hasattr(capi, name), name


def test_the_stub_says_nothing_vague() -> None:
    text = (PACKAGE / "_gen" / "capi.pyi").read_text("utf-8")
    assert not re.search(r"\bAny\b", text)
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("name", sorted(set(BOUND) & STUBS.keys()))
def test_the_stub_has_the_signature_of_the_function(name: str) -> None:
    written = STUBS[name].args
    assert not (written.posonlyargs or written.vararg or written.kwarg)
    assert STUBS[name].returns is not None
    signature = inspect.signature(getattr(capi, name)).parameters.values()
    positional = [p for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in signature if p.kind is p.KEYWORD_ONLY]
    assert len(positional) + len(keywords) == len(signature)
    assert [arg.arg for arg in written.args] == [p.name for p in positional]
    assert [arg.arg for arg in written.kwonlyargs] == [p.name for p in keywords]
    assert len(written.defaults) == sum(p.default is not p.empty for p in positional)
    assert all(arg.annotation is not None for arg in (*written.args, *written.kwonlyargs))


def test_arguments_by_keyword(arena: Arena) -> None:
    ctx = arena.context()
    a = capi.ggml_new_tensor_2d(ctx=ctx, type=F32, ne0=4, ne1=3)
    b = capi.ggml_new_tensor_2d(ctx, F32, ne1=5, ne0=4)
    product = capi.ggml_mul_mat(b=b, a=a, ctx=ctx)
    assert list(product.ne) == [3, 5, 1, 1]


# ---- what comes out


def test_kinds_of_results(arena: Arena) -> None:
    tensor = arena.weight(4, 3, name="w")
    assert type(capi.ggml_nelements(tensor)) is int and capi.ggml_nelements(tensor) == 12
    assert type(capi.ggml_get_name(tensor)) is str
    assert capi.ggml_is_transposed(tensor) is False and capi.ggml_is_matrix(tensor) is True
    assert type(capi.ggml_get_f32_1d(capi.ggml_set_f32(tensor, 1.5), 5)) is float
    assert capi.ggml_get_f32_1d(tensor, 5) == 1.5
    assert capi.ggml_set_zero(tensor) == tensor
    assert capi.ggml_free(None) is None
    unary = capi.ggml_relu(arena.context(), tensor)
    assert capi.ggml_get_unary_op(unary) is capi.GGML_UNARY_OP_RELU
    device = capi.ggml_backend_get_device(arena.backend)
    assert capi.ggml_backend_dev_type(device) is capi.GGML_BACKEND_DEVICE_TYPE_CPU


def test_a_number_that_is_no_enumerator_comes_out_as_it_is(arena: Arena) -> None:
    x = arena.tensor(4)
    x.op = capi.GGML_OP_UNARY
    ffi.cast("int32_t *", x.op_params)[0] = 4321
    assert capi.ggml_get_unary_op(x) == 4321


def test_out_parameters_are_returned(arena: Arena) -> None:
    device = capi.ggml_backend_get_device(arena.backend)
    free, total = capi.ggml_backend_dev_memory(device)
    assert 0 < free <= total
    assert capi.ggml_unravel_index(arena.tensor(4, 3, 2), 17) == (1, 1, 1, 0)
    result = capi.ggml_opt_result_init()
    arena.callback(capi.ggml_opt_result_free, result)
    assert capi.ggml_opt_result_ndata(result) == 0
    loss, uncertainty = capi.ggml_opt_result_loss(result)
    assert loss == 0.0 and np.isnan(uncertainty)


def test_a_struct_that_is_returned(arena: Arena) -> None:
    props = capi.ggml_backend_dev_get_props(capi.ggml_backend_get_device(arena.backend))
    assert ffi.string(props.name) == b"CPU"
    assert props.type == capi.GGML_BACKEND_DEVICE_TYPE_CPU
    assert props.caps.buffer_from_host_ptr is True
    params = capi.ggml_threadpool_params_default(3)
    assert params.n_threads == 3
    assert capi.ggml_bf16_to_fp32(capi.ggml_fp32_to_bf16(1.5)) == 1.5


# ---- structs in


def test_a_struct_from_keywords() -> None:
    for keywords in ({}, {"no_alloc": True}, {"no_alloc": True, "mem_buffer": None}):
        ctx = capi.ggml_init(mem_size=4096, **keywords)
        assert capi.ggml_get_mem_size(ctx) == 4096
        assert capi.ggml_get_no_alloc(ctx) is bool(keywords)
        capi.ggml_free(ctx)


def test_a_struct_as_it_is() -> None:
    params = ffi.new("struct ggml_init_params *", {"mem_size": 2048, "no_alloc": True})
    ctx = capi.ggml_init(params[0])
    assert capi.ggml_get_mem_size(ctx) == 2048
    capi.ggml_free(ctx)


def test_a_pointer_in_a_struct() -> None:
    memory = ffi.new("char[]", 1 << 16)
    ctx = capi.ggml_init(mem_size=1 << 16, mem_buffer=memory, no_alloc=True)
    assert capi.ggml_get_mem_buffer(ctx) == memory
    capi.ggml_free(ctx)


def test_a_pointer_to_a_struct_takes_the_struct(arena: Arena) -> None:
    params = capi.ggml_threadpool_params_default(2)
    for given in (params, ffi.addressof(params)):
        assert capi.ggml_threadpool_params_match(given, params) is True
    pool = capi.ggml_threadpool_new(params)
    capi.ggml_threadpool_free(pool)


def test_wrong_structs() -> None:
    params = ffi.new("struct ggml_init_params *")
    with pytest.raises(TypeError, match=r"^ggml_init: .*\bboth\b"):
        capi.ggml_init(params[0], mem_size=1024)
    with pytest.raises(TypeError, match=r"^ggml_init: params"):
        capi.ggml_init(params)
    with pytest.raises(TypeError, match=r"^ggml_init: params"):
        capi.ggml_init(capi.ggml_threadpool_params_default(1))
    with pytest.raises(TypeError, match=r"^ggml_init: params"):
        capi.ggml_init(1024)
    with pytest.raises(TypeError, match=r"^ggml_init: mem_size"):
        capi.ggml_init(mem_size="1024")
    with pytest.raises(TypeError, match=r"^ggml_init: mem_buffer"):
        capi.ggml_init(mem_buffer=bytearray(64))
    with pytest.raises(OverflowError, match=r"^ggml_init: mem_size"):
        capi.ggml_init(mem_size=-1)


@pytest.mark.parametrize("given", [{"mem_size": 4096}, (4096,), [4096]], ids=str)
def test_a_struct_in_part_leaves_no_garbage(given: Any) -> None:
    """It is refused, or the rest is zero: cffi would take what lies on its stack."""
    for _ in range(20):
        try:
            ctx = capi.ggml_init(given)
        except TypeError:
            continue
        assert capi.ggml_get_no_alloc(ctx) is False
        capi.ggml_free(ctx)


# ---- strings


@pytest.mark.parametrize(
    ("given", "comes"),
    [
        ("blk.0.attn_q", "blk.0.attn_q"),
        ("", ""),
        ("größe ✓", "größe ✓"),
        (b"bytes", "bytes"),
        (Path("a") / "path", os.path.join("a", "path")),
        (b"\xff\xfe", "\udcff\udcfe"),
        ("\udcff\udcfe", "\udcff\udcfe"),
    ],
    ids=repr,
)
def test_strings(arena: Arena, given: Any, comes: str) -> None:
    tensor = arena.tensor(4)
    capi.ggml_set_name(tensor, given)
    name = capi.ggml_get_name(tensor)
    assert name == comes
    assert ffi.string(tensor.name) == os.fsencode(given)
    capi.ggml_set_name(tensor, name)
    assert ffi.string(tensor.name) == os.fsencode(given)


def test_a_string_of_c(arena: Arena) -> None:
    tensor = arena.tensor(4)
    capi.ggml_set_name(tensor, ffi.new("char[]", b"from C"))
    assert capi.ggml_get_name(tensor) == "from C"


def test_a_name_that_is_cut_inside_a_character(arena: Arena) -> None:
    tensor = arena.tensor(4)
    capi.ggml_set_name(tensor, "ü" * 40)
    assert capi.ggml_get_name(tensor) == "ü" * 31 + "\udcc3"


@pytest.mark.parametrize("wrong", ["a\0b", b"a\0b", "\0"], ids=repr)
def test_a_string_with_a_nul(arena: Arena, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^ggml_set_name: name contains a NUL character"):
        capi.ggml_set_name(arena.tensor(4), wrong)


@pytest.mark.parametrize("wrong", [3, 1.5, ["a"], bytearray(b"a")], ids=repr)
def test_what_is_no_string(arena: Arena, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^ggml_set_name: name must be str, bytes or a path"):
        capi.ggml_set_name(arena.tensor(4), wrong)


def test_a_file_whose_name_is_no_utf8(arena: Arena, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe.gguf"
    gguf = arena.gguf()
    capi.gguf_set_val_u32(gguf, "answer", 42)
    capi.gguf_write_to_file(gguf, path, False)
    for given in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        again = capi.gguf_init_from_file(given)
        assert capi.gguf_get_val_u32(again, capi.gguf_find_key(again, "answer")) == 42
        capi.gguf_free(again)


# ---- arrays


@pytest.mark.parametrize(
    "shape",
    [
        [4, 3],
        (4, 3),
        range(4, 2, -1),
        np.array([4, 3]),
        np.array([4, 3], np.int32),
        np.array([4, 3], np.uint8),
        np.array([4, 9, 3, 9])[::2],
        [np.int32(4), np.uint64(3)],
        ffi.new("int64_t[]", [4, 3]),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_arrays_of_numbers(arena: Arena, shape: Any) -> None:
    assert list(capi.ggml_new_tensor(arena.context(), F32, shape).ne) == [4, 3, 1, 1]


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        ([], ValueError, "ne must have at least 1 element"),
        (None, ValueError, "ne must not be"),
        (ffi.NULL, ValueError, "ne must not be"),
        ([4, None], TypeError, "ne"),
        ([4.0, 3.0], TypeError, "ne"),
        (["4"], TypeError, "ne"),
        ("43", TypeError, "ne must be a sequence, not str"),
        (b"43", TypeError, "ne must be a sequence, not bytes"),
        (4, TypeError, "ne must be a sequence, not int"),
        ({4, 3}, TypeError, "ne must be a sequence, not set"),
        (iter([4]), TypeError, "ne must be a sequence"),
        (np.array([4.0, 3.0]), TypeError, "ne must be an array of int64, not float64"),
        ([1 << 70], OverflowError, "ne"),
        (np.array([1 << 63], np.uint64), OverflowError, "ne"),
        (ffi.new("int32_t[]", [4]), TypeError, "ne"),
        (ffi.new("int64_t *"), TypeError, "ne is a bare pointer"),
    ],
    ids=lambda value: re.sub(r"0x\w+", "", repr(value)),
)
def test_wrong_arrays(arena: Arena, shape: Any, error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        capi.ggml_new_tensor(arena.context(), F32, shape)
    assert str(caught.value).startswith(f"ggml_new_tensor: {text}")


def test_arrays_of_a_fixed_length(arena: Arena) -> None:
    ctx, x, positions = arena.context(), arena.tensor(8, 2, 3), arena.tensor(12, type=I32)
    rest = (8, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    made = capi.ggml_rope_multi(ctx, x, positions, None, 8, [1, 1, 1, 1], *rest)
    assert list(made.ne) == list(x.ne)
    for wrong in ([1, 1, 1], [1] * 5, np.ones(3, np.int32)):
        with pytest.raises(ValueError, match=r"^ggml_rope_multi: sections must have 4 elements"):
            capi.ggml_rope_multi(ctx, x, positions, None, 8, wrong, *rest)


def test_arrays_of_pointers(arena: Arena) -> None:
    call = capi.ggml_backend_multi_buffer_alloc_buffer
    for wrong in ([None], [ffi.NULL], [arena.weight(4).buffer, None]):
        with pytest.raises(ValueError, match=r"buffers\[\d\] must not be NULL or None"):
            call(wrong)
    one = arena.weight(4).buffer
    with pytest.raises(ValueError, match=r"buffers\[0\] and buffers\[1\] are the same object"):
        call([one, one])
    with pytest.raises(ValueError, match=r"buffers must have at least 1 element"):
        call([])
    with pytest.raises(TypeError, match=r"^ggml_backend_multi_buffer_alloc_buffer: buffers"):
        call([arena.context()])


def test_arrays_of_strings(arena: Arena) -> None:
    gguf = arena.gguf()
    words = ["one", b"two", "größe", b"\xff", ""]
    capi.gguf_set_arr_str(gguf, "words", words)
    found = [capi.gguf_get_arr_str(gguf, 0, i) for i in range(capi.gguf_get_arr_n(gguf, 0))]
    assert found == ["one", "two", "größe", "\udcff", ""]
    for wrong, error in ((["a", None], ValueError), (["a\0"], ValueError), (["a", 3], TypeError)):
        with pytest.raises(error, match=r"^gguf_set_arr_str: data\[\d\]"):
            capi.gguf_set_arr_str(gguf, "words", wrong)


@pytest.mark.parametrize(
    "numbers",
    [
        [1.0, 2.0],
        (1, 2),
        np.array([1.0, 2.0], np.float32),
        np.array([1.0, 2.0]),
        np.array([1, 2]),
        np.array([1.0, 9.0, 2.0, 9.0], np.float32)[::2],
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_arrays_that_are_read_and_written(numbers: Any) -> None:
    halves = np.zeros(2, np.uint16)
    capi.ggml_fp32_to_fp16_row(numbers, halves)
    np.testing.assert_array_equal(halves.view(np.float16), [1.0, 2.0])
    back = ffi.new("float[2]")
    capi.ggml_fp16_to_fp32_row(halves, back)
    assert list(back) == [1.0, 2.0]


def test_arrays_that_cannot_be_written() -> None:
    readonly = np.zeros(2, np.uint16)
    readonly.flags.writeable = False
    for wrong, text in (
        (np.zeros(2, np.float32), "float32"),
        (np.zeros(4, np.uint16)[::2], "not contiguous"),
        (readonly, "read-only"),
    ):
        with pytest.raises(ValueError, match=r"^ggml_fp32_to_fp16_row: arg1 ") as caught:
            capi.ggml_fp32_to_fp16_row([1.0, 2.0], wrong)
        assert text in str(caught.value) and "uint16" in str(caught.value)
    with pytest.raises(TypeError, match=r"^ggml_fp32_to_fp16_row: arg1 "):
        capi.ggml_fp32_to_fp16_row([1.0, 2.0], [0, 0])


def test_arrays_that_share_a_length(arena: Arena) -> None:
    with pytest.raises(ValueError, match=r"arg0 has 3 elements and arg1 2"):
        capi.ggml_fp32_to_fp16_row([1.0, 2.0, 3.0], np.zeros(2, np.uint16))
    buft = capi.ggml_backend_get_default_buffer_type(arena.backend)
    for bufts in (None, [buft]):
        capi.ggml_backend_sched_free(
            capi.ggml_backend_sched_new([arena.backend], bufts, 16, False, False)
        )
    with pytest.raises(ValueError, match=r"^ggml_backend_sched_new: .*backends .*bufts"):
        capi.ggml_backend_sched_new([arena.backend], [buft, buft], 16, False, False)


# ---- buffers

NUMBERS = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    "data",
    [
        NUMBERS,
        NUMBERS.tobytes(),
        bytearray(NUMBERS.tobytes()),
        memoryview(NUMBERS.tobytes()),
        NUMBERS.reshape(2, 2),
        ffi.new("float[]", [0, 1, 2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_buffers_that_are_read(arena: Arena, data: Any) -> None:
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_set(tensor, data, 0)
    assert [capi.ggml_get_f32_1d(tensor, i) for i in range(4)] == [0, 1, 2, 3]
    capi.ggml_backend_tensor_set(tensor, data, 8, 8)
    capi.ggml_backend_tensor_set(tensor, data, offset=4, size=4)
    assert [capi.ggml_get_f32_1d(tensor, i) for i in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "data",
    [np.empty(4, np.float32), bytearray(16), memoryview(bytearray(16)), ffi.new("char[16]")],
    ids=lambda value: type(value).__name__,
)
def test_buffers_that_are_written(arena: Arena, data: Any) -> None:
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_set(tensor, NUMBERS, 0)
    capi.ggml_backend_tensor_get(tensor, data, 0)
    assert bytes(ffi.buffer(data) if isinstance(data, ffi.CData) else data) == NUMBERS.tobytes()
    capi.ggml_backend_tensor_get(tensor, data, 8, 4)
    assert bytes(ffi.buffer(data) if isinstance(data, ffi.CData) else data)[:4] == b"\0\0\0@"


def test_a_pointer_is_a_buffer_of_the_size_given(arena: Arena) -> None:
    tensor, memory = arena.weight(4), ffi.new("float[4]", [0, 1, 2, 3])
    pointer = ffi.cast("float *", memory)
    capi.ggml_backend_tensor_set(tensor, pointer, 0, 16)
    assert capi.ggml_get_f32_1d(tensor, 3) == 3.0
    with pytest.raises(TypeError, match=r"data is a bare pointer: the size must be given"):
        capi.ggml_backend_tensor_set(tensor, pointer, 0)


@pytest.mark.parametrize(
    ("data", "size", "error", "text"),
    [
        (b"1234", 5, ValueError, "data has 4 bytes, fewer than the 5 asked for"),
        (ffi.new("char[4]"), 5, ValueError, "data has 4 bytes, fewer than the 5 asked for"),
        (np.zeros(8, np.float32)[::2], None, ValueError, "data"),
        (np.zeros((2, 4), np.float32).T, None, ValueError, "data"),
        (memoryview(bytes(8))[::2], None, (TypeError, ValueError, BufferError), "data"),
        ("text", None, TypeError, "data"),
        ([1.0, 2.0], None, TypeError, "data"),
        (3, None, TypeError, "data"),
        (None, None, ValueError, "data must not be"),
        (ffi.NULL, None, ValueError, "data must not be"),
        (ffi.NULL, 4, ValueError, "data must not be"),
        (b"1234", -1, (ValueError, OverflowError), "size"),
        (b"1234", "4", TypeError, "size"),
        (b"1234", 1.5, TypeError, "size"),
    ],
    ids=lambda value: re.sub(r"0x\w+", "", repr(value)),
)
def test_wrong_buffers(arena: Arena, data: Any, size: Any, error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        capi.ggml_backend_tensor_set(arena.weight(16), data, 0, size)
    assert str(caught.value).startswith(f"ggml_backend_tensor_set: {text}")


def test_buffers_that_cannot_be_written(arena: Arena) -> None:
    readonly = np.zeros(4, np.float32)
    readonly.flags.writeable = False
    for wrong in (b"1234", readonly, memoryview(b"1234"), np.zeros(8, np.float32)[::2]):
        with pytest.raises((TypeError, ValueError), match=r"^ggml_backend_tensor_get: data"):
            capi.ggml_backend_tensor_get(arena.weight(4), wrong, 0)


def test_an_empty_buffer(arena: Arena) -> None:
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_set(tensor, NUMBERS, 0)
    capi.ggml_backend_tensor_set(tensor, b"", 0)
    capi.ggml_backend_tensor_get(tensor, bytearray(), 16)
    assert capi.ggml_get_f32_1d(tensor, 1) == 1.0


def test_an_offset_that_would_wrap_around(arena: Arena) -> None:
    with pytest.raises(ValueError, match=r"offset <= SIZE_MAX - size"):
        capi.ggml_backend_tensor_set(arena.weight(4), bytes(8), (1 << 64) - 4)


@needs("gguf_init_from_buffer")
def test_a_gguf_in_memory(arena: Arena) -> None:
    gguf, w = arena.gguf(), arena.weight(4, name="w")
    capi.ggml_backend_tensor_set(w, NUMBERS, 0)
    capi.gguf_set_val_str(gguf, "general.name", "größe")
    capi.gguf_add_tensor(gguf, w)
    meta = capi.gguf_get_meta_data(gguf)
    tensors = ffi.new("struct ggml_context **")
    again = capi.gguf_init_from_buffer(meta + NUMBERS.tobytes() + bytes(64), ctx=tensors)
    assert capi.gguf_get_val_str(again, capi.gguf_find_key(again, "general.name")) == "größe"
    found = capi.ggml_get_tensor(tensors[0], "w")
    assert list(found.ne) == [4, 1, 1, 1]
    capi.ggml_free(tensors[0])
    capi.gguf_free(again)


# ---- deprecated functions


def test_deprecated_functions_warn_in_the_name_of_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"ggml_type_sizef is deprecated: use ") as caught:
        assert capi.ggml_type_sizef(F32) == 4.0
    assert [warning.filename for warning in caught] == [__file__]


def test_deprecated_functions_say_so_in_their_docstrings() -> None:
    deprecated = [n for n in BOUND if re.search(r"^\s*Deprecated", getattr(capi, n).__doc__, re.M)]
    assert "ggml_type_sizef" in deprecated
    assert "ggml_mul_mat" not in deprecated


# ---- the raw level


def test_the_raw_level_returns_zero_and_keeps_the_error(arena: Arena) -> None:
    ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
    assert lib.ggml_mul_mat(ctx, a, b) == ffi.NULL
    assert lib.ggml_cffi_error() != 0
    assert b"ggml_can_mul_mat" in ffi.string(lib.ggml_cffi_error_text())
    assert lib.ggml_nelements(a) == 12
    assert lib.ggml_cffi_error() == 0
    assert lib.ggml_nelements(ffi.NULL) == 0
    assert lib.ggml_cffi_error() != 0
    assert capi.ggml_nelements(a) == 12


def test_the_error_belongs_to_the_thread(arena: Arena) -> None:
    ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
    assert lib.ggml_mul_mat(ctx, a, b) == ffi.NULL
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(lib.ggml_cffi_error()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert lib.ggml_cffi_error() != 0
    lib.ggml_cffi_clear()
    with pytest.raises(AbortError):
        capi.ggml_mul_mat(ctx, a, b)


def test_calls_release_the_gil(arena: Arena) -> None:
    """While one thread computes for a good while, this one runs."""
    ctx = arena.context()
    a, b = arena.tensor(1024, 1024, ctx=ctx), arena.tensor(1024, 1024, ctx=ctx)
    graph = arena.graph(ctx, *[capi.ggml_mul_mat(ctx, a, b) for _ in range(8)])
    span: list[float] = []

    def compute() -> None:
        start = time.monotonic()
        capi.ggml_backend_graph_compute(arena.backend, graph)
        span.extend((start, time.monotonic()))

    thread = threading.Thread(target=compute)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0)
    start, end = span
    inside = [start, *(tick for tick in ticks if start < tick < end), end]
    assert max(np.diff(inside)) < 0.9 * (end - start)
