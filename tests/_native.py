"""Small C libraries that tests compile for themselves."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from ggml_cffi import ffi


def compiler() -> str | None:
    """The C compiler's path, None where there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def compile_library(source: str, path: Path, *flags: str) -> ctypes.CDLL:
    """Compile C source to a shared library at `path` and load it."""
    command = [str(compiler()), "-O1", "-shared", "-fPIC", "-fexceptions", "-Wall", "-Werror"]
    subprocess.run(
        [*command, "-o", str(path), "-x", "c", "-", "-x", "none", *flags],
        input=source,
        text=True,
        check=True,
    )
    return ctypes.CDLL(str(path))


def address(library: ctypes.CDLL, name: str) -> int:
    """The address of one of its functions."""
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found


def argument_type(function: str, index: int) -> ffi.CType:
    """The C type of an argument of a function of `lib`."""
    from ggml_cffi import lib

    return ffi.typeof(ffi.addressof(lib, function)).args[index]
