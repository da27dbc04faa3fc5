"""Devices: the meta device, and descriptions that C writes into a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _runtime
from .._loader import ffi
from ..meta import _create
from ._base import bound, call

if TYPE_CHECKING:
    from .._gen import types
    from ..meta._latch import SplitCallable

_DESCRIPTION = 256


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
