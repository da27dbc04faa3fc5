"""Training: a graph's weights fitted to data, by ggml's optimisers.

`Trainer` fits the weights that `outputs` are made from to a `Dataset`: ``fit``, ``evaluate``,
``predict``, ``save`` and ``load``. `AdamW` and `SGD` are the optimisers. The gradients, the losses
and the steps are ggml's (``ggml-opt.h``); the loop over the data is Python's, so that any array
can be a data set, a seed decides the order, and an exception leaves all as it is between two steps.
"""

from ._dataset import Dataset
from ._optimizers import SGD, AdamW, Optimizer, Schedule
from ._trainer import Trainer

__all__ = ["SGD", "AdamW", "Dataset", "Optimizer", "Schedule", "Trainer"]
