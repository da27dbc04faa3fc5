"""Other ggmls in the process, loaded before ours and after it, locally and globally.

Each computes right and reports its own version, in a process of its own. The others are wheels from
PyPI: libggml-python's libraries, loaded as ggml-python loads them; pywhispercpp, which has shared
libraries as well (llama-cpp-python has no wheels); and xllamacpp, whose one extension exports all
functions of the ggml in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen import bundle
from codegen.elf import read_library
from codegen.prefix import find_prefix

pytestmark = pytest.mark.packaging

#: The requirements, and the package that each brings.
OTHERS = {
    "libggml-python==0.13.1": "libggml",
    "libggml-python==0.17.0.post1": "libggml",
    "pywhispercpp==1.5.1": "pywhispercpp",
    "xllamacpp==2026.10.11549": "xllamacpp",
}

PROGRAM = """
import ctypes, glob, importlib, json, os, sys
import numpy as np
package, folder, mode, order = sys.argv[1:]
MODE = {"local": os.RTLD_LOCAL, "global": os.RTLD_GLOBAL}[mode] | os.RTLD_NOW

def load_other():
    '''The libraries of the other ggml, as its package loads them.'''
    if package == "libggml":
        # ggml-python: what ggml needs is loaded globally, and then ggml itself
        libs = folder + "/libggml/lib64/libggml"
        files = [f"{libs}-base.so", f"{libs}-cpu.so", f"{libs}.so"]
        return [ctypes.CDLL(file, mode=MODE) for file in files]
    sys.path.insert(0, folder)
    name = {"xllamacpp": "xllamacpp.xllamacpp", "pywhispercpp": "_pywhispercpp"}[package]
    before = sys.getdlopenflags()
    sys.setdlopenflags(MODE)
    extension = importlib.import_module(name)
    sys.setdlopenflags(before)
    files = [extension.__file__]
    if package == "pywhispercpp":
        assert "CPU" in extension.whisper_print_system_info()  # asks its registry of backends
        files = glob.glob(folder + "/pywhispercpp.libs/libggml*.so*")
        assert len(files) == 3
    return [ctypes.CDLL(file, mode=MODE) for file in files]

class Other:
    '''Functions of the other ggml, wherever they are, all with pointers as results.'''
    def __init__(self):
        self.libraries = load_other()
    def __getattr__(self, name):
        for library in self.libraries:
            function = getattr(library, name, None)
            if function is not None:
                function.restype = ctypes.c_void_p
                return function
        raise AttributeError(name)
    def text(self, name):
        return ctypes.string_at(getattr(self, name)()).decode()

class Params(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

def other_product(other, a, b):
    P, I = ctypes.c_void_p, ctypes.c_int64
    ctx = P(other.ggml_init(Params(1 << 20, None, False)))
    tensors = []
    for array in (a, b):
        tensor = P(other.ggml_new_tensor_2d(ctx, 0, I(array.shape[1]), I(array.shape[0])))
        ctypes.memmove(other.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        tensors.append(tensor)
    product = P(other.ggml_mul_mat(ctx, *tensors))
    graph = P(other.ggml_new_graph(ctx))
    other.ggml_build_forward_expand(graph, product)
    assert (other.ggml_graph_compute_with_ctx(ctx, graph, 2) or 0) & 0xFFFFFFFF == 0
    found = np.empty((b.shape[0], a.shape[0]), np.float32)
    ctypes.memmove(found.ctypes.data, other.ggml_get_data(product), found.nbytes)
    other.ggml_free(ctx)
    return found

def our_product(a, b):
    from ggml_cffi import AbortError, capi
    backend = capi.ggml_backend_cpu_init()
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    tensors = [capi.ggml_new_tensor_2d(ctx, 0, *array.shape[::-1]) for array in (a, b)]
    product = capi.ggml_mul_mat(ctx, *tensors)
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, product)
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    for tensor, array in zip(tensors, (a, b)):
        capi.ggml_backend_tensor_set(tensor, array, 0)
    capi.ggml_backend_graph_compute(backend, graph)
    found = np.empty((b.shape[0], a.shape[0]), np.float32)
    capi.ggml_backend_tensor_get(product, found, 0)
    try:
        capi.ggml_mul_mat(ctx, tensors[0], product)
    except AbortError:
        pass
    else:
        raise AssertionError("no abort")
    capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)
    capi.ggml_backend_free(backend)
    return found

rng = np.random.default_rng(1)
a = rng.standard_normal((48, 64), np.float32)
b = rng.standard_normal((32, 64), np.float32)
answer = {}
if order == "before":
    other = Other()
    np.testing.assert_allclose(other_product(other, a, b), b @ a.T, rtol=1e-4, atol=1e-4)
if order != "alone":
    import ggml_cffi
    np.testing.assert_allclose(our_product(a, b), b @ a.T, rtol=1e-4, atol=1e-4)
if order != "before":
    other = Other()
for _ in range(2):
    np.testing.assert_allclose(other_product(other, a, b), b @ a.T, rtol=1e-4, atol=1e-4)
    if order != "alone":
        np.testing.assert_allclose(our_product(a, b), b @ a.T, rtol=1e-4, atol=1e-4)
answer["other"] = [other.text("ggml_version"), other.text("ggml_commit")]
if order != "alone":
    from ggml_cffi import capi
    answer["ours"] = [capi.ggml_version(), capi.ggml_commit()]
    assert capi.ggml_backend_dev_count() >= 1
    served = ggml_cffi.ffi.string(ggml_cffi.lib.ggml_cffi_library_of(b"ggml-base")).decode()
    answer["served"] = os.path.realpath(served)
print(json.dumps(answer))
"""

Folders = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, need: Callable
) -> Folders:
    """Where a requirement is installed by itself; kept in pytest's cache."""
    cache = getattr(request.config, "cache", None)
    tag = f"{sys.implementation.cache_tag}-"
    top = cache.mkdir("other-ggmls") if cache is not None else tmp_path_factory.mktemp("others")

    def folder_of(requirement: str) -> Path:
        folder = top / (tag + re.sub(r"\W+", "-", requirement))
        if not folder.is_dir():
            making = folder.with_suffix(".new")
            shutil.rmtree(making, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            pip += ["--no-deps", "--only-binary", ":all:", "--target", str(making), requirement]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            need(done.returncode == 0, f"{requirement} ({done.stderr.strip()[-300:]})")
            making.rename(folder)
        return folder.resolve()

    return folder_of


def answer(program: str, *arguments: object) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="session")
def version_of(folder_of: Folders) -> Callable[[str], list[str]]:
    """The version and commit that another ggml reports where there is none beside it."""
    known: dict[str, list[str]] = {}

    def version_of(requirement: str) -> list[str]:
        if requirement not in known:
            where = (OTHERS[requirement], folder_of(requirement))
            known[requirement] = answer(PROGRAM, *where, "local", "alone")["other"]
        return known[requirement]

    return version_of


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.parametrize("requirement", OTHERS)
def test_another_ggml_beside_ours(
    requirement: str,
    mode: str,
    order: str,
    folder_of: Folders,
    version_of: Callable[[str], list[str]],
) -> None:
    """Whether `order` it is loaded `before` ours or `after` it."""
    found = answer(PROGRAM, OTHERS[requirement], folder_of(requirement), mode, order)
    assert found["other"] == version_of(requirement)
    ours = find_prefix({})
    assert found["ours"] == [ours.version, ours.commit]
    assert f"/_libs/libggml-base-{ours.key}.so" in found["served"]


@pytest.mark.parametrize("requirement", OTHERS)
def test_the_others_are_others(requirement: str, version_of: Callable[[str], list[str]]) -> None:
    """Else nothing that is tried here could fail."""
    version = version_of(requirement)
    assert version != [find_prefix({}).version, find_prefix({}).commit]
    if requirement.startswith("libggml-python"):
        assert version[0] == requirement.partition("==")[2].partition(".post")[0]


# ---- a ggml of the system's, whose libraries keep their names


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package as it is linked to a system's ggml, and the folder of that one's libraries.

    The installed package, with what a build for GGML_CFFI_LINK=system does otherwise: names and
    path of the libraries in the extension, none copied, and their folder in build_info.
    `test_packaging.py` builds a whole one.
    """
    top = tmp_path_factory.mktemp("system")
    pin = find_prefix({})
    libdir = top / "usr" / pin.libdir.name
    shutil.copytree(pin.libdir, libdir)
    spec = importlib.util.find_spec("ggml_cffi")
    assert spec is not None
    assert spec.submodule_search_locations
    package = top / "site" / "ggml_cffi"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "_libs")
    shutil.copytree(spec.submodule_search_locations[0], package, ignore=ignored)
    (extension,) = (package / "_gen").glob("_ggml*.so")
    command = [str(bundle.find_patchelf()), "--set-rpath", str(libdir)]
    for name, path in pin.libraries.items():
        library = read_library(path)
        assert library is not None
        command += ["--replace-needed", pin.library_file(name), str(library.soname)]
    subprocess.run([*command, str(extension)], check=True)
    info = package / "_gen" / "build_info.py"
    text, count = re.subn(
        "^SYSTEM_LIBDIR = None$", f"SYSTEM_LIBDIR = {str(libdir)!r}", info.read_text(), flags=re.M
    )
    assert count == 1
    info.write_text(text)
    return package, libdir


LOAD = """
import ctypes, os, sys
for arguments in sys.argv[1:]:
    mode, file = arguments.split(":")
    ctypes.CDLL(file, mode={"local": os.RTLD_LOCAL, "global": os.RTLD_GLOBAL}[mode] | os.RTLD_NOW)
import ggml_cffi
from ggml_cffi import capi
print(capi.ggml_version(), ggml_cffi.ffi.string(ggml_cffi.lib.ggml_cffi_library_of(b"ggml-base")))
"""


def imported(package: Path, *loaded: str) -> subprocess.CompletedProcess[str]:
    """Import that package after other libraries, each "mode:file"."""
    return subprocess.run(
        [sys.executable, "-c", LOAD, *loaded],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_system_ggml_serves_the_package(system: tuple[Path, Path]) -> None:
    package, libdir = system
    done = imported(package)
    assert done.returncode == 0, done.stderr
    version, path = done.stdout.split()
    assert version == find_prefix({}).version
    assert Path(path[2:-1]).parent == libdir


@pytest.mark.parametrize("names", [["ggml-base"], ["ggml-base", "ggml-cpu", "ggml"]], ids=len)
@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.parametrize("requirement", [r for r in OTHERS if r.startswith("libggml")])
def test_error_the_wrong_version_is_loaded_before_a_system_ggml(
    requirement: str,
    mode: str,
    names: list[str],
    system: tuple[Path, Path],
    folder_of: Folders,
    version_of: Callable[[str], list[str]],
) -> None:
    package, libdir = system
    folder = folder_of(requirement) / "libggml" / "lib64"
    done = imported(package, *(f"{mode}:{folder}/lib{name}.so" for name in names))
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: ")
    ours, (version, commit) = find_prefix({}), version_of(requirement)
    assert re.search(
        rf"built for ggml {ours.version} \({ours.commit}\) in {libdir}/libggml\S*\.so", said
    )
    assert f"it is served by ggml {version} ({commit}) in {folder}/libggml-base.so" in said
    assert "import ggml_cffi before that one" in said


def test_error_libraries_of_two_ggmls(system: tuple[Path, Path], folder_of: Folders) -> None:
    """The version is right, which libggml-base tells, but another library is of another one."""
    package, libdir = system
    other = folder_of("libggml-python==0.17.0.post1") / "libggml" / "lib64"
    done = imported(package, f"global:{libdir}/libggml-base.so", f"local:{other}/libggml-cpu.so")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert f"in {libdir}/libggml-cpu.so, but it is served by" in said
    assert f"{other}/libggml-cpu.so" in said


def test_a_system_ggml_that_is_found_elsewhere(system: tuple[Path, Path], tmp_path: Path) -> None:
    package, libdir = system
    shutil.copytree(libdir, tmp_path / "moved")
    files = [f"global:{tmp_path}/moved/lib{name}.so" for name in ("ggml-base", "ggml-cpu", "ggml")]
    done = imported(package, *files)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/moved/libggml-base.so" in done.stdout
