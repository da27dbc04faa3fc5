"""What the generator writes for a small library, compiled for real and called."""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import build_ffi
import codegen
from codegen import lock
from codegen.prefix import find_prefix, read_prefix

COMPILED = Path(__file__).parent / "compiled"
PACKAGE = codegen.ROOT / "src" / "ggml_cffi"
NOT_COPIED = shutil.ignore_patterns("_gen", "_libs", "__pycache__", ".*")


def toy_prefix(root):
    """The pin's ggml with one more header and library, and a backend that is a loadable module."""
    pin = find_prefix({})
    shutil.copytree(pin.include, root / "include")
    shutil.copytree(pin.libdir, root / "lib")
    shutil.copy(COMPILED / "toy.h", root / "include")
    base = pin.libraries["ggml-base"]
    command = ["cc", "-shared", "-fPIC", f"-I{root / 'include'}", COMPILED / "toy.c", base]
    command += ["-Wl,-soname,libggml-toy.so", "-o", root / "lib" / "libggml-toy.so"]
    subprocess.run(command, check=True)
    shutil.copy(COMPILED / "module.h", root / "include")
    command = ["cc", "-shared", "-fPIC", COMPILED / "module.c"]
    subprocess.run([*command, "-o", root / "lib" / "libggml-blas.so"], check=True)
    return read_prefix(root, origin="a test")


def toy_annotations(folder):
    """Ours and the toy's; the lock knows a function that this build will not have."""
    shutil.copytree(codegen.GGML, folder)
    data = lock.load(folder / "api.json")
    data["functions"]["toy_gone"] = "int toy_gone(int a)"
    (folder / "api.json").write_text(json.dumps(data))
    shutil.copy(COMPILED / "toy.toml", folder / "annotations")
    for name, text in (
        ("pin.toml", '\n"toy.h" = "ggml-toy"\n"module.h" = "ggml-blas"\n'),
        ("annotations/callbacks.toml", (COMPILED / "callbacks.toml").read_text()),
    ):
        with (folder / name).open("a") as file:
            file.write(text)
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The whole package once more, with the toy in it, under a name of its own."""
    root = tmp_path_factory.mktemp("compiled")
    package = root / "toy_cffi"
    shutil.copytree(PACKAGE, package, ignore=NOT_COPIED)
    (package / "_libs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "GGML", toy_annotations(root / "ggml"))
        patch.setattr(build_ffi, "MODULE", "toy_cffi._gen._ggml")
        patch.setenv("CFLAGS", "-O0")
        builder = build_ffi.prepare(
            toy_prefix(root / "prefix"), package / "_gen", package / "_libs", "c++"
        )
        built = Path(builder.compile(tmpdir=str(root / "build")))
        shutil.copy(built, package / "_gen")
        patch.syspath_prepend(root)
        capi = importlib.import_module("toy_cffi.capi")
        errors = importlib.import_module("toy_cffi.errors")
        ffi = importlib.import_module("toy_cffi._loader").ffi
    yield SimpleNamespace(capi=capi, errors=errors, ffi=ffi)
    for name in [name for name in sys.modules if name.startswith("toy_cffi")]:
        del sys.modules[name]


@pytest.fixture
def capi(toy):
    return toy.capi


def test_struct_by_value(toy):
    capi = toy.capi
    inside = toy.ffi.new("struct toy_range *", (5, 6))[0]
    result = capi.toy_widen(inside, wide=True, from_=2)
    assert (result.first, result.last) == (3, 106)
    params = toy.ffi.new("struct toy_params *", {"from": 1})[0]
    assert capi.toy_widen(inside, params).last == 7
    with pytest.raises(TypeError, match="both a struct and the keywords wide"):
        capi.toy_widen(inside, params, wide=True)
    with pytest.raises(TypeError, match="nosuch"):
        capi.toy_widen(inside, nosuch=1)


def test_anonymous_union(toy):
    value = toy.ffi.new("struct toy_value *", {"kind": toy.capi.TOY_KIND_FANCY})
    value.real = 0.5
    value.nibbles.low, value.nibbles.high = 3, 15
    value.ne = [1, 2, 3, 4]
    assert len(value.ne) == 4
    assert toy.capi.toy_sum(value) == 28.5
    assert toy.capi.toy_sum(value[0]) == 28.5  # by its address


def test_enum(toy):
    capi = toy.capi
    assert (capi.TOY_KIND_PLAIN, capi.TOY_KIND_FANCY, capi.TOY_KIND_LAST) == (2, 3, 98)
    assert capi.toy_next_kind(2) is capi.TOY_KIND_FANCY
    for wrong in (0, 4, 99, capi.TOY_KIND_COUNT):
        with pytest.raises(ValueError, match=rf"kind is {int(wrong)}, which is no toy_kind"):
            capi.toy_next_kind(wrong)


def test_tag_that_is_a_function(toy):
    value = toy.ffi.new("struct toy_value *", {"kind": 2})
    assert toy.capi.toy_kind(value) is toy.capi.TOY_KIND_PLAIN
    with pytest.raises(ValueError, match="value must not be NULL"):
        toy.capi.toy_kind(None)


def test_parameters(capi):
    assert capi.toy_subtract(1, from_=5) == 4
    assert capi.toy_subtract(arg0=2, from_=5) == 3
    assert capi.toy_product([2, 3, 4]) == 24
    with pytest.raises(ValueError, match="ne must have 3 elements, not 2"):
        capi.toy_product([2, 3])
    with pytest.raises(TypeError, match="toy_subtract: from_"):
        capi.toy_subtract(1, "5")


def test_constants(capi):
    assert (capi.TOY_ANSWER, capi.TOY_NAME, capi.TOY_DIMS) == (42, "toy", 3)


def test_deprecated(capi):
    with pytest.warns(DeprecationWarning, match="toy_old is deprecated: use toy_new instead"):
        assert capi.toy_old(3) == 3
    assert "Deprecated: use toy_new instead." in capi.toy_old.__doc__


def test_string(capi):
    assert capi.toy_greet("Jörg") == "Hi Jörg"
    assert capi.toy_greet(b"bytes") == "Hi bytes"
    assert capi.toy_greet(None) is None
    with pytest.raises(ValueError, match="NUL"):
        capi.toy_greet("a\0b")
    with pytest.raises(TypeError, match="name must be str"):
        capi.toy_greet(3)


def test_out_parameter(capi):
    assert capi.toy_divide(17, 5) == (3, 2)
    with pytest.raises(ValueError, match="requires b != 0"):
        capi.toy_divide(1, 0)


def test_array_and_buffer(capi):
    assert capi.toy_mean([1, 2, 6]) == 3
    assert capi.toy_mean(np.arange(5, dtype=np.float64)) == 2
    with pytest.raises(ValueError, match="at least 1"):
        capi.toy_mean([])
    assert capi.toy_count(["a", b"bc", "ä"]) == 5
    data = bytearray([1, 2, 3])
    capi.toy_double(data)
    capi.toy_double(data, 1)
    assert list(data) == [4, 4, 6]
    with pytest.raises(ValueError, match="3 bytes, fewer than the 4"):
        capi.toy_double(data, 4)
    with pytest.raises(TypeError):
        capi.toy_double(b"constant")


def test_callback(capi):
    seen = []
    assert capi.toy_walk(5, lambda step, label: seen.append((step, label)) or step < 2) == 2
    assert seen == [(0, "even"), (1, "odd"), (2, "even")]


def test_callback_that_raises(toy):
    capi = toy.capi
    calls = []

    def visit(step, label):
        calls.append(step)
        raise KeyError(label)

    with pytest.raises(KeyError, match="even"):
        capi.toy_walk(5, visit)
    assert calls == [0]  # C got false
    with pytest.raises(TypeError, match="must return a bool"):
        capi.toy_walk(5, lambda step, label: 1)
    assert capi.toy_walk(1, lambda step, label: True) == 1
    with pytest.raises(toy.errors.AbortError, match="small numbers only"):
        capi.toy_walk(1, lambda step, label: capi.toy_check(11))
    with pytest.raises(ValueError, match="visit must not be NULL"):
        capi.toy_walk(1, None)


def test_callback_that_returns_a_struct(toy):
    capi = toy.capi
    result = capi.toy_bounds(lambda n: toy.ffi.new("struct toy_range *", (n, n + 1))[0], 7)
    assert (result.first, result.last) == (7, 8)
    with pytest.raises(ZeroDivisionError):
        capi.toy_bounds(lambda n: 1 // 0, 7)
    with pytest.raises(TypeError):
        capi.toy_bounds(lambda n: "no struct", 7)


def test_callback_lives_as_long_as_its_object(capi):
    class Visit:
        def __call__(self, step, label):
            return step > 3

    visit = Visit()
    alive = weakref.ref(visit)
    machine = capi.toy_machine_new(visit)
    del visit
    gc.collect()
    assert capi.toy_machine_step(machine, 4) is True
    assert capi.toy_machine_step(machine, 3) is False
    capi.toy_machine_free(machine)
    gc.collect()
    assert alive() is None


def test_callback_without_userdata(capi):
    rung = []
    capi.toy_set_bell(rung.append)
    gc.collect()
    capi.toy_ring(3)
    assert rung == [3]
    capi.toy_set_bell(None)
    capi.toy_ring(4)
    assert rung == [3]


def test_function_pointer(capi):
    assert capi.toy_apply(capi.toy_adder(), 20, 22) == 42


def test_failures(toy):
    capi, errors = toy.capi, toy.errors
    assert capi.toy_check(9) == 9
    with pytest.raises(errors.AbortError, match="small numbers only") as caught:
        capi.toy_check(10)
    assert Path(caught.value.file).name == "toy.c"
    assert caught.value.function == "toy_check"
    assert capi.toy_check(8) == 8
    assert capi.toy_status(0) is capi.GGML_STATUS_SUCCESS
    with pytest.raises(errors.StatusError) as caught:
        capi.toy_status(-1)
    assert caught.value.status == capi.GGML_STATUS_FAILED
    with pytest.raises(MemoryError):
        capi.toy_status(-2)
    assert capi.toy_save("ab") is True
    with pytest.raises(errors.GGMLError, match="toy_save: the path is too short"):
        capi.toy_save("a")


def test_absent(toy):
    """What another release has is there, and says which release this is."""
    with pytest.raises(toy.errors.NotSupportedError, match=r"toy_gone is not in this build \(ggml"):
        toy.capi.toy_gone(1)
    assert "toy_gone" in toy.capi.__coverage__.absent


def test_left_out(capi):
    """Declared but not exported: there is no such attribute, and the reason is given."""
    assert not hasattr(capi, "toy_not_there")
    assert "exported by no linkable library" in capi.__coverage__.left_out["toy_not_there"]


def test_documentation(capi):
    text = capi.toy_divide.__doc__
    assert "int toy_divide(int a, int b, int *rest)" in text
    assert "toy.h:" in text
    assert "Requires b != 0." in text


# ---- loadable modules


def test_a_function_of_a_loadable_module(toy):
    """The package loads it; when it is gone, and when it is there again, is seen."""
    assert toy.capi.toy_of_a_module(21) == 42
    reg = toy.capi.ggml_backend_reg_by_name("BLAS")
    path = Path(toy.capi.__file__).parent / "_libs" / "libggml-blas.so"
    toy.capi.ggml_backend_unload(reg)
    with pytest.raises(toy.errors.GGMLError, match="BLAS is a loadable module, and none is loaded"):
        toy.capi.toy_of_a_module(21)
    toy.capi.ggml_backend_load(path)
    assert toy.capi.toy_of_a_module(4) == 8
