"""Weights in memory that keeps them in an order of its own, for speed: a CPU's CPU_REPACK and AMX.

ggml neither reads it back nor looks at what is written to it or computed from it: a weight that it
has no such order for, a view and any operation but the products are refused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from . import capi
from .capi import types
from .dtypes import type_name
from .enums import ggml_backend_dev_type, ggml_type

_CPU = ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU


def reorders(kind: types.ggml_backend_buffer_type) -> bool:
    """Whether memory of this kind keeps weights in an order of its own."""
    where = capi.ggml_backend_buft_get_device(kind)
    if where is None or capi.ggml_backend_dev_type(where) != _CPU:
        return False
    return not capi.ggml_backend_buft_is_host(kind)


def is_reordered(handle: Any) -> bool:
    """Whether a tensor, or what it is a view of, is in such memory."""
    buffer = (handle.view_src or handle).buffer
    return bool(buffer) and reorders(capi.ggml_backend_buffer_get_type(buffer))


def takes(
    where: types.ggml_backend_device,
    kind: types.ggml_backend_buffer_type,
    type: ggml_type,
    ne: Sequence[int],
) -> bool:
    """Whether a product with a weight of this type and shape can be computed in such memory."""
    if 0 in ne or ne[0] % capi.ggml_blck_size(type):
        return False
    with contextlib.ExitStack() as made:
        ctx = capi.ggml_init(mem_size=8 * capi.ggml_tensor_overhead(), no_alloc=True)
        made.callback(capi.ggml_free, ctx)
        none = capi.ggml_backend_buft_alloc_buffer(kind, 0)
        made.callback(capi.ggml_backend_buffer_free, none)
        weight: Any = capi.ggml_new_tensor(ctx, type, list(ne))
        n0, _, n2, _ = weight.ne
        # it looks at where the weight is, which a buffer of no bytes says as well
        weight.buffer = none
        rows = capi.ggml_new_tensor_3d(ctx, ggml_type.GGML_TYPE_F32, n0, 1, 1)
        ids = capi.ggml_new_tensor_2d(ctx, ggml_type.GGML_TYPE_I32, 1, 1)
        try:
            if n2 == 1:
                product = capi.ggml_mul_mat(ctx, weight, rows)
            else:
                product = capi.ggml_mul_mat_id(ctx, weight, rows, ids)
        except ValueError:  # a type that is no operand of any product
            return False
        return capi.ggml_backend_dev_supports_op(where, product)


def check_weights(
    where: types.ggml_backend_device,
    kind: types.ggml_backend_buffer_type,
    weights: Iterable[tuple[str, ggml_type, tuple[int, ...]]],
) -> None:
    """Raise ValueError for the first weight (name, type, ggml's shape) that it does not take."""
    if not reorders(kind):
        return
    known: dict[tuple[ggml_type, tuple[int, ...]], bool] = {}
    for name, type, ne in weights:
        if (type, ne) not in known:
            known[type, ne] = takes(where, kind, type, ne)
        if not known[type, ne]:
            axes = max((i + 1 for i in range(len(ne)) if ne[i] != 1), default=1)
            raise ValueError(
                f"the weight {name!r}, {type_name(type)} of shape {ne[axes - 1 :: -1]}, cannot be "
                f"in {capi.ggml_backend_buft_name(kind)}, which has no product for it: give it "
                "memory of the device's own, in another Context"
            )


def check_uses(devices: Sequence[types.ggml_backend_device], nodes: Iterable[Any]) -> None:
    """Raise ValueError for a result that needs such a weight in the order that others have."""
    for node in nodes:
        for weight in node.src:
            if not weight or not is_reordered(weight):
                continue
            # views of it, and what works on them, would see the wrong order
            wrong = node.view_src or weight.view_src
            if wrong or not any(capi.ggml_backend_dev_supports_op(one, node) for one in devices):
                place = capi.ggml_backend_buffer_name((weight.view_src or weight).buffer)
                raise ValueError(
                    f"{capi.ggml_op_desc(node)} of the weight {capi.ggml_get_name(weight)!r}: "
                    f"{place} keeps it in an order of its own, for its products with float32 alone"
                )
