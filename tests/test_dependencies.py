"""What the lower bounds in pyproject.toml promise; `nox -s core-3.10` installs just those."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ggml_cffi import Context

ROOT = Path(__file__).resolve().parent.parent


def test_numpy_warns_of_numbers_that_are_too_large() -> None:
    """NumPy before 1.24 did not: `Tensor.set` promises it."""
    with Context() as context:
        tensor = context.tensor((2,), "f16")
        context.allocate("CPU")
        with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
            tensor.set(np.array([1e6, 1.0], np.float32))
        assert tensor.numpy().tolist() == [np.inf, 1.0]


def test_each_requirement_of_users_has_a_lower_bound() -> None:
    """A plain one: noxfile.py makes an exact version of it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.M)
    extras = re.findall(r"^(?:bfloat16|progress) = \[(.*)\]", text, re.M)
    assert len(extras) == 2
    lines = re.findall(r'"([^"]+)"', ", ".join([dependencies, *extras]))
    assert {"cffi", "numpy", "ml_dtypes", "tqdm"} == {re.split(">=", line)[0] for line in lines}
    assert all(re.fullmatch(r"\w+>=[\d.]+", line) for line in lines)
