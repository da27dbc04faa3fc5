"""The meta device: several devices that act as one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._handles import Closing
from ..capi import types
from ..device import Device, Shared, device
from ._create import create
from ._latch import SplitCallable

if TYPE_CHECKING:
    from ..graph import Graph
    from .plan import Plan


class MetaDevice(Device, Closing):
    """A device that spreads tensors over several, as a Python function says.

    `devices` are 1 to 16 devices, as objects, names or pointers; the same one may be named several
    times, none may be meta. `split_fn(tensor_info, n_devs)` is asked once for each weight, when it
    is allocated and on the thread that does it, and returns a `SplitState` or a mapping with
    `axis`, `ne`, `n_segments` and `nr`.

    If it raises or its answer is invalid: with `on_error="mirror"` the error is kept (`error`),
    this and all further tensors are mirrored, and it is not called again; with "raise" the call
    that asked raises a SplitError whose cause is the error. KeyboardInterrupt and SystemExit come
    out of that call in both modes.

    ggml never frees a meta device. Closing this object drops the function and what it holds; what
    was allocated stays usable.

    Raises ValueError and TypeError for a wrong number of devices, for what is no device or a meta
    device, for what is no function, and for another `on_error`.
    """

    def __init__(
        self,
        devices: Sequence[Device | str | types.ggml_backend_device],
        split_fn: SplitCallable,
        on_error: str = "mirror",
    ) -> None:
        if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
            raise TypeError(f"devices is {devices!r}, expected a sequence of devices or names")
        found = [device(item) if isinstance(item, str) else item for item in devices]
        handle, self._function = create(found, split_fn, on_error)
        self._devices = tuple(item if isinstance(item, Device) else Device(item) for item in found)
        super().__init__(handle)
        self._shared = Shared(handle)
        # nobody can use it any more: its devices' backends may be unloaded
        weakref.finalize(self, self._function.when_closed).atexit = False

    @property
    def handle(self) -> types.ggml_backend_device:
        """The pointer, for `capi`. Raises ValueError once it, or one of its devices, is closed."""
        if self._function.closed:
            raise ValueError("the MetaDevice is closed")
        for child in self._devices:
            _ = child.handle  # a worker's is closed with the connection
        return super().handle

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that tensors are spread over."""
        return self._devices

    def plan(self, graph: Graph, mend: bool = True) -> Plan:
        """How each tensor of a graph is split here, what is added up, and the memory that it takes.

        It is what `Graph.compile` does on this device: nothing is computed. Where ggml would give
        wrong numbers but for a copy (``ggml_cont``) of a tensor, such copies are put in; with
        `mend` False that is an error as well.

        The weights must have their memory: `Context.allocate` comes first. What has none is an
        input, which is mirrored.

        Raises SplitError, which names the operation and the reason, for what cannot be split, and
        TypeError for what is no Graph.
        """
        from .plan import plan

        return plan(self, graph, mend)

    @property
    def error(self) -> Exception | None:
        """The error of the split function that made everything since mirrored; None if none did."""
        return self._function.error

    @property
    def error_tensor(self) -> str | None:
        """The name of the tensor that the split function failed at."""
        return self._function.tensor_name

    @property
    def name(self) -> str:
        """The names of the devices: ggml's own name for it is empty."""
        return f"Meta({','.join(child.name for child in self._devices)})"

    @property
    def description(self) -> str:
        """The descriptions of the devices."""
        return f"Meta({','.join(child.description for child in self._devices)})"

    @property
    def closed(self) -> bool:
        """Whether the split function has been dropped."""
        return self._function.closed

    def close(self) -> None:
        """Drop the split function and what it holds. Closing twice is fine."""
        self._function.close()

    def __repr__(self) -> str:
        return "<MetaDevice closed>" if self.closed else super().__repr__()
