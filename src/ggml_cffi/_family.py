"""Names of the backend family that are no C functions: they give enumerators."""

from __future__ import annotations

from ._gen.enums import ggml_backend_buffer_usage, ggml_backend_dev_type
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
