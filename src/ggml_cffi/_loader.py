"""Imports the extension so that only the ggml it was built for can serve it, and checks that.

Gives `lib` and `ffi`; `raising`, which makes of a function of `lib` one that raises `Failed`, and
`raised`, where that finds what callbacks raised (ggml/raising.hpp); and what makes tensor objects
in C++ (ggml/building.hpp). Raises ImportError, with what to do, where the extension is missing,
cannot be loaded, or is served by a ggml other than the one it was compiled against.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "Failed",
    "ModuleError",
    "NoModuleError",
    "Room",
    "TensorBase",
    "ffi",
    "leaves",
    "lib",
    "library_files",
    "load_backends",
    "module_files",
    "open_module",
    "operation",
    "raised",
    "raising",
    "tensor_class",
]

PACKAGE = Path(__file__).resolve().parent
LIBS = PACKAGE / "_libs"

_REBUILD = "install the package anew (python -m pip install --force-reinstall .)"
_STANDS_IN = (
    "Another ggml in this process stands in for it: import ggml_cffi before that one, and without "
    "GGML_CFFI_NO_DEEPBIND"
)
_SANITIZERS = ("libasan", "libtsan", "libubsan", "liblsan", "libclang_rt.")
_import_lock = threading.Lock()  # the dlopen flags are the interpreter's, not the thread's


def library_files(info: ModuleType) -> dict[str, Path]:
    """Give where each linked library is to be found, as the build left it."""
    if info.SYSTEM_LIBDIR is None:
        return {name: LIBS / f"lib{name}-{info.PREFIX_KEY}.so" for name in info.LIBRARIES}
    return {name: Path(info.SYSTEM_LIBDIR, f"lib{name}.so") for name in info.LIBRARIES}


def module_files(info: ModuleType) -> list[Path]:
    """Give the backends that came with this ggml as loadable modules."""
    if info.SYSTEM_LIBDIR is not None:
        return [Path(path) for path in info.SYSTEM_MODULES]
    return sorted(p for p in LIBS.glob("libggml-*.so") if info.PREFIX_KEY not in p.name)


def load_backends() -> None:
    """Load the backends that are loadable modules, if any: then they are there as linked ones are.

    The package does so when it is imported. ggml looks for them where it was installed or beside
    the Python executable, so ``ggml_backend_load_all`` alone does not find copies. Calling it again
    loads nothing anew.
    """
    modules = module_files(_build_info())
    lib.ggml_cffi_note_built_in()
    with contextlib.ExitStack() as opened:
        for path in modules:
            # for another processor, without its driver, or exchanged by somebody
            with contextlib.suppress(OSError, ModuleError):
                opened.enter_context(open_module(path))
        for folder in dict.fromkeys(path.parent for path in modules):
            lib.ggml_backend_load_all_from_path(os.fsencode(folder))


class ModuleError(Exception):
    """A library is no backend of this package's ggml; the text says why."""


class NoModuleError(ModuleError):
    """A library is no backend at all."""


@contextlib.contextmanager
def open_module(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have a backend's library loaded with our flags, so that our own ggml serves it.

    ggml's dlopen meanwhile finds it loaded, and keeps it so; by itself it would let another ggml of
    the process serve it. Raises OSError where it cannot be loaded at all, NoModuleError for what is
    no backend, and ModuleError for one that is linked to another ggml.
    """
    import _ctypes
    import ctypes

    module = ctypes.CDLL(os.fspath(path), mode=_dlopen_flags(os.environ))
    try:
        if not hasattr(module, "ggml_backend_init"):
            raise NoModuleError("it is no backend: it has no function ggml_backend_init")
        _check_module(module)
        yield
    finally:
        _ctypes.dlclose(module._handle)


def _check_module(module: Any) -> None:
    """Raise ModuleError if a library that is linked to ggml is linked to another one than ours."""
    import ctypes

    if not hasattr(module, "ggml_abort"):
        return  # linked to none: it calls nothing of ggml
    found = ctypes.cast(module.ggml_abort, ctypes.c_void_p).value
    ours = ctypes.CDLL(_ours()).ggml_abort
    if found == ctypes.cast(ours, ctypes.c_void_p).value:
        return
    own = Path(_ours())
    raise ModuleError(
        f"it is linked to another ggml than this package, which has its own in {own}; build it "
        "with the same ggml, and link it to that file (patchelf --replace-needed libggml-base.so.0 "
        f"{own.name} --set-rpath {own.parent})"
    )


def _ours() -> str:
    """The file of libggml-base that serves the extension."""
    return os.fsdecode(ffi.string(lib.ggml_cffi_library_of(b"ggml-base")))


def _check_platform() -> None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise ImportError(f"ggml_cffi runs on Linux with glibc only, not on {platform.platform()}")


def _check_interpreter() -> None:
    """Refuse a subinterpreter: what is installed in ggml at import is the process's.

    Comes before the imports of modules that may not support one either, and say less.
    """
    for name in ("_interpreters", "_xxsubinterpreters"):  # as Python 3.13 and 3.10 have it
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(name)
            if module.get_current() != module.get_main():
                break
    else:
        return
    raise ImportError("ggml_cffi can be imported in the main interpreter only, not in another one")


def _build_info() -> ModuleType:
    name = f"{__package__}._gen.build_info"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"ggml_cffi was not built: there is no {PACKAGE / '_gen' / 'build_info.py'}. If this "
            "is a checkout, run Python elsewhere or build it (python -m pip install -e .); "
            f"otherwise {_REBUILD}",
            name=name,
        ) from error


def _check_files(info: ModuleType) -> None:
    if info.SYSTEM_LIBDIR is not None:
        return  # the system's loader may find them elsewhere; _check_served looks where
    missing = [str(path) for path in library_files(info).values() if not path.is_file()]
    if missing:
        raise ImportError(f"ggml_cffi is not complete: {', '.join(missing)} is missing; {_REBUILD}")


def _prepare_process(environ: Mapping[str, str]) -> None:
    """Set up what must be in place before ggml's static initialisers run."""
    if "GGML_NO_BACKTRACE" not in environ:
        # Else ggml's terminate handler starts gdb where that is installed, and can hang. putenv:
        # C code alone needs to see it.
        os.putenv("GGML_NO_BACKTRACE", "1")
    import faulthandler

    if environ.get("GGML_CFFI_NO_FAULTHANDLER") != "1" and not faulthandler.is_enabled():
        # No usable sys.stderr (a service, a captured stream): nowhere to write to.
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            faulthandler.enable()


def _deepbind(environ: Mapping[str, str], maps: str) -> bool:
    """Tell whether symbols are to be looked up in our own libraries before the process's.

    Sanitizers refuse RTLD_DEEPBIND: their interceptors would be passed over.
    """
    if environ.get("GGML_CFFI_NO_DEEPBIND") == "1":
        return False
    return not any(name in maps for name in _SANITIZERS)


def _dlopen_flags(environ: Mapping[str, str]) -> int:
    flags = os.RTLD_NOW | os.RTLD_LOCAL
    return flags | os.RTLD_DEEPBIND if _deepbind(environ, _memory_maps()) else flags


def _memory_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _import_extension(environ: Mapping[str, str], info: ModuleType) -> ModuleType:
    name = f"{__package__}._gen._ggml"
    with _import_lock:
        before = sys.getdlopenflags()
        sys.setdlopenflags(_dlopen_flags(environ))
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise  # cffi is not installed: that says it well enough
            raise ImportError(
                f"ggml_cffi was not built for this Python ({sys.implementation.cache_tag} on "
                f"{platform.machine()}): there is no extension for it in {PACKAGE / '_gen'}; "
                + _REBUILD,
                name=name,
            ) from error
        except ImportError as error:
            raise ImportError(
                f"the extension of ggml_cffi cannot be loaded: {error}. {_what_is_there(info)}",
                name=name,
                path=error.path,
            ) from error
        finally:
            sys.setdlopenflags(before)


def _what_is_there(info: ModuleType) -> str:
    """Say which ggml is loaded, or lies in the system's folder, now: it may lack what is needed."""
    rebuild = f"{_REBUILD[0].upper()}{_REBUILD[1:]}"
    if info.SYSTEM_LIBDIR is None:
        return rebuild
    expected = library_files(info)["ggml-base"]
    text = f"It was built for ggml {info.GGML_VERSION} ({info.GGML_COMMIT}) in {expected}"
    for path in _loaded("ggml-base"):
        if os.path.dirname(path) != os.path.realpath(info.SYSTEM_LIBDIR):  # maps has no links
            return f"{text}, but it is served by {_ggml_in(path)} in {path}. {_STANDS_IN}"
    for found in sorted(Path(info.SYSTEM_LIBDIR).glob("libggml-base.so*")):
        if about := _ggml_in(str(found)):
            return f"{text}; {found} is {about} now. {rebuild}"
    return f"{text}; there is no libggml-base.so that can be loaded now. {rebuild}"


def _loaded(library: str) -> list[str]:
    """The files of this library in the process, whoever loaded them."""
    found = re.findall(rf"^(?:\S+ +){{5}}(/.*/lib{library}\.so[\d.]*)$", _memory_maps(), re.M)
    return list(dict.fromkeys(found))


def _ggml_in(path: str) -> str:
    """The version and commit that a library tells, in words; "" if it tells none."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        base = ctypes.CDLL(path)
        base.ggml_version.restype = base.ggml_commit.restype = ctypes.c_char_p
        return f"ggml {base.ggml_version().decode()} ({base.ggml_commit().decode()})"
    return ""


def _check_served(module: Any, info: ModuleType) -> None:
    """Raise ImportError unless the ggml that really serves the extension is the compiled one."""
    lib, ffi = module.lib, module.ffi
    expected = library_files(info)
    served: dict[str, str] = {}
    for name in info.LIBRARIES:
        path = lib.ggml_cffi_library_of(name.encode())
        if path:
            served[name] = os.fsdecode(ffi.string(path))
    version, commit = _text(module, "ggml_version"), _text(module, "ggml_commit")
    same = version in (None, info.GGML_VERSION) and commit in (None, info.GGML_COMMIT)
    if info.SYSTEM_LIBDIR is None:
        strange = [n for n, path in served.items() if not _same_file(path, expected[n])]
    else:  # all may be found elsewhere, if they are those; a name may have several files there
        folders = {n: os.path.realpath(os.path.dirname(path)) for n, path in served.items()}
        home = os.path.realpath(info.SYSTEM_LIBDIR)
        moved = same and len(set(folders.values())) == 1
        strange = [] if moved else [n for n, folder in folders.items() if folder != home]
    if same and not strange:
        return
    name = strange[0] if strange else next(iter(served), "ggml-base")
    if strange:
        advice = _STANDS_IN
    elif info.SYSTEM_LIBDIR is not None:
        advice = f"The system's ggml has changed: {_REBUILD}"
    else:
        advice = f"The files of the package are not of one build: {_REBUILD}"
    raise ImportError(
        f"ggml_cffi was built for ggml {info.GGML_VERSION} ({info.GGML_COMMIT}) in "
        f"{expected.get(name, name)}, but it is served by ggml {version} ({commit}) in "
        f"{served.get(name, 'an unknown file')}. {advice}"
    )


def _check_raises(module: Any) -> None:
    """Raise ImportError unless a call that fails raises: else all failures would be lost."""
    try:
        module.raising(module.lib.ggml_cffi_fail, 0)()
    except module.Failed:
        return
    raise ImportError(
        "the extension of ggml_cffi does not raise where a call fails: it was built with a cffi "
        f"that writes other calls than those known. With another cffi, {_REBUILD}"
    )


def _text(module: Any, function: str) -> str | None:
    """Call a function that returns a string; None in a release that lacks it."""
    found = getattr(module.lib, function, None)
    return None if found is None else str(module.ffi.string(found()).decode())


def _same_file(one: str, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _load() -> Any:
    _check_platform()
    _check_interpreter()
    info = _build_info()
    _check_files(info)
    _prepare_process(os.environ)
    module: Any = _import_extension(os.environ, info)
    _check_served(module, info)
    _check_raises(module)
    return module


_module = _load()
lib, ffi = _module.lib, _module.ffi
Failed, raised, raising = _module.Failed, _module.raised, _module.raising
Room, TensorBase, tensor_class = _module.Room, _module.TensorBase, _module.tensor_class
leaves, operation = _module.leaves, _module.operation
