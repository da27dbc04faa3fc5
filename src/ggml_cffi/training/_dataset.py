"""Data and labels, in step."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import as_array

__all__ = ["Dataset"]


class Dataset:
    """Data of shape ``(n, ...)``, and a label for each if the loss needs them.

    `labels` are what the outputs are compared with, of shape ``(n, k)`` for outputs of shape
    ``(batch, k)``; or of shape ``(n,)``: class numbers from 0 to k - 1 for the cross entropy, and
    numbers where k is 1. Nothing is copied: arrays may be memory-mapped and larger than memory.

    `shard` data that lie next to each other stay so when the order is shuffled: reading from a file
    is faster with more than 1. ``len(dataset)`` is n, ``dataset[a:b]`` a part that shares memory.

    Raises ValueError for data without an axis, for another number of labels and for a `shard` below
    1, TypeError for what is no array of real numbers.
    """

    def __init__(
        self, data: npt.ArrayLike, labels: npt.ArrayLike | None = None, shard: int = 1
    ) -> None:
        self.data: npt.NDArray[Any] = _numbers("data", data)
        self.labels: npt.NDArray[Any] | None = None
        if labels is not None:
            self.labels = _numbers("labels", labels)
            if len(self.labels) != len(self.data):
                raise ValueError(
                    f"labels has shape {self.labels.shape} and data {self.data.shape}: expected as "
                    "many labels as data"
                )
        self.shard: int = count("shard", shard)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> Dataset:
        if not isinstance(part, slice):
            raise TypeError(f"a Dataset is cut by a slice, not by {part!r}")
        labels = None if self.labels is None else self.labels[part]
        return Dataset(self.data[part], labels, self.shard)

    def order(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """The numbers 0 to n - 1 in a random order, shard by shard."""
        n = len(self)
        shards = rng.permutation(-(-n // self.shard))
        numbers = (shards[:, np.newaxis] * self.shard + np.arange(self.shard)).reshape(-1)
        return numbers[numbers < n]

    def __repr__(self) -> str:
        labels = "" if self.labels is None else f", labels {self.labels.shape}"
        return f"<Dataset {self.data.shape}{labels}>"


def count(name: str, value: object, least: int = 1) -> int:
    """An integer of `least` or more. Raises TypeError and ValueError for anything else."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type] # it is asked what it is
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} is {value!r} ({kind}), expected an int") from None
    if number < least:
        raise ValueError(f"{name} is {number}, expected {least} or more")
    return number


def _numbers(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asanyarray(value)  # a memory map stays one
    as_array(array, name)
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}, expected real numbers")
    if not array.ndim:
        raise ValueError(f"{name} is a single number, expected an array of shape (n, ...)")
    return array
