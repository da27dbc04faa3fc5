"""Importing the extension: which ggml serves it, what is set up before, what is said if it fails.

Each test imports a copy of the installed package in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.prefix import find_prefix
from ggml_cffi._gen import build_info

PROLOGUE = """
import ctypes, faulthandler, os, sys
def getenv(name):
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return libc.getenv(name)
def load_other():
    import glob
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        ctypes.CDLL(f"{sys.argv[1]}/lib{name}.so", mode=ctypes.RTLD_GLOBAL)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package as it is installed here."""
    spec = importlib.util.find_spec("ggml_cffi")
    assert spec is not None
    assert spec.submodule_search_locations
    dest = tmp_path / "site" / "ggml_cffi"
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(spec.submodule_search_locations[0], dest, ignore=ignore)
    return dest


@pytest.fixture(scope="module")
def other() -> str:
    """The folder of the libraries of another ggml, under the names that all ggmls have."""
    return str(find_prefix({}).libdir)


Result = subprocess.CompletedProcess[str]


def run(package: Path, code: str, *arguments: str, **environ: str) -> Result:
    ours = ("GGML_", "PYTHONFAULT", "PYTHONDEV")  # both may turn the fault handler on
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-c", PROLOGUE + code, *arguments],
        env={**clean, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        cwd=package.parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output(package: Path, code: str, *arguments: str, **environ: str) -> str:
    result = run(package, code, *arguments, **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def import_error(package: Path, code: str = "import ggml_cffi", *arguments: str, **env: str) -> str:
    result = run(package, code, *arguments, **env)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), result.stderr
    return last


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.M)
    assert count == 1
    path.write_text(text)


SERVED = """
import ggml_cffi
from ggml_cffi._loader import ffi, lib
print(ffi.string(lib.ggml_cffi_library_of(b"ggml-base")).decode())
"""


def test_the_package_is_served_by_its_own_libraries(package: Path) -> None:
    assert Path(output(package, SERVED)).resolve().parent == package / "_libs"


@pytest.mark.isolation
@pytest.mark.parametrize("order", ["load_other();" + SERVED, SERVED + "load_other()"])
def test_another_ggml_in_the_process_changes_nothing(package: Path, other: str, order: str) -> None:
    code = order + "\nprint(lib.ggml_backend_reg_count())"
    served, registered = output(package, code, other).splitlines()
    assert Path(served).resolve().parent == package / "_libs"
    assert int(registered) >= 1


def test_error_another_ggml_stands_in(package: Path, other: str) -> None:
    text = import_error(package, "load_other()\nimport ggml_cffi", other, GGML_CFFI_NO_DEEPBIND="1")
    assert re.search(r"built for ggml [\d.]+ \(\w+\) in \S+/_libs/libggml", text)
    assert re.search(rf"but it is served by ggml [\d.]+ \(\w+\) in {other}/libggml", text)
    assert "import ggml_cffi before that one" in text


def test_dlopen_flags_are_put_back(package: Path) -> None:
    code = "before = sys.getdlopenflags(); import ggml_cffi; assert sys.getdlopenflags() == before"
    output(package, code)
    (package / "_gen" / "_ggml.abi3.so").write_bytes(b"no library")
    code = """
before = sys.getdlopenflags()
try:
    import ggml_cffi
except ImportError:
    assert sys.getdlopenflags() == before
else:
    raise AssertionError
"""
    output(package, code)


def test_deepbind_is_left_out_under_a_sanitizer() -> None:
    from ggml_cffi import _loader

    assert _loader._deepbind({}, "7f00 r-xp /usr/lib/libc.so.6\n")
    assert not _loader._deepbind({}, "7f00 r-xp /usr/lib/x86_64-linux-gnu/libasan.so.8\n")
    assert not _loader._deepbind({"GGML_CFFI_NO_DEEPBIND": "1"}, "")


def test_copied_modules_are_loaded(package: Path) -> None:
    """ggml itself looks for loadable backends where it was installed, not among the copies."""
    source = """
#include <stdio.h>
__attribute__((constructor)) static void hello(void) { puts("loaded"); }
void *ggml_backend_init(void) { return 0; }
"""
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-"]
    command += ["-o", str(package / "_libs" / "libggml-rpc.so")]
    subprocess.run(command, input=source, text=True, check=True)
    code = "import ggml_cffi"
    assert output(package, code) == "loaded"
    (package / "_libs" / "libggml-rpc.so").unlink()
    assert output(package, code) == ""


# ---- the process


def test_ggml_starts_no_debugger(package: Path) -> None:
    code = """
import ggml_cffi
print(getenv(b"GGML_NO_BACKTRACE"), "GGML_NO_BACKTRACE" in os.environ)
"""
    assert output(package, code) == "b'1' False"
    assert output(package, code, GGML_NO_BACKTRACE="0") == "b'0' True"


def test_faulthandler(package: Path) -> None:
    code = "import ggml_cffi; print(faulthandler.is_enabled())"
    assert output(package, code) == "True"
    assert output(package, code, GGML_CFFI_NO_FAULTHANDLER="1") == "False"
    assert output(package, "sys.stderr = None\n" + code) == "False"
    assert output(package, "import io; sys.stderr = io.StringIO()\n" + code) == "False"


def test_faulthandler_that_is_on_is_left_alone(package: Path, tmp_path: Path) -> None:
    code = """
file = open(sys.argv[1], "w")
faulthandler.enable(file)
import ggml_cffi
os.kill(os.getpid(), 11)
"""
    run(package, code, str(tmp_path / "trace"))
    assert "Segmentation fault" in (tmp_path / "trace").read_text()


# ---- what is said if it fails


def test_error_not_built(package: Path) -> None:
    shutil.rmtree(package / "_gen")
    text = import_error(package)
    assert "ggml_cffi was not built" in text
    assert str(package / "_gen" / "build_info.py") in text
    assert "pip install" in text


def test_error_no_extension(package: Path) -> None:
    for path in (package / "_gen").glob("_ggml*.so"):
        path.unlink()
    text = import_error(package)
    assert "not built for this Python" in text
    assert str(package / "_gen") in text


def test_error_library_missing(package: Path) -> None:
    (library,) = (package / "_libs").glob("libggml-base-*.so")
    library.unlink()
    text = import_error(package)
    assert f"{library} is missing" in text
    assert "pip install" in text


def test_error_system_library_missing(package: Path) -> None:
    info = package / "_gen" / "build_info.py"
    edit(info, "^SYSTEM_LIBDIR = None$", "SYSTEM_LIBDIR = '/opt/ggml/lib'")
    (library,) = (package / "_libs").glob("libggml-base-*.so")
    library.unlink()
    text = import_error(package)
    assert "cannot be loaded" in text
    assert library.name in text
    assert "pip install" in text


@pytest.mark.parametrize("fact", ["GGML_VERSION", "GGML_COMMIT"])
@pytest.mark.parametrize(
    ("system", "advice"),
    [
        (None, "are not of one build"),
        ("here", "system's ggml has changed"),
        ("/opt/lib", "Another ggml in this process stands in"),
    ],
)
def test_error_another_version(package: Path, fact: str, system: str | None, advice: str) -> None:
    info = package / "_gen" / "build_info.py"
    edit(info, f"^{fact} = .*$", f"{fact} = '9.9.9'")
    if system == "here":  # the files of a system's ggml, which have no key in their names
        system = str(package / "_libs")
        for path in (package / "_libs").glob(f"*-{build_info.PREFIX_KEY}.so"):
            (package / "_libs" / re.sub("-[0-9a-f]{10}", "", path.name)).symlink_to(path)
    edit(info, "^SYSTEM_LIBDIR = None$", f"SYSTEM_LIBDIR = {system!r}")
    text = import_error(package)
    assert re.search(r"built for ggml .*9\.9\.9.* in \S+\.so, but it is served by ggml", text)
    assert str(package / "_gen" / ".." / "_libs") in text
    assert advice in text
    assert "pip install" in text or system == "/opt/lib"


def test_error_failures_would_be_lost(package: Path) -> None:
    """As if a cffi of another kind had been there when the extension was built."""
    call = r"module\.raising\(module\.lib\.ggml_cffi_fail, 0\)\(\)"
    edit(package / "_loader.py", call, "module.lib.ggml_cffi_fail()")
    text = import_error(package)
    assert "does not raise" in text
    assert "pip install" in text


@pytest.mark.parametrize(
    "platform",
    ["sys.platform = 'darwin'", "import platform; platform.libc_ver = lambda: ('musl', '1')"],
)
def test_error_platform(package: Path, platform: str) -> None:
    assert "Linux with glibc only" in import_error(package, f"{platform}; import ggml_cffi")


def test_a_library_that_is_not_ours_stays_unbound(package: Path) -> None:
    code = """
from ggml_cffi._loader import ffi, lib
print(lib.ggml_cffi_library_of(b"x") == ffi.NULL)
"""
    assert output(package, code) == "True"
