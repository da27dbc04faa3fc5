"""A network of two layers as a graph, and once more in NumPy, with its gradients and optimisers."""

from __future__ import annotations

from typing import Any

import numpy as np
from _references import opt_step_adamw, opt_step_sgd

from ggml_cffi import Context, ops

BATCH, N_IN, N_HIDDEN, N_OUT = 10, 6, 7, 3


def weights(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"w1": (N_HIDDEN, N_IN), "b1": (N_HIDDEN,), "w2": (N_OUT, N_HIDDEN), "b2": (N_OUT,)}
    return {n: rng.standard_normal(s, dtype=np.float32) / 2 for n, s in shapes.items()}


def data(n: int = 60, seed: int = 1) -> tuple[Any, Any]:
    """Data, and classes that can be learnt."""
    x = np.random.default_rng(seed).standard_normal((n, N_IN), dtype=np.float32)
    return x, x[:, :N_OUT].argmax(axis=1)


class Network:
    """Its tensors, allocated on the CPU; `between` makes something of the inputs before."""

    def __init__(self, ctx: Context, seed: int = 0, between: Any = None) -> None:
        self.weights = {n: ctx.from_numpy(array, name=n) for n, array in weights(seed).items()}
        w = self.weights
        self.x = ctx.input((BATCH, N_IN), name="x")
        ctx.allocate("CPU")
        hidden = ops.relu((self.x if between is None else between(self.x)) @ w["w1"].T + w["b1"])
        self.y = hidden @ w["w2"].T + w["b2"]

    def numbers(self) -> dict[str, Any]:
        return {name: one.numpy(copy=True) for name, one in self.weights.items()}


class Reference:
    """The same network in float64, which is trained by the formulas."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = {n: array.astype(float) for n, array in weights(seed).items()}
        zeros = {n: np.zeros_like(array) for n, array in self.weights.items()}
        self.m, self.v = zeros, {n: array.copy() for n, array in zeros.items()}
        self.steps = 0

    def outputs(self, x: Any) -> Any:
        w = self.weights
        return np.maximum(x @ w["w1"].T + w["b1"], 0) @ w["w2"].T + w["b2"]

    def loss(self, kind: str, x: Any, labels: Any) -> tuple[float, Any]:
        """The loss, and its gradient by the outputs."""
        y = self.outputs(x)
        if kind == "mean":
            return y.mean(), np.full_like(y, 1 / y.size)
        if kind == "sum":
            return y.sum(), np.ones_like(y)
        if kind == "mean_squared_error":
            return np.square(y - labels).mean(), 2 * (y - labels) / y.size
        exps = np.exp(y - y.max(axis=1, keepdims=True))
        probabilities = exps / exps.sum(axis=1, keepdims=True)
        each = -(labels * np.log(probabilities)).sum(axis=1)
        slopes = probabilities * labels.sum(axis=1, keepdims=True) - labels
        return each.mean(), slopes / len(y)

    def gradients(self, kind: str, x: Any, labels: Any) -> dict[str, Any]:
        w = self.weights
        before = x @ w["w1"].T + w["b1"]
        dy = self.loss(kind, x, labels)[1]
        dh = (dy @ w["w2"]) * (before > 0)
        hidden = np.maximum(before, 0)
        return {"w1": dh.T @ x, "b1": dh.sum(0), "w2": dy.T @ hidden, "b2": dy.sum(0)}

    def step(self, kind: str, x: Any, labels: Any, optimizer: Any, rate: float) -> None:
        self.steps += 1
        for name, gradient in self.gradients(kind, x, labels).items():
            old = self.weights[name]
            if not hasattr(optimizer, "beta1"):
                new = opt_step_sgd(old, gradient, (rate, optimizer.weight_decay))
            else:
                one, two = optimizer.beta1, optimizer.beta2
                corrections = 1 / (1 - one**self.steps), 1 / (1 - two**self.steps)
                fixed = (rate, one, two, optimizer.epsilon, optimizer.weight_decay)
                m, v = self.m[name], self.v[name]
                new = opt_step_adamw(old, gradient, m, v, (*fixed, *corrections))
                self.m[name] = m * one + gradient * (1 - one)
                self.v[name] = v * two + gradient**2 * (1 - two)
            self.weights[name] = new


def one_hot(classes: Any) -> Any:
    return np.eye(N_OUT)[classes]
