"""What ``tensor[...]`` gives: a view, as far as ggml can view."""

from __future__ import annotations

import operator
from typing import Any

from . import capi, ops
from .dtypes import type_name
from .tensor import Tensor

MAX_DIMS = 4


def index(tensor: Tensor, key: object) -> Tensor:
    """The part of a tensor that NumPy's basic indexing names: integers, slices, ``...``, None.

    Raises IndexError for too many indices and for one out of range, TypeError for what is no basic
    index, and ValueError for what ggml cannot view: steps below 1, a step along the last axis, a
    part of a block.
    """
    terms = _complete(tensor, key)
    viewed: list[tuple[int, int]] = []  # length and stride of each of the tensor's axes
    offset, axis = 0, 0
    source: list[int | None] = []  # which of the tensor's axes each axis of the result is
    block, size = capi.ggml_blck_size(tensor.type), capi.ggml_type_size(tensor.type)
    for term in terms:
        if term is None:
            source.append(None)
            continue
        length, stride = tensor.shape[axis], tensor.strides[axis]
        last = axis == tensor.ndim - 1
        if isinstance(term, slice):
            start, stop, step = term.indices(length)
            if step < 1 or (last and step > 1):
                raise ValueError(
                    f"{tensor!r}: a step of {step} along axis {axis}, which ggml cannot view"
                )
            count = max(0, -(-(stop - start) // step))
            source.append(axis)
        else:
            start, step, count = _position(tensor, term, axis, length), 1, 1
        if last and block > 1 and (start % block or count % block):
            raise ValueError(
                f"{tensor!r}: blocks of {type_name(tensor.type)} have {block} elements, and cannot "
                "be cut"
            )
        offset += start // block * size if last and block > 1 else start * stride
        viewed.append((count, stride * step))
        axis += 1
    if len(source) > MAX_DIMS:
        raise IndexError(
            f"{tensor!r}: the result would have {len(source)} axes, at most {MAX_DIMS}"
        )
    return _arranged(_viewed(tensor, viewed, offset), tensor.ndim, source)


def _complete(tensor: Tensor, key: object) -> list[Any]:
    """The key as a term for each axis; None is a new one."""
    terms = list(key) if isinstance(key, tuple) else [key]
    if sum(term is Ellipsis for term in terms) > 1:
        raise IndexError("an index can have one ... only")
    named = sum(term is not None and term is not Ellipsis for term in terms)
    if named > tensor.ndim:
        raise IndexError(f"{tensor!r}: {named} indices for {tensor.ndim} axes")
    rest = [slice(None)] * (tensor.ndim - named)
    if Ellipsis in terms:
        where = next(i for i, term in enumerate(terms) if term is Ellipsis)
        return [*terms[:where], *rest, *terms[where + 1 :]]
    return [*terms, *rest]


def _position(tensor: Tensor, term: object, axis: int, length: int) -> int:
    try:
        if isinstance(term, bool):
            raise TypeError
        position = operator.index(term)  # type: ignore[arg-type] # it is asked what it is
    except TypeError:
        raise TypeError(
            f"{tensor!r}: {term!r} is no integer, slice, ... or None; ops.get_rows takes rows"
        ) from None
    if not -length <= position < length:
        raise IndexError(f"{tensor!r}: {position} is out of range for axis {axis} of {length}")
    return position % length


def _viewed(tensor: Tensor, axes: list[tuple[int, int]], offset: int) -> Tensor:
    """A view with these lengths and strides, the tensor's last axis being ggml's first."""
    if not axes:
        return tensor
    counts = [count for count, _ in reversed(axes)] + [1] * (MAX_DIMS - len(axes))
    steps = [step for _, step in reversed(axes)]
    while len(steps) < MAX_DIMS:
        steps.append(steps[-1] * counts[len(steps) - 1] if len(steps) > 1 else tensor.handle.nb[1])
    return ops.view_4d(tensor, *counts, *steps[1:], offset)


def _arranged(view: Tensor, ndim: int, source: list[int | None]) -> Tensor:
    """The view with the axes of the result in their order; those that are gone come outermost."""
    # ggml's numbers: the tensor's axis i is ndim - 1 - i; those above are of length 1
    used = [ndim - 1 - axis for axis in source if axis is not None]
    spare = [axis for axis in range(MAX_DIMS) if axis not in used]
    spare.sort(key=lambda axis: axis < ndim)  # new axes are of those that have no stride yet
    order = [spare.pop(0) if axis is None else ndim - 1 - axis for axis in reversed(source)]
    order += sorted(spare)
    if order != list(range(MAX_DIMS)):
        places = [order.index(axis) for axis in range(MAX_DIMS)]
        view = ops.permute(view, *places)
    return Tensor(view.handle, view.context, len(source))
