"""Tensor parallelism: meta devices, and the split functions that say how tensors are cut.

`MetaDevice` spreads tensors over several devices as a Python function says that answers with
`SplitState`s; `split_function(device)` tells of a meta device made through `capi` what its function
answered and whether it failed. `policies` are split functions to choose from. `MetaDevice.plan`
says what becomes of a graph before it runs, and `compare` runs it on one device besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import policies
from ._latch import ErrorLatch, SplitFunction
from ._split import SplitAxis, SplitState, TensorInfo

if TYPE_CHECKING:
    from ._compare import Comparison, Difference, compare
    from ._create import split_function
    from .device import MetaDevice
    from .plan import AllReduce, Plan, Planned

__all__ = [
    "AllReduce",
    "Comparison",
    "Difference",
    "ErrorLatch",
    "MetaDevice",
    "Plan",
    "Planned",
    "SplitAxis",
    "SplitFunction",
    "SplitState",
    "TensorInfo",
    "compare",
    "policies",
    "split_function",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import what needs the compiled extension when it is first used: that needs this package."""
    if name == "MetaDevice":
        from .device import MetaDevice

        return MetaDevice
    if name in ("AllReduce", "Plan", "Planned"):
        from . import plan

        return getattr(plan, name)
    if name in ("Comparison", "Difference", "compare"):
        from . import _compare

        return getattr(_compare, name)
    if name == "split_function":
        from ._create import split_function

        return split_function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
