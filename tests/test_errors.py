"""What capi raises for a call that fails, and for arguments that it cannot take.

The generated tests go over every bound function. Their other arguments point to zeroed memory: the
guard refuses a call before ggml sees any of it.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena, check_product
from _release import needs

import ggml_cffi
from ggml_cffi import Context, _requirements, _runtime, capi, device, ffi, lib, ops
from ggml_cffi._gen.tables import SPECS
from ggml_cffi.errors import (
    AbortError,
    GGMLError,
    GGUFError,
    NotSupportedError,
    StatusError,
    StatusMemoryError,
)

ROOT = Path(__file__).resolve().parent.parent
NULL_ARGUMENT = 2  # ggml_cffi::error_kind
HUGE = 1 << 60


@pytest.fixture
def cpu(one_thread: Any) -> Any:
    return one_thread


# ---- a status


def test_a_failed_status_raises(arena: Arena) -> None:
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.weight(4)))
    capi.ggml_backend_cpu_set_abort_callback(arena.backend, lambda: True)
    try:
        with pytest.raises(StatusError, match=r"ggml_backend_graph_compute: .*abort") as caught:
            capi.ggml_backend_graph_compute(arena.backend, graph)
    finally:
        capi.ggml_backend_cpu_set_abort_callback(arena.backend, None)
    assert caught.value.status == capi.GGML_STATUS_ABORTED
    assert not isinstance(caught.value, MemoryError)
    status = capi.ggml_backend_graph_compute(arena.backend, graph)
    assert status is capi.GGML_STATUS_SUCCESS
    check_product(arena.backend)


def test_the_status_of_no_memory_is_a_memory_error() -> None:
    """A CPU backend never gets as far as to return it."""
    status = lib.GGML_STATUS_ALLOC_FAILED
    error = _runtime.failed("ggml_backend_graph_compute", (), (0, -1, "", "", [], 0, status, ""))
    assert type(error) is StatusMemoryError
    assert isinstance(error, MemoryError) and isinstance(error, StatusError)
    assert error.status == capi.GGML_STATUS_ALLOC_FAILED
    assert str(error).startswith("ggml_backend_graph_compute: ")
    assert "failed to allocate memory" in str(error)


@pytest.mark.parametrize("kind", [StatusError, StatusMemoryError])
def test_a_status_error_survives_pickling(kind: type[StatusError]) -> None:
    again = pickle.loads(pickle.dumps(kind("a reason", 3)))
    assert (type(again), str(again), again.status) == (kind, "a reason", 3)


# ---- NULL, and false, where they mean failure


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nobody.gguf"
    with pytest.raises(GGUFError, match="No such file or directory") as caught:
        capi.gguf_init_from_file(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ""),
        (b"not a model at all", "invalid magic characters"),
        (b"GGUF\xff\xff\0\0", "version 65535"),
        (b"GGUF\3\0\0\0", ""),
    ],
    ids=["empty", "magic", "version", "cut off"],
)
def test_an_invalid_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        capi.gguf_init_from_file(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@needs("gguf_init_from_buffer")
def test_an_invalid_buffer() -> None:
    with pytest.raises(GGUFError, match="invalid magic characters"):
        capi.gguf_init_from_buffer(b"not a model at all", 18)


def test_a_file_that_cannot_be_written_is_named(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "x.gguf"
    with pytest.raises(GGMLError, match="failed to open file") as caught:
        capi.gguf_write_to_file(arena.gguf(), path, False)
    assert str(path) in str(caught.value)


def test_a_library_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(GGMLError, match=r"/nowhere/libx.so.*cannot open shared object file"):
        capi.ggml_backend_load("/nowhere/libx.so")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(GGMLError, match="No such file or directory") as caught:
        capi.ggml_fopen(tmp_path / "nobody", "r")
    assert "nobody" in str(caught.value)


def test_no_memory_for_a_context() -> None:
    with pytest.raises((GGMLError, MemoryError)):
        capi.ggml_init(mem_size=HUGE)


def test_no_memory_for_a_buffer(arena: Arena) -> None:
    with pytest.raises((GGMLError, MemoryError), match="insufficient memory"):
        capi.ggml_backend_alloc_buffer(arena.backend, HUGE)
    ctx = arena.context()
    arena.tensor(HUGE >> 8, ctx=ctx)
    with pytest.raises((GGMLError, MemoryError), match="insufficient memory"):
        capi.ggml_backend_alloc_ctx_tensors(ctx, arena.backend)


def test_no_memory_for_a_graph(arena: Arena) -> None:
    ctx = arena.context()
    graph = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(HUGE >> 8)), allocate=False)
    galloc = capi.ggml_gallocr_new(capi.ggml_backend_get_default_buffer_type(arena.backend))
    arena.callback(capi.ggml_gallocr_free, galloc)
    allocate, reserve = capi.ggml_gallocr_alloc_graph, capi.ggml_gallocr_reserve
    for call in (allocate, allocate, reserve, allocate):
        with pytest.raises((GGMLError, MemoryError), match="insufficient memory"):
            call(galloc, graph)
    small = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(4)), allocate=False)
    allocate(galloc, small)
    assert capi.ggml_backend_graph_compute(arena.backend, small) == capi.GGML_STATUS_SUCCESS


def test_nothing_to_allocate(arena: Arena) -> None:
    with pytest.raises(GGMLError, match="allocated already or empty"):
        capi.ggml_backend_alloc_ctx_tensors(arena.context(), arena.backend)


def test_tensors_are_what_they_were_after_an_allocation_that_gives_none(cpu: Any) -> None:
    """Views of what another context has, and what lies in the memory of the context itself."""
    numbers, found = np.arange(8, dtype=np.float32), np.empty(4, np.float32)
    with Arena(cpu) as arena:
        w = arena.weight(8, name="w")
        capi.ggml_backend_tensor_set(w, numbers, 0)
        ctx = arena.context()
        view = capi.ggml_view_1d(ctx, w, 4, 8)
        own = arena.context(no_alloc=False)
        inside = arena.tensor(4, ctx=own)
        capi.ggml_set_f32(inside, 7.0)
        capi.ggml_set_no_alloc(own, True)
        before = [(one.buffer, one.data) for one in (view, inside)]
        for one in (ctx, own):
            with pytest.raises(GGMLError, match="allocated already or empty"):
                capi.ggml_backend_alloc_ctx_tensors(one, cpu)
        assert [(one.buffer, one.data) for one in (view, inside)] == before
        capi.ggml_backend_tensor_get(view, found, 0)
        np.testing.assert_array_equal(found, numbers[2:6])
        assert capi.ggml_get_f32_1d(inside, 3) == 7.0


@pytest.mark.parametrize("name", ["nobody", "CPU9"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(GGMLError, match="no device of that name"):
        capi.ggml_backend_init_by_name(name)


def test_what_a_device_cannot_do(arena: Arena) -> None:
    with pytest.raises(NotSupportedError, match="the device has no events"):
        capi.ggml_backend_event_new(capi.ggml_backend_get_device(arena.backend))


def test_the_reason_is_that_of_the_same_call(tmp_path: Path) -> None:
    with pytest.raises(GGUFError):
        capi.gguf_init_from_file(tmp_path / "nobody.gguf")
    with pytest.raises(GGMLError) as caught:
        capi.ggml_backend_init_by_name("nobody")
    assert "gguf" not in str(caught.value)


def test_a_message_names_its_function_once(tmp_path: Path) -> None:
    with pytest.raises(GGUFError) as caught:
        capi.gguf_init_from_file(tmp_path / "nobody")
    assert str(caught.value).count("gguf_init_from_file") == 1


def test_null_that_means_none(arena: Arena) -> None:
    ctx = arena.context()
    assert capi.ggml_get_first_tensor(ctx) is None
    tensor = arena.tensor(4, name="one", ctx=ctx)
    assert capi.ggml_get_next_tensor(ctx, tensor) is None
    assert capi.ggml_get_tensor(ctx, "nobody") is None
    assert capi.ggml_get_tensor(ctx, "one") == tensor
    assert capi.ggml_get_data(tensor) is None
    graph = capi.ggml_new_graph(ctx)
    assert capi.ggml_graph_get_tensor(graph, "nobody") is None
    assert capi.ggml_backend_dev_by_name("nobody") is None
    assert capi.ggml_backend_reg_by_name("nobody") is None
    assert capi.ggml_backend_reg_get_proc_address(capi.ggml_backend_cpu_reg(), "nobody") is None


def test_null_where_it_is_allowed(arena: Arena) -> None:
    ctx, x = arena.context(), arena.tensor(4, 4)
    for nothing in (None, ffi.NULL):
        assert capi.ggml_soft_max_ext(ctx, x, nothing, 1.0, 0.0).src[1] == ffi.NULL
        capi.ggml_free(nothing)
        capi.ggml_backend_free(nothing)
        capi.ggml_backend_buffer_free(nothing)
        capi.gguf_free(nothing)
    capi.ggml_backend_free(capi.ggml_backend_init_by_name("CPU", None))


# ---- every function: arguments that it cannot take

every_function = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STUB = Path(ggml_cffi.__file__).parent / "_gen" / "capi.pyi"
STUBS = {
    node.name: node
    for node in ast.parse(STUB.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
#: These look at some arguments before the guard does: what they find wrong first is their affair.
HAND_WRITTEN = SPECS.keys() - STUBS.keys()
#: What dummies point to, even if somebody looked: no pointer in it leads on.
ZEROS = ffi.new("char[65536]")


def zeros(ctype: Any) -> Any:
    return ffi.cast(ctype, ZEROS)


def words(function: str) -> dict[str, str]:
    """The annotations of a function's parameters: from the stub, or its own if hand-written."""
    if function not in STUBS:
        found = inspect.get_annotations(getattr(capi, function))
        return {name: str(annotation) for name, annotation in found.items()}
    arguments = STUBS[function].args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {a.arg: ast.unparse(a.annotation) for a in every if a.annotation is not None}


class Parameter:
    """A parameter of a capi function: the C type and the words of the stub."""

    def __init__(self, function: str, name: str) -> None:
        self.name = name
        self.index = SPECS[function].c_args.index(name)
        self.ctype = ffi.typeof(ffi.addressof(lib, function)).args[self.index]
        self.words = words(function).get(name, "")

    @property
    def is_array(self) -> bool:
        return self.words.startswith("Sequence")

    @property
    def is_buffer(self) -> bool:
        return "Buffer" in self.words

    def dummy(self) -> Any:
        """A value that the conversions take and that nobody may look at."""
        kind = self.ctype.kind
        if self.words.startswith("Callable"):
            return lambda *args: None
        if "String" in self.words:
            return ["x"] if self.is_array else "x"
        if self.is_buffer:
            return bytearray(64)
        if self.is_array:
            item = self.ctype.item
            if item.kind == "pointer":
                return [zeros(item)]
            if item.kind == "struct":
                return [ffi.new(ffi.getctype(item, "*"))[0]]
            return [0] * (4 if self.name in ("ne", "sections") else 1)
        if kind in ("pointer", "array"):
            return zeros(self.ctype)
        if kind == "struct":
            return ffi.new(ffi.getctype(self.ctype, "*"))[0]
        if kind == "enum":
            return min(value for value in self.ctype.elements if value >= 0)
        return 0


def parameters(function: str) -> dict[str, Parameter]:
    """The parameters that the function has in Python, but for keywords that make a struct."""
    found = inspect.signature(getattr(capi, function)).parameters.values()
    names = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {n: Parameter(function, n) for n in names if n in SPECS[function].c_args}


def arguments(known: dict[str, Parameter], **replaced: object) -> dict[str, object]:
    return {name: p.dummy() for name, p in known.items()} | replaced


def functions(**kinds: object) -> list[str]:
    """The bound functions that have a parameter of one of these kinds in C."""
    found = []
    for name, spec in SPECS.items():
        c_types = {arg.kind for arg in ffi.typeof(ffi.addressof(lib, name)).args}
        if (spec.required and "pointer" in kinds) or c_types & kinds.keys():
            found.append(name)
    return found


def refused(error: type[BaseException], function: str, message: str, **values: object) -> str:
    """Call a function that has to raise such an error with a message that begins so."""
    call, given = getattr(capi, function), arguments(parameters(function), **values)
    if function in HAND_WRITTEN:
        with pytest.raises((TypeError, ValueError, OverflowError, AbortError)):
            call(**given)
        return ""
    with pytest.raises(error) as caught:
        call(**given)
    assert not isinstance(caught.value, GGMLError)
    assert str(caught.value).startswith(message)
    return str(caught.value)


def test_there_is_something_to_go_over() -> None:
    assert len(functions(pointer=1)) > 500
    assert len(functions(enum=1)) > 40
    assert len(functions(primitive=1)) > 200
    assert len(HAND_WRITTEN) < 40


@every_function
@pytest.mark.parametrize("function", functions(pointer=1))
def test_none_where_it_is_not_allowed(function: str) -> None:
    known = parameters(function)
    for name in set(SPECS[function].required) & known.keys():
        for nothing in (None, ffi.NULL):
            refused(ValueError, function, f"{function}: {name} must not be", **{name: nothing})
    assert lib.ggml_cffi_error() == 0


@pytest.mark.parametrize("function", functions(pointer=1))
def test_null_at_the_raw_level(function: str) -> None:
    """The check is in the guard: lib has it as well."""
    spec = SPECS[function]
    c_types = ffi.typeof(ffi.addressof(lib, function)).args
    known = [Parameter(function, name) for name in spec.c_args]
    values = [
        zeros(ctype) if ctype.kind in ("pointer", "function") else parameter.dummy()
        for parameter, ctype in zip(known, c_types, strict=True)
    ]
    for name in spec.required:
        index = spec.c_args.index(name)
        getattr(lib, function)(*values[:index], ffi.NULL, *values[index + 1 :])
        assert lib.ggml_cffi_error() == NULL_ARGUMENT
        assert lib.ggml_cffi_error_index() == index
        lib.ggml_cffi_clear()


@every_function
@pytest.mark.parametrize("function", functions(enum=1))
def test_no_enumerator(function: str) -> None:
    for name, parameter in parameters(function).items():
        if parameter.ctype.kind != "enum":
            continue
        elements = parameter.ctype.elements
        for value in [4321] + [v for v, n in elements.items() if n.endswith("_COUNT")]:
            message = refused(
                ValueError, function, f"{function}: {name} is {value}", **{name: value}
            )
            assert function in HAND_WRITTEN or parameter.ctype.cname[5:] in message
        if -1 not in elements:
            refused((ValueError, OverflowError), function, f"{function}: {name}", **{name: -1})
        refused(TypeError, function, f"{function}: {name}", **{name: "GGML_TYPE_F32"})


@every_function
@pytest.mark.parametrize("function", functions(primitive=1))
def test_numbers_of_another_kind(function: str) -> None:
    optional = inspect.signature(getattr(capi, function)).parameters
    for name, parameter in parameters(function).items():
        if parameter.ctype.kind != "primitive":
            continue
        blames = f"{function}: {name}"
        for wrong in (object(), "1"):
            refused(TypeError, function, blames, **{name: wrong})
        if parameter.ctype.cname in ("float", "double"):
            continue
        refused(TypeError, function, blames, **{name: 1.5})
        refused(OverflowError, function, blames, **{name: -(1 << 70)})
        if "None" in parameter.words and optional[name].default is None:
            # how many bytes of a buffer are meant: it has fewer
            refused((OverflowError, ValueError), function, f"{function}: ", **{name: 1 << 70})
        else:
            refused(OverflowError, function, blames, **{name: 1 << 70})


@every_function
@pytest.mark.parametrize("function", functions(pointer=1))
def test_pointers_of_another_type(function: str) -> None:
    known = parameters(function)
    for name in set(SPECS[function].required) & known.keys():
        wrongs = [object(), 3, ffi.new("struct ggml_init_params *")]
        if known[name].ctype.cname.endswith("void *"):
            wrongs.pop()  # C takes any pointer for one
        for wrong in wrongs:
            refused(TypeError, function, f"{function}: {name}", **{name: wrong})


# ---- messages


def test_the_message_of_a_wrong_type(arena: Arena) -> None:
    ctx, tensor = arena.context(), arena.tensor(4)
    with pytest.raises(TypeError, match=r"^ggml_mul_mat: a is .*struct ggml_tensor .*ggml_context"):
        capi.ggml_mul_mat(ctx, ctx, tensor)
    with pytest.raises(TypeError, match=r"^ggml_new_tensor_1d: ne0 is 'x'"):
        capi.ggml_new_tensor_1d(ctx, F32, "x")
    with pytest.raises(OverflowError, match=f"^ggml_new_tensor_1d: ne0 is {1 << 70}"):
        capi.ggml_new_tensor_1d(ctx, F32, 1 << 70)


def test_the_message_of_a_requirement(arena: Arena) -> None:
    with pytest.raises(ValueError, match=r"^ggml_group_norm: requires n_groups > 0"):
        capi.ggml_group_norm(arena.context(), arena.tensor(4, 4), 0, 1e-5)


def test_a_wrong_number_of_arguments(arena: Arena) -> None:
    with pytest.raises(TypeError, match=r"ggml_new_tensor_1d\(\) missing .* 'ne0'"):
        capi.ggml_new_tensor_1d(arena.context(), F32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        capi.ggml_init(colour=1)


def test_no_error_is_left_behind(arena: Arena) -> None:
    tensor = arena.weight(4)
    for wrong in (None, "x"):
        with pytest.raises((ValueError, TypeError)):
            capi.ggml_nelements(wrong)
        assert capi.ggml_is_transposed(tensor) is False
        assert capi.ggml_get_name(tensor) == ""
        capi.ggml_backend_tensor_set(tensor, np.zeros(4, np.float32), 0)
        assert capi.ggml_get_f32_1d(tensor, 3) == 0.0


# ---- what is told of mistakes that are often made


def test_an_objects_pointer_is_asked_for() -> None:
    with Context() as ctx, device("CPU").init_backend(1) as backend:
        x = ctx.tensor(3, name="x")
        for call, argument in (
            (lambda: capi.ggml_nbytes(x), "tensor is <Tensor 'x' f32 (3,)>"),
            (lambda: capi.ggml_backend_dev_name(device("CPU")), "device is <Device CPU"),
            (lambda: capi.ggml_backend_name(backend), "backend is <Backend CPU>"),
        ):
            with pytest.raises(TypeError, match=r"capi takes its pointer, \.handle") as caught:
                call()
            assert argument in str(caught.value)
        for wrong in (backend, 3, object()):  # whose pointer is none to a tensor
            with pytest.raises(TypeError, match=r"must be a cdata pointer|initializer for ctype"):
                capi.ggml_nbytes(wrong)


def test_an_enumerator_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"type is 'f32': capi takes a ggml_type, capi.GGML_TYPE_F"):
        capi.ggml_type_size("f32")
    with pytest.raises(TypeError, match=r"type is 'Q4_0': .*, capi.GGML_TYPE_Q4_0$"):
        capi.ggml_blck_size("Q4_0")
    with pytest.raises(TypeError, match=r"type is 'odd': capi takes a ggml_type$"):
        capi.ggml_blck_size("odd")


#: What these find they say themselves, or they are never false.
EXPLAIN_THEMSELVES = {"cpu_can", "indices", "reachable"}
EXPLAIN_THEMSELVES |= {"supported", "scheduler_of", "threads_of", "use", "product"}
EXPLAIN_THEMSELVES |= {"computed", "graph_of", "hand_over"}


def test_each_requirement_is_told_in_words() -> None:
    required: set[str] = set()
    for path in (ROOT / "ggml" / "annotations").glob("*.toml"):
        for text in re.findall(
            r"^require = (\[.*?\]|\".*?\")$", path.read_text("utf-8"), re.M | re.S
        ):
            required |= set(re.findall(r"(?:check|ggml_cffi)::(\w+)\(", text))
    assert len(required) > 40
    said_only = {name for name in required if name.startswith("note_")}
    assert required - _requirements.WORDS.keys() - EXPLAIN_THEMSELVES - said_only == set()
    assert _requirements.WORDS.keys() - required == set()


def test_words_for_a_requirement() -> None:
    with Arena(None) as arena:
        ctx = arena.context()
        text = r"requires shape\(type, n_dims, ne\) \(no extent is"
        with pytest.raises(ValueError, match=text + r".*\): type = 2, n_dims = 1$"):
            capi.ggml_new_tensor(ctx, capi.GGML_TYPE_Q4_0, [33])
    with Context() as objects:
        ids, x = objects.tensor((8, 8), "i32", name="ids"), objects.input((3, 8), name="x")
        with pytest.raises(ValueError, match=r"'ids' is i32 of shape .*\(there are products of"):
            ops.mul_mat(ids, x)
    for plain in ("offset <= SIZE_MAX - size: offset = 3", "unheard_of(x): x = 1", "a(x) && b(x)"):
        assert _requirements.explained(plain) == plain
