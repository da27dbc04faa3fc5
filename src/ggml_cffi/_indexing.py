"""``tensor[...]``: a view of a part, as far as ggml can view; and writing into such a part."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import capi, ops
from .capi import types
from .dtypes import as_array, type_name
from .tensor import Tensor, check_cast, check_memory, write

MAX_DIMS = 4


def index(tensor: Tensor, key: object) -> Tensor:
    """The part of a tensor that NumPy's basic indexing names: integers, slices, ``...``, None.

    Raises IndexError for too many indices and for one out of range, TypeError for what is no basic
    index, and ValueError for what ggml cannot view: steps below 1, a step along the last of four
    axes that all stay, a part of a block.
    """
    return _part(tensor, key, lambda *view: ops.view_4d(tensor, *view), ops.permute)


def assign(tensor: Tensor, key: object, value: npt.ArrayLike) -> None:
    """Write numbers into such a part. The description of it goes at once."""
    if isinstance(value, Tensor):
        raise TypeError(f"{value!r} is written by a graph: ops.cpy, ops.set_rows")
    numbers = as_array(value)
    if tensor.shares_memory:
        terms = _complete(tensor, key)
        taken = [term for term in terms if term is not None]
        for axis, term in enumerate(taken):
            if not isinstance(term, slice):
                _position(tensor, term, axis, tensor.shape[axis])
        place = (*terms, ...)
        part = tensor.numpy()[place]
        part[...] = _fitting(tensor, numbers, part.shape)
        return
    scratch = capi.ggml_init(mem_size=2 * capi.ggml_tensor_overhead(), no_alloc=True)

    def at_home(handle: types.ggml_tensor) -> Tensor:
        return Tensor(handle, tensor.context, MAX_DIMS)

    try:
        with tensor._held():
            view = _part(
                tensor,
                key,
                lambda *view: at_home(capi.ggml_view_4d(scratch, tensor.handle, *view)),
                lambda one, *axes: at_home(capi.ggml_permute(scratch, one.handle, *axes)),
            )
            fitting = _fitting(tensor, numbers, view.shape)
            check_memory(tensor)
            write(view, fitting)
    finally:
        capi.ggml_free(scratch)


def _fitting(tensor: Tensor, numbers: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Numbers that can be written there, in this shape."""
    try:
        found = np.broadcast_to(numbers, shape)
    except ValueError:
        raise ValueError(
            f"the array has shape {numbers.shape}, expected one that broadcasts to {shape} of a "
            f"part of {tensor!r}"
        ) from None
    check_cast(tensor, numbers)
    return found


def _part(
    tensor: Tensor, key: object, view_4d: Callable[..., Tensor], permute: Callable[..., Tensor]
) -> Tensor:
    counts, steps, offset = list(tensor._ne), list(tensor._nb), 0  # of ggml's axes
    block, size = capi.ggml_blck_size(tensor.type), capi.ggml_type_size(tensor.type)
    source: list[
        int | None
    ] = []  # which of ggml's axes each axis of the result is; None: a new one
    axis = 0
    for term in _complete(tensor, key):
        if term is None:
            source.append(None)
            continue
        length, inner = tensor.shape[axis], tensor.ndim - 1 - axis
        if isinstance(term, slice):
            start, stop, step = term.indices(length)
            count = max(0, -(-(stop - start) // step))
            if step < 1 and count > 1:
                raise ValueError(
                    f"{tensor!r}: a step of {step} along axis {axis}, which ggml cannot view"
                )
            source.append(inner)
        else:
            start, step, count = _position(tensor, term, axis, length), 1, 1
        blocks = block if inner == 0 else 1
        if start % blocks or count % blocks or (blocks > 1 and step != 1):
            raise ValueError(
                f"{tensor!r}: blocks of {type_name(tensor.type)} have {block} elements, and cannot "
                "be cut"
            )
        offset += start // blocks * steps[inner] if count else 0
        counts[inner], steps[inner] = count, steps[inner] * max(step, 1)
        axis += 1
    if len(source) > MAX_DIMS:
        raise IndexError(
            f"{tensor!r}: {len(source)} axes in the result, expected at most {MAX_DIMS}"
        )
    if steps == list(tensor._nb):
        _close_up(list(tensor._ne), counts, steps, block)
    first = _innermost(tensor, counts, steps, size)
    order = [first, *(inner for inner in range(MAX_DIMS) if inner != first)]
    n0, n1, n2, n3 = (counts[i] for i in order)
    nb1, nb2, nb3 = (steps[i] for i in order[1:])
    view = view_4d(n0, n1, n2, n3, nb1, nb2, nb3, offset)
    return _arranged(view, order, tensor.ndim, source, permute)


def _close_up(ne: list[int], counts: list[int], steps: list[int], block: int) -> None:
    """Give the outer axes that tensor and view have one element of the strides of a new tensor.

    Some of ggml's operations look at those. Of other axes the strides have to be the tensor's: a
    meta device knows by them which axis of the view is the one that is cut.
    """
    used = max((inner for inner in range(MAX_DIMS) if ne[inner] != 1), default=0)
    for outer in range(used + 1, MAX_DIMS):
        inner = outer - 1
        steps[outer] = steps[inner] * counts[inner] // (block if inner == 0 else 1)


def _innermost(tensor: Tensor, counts: list[int], steps: list[int], size: int) -> int:
    """An axis that can be the first of a view, whose elements ggml puts next to each other."""
    fitting = [inner for inner in range(MAX_DIMS) if steps[inner] == size]
    fitting += [inner for inner in range(MAX_DIMS) if counts[inner] < 2]
    if fitting:
        return fitting[0]
    raise ValueError(f"{tensor!r}: a step along the last axis, which ggml cannot view of four")


def _complete(tensor: Tensor, key: object) -> list[Any]:
    """The key as a term for each axis; None is a new one."""
    terms = list(key) if isinstance(key, tuple) else [key]
    if sum(term is Ellipsis for term in terms) > 1:
        raise IndexError("an index can have one ... only")
    named = sum(term is not None and term is not Ellipsis for term in terms)
    if named > tensor.ndim:
        raise IndexError(f"{tensor!r}: {named} indices for {tensor.ndim} axes")
    rest = [slice(None)] * (tensor.ndim - named)
    for where, term in enumerate(terms):
        if term is Ellipsis:
            return [*terms[:where], *rest, *terms[where + 1 :]]
    return [*terms, *rest]


def _position(tensor: Tensor, term: object, axis: int, length: int) -> int:
    try:
        if isinstance(term, (bool, np.bool_)):
            raise TypeError
        position = operator.index(term)  # type: ignore[arg-type] # it is asked what it is
    except TypeError:
        raise TypeError(
            f"{tensor!r}: {term!r} is no integer, slice, ... or None; ops.get_rows takes rows"
        ) from None
    if not -length <= position < length:
        raise IndexError(f"{tensor!r}: {position} is out of range for axis {axis} of {length}")
    return position % length


def _arranged(
    view: Tensor,
    order: list[int],
    ndim: int,
    source: list[int | None],
    permute: Callable[..., Tensor],
) -> Tensor:
    """The view with the axes of the result in their place; those that are gone come outermost."""
    spare = [inner for inner in range(MAX_DIMS) if inner not in source]
    spare.sort(key=lambda inner: inner < ndim)  # new axes are of those that have no stride yet
    wanted = [spare.pop(0) if inner is None else inner for inner in reversed(source)]
    wanted += sorted(spare)
    places = [wanted.index(inner) for inner in order]
    if places != list(range(MAX_DIMS)):
        view = permute(view, *places)
    return Tensor(view.handle, view.context, len(source))
