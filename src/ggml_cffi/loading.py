"""Backends in loadable modules: loading one from a file, and unloading it."""

from __future__ import annotations

import gc
import os

from . import capi
from ._handles import Handle
from ._loader import ffi, lib
from .device import Device, listed

__all__ = ["load_backend", "unload_backend"]


def load_backend(path: str | os.PathLike[str]) -> list[Device]:
    """Load a backend from a loadable module, such as libggml-vulkan.so; gives its devices.

    Those that came with the package's ggml are there without it. The module has to be of that very
    ggml, and linked to its library. `devices()` lists its devices from now on; there may be none,
    where a driver is missing.

    Raises FileNotFoundError and IsADirectoryError, ValueError where it is loaded already,
    GGMLError for a file that is no library or no backend, and NotSupportedError for a backend of
    another ggml, or one that does not suit this machine.
    """
    file = os.path.realpath(_checked(path))
    os.stat(file)
    if os.path.isdir(file):
        raise IsADirectoryError(f"load_backend: {path!r} is a folder, expected a loadable module")
    if _loaded_from(file) is not None:
        raise ValueError(f"load_backend: the backend in {str(path)!r} is loaded already")
    registry = capi.ggml_backend_load(file)
    return [
        Device(capi.ggml_backend_reg_dev_get(registry, i))
        for i in range(capi.ggml_backend_reg_dev_count(registry))
    ]


def unload_backend(backend: str | os.PathLike[str] | Device) -> None:
    """Unload a backend that came in a loadable module: the file, or one of its devices.

    `devices()` no longer lists its devices, and those that are kept raise ValueError. Its code
    stays in the process, where a driver's threads may still run; `load_backend` brings it back.

    Raises ValueError, and changes nothing, while something of it lives (backends, buffers,
    compiled graphs, meta devices, ...), for a backend that is built in, and where none is loaded
    from that file.
    """
    if isinstance(backend, Device):
        registry = capi.ggml_backend_dev_backend_reg(backend.handle)
        if registry is None:
            raise ValueError(f"unload_backend: {backend!r} belongs to no backend of its own")
    else:
        registry = _loaded_from(os.path.realpath(_checked(backend)))
        if registry is None:
            loaded = ", ".join(filter(None, map(_file_of, listed("reg")))) or "none"
            raise ValueError(
                f"unload_backend: no backend is loaded from {str(backend)!r}; those loaded are "
                f"from {loaded}"
            )
    try:
        capi.ggml_backend_unload(registry)
    except ValueError:
        gc.collect()  # what nobody refers to may wait for that
        capi.ggml_backend_unload(registry)


def _checked(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        kind = type(path).__name__
        raise TypeError(f"path is {path!r} ({kind}), expected a str or a path")
    return os.fsdecode(path)


def _loaded_from(file: str) -> Handle | None:
    """The backend that came in a file, None if there is none."""
    for registry in listed("reg"):
        found = _file_of(registry)
        if found and os.path.realpath(found) == file:
            return registry
    return None


def _file_of(registry: Handle) -> str:
    found = lib.ggml_cffi_file_of(registry)
    return os.fsdecode(ffi.string(found)) if found else ""
