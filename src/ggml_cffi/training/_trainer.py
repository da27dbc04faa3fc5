"""The trainer: fits weights to data, measures, predicts, saves and loads."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import _kept, capi
from .._handles import Loans, Owned, _each, holding
from .._locks import with_or_without
from .._progress import Bar
from ..backend import Backend, thread
from ..capi import types
from ..device import Device
from ..dtypes import check_range
from ..enums import ggml_opt_loss_type
from ..errors import GGUFError
from ..graph import Compiled, Graph
from ..scheduler import Scheduler
from ..tensor import Tensor, check_numbers
from . import _checkpoint
from ._dataset import Dataset, count
from ._engine import Engine, Moments
from ._losses import Loss
from ._model import Model, graph_of, parameters_of
from ._optimizers import SGD, AdamW, Optimizer
from ._target import scheduler_for

__all__ = ["Trainer"]

_Result = TypeVar("_Result")

Record = dict[str, float]
"""Numbers of an epoch by name: ``loss``, ``accuracy``, ``val_loss``, ``val_accuracy``."""

OnEpoch = Callable[[int, Record], object]
"""Called after each epoch, the first one being 1; training ends where it returns False."""


class _Epoch:
    """One under way, where ggml counts the data: so it can be told after an interrupt as well.

    `first` are the steps made before, and `size` data make one.
    """

    def __init__(self, engine: Engine, first: int, size: int) -> None:
        self.engine, self.first, self.size = engine, first, size
        self.result = capi.ggml_opt_result_init()
        self.free = weakref.finalize(self, capi.ggml_opt_result_free, self.result)
        self.free.atexit = False

    def steps(self) -> int:
        """The steps made, with those before."""
        return self.first + self.engine.settle(self.result) // self.size


class _Store:
    """What a trainer has of ggml."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.engine: Engine | None = None
        self.forward: Compiled | None = None
        self.epoch: _Epoch | None = None  # the one whose steps have to be counted
        self.retired: list[Engine] = []  # somebody keeps arrays that share their memory
        self.own: list[Backend | Scheduler] = []

    def retire(self) -> None:
        """Free the engine, or with all else where its memory has to stay until then."""
        engine = self.engine
        if engine is None:
            return
        self.retired.append(engine)  # first: whatever comes between, it is freed in the end
        self.engine = None
        if not engine.kept:
            engine.free()
            self.retired.remove(engine)

    def free(self) -> None:
        with self.lock:
            engines = self.retired if self.engine is None else [self.engine, *self.retired]
            _each(
                [
                    *(engine.free for engine in engines),
                    *([] if self.forward is None else [self.forward.close]),
                    *(one.close for one in reversed(self.own)),
                ]
            )


class Trainer(Owned[_Store]):
    """Fits the weights that `outputs` are made from, so that a loss over a `Dataset` gets small.

    `inputs` is a tensor without memory, of shape ``(batch, ...)`` (`Context.input`); `outputs` are
    float32 of shape ``(batch, k)``, made from it and from weights that have memory. The weights are
    changed where they lie: graphs that are compiled from them see each step. `parameters` are those
    that are trained, by default all float32 tensors with memory that `outputs` are made from; name
    them where some of those are constants.

    `loss` is the mean over the data of one of these, or ggml's enumerator:

    - ``"cross_entropy"``: of softmax(outputs) and labels: classes, or probabilities, whose sum is 1
    - ``"mean_squared_error"``: of outputs and labels, the mean over k
    - ``"mean"``: of the outputs themselves, which are a loss of your own; there are no labels
    - ``"sum"``: likewise, but the sum over all data of a step, which `optimizer` then sees

    `optimizer` is an `AdamW`, the default, or an `SGD`. `target` is what trains: a device, a
    backend, a scheduler or a device's name, with `n_threads` if it is a device. `seed` decides the
    order of the data: the same one gives the same weights on the same machine.

    ggml has room for 2,048 results, gradients and steps together, and none for training on a meta
    device. Closing a trainer leaves the weights as they are. Several threads may use one: each
    waits for the others. While one does, closing it from another raises ValueError.

    Raises ValueError for tensors that are not as above and for a parameter that `outputs` are not
    made from, NotSupportedError for a meta device, for what ggml builds no gradients of (its own
    text says where it gave up), for a gradient that its kernels read wrongly (of a parameter that
    is used transposed, as in ``x @ w``), and for a graph that is too large, MemoryError where the
    device has too little memory.
    """

    def __init__(
        self,
        inputs: Tensor,
        outputs: Tensor,
        loss: ggml_opt_loss_type | int | str = "cross_entropy",
        optimizer: Optimizer | None = None,
        parameters: Iterable[Tensor] | None = None,
        target: Device | Backend | Scheduler | str = "CPU",
        n_threads: int | None = None,
        seed: int = 0,
    ) -> None:
        optimizer = AdamW() if optimizer is None else optimizer
        if not isinstance(optimizer, (AdamW, SGD)):
            raise TypeError(f"optimizer is {optimizer!r}, expected an AdamW or an SGD")
        kind = Loss(loss)
        graph = graph_of(inputs, outputs)
        with holding(graph._contexts):
            chosen = parameters_of(graph, parameters)
            self._model = Model(inputs, outputs, chosen, kind, optimizer)
            self._names = [one.name for one in chosen]  # ggml names those of a graph without one
            self._width = outputs.shape[1]
            self._dtype = inputs.dtype
            self._batch = inputs.shape[0]
            self._seed = count("seed", seed, 0)
            self._steps = self._epochs = 0
            self._moments: dict[int, Moments] = {}
            self._busy = False
            self.history: dict[str, list[float]] = {}
            store = _Store()
            self._lock = store.lock
            self._scheduler, store.own = scheduler_for(target, n_threads)
            with self._lock:  # who closes what it needs finds it in use, from here on
                super().__init__(store, _Store.free, (*graph._contexts, self._scheduler))
                self._lent = Loans(self._resource)
                try:
                    self._with_moments = self._compute(lambda: self._engine(1)).with_moments
                except BaseException:
                    self.close()
                    raise

    # ---- what it is

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that are trained."""
        return self._model.parameters

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser."""
        return self._model.optimizer

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return self._model.loss.name

    @property
    def steps(self) -> int:
        """How many steps the optimiser has made."""
        return self._steps

    @property
    def epochs(self) -> int:
        """How many epochs have been completed."""
        return self._epochs

    @property
    def batch(self) -> int:
        """How many data are computed at a time, as `inputs` says."""
        return self._batch

    # ---- training

    def fit(
        self,
        dataset: Dataset,
        epochs: int = 1,
        batch_size: int | None = None,
        *,
        validation_split: float = 0.0,
        validation_data: Dataset | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        on_epoch: OnEpoch | None = None,
        progress: bool | None = None,
    ) -> dict[str, list[float]]:
        """Train for so many epochs, going through all data in each; gives the history of them.

        `batch_size` data make a step of the optimiser, a multiple of the batch of `inputs`, which
        it is by default: gradients of several batches are added up. It must divide the data for
        training, unless `drop_last` leaves out the rest in each epoch, another one each time where
        the order is shuffled.

        For validation there is `validation_data`, or the last part of the data set, the fraction
        `validation_split` of it (0 to below 1), which is not trained with.

        The history has a number for each epoch: ``loss``, the mean over the epoch while weights
        change, ``accuracy`` (of the cross entropy only, 0 to 1), and ``val_loss`` and
        ``val_accuracy`` after it where there is validation. `history` of the trainer has those of
        all calls, NaN where one had no validation. ``on_epoch(epoch, numbers)`` is told them, and
        ends training by returning False.

        A bar on stderr shows the progress with tqdm if it is installed, stderr is a terminal and it
        takes over a second; ``progress=False``: never, ``progress=True``: also where it is none.

        After an exception, an interrupt among them, the weights are those of the last step, and
        training can go on; the epoch that has not been completed is done from its begin then.

        Raises ValueError and TypeError for data, labels and batch sizes that do not fit, IndexError
        for data that are indices out of range, OverflowError for integers that the type of `inputs`
        cannot hold, AbortError where ggml gives up, and what `on_epoch` and a schedule raise.
        """
        with self._using():
            self._check_usable()
            self._check(dataset)
            epochs = count("epochs", epochs)
            training, validation = _split(dataset, validation_split, validation_data)
            if validation is not None:
                self._check(validation)
            size = self._batch_size(batch_size)
            n_steps = len(training) // size
            rest = len(training) % size
            if not n_steps or (rest and not drop_last):
                raise ValueError(
                    f"there are {len(training)} data for training, expected a multiple of "
                    f"batch_size {size}"
                    + (f"; drop_last=True leaves out {rest} in each epoch" if n_steps else "")
                )
            found: dict[str, list[float]] = {}
            with Bar(epochs * n_steps * (size // self._batch), progress, "batch") as bar:
                for number in range(1, epochs + 1):
                    bar.describe(f"epoch {number}/{epochs}")
                    record = self._epoch(training, size, n_steps, shuffle, bar)
                    if validation is not None:
                        told = self.evaluate(validation)
                        record |= {f"val_{name}": value for name, value in told.items()}
                    self._epochs += 1
                    _append(found, record)
                    _append(self.history, record)
                    bar.show(record)
                    if on_epoch is not None and on_epoch(self._epochs, dict(record)) is False:
                        break
            return found

    def _epoch(self, dataset: Dataset, size: int, n_steps: int, shuffle: bool, bar: Bar) -> Record:
        """Train with all data once. An exception leaves the engine to be made anew."""
        self._settle()
        store, first = self.handle, self._steps
        rng = np.random.default_rng([self._seed, self._epochs])
        order = dataset.order(rng) if shuffle else np.arange(len(dataset))
        engine = self._engine(size // self._batch)
        store.epoch = epoch = _Epoch(engine, first, size)
        result = epoch.result
        engine.broken = True  # until all has been counted, whatever comes between
        try:
            for step in range(n_steps):
                end = (step + 1) * size
                for at in range(step * size, end, self._batch):
                    data, labels = self._rows(dataset, order[at : at + self._batch])
                    last = at + self._batch == end
                    self._compute(partial(engine.add, data, labels, result, first + step, last))
                    if bar.update(1):
                        bar.show(self._record(result))
            record = self._record(result)
        finally:  # an interrupt comes when ggml is done with the step
            try:
                self._settle()
            except BaseException:  # one more interrupt, or the first one
                self._settle()
                raise
            if store.epoch is epoch:  # of a signal's handler another one may have begun
                store.epoch = None
            epoch.free()
        engine.broken = False
        return record

    def _settle(self) -> None:
        """Note how many steps have been made of an epoch; twice is fine."""
        epoch = self.handle.epoch
        if epoch is not None:
            self._steps = epoch.steps()

    def _engine(self, period: int) -> Engine:
        """One that makes a step of so many batches; a new one where another is needed."""
        store = self.handle
        old = store.engine
        if old is not None and old.period == period and not old.broken:
            return old
        if old is not None:
            self._moments = old.moments()
            store.retire()
        made = Engine(self._model, self._scheduler, period, self._steps)
        try:
            if self._moments:
                made.set_moments(self._moments)
        except BaseException:
            made.free()
            raise
        store.engine = made  # last: what is there has its moments
        return made

    def _record(self, result: types.ggml_opt_result) -> Record:
        found = {"loss": capi.ggml_opt_result_loss(result)[0]}
        if self._model.loss.counts:
            found["accuracy"] = capi.ggml_opt_result_accuracy(result)[0]
        return found

    # ---- using what has been trained

    def evaluate(self, dataset: Dataset) -> Record:
        """The ``loss`` over a data set, and the ``accuracy`` (0 to 1) of the cross entropy.

        Any number of data: what is missing of the last batch is filled up with zeros, whose outputs
        are not looked at. The loss is computed from the outputs in float64, by its definition.

        Raises as `fit` does for data and labels that do not fit, ValueError where there are none.
        """
        with self._using():
            self._check_usable()
            self._check(dataset)
            if not len(dataset):
                raise ValueError("the Dataset is empty: there is nothing to evaluate")
            loss = self._model.loss
            total, correct = 0.0, 0
            for begin, outputs in self._outputs(dataset.data):
                _, labels = self._rows(dataset, slice(begin, begin + len(outputs)))
                total += loss.total(outputs, labels)
                correct += loss.correct(outputs, labels) if loss.counts else 0
            found = {"loss": total if loss.name == "sum" else total / len(dataset)}
            if loss.counts:
                found["accuracy"] = correct / len(dataset)
            return found

    def predict(self, data: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The outputs for data of shape ``(n, ...)``, as float32 of shape ``(n, k)``, for any n.

        Of a classifier they are what softmax makes probabilities of; the class is
        ``outputs.argmax(axis=1)``. Raises as `fit` does for data that do not fit.
        """
        with self._using():
            self._check_usable()
            array = Dataset(data).data
            self._check(Dataset(array), labels=False)
            found = np.empty((len(array), self._width), np.float32)
            for begin, outputs in self._outputs(array):
                found[begin : begin + len(outputs)] = outputs
            return found

    def _outputs(self, data: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Where each batch begins, and its outputs."""
        store = self.handle
        if store.forward is None:
            store.forward = Graph(self._model.outputs).compile(self._scheduler)
        forward = store.forward
        for begin in range(0, len(data), self._batch):
            rows = data[begin : begin + self._batch]
            n = len(rows)
            if n < self._batch:
                rows = np.concatenate(
                    [rows, np.zeros((self._batch - n, *rows.shape[1:]), rows.dtype)]
                )
            outputs = self._compute(partial(forward.run, **{self._model.inputs.name: rows}))
            yield begin, next(iter(outputs.values()))[:n]

    # ---- files

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer_state: bool = True,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Write the parameters to a GGUF file, by their names, and what it takes to go on with.

        That is the number of steps and epochs and, of AdamW, its running means, twice as much as
        the weights; without `optimizer_state` none of it. Tensors and keys of it begin with
        ``training.``. `metadata` is written as `GGUFWriter.update` does. The file is whole, or what
        it was before.

        Raises ValueError for parameters without a name or with the same one, OSError.
        """
        with self._using():
            self._check_usable()
            state = None
            if optimizer_state:
                moments = self._current_moments()
                state = _checkpoint.State(self._name, self._steps, self._epochs, moments)
            _checkpoint.save(path, self._named(), state, metadata or {})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read the parameters from a GGUF file, by their names; of any type, as float32.

        With the state that `save` wrote, training goes on as if it had never been interrupted, with
        AdamW but for rounding; without one, the optimiser begins anew. `history` stays as it is.

        Raises GGUFError where the file lacks a parameter, has another shape of it or the state of
        another optimiser, OSError where it cannot be read; then nothing has changed, nor has it
        after an interrupt that comes before all weights are written.
        """
        with self._using():
            self._check_usable()
            numbers, state = _checkpoint.load(path, self._named())
            if state is None:
                state = _checkpoint.State(self._name, 0, 0, {})
            elif state.optimizer != self._name:
                raise GGUFError(
                    f"{os.fspath(path)}: the state is that of {state.optimizer}, "
                    f"expected {self._name}"
                )
            elif state.moments.keys() != self._with_moments and (state.steps or state.moments):
                raise GGUFError(f"{os.fspath(path)}: the state lacks parameters, or has others")
            self._restart(numbers, state)

    def _named(self) -> dict[str, Tensor]:
        _checkpoint.check_names(self._names)
        return dict(zip(self._names, self.parameters, strict=True))

    def _current_moments(self) -> dict[int, Moments]:
        engine = self.handle.engine
        return self._moments if engine is None else engine.moments()

    def _restart(self, numbers: list[npt.NDArray[Any]], state: _checkpoint.State) -> None:
        """Go on with these: all of them, or none where an exception comes before."""
        store = self.handle
        period = 1 if store.engine is None else store.engine.period
        before = self._steps, self._epochs, self._current_moments()
        weights = [one.numpy(copy=True) for one in self.parameters]
        self._moments = before[2]
        store.retire()
        store.epoch = None
        try:
            self._set_weights(numbers)
            self._steps, self._epochs, self._moments = state.steps, state.epochs, state.moments
        except BaseException:
            self._steps, self._epochs, self._moments = before
            self._set_weights(weights)
            raise
        self._engine(period)

    def _set_weights(self, numbers: list[npt.NDArray[Any]]) -> None:
        for parameter, array in zip(self.parameters, numbers, strict=True):
            parameter.set(array)

    # ---- closing

    def _using(self) -> threading.RLock:
        """The lock, for one thread at a time; then `_check_usable` once more."""
        self.handle  # noqa: B018 # before the lock, which a fork may have copied as it was held
        if thread.kernels:  # on another thread, maybe, than the one that has the lock
            self._check_idle()
        return self._lock

    def _check_usable(self) -> None:
        """Raises where it is closed, by another thread meanwhile, or computes."""
        self.handle  # noqa: B018
        self._check_idle()
        self._settle()

    def _check_idle(self) -> None:
        if self._busy:
            raise ValueError("the Trainer computes: what is called from there cannot use it")

    def _compute(self, function: Callable[[], _Result]) -> _Result:
        self.handle  # noqa: B018 # raises where a callback has closed it
        since = _kept.newest()
        try:
            self._busy = True
            return function()
        except BaseException:
            _kept.lend(self._lent, since)
            raise
        finally:
            self._busy = False

    def _close(self) -> None:
        # to wait would be for ever where who uses it waits for a lock of who closes it
        with_or_without(self._lock, self._close_if)

    def _close_if(self, free: bool) -> None:
        if (not free or self._busy) and not self.closed:
            raise ValueError(f"the Trainer {'computes' if free else 'is in use'}: it stays open")
        super()._close()

    # ---- checks

    @property
    def _name(self) -> str:
        return capi.ggml_opt_optimizer_name(self._model.optimizer.type) or ""

    def _batch_size(self, batch_size: int | None) -> int:
        size = self._batch if batch_size is None else count("batch_size", batch_size)
        if size % self._batch:
            raise ValueError(
                f"batch_size is {size}, expected a multiple of {self._batch}, the batch of inputs"
            )
        return size

    def _check(self, dataset: Dataset, labels: bool = True) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(f"a {type(dataset).__name__} was given, expected a Dataset")
        inputs, data = self._model.inputs, dataset.data
        if data.shape[1:] != inputs.shape[1:]:
            wanted = ", ".join(map(str, ("n", *inputs.shape[1:])))
            raise ValueError(f"data has shape {data.shape}, expected ({wanted})")
        if len(data):
            row = np.broadcast_to(data[:1], inputs.shape)
            check_numbers(inputs, row, "same_kind")
        if labels:
            self._model.loss.check_labels(dataset, self._width)

    def _rows(
        self, dataset: Dataset, chosen: npt.NDArray[np.int64] | slice
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
        rows = dataset.data[chosen]
        check_range(rows, self._dtype, self._model.inputs)
        data = np.ascontiguousarray(rows, self._dtype)
        labels = dataset.labels
        return data, None if labels is None else self._model.loss.rows(labels[chosen], self._width)

    def __repr__(self) -> str:
        if self.closed:
            return "<Trainer closed>"
        return f"<Trainer of {len(self.parameters)} parameters after {self._steps} steps>"


def _append(history: dict[str, list[float]], record: Record) -> None:
    """One more epoch: NaN for what only others have."""
    n = max(map(len, history.values()), default=0)
    for name in dict.fromkeys([*history, *record]):
        numbers = history.setdefault(name, [])
        numbers += [math.nan] * (n - len(numbers))  # also where an interrupt came in between
        numbers.append(record.get(name, math.nan))


def _split(
    dataset: Dataset, fraction: float, given: Dataset | None
) -> tuple[Dataset, Dataset | None]:
    """The data for training, and those for validation."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float, np.number)):
        raise TypeError(f"validation_split is {fraction!r}, expected a number")
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_split is {fraction}, expected 0 to below 1")
    if not fraction:
        return dataset, given
    if given is not None:
        raise ValueError("both validation_split and validation_data were given")
    n = round(len(dataset) * float(fraction))
    if not n:
        raise ValueError(f"validation_split is {fraction}: that is none of {len(dataset)} data")
    return dataset[: len(dataset) - n], dataset[len(dataset) - n :]
