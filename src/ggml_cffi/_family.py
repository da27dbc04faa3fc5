"""Names of the backend family that are no C functions: they give enumerators."""

from __future__ import annotations

from ._gen.enums import ggml_backend_buffer_usage, ggml_backend_dev_type
from ._loader import lib, load_backends
from .errors import NotSupportedError

__all__ = [
    "ggml_backend_buffer_usage_any",
    "ggml_backend_buffer_usage_compute",
    "ggml_backend_buffer_usage_weights",
    "ggml_backend_device_type_accel",
    "ggml_backend_device_type_cpu",
    "ggml_backend_device_type_gpu",
    "ggml_backend_device_type_igpu",
]


def ggml_backend_buffer_usage_any() -> ggml_backend_buffer_usage:
    """Give ``GGML_BACKEND_BUFFER_USAGE_ANY``."""
    return ggml_backend_buffer_usage.GGML_BACKEND_BUFFER_USAGE_ANY


def ggml_backend_buffer_usage_weights() -> ggml_backend_buffer_usage:
    """Give ``GGML_BACKEND_BUFFER_USAGE_WEIGHTS``: a meta device asks how to split only these."""
    return ggml_backend_buffer_usage.GGML_BACKEND_BUFFER_USAGE_WEIGHTS


def ggml_backend_buffer_usage_compute() -> ggml_backend_buffer_usage:
    """Give ``GGML_BACKEND_BUFFER_USAGE_COMPUTE``: graphs' own tensors."""
    return ggml_backend_buffer_usage.GGML_BACKEND_BUFFER_USAGE_COMPUTE


def ggml_backend_device_type_cpu() -> ggml_backend_dev_type:
    """Give ``GGML_BACKEND_DEVICE_TYPE_CPU``."""
    return _device_type("CPU")


def ggml_backend_device_type_gpu() -> ggml_backend_dev_type:
    """Give ``GGML_BACKEND_DEVICE_TYPE_GPU``: a GPU with memory of its own."""
    return _device_type("GPU")


def ggml_backend_device_type_igpu() -> ggml_backend_dev_type:
    """Give ``GGML_BACKEND_DEVICE_TYPE_IGPU``: a GPU in host memory.

    Raises NotSupportedError where ggml has no such type yet.
    """
    return _device_type("IGPU")


def ggml_backend_device_type_accel() -> ggml_backend_dev_type:
    """Give ``GGML_BACKEND_DEVICE_TYPE_ACCEL``: what helps the CPU, as a BLAS library does."""
    return _device_type("ACCEL")


def _device_type(name: str) -> ggml_backend_dev_type:
    full = f"GGML_BACKEND_DEVICE_TYPE_{name}"
    try:
        return ggml_backend_dev_type[full]
    except KeyError:
        raise NotSupportedError(f"this ggml has no {full}") from None


if not hasattr(lib, "ggml_backend_cpu_init"):
    from ._gen import capi as _capi
    from ._gen import types as _types

    def ggml_backend_cpu_init() -> _types.ggml_backend:
        """Make a CPU backend, where ggml-cpu is a loadable module; loads that of the package.

        Raises NotSupportedError if there is none.
        """
        device = _capi.ggml_backend_dev_by_type(_device_type("CPU"))
        if device is None:
            load_backends()
            device = _capi.ggml_backend_dev_by_type(_device_type("CPU"))
        if device is None:
            raise NotSupportedError(
                "ggml_backend_cpu_init: ggml-cpu is a loadable module in this build and none is "
                "loaded; ggml_backend_load(path) or ggml_backend_load_all() loads one"
            )
        return _capi.ggml_backend_dev_init(device)

    __all__ += ["ggml_backend_cpu_init"]
