"""Graphs in graphviz's language, DOT."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from . import capi
from ._handles import address
from ._splits import split_in_words
from .dtypes import type_name
from .enums import ggml_op
from .tensor import Tensor

_COLORS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#fce5cd", "#d0e0e3", "#ead1dc")


def to_dot(
    tensors: Iterable[Tensor],
    inputs: Iterable[Tensor],
    outputs: Mapping[str, Tensor],
    places: Mapping[int, str] | None = None,
) -> str:
    """A digraph of tensors, operands before results.

    Weights are boxes, inputs parallelograms, results ellipses; outputs have a double line, and the
    name that they go by. `places` says by a result's address which backend computes it. An edge
    goes from an operand to the result, with its number where there are several; a dashed one from
    what a tensor is a view of.
    """
    tensors, places = list(tensors), places or {}
    given = {address(one.handle) for one in inputs}
    named: dict[int, list[str]] = {}
    for name, one in outputs.items():
        named.setdefault(address(one.handle), []).append(name)
    colors = {place: _COLORS[i % len(_COLORS)] for i, place in enumerate(_unique(places.values()))}
    numbers = {address(one.handle): i for i, one in enumerate(tensors)}
    lines = ["digraph ggml {", "  rankdir=TB;", '  node [fontname="sans-serif", fontsize=10];']
    for one in tensors:
        key = address(one.handle)
        is_result = one.op != ggml_op.GGML_OP_NONE
        told = [*_described(one), *filter(None, [split_in_words(one.handle)])]
        shape = "ellipse" if is_result else "parallelogram" if key in given else "box"
        style = [f"shape={shape}"]
        if key in places:
            told.append(places[key])
            style += ["style=filled", f'fillcolor="{colors[places[key]]}"']
        if key in named:
            names = [name for name in named[key] if name and name != one.name]
            told.append(" ".join(["output", *names]))
            style.append("peripheries=2")
        label = "\\n".join(map(_escaped, told))
        lines.append(f'  t{numbers[key]} [label="{label}", {", ".join(style)}];')
    for one in tensors:
        lines += _edges(one.handle, numbers)
    return "\n".join([*lines, "}"]) + "\n"


#: How long a notebook waits for a drawing, in seconds.
_PATIENCE = 20


def to_svg(dot: str) -> str | None:
    """Drawn by graphviz's ``dot``; None where that is not installed, fails or takes long."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot, capture_output=True, encoding="utf-8", timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sorted(names)))


def _described(tensor: Tensor) -> list[str]:
    """Its name, the operation, and type and shape."""
    parts = [tensor.name] if tensor.name else []
    if tensor.op != ggml_op.GGML_OP_NONE:
        parts.append(capi.ggml_op_desc(tensor.handle) or "")
    return [*parts, f"{type_name(tensor.type)} {tensor.shape}"]


def _edges(handle: Any, numbers: Mapping[int, int]) -> list[str]:
    here = numbers[address(handle)]
    operands = [numbers[address(one)] for one in handle.src if one and address(one) in numbers]
    lines = []
    for i, there in enumerate(operands):
        if there == here:
            continue  # ggml_cast's result is an operand of itself
        label = f' [label="{i}"]' if len(operands) > 1 else ""
        lines.append(f"  t{there} -> t{here}{label};")
    origin = numbers.get(address(handle.view_src)) if handle.view_src else None
    if origin is not None and origin not in operands and origin != here:
        lines.append(f"  t{origin} -> t{here} [style=dashed];")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ").replace("\r", " ")
