"""Tensors of ggml as the planner's nodes. Each is read at once; those of a kind share one."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence

from .. import capi
from .._handles import addresses
from .._loader import ffi
from ..capi import types
from ..enums import ggml_op, ggml_type
from ._rules import Kind, Node

#: What is read of a tensor: arrays as bytes, all else as numbers.
_FIELDS = ("type", "ne", "nb", "op", "op_params", "src", "view_src", "view_offs", "name")
_NUMBERS = {4: "I", 8: "Q"}
_POINTER = _NUMBERS[ffi.sizeof("void *")]
#: So many pointers, as numbers.
_POINTERS = [struct.Struct(f"={n}{_POINTER}") for n in range(capi.GGML_MAX_SRC + 1)]


def _record() -> struct.Struct:
    """The `_FIELDS` of `struct ggml_tensor`, which must be in this order there."""
    fields = dict(ffi.typeof("struct ggml_tensor").fields)
    code, end = "=", 0
    for name in _FIELDS:
        field = fields[name]
        size = ffi.sizeof(field.type)
        assert field.offset >= end, "ggml has put the fields of tensors into another order"
        what = f"{size}s" if field.type.kind == "array" else _NUMBERS[size]
        code += f"{field.offset - end}x{what}"
        end = field.offset + size
    return struct.Struct(code)


_RECORD = _record()


def nodes_of(order: Sequence[types.ggml_tensor]) -> list[Node]:
    """The nodes of tensors, which are in order of computation, with all that they are made from."""
    numbers: dict[int, int | None] = {one: i for i, one in enumerate(addresses(order))}
    numbers[0] = None
    read = _RECORD.unpack_from
    size = _POINTERS[1].size
    kinds: dict[Hashable, Kind] = {}
    nodes = []
    for tensor in order:
        type_, ne, nb, op, params, src, root, offset, name = read(ffi.buffer(tensor))
        key = type_, ne, nb, op, params, offset
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _kind_of(tensor)
        n_src = -(-len(src.rstrip(b"\0")) // size)  # up to the last one that is not NULL
        operands = tuple([numbers[one] for one in _POINTERS[n_src].unpack_from(src)])
        text = name.partition(b"\0")[0].decode("utf-8", "surrogateescape")
        nodes.append(Node(text, kind, operands, numbers[root]))
    return nodes


def _kind_of(tensor: types.ggml_tensor) -> Kind:
    type_ = ggml_type(tensor.type)
    return Kind(
        op=op_name(tensor),
        type=int(type_),
        block_size=capi.ggml_blck_size(type_),
        type_size=capi.ggml_type_size(type_),
        ne=tuple(tensor.ne),
        nb=tuple(tensor.nb),
        params=bytes(ffi.buffer(tensor.op_params)),
        offset=tensor.view_offs,
    )


def op_name(tensor: types.ggml_tensor) -> str:
    """The operation that makes a tensor, as the table of rules has it."""
    return ggml_op(tensor.op).name.removeprefix("GGML_OP_")
