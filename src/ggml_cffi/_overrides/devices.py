"""Devices: the meta device, and descriptions that C writes into a buffer."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from .. import _runtime
from .._loader import ModuleError, NoModuleError, ffi, open_module
from ..errors import GGMLError, NotSupportedError
from ..meta import _create
from ._base import bound, call

if TYPE_CHECKING:
    from .._gen import types
    from ..meta._latch import SplitCallable

_DESCRIPTION = 256
# As ggml words it that the backend is of another release; and as we do where it says nothing.
_API, _NO_BACKEND = "incompatible API version", "the library could not be loaded as a backend"


def _path(function: str, name: str, value: types.String) -> str:
    data = _runtime.string(value, function, name, False)
    return os.fsdecode(ffi.string(data) if isinstance(data, ffi.CData) else data)


@contextlib.contextmanager
def _opened(function: str, path: str) -> Iterator[None]:
    """Let a module be served by our ggml. Raises NotSupportedError for one of another ggml."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(open_module(path))
        except (OSError, NoModuleError):
            pass  # ggml itself will say what is wrong
        except ModuleError as error:
            text = f"{function}: {path!r} cannot be loaded: {error}"
            raise NotSupportedError(text) from None
        yield


@bound
def ggml_backend_load(path: types.String) -> types.ggml_backend_reg:
    """Load a backend from a loadable module, a shared library; once more it gives the same.

    Raises GGMLError for a file that cannot be loaded or is no backend, and NotSupportedError for a
    backend of another ggml, or one that does not suit this machine.
    """
    name = "ggml_backend_load"
    given = _path(name, "path", path)
    with _opened(name, given):
        try:
            return cast("types.ggml_backend_reg", call(name, os.fsencode(given)))
        except GGMLError as error:
            text = str(error)
            if _API not in text and _NO_BACKEND not in text:
                raise
    why = text if given in text else f"{text}: {given!r}"
    if _API not in text:
        why += "; it says that it does not suit this machine"
    raise NotSupportedError(why)


@contextlib.contextmanager
def _all_opened(function: str, folders: Sequence[str]) -> Iterator[None]:
    """Let all modules that ggml may take there be served by our ggml; see `_opened`."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            for found in sorted(glob.glob(os.path.join(glob.escape(folder), "libggml-*.so"))):
                stack.enter_context(_opened(function, found))
        if named := os.environ.get("GGML_BACKEND_PATH"):
            stack.enter_context(_opened(function, named))
        yield


@bound
def ggml_backend_load_all() -> None:
    """Load the backends in the folder of the program and the current one.

    Raises NotSupportedError, and loads none, where one there is of another ggml.
    """
    name = "ggml_backend_load_all"
    program = os.path.dirname(os.path.realpath("/proc/self/exe"))
    with _all_opened(name, [program, os.getcwd()]):
        call(name)


@bound
def ggml_backend_load_all_from_path(dir_path: types.String | None = None) -> None:
    """Load the backends in a folder; None is as `ggml_backend_load_all`.

    Raises NotSupportedError, and loads none, where one there is of another ggml.
    """
    name = "ggml_backend_load_all_from_path"
    if dir_path is None:
        ggml_backend_load_all()
        return
    folder = _path(name, "dir_path", dir_path)
    with _all_opened(name, [folder]):
        call(name, os.fsencode(folder))


@bound
def ggml_backend_meta_device(
    devs: Sequence[types.ggml_backend_device], split_fn: SplitCallable, on_error: str = "mirror"
) -> types.ggml_backend_device:
    """Make a meta device: it spreads tensors over `devs`, 1 to 16 real devices, as `split_fn` says.

    `split_fn(tensor_info, n_devs)` is asked once for each weight when it is allocated and returns a
    `SplitState` or a mapping with `axis`, `ne`, `n_segments` and `nr`. If it raises or its answer
    is invalid, this and all further tensors are mirrored and it is not called again
    (`on_error="mirror"`), or the call that asked raises a SplitError (`on_error="raise"`).
    `meta.split_function(device)` tells the error. Every call makes another device. ggml never frees
    one: the function is kept for the life of the process, or until
    `meta.split_function(device).close()`.

    Raises ValueError and TypeError for a wrong number of devices, for what is no device or a meta
    device, for what is no function, and for another `on_error`.
    """
    return _create.create(devs, split_fn, on_error)[0]


def _description(function: str, count_function: str, device: int) -> str:
    n = call(count_function)
    if not 0 <= device < n:
        raise ValueError(f"{function}: device is {device}, but there are {n} devices")
    made = ffi.new("char[]", _DESCRIPTION)
    call(function, device, made, _DESCRIPTION)
    return _runtime.text(made) or ""


@bound
def ggml_backend_cuda_get_device_description(device: int) -> str:
    """Give the name of a CUDA device. Raises ValueError for a number that is no device's."""
    return _description(
        "ggml_backend_cuda_get_device_description", "ggml_backend_cuda_get_device_count", device
    )


@bound
def ggml_backend_vk_get_device_description(device: int) -> str:
    """Give the name of a Vulkan device. Raises ValueError for a number that is no device's."""
    return _description(
        "ggml_backend_vk_get_device_description", "ggml_backend_vk_get_device_count", device
    )
