"""ggml for Python: its whole C API, guarded, and tensor parallelism by a Python split function.

Objects stand for what ggml has: `Context` and `Tensor`, `ops` and Python's operators, `Graph` and
`Compiled`, `Device`, `Backend` and `Scheduler`, `Buffer` and `MultiBuffer`, `GGUFFile` and
`GGUFWriter`, `MetaDevice` with its `SplitState`s; `quantize` and `dequantize` convert arrays. They
have no pointers that could go wrong. `capi` has every function of ggml under its C name; `lib` and
`ffi` are cffi's raw level.
"""

from typing import TYPE_CHECKING

from . import _loader, capi, diagnostics, enums, errors, logs
from ._raw import FFI, Lib
from .backend import Backend
from .buffer import Buffer, MultiBuffer
from .device import Device, device, devices
from .errors import (
    AbortError,
    AbortMemoryError,
    GGMLError,
    GGUFError,
    NotSupportedError,
    OperandError,
    RPCError,
    SplitError,
    StatusError,
    StatusMemoryError,
)
from .meta import MetaDevice, SplitAxis, SplitState, TensorInfo

if TYPE_CHECKING:
    from . import dtypes, gguf, meta, ops, quants, rpc, training
    from .context import Context
    from .gguf import GGUFFile, GGUFWriter
    from .graph import Compiled, Graph
    from .loading import load_backend, unload_backend
    from .quants import dequantize, quantize
    from .scheduler import Scheduler
    from .tensor import Tensor

ffi: FFI = _loader.ffi
lib: Lib = _loader.lib
__version__: str

# Imported when asked for: `import ggml_cffi` is for those too who want capi alone.
_MODULES = ("dtypes", "gguf", "meta", "ops", "quants", "rpc", "training")
_HOMES = {
    "Compiled": "graph",
    "Context": "context",
    "GGUFFile": "gguf",
    "GGUFWriter": "gguf",
    "Graph": "graph",
    "Scheduler": "scheduler",
    "Tensor": "tensor",
    "dequantize": "quants",
    "load_backend": "loading",
    "quantize": "quants",
    "unload_backend": "loading",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":  # looked up when asked for: reading metadata takes a while
        from importlib.metadata import version

        return version("ggml-cffi")
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


__all__ = [
    "AbortError",
    "AbortMemoryError",
    "Backend",
    "Buffer",
    "Compiled",
    "Context",
    "Device",
    "GGMLError",
    "GGUFError",
    "GGUFFile",
    "GGUFWriter",
    "Graph",
    "MetaDevice",
    "MultiBuffer",
    "NotSupportedError",
    "OperandError",
    "RPCError",
    "Scheduler",
    "SplitAxis",
    "SplitError",
    "SplitState",
    "StatusError",
    "StatusMemoryError",
    "Tensor",
    "TensorInfo",
    "capi",
    "dequantize",
    "device",
    "devices",
    "diagnostics",
    "dtypes",
    "enums",
    "errors",
    "ffi",
    "gguf",
    "lib",
    "load_backend",
    "logs",
    "meta",
    "ops",
    "quantize",
    "quants",
    "rpc",
    "training",
    "unload_backend",
]
