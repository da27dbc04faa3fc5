"""Checks, before any work is done, that an extension can be built here at all."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from .prefix import BuildError

MACHINES = ("x86_64", "aarch64")

_PROBE = """
#include <Python.h>
#include <string_view>
static_assert(__cplusplus >= 201703L, "no C++17");
"""


def check_platform(
    system: str = sys.platform, machine: str | None = None, libc: str | None = None
) -> None:
    """Raise BuildError unless this is Linux with glibc on x86-64 or aarch64, in 64 bits."""
    machine = platform.machine() if machine is None else machine
    libc = platform.libc_ver()[0] if libc is None else libc
    bits = struct.calcsize("P") * 8
    if system == "linux" and libc == "glibc" and machine in MACHINES and bits == 64:
        return
    raise BuildError(
        f"this platform is not supported: {system}, {libc or 'not glibc'}, {machine}, {bits} bits",
        looked=[f"Linux with glibc on {' or '.join(MACHINES)}, 64 bits"],
        advice="build on such a system (a container of one will do)",
    )


def find_compiler(environ: Mapping[str, str]) -> str:
    """Give the command of a C++17 compiler: ``CXX``, else that of Python's own build, else c++.

    Raises BuildError if there is none, if it does not know C++17, or if Python's headers are
    missing.
    """
    named = environ.get("CXX")
    candidates = [named] if named else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]
    commands = list(dict.fromkeys(command for command in candidates if command))
    path = environ.get("PATH", os.defpath)
    for command in commands:
        words = shlex.split(command)
        if words and shutil.which(words[0], path=path):
            _probe(command)
            return command
    raise BuildError(
        "there is no C++ compiler",
        looked=[f"{', '.join(commands)} on PATH ({path})"],
        advice="install one that knows C++17 (`apt-get install g++`, `dnf install gcc-c++`), or "
        "name it in CXX",
    )


def _probe(command: str) -> None:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        raise BuildError(
            f"the headers of Python {platform.python_version()} are missing",
            looked=[f"Python.h in {include}"],
            advice="install them (`apt-get install python3-dev`, `dnf install python3-devel`)",
        )
    flags = ["-std=c++17", "-fsyntax-only", f"-I{include}", "-x", "c++", "-"]
    result = subprocess.run(
        [*shlex.split(command), *flags], input=_PROBE, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise BuildError(
            f"the C++ compiler {command} cannot compile a trivial C++17 program:\n"
            f"{result.stderr.strip()}",
            advice="install a newer compiler, or name another one in CXX",
        )
