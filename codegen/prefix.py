"""Finds the ggml to build against: its headers, libraries, version and commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .elf import exported_symbols, read_library

__all__ = ["BuildError", "Prefix", "exported_symbols", "find_prefix"]

DISTRIBUTION = "libggml-python"
PACKAGE = "libggml"  # the folder of DISTRIBUTION that is an install prefix
HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "ggml-opt.h", "gguf.h")
REQUIRED = ("ggml-base", "ggml")
SYSTEM_ROOTS = (Path("/usr"), Path("/usr/local"))

# Run in a process of its own: a library that crashes or hangs while loading must not end the build.
# It may print whatever it likes as well, and leave the line unfinished.
_ANSWER = "the versions that ggml-cffi asked for: "
_ASK_VERSION = f"""
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
answer = []
for name in ("ggml_version", "ggml_commit"):
    function = getattr(library, name, None)
    if function is not None:
        function.restype = ctypes.c_char_p
    answer.append((function() if function is not None else None) or b"")
print("\\n{_ANSWER}" + json.dumps([text.decode() for text in answer]), flush=True)
"""
_PATIENCE = 60.0  # seconds


class BuildError(Exception):
    """The package cannot be built here.

    The text says what is wrong, what was looked for and where, and what to do. The errors of each
    stage of the generator are of this class, too.
    """

    def __init__(self, problem: str, *, looked: Iterable[str] = (), advice: str = "") -> None:
        lines = [problem, *(f"  looked for: {line}" for line in looked)]
        if advice:
            lines.append(f"  what to do: {advice}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Prefix:
    """An installed ggml."""

    root: Path
    include: Path
    libdir: Path
    libraries: Mapping[str, Path]  # linkable ones: "ggml-base" -> its one real file
    modules: tuple[Path, ...]  # backends that ggml loads at run time (GGML_BACKEND_DL)
    version: str
    commit: str
    system: bool  # linked where it is, not copied into the package
    origin: str  # how it was found, for messages
    licenses: tuple[Path, ...] = field(default=())

    @cached_property
    def key(self) -> str:
        """A short hash of version, commit and the very bytes of the libraries.

        The bytes stand for the flags that ggml was built with, which nothing else tells in full.
        """
        digest = hashlib.sha256(f"{self.version}\n{self.commit}\n{self.system}\n".encode())
        for path in (*self.libraries.values(), *self.modules):
            digest.update(f"{path.name}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:10]

    def library_file(self, name: str) -> str:
        """Give the file name, and SONAME, of the copy of library ``name`` in ``_libs``."""
        return f"lib{name}-{self.key}.so"

    def variants(self, name: str) -> list[Path]:
        """Give the loadable modules of a backend, one for each kind of processor it may have."""
        own = re.compile(rf"lib{re.escape(name)}(-[^.]*)?\.so")
        return [path for path in self.modules if own.match(path.name)]


def find_prefix(environ: Mapping[str, str]) -> Prefix:
    """Find ggml: the prefix that ``GGML_CFFI_PREFIX`` names, else the installed libggml-python.

    ``GGML_CFFI_LINK`` is ``copy`` (the libraries are copied into the package) or ``system`` (they
    are used where they lie); by default only /usr and /usr/local are not copied.

    Raises BuildError if there is none, or if it lacks headers or libraries.
    """
    link = environ.get("GGML_CFFI_LINK", "")
    if link not in ("", "copy", "system"):
        advice = "set it to copy or system, or unset it"
        raise BuildError(f"GGML_CFFI_LINK is {link!r}", advice=advice)
    if named := environ.get("GGML_CFFI_PREFIX"):
        root = Path(os.path.abspath(os.path.expanduser(named)))
        origin = f"GGML_CFFI_PREFIX={named}"
    else:
        if link == "system":
            raise BuildError(
                "GGML_CFFI_LINK=system without GGML_CFFI_PREFIX",
                advice="name the install prefix of ggml in GGML_CFFI_PREFIX; the libraries of "
                f"{DISTRIBUTION} are gone after an isolated build, so they are always copied",
            )
        root = _installed_distribution()
        origin = f"the installed {DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
    system = link == "system" or (link == "" and root in SYSTEM_ROOTS)
    return read_prefix(root, origin=origin, system=system)


def read_prefix(root: Path, *, origin: str, system: bool = False) -> Prefix:
    """Read the install prefix ``root``; ``origin`` says in messages where it came from.

    Raises BuildError as `find_prefix` does.
    """
    if not root.is_dir():
        raise BuildError(
            f"the ggml prefix {root} is not a folder ({origin})",
            looked=[f"{root}{os.sep}include and {root}{os.sep}lib"],
            advice="name the folder that `cmake --install` of ggml wrote to",
        )
    include = _find_headers(root, origin)
    libdir = _find_libdir(root, origin)
    linkable, modules = _find_libraries(root, libdir)
    if missing := [name for name in REQUIRED if name not in linkable]:
        raise _missing_library(missing[0], [libdir], origin)
    version, commit = _read_version(linkable["ggml-base"], libdir, origin)
    return Prefix(
        root=root,
        include=include,
        libdir=libdir,
        libraries=linkable,
        modules=modules,
        version=version,
        commit=commit,
        system=system,
        origin=origin,
        licenses=tuple(_find_licenses(root)),
    )


def _installed_distribution() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # a top-level name: finds it without importing it
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations or not _is_installed(DISTRIBUTION):
        raise BuildError(
            f"there is no ggml to build against: GGML_CFFI_PREFIX is not set and {DISTRIBUTION} is "
            "not installed",
            looked=[f"the Python package {PACKAGE} on the path of {sys.executable}"],
            advice="build with isolation (without --no-build-isolation), which brings it; or "
            f"`python -m pip install {DISTRIBUTION}`; or set GGML_CFFI_PREFIX to the install "
            "prefix of a ggml",
        )
    return Path(locations[0])


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _find_headers(root: Path, origin: str) -> Path:
    include = root / "include"
    missing = [name for name in HEADERS if not (include / name).is_file()]
    if missing:
        raise BuildError(
            f"the ggml prefix {root} lacks headers ({origin})",
            looked=[f"{', '.join(missing)} in {include}"],
            advice="install ggml with its headers there (`cmake --install`, or the -dev package of "
            "a distribution), or name another prefix in GGML_CFFI_PREFIX",
        )
    return include


def _find_libdir(root: Path, origin: str) -> Path:
    multiarch = sysconfig.get_config_var("MULTIARCH")
    names = ["lib64", "lib", *([f"lib/{multiarch}"] if multiarch else [])]
    for name in names:
        if any((root / name).glob("libggml-base.so*")):
            return root / name
    raise _missing_library("ggml-base", [root / name for name in names], origin)


def _missing_library(name: str, folders: list[Path], origin: str) -> BuildError:
    if any((folder / f"lib{name}.a").exists() for folder in folders):
        advice = "there is only a static library: build ggml with -DBUILD_SHARED_LIBS=ON"
    else:
        advice = (
            "install a ggml with shared libraries there, or name another prefix in "
            "GGML_CFFI_PREFIX (a ggml from before the end of 2024 has no ggml-base: too old)"
        )
    return BuildError(
        f"the ggml library {name} is missing ({origin})",
        looked=[f"lib{name}.so in {', '.join(map(str, folders))}"],
        advice=advice,
    )


def _find_libraries(root: Path, libdir: Path) -> tuple[dict[str, Path], tuple[Path, ...]]:
    """Give one file per linkable library (libX.so, .so.0 and .so.0.20.2 are one), and modules."""
    libraries: dict[str, Path] = {}
    modules: dict[str, Path] = {}
    for folder in _library_folders(root, libdir):
        for path in sorted(folder.glob("libggml*.so*")):  # libX.so comes first
            name = path.name.partition(".so")[0].removeprefix("lib")
            if name in libraries or name in modules or not path.is_file():
                continue
            library = read_library(path)
            if library is None:
                continue
            _check_machine(path, library.machine)
            if "ggml_backend_init" in exported_symbols(path):
                modules[name] = path.resolve()
            elif folder == libdir:
                libraries[name] = path.resolve()
    return libraries, tuple(modules[name] for name in sorted(modules))


def _library_folders(root: Path, libdir: Path) -> Iterator[Path]:
    """Yield where libraries lie: ggml installs loadable backends to bin or to GGML_BACKEND_DIR."""
    yield libdir
    yield root / "bin"
    yield from sorted(path for path in (libdir / "ggml").rglob("*") if path.is_dir())
    if folder := _cmake_value(libdir, "GGML_BACKEND_DIR"):
        yield root / folder


def _check_machine(path: Path, machine: str) -> None:
    ours = read_library(Path(sys.executable))
    if ours is not None and ours.machine != machine:
        raise BuildError(
            f"{path} is for another processor: {machine}, while this Python is for {ours.machine}",
            advice="name a prefix with libraries for this machine in GGML_CFFI_PREFIX",
        )


def _read_version(base: Path, libdir: Path, origin: str) -> tuple[str, str]:
    """Ask the library itself; a release without ggml_version is looked up in its CMake files."""
    search = os.pathsep.join(filter(None, [str(libdir), os.environ.get("LD_LIBRARY_PATH")]))
    command = [sys.executable, "-I", "-c", _ASK_VERSION, str(base)]
    environ = {**os.environ, "LD_LIBRARY_PATH": search}
    looked = ["the answer of ggml_version()"]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"the ggml library {base} does not load: it hangs for {_PATIENCE:g} s ({origin})",
            looked=looked,
            advice="see what it waits for as it is loaded, or name another prefix in "
            "GGML_CFFI_PREFIX",
        ) from None
    answers = re.findall(f"^{_ANSWER}(.*)$", done.stdout.decode(errors="replace"), re.M)
    if done.returncode != 0 or not answers:
        said = done.stderr.decode(errors="replace").splitlines() or ["nothing"]
        raise BuildError(
            f"the ggml library {base} cannot be loaded ({origin})",
            looked=looked,
            advice=f"see what the loader said: {said[-1]}",
        )
    version, commit = (text.strip() for text in json.loads(answers[0]))
    version = version or _cmake_value(libdir, "PACKAGE_VERSION")
    if not version:
        raise BuildError(
            f"the version of ggml is not known ({origin})",
            looked=[f"ggml_version() in {base}", f"a CMake version file in {libdir}/cmake/ggml"],
            advice="use a newer ggml, or one installed by `cmake --install`",
        )
    return version, commit or _cmake_value(libdir, "GGML_BUILD_COMMIT") or "unknown"


def _cmake_value(libdir: Path, name: str) -> str:
    """Give what the CMake package files set ``name`` to; empty where they do not."""
    for path in sorted((libdir / "cmake" / "ggml").glob("*.cmake")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := re.search(rf'set\({name} "?([^")]*)"?\)', text):
            return found[1]
    return ""


def _find_licenses(root: Path) -> Iterator[Path]:
    patterns = (
        (root, "LICENSE*"),
        (root, "share/licenses/*ggml*/*"),
        (root, "share/doc/*ggml*/copyright"),
        (root.parent, f"{DISTRIBUTION.replace('-', '_')}-*.dist-info/licenses/**/*"),
    )
    for folder, pattern in patterns:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())
