"""Trained weights, and the optimiser's state, as a GGUF file.

The parameters are tensors under their own names. What else there is to go on with has keys and
tensors that begin with ``training.``: ``training.optimizer`` ("adamw" or "sgd"), ``training.steps``
and ``training.epochs`` (uint64), and for AdamW ``training.m.NAME`` and ``training.v.NAME``; NAME is
the parameter's number where the name would be too long for the format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import GGUFError
from ..gguf import GGUFFile, GGUFWriter
from ..tensor import Tensor
from ._engine import Moments

PREFIX = "training."
_MAX_NAME = 63  # bytes of a tensor's name


class State(NamedTuple):
    """What an optimiser has learnt, by the numbers of the parameters."""

    optimizer: str
    steps: int
    epochs: int
    moments: dict[int, Moments]


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError where a parameter has no name, or that of another."""
    for number, name in enumerate(names):
        if not name:
            raise ValueError(f"parameter {number} has no name, by which it is saved")
        if name in names[:number]:
            raise ValueError(f"two parameters have the name {name!r}")
        if name.startswith(PREFIX):
            raise ValueError(f"the parameter's name {name!r} begins with {PREFIX!r}")


def _name(kind: str, number: int, name: str) -> str:
    full = f"{PREFIX}{kind}.{name}"
    return full if len(full.encode()) <= _MAX_NAME else f"{PREFIX}{kind}.{number}"


def save(
    path: str | os.PathLike[str],
    parameters: Mapping[str, Tensor],
    state: State | None,
    metadata: Mapping[str, object],
) -> None:
    """Write parameters and state."""
    names = list(parameters)
    with GGUFWriter(path) as file:
        file.update(metadata)
        for name, one in parameters.items():
            file.add_tensor(name, one)
        if state is None:
            return
        file.set(f"{PREFIX}optimizer", state.optimizer)
        file.set(f"{PREFIX}steps", state.steps, "uint64")
        file.set(f"{PREFIX}epochs", state.epochs, "uint64")
        for number, moments in state.moments.items():
            for kind, numbers in moments._asdict().items():
                file.add_tensor(_name(kind, number, names[number]), numbers)


def load(
    path: str | os.PathLike[str], parameters: Mapping[str, Tensor]
) -> tuple[list[npt.NDArray[Any]], State | None]:
    """The parameters' numbers, and the state if the file has one. Nothing is written.

    Raises GGUFError for a file that does not fit the parameters.
    """
    with GGUFFile(path) as file:
        numbers = [_read(file, name, one.shape) for name, one in parameters.items()]
        optimizer = file.metadata.get(f"{PREFIX}optimizer")
        if optimizer is None:
            return numbers, None
        moments = {}
        for number, (name, one) in enumerate(parameters.items()):
            keys = [_name(kind, number, name) for kind in Moments._fields]
            if any(key in file.tensors for key in keys):
                m, v = (_read(file, key, one.shape) for key in keys)
                moments[number] = Moments(m, v)
        counts = [_count(file, key) for key in ("steps", "epochs")]
        return numbers, State(str(optimizer), counts[0], counts[1], moments)


def _read(file: GGUFFile, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if name not in file.tensors:
        raise GGUFError(f"{file.name}: there is no tensor {name!r}")
    found = file.tensors[name]
    if found.shape != (shape or (1,)) and found.shape != shape:
        raise GGUFError(f"{file.name}: tensor {name!r} has shape {found.shape}, expected {shape}")
    return np.array(found.numpy(), np.float32).reshape(shape)


def _count(file: GGUFFile, key: str) -> int:
    value = file.metadata.get(PREFIX + key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GGUFError(f"{file.name}: {PREFIX}{key} is {value!r}, expected a count")
    return value
