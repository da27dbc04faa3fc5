"""Where to train: a scheduler for whatever a target is."""

from __future__ import annotations

from collections.abc import Iterable

from .._handles import _each
from ..backend import Backend
from ..device import Device, devices
from ..enums import ggml_backend_dev_type
from ..errors import NotSupportedError
from ..scheduler import Scheduler, as_target

_CPU = ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU


def scheduler_for(
    target: Device | Backend | Scheduler | str, n_threads: int | None
) -> tuple[Scheduler, list[Backend | Scheduler]]:
    """A scheduler on the target, and what has been made for it and is to be closed in the end.

    Raises TypeError for what is no target, ValueError for `n_threads` of what has its own,
    NotSupportedError for a meta device.
    """
    target = as_target(target, n_threads)
    if isinstance(target, Scheduler):
        _check_devices(one.device for one in target.backends)
        return target, []
    _check_devices([target.device if isinstance(target, Backend) else target])
    made: list[Backend | Scheduler] = []
    try:
        if isinstance(target, Device):
            target = Backend(target, n_threads)
            made.append(target)
        backends = [target]
        if target.device.type != _CPU:
            backends.append(Backend(next(one for one in devices() if one.type == _CPU)))
            made.append(backends[-1])
        made.append(Scheduler(backends))
    except BaseException:
        _each([one.close for one in reversed(made)])
        raise
    found = made[-1]
    assert isinstance(found, Scheduler)
    return found, made


def _check_devices(found: Iterable[Device]) -> None:
    for one in found:
        if one.type.name.endswith("_META"):
            raise NotSupportedError(f"{one!r}: ggml cannot train on a meta device")
