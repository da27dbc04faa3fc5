"""Each operation of `ops` with operands, arguments and the reference to compare it with."""

from __future__ import annotations

from dataclasses import replace

from ggml_cffi import ops

from . import axes, elementwise, images, positions, products, shapes  # noqa: F401 # fill CASES
from .case import CASES, WITHOUT_REFERENCE

__all__ = ["CASES", "WITHOUT_REFERENCE"]

WITHOUT_REFERENCE["custom"] = "a function of the caller's computes it: test_custom.py"
WITHOUT_REFERENCE["flash_attn_back"] = "ggml aborts in it: not adapted to flash_attn_ext"


def _with_inplace() -> None:
    """What works in place gives the same: every case of an operation is one of its ..._inplace."""
    known = {one.op for one in CASES}
    for one in list(CASES):
        name = f"{one.op}_inplace"
        if name in ops.__all__ and name not in known:
            CASES.append(replace(one, op=name, label=one.label.replace(one.op, name, 1)))


_with_inplace()
