"""The losses: their names, what they need, and their values outside of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..enums import ggml_opt_loss_type
from ._dataset import Dataset

_PREFIX = "GGML_OPT_LOSS_TYPE_"
_ROUNDED = 1e-2  # of the sum of probabilities in half precision


class Loss:
    """One of ggml's losses.

    `name` is one of ``"mean"``, ``"sum"``, ``"cross_entropy"``, ``"mean_squared_error"``.
    """

    def __init__(self, loss: ggml_opt_loss_type | int | str) -> None:
        names = {kind.name.removeprefix(_PREFIX).lower(): kind for kind in ggml_opt_loss_type}
        if isinstance(loss, bool) or not isinstance(loss, (int, str)):
            raise TypeError(f"loss is {loss!r} ({type(loss).__name__}), expected a name")
        if isinstance(loss, int):
            self.type: ggml_opt_loss_type = ggml_opt_loss_type(loss)
        elif loss.lower() in names:
            self.type = names[loss.lower()]
        else:
            raise ValueError(f"loss is {loss!r}, expected one of {', '.join(names)}")
        self.name: str = self.type.name.removeprefix(_PREFIX).lower()
        self.counts: bool = self.name == "cross_entropy"  # how many are classified correctly
        self.needs_labels: bool = self.name in ("cross_entropy", "mean_squared_error")

    def check_labels(self, dataset: Dataset, width: int) -> None:
        """Raise ValueError, or TypeError, for labels that outputs of this width do not go with."""
        labels = dataset.labels
        if labels is None or not self.needs_labels:
            if self.needs_labels:
                raise ValueError(f"the Dataset has no labels, which the loss {self.name} needs")
            if labels is not None:
                raise ValueError(f"the Dataset has labels, which the loss {self.name} ignores")
            return
        n = len(labels)
        if labels.ndim == 1 and self.counts:
            if labels.dtype.kind not in "iub":
                raise TypeError(
                    f"labels has dtype {labels.dtype}, expected integers, the numbers of classes, "
                    f"or shape {(n, width)}"
                )
            strange = np.flatnonzero((labels < 0) | (labels >= width))
            if strange.size:
                at = int(strange[0])
                raise ValueError(f"labels[{at}] is {labels[at]}, expected 0 to {width - 1}")
        elif labels.shape != (n, width) and not (labels.ndim == 1 and width == 1):
            wanted = f"{(n, width)}" + (f" or {(n,)}" if self.counts or width == 1 else "")
            raise ValueError(f"labels has shape {labels.shape}, expected {wanted}")
        elif self.counts:
            sums = labels.reshape(n, width).sum(axis=1, dtype=np.float64)
            strange = np.flatnonzero(~(np.abs(sums - 1) <= _ROUNDED))
            if strange.size:
                at = int(strange[0])
                raise ValueError(
                    f"labels[{at}] has the sum {sums[at]:.6g}, expected 1: ggml's gradient is that "
                    "of probabilities"
                )

    def rows(self, labels: npt.NDArray[Any], width: int) -> npt.NDArray[np.float32]:
        """Labels as ggml wants them, of shape ``(batch, width)``: classes become one-hot rows."""
        if labels.ndim == 1 and self.counts:
            classes = labels.astype(np.intp)
            return np.asarray(classes[:, np.newaxis] == np.arange(width), np.float32)
        return np.ascontiguousarray(labels, np.float32).reshape(-1, width)

    def total(
        self, outputs: npt.NDArray[np.float32], labels: npt.NDArray[np.float32] | None
    ) -> float:
        """The sum of the losses of rows of outputs, whose mean it is but for ``"sum"``."""
        numbers = np.asarray(outputs, np.float64)
        if labels is None:
            return float(numbers.sum() if self.name == "sum" else numbers.mean(axis=1).sum())
        if self.name == "mean_squared_error":
            return float(np.square(numbers - labels).mean(axis=1).sum())
        shifted = numbers - numbers.max(axis=1, keepdims=True)
        logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return float(-(labels * logarithms).sum())

    def correct(
        self, outputs: npt.NDArray[np.float32], labels: npt.NDArray[np.float32] | None
    ) -> int:
        """How many rows are largest where their labels are."""
        assert labels is not None
        return int((outputs.argmax(axis=1) == labels.argmax(axis=1)).sum())
