"""Trained weights in GGUF files, and training that goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _network import BATCH, Network, Reference, data, one_hot

from ggml_cffi import Context, GGUFError, GGUFFile, GGUFWriter, Tensor
from ggml_cffi.training import SGD, AdamW, Dataset, Trainer, _engine

X, CLASSES = data()
DATASET = Dataset(X, CLASSES)
OPTIMIZERS = [
    SGD(0.05, weight_decay=0.1),
    AdamW(0.01),
    AdamW(0.02, beta1=0.5, beta2=0.9, epsilon=1e-3, weight_decay=0.1),
]


def trained(
    optimizer: Any,
    epochs: int = 0,
    load: Path | None = None,
    save: Path | None = None,
    seed: int = 0,
) -> Any:
    """The weights after so many epochs, from those of a file, or from the seed's."""
    with Context() as context:
        network = Network(context, seed)
        with Trainer(network.x, network.y, optimizer=optimizer, n_threads=1) as made:
            if load:
                made.load(load)
            if epochs:
                made.fit(DATASET, epochs)
            if save:
                made.save(save)
        return network.numbers()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_training_goes_on_as_if_never_interrupted(optimizer: Any, tmp_path: Path) -> None:
    """The order of the data included; AdamW corrects its means by the number of steps."""
    file = tmp_path / "weights.gguf"
    expected = trained(optimizer, 5)
    trained(optimizer, 2, save=file)
    found = trained(optimizer, 3, load=file, seed=7)
    for name in expected:
        if isinstance(optimizer, SGD):
            np.testing.assert_array_equal(found[name], expected[name])
        else:
            np.testing.assert_allclose(found[name], expected[name], 1e-4, 1e-6)


def test_the_first_steps_after_loading_are_those_of_numpy(tmp_path: Path) -> None:
    """Where ggml's own count of steps begins anew, and would correct the bias far too much."""
    optimizer = AdamW(0.05, weight_decay=0.01)
    file, reference = tmp_path / "weights.gguf", Reference()
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, optimizer=optimizer, n_threads=1) as made:
            for begin in range(0, len(X), BATCH):
                if begin in (BATCH, 2 * BATCH):
                    made.save(file)
                    made.load(file)
                batch = X[begin : begin + BATCH], CLASSES[begin : begin + BATCH]
                made.fit(Dataset(*batch))
                reference.step("cross_entropy", batch[0], one_hot(batch[1]), optimizer, 0.05)
                for name, found in network.numbers().items():
                    np.testing.assert_allclose(found, reference.weights[name], 1e-4, 1e-5)


def test_what_a_file_has(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    numbers = trained(AdamW(0.01), 2, save=file)
    with GGUFFile(file) as saved:
        assert set(list(saved.tensors)[: len(numbers)]) == set(numbers)  # before their moments
        for name, expected in numbers.items():
            np.testing.assert_array_equal(saved.tensors[name].numpy(), expected)
            assert (saved.tensors[f"training.v.{name}"].numpy() >= 0).all()
        rest = set(saved.tensors) - set(numbers)
        assert rest == {f"training.{kind}.{name}" for kind in "mv" for name in numbers}
        assert saved.metadata["training.optimizer"] == "adamw"
        assert (saved.metadata["training.steps"], saved.metadata["training.epochs"]) == (12, 2)


def test_weights_alone(tmp_path: Path) -> None:
    """Such a file is loaded as well, also one of another type; the optimiser begins anew."""
    file, half = tmp_path / "weights.gguf", tmp_path / "half.gguf"
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, n_threads=1) as made:
            made.fit(DATASET)
            made.save(file, optimizer_state=False, metadata={"general.name": "network"})
            expected = network.numbers()
            with GGUFFile(file) as saved, GGUFWriter(half) as writer:
                assert set(saved.tensors) == set(expected)
                assert dict(saved.metadata) == {"general.name": "network"}
                for name, tensor in saved.tensors.items():
                    writer.add_tensor(name, tensor.numpy(), "f16")
            made.fit(DATASET)
            made.load(half)
            assert (made.steps, made.epochs) == (0, 0)
            for name, found in network.numbers().items():
                np.testing.assert_array_equal(found, np.float16(expected[name]))
            made.load(file)
            made.fit(DATASET)
        after = network.numbers()
    with Context() as context:
        network = Network(context)
        for name, tensor in network.weights.items():
            tensor.set(expected[name])
        with Trainer(network.x, network.y, n_threads=1) as made:
            made.fit(DATASET)
        for name, found in network.numbers().items():
            np.testing.assert_array_equal(found, after[name])


def test_a_long_name(tmp_path: Path) -> None:
    """Names in the format have at most 63 bytes, with what is put before them."""
    file = tmp_path / "weights.gguf"
    with Context() as context:
        x = context.input((2, 3), name="x")
        w = context.from_numpy(np.ones((4, 3), np.float32), name="w" * 63)
        context.allocate("CPU")
        with Trainer(x, x @ w.T, n_threads=1) as made:
            made.fit(Dataset(np.ones((2, 3)), [0, 1]), 3)
            made.save(file)
            expected = w.numpy(copy=True)
            w.set(np.zeros((4, 3)))
            made.load(file)
            assert made.steps == 3
            np.testing.assert_array_equal(w.numpy(), expected)
    with GGUFFile(file) as saved:
        assert set(saved.tensors) == {"w" * 63, "training.m.0", "training.v.0"}


def change(file: Path, **changes: Any) -> None:
    """Write it anew with tensors and keys changed, or left out where the change is None."""
    with GGUFFile(file) as old, GGUFWriter(file) as new:
        for key in old.metadata:
            if key not in changes:
                new.set(key, old.metadata[key])
        for name, tensor in old.tensors.items():
            if name not in changes:
                new.add_tensor(name, np.array(tensor.numpy()))
        for name, value in changes.items():
            if isinstance(value, np.ndarray):
                new.add_tensor(name, value)
            elif value is not None:
                new.set(name, value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"w1": None}, "there is no tensor 'w1'"),
        ({"w1": np.ones((2, 2), np.float32)}, r"'w1' has shape \(2, 2\), expected \(7, 6\)"),
        ({"training.m.w1": None}, "there is no tensor 'training.m.w1'"),
        (
            {"training.m.w1": None, "training.v.w1": None, "training.steps": 0},
            "the state lacks parameters, or has others",
        ),
        (
            {
                **dict.fromkeys(f"training.m.{name}" for name in ("w1", "b1", "w2", "b2")),
                "training.steps": 0,
            },
            "there is no tensor 'training.m.",
        ),
        ({"training.v.w1": None}, "there is no tensor 'training.v.w1'"),
        ({"training.optimizer": "sgd"}, "the state is that of sgd, expected adamw"),
        ({"training.steps": None}, "training.steps is None, expected a count"),
        ({"training.steps": -1}, "training.steps is -1, expected a count"),
        ({"training.epochs": "x"}, "training.epochs is 'x', expected a count"),
        ({"training.epochs": True}, "training.epochs is True, expected a count"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "weights.gguf"
    trained(AdamW(0.01), 1, save=file)
    change(file, **changes)
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, n_threads=1) as made:
            made.fit(DATASET)
            before, moments = network.numbers(), made._current_moments()
            with pytest.raises(GGUFError, match=words):
                made.load(file)
            assert (made.steps, made.epochs) == (6, 1)
            for name, found in network.numbers().items():
                np.testing.assert_array_equal(found, before[name])
            for number, found in made._current_moments().items():
                np.testing.assert_array_equal(found, moments[number])


@pytest.mark.parametrize("steps", [0, 6])
def test_a_state_of_another_optimiser_changes_nothing(steps: int, tmp_path: Path) -> None:
    """Means of AdamW's, in a file that says that it is of SGD."""
    file = tmp_path / "weights.gguf"
    trained(AdamW(0.01), 1, save=file)
    change(file, **{"training.optimizer": "sgd", "training.steps": steps})
    with Context() as context:
        network = Network(context, 7)
        before = network.numbers()
        with Trainer(network.x, network.y, optimizer=SGD(0.1), n_threads=1) as made:
            with pytest.raises(GGUFError, match="lacks parameters, or has others"):
                made.load(file)
            assert (made.steps, made.epochs) == (0, 0)
        for name, found in network.numbers().items():
            np.testing.assert_array_equal(found, before[name])


def test_a_state_before_the_first_step_may_have_no_means(tmp_path: Path) -> None:
    """They are zeros then."""
    file = tmp_path / "weights.gguf"
    trained(AdamW(0.01), 1, save=file)
    names = [f"training.{kind}.{name}" for kind in "mv" for name in ("w1", "b1", "w2", "b2")]
    change(file, **dict.fromkeys(names), **{"training.steps": 0})
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, n_threads=1) as made:
            made.fit(DATASET)
            made.load(file)
            assert (made.steps, made.epochs) == (0, 1)
            assert all(
                not numbers.any() for pair in made._current_moments().values() for numbers in pair
            )


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["__init__", "set_moments"])
def test_what_has_been_loaded_stays_without_the_memory_to_go_on(
    where: str, error: Any, state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, counts and means are those of one file, whatever comes after they were read."""
    file = tmp_path / "weights.gguf"
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, optimizer=AdamW(0.05), n_threads=1) as made:
            made.fit(DATASET, 2)
            made.save(file, optimizer_state=state)
            saved = network.numbers()
            made.fit(DATASET)
            expected = network.numbers()
            made.fit(DATASET, 3)

            def fail(*_: Any) -> None:
                raise error

            monkeypatch.setattr(_engine.Engine, where, fail)
            if state or where == "__init__":
                with pytest.raises(error):
                    made.load(file)
            else:
                made.load(file)  # there are no means to be set
            monkeypatch.undo()
            assert (made.steps, made.epochs) == ((12, 2) if state else (0, 0))
            for name, found in network.numbers().items():
                np.testing.assert_array_equal(found, saved[name])
            if state:
                made.save(file)
                made.load(file)
                made.fit(DATASET)
                for name, found in network.numbers().items():
                    np.testing.assert_allclose(found, expected[name], 1e-4, 1e-6)


def test_loading_that_is_interrupted_is_finished_by_loading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the writing of the weights; what was learnt before is not taken for the file's."""
    file = tmp_path / "weights.gguf"
    with Context() as context:
        network = Network(context)
        with Trainer(network.x, network.y, optimizer=AdamW(0.05), n_threads=1) as made:
            made.fit(DATASET, 2)
            made.save(file)
            saved, moments = network.numbers(), made._current_moments()
            made.fit(DATASET)
            other, real, calls = network.numbers(), Tensor.set, [0]

            def interrupted(self: Tensor, *arguments: Any) -> None:
                calls[0] += 1
                if calls[0] == 3:
                    raise KeyboardInterrupt
                real(self, *arguments)

            monkeypatch.setattr(Tensor, "set", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.load(file)
            monkeypatch.undo()
            assert (made.steps, made.epochs) == (18, 3)
            for name, found in network.numbers().items():
                np.testing.assert_array_equal(found, other[name])
            made.load(file)
            assert (made.steps, made.epochs) == (12, 2)
            for name, found in network.numbers().items():
                np.testing.assert_array_equal(found, saved[name])
            for number, found in made._current_moments().items():
                np.testing.assert_array_equal(found, moments[number])


def test_names_by_which_nothing_can_be_saved(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    for names, words in (
        (("", "b"), "parameter [01] has no name"),
        (("a", "a"), "two parameters have the name 'a'"),
        (("training.m.a", "a"), "begins with 'training.'"),
    ):
        with Context() as context:
            x = context.input((2, 3), name="x")
            w = [context.from_numpy(np.ones((3, 3), np.float32), name=name) for name in names]
            context.allocate("CPU")
            with Trainer(x, x @ w[0].T @ w[1].T, n_threads=1) as made:
                with pytest.raises(ValueError, match=words):
                    made.save(file)
                made.predict(np.ones((2, 3)))
    assert not file.exists()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with Context() as context:
        network = Network(context)
        made = Trainer(network.x, network.y, n_threads=1)
        with pytest.raises(FileNotFoundError):
            made.load(tmp_path / "none.gguf")
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            made.save(tmp_path / "none" / "none.gguf")
        made.close()
        for use in (made.save, made.load):
            with pytest.raises(ValueError, match="is closed"):
                use(tmp_path / "none.gguf")
