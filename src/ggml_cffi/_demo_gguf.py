"""Reads the feed-forward weights of one layer of a GGUF file, for the demo."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from . import capi
from ._demo_block import Bytes, FeedForward, Floats, Weight
from ._handles import Handle
from ._loader import ffi
from .errors import GGMLError

# Those that gate with GELU, by llama.cpp; all others with SiLU.
_GELU = ("gemma", "jina-bert-v2")


class ModelError(Exception):
    """A file cannot be used for the demo; the text says why in one line."""


def read_layer(path: Path, layer: int) -> FeedForward:
    """Read gate, up and down of a layer; their data stays in the file, mapped to memory.

    Raises ModelError, with the file's name, for what is no GGUF file of such a model.
    """
    reference = _reference()
    try:
        return _read(path, layer, reference)
    except (ModelError, GGMLError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(f"{_plain(str(path))}: {_plain(reason)}") from error


def _plain(text: str, limit: int = 500) -> str:
    """A text that may come from a file, fit for a terminal: one line, not endless."""
    text = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _reference() -> Any:
    """The `gguf` package: its dequantiser is the reference. It is not ours to require."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        advice = "python -m pip install gguf"
        raise ModelError(f"--model needs the package gguf, to check against: {advice}") from error


def _read(path: Path, layer: int, reference: Any) -> FeedForward:
    if not path.is_file():
        raise ModelError("is no file" if path.exists() else "there is no such file")
    with ExitStack() as stack:
        made = ffi.new("struct ggml_context *[1]")
        file = capi.gguf_init_from_file(path, no_alloc=True, ctx=made)
        stack.callback(capi.gguf_free, file)
        stack.callback(capi.ggml_free, made[0])
        architecture = _architecture(file)
        names = _names(file, layer)
        bytes_ = np.memmap(path, np.uint8, "r")
        gate, up, down = (_weight(file, made[0], name, bytes_, reference) for name in names)
    _check_shapes(gate, up, down)
    return FeedForward(
        gate,
        up,
        down,
        gating="GEGLU" if architecture.startswith(_GELU) else "SwiGLU",
        origin=f"layer {layer} of {_plain(path.name)} ({_plain(architecture)})",
    )


def _architecture(file: Handle) -> str:
    key = "general.architecture"
    found = capi.gguf_find_key(file, key)
    if found < 0 or capi.gguf_get_kv_type(file, found) != capi.GGUF_TYPE_STRING:
        raise ModelError(f"has no {key}: it is no model")
    return capi.gguf_get_val_str(file, found)


def _names(file: Handle, layer: int) -> list[str]:
    """The names of gate, up and down of a layer that has these and no more."""
    every = [capi.gguf_get_tensor_name(file, i) for i in range(capi.gguf_get_n_tensors(file))]
    layers = [int(m[1]) for name in every if (m := re.match(r"blk\.([0-9]{1,9})\.", name))]
    if layer not in layers:
        have = f"its layers are 0 to {max(layers)}" if layers else "it has no layers"
        raise ModelError(f"there is no layer {layer}: {have}")
    block = f"blk.{layer}.ffn_"
    needed = [f"{block}{name}.weight" for name in ("gate", "up", "down")]
    if missing := [name for name in needed if name not in every]:
        have = ", ".join(name for name in every if name.startswith(block)) or "none of them"
        raise ModelError(f"{missing[0]} is missing, expected gate, up and down; it has {have}")
    # whatever else acts between them, such as a bias, would make another block
    inside = re.compile(rf"{re.escape(block)}(gate|up|down|sub_norm)\.")
    if other := [name for name in every if inside.match(name) and name not in needed]:
        raise ModelError(f"{other[0]}: the demo knows no such tensor")
    return needed


def _weight(file: Handle, ctx: Handle, name: str, bytes_: Bytes, reference: Any) -> Weight:
    found = capi.gguf_find_tensor(file, name)
    tensor = capi.ggml_get_tensor(ctx, name)
    if tensor is None or capi.ggml_n_dims(tensor) > 2 or capi.ggml_is_empty(tensor):
        raise ModelError(f"{name} is no matrix")
    begin = capi.gguf_get_data_offset(file) + capi.gguf_get_tensor_offset(file, found)
    end = begin + capi.gguf_get_tensor_size(file, found)
    if end > len(bytes_):
        raise ModelError(f"{name} ends at byte {end}, the file at {len(bytes_)}")
    rows = bytes_[begin:end].reshape(int(tensor.ne[1]), -1)
    type_ = capi.gguf_get_tensor_type(file, found)
    to_float = _dequantiser(reference, type_, name)
    return Weight(name, type_, (int(tensor.ne[0]), int(tensor.ne[1])), rows, to_float)


def _dequantiser(reference: Any, type_: int, name: str) -> Callable[[Bytes], Floats]:
    """The reference for a type; the numbers of the types are the same there."""
    try:
        kind = reference.GGMLQuantizationType(int(type_))
        one = np.zeros((1, reference.GGML_QUANT_SIZES[kind][1]), np.uint8)
        reference.dequantize(one, kind)
    except (KeyError, NotImplementedError, ValueError) as error:
        what = capi.ggml_type_name(type_)
        raise ModelError(f"{name}: the package gguf cannot dequantise {what}") from error
    return functools.partial(reference.dequantize, qtype=kind)


def _check_shapes(gate: Weight, up: Weight, down: Weight) -> None:
    if not gate.ne == up.ne == down.ne[::-1]:
        shapes = ", ".join(f"{w.name} is {list(w.ne)}" for w in (gate, up, down))
        raise ModelError(f"the shapes do not fit: {shapes}")
