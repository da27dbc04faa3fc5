"""Tensor parallelism: meta devices, and the split functions that say how tensors are cut.

`MetaDevice` spreads tensors over several devices as a Python function says that answers with
`SplitState`s; `split_function(device)` tells of a meta device made through `capi` what its function
answered and whether it failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._latch import ErrorLatch, SplitFunction
from ._split import SplitAxis, SplitState, TensorInfo

if TYPE_CHECKING:
    from ._create import split_function
    from .device import MetaDevice

__all__ = [
    "ErrorLatch",
    "MetaDevice",
    "SplitAxis",
    "SplitFunction",
    "SplitState",
    "TensorInfo",
    "split_function",
]


def __getattr__(name: str) -> object:
    """Import what needs the compiled extension when it is first used: that needs this package."""
    if name == "MetaDevice":
        from .device import MetaDevice

        return MetaDevice
    if name == "split_function":
        from ._create import split_function

        return split_function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
