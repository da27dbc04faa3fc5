"""A small network learns to read handwritten digits: scikit-learn's, 1,797 of 8 x 8 pixels.

Needs scikit-learn, which has the digits: pip install scikit-learn
"""

import tempfile
from pathlib import Path

import numpy as np

from ggml_cffi import Context, ops
from ggml_cffi.training import AdamW, Dataset, Trainer

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(
        f"this example needs scikit-learn (pip install scikit-learn): {error}"
    ) from None

BATCH, HIDDEN, EPOCHS = 32, 64, 30
rng = np.random.default_rng(0)

digits = load_digits()
order = rng.permutation(len(digits.target))
pixels, labels = digits.data[order] / 16, digits.target[order]
train, test = Dataset(pixels[:1440], labels[:1440]), Dataset(pixels[1440:], labels[1440:])


def weights(n_out, n_in):
    """Random numbers that keep the size of what goes through them (He et al., 2015)."""
    return rng.standard_normal((n_out, n_in), np.float32) * np.sqrt(2 / n_in, dtype=np.float32)


def rate(step):
    """A learning rate that falls along a cosine, from 0.004 to 0."""
    return 0.002 * (1 + np.cos(np.pi * step / (EPOCHS * len(train) // BATCH)))


with Context() as ctx:
    w1 = ctx.from_numpy(weights(HIDDEN, 64), name="w1")
    b1 = ctx.from_numpy(np.zeros(HIDDEN, np.float32), name="b1")
    w2 = ctx.from_numpy(weights(10, HIDDEN), name="w2")
    b2 = ctx.from_numpy(np.zeros(10, np.float32), name="b2")
    ctx.allocate("CPU")
    x = ctx.input((BATCH, 64), name="pixels")
    logits = ops.relu(x @ w1.T + b1) @ w2.T + b2

    def told(epoch, numbers):
        if epoch in (1, 2, 5, 10, 20, 30):
            print(f"epoch {epoch:2}:", *(f"{name} {n:.3f}" for name, n in numbers.items()))

    # so small a network that threads would mostly wait for each other
    with Trainer(x, logits, optimizer=AdamW(rate, weight_decay=0.01), n_threads=1) as trainer:
        trainer.fit(train, EPOCHS, validation_data=test, on_epoch=told)
        accuracy = trainer.evaluate(test)["accuracy"]
        print(f"test accuracy: {accuracy:.1%}")
        confused = trainer.predict(test.data).argmax(axis=1) != test.labels
        print(f"wrong: {confused.sum()} of {len(test)}")

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "digits.gguf")
            trainer.save(file)
            w1.set(np.zeros(w1.shape))
            trainer.load(file)  # fit would go on from here
            print("the same after loading:", trainer.evaluate(test)["accuracy"] == accuracy)
