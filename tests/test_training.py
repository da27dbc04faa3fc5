"""Training: losses, gradients and steps against NumPy and PyTorch; what comes out of an exception.

The network, in ggml and in NumPy, is in _network.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import itertools
import math
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _network import BATCH, N_IN, N_OUT, Network, Reference, data, one_hot
from _release import needs, needs_meta

from ggml_cffi import (
    AbortError,
    Backend,
    Context,
    GGUFFile,
    Graph,
    MetaDevice,
    NotSupportedError,
    Scheduler,
    SplitState,
    Tensor,
    _handles,
    _progress,
    capi,
    device,
    diagnostics,
    ops,
    quants,
)
from ggml_cffi.enums import ggml_opt_loss_type, ggml_type
from ggml_cffi.training import SGD, AdamW, Dataset, Trainer, _engine, _target

X, CLASSES = data()
LOSSES = ("cross_entropy", "mean_squared_error", "mean", "sum")
OPTIMIZERS = [
    SGD(0.05),
    SGD(0.05, weight_decay=0.1),
    AdamW(0.01),
    AdamW(0.02, beta1=0.8, beta2=0.95, epsilon=1e-4, weight_decay=0.1),
]


@pytest.fixture
def ctx() -> Any:
    with Context() as context:
        yield context


def trainer(network: Network, **options: Any) -> Trainer:
    options.setdefault("n_threads", None if "target" in options else 1)
    return Trainer(network.x, network.y, **options)


def labels_for(loss: str) -> Any:
    """Labels, and what they are to the reference."""
    if loss == "cross_entropy":
        return CLASSES, one_hot(CLASSES)
    if loss == "mean_squared_error":
        made = np.random.default_rng(2).standard_normal((len(X), N_OUT))
        return made, made
    return None, np.zeros((len(X), N_OUT))


def check(network: Network, reference: Reference, rtol: float = 1e-4) -> None:
    for name, found in network.numbers().items():
        np.testing.assert_allclose(found, reference.weights[name], rtol, 1e-5, err_msg=name)


# ---- numbers


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_numpy(ctx: Context, loss: str, optimizer: Any) -> None:
    network, reference = Network(ctx), Reference()
    labels, rows = labels_for(loss)
    made = trainer(network, loss=loss, optimizer=optimizer)
    for epoch in range(3):
        losses = []
        for begin in range(0, len(X), BATCH):
            batch = X[begin : begin + BATCH], rows[begin : begin + BATCH]
            losses.append(reference.loss(loss, *batch)[0])
            reference.step(loss, *batch, optimizer, optimizer.learning_rate)
        history = made.fit(Dataset(X, labels), shuffle=False)
        expected = sum(losses) if loss == "sum" else np.mean(losses)
        assert history["loss"] == [pytest.approx(expected, rel=1e-4)]
        assert made.steps == reference.steps == 6 * (epoch + 1)
        check(network, reference)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_numpy(ctx: Context, loss: str) -> None:
    """Of several batches together, which a step of SGD tells."""
    network, reference = Network(ctx), Reference()
    labels, rows = labels_for(loss)
    before = network.numbers()
    gradients = reference.gradients(loss, X, rows)
    rate = 0.25
    trainer(network, loss=loss, optimizer=SGD(rate)).fit(Dataset(X, labels), batch_size=len(X))
    for name, after in network.numbers().items():
        found = (before[name] - after) / rate
        np.testing.assert_allclose(found, gradients[name], 1e-3, 1e-4, err_msg=name)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[1], OPTIMIZERS[3]], ids=repr)
def test_gradients_of_several_batches_make_a_step(ctx: Context, optimizer: Any) -> None:
    network, reference = Network(ctx), Reference()
    made = trainer(network, optimizer=optimizer)
    for size in (2 * BATCH, 2 * BATCH, BATCH, 3 * BATCH):  # each begins a context of its own
        for begin in range(0, len(X), size):
            batch = X[begin : begin + size], one_hot(CLASSES)[begin : begin + size]
            reference.step("cross_entropy", *batch, optimizer, optimizer.learning_rate)
        made.fit(Dataset(X, CLASSES), batch_size=size, shuffle=False)
    assert made.steps == reference.steps == 3 + 3 + 6 + 2
    check(network, reference)


def test_labels_may_be_probabilities(ctx: Context) -> None:
    network, reference = Network(ctx), Reference()
    rows = np.random.default_rng(5).dirichlet(np.ones(N_OUT), len(X))
    made = trainer(network, optimizer=SGD(0.1))
    expected = reference.loss("cross_entropy", X, rows)[0]
    assert made.evaluate(Dataset(X, rows))["loss"] == pytest.approx(expected, rel=1e-5)
    made.fit(Dataset(X[:BATCH], rows[:BATCH]))
    reference.step("cross_entropy", X[:BATCH], rows[:BATCH], made.optimizer, 0.1)
    check(network, reference)


def test_a_learning_rate_that_is_a_function_of_the_step(ctx: Context) -> None:
    network, reference = Network(ctx), Reference()
    asked = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.0 if step == 0 else 0.1 / step  # ggml itself refuses 0

    made = trainer(network, optimizer=AdamW(rate))
    made.fit(Dataset(X, CLASSES), 2, shuffle=False)
    for step in range(12):
        begin = step * BATCH % len(X)
        batch = X[begin : begin + BATCH], one_hot(CLASSES)[begin : begin + BATCH]
        reference.step("cross_entropy", *batch, made.optimizer, 0.1 / step if step else 0)
    assert sorted(set(asked)) == list(range(12))
    check(network, reference)


@pytest.mark.slow
def test_steps_are_those_of_pytorch(ctx: Context, need: Any) -> None:
    need(importlib.util.find_spec("torch"), "PyTorch")
    import torch

    for kind, optimizer in itertools.product(LOSSES[:2], OPTIMIZERS):
        with Context() as other:
            network = Network(other)
            theirs = {n: torch.nn.Parameter(torch.tensor(w)) for n, w in network.numbers().items()}
            if isinstance(optimizer, AdamW):
                stepper: Any = torch.optim.AdamW(
                    theirs.values(),
                    optimizer.learning_rate,
                    (optimizer.beta1, optimizer.beta2),
                    optimizer.epsilon,
                    optimizer.weight_decay,
                )
            else:  # theirs adds the decay to the gradient, which is the same without momentum
                stepper = torch.optim.SGD(
                    theirs.values(), optimizer.learning_rate, weight_decay=optimizer.weight_decay
                )
            labels, _ = labels_for(kind)
            targets = torch.tensor(labels if kind == "cross_entropy" else np.float32(labels))
            measure = getattr(torch.nn.functional, "mse_loss" if kind != "cross_entropy" else kind)
            made = trainer(network, loss=kind, optimizer=optimizer)
            for _ in range(2):
                for begin in range(0, len(X), BATCH):
                    x = torch.tensor(X[begin : begin + BATCH])
                    hidden = torch.relu(x @ theirs["w1"].T + theirs["b1"])
                    stepper.zero_grad()
                    y = hidden @ theirs["w2"].T + theirs["b2"]
                    measure(y, targets[begin : begin + BATCH]).backward()
                    stepper.step()
            made.fit(Dataset(X, labels), 2, shuffle=False)
            for name, found in network.numbers().items():
                np.testing.assert_allclose(found, theirs[name].detach().numpy(), 1e-4, 1e-5)


# ---- measuring


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("n", [1, BATCH - 1, BATCH, 2 * BATCH + 3])
def test_evaluate_and_predict_any_number_of_data(ctx: Context, loss: str, n: int) -> None:
    network, reference = Network(ctx), Reference()
    labels, rows = labels_for(loss)
    made = trainer(network, loss=loss)
    found = made.evaluate(Dataset(X[:n], None if labels is None else labels[:n]))
    expected = {"loss": pytest.approx(reference.loss(loss, X[:n], rows[:n])[0], rel=1e-5)}
    if loss == "cross_entropy":
        right = reference.outputs(X[:n]).argmax(axis=1) == CLASSES[:n]
        expected["accuracy"] = right.mean()
    assert found == expected
    np.testing.assert_allclose(made.predict(X[:n]), reference.outputs(X[:n]), 1e-4, 1e-5)
    assert made.steps == 0 and made.predict(X[:0]).shape == (0, N_OUT)


def test_what_is_measured_in_training_is_what_evaluate_says(ctx: Context) -> None:
    """ggml's loss and accuracy, of a single step, and ours before it."""
    made = trainer(Network(ctx))
    everything = Dataset(X, CLASSES)
    before = made.evaluate(everything)
    history = made.fit(everything, batch_size=len(X))
    assert history["accuracy"] == [before["accuracy"]]
    assert history["loss"] == [pytest.approx(before["loss"], rel=1e-5)]


def test_weights_are_trained_where_they_lie(ctx: Context) -> None:
    """A graph that was compiled before sees them, and so do views of NumPy's."""
    network = Network(ctx)
    compiled = Graph(network.y).compile("CPU")
    view = network.weights["b2"].numpy()
    before = view.copy()
    with trainer(network) as made:
        made.fit(Dataset(X, CLASSES))
        assert not np.array_equal(view, before)
        np.testing.assert_allclose(compiled(x=X[:BATCH]), made.predict(X[:BATCH]), 1e-6)
    assert not np.array_equal(view, before)
    del view


def test_a_graph_is_not_changed_by_training(ctx: Context) -> None:
    network = Network(ctx)
    flags = [one.handle.flags for one in Graph(network.y).tensors]
    with trainer(network) as made:
        made.fit(Dataset(X, CLASSES))
        assert [one.handle.flags for one in Graph(network.y).tensors] == flags


def test_only_the_parameters_are_trained(ctx: Context) -> None:
    network = Network(ctx)
    before = network.numbers()
    chosen = [network.weights["w2"], network.weights["b2"]]
    with trainer(network, parameters=chosen) as made:
        assert made.parameters == tuple(chosen)
        made.fit(Dataset(X, CLASSES))
    after = network.numbers()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"w2", "b2"}


def test_parameters_by_themselves_are_all_that_can_be_trained(ctx: Context) -> None:
    x = ctx.input((2, 4), name="x")
    w = ctx.from_numpy(np.ones((3, 4), np.float32), name="w")
    frozen = ctx.from_numpy(np.ones((4, 4), np.float16), name="frozen")
    unused = ctx.from_numpy(np.ones(3, np.float32), name="unused")
    ctx.allocate("CPU")
    with Trainer(x, (x @ frozen.T) @ w.T, n_threads=1) as made:
        assert made.parameters == (w,) and unused not in made.parameters


def test_parts_of_a_weight_are_trained_with_it(ctx: Context) -> None:
    """Views of a parameter, one made before it had memory and one after."""
    w = ctx.from_numpy(np.ones((4, 5), np.float32), name="w")
    early = w[:2]
    x = ctx.input((3, 5), name="x")
    ctx.allocate("CPU")
    y = x @ early.T + x @ w[2:].T
    rows = np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)
    with Trainer(x, y, "sum", SGD(0.5), n_threads=1) as made:
        assert made.parameters == (w,)
        made.fit(Dataset(rows))
    expected = 1 - 0.5 * np.broadcast_to(rows.sum(axis=0), (4, 5))
    np.testing.assert_allclose(w.numpy(), expected, 1e-5)


def test_indices_as_data(ctx: Context) -> None:
    """An embedding: int32 data of one axis; those out of range are refused before anything runs."""
    table = ctx.from_numpy(np.zeros((4, 3), np.float32), name="table")
    ids = ctx.input((2,), "i32", name="ids")
    ctx.allocate("CPU")
    with Trainer(ids, ops.get_rows(table, ids), optimizer=SGD(1.0), n_threads=1) as made:
        made.fit(Dataset(np.int32([0, 1, 2, 0]), [0, 1, 2, 0]), 20)
        assert made.predict(np.int32([0, 1, 2])).argmax(axis=1).tolist() == [0, 1, 2]
        assert (table.numpy()[3] == 0).all()
        with pytest.raises(IndexError, match=r"index 4 .* 0 \.\.\. 3"):
            made.fit(Dataset(np.int32([0, 4]), [0, 1]))
        far = np.array([0, 1, 2, 2**32 + 3])  # the last of them is no 3
        for use in (
            lambda: made.fit(Dataset(far, [0, 1, 2, 0])),
            lambda: made.evaluate(Dataset(far, [0, 1, 2, 0])),
            lambda: made.predict(far),
        ):
            with pytest.raises(OverflowError, match=f"has {2**32 + 3}, which int32 of .* cannot"):
                use()
        made.fit(Dataset(np.int32([0, 1]), [0, 1]))


# ---- order


def weights_after(seed: int, shuffle: bool = True, shard: int = 1) -> Any:
    with Context() as context:
        network = Network(context)
        with trainer(network, seed=seed) as made:
            made.fit(Dataset(X, CLASSES, shard), 3, shuffle=shuffle)
        return network.numbers()["w1"]


def test_a_seed_decides_the_order() -> None:
    first = weights_after(0)
    np.testing.assert_array_equal(weights_after(0), first)
    assert not np.array_equal(weights_after(1), first)
    assert not np.array_equal(weights_after(0, shuffle=False), first)
    assert not np.array_equal(weights_after(0, shard=7), first)


@pytest.mark.parametrize("shard", [1, 4, 7, 100])
def test_shards_stay_together(shard: int) -> None:
    order = Dataset(X, CLASSES, shard).order(np.random.default_rng(0))
    assert sorted(order) == list(range(len(X)))
    followed = sum(b == a + 1 for a, b in itertools.pairwise(order))
    assert followed >= len(X) - 1 - len(X) // shard
    assert (order.tolist() == list(range(len(X)))) is (shard == 100)


def test_each_epoch_has_another_order_with_all_data(ctx: Context) -> None:
    seen: list[Any] = []

    def see(out: Any, x: Any) -> None:
        seen.append(x.copy())
        out[...] = x

    network = Network(ctx, between=lambda x: ops.custom(see, x))
    with trainer(network) as made:
        made.fit(Dataset(X, CLASSES), 2)
    epochs = np.concatenate(seen[:6]), np.concatenate(seen[6:])
    assert not np.array_equal(*epochs)
    for rows in epochs:
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(X, axis=0))


def test_a_rest_is_left_out_on_request(ctx: Context) -> None:
    made = trainer(Network(ctx))
    dataset = Dataset(X[:27], CLASSES[:27])
    with pytest.raises(
        ValueError, match=r"27 data.*multiple of batch_size 10; drop_last=True .* 7"
    ):
        made.fit(dataset)
    made.fit(dataset, 2, drop_last=True)
    assert made.steps == 4
    with pytest.raises(ValueError, match=r"there are 5 data for training.*batch_size 10$"):
        made.fit(dataset[:5], drop_last=True)


# ---- validation, history, what is told


def test_validation_is_not_trained_with(ctx: Context) -> None:
    """The last part of the data; the history is that of an evaluation after each epoch."""
    seen: list[float] = []

    def see(out: Any, x: Any) -> None:
        seen.extend(x[:, 0].tolist())
        out[...] = x

    network = Network(ctx, between=lambda x: ops.custom(see, x))
    made = trainer(network)
    told: list[Any] = []

    def on_epoch(epoch: int, numbers: dict[str, float]) -> None:
        told.append((epoch, numbers))
        seen.clear()
        assert made.evaluate(Dataset(X[40:], CLASSES[40:])) == {
            "loss": numbers["val_loss"],
            "accuracy": numbers["val_accuracy"],
        }
        assert set(X[40:, 0].tolist()) <= set(seen)
        seen.clear()

    history = made.fit(Dataset(X, CLASSES), 3, validation_split=1 / 3, on_epoch=on_epoch)
    assert made.steps == 3 * 4 and made.epochs == 3
    assert [epoch for epoch, _ in told] == [1, 2, 3]
    assert history == {name: [n[name] for _, n in told] for name in told[0][1]}
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}

    seen.clear()
    made.fit(Dataset(X, CLASSES)[:40])
    assert not set(X[40:, 0].tolist()) & set(seen)


def test_validation_data_of_their_own(ctx: Context) -> None:
    made = trainer(Network(ctx))
    validation = Dataset(*data(17, seed=9))
    history = made.fit(Dataset(X, CLASSES), 2, validation_data=validation)
    assert history["val_accuracy"][-1] == made.evaluate(validation)["accuracy"]
    with pytest.raises(ValueError, match="both validation_split and validation_data"):
        made.fit(Dataset(X, CLASSES), validation_split=0.5, validation_data=validation)


def test_the_history_of_all_calls(ctx: Context) -> None:
    made = trainer(Network(ctx))
    first = made.fit(Dataset(X, CLASSES), 2)
    second = made.fit(Dataset(X, CLASSES), validation_split=0.5)
    assert set(first) == {"loss", "accuracy"} and len(second["val_loss"]) == 1
    assert made.history["loss"] == first["loss"] + second["loss"]
    *missing, last = made.history["val_loss"]
    assert all(map(math.isnan, missing)) and len(missing) == 2 and [last] == second["val_loss"]


def test_training_ends_where_on_epoch_says_so(ctx: Context) -> None:
    made = trainer(Network(ctx))
    history = made.fit(Dataset(X, CLASSES), 10, on_epoch=lambda epoch, numbers: epoch < 3)
    assert len(history["loss"]) == made.epochs == 3


def test_it_learns(ctx: Context) -> None:
    made = trainer(Network(ctx), optimizer=AdamW(0.02))
    dataset = Dataset(*data(600, seed=3))
    history = made.fit(dataset, 20)
    assert history["loss"][-1] < history["loss"][0] / 4
    assert made.evaluate(Dataset(*data(205, seed=4)))["accuracy"] > 0.9


# ---- what comes out of an exception


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("size", [BATCH, 3 * BATCH])
@pytest.mark.parametrize("optimizer", [SGD(0.1), AdamW(0.01)], ids=repr)
def test_a_step_that_fails_changes_nothing(error: Any, size: int, optimizer: Any) -> None:
    """In an operation, in the last batch of the second step; going on is as if it had not been."""
    found = []
    for fails in (False, True):
        calls = [0]

        def between(out: Any, x: Any, fails: bool = fails, calls: list[int] = calls) -> None:
            calls[0] += 1
            if fails and calls[0] == 2 * size // BATCH:
                raise error("stop")
            out[...] = x

        with Context() as context:
            network = Network(context, between=lambda x, f=between: ops.custom(f, x))
            with trainer(network, optimizer=optimizer) as made:
                dataset = Dataset(X, CLASSES)
                if fails:
                    with pytest.raises(error, match="stop"):
                        made.fit(dataset, batch_size=size, shuffle=False)
                else:
                    made.fit(dataset[:size], batch_size=size, shuffle=False)
                assert made.steps == 1
                after_a_step = network.numbers()
                made.fit(dataset, 2, batch_size=size, shuffle=False)
                found.append((after_a_step, network.numbers()))
                assert made.steps == 1 + 2 * len(X) // size
    (step, end), (step_of_failed, end_of_failed) = found
    for name in step:
        np.testing.assert_array_equal(step_of_failed[name], step[name])
        np.testing.assert_allclose(end_of_failed[name], end[name], 1e-5, 1e-6)


def test_what_a_schedule_and_on_epoch_raise_comes_out(ctx: Context) -> None:
    def rate(step: int) -> float:
        if step == 8:
            raise Stop("rate")
        return 0.01 if step < 20 else -1.0

    def fail(epoch: int, numbers: dict[str, float]) -> None:
        raise Stop("epoch")

    made = trainer(Network(ctx), optimizer=SGD(rate))
    dataset = Dataset(X, CLASSES)
    with pytest.raises(Stop, match="epoch"):
        made.fit(dataset, 2, on_epoch=fail)
    assert (made.steps, made.epochs, len(made.history["loss"])) == (6, 1, 1)
    with pytest.raises(Stop, match="rate"):
        made.fit(dataset, 2)
    assert (made.steps, made.epochs, len(made.history["loss"])) == (8, 1, 1)
    made._steps = 20
    with pytest.raises(ValueError, match=r"learning_rate\(20\) is -1.0, expected 0 or more"):
        made.fit(dataset)
    assert made.evaluate(dataset)["loss"] > 0


def test_an_abort_in_a_kernel_is_raised_and_training_goes_on(ctx: Context) -> None:
    """An index that the graph itself makes, so that only the kernel looks at it; on one thread."""
    table = ctx.from_numpy(np.eye(4, dtype=np.float32), name="table")
    w = ctx.from_numpy(np.zeros((4, 4), np.float32), name="w")
    x = ctx.input((2,), name="x")
    ctx.allocate("CPU")
    y = ops.get_rows(table, ops.cast(x, ggml_type.GGML_TYPE_I32)) @ w.T
    good, bad = Dataset([0.0, 1.0], [0, 1]), Dataset([0.0, 7.0], [0, 1])
    with Trainer(x, y, optimizer=AdamW(0.1), parameters=[w], n_threads=1) as made:
        made.fit(good)
        before = w.numpy(copy=True)
        with pytest.raises(AbortError, match="GGML_ASSERT"):
            made.fit(bad)
        assert made.steps == 1
        np.testing.assert_array_equal(w.numpy(), before)
        made.fit(good, 50)
        assert made.steps == 51 and made.evaluate(good)["accuracy"] == 1.0


@pytest.mark.parametrize("python", [False, True])
def test_a_step_that_is_refused_is_not_counted(ctx: Context, python: bool) -> None:
    """Before ggml computes anything; nor is one less of those before."""
    table = ctx.from_numpy(np.ones((10, 4), np.float32), name="table")
    k = ctx.from_numpy(np.ones((2, 4), np.float32), name="k")
    ctx.allocate("CPU")
    x = ctx.input((2,), "i32", name="x")
    same = ops.custom(lambda out, a: np.copyto(out, a), k) if python else ops.scale(k, 1.0)
    y = ops.get_rows(table, x) + same
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.1

    dataset = Dataset(np.int32([1, 2, 3, 4, 5, 6, 99, 7]), np.zeros((8, 4)))
    with Trainer(x, y, "mean_squared_error", SGD(rate), [table], n_threads=1) as made:
        for number in (1, 2):
            asked.clear()
            with pytest.raises(IndexError, match="index 99"):
                made.fit(dataset, shuffle=False)
            assert made.steps == 3 * number
            assert sorted(set(asked)) == [made.steps - 3 + i for i in range(4)]
        asked.clear()
        with pytest.raises(IndexError, match="index 99"):
            made.fit(dataset, batch_size=4, shuffle=False)  # the last of two batches
        assert made.steps == 7
    changed = (table.numpy() != 1).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [1, 2, 3, 4, 5, 6]


def in_turn(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *errors: Any) -> list[Any]:
    """Let the next calls of a function raise these (None: none of it); what is left of them."""
    real, left = getattr(owner, name), list(errors)

    def function(*arguments: Any, **options: Any) -> Any:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, function)
    return left


def take_steps(reference: Reference, optimizer: AdamW, size: int, n: int) -> None:
    """What an optimiser with a learning rate of 0.05 makes of so many batches of the data."""
    rows = one_hot(CLASSES)
    for begin in range(0, n * size, size):
        batch = X[begin : begin + size], rows[begin : begin + size]
        reference.step("cross_entropy", *batch, optimizer, 0.05)


@pytest.mark.parametrize("where", ["__init__", "set_moments", "free"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_means_outlive_an_exception_between_two_engines(
    ctx: Context, where: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size of a step needs another context of ggml's, which is given AdamW's means."""
    network, reference = Network(ctx), Reference()
    made = trainer(network, optimizer=AdamW(0.05))
    rows = one_hot(CLASSES)
    take_steps(reference, made.optimizer, BATCH, len(X) // BATCH)
    made.fit(Dataset(X, CLASSES), shuffle=False)
    before = made._current_moments()
    gc.collect()
    handles = diagnostics.live_handles()
    left = in_turn(monkeypatch, _engine.Engine, where, error())
    with pytest.raises(error):
        made.fit(Dataset(X, CLASSES), batch_size=len(X))
    assert not left and made.steps == 6
    for number, moments in made._current_moments().items():
        np.testing.assert_array_equal(moments, before[number])
    gc.collect()
    assert sum(diagnostics.live_handles().values()) <= sum(handles.values())
    made.fit(Dataset(X, CLASSES), batch_size=len(X))
    reference.step("cross_entropy", X, rows, made.optimizer, 0.05)
    check(network, reference)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_step_is_undone_after_a_second_interrupt_as_well(
    ctx: Context, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the weights are put back; what uses the trainer next goes on with it."""
    calls = [0]

    def between(out: Any, x: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise Stop("stop")
        out[...] = x

    network, reference = Network(ctx, between=lambda x: ops.custom(between, x)), Reference()
    made = trainer(network, optimizer=AdamW(0.05))
    rows = one_hot(CLASSES)
    reference.step("cross_entropy", X[:BATCH], rows[:BATCH], made.optimizer, 0.05)
    left = in_turn(monkeypatch, Tensor, "set", *[None] * (at - 1), *[KeyboardInterrupt()] * 3)
    with pytest.raises(KeyboardInterrupt):
        made.fit(Dataset(X, CLASSES), shuffle=False)
    assert not left
    made.evaluate(Dataset(X, CLASSES))
    assert made.steps == 1
    check(network, reference)
    made.fit(Dataset(X, CLASSES), batch_size=len(X))
    reference.step("cross_entropy", X, rows, made.optimizer, 0.05)
    check(network, reference)
    assert made.steps == 2


def test_steps_are_counted_after_an_interrupt_at_the_end(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are counted: ggml goes on knowing how many it has made."""
    network, reference = Network(ctx), Reference()
    made = trainer(network, optimizer=AdamW(0.05))
    rows = one_hot(CLASSES)
    take_steps(reference, made.optimizer, BATCH, len(X) // BATCH)
    left = in_turn(monkeypatch, capi, "ggml_opt_result_ndata", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.fit(Dataset(X, CLASSES), shuffle=False)
    assert not left
    made.fit(Dataset(X, CLASSES), batch_size=len(X))
    reference.step("cross_entropy", X, rows, made.optimizer, 0.05)
    assert made.steps == 7
    check(network, reference)


def interrupted(work: Any, at: int) -> bool:
    """Whether the call was interrupted, after so many calls within the package and returns."""
    left = at

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "return", "c_return") and "ggml_cffi" in frame.f_code.co_filename:
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(see)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def counted(work: Any) -> int:
    """How many places there are to interrupt it at."""
    count = 0

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "return", "c_return") and "ggml_cffi" in frame.f_code.co_filename

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python's with statement has a gap there")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finaliser
@pytest.mark.parametrize("python", [False, True])
def test_an_interrupt_anywhere(tmp_path: Path, python: bool) -> None:
    """Weights and means are those of the steps that are counted; loading is done or it is not."""
    optimizer = AdamW(0.05)
    dataset, file = Dataset(X, CLASSES), tmp_path / "weights.gguf"
    between = (lambda x: ops.custom(lambda out, a: np.copyto(out, a), x)) if python else None

    def begun(context: Context) -> tuple[Network, Trainer, Reference]:
        network, reference = Network(context, between=between), Reference()
        made = trainer(network, optimizer=optimizer)
        made.fit(dataset, shuffle=False)
        take_steps(reference, optimizer, BATCH, 6)
        return network, made, reference

    def train(made: Trainer) -> None:
        made.fit(dataset, batch_size=2 * BATCH, shuffle=False)

    with Context() as context:
        network, made, _ = begun(context)
        made.save(file)
        places = counted(lambda: train(made)), counted(lambda: made.load(file))
    found: set[Any] = set()
    for loads, n_places in enumerate(places):
        for at in range(1, n_places, 61):
            # not closed: NumPy may be taken to share its memory for ever, where it was interrupted
            network, made, reference = begun(Context())
            if loads:
                train(made)
                interrupted(lambda one=made: one.load(file), at)
            else:
                interrupted(lambda one=made: train(one), at)
            found.add((made.steps, made.epochs) if loads else made.steps)
            for _ in range(2):
                take_steps(reference, optimizer, 2 * BATCH, made.steps - reference.steps)
                check(network, reference)
                train(made)
    assert found == {6, 7, 8, 9, (6, 1), (9, 2)}


def test_a_signal_that_saves_within_an_epoch(ctx: Context, tmp_path: Path) -> None:
    """Between two steps a handler may use the trainer: it finds the steps made so far."""
    found: list[int] = []

    class Rows(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            if made.steps == 0 and isinstance(key, np.ndarray) and key[0] == 2 * BATCH:
                made.save(tmp_path / "weights.gguf")
                found.append(made.steps)
            return super().__getitem__(key)

    made = trainer(Network(ctx))
    made.fit(Dataset(X.view(Rows), CLASSES), shuffle=False)
    assert found == [2] and made.steps == 6
    with GGUFFile(tmp_path / "weights.gguf") as saved:
        assert saved.metadata["training.steps"] == 2


def test_a_signal_that_trains_or_loads_within_an_epoch(ctx: Context, tmp_path: Path) -> None:
    """That epoch ends; what has begun anew stays as it is."""
    file = tmp_path / "weights.gguf"
    network = Network(ctx)
    made = trainer(network)
    made.fit(Dataset(X, CLASSES))
    made.save(file)
    uses = [
        (lambda: made.fit(Dataset(X, CLASSES), batch_size=len(X)), (6 + 2 + 1, 2)),
        (lambda: made.fit(Dataset(X, CLASSES)), (6 + 2 + 6, 2)),
        (lambda: made.load(file), (6, 1)),
        (lambda: made.close(), None),
    ]
    for use, expected in uses:
        found: list[Any] = []

        class Rows(np.ndarray[Any, Any]):
            def __getitem__(self, key: Any, use: Any = use, found: Any = found) -> Any:
                if isinstance(key, np.ndarray) and key[0] == 2 * BATCH and not found:
                    use()
                    found.append(network.numbers())
                return super().__getitem__(key)

        made.load(file)
        error = "within an epoch, which cannot go on" if expected else "the Trainer is closed"
        with pytest.raises(ValueError, match=error):
            made.fit(Dataset(X.view(Rows), CLASSES), shuffle=False)
        for name, numbers in network.numbers().items():
            np.testing.assert_array_equal(numbers, found[0][name])
        if expected:
            assert (made.steps, made.epochs) == expected
            made.fit(Dataset(X, CLASSES))
            assert (made.steps, made.epochs) == (expected[0] + 6, expected[1] + 1)


def test_a_history_that_was_interrupted_stays_in_step(ctx: Context) -> None:
    made = trainer(Network(ctx))
    made.history.update({"loss": [1.0, 2.0], "accuracy": [0.5]})
    made.fit(Dataset(X, CLASSES))
    assert {name: len(numbers) for name, numbers in made.history.items()} == {
        "loss": 3,
        "accuracy": 3,
    }
    assert math.isnan(made.history["accuracy"][1])


# ---- memory


def test_too_little_memory_for_a_step(ctx: Context) -> None:
    """Terabytes of results: ggml itself would go on without the memory and end the process."""
    w = ctx.from_numpy(np.ones((1, 1 << 16), np.float32), name="w")
    x = ctx.input((4, 1), name="x")
    ctx.allocate("CPU")
    large = ops.sqr(ops.repeat_4d(w, 1 << 16, 1 << 24, 1, 1))
    y = ops.sum_rows(ops.reshape_2d(large, 1 << 38, 4)) + x
    gc.collect()  # what other tests have left
    before = diagnostics.live_handles()
    with pytest.raises(MemoryError, match="failed to allocate"):
        Trainer(x, y, "sum", n_threads=1)
    assert diagnostics.live_handles() == before


LITTLE_MEMORY = """
import resource
from ggml_cffi import Context, diagnostics
from ggml_cffi.training import Trainer

ctx = Context()
w = ctx.tensor((4, 1 << 22), name="w")  # 64 MB
x = ctx.input((2, 1 << 22), name="x")  # 32 MB
ctx.allocate("CPU")
y = x @ w.T
before = diagnostics.live_handles()
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
found = set()
for more in range(-96, 500, 8):  # the process may have become smaller since
    resource.setrlimit(resource.RLIMIT_AS, (size + (more << 20), resource.RLIM_INFINITY))
    try:
        Trainer(x, y, "sum", n_threads=1).close()
    except MemoryError as error:
        found.add(str(error).partition(":")[0])
    else:
        break
    assert diagnostics.live_handles() == before
print(*sorted(found), more < 488)
"""


@pytest.mark.own_memory
def test_too_little_memory_for_a_trainer(tmp_path: Any) -> None:
    """Wherever it ends: it is MemoryError, and nothing is left."""
    child = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stderr) == (0, "")
    *where, enough = child.stdout.split()
    wanted = {"ggml_backend_buft_alloc_buffer", "ggml_opt_init", "ggml_backend_sched_reserve"}
    assert wanted <= set(where) and enough == "True"


def test_weights_that_stay_as_they_are_may_be_quantised(ctx: Context) -> None:
    """Gradients go through them; in memory with an order of its own ggml has none of them."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((2, 64, 64), np.float32) / 8
    rows = rng.standard_normal((20, 64), np.float32)
    special = device("CPU").buffer_types[1:]
    w = ctx.from_numpy(numbers[0], name="w")
    x = ctx.input((10, 64), name="x")
    ctx.allocate("CPU")
    hidden = ops.mul_mat(w, x)
    for kind in (None, *(k for k in special if device("CPU").supports_weight(k, "q4_0", (64, 64)))):
        with Context() as frozen:
            q = frozen.from_numpy(numbers[1], name="q", dtype="q4_0")
            frozen.allocate("CPU", buffer_type=kind)
            y = ops.mul_mat(q, hidden)
            if kind is not None:
                with pytest.raises(NotSupportedError, match="an order of its own"):
                    Trainer(x, y, "mean_squared_error", n_threads=1)
                continue
            with Trainer(x, y, "mean_squared_error", SGD(0.5), n_threads=1) as made:
                assert made.parameters == (w,)
                made.fit(Dataset(rows[:10], rows[10:]))
            weights = quants.dequantize(quants.quantize(numbers[1], "q4_0"), "q4_0").astype(float)
            error = rows[:10] @ numbers[0].T.astype(float) @ weights.T - rows[10:]
            gradient = (2 * error / error.size @ weights).T @ rows[:10]
            found = (numbers[0] - w.numpy()) / 0.5
            # products with blocks of 4 bits round the other operand to 8
            assert np.linalg.norm(found - gradient) < 0.02 * np.linalg.norm(gradient)


# ---- where it is computed, and by whom


def test_targets_give_the_same_weights() -> None:
    def train(target: Any, **options: Any) -> Any:
        with Context() as context:
            network = Network(context)
            with trainer(network, target=target, **options) as made:
                made.fit(Dataset(X, CLASSES))
            return network.numbers()

    cpu = device("CPU")
    expected = train(cpu, n_threads=1)
    found = [train("cpu"), train(cpu, n_threads=2)]
    with Backend(cpu, 1) as one, Backend(cpu, 2) as two, Scheduler([one, two]) as scheduler:
        found += [train(one), train(scheduler)]
        assert not one.closed and not scheduler.closed
    for weights in found:
        for name in expected:
            np.testing.assert_allclose(weights[name], expected[name], 1e-5, 1e-6)


@needs_meta
def test_a_meta_device_is_refused(ctx: Context) -> None:
    """As a target, and with weights in its memory."""
    network = Network(ctx)
    with MetaDevice(["CPU"], lambda info, n: SplitState.mirrored()) as meta, Context() as other:
        with pytest.raises(NotSupportedError, match="cannot train on a meta device"):
            trainer(network, target=meta)
        with meta.init_backend(1) as backend, pytest.raises(NotSupportedError, match="meta device"):
            trainer(network, target=backend)
        w = other.from_numpy(np.ones((3, N_IN), np.float32), name="w")
        x = other.input((BATCH, N_IN), name="x")
        other.allocate(meta)
        with pytest.raises(NotSupportedError, match=r"'w'.* cannot train on a meta device"):
            Trainer(x, x @ w.T)


def test_threads_take_turns(ctx: Context) -> None:
    network = Network(ctx)
    made = trainer(network)
    dataset = Dataset(X, CLASSES)
    compiled = Graph(network.y).compile("CPU", n_threads=1)
    errors: list[BaseException] = []

    def guard(work: Any) -> None:
        try:
            for _ in range(5):
                work()
        except BaseException as error:
            errors.append(error)

    works = [
        *(lambda: made.fit(dataset, 2) for _ in range(3)),
        lambda: made.predict(X),
        lambda: made.evaluate(dataset),
        lambda: compiled(x=X[:BATCH]),
    ]
    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and made.epochs == 3 * 5 * 2 and made.steps == 6 * made.epochs


FORK = """
import os, signal, sys, threading
from _network import Network, data
from ggml_cffi import Context
from ggml_cffi.training import Dataset, Trainer

def train(made, **options):
    made.fit(dataset, **options)

def network():
    made = Network(Context())
    return Trainer(made.x, made.y, n_threads=1)

dataset, made, inside, end = Dataset(*data()), network(), threading.Event(), threading.Event()

def wait(epoch, numbers):
    inside.set()
    end.wait()

thread = threading.Thread(target=train, args=(made,), kwargs={"on_epoch": wait})
thread.start()
inside.wait()
pid = os.fork()  # while the thread trains, and holds the trainer's lock
if not pid:
    signal.alarm(20)
    for use in (train, lambda one: one.predict(dataset.data), lambda one: one.save("x.gguf")):
        try:
            use(made)
        except RuntimeError as error:
            assert "the Trainer was made before a fork" in str(error)
        else:
            os._exit(3)
    other = network()
    train(other)
    os._exit(0 if other.steps == 6 else 4)
end.set()
thread.join()
train(made)
assert made.epochs == 2
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_after_a_fork() -> None:
    """The child is refused what its parent trains, and trains others."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stderr) == (0, "")


# ---- closing


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_of_closing(order: Any) -> None:
    context = Context()
    network = Network(context)
    backend = Backend(device("CPU"), 1)
    scheduler = Scheduler([backend])
    made = trainer(network, target=scheduler)
    made.fit(Dataset(X, CLASSES))
    things = [context, backend, scheduler, made]
    for number in order:
        things[number].close()
        things[number].close()
        assert made.closed
        assert backend.closed or number != 1
    for use in (made.fit, made.evaluate):
        with pytest.raises(ValueError, match="the Trainer is closed"):
            use(Dataset(X, CLASSES))
    with pytest.raises(ValueError, match="the Trainer is closed"):
        made.predict(X)
    assert repr(made) == "<Trainer closed>"


@pytest.mark.parametrize("error", [AbortError, KeyboardInterrupt])
def test_all_is_freed_whatever_one_of_it_raises(
    ctx: Context, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(ctx)
    gc.collect()
    before = diagnostics.live_handles()
    made = trainer(network)
    made.fit(Dataset(X, CLASSES))
    made.evaluate(Dataset(X, CLASSES))
    store = made.handle
    assert store.engine is not None and store.forward is not None
    spare = [_engine.Engine(made._model, made._scheduler, 1, 0) for _ in range(2)]
    store.retired += spare
    real = _engine.Engine.free

    def free(self: Any) -> None:
        real(self)
        raise error("free")

    monkeypatch.setattr(_engine.Engine, "free", free)
    with pytest.raises(error, match="free"):
        made.close()
    assert made.closed and store.forward.closed and all(one.closed for one in store.own)
    assert store.engine.closed and all(one.closed for one in spare)
    monkeypatch.undo()
    lost = _handles._lost.pop()  # what it needs stays otherwise
    assert lost.handle is store
    for parent in lost.parents:
        parent.drop()
    assert diagnostics.live_handles() == before


def test_what_was_made_for_a_target_that_fails_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it, whatever closing one of it raises."""
    made: list[Backend] = []

    class Failing(Backend):
        def __init__(self, *_: Any) -> None:
            super().__init__(device("CPU"), 1)
            made.append(self)

        def close(self) -> None:
            super().close()
            raise AbortError(f"close {made.index(self)}")

    class NoScheduler:
        def __init__(self, _: Any) -> None:
            raise MemoryError

    monkeypatch.setattr(_target, "Backend", Failing)
    monkeypatch.setattr(_target, "Scheduler", NoScheduler)
    monkeypatch.setattr(_target, "_CPU", "as if the device were a GPU, with a CPU beside it")
    cpu = SimpleNamespace(type=_target._CPU)
    monkeypatch.setattr(_target, "devices", lambda: [cpu])
    with pytest.raises(AbortError, match="close 1"):
        _target.scheduler_for(device("CPU"), 1)
    assert len(made) == 2 and all(one.closed for one in made)


def test_closed_in_a_callback(ctx: Context) -> None:
    """Between steps it is closed; within one it stays open."""
    refused: list[str] = []

    def close(out: Any, x: Any) -> None:
        out[...] = x
        try:
            made.close()
        except ValueError as error:
            refused.append(str(error))

    network = Network(ctx, between=lambda x: ops.custom(close, x))
    made = trainer(network)
    made.fit(Dataset(X, CLASSES))
    assert set(refused) == {"the Trainer computes: it stays open"} and not made.closed
    with pytest.raises(ValueError, match="the Trainer is closed"):
        made.fit(Dataset(X, CLASSES), 2, on_epoch=lambda epoch, numbers: made.close())
    assert made.closed


def test_closing_what_another_thread_trains_does_not_wait_for_it(ctx: Context) -> None:
    """Each would wait for the other where the trainer comes to use its weights."""
    network = Network(ctx)
    made = trainer(network)
    refused: list[str] = []

    def close() -> None:
        for one in (made, ctx):
            try:
                one.close()
            except ValueError as error:
                refused.append(str(error))

    def elsewhere(epoch: int, numbers: Any) -> bool:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return False

    made.fit(Dataset(X, CLASSES), 2, on_epoch=elsewhere)
    assert refused == ["the Trainer is in use: it stays open"] * 2
    assert not made.closed and made.epochs == 1
    made.close()


def test_what_it_computes_cannot_use_it(ctx: Context, tmp_path: Path) -> None:
    """It would compute with other weights and inputs from there on."""
    refused: set[str] = set()
    file = tmp_path / "weights.gguf"

    def use(out: Any, x: Any, task: int, n_tasks: int) -> None:
        out[task::2] = x[task::2]
        if not file.exists():
            return
        for again in (
            lambda: made.predict(X),
            lambda: made.fit(Dataset(X, CLASSES)),
            lambda: made.load(file),
        ):
            with pytest.raises(ValueError, match="the Trainer computes") as caught:
                again()
            refused.add(str(caught.value))

    made = trainer(Network(ctx, between=lambda x: ops.custom(use, x, n_tasks=2)), n_threads=2)
    expected = made.predict(X)
    made.save(file)
    np.testing.assert_array_equal(made.predict(X), expected)
    made.fit(Dataset(X, CLASSES))
    assert len(refused) == 1


# ---- the bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(made: Trainer, monkeypatch: Any, where: Any, **options: Any) -> str:
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread of its own
    monkeypatch.setattr(sys, "stderr", where)
    for size in ("COLUMNS", "LINES"):  # which tqdm cuts its lines by
        monkeypatch.delenv(size, raising=False)
    try:
        made.fit(Dataset(X, CLASSES), 2, validation_split=1 / 3, **options)
    finally:
        monkeypatch.undo()
    return str(where.getvalue())


def test_a_bar_is_shown_on_a_terminal(ctx: Context, monkeypatch: Any, need: Any) -> None:
    need(importlib.util.find_spec("tqdm"), "tqdm")
    made = trainer(Network(ctx))
    monkeypatch.setattr(_progress, "DELAY", 0)
    text = shown(made, monkeypatch, Terminal())
    assert "epoch 2/2" in text and "8/8" in text
    assert "val_accuracy=" in text and "loss=" in text


@pytest.mark.parametrize(
    ("where", "options", "delay", "is_shown"),
    [
        (Terminal, {}, 1.0, False),  # it takes less than a second
        (Terminal, {"progress": False}, 0, False),
        (io.StringIO, {}, 0, False),
        (io.StringIO, {"progress": True}, 0, True),
    ],
)
def test_where_a_bar_is_shown(
    ctx: Context, monkeypatch: Any, need: Any, where: Any, options: Any, delay: Any, is_shown: bool
) -> None:
    need(importlib.util.find_spec("tqdm"), "tqdm")
    made = trainer(Network(ctx))
    monkeypatch.setattr(_progress, "DELAY", delay)
    assert bool(shown(made, monkeypatch, where(), **options)) is is_shown


def test_without_tqdm(ctx: Context, monkeypatch: Any) -> None:
    made = trainer(Network(ctx))
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with contextlib.redirect_stderr(Terminal()) as text:
        made.fit(Dataset(X, CLASSES))
        assert text.getvalue() == ""
        with pytest.raises(ImportError, match="tqdm"):
            made.fit(Dataset(X, CLASSES), progress=True)


# ---- what is refused


def test_what_a_trainer_is_made_of(ctx: Context) -> None:
    network = Network(ctx)
    other = ctx.input((BATCH, N_OUT), name="other")
    spare = ctx.tensor(3, name="spare")
    late = ctx.tensor((BATCH, N_OUT), name="late")
    given = ctx.from_numpy(X[:BATCH], name="given")
    w1 = network.weights["w1"]
    x, y = network.x, network.y
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        ((X, y), {}, TypeError, "inputs is a ndarray, expected a Tensor"),
        ((x, X), {}, TypeError, "outputs is a ndarray, expected a Tensor"),
        ((other, y), {}, ValueError, "inputs is .*'other'.* that outputs are made from"),
        ((w1, y), {}, ValueError, "inputs is .*'w1'.* without memory"),
        ((given, given @ w1.T), {}, ValueError, "inputs is .*'given'.* without memory"),
        ((x, y + other), {}, ValueError, "also made from .*'other'.* has no memory"),
        ((x, y + late), {}, ValueError, "also made from .*'late'.* Context.allocate"),
        ((x, y.T), {}, ValueError, r"outputs has shape \(3, 10\), expected \(10, k\)"),
        ((x, ops.sum(y)), {}, ValueError, r"outputs has shape \(1, 1\), expected \(10, k\)"),
        (
            (x, ops.cast(y, ggml_type.GGML_TYPE_F16)),
            {},
            ValueError,
            "outputs is .*f16.* expected f32",
        ),
        ((x, ops.relu(x)), {}, ValueError, "nothing to train"),
        ((x, y), {"loss": "mse"}, ValueError, "loss is 'mse', expected one of mean, sum, cross"),
        ((x, y), {"loss": 9}, ValueError, "9 is not a valid ggml_opt_loss_type"),
        ((x, y), {"loss": None}, TypeError, "loss is None"),
        ((x, y), {"optimizer": "adamw"}, TypeError, "optimizer is 'adamw', expected an AdamW"),
        ((x, y), {"parameters": w1}, TypeError, "expected several Tensors"),
        ((x, y), {"parameters": []}, ValueError, "parameters is empty"),
        ((x, y), {"parameters": ["w1"]}, TypeError, "parameters has a str, expected"),
        ((x, y), {"parameters": [w1, w1]}, ValueError, "has .*'w1'.* twice"),
        ((x, y), {"parameters": [spare]}, ValueError, "not made from the parameter .*'spare'"),
        ((x, y), {"parameters": [x]}, ValueError, "the parameter .*'x'.* has no memory"),
        ((x, y), {"parameters": [y]}, ValueError, "the parameter .* is a result of others"),
        ((x, y), {"target": 5}, TypeError, "target is 5, expected a Device"),
        ((x, y), {"target": "gpu9"}, ValueError, "there is no device 'gpu9'"),
        ((x, y), {"n_threads": 0}, ValueError, "n_threads is 0"),
        ((x, y), {"seed": -1}, ValueError, "seed is -1, expected 0 or more"),
        ((x, y), {"seed": "x"}, TypeError, "seed is 'x'"),
        ((x, y), {"seed": True}, TypeError, r"seed is True \(bool\), expected an int"),
        ((x, y), {"loss": True}, TypeError, "loss is True"),
        ((x, y), {"n_threads": True}, TypeError, "n_threads is True"),
    ]
    for arguments, options, error, words in cases:
        with pytest.raises(error, match=words):
            Trainer(*arguments, **options)
    with (
        Backend(device("CPU"), 1) as backend,
        pytest.raises(ValueError, match="n_threads is the Backend's to have"),
    ):
        Trainer(x, y, target=backend, n_threads=2)


def test_what_ggml_cannot_differentiate(ctx: Context) -> None:
    network = Network(ctx)
    for operation in (ops.gelu, ops.norm):
        words = rf"no gradients of what ADD, .*{operation.__name__.upper()}.* make of .*'w1'"
        options = {"eps": 1e-5} if operation is ops.norm else {}
        with pytest.raises(NotSupportedError, match=words):
            Trainer(network.x, operation(network.y, **options), n_threads=1)
    deep = network.y
    for _ in range(1000):
        deep = ops.relu(deep)
    with pytest.raises(NotSupportedError, match="at most 2048 results, gradients and steps"):
        Trainer(network.x, deep, n_threads=1)
    trainer(network).fit(Dataset(X, CLASSES))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda h, b: h - b, r"what MUL_MAT, SUB make .*: \S*ggml\.c:\d+: GGML_ASSERT"),
        (lambda h, b: h / b, "what DIV, MUL_MAT make .*same_shape"),
        (lambda h, b: ops.relu_inplace(h), "GGML_ASSERT"),
        (lambda h, b: h * ops.mean(h), "is_scalar"),
        (lambda h, b: ops.sigmoid(h), "SIGMOID make .*(stderr|SIGMOID)"),
        (lambda h, b: ops.leaky_relu(h, 0.1), "backward pass: LEAKY_RELU$"),
        (lambda h, b: ops.swiglu(h), "only implemented for split swiglu"),
    ],
    ids=["sub", "div", "in place", "mean", "sigmoid", "leaky_relu", "swiglu"],
)
def test_an_abort_over_gradients_keeps_its_text(ctx: Context, make: Any, words: str) -> None:
    w = ctx.from_numpy(np.ones((4, 8), np.float32), "w")
    b = ctx.from_numpy(np.ones(4, np.float32), "b")
    ctx.allocate("CPU")
    x = ctx.input((4, 8), name="x")
    with pytest.raises(NotSupportedError, match=words):
        Trainer(x, make(x @ w.T, b), n_threads=1)


def test_grouped_queries_have_no_gradient_over_a_batch(ctx: Context) -> None:
    keys = ctx.from_numpy(np.ones((2, 1, 3, 8), np.float32), "keys")
    ctx.allocate("CPU")
    x = ctx.input((2, 4, 5, 8), name="x")
    scores = ops.mul_mat(keys, x)
    assert scores.shape == (2, 4, 5, 3)
    with pytest.raises(NotSupportedError, match=r"what MUL_MAT, .*'keys'; .*ggml\.c:\d+"):
        Trainer(x, ops.reshape_2d(ops.sqr(scores), 60, 2), n_threads=1)


def test_a_mask_among_the_parameters_is_named(ctx: Context) -> None:
    w = ctx.from_numpy(np.ones((4, 8), np.float32), "w")
    mask = ctx.from_numpy(np.zeros((4, 4), np.float32), "mask")
    frozen = ctx.from_numpy(np.ones(4, np.float32), "frozen")
    more = [ctx.from_numpy(np.ones(4, np.float32), f"b{i}") for i in range(9)]
    ctx.allocate("CPU")
    x = ctx.input((4, 8), name="x")
    y = ops.soft_max_ext(x @ w.T, mask) * ops.gelu(frozen)
    told = (
        r"what MUL, MUL_MAT, SOFT_MAX make of the parameters '\w+', '\w+'; parameters=\[\.\.\.\] "
        r"leaves out .*softmax mask not implemented"
    )
    with pytest.raises(NotSupportedError, match=told) as caught:
        Trainer(x, y, n_threads=1, parameters=[w, mask])
    assert "'w'" in str(caught.value) and "'mask'" in str(caught.value)
    with Trainer(x, y, n_threads=1, parameters=[w]) as made:
        made.fit(Dataset(np.ones((4, 8)), np.zeros(4, int)))
    for one in more:
        y = y + one
    with pytest.raises(NotSupportedError, match=r"('\w+', ){8}4 more; parameters="):
        Trainer(x, y, n_threads=1)


def test_gradients_that_ggml_reads_wrongly_are_refused(ctx: Context) -> None:
    """That of a weight that is used transposed is transposed, and a step reads it as it lies."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((64, 6)).astype(np.float32)
    labels = data @ rng.standard_normal((6, 4)).astype(np.float32)
    numbers = rng.standard_normal((6, 4)).astype(np.float32)
    w, turned = ctx.from_numpy(numbers, "w"), ctx.from_numpy(numbers.T, "turned")
    ctx.allocate("CPU")
    x = ctx.input((64, 6), name="x")
    permuted = ops.cont(ops.permute(w, 1, 0, 2, 3))
    told = r"cannot compute OPT_STEP_SGD 'step for w' of .*x @ w\.T"
    for y in (x @ w, x @ permuted.T, x @ ops.cast(w.T, "f32").T):
        with pytest.raises(NotSupportedError, match=told):
            Trainer(x, y, "mean_squared_error", SGD(0.5), n_threads=1)
    with Trainer(x, x @ turned.T, "mean_squared_error", SGD(0.5), n_threads=1) as right:
        loss = right.fit(Dataset(data, labels), 60)["loss"]
    assert loss[-1] < 1e-4 < 1 < loss[0]


def test_gradients_of_parts_that_are_turned_or_overlap_are_refused(ctx: Context) -> None:
    w = ctx.from_numpy(np.ones((6, 8), np.float32), "w")
    ctx.allocate("CPU")
    x = ctx.input((4, 3), name="x")
    turned = ops.cont(w[1:4, 2:5].T)
    overlapping = ops.cont(ops.view_2d(w, 3, 4, 2 * 4, 0))
    for part in (turned, overlapping):
        with pytest.raises(NotSupportedError, match="cannot compute ACC 'grad for w' of "):
            Trainer(x, x @ part.T, "mean_squared_error", SGD(0.1), n_threads=2)
    copied = ops.cpy(ops.sqr(w), ops.dup(w))
    with pytest.raises(NotSupportedError, match=r"'w'.* of what is copied over"):
        Trainer(x, x @ copied[:3, :3].T, "mean_squared_error", SGD(0.1), n_threads=1)


@needs("ggml_soft_max_add_sinks")
def test_sinks_are_not_trained(ctx: Context) -> None:
    """ggml would leave out their gradient, or dereference what it takes for it."""
    rng = np.random.default_rng(0)
    w = ctx.from_numpy(rng.standard_normal((4, 8)).astype(np.float32), "w")
    sinks = ctx.from_numpy(np.zeros(1, np.float32), "sinks")
    ctx.allocate("CPU")
    x = ctx.input((4, 8), name="x")
    y = ops.soft_max(x @ w.T, sinks=sinks)
    told = "no gradient that can be used: .*'sinks'.* is a parameter, and part of the sinks"
    with pytest.raises(NotSupportedError, match=told):
        Trainer(x, y, "mean_squared_error", n_threads=1)
    of_weights = ops.soft_max(x @ w.T, sinks=ops.reshape_1d(ops.sum(w), 1))
    with pytest.raises(NotSupportedError, match=r"'w'.* is a parameter"):
        Trainer(x, of_weights, "mean_squared_error", parameters=[w], n_threads=1)
    with Trainer(x, y, "mean_squared_error", parameters=[w], n_threads=1) as fixed:
        history = fixed.fit(Dataset(np.eye(8, dtype=np.float32), np.eye(8, 4, dtype=np.float32)), 3)
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([[1, 2]], [1, 2]), ValueError, r"labels has shape \(2,\) and data \(1, 2\)"),
        ((3.0,), ValueError, "data is a single number"),
        (([1j],), TypeError, "data has dtype complex128, expected real numbers"),
        ((["a"], [1]), TypeError, "data has dtype <U1"),
        (([1], ["a"]), TypeError, "labels has dtype <U1"),
        (([1], [1], 0), ValueError, "shard is 0, expected 1 or more"),
        (([1], [1], 1.5), TypeError, "shard is 1.5"),
        (([1], [1], True), TypeError, "shard is True"),
    ],
)
def test_what_a_dataset_is_made_of(arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Dataset(*arguments)


def test_a_dataset(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = Dataset(mapped, CLASSES, shard=5)
    assert isinstance(dataset.data, np.memmap) and len(dataset) == len(X)
    part = dataset[3:7]
    assert len(part) == 4 and part.shard == 5 and np.shares_memory(part.data, mapped)
    assert part.labels is not None and part.labels.tolist() == CLASSES[3:7].tolist()
    assert repr(dataset) == "<Dataset (60, 6), labels (60,)>"
    assert repr(Dataset(X)) == "<Dataset (60, 6)>"
    with pytest.raises(TypeError, match="cut by a slice, not by 3"):
        dataset[3]  # type: ignore[index]


WRONG: list[tuple[str, Any, Any, str]] = [
    ("cross_entropy", (X,), ValueError, "no labels, which the loss cross_entropy needs"),
    ("mean_squared_error", (X,), ValueError, "no labels, which the loss mean_squared_error needs"),
    ("sum", (X, CLASSES), ValueError, "has labels, which the loss sum ignores"),
    ("cross_entropy", (X, np.eye(60, 3)), ValueError, r"labels\[3\] has the sum 0, expected 1"),
    ("cross_entropy", (X, np.full((60, 3), np.nan)), ValueError, r"labels\[0\] has the sum nan"),
    ("cross_entropy", (X, CLASSES + 1), ValueError, r"labels\[\d+\] is 3, expected 0 to 2"),
    ("cross_entropy", (X, CLASSES - 1), ValueError, r"labels\[\d+\] is -1, expected 0 to 2"),
    ("cross_entropy", (X, CLASSES * 1.0), TypeError, r"labels has dtype float64, .* \(60, 3\)"),
    ("cross_entropy", (X, X), ValueError, r"labels has shape \(60, 6\), expected \(60, 3\) or"),
    ("mean_squared_error", (X, CLASSES), ValueError, r"shape \(60,\), expected \(60, 3\)$"),
    ("cross_entropy", (X[:, :5], CLASSES), ValueError, r"\(60, 5\), expected \(n, 6\)"),
    ("cross_entropy", (X[:, 0], CLASSES), ValueError, r"\(60,\), expected \(n, 6\)"),
]


@pytest.mark.parametrize(("loss", "arguments", "error", "words"), WRONG)
def test_data_and_labels_that_do_not_fit(
    ctx: Context, loss: str, arguments: Any, error: Any, words: str
) -> None:
    made = trainer(Network(ctx), loss=loss)
    for use in (made.fit, made.evaluate):
        with pytest.raises(error, match=words):
            use(Dataset(*arguments))
    assert made.steps == 0


def test_what_fit_refuses(ctx: Context) -> None:
    made = trainer(Network(ctx))
    dataset = Dataset(X, CLASSES)
    cases: list[tuple[Any, Any, str]] = [
        ({"epochs": 0}, ValueError, "epochs is 0, expected 1 or more"),
        ({"epochs": 1.0}, TypeError, "epochs is 1.0"),
        ({"epochs": True}, TypeError, "epochs is True"),
        ({"epochs": np.True_}, TypeError, r"epochs is (np\.)?True_?"),
        ({"batch_size": True}, TypeError, "batch_size is True"),
        ({"validation_split": True}, TypeError, "validation_split is True"),
        ({"batch_size": 15}, ValueError, "batch_size is 15, expected a multiple of 10"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": 40}, ValueError, "60 data for training, expected a multiple of .* 40"),
        ({"validation_split": 1.0}, ValueError, "validation_split is 1.0, expected 0 to below 1"),
        ({"validation_split": "x"}, TypeError, "validation_split is 'x'"),
        ({"validation_split": 0.001}, ValueError, "that is none of 60 data"),
        ({"validation_data": Dataset(X[:, :2], CLASSES)}, ValueError, "expected .n, 6."),
        ({"validation_data": X}, TypeError, "expected a Dataset"),
    ]
    for options, error, words in cases:
        with pytest.raises(error, match=words):
            made.fit(dataset, **options)
    with pytest.raises(TypeError, match="expected a Dataset"):
        made.fit(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="complex"):
        made.predict(X * 1j)
    with pytest.raises(ValueError, match="the Dataset is empty"):
        made.evaluate(dataset[:0])
    assert made.steps == made.epochs == 0 and made.history == {}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: AdamW(-1.0), ValueError, "learning_rate is -1.0, expected 0 or more"),
        (lambda: AdamW("x"), TypeError, "learning_rate is 'x'"),
        (lambda: AdamW(beta1=1.0), ValueError, "beta1 is 1.0, expected 0 to below 1"),
        (lambda: AdamW(beta2=-0.1), ValueError, "beta2 is -0.1, expected 0 to below 1"),
        (lambda: AdamW(beta2=1 - 1e-12), ValueError, "as 1, expected 0 to below 1"),
        (lambda: AdamW(beta1=1 - 1e-9), ValueError, "beta1 is 0.999999999, which float32 has as 1"),
        (lambda: SGD(1e39), ValueError, "is 1e\\+39, which float32 has as inf, expected 0 or more"),
        (lambda: SGD(10**400), ValueError, "which float32 has as inf"),
        (lambda: AdamW(epsilon=math.nan), ValueError, "epsilon is nan, expected 0 or more"),
        (lambda: AdamW(epsilon=math.inf), ValueError, "epsilon is inf, expected 0 or more"),
        (lambda: AdamW(weight_decay=1.5), ValueError, "weight_decay is 1.5, expected 0 to 1"),
        (lambda: SGD(True), TypeError, "learning_rate is True"),
        (lambda: SGD(weight_decay=-1), ValueError, "weight_decay is -1, expected 0 to 1"),
    ],
)
def test_optimizers_that_cannot_be(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_what_it_says_of_itself(ctx: Context) -> None:
    made = trainer(Network(ctx), loss=ggml_opt_loss_type.GGML_OPT_LOSS_TYPE_MEAN)
    assert (made.loss, made.batch, made.optimizer) == ("mean", BATCH, AdamW())
    assert repr(made) == "<Trainer of 4 parameters after 0 steps>"
    assert made._model.inputs.shape == (BATCH, N_IN)
