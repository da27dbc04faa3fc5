"""Copies of a graph: the same operations on tensors of their own, to be allocated once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import capi
from ._handles import address
from ._loader import ffi
from ._runtime import helper
from .capi import types


def copy(
    tensors: Sequence[types.ggml_tensor], more: int = 0
) -> tuple[types.ggml_context, list[types.ggml_tensor]]:
    """A context, the caller's to free, with copies of `tensors`, which are in order of computation.

    Those with memory of their own stand for themselves. There is room for a graph of them all,
    `more` besides, and what `filled` adds.
    """
    n = len(tensors)
    room = n + more + 2
    size = room * capi.ggml_tensor_overhead() + capi.ggml_graph_overhead_custom(room, False)
    context = capi.ggml_init(mem_size=size, no_alloc=True)
    originals: Any = ffi.new("struct ggml_tensor *[]", list(tensors))
    copies: Any = ffi.new("struct ggml_tensor *[]", n)
    helper("ggml_cffi_copy_tensors", context, originals, n, copies)
    return context, list(copies)


def put_in(
    context: types.ggml_context,
    copies: Sequence[types.ggml_tensor],
    places: Sequence[int],
    barriers: Mapping[int, int],
) -> list[types.ggml_tensor]:
    """Put copies (``ggml_cont``) of some tensors into a graph, used in their place by what follows.

    `places` says where each tensor comes to stand, `barriers` where the copies do, and where that
    stands that each is of. Gives all in order of computation.
    """
    if not barriers:  # and so each stands where it stood
        return list(copies)
    found: list[Any] = [None] * (len(copies) + len(barriers))
    for place, one in zip(places, copies, strict=True):
        found[place] = one
    instead: dict[int, Any] = {}
    for place, one in enumerate(found):
        if one is None:
            original = found[barriers[place]]
            found[place] = made = capi.ggml_cont(context, original)
            capi.ggml_set_name(made, capi.ggml_get_name(original))
            instead[address(original)] = made
            continue
        for i, operand in enumerate(one.src if instead else ()):
            if operand and address(operand) in instead:
                one.src[i] = instead[address(operand)]
        if one.view_src and address(one.view_src) in instead:
            one.view_src = instead[address(one.view_src)]
    return found


def filled(
    context: types.ggml_context, tensors: Sequence[types.ggml_tensor]
) -> Sequence[types.ggml_tensor]:
    """The tensors of a graph, with one more where they need no memory at all.

    To allocate only what is empty, ggml has no address: it takes it for not allocated, and aborts.
    """
    own = [one for one in tensors if not one.buffer and not one.view_src]
    if not all(capi.ggml_is_empty(one) for one in own):
        return tensors
    filler = capi.ggml_new_tensor_1d(context, capi.GGML_TYPE_F32, 1)
    capi.ggml_set_input(filler)
    return [*tensors, filler]


def graph_of(
    context: types.ggml_context, tensors: Sequence[types.ggml_tensor]
) -> types.ggml_cgraph:
    """A graph of these tensors, which are in order of computation."""
    graph = capi.ggml_new_graph_custom(context, len(tensors) + 1, False)
    for tensor in tensors:  # operands first, so that ggml never goes deep
        capi.ggml_build_forward_expand(graph, tensor)
    return graph


@contextlib.contextmanager
def copied(
    tensors: Sequence[types.ggml_tensor],
) -> Iterator[tuple[list[types.ggml_tensor], types.ggml_cgraph]]:
    """Copies of `tensors`, and their graph, for the time of the block."""
    context, copies = copy(tensors)
    try:
        yield copies, graph_of(context, filled(context, copies))
    finally:
        capi.ggml_free(context)
