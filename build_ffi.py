"""Finds ggml, generates the binding for it, and describes the extension to cffi."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
if str(ROOT) not in sys.path:  # build front ends run this without the project's folder on the path
    sys.path.insert(0, str(ROOT))

import cffi  # noqa: E402

import codegen  # noqa: E402
from codegen.bundle import copy_libraries, write_license  # noqa: E402
from codegen.prefix import BuildError, Prefix  # noqa: E402

MODULE = "ggml_cffi._gen._ggml"

# Which function tells where a library was loaded from; in headers that every release has.
_WITNESSES = {
    "ggml-base": "ggml_init",
    "ggml": "ggml_backend_reg_count",
    "ggml-cpu": "ggml_backend_cpu_reg",
}

# The oldest Python that the extension is for: that of the wheel's tag.
_API = ("Py_LIMITED_API", "0x030a0000")

_LOADER_CDEF = "const char *ggml_cffi_library_of(const char *library);"
_LOADER_SOURCE = """
#include <cstring>
#include <dlfcn.h>

// The file that serves calls to a library here, whatever else the process has loaded.
static const char *ggml_cffi_library_of(const char *library) {{
    static const struct {{ const char *library; void *function; }} witnesses[] = {{
{witnesses}
    }};
    for (const auto &witness : witnesses) {{
        Dl_info info;
        if (std::strcmp(witness.library, library) == 0 && dladdr(witness.function, &info)) {{
            return info.dli_fname;
        }}
    }}
    return nullptr;
}}
"""


def limited_api() -> bool:
    """Tell whether this Python takes abi3 extensions: no free-threaded or debug build does."""
    return not (sysconfig.get_config_var("Py_GIL_DISABLED") or hasattr(sys, "gettotalrefcount"))


def prepare(prefix: Prefix, gen: Path, libs: Path, compiler: str) -> cffi.FFI:
    """Generate the Python files into ``gen`` and copy the libraries of ``prefix`` into ``libs``.

    ``compiler`` preprocesses the headers; a C++ compiler does, so that no other is needed.

    Returns what compiles the extension. Raises BuildError.
    """
    generated = codegen.generate(prefix, gen, compiler=compiler)
    if not prefix.system:
        copy_libraries(prefix, libs)
        write_license(prefix, ROOT / "NOTICE-ggml", libs / "LICENSE.ggml")
    return ffibuilder(generated, prefix, libs)


def ffibuilder(
    generated: codegen.Generated,
    prefix: Prefix,
    libs: Path,
    environ: Mapping[str, str] = os.environ,
) -> cffi.FFI:
    """Describe the extension to cffi: linked to the copies in ``libs``, or to a system prefix.

    Raises BuildError if cffi does not take what was generated.
    """
    witnesses = "\n".join(
        f'        {{"{name}", reinterpret_cast<void *>(&{_WITNESSES[name]})}},'
        for name in generated.libraries
        if name in _WITNESSES
    )
    builder = cffi.FFI()
    try:
        builder.cdef(generated.cdef + "\n" + _LOADER_CDEF)
    except (cffi.CDefError, cffi.FFIError) as error:
        raise BuildError(f"cffi does not take a declaration of ggml's: {error}") from None
    builder.set_source(
        MODULE,
        generated.source + _LOADER_SOURCE.format(witnesses=witnesses),
        source_extension=".cpp",
        include_dirs=[str(path) for path in generated.include_dirs],
        define_macros=[_API if limited_api() else ("_CFFI_NO_LIMITED_API", None)],
        extra_compile_args=_compile_flags(environ),
        py_limited_api=limited_api(),
        **_link_options(generated.libraries, prefix, libs),
    )
    return builder


def _compile_flags(environ: Mapping[str, str]) -> list[str]:
    flags = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-Wno-deprecated-declarations"]
    flags.append("-fno-strict-enums")  # the guard is given, and refuses, numbers of no enumerator
    flags.append("-ffp-contract=off")  # quants.hpp rounds twice where ggml does
    # Again at the end, so that the user's own win over Python's and over these.
    return flags + shlex.split(environ.get("CFLAGS", "")) + shlex.split(environ.get("CXXFLAGS", ""))


def _link_options(names: list[str], prefix: Prefix, libs: Path) -> dict[str, Any]:
    if prefix.system:
        return {
            "libraries": names,
            "library_dirs": [str(prefix.libdir)],
            # not -Wl, which splits a path at commas
            "extra_link_args": [
                *("-Wl,--enable-new-dtags", "-Xlinker", "-rpath", "-Xlinker", str(prefix.libdir))
            ],
        }
    return {
        # As files: the linker takes the names to load from their SONAMEs.
        "extra_objects": [str(libs / prefix.library_file(name)) for name in names],
        "extra_link_args": ["-Wl,--enable-new-dtags,-rpath,$ORIGIN/../_libs"],
    }
