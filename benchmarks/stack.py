"""A feed-forward stack, whose weights a meta device cuts: column-parallel, then row-parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_cffi import Context, Device, Graph, SplitState, ops


def split(info: Any, n_devs: int) -> SplitState:
    """`up` by columns and `down` by rows, in equal shares: one all-reduce a layer."""
    axis = 1 if info.name.startswith("up") else 0
    return SplitState.by_ratio(info, axis, [1] * n_devs)


class Stack:
    """x + down · relu(up · x), `n_layers` times, on a device; `hidden` numbers in a layer."""

    def __init__(
        self,
        device: Device,
        *,
        width: int,
        hidden: int,
        n_layers: int,
        n_tokens: int,
        n_threads: int | None = None,
        dtype: str = "f32",
    ) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((n_tokens, width), np.float32)
        self._weights = Context()
        self._inputs = Context()
        h = self._inputs.input((n_tokens, width), name="x")
        for i in range(n_layers):
            up, down = (
                (rng.standard_normal(shape, np.float32) / np.sqrt(shape[1])).astype(np.float32)
                for shape in ((hidden, width), (width, hidden))
            )
            w_up = self._weights.from_numpy(up, f"up{i}", dtype)
            w_down = self._weights.from_numpy(down, f"down{i}", dtype)
            h = h + ops.mul_mat(w_down, ops.relu(ops.mul_mat(w_up, h)))
        self._weights.allocate(device)
        self._compiled = Graph([h]).compile(device, n_threads)

    def run(self) -> npt.NDArray[np.float32]:
        """What the stack makes of `x`."""
        (found,) = self._compiled(x=self.x)  # type: ignore[misc]
        return found

    def close(self) -> None:
        """Free all that is on the device."""
        for one in (self._compiled, self._inputs, self._weights):
            one.close()
