"""ggml for Python: its whole C API, guarded, and tensor parallelism by a Python split function.

`capi` has every function of ggml under its C name. `Device`, `Backend`, `Buffer`, `MultiBuffer` and
`MetaDevice` are objects over it. `lib` and `ffi` are cffi's raw level.
"""

from . import _loader, capi, diagnostics, enums, errors
from ._raw import FFI, Lib
from .buffer import Buffer, MultiBuffer
from .device import Backend, Device, device, devices
from .errors import (
    AbortError,
    GGMLError,
    GGUFError,
    NotSupportedError,
    SplitError,
    StatusError,
    StatusMemoryError,
)
from .meta import MetaDevice, SplitAxis, SplitState, TensorInfo

ffi: FFI = _loader.ffi
lib: Lib = _loader.lib
__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up when asked for: reading metadata takes a while
        from importlib.metadata import version

        return version("ggml-cffi")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AbortError",
    "Backend",
    "Buffer",
    "Device",
    "GGMLError",
    "GGUFError",
    "MetaDevice",
    "MultiBuffer",
    "NotSupportedError",
    "SplitAxis",
    "SplitError",
    "SplitState",
    "StatusError",
    "StatusMemoryError",
    "TensorInfo",
    "capi",
    "device",
    "devices",
    "diagnostics",
    "enums",
    "errors",
    "ffi",
    "lib",
]
