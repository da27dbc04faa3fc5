"""Graphs over which ggml would read or write behind its tensors: refused before anything runs.

Each refused call stands next to one as near to it as can be that is right and computes right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena
from _fake_backend import FakeDevice, buffer_type, require_layout
from _release import has, require

from ggml_cffi import capi, ffi, lib
from ggml_cffi._overrides._base import call
from ggml_cffi.enums import ggml_op_pool, ggml_scale_mode, ggml_sort_order
from ggml_cffi.errors import AbortError
from ggml_cffi.meta import MetaDevice, SplitState

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of some functions tried here

F16 = capi.GGML_TYPE_F16
BF16 = capi.GGML_TYPE_BF16
I8 = capi.GGML_TYPE_I8
I32 = capi.GGML_TYPE_I32
I64 = capi.GGML_TYPE_I64
Q4_0 = capi.GGML_TYPE_Q4_0
Q8_0 = capi.GGML_TYPE_Q8_0
Q8_1 = capi.GGML_TYPE_Q8_1
IQ2_S = capi.GGML_TYPE_IQ2_S

NUMPY: dict[int, Any] = {
    F32: np.float32,
    F16: np.float16,
    I8: np.int8,
    I32: np.int32,
    I64: np.int64,
}
ASC = ggml_sort_order.GGML_SORT_ORDER_ASC
MAX = ggml_op_pool.GGML_OP_POOL_MAX
AVG = ggml_op_pool.GGML_OP_POOL_AVG
Numbers = np.ndarray[Any, Any]


class Bench:
    """A graph with numbers: makes tensors with data, computes a result on one thread."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.ctx = arena.context()
        self.tensors: list[tuple[Any, Numbers]] = []
        self.rng = np.random.default_rng(7)

    def __call__(self, *ne: int, type: int = F32, data: Any = None) -> Any:
        """A new tensor; random numbers for floats, zeros for all else."""
        tensor = self.arena.tensor(*ne, type=type, name=f"t{len(self.tensors)}", ctx=self.ctx)
        shape = tuple(reversed(ne))
        if data is not None:
            numbers: Numbers = np.asarray(data, NUMPY[type]).reshape(shape)
        elif type in (F32, F16):
            numbers = self.rng.standard_normal(shape).astype(NUMPY[type])
        else:
            numbers = np.zeros(capi.ggml_nbytes(tensor), np.uint8)
        self.tensors.append((tensor, numbers))
        return tensor

    def permuted(self, a: int, b: int, c: int, d: int = 1, type: int = F32) -> Any:
        """Of extents a, b, c, d, with the second and third axis exchanged in memory."""
        return capi.ggml_permute(self.ctx, self(a, c, b, d, type=type), 0, 2, 1, 3)

    def odd(self, a: int, c: int) -> Any:
        """Contiguous for ggml, of extents a, 1, c, but nb[1] is that of the whole."""
        return self.permuted(a, 1, c)

    def data(self) -> list[Numbers]:
        return [numbers for _, numbers in self.tensors]

    def graph(self, result: Any) -> Any:
        graph = self.arena.graph(self.ctx, result)
        for tensor, numbers in self.tensors:
            if tensor.data:
                capi.ggml_backend_tensor_set(tensor, numbers, 0)
        return graph

    def run(self, result: Any) -> Numbers:
        capi.ggml_backend_graph_compute(self.arena.backend, self.graph(result))
        found = np.empty(tuple(reversed(list(result.ne))), NUMPY[result.type])
        capi.ggml_backend_tensor_get(result, found, 0)
        return found


@pytest.fixture
def cpu(one_thread: Any) -> Any:
    return one_thread


@pytest.fixture
def bench(cpu: Any) -> Iterator[Bench]:
    with Arena(cpu) as arena:
        yield Bench(arena)


Build = Callable[[Bench], Any]


@dataclass
class Case:
    name: str  # the function that is called, perhaps with a word on how
    wrong: Build
    right: Build
    expected: Callable[..., Any]  # from the data of the tensors of `right`
    needs: tuple[str, ...] = ()  # what not every release has

    @property
    def function(self) -> str:
        return f"ggml_{self.name.split(':')[0]}"


def sigmoid(x: Numbers) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Numbers) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def windows(x: Numbers, size: int) -> Numbers:
    return np.lib.stride_tricks.sliding_window_view(x, size, axis=-1)


def convolved(kernel: Numbers, data: Numbers) -> Numbers:
    """Of one channel and one image, without padding."""
    view = np.lib.stride_tricks.sliding_window_view(data[0, 0], kernel.shape[2:])
    return np.asarray((view * kernel[0, 0]).sum((-1, -2)))[None, None]


def six(t: Bench, n: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    return (t(n, 1, 1), t(n, 1, 1), t(n, 1, 1), t(n, 1, 1), t(n, 1, 1), t(n, 1, 1))


# ---- refused where they are built: no backend could do it


BUILT = [
    Case(
        "add1:of half precision",
        lambda t: capi.ggml_add1(t.ctx, t(8, 3), t(1, type=F16)),
        lambda t: capi.ggml_add1(t.ctx, t(8, 3), t(1)),
        lambda a, b: a + b,
    ),
    Case(
        "add1:of a type that nothing converts to",
        lambda t: capi.ggml_add1(t.ctx, t(256, 3, type=IQ2_S), t(1)),
        lambda t: capi.ggml_add1(t.ctx, t(8, 3, type=F16), t(1, type=F16)),
        lambda a, b: a + b,
    ),
    Case(
        "add:to a type that nothing converts to",
        lambda t: capi.ggml_add(t.ctx, t(256, 4, type=IQ2_S), t(256, 4)),
        lambda t: capi.ggml_add(t.ctx, t(256, 4), t(256, 4)),
        lambda a, b: a + b,
    ),
    Case(
        "set",
        lambda t: capi.ggml_set(t.ctx, t(4, 4), t(4, 2, type=I8), 16, 64, 64, 16),
        lambda t: capi.ggml_set(t.ctx, t(4, 4), t(4, 2), 16, 64, 64, 16),
        lambda a, b: np.concatenate([a[:1], b, a[3:]]),
    ),
    Case(
        "set_1d",
        lambda t: capi.ggml_set_1d(t.ctx, t(8), capi.ggml_transpose(t.ctx, t(4, 4, type=I8)), 0),
        lambda t: capi.ggml_set_1d(t.ctx, t(8), t(3), 4),
        lambda a, b: np.concatenate([a[:1], b, a[4:]]),
    ),
    Case(
        "silu_back:types",
        lambda t: capi.ggml_silu_back(t.ctx, t(8, 3), t(8, 3, type=F16)),
        lambda t: capi.ggml_silu_back(t.ctx, t(8, 3), t(8, 3)),
        lambda g, x: g * sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    ),
    Case(
        "rms_norm_back",
        lambda t: capi.ggml_rms_norm_back(
            t.ctx, t(4, 4), capi.ggml_transpose(t.ctx, t(4, 4, type=I8)), 0
        ),
        lambda t: capi.ggml_rms_norm_back(t.ctx, t(4, 4), t(4, 4), 0),
        lambda g, x: (
            (g - x * (g * x).sum(-1, keepdims=True) / (x * x).sum(-1, keepdims=True))
            / np.sqrt((x * x).mean(-1, keepdims=True))
        ),
        ("0.15: the right result of ggml_rms_norm_back",),
    ),
    Case(
        "soft_max_ext_back",
        lambda t: capi.ggml_soft_max_ext_back(t.ctx, t(8, 3), t(8, 3, type=F16), 1, 0),
        lambda t: capi.ggml_soft_max_ext_back(t.ctx, t(8, 3), t(8, 3), 1, 0),
        lambda g, y: (g - (g * y).sum(-1, keepdims=True)) * y,
    ),
    Case(
        "cross_entropy_loss_back",
        lambda t: capi.ggml_cross_entropy_loss_back(t.ctx, t(1), t(8, 3, type=F16), t(8, 3)),
        lambda t: capi.ggml_cross_entropy_loss_back(t.ctx, t(1), t(8, 3), t(8, 3)),
        lambda g, a, b: (softmax(a) - b) * g / 3,
    ),
    Case(
        "get_rows:of a type that nothing converts from",
        lambda t: capi.ggml_get_rows(t.ctx, t(256, 4, type=Q8_1), t(2, type=I32)),
        lambda t: capi.ggml_get_rows(t.ctx, t(8, 4), t(2, type=I32, data=[3, 1])),
        lambda a, i: a[i],
    ),
    Case(
        "get_rows_back:more indices than rows",
        lambda t: capi.ggml_get_rows_back(t.ctx, t(8, 2), t(64, type=I32), t(8, 4)),
        lambda t: capi.ggml_get_rows_back(t.ctx, t(8, 2), t(2, type=I32, data=[3, 1]), t(8, 4)),
        lambda g, i, _: np.stack([0 * g[0], g[1], 0 * g[0], g[0]]),
    ),
    Case(
        "cast:from a type that nothing converts from",
        lambda t: capi.ggml_cast(t.ctx, t(256, 4, type=Q8_1), F32),
        lambda t: capi.ggml_cast(t.ctx, t(256, 4), F16),
        lambda a: a.astype(np.float16),
    ),
    Case(
        "transpose:of blocks",
        lambda t: capi.ggml_transpose(t.ctx, t(32, 4, type=Q8_0)),
        lambda t: capi.ggml_cont(t.ctx, capi.ggml_transpose(t.ctx, t(32, 4))),
        lambda a: a.T,
    ),
    Case(
        "permute:of blocks",
        lambda t: capi.ggml_permute(t.ctx, t(32, 4, 2, type=Q8_0), 2, 1, 0, 3),
        lambda t: capi.ggml_cont(t.ctx, capi.ggml_permute(t.ctx, t(32, 4, 2), 2, 1, 0, 3)),
        lambda a: a.transpose(2, 1, 0),
    ),
    Case(
        "reshape:through blocks",
        lambda t: capi.ggml_reshape(t.ctx, t(32, type=Q8_0), t(1, 32)),
        lambda t: capi.ggml_cont(t.ctx, capi.ggml_reshape(t.ctx, t(32), t(8, 4))),
        lambda a, b=None: a.reshape(4, 8),
    ),
    Case(
        "rope:an odd row",
        lambda t: capi.ggml_rope(t.ctx, t(5, 2, 3), t(3, type=I32), 4, 0),
        lambda t: capi.ggml_rope(t.ctx, t(4, 2, 3), t(3, type=I32), 4, 0),
        lambda a, _: a,
    ),
    Case(
        "pool_1d",
        lambda t: capi.ggml_pool_1d(t.ctx, t(64, 2, type=Q4_0), MAX, 3, 1, 0),
        lambda t: capi.ggml_pool_1d(t.ctx, t(16, 2, type=F16), MAX, 3, 1, 0),
        lambda a: windows(a, 3).max(-1),
    ),
    Case(
        "pool_2d",
        lambda t: capi.ggml_pool_2d(t.ctx, t(8, 8, type=BF16), AVG, 2, 2, 2, 2, 0, 0),
        lambda t: capi.ggml_pool_2d(t.ctx, t(8, 8), AVG, 2, 2, 2, 2, 0, 0),
        lambda a: a.reshape(4, 2, 4, 2).mean((1, 3)),
    ),
    Case(
        "conv_2d_direct",
        lambda t: capi.ggml_conv_2d_direct(
            t.ctx, t(2, 2, 1, 1), t(32, 5, 1, 1, type=Q8_0), 1, 1, 0, 0, 1, 1
        ),
        lambda t: capi.ggml_conv_2d_direct(t.ctx, t(2, 2, 1, 1), t(8, 5, 1, 1), 1, 1, 0, 0, 1, 1),
        convolved,
    ),
    Case(
        "conv_2d_dw_direct",
        lambda t: capi.ggml_conv_2d_dw_direct(
            t.ctx, t(2, 2, 1, 1), t(8, 5, 1, 1, type=F16), 1, 1, 0, 0, 1, 1
        ),
        lambda t: capi.ggml_conv_2d_dw_direct(
            t.ctx, t(2, 2, 1, 1), t(8, 5, 1, 1), 1, 1, 0, 0, 1, 1
        ),
        convolved,
    ),
    Case(
        "conv_3d_direct",
        lambda t: capi.ggml_conv_3d_direct(
            t.ctx, t(2, 2, 1, 1), t(8, 5, 1, 1, type=F16), 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1
        ),
        lambda t: capi.ggml_conv_3d_direct(
            t.ctx, t(2, 2, 1, 1), t(8, 5, 1, 1), 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1
        ),
        convolved,
    ),
    Case(
        "ssm_conv",
        lambda t: capi.ggml_ssm_conv(t.ctx, t(6, 3, 1), t(4, 3, type=I32)),
        lambda t: capi.ggml_ssm_conv(t.ctx, t(6, 3, 1), t(4, 3)),
        lambda x, c: (windows(x[0], 4) * c[:, None]).sum(-1).T[None],
    ),
]


def names(cases: list[Case]) -> list[str]:
    return [case.name.replace(" ", "-") for case in cases]


@pytest.mark.parametrize("case", BUILT, ids=names(BUILT))
def test_refused_where_it_is_built(bench: Bench, case: Case) -> None:
    with pytest.raises(ValueError, match=f"{case.function}: requires "):
        case.wrong(bench)


# ---- refused where the CPU would compute it


COMPUTED = [
    Case(
        "argsort",
        lambda t: capi.ggml_argsort(t.ctx, t.permuted(8, 5, 3, 2), ASC),
        lambda t: capi.ggml_argsort(t.ctx, t(8, 5, 3, 2), ASC),
        lambda a: a.argsort(-1),
    ),
    Case(
        "top_k",
        lambda t: capi.ggml_top_k(t.ctx, t.permuted(8, 5, 3), 1),
        lambda t: capi.ggml_top_k(t.ctx, t(8, 5, 3), 1),
        lambda a: a.argmax(-1)[..., None],
    ),
    Case(
        "argsort:contiguous with one row in a plane",
        lambda t: capi.ggml_argsort(t.ctx, t.odd(8, 3), ASC),
        lambda t: capi.ggml_argsort(t.ctx, t(8, 1, 3), ASC),
        lambda a: a.argsort(-1),
    ),
    Case(
        "clamp",
        lambda t: capi.ggml_clamp(t.ctx, t.permuted(8, 5, 3), -1, 1),
        lambda t: capi.ggml_clamp(t.ctx, t(8, 5, 3), -1, 1),
        lambda a: a.clip(-1, 1),
    ),
    Case(
        "leaky_relu",
        lambda t: capi.ggml_leaky_relu(t.ctx, t.permuted(8, 5, 3), 0.5, False),
        lambda t: capi.ggml_leaky_relu(t.ctx, t(8, 5, 3), 0.5, False),
        lambda a: np.where(a > 0, a, a / 2),
    ),
    Case(
        "sum",
        lambda t: capi.ggml_sum(t.ctx, capi.ggml_transpose(t.ctx, t(8, 5))),
        lambda t: capi.ggml_sum(t.ctx, t.permuted(8, 5, 3)),
        lambda a: a.sum(),
    ),
    Case(
        "mean",
        lambda t: capi.ggml_mean(t.ctx, capi.ggml_transpose(t.ctx, t(8, 5))),
        lambda t: capi.ggml_mean(t.ctx, t.permuted(8, 5, 3)),
        lambda a: a.swapaxes(1, 2).mean(-1, keepdims=True),
    ),
    Case(
        "argmax",
        lambda t: capi.ggml_argmax(t.ctx, capi.ggml_transpose(t.ctx, t(8, 5))),
        lambda t: capi.ggml_argmax(t.ctx, t(8, 5)),
        lambda a: a.argmax(-1),
    ),
    Case(
        "count_equal",
        lambda t: capi.ggml_count_equal(t.ctx, t(8, 4, 2, type=I32), t(8, 4, 2, type=I32)),
        lambda t: capi.ggml_count_equal(
            t.ctx,
            t(4, 2, type=I32, data=range(8)),
            t(4, 2, type=I32, data=[0, 1, 0, 3, 4, 0, 6, 7]),
        ),
        lambda a, b: (a == b).sum(),
    ),
    Case(
        "silu_back",
        lambda t: capi.ggml_silu_back(t.ctx, t(8, 5, 3), t.permuted(8, 5, 3)),
        lambda t: capi.ggml_silu_back(t.ctx, t(8, 5, 3), t(8, 5, 3)),
        lambda g, x: g * sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    ),
    Case(
        "soft_max_ext_back:rows",
        lambda t: capi.ggml_soft_max_ext_back(t.ctx, t.odd(8, 3), t(8, 1, 3), 1, 0),
        lambda t: capi.ggml_soft_max_ext_back(t.ctx, t(8, 1, 3), t(8, 1, 3), 1, 0),
        lambda g, y: (g - (g * y).sum(-1, keepdims=True)) * y,
    ),
    Case(
        "cross_entropy_loss",
        lambda t: capi.ggml_cross_entropy_loss(t.ctx, t.permuted(8, 5, 3), t(8, 5, 3)),
        lambda t: capi.ggml_cross_entropy_loss(t.ctx, t(8, 5, 3), t(8, 5, 3)),
        lambda a, b: -(np.log(softmax(a)) * b).sum() / 15,
    ),
    Case(
        "cross_entropy_loss_back:rows",
        lambda t: capi.ggml_cross_entropy_loss_back(t.ctx, t(1), t.odd(8, 3), t(8, 1, 3)),
        lambda t: capi.ggml_cross_entropy_loss_back(t.ctx, t(1), t(8, 1, 3), t(8, 1, 3)),
        lambda g, a, b: (softmax(a) - b) * g / 3,
    ),
    Case(
        "get_rows",
        lambda t: capi.ggml_get_rows(t.ctx, capi.ggml_transpose(t.ctx, t(4, 8)), t(2, type=I32)),
        lambda t: capi.ggml_get_rows(t.ctx, t(8, 4), t(2, type=I32, data=[0, 3])),
        lambda a, i: a[i],
    ),
    Case(
        "diag_mask_zero_inplace",
        lambda t: capi.ggml_diag_mask_zero_inplace(
            t.ctx, capi.ggml_permute(t.ctx, t(4, 4, 2, 3), 0, 1, 3, 2), 0
        ),
        lambda t: capi.ggml_diag_mask_zero_inplace(t.ctx, t(4, 4, 2, 3), 0),
        lambda a: np.tril(a),
    ),
    Case(
        "im2col:planes with gaps",
        lambda t: capi.ggml_im2col(
            t.ctx, t(2, 2, 3), t.permuted(4, 4, 3), 1, 1, 0, 0, 1, 1, True, F32
        ),
        lambda t: capi.ggml_im2col(t.ctx, t(2, 2, 3), t(4, 4, 3), 1, 1, 0, 0, 1, 1, True, F32),
        lambda _, b: (
            np.lib.stride_tricks.sliding_window_view(b, (2, 2), axis=(1, 2))
            .transpose(1, 2, 0, 3, 4)
            .reshape(3, 3, 12)
        ),
    ),
    Case(
        "pool_1d:rows",
        lambda t: capi.ggml_pool_1d(t.ctx, t.permuted(8, 5, 3), MAX, 3, 1, 0),
        lambda t: capi.ggml_pool_1d(t.ctx, t(8, 5, 3), MAX, 3, 1, 0),
        lambda a: windows(a, 3).max(-1),
    ),
    Case(
        "pool_2d:planes",
        lambda t: capi.ggml_pool_2d(t.ctx, t.permuted(8, 4, 3), AVG, 2, 2, 2, 2, 0, 0),
        lambda t: capi.ggml_pool_2d(t.ctx, t(8, 4, 3), AVG, 2, 2, 2, 2, 0, 0),
        lambda a: a.reshape(3, 2, 2, 4, 2).mean((2, 4)),
    ),
    Case(
        "conv_transpose_2d_p0:several images",
        lambda t: capi.ggml_conv_transpose_2d_p0(t.ctx, t(1, 1, 1, 1), t(4, 3, 1, 2), 1),
        lambda t: capi.ggml_conv_transpose_2d_p0(t.ctx, t(1, 1, 1, 1), t(4, 3, 1, 1), 1),
        lambda k, a: k * a,
    ),
    Case(
        "win_part",
        lambda t: capi.ggml_win_part(t.ctx, t.permuted(3, 4, 4), 2),
        lambda t: capi.ggml_win_part(t.ctx, t(3, 2, 2), 2),
        lambda a: a,
    ),
    Case(
        "get_rel_pos",
        lambda t: capi.ggml_get_rel_pos(t.ctx, t(8, 3, type=BF16), 2, 2),
        lambda t: capi.ggml_get_rel_pos(t.ctx, t(8, 3, type=F16), 2, 2),
        lambda a: np.stack([np.stack([a[1], a[0]]), np.stack([a[2], a[1]])]),
    ),
    Case(
        "cpy:into shorter rows of blocks",
        lambda t: capi.ggml_cpy(t.ctx, t(256), t(32, 8, type=Q8_0)),
        lambda t: capi.ggml_cast(
            t.ctx, capi.ggml_cpy(t.ctx, t(32, 8, data=np.ones(256)), t(32, 8, type=Q8_0)), F32
        ),
        lambda a, _: a,
    ),
    Case(
        "rwkv_wkv7:a head that is no whole number of vectors",
        lambda t: capi.ggml_rwkv_wkv7(t.ctx, *six(t, 4), t(16, 1)),
        lambda t: capi.ggml_rwkv_wkv7(t.ctx, *six(t, 64), t(4096, 1, data=np.zeros(4096))),
        lambda r, w, k, v, a, b, s: np.concatenate(
            [v[0] * (r * k).sum(), (v[0].reshape(64, 1) * k[0]).reshape(64, 64)]
        ),
    ),
    Case(
        "mul_mat:a hint that is not true",
        lambda t: hinted(t, t(8, 4)),
        lambda t: hinted(t, t(2, 2, data=[1, 1, 1, -1])),
        lambda h, b: b @ h.T / np.sqrt(2),
        ("GGML_HINT_SRC0_IS_HADAMARD",),
    ),
    Case(
        "mul_mat:a transposed second matrix",
        lambda t: capi.ggml_mul_mat(t.ctx, t(4, 8), capi.ggml_transpose(t.ctx, t(8, 4))),
        lambda t: capi.ggml_mul_mat(
            t.ctx, t(4, 8), capi.ggml_cont(t.ctx, capi.ggml_transpose(t.ctx, t(8, 4)))
        ),
        lambda a, b: b.T @ a.T,
    ),
    Case(
        "add:transposed",
        lambda t: capi.ggml_add(t.ctx, capi.ggml_transpose(t.ctx, t(4, 8)), t(8, 4)),
        lambda t: capi.ggml_add(t.ctx, t(8, 4), capi.ggml_transpose(t.ctx, t(4, 8))),
        lambda a, b: a + b.T,
    ),
    Case(
        "rms_norm:transposed",
        lambda t: capi.ggml_rms_norm(t.ctx, capi.ggml_transpose(t.ctx, t(8, 5)), 0),
        lambda t: capi.ggml_rms_norm(t.ctx, t.permuted(8, 5, 3), 0),
        lambda a: a.swapaxes(1, 2) / np.sqrt((a.swapaxes(1, 2) ** 2).mean(-1, keepdims=True)),
    ),
    Case(
        "sum_rows:transposed",
        lambda t: capi.ggml_sum_rows(t.ctx, capi.ggml_transpose(t.ctx, t(8, 5))),
        lambda t: capi.ggml_sum_rows(t.ctx, t.permuted(8, 5, 3)),
        lambda a: a.swapaxes(1, 2).sum(-1, keepdims=True),
    ),
    Case(
        "repeat:transposed",
        lambda t: capi.ggml_repeat_4d(t.ctx, capi.ggml_transpose(t.ctx, t(8, 4)), 4, 16, 1, 1),
        lambda t: capi.ggml_repeat_4d(t.ctx, t(4, 8), 4, 16, 1, 1),
        lambda a: np.concatenate([a, a]),
    ),
    Case(
        "sqr:transposed",
        lambda t: capi.ggml_sqr(t.ctx, capi.ggml_transpose(t.ctx, t(8, 4))),
        lambda t: capi.ggml_sqr(t.ctx, t.permuted(8, 4, 3)),
        lambda a: a.swapaxes(1, 2) ** 2,
    ),
]


def hinted(t: Bench, matrix: Any) -> Any:
    result = capi.ggml_mul_mat(t.ctx, matrix, t(matrix.ne[0], 3))
    capi.ggml_mul_mat_set_hint(result, capi.GGML_HINT_SRC0_IS_HADAMARD)
    return result


@pytest.mark.parametrize("case", COMPUTED, ids=names(COMPUTED))
def test_refused_where_the_cpu_computes_it(bench: Bench, case: Case) -> None:
    require(*case.needs)
    result = case.wrong(bench)
    op = capi.ggml_op_desc(result)
    with pytest.raises(ValueError, match=f"ggml_backend_graph_compute: .*cpu_can.*: {op} .*of "):
        capi.ggml_backend_graph_compute(bench.arena.backend, bench.graph(result))


@pytest.mark.parametrize("case", BUILT + COMPUTED, ids=names(BUILT + COMPUTED))
def test_its_neighbour_computes_right(bench: Bench, case: Case) -> None:
    require(*case.needs)
    found = bench.run(case.right(bench))
    expected = np.asarray(case.expected(*bench.data()))
    assert found.size == expected.size
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-3, atol=1e-3)


def wrong_graph(bench: Bench) -> Any:
    result = capi.ggml_argsort(bench.ctx, bench.permuted(8, 5, 3), ASC)
    capi.ggml_set_name(result, "order")
    return result


def test_the_error_says_which_node(bench: Bench) -> None:
    result = wrong_graph(bench)
    with pytest.raises(
        ValueError, match=r"ARGSORT 'order' of f32\[8,5,3,1\] with gaps or permuted"
    ):
        capi.ggml_backend_graph_compute(bench.arena.backend, bench.graph(result))
    with pytest.raises(ValueError, match="first_axis_can_move") as of_another_call:
        capi.ggml_transpose(bench.ctx, bench(32, type=Q8_0))
    assert "order" not in str(of_another_call.value)


def test_every_way_to_compute_refuses(bench: Bench, cpu: Any) -> None:
    graph = bench.graph(wrong_graph(bench))
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_backend_graph_compute_async(cpu, graph)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_backend_graph_plan_create(cpu, graph)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_backend_compare_graph_backend(cpu, cpu, graph, lambda *_: True)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_graph_compute_with_ctx(bench.arena.context(no_alloc=False), graph, 1)
    plan = capi.ggml_graph_plan(graph, 1)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_graph_compute(graph, plan)


def test_each_use_of_a_table_of_indices_is_looked_at(bench: Bench) -> None:
    """Of two that follow one another and use other rows of it, too."""
    table = bench(2, 8, type=I32, data=[0] * 10 + [4, 0] + [3, 2, 1, 0])
    experts = bench(5, 3, 4)

    def product(row: int) -> Any:
        ids = capi.ggml_get_rows(bench.ctx, table, bench(1, type=I32, data=[row]))
        return capi.ggml_mul_mat_id(bench.ctx, experts, bench(5, 1, 1), ids)

    def run(*rows: int) -> Numbers:
        result = capi.ggml_add(bench.ctx, *map(product, rows))
        for leaf, _ in bench.tensors:
            capi.ggml_set_output(leaf)  # its memory is no other's
        return bench.run(result)

    for rows in ((5, 0), (0, 5)):
        with pytest.raises(IndexError, match=r"index 4 .*, of MUL_MAT_ID .*, is not in 0 \.\.\. 3"):
            run(*rows)
    assert run(6, 7).shape == (1, 1, 2, 3)


def scheduler(arena: Arena, *backends: Any) -> Any:
    made = capi.ggml_backend_sched_new(list(backends), None, 64, False, True)
    arena.callback(capi.ggml_backend_sched_free, made)
    return made


def test_a_scheduler_refuses(bench: Bench, cpu: Any) -> None:
    graph = bench.arena.graph(bench.ctx, wrong_graph(bench), allocate=False)
    sched = scheduler(bench.arena, cpu)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_backend_sched_graph_compute(sched, graph)
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_backend_sched_graph_compute_async(sched, graph)


def test_training_refuses(bench: Bench, cpu: Any) -> None:
    inputs = bench(8, 4)
    outputs = capi.ggml_mean(bench.ctx, capi.ggml_transpose(bench.ctx, inputs))
    with pytest.raises(ValueError, match="cpu_can"):
        capi.ggml_opt_init(
            backend_sched=scheduler(bench.arena, cpu),
            ctx_compute=bench.ctx,
            inputs=inputs,
            outputs=outputs,
            loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN,
        )


def test_factors_for_a_part_of_a_row(bench: Bench) -> None:
    """The rotation of a part reads factors for the whole: they must be in the same buffer."""
    a, positions = bench(8, 1, 3), bench(3, type=I32)
    result = capi.ggml_rope_ext(bench.ctx, a, positions, bench(2), 4, 0, 0, 10000, 1, 0, 1, 0, 0)
    found = bench.run(result)
    np.testing.assert_array_equal(found.reshape(3, 1, 8), bench.data()[0])


def test_factors_for_images(bench: Bench) -> None:
    """Each pair of a row is turned there, and ggml asks for the factors of half of them."""

    def turned(a: Any, factors: Any) -> Any:
        vision = capi.GGML_ROPE_TYPE_VISION
        rest = 4, [2, 2, 0, 0], vision, 0, 10000, 1, 0, 1, 0, 0
        return capi.ggml_rope_multi(bench.ctx, a, bench(12, type=I32), factors, *rest)

    a = bench(8, 1, 3)
    with pytest.raises(ValueError, match="there is a factor for each pair of a row"):
        turned(a, bench(2))
    of_ones = bench.run(turned(a, bench(4, data=np.ones(4))))
    np.testing.assert_array_equal(of_ones, bench.run(turned(a, None)))


@pytest.mark.parametrize("function", ["acc", "set", "acc_inplace", "set_inplace"])
def test_regions_whose_rows_overlap(bench: Bench, function: str) -> None:
    """Threads would write them in any order."""
    make = getattr(capi, f"ggml_{function}")
    a, b = bench(8, 4), bench(5, 3)
    with pytest.raises(ValueError, match=r"the rows of f32\[5,3,1,1\] would overlap there"):
        make(bench.ctx, a, b, 4 * 4, 4 * 8, 4 * 32, 0)
    part = bench(5, 2)
    found = bench.run(make(bench.ctx, a, part, 4 * 10, 4 * 20, 4 * 20, 4 * 2))
    wanted, rows = bench.data()[0].copy(), bench.data()[2]
    for start, row in zip((2, 12), rows, strict=True):
        region = wanted.reshape(-1)[start : start + 5]
        region[:] = row + region if "acc" in function else row
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-6)


def test_rows_that_set_1d_would_put_over_one_another(bench: Bench) -> None:
    with pytest.raises(ValueError, match="would overlap there"):
        capi.ggml_set_1d(bench.ctx, bench(3, 60), bench(5, 5), 0)


def test_writing_into_elements_that_share_memory(bench: Bench) -> None:
    """Reading them is fine."""
    a = bench(64)
    windows = capi.ggml_view_2d(bench.ctx, a, 4, 7, 4 * 2, 0)
    found = bench.run(capi.ggml_cont(bench.ctx, windows))
    wanted = np.lib.stride_tricks.sliding_window_view(bench.data()[0], 4)[:14:2]
    np.testing.assert_array_equal(found[0, 0], wanted)
    for result in (
        capi.ggml_cpy(bench.ctx, bench(4, 7), windows),
        capi.ggml_add_inplace(bench.ctx, windows, bench(4, 7)),
    ):
        with pytest.raises(ValueError, match="into a view whose elements share memory"):
            bench.run(result)


def test_scaling_stays_inside(bench: Bench) -> None:
    for n in (7, 100, 1000):
        result = capi.ggml_upscale_ext(
            bench.ctx, bench(3, 1), n, 1, 1, 1, ggml_scale_mode.GGML_SCALE_MODE_NEAREST
        )
        assert bench.run(result).size == n


# ---- refused where a kernel would abort: with several threads nothing could catch that


Arguments = tuple[Any, ...]


@dataclass
class Asserted:
    """An operation whose kernel asserts what its builder does not."""

    name: str
    build: Callable[..., Any]  # from a bench and one of the tuples of arguments
    wrong: list[Arguments]
    right: list[Arguments]


def one(function: str, *rest: Any) -> Callable[..., Any]:
    """Of one tensor of the type that is given."""
    return lambda t, a: getattr(capi, f"ggml_{function}")(t.ctx, t(256, 4, type=a), *rest)


def two(function: str, *rest: Any) -> Callable[..., Any]:
    return lambda t, a, b: getattr(capi, f"ggml_{function}")(
        t.ctx, t(256, 4, type=a), t(256, 4, type=b), *rest
    )


FLOATS: list[Arguments] = [(F32,), (F16,), (BF16,)]
HALVES: list[Arguments] = [(F32,), (F16,)]
ONLY_F32: list[Arguments] = [(F32,)]
NO_FLOATS: list[Arguments] = [(I32,), (I8,), (Q4_0,), (Q8_0,)]
NO_HALVES = [(BF16,), *NO_FLOATS]
NO_F32 = [(F16,), *NO_HALVES]
FILL_F16 = "0.15: ggml_fill of F16"
PAIRS: list[Arguments] = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
NO_PAIRS: list[Arguments] = [
    *((F32, I32), (I32, I32), (F32, F16), (F32, BF16), (F16, BF16), (I32, F32), (F32, Q8_0))
]

ASSERTED = [
    *[
        Asserted(function, one(function), NO_FLOATS, FLOATS)
        for function in (
            *["abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "exp", "expm1"],
            *["hardswish", "hardsigmoid", "softplus", "floor", "ceil", "round", "trunc"],
            *["sqr", "sqrt", "log", "sin", "cos", "relu_inplace", "sqr_inplace"],
        )
    ],
    *[
        Asserted(function, one(function), NO_HALVES, HALVES)
        for function in (
            *["gelu", "gelu_erf", "gelu_quick", "silu", "silu_inplace"],
            *["reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick"],
        )
    ],
    Asserted("leaky_relu", one("leaky_relu", 0.5, False), NO_HALVES, HALVES),
    Asserted("clamp", one("clamp", -1, 1), NO_HALVES, HALVES),
    Asserted(
        "fill", one("fill", 3), NO_HALVES, HALVES if has("0.15: ggml_fill of F16") else ONLY_F32
    ),
    *[
        Asserted(function, one(function), NO_F32, ONLY_F32)
        for function in ("sum_rows", "mean", "argmax", "soft_max", "soft_max_inplace")
    ],
    Asserted("sum", one("sum"), NO_FLOATS, ONLY_F32),
    Asserted("scale", one("scale", 2), NO_F32, ONLY_F32),
    Asserted("norm", one("norm", 1e-6), NO_F32, ONLY_F32),
    Asserted("rms_norm", one("rms_norm", 1e-6), NO_F32, ONLY_F32),
    Asserted("l2_norm", one("l2_norm", 1e-6), NO_F32, ONLY_F32),
    Asserted("norm: a negative epsilon", one("norm", -1), ONLY_F32, []),
    Asserted("group_norm", one("group_norm", 1, 1e-6), NO_F32, ONLY_F32),
    Asserted("argsort", one("argsort", ASC), NO_F32, ONLY_F32),
    Asserted("top_k", one("top_k", 3), NO_F32, ONLY_F32),
    Asserted("pad", one("pad", 1, 1, 0, 0), [(F16,), (I32,)], ONLY_F32),
    Asserted("roll", one("roll", 1, 1, 0, 0), [(F16,), (I32,)], ONLY_F32),
    Asserted("diag_mask_inf", one("diag_mask_inf", 0), [(F16,), (I32,)], ONLY_F32),
    Asserted("diag_mask_inf: a negative past", one("diag_mask_inf", -1), ONLY_F32, []),
    Asserted("repeat", one("repeat_4d", 512, 4, 1, 1), [(Q4_0,), (I8,), (I64,)], [*FLOATS, (I32,)]),
    *[Asserted(function, two(function), NO_PAIRS, PAIRS) for function in ("sub", "mul", "div")],
    Asserted("add", two("add"), [*NO_PAIRS, (Q8_0, F16)], [*PAIRS, (Q4_0, F32), (Q8_0, F32)]),
    Asserted("mul: blocks", two("mul"), [(Q4_0, F32), (Q8_0, Q8_0)], []),
    Asserted(
        "add: blocks with a row for all",
        lambda t, rows: capi.ggml_add(t.ctx, t(32, 4, type=Q8_0), t(32, rows)),
        [(1,)],
        [(4,)],
    ),
    Asserted("swiglu_split", two("swiglu_split"), [(I32, I32)], [(F32, F32), (F16, F16)]),
    Asserted("swiglu_oai", two("swiglu_oai", 1, 1), [(F16, F16)], [(F32, F32)]),
    Asserted("silu_back", two("silu_back"), [(BF16, BF16), (I32, I32)], [(F32, F32), (F16, F16)]),
    Asserted(
        "cast",
        lambda t, a, b: capi.ggml_cast(t.ctx, t(256, 4, type=a), b),
        [(I32, Q4_0), (I32, F16), (Q4_0, F16), (Q4_0, Q8_0), (I8, F32)],
        [(F32, Q4_0), (F32, F16), (F16, Q8_0), (I32, F32), (Q4_0, F32), (F32, I32)],
    ),
    Asserted(
        "cast: to blocks, of a transposed tensor",
        lambda t, change: capi.ggml_cast(t.ctx, change(t.ctx, t(32, 32)), Q8_0),
        [(capi.ggml_transpose,)],
        [(capi.ggml_cont,)],
    ),
    Asserted(
        "get_rows",
        lambda t, a: capi.ggml_get_rows(t.ctx, t(256, 4, type=a), t(2, type=I32, data=[3, 1])),
        [(I8,), (I64,)],
        [*FLOATS, (I32,), (Q4_0,), (Q8_0,)],
    ),
    Asserted(
        "set_rows",
        lambda t, a: capi.ggml_set_rows(
            t.ctx, t(8, 4, type=F16), t(8, 2, type=a), t(2, type=I64, data=[3, 1])
        ),
        [],
        [(F32,)],
    ),
    Asserted(
        "rope",
        lambda t, a, mode: capi.ggml_rope(t.ctx, t(8, 2, 3, type=a), t(3, type=I32), 8, mode),
        [(BF16, 0), (I32, 0), (F32, 1), (F32, 4)],
        [(F32, 0), (F16, 0), (F32, 2)],
    ),
    Asserted(
        "pool_2d",
        lambda t, op: capi.ggml_pool_2d(t.ctx, t(8, 8), op, 2, 2, 2, 2, 0, 0),
        [(ggml_op_pool.GGML_OP_POOL_COUNT,)],
        [(MAX,), (AVG,)],
    ),
    Asserted(
        "conv_transpose_1d",
        lambda t, a, b: capi.ggml_conv_transpose_1d(
            t.ctx, t(3, 2, 4, type=a), t(8, 4, type=b), 1, 0, 1
        ),
        [(BF16, F32), (F16, F16), (F32, F16)],
        [(F32, F32), (F16, F32)],
    ),
    Asserted(
        "flash_attn_ext",
        lambda t, k, v: capi.ggml_flash_attn_ext(
            t.ctx, t(32, 4, 2), t(32, 8, 2, type=k), t(32, 8, 2, type=v), None, 1, 0, 0
        ),
        [(I32, F32), (F32, I32)],
        [(F32, F32), (F16, F16), (Q8_0, Q8_0)],
    ),
    Asserted(
        "xielu",
        lambda t, make: capi.ggml_xielu(t.ctx, make(t, 8, 5, 3), 1, 1, 1, 1e-6),
        [(Bench.permuted,)],
        [(Bench.__call__,)],
    ),
]


def compute(bench: Bench, graph: Any, threads: int) -> None:
    capi.ggml_backend_cpu_set_n_threads(bench.arena.backend, threads)
    try:
        capi.ggml_backend_graph_compute(bench.arena.backend, graph)
    finally:
        capi.ggml_backend_cpu_set_n_threads(bench.arena.backend, 1)


#: They take steps, have a pole, or compute something else for each of the arguments.
JUMPS = ["ceil", "floor", "round", "trunc", "sgn", "step", "div", "rope", "pool_2d"]
ASSERTED_IDS = [case.name.replace(" ", "-") for case in ASSERTED]


@pytest.mark.parametrize("case", ASSERTED, ids=ASSERTED_IDS)
def test_refused_before_a_kernel_aborts(cpu: Any, case: Asserted) -> None:
    """Where it is computed, if not already where it is built."""
    for arguments in case.wrong:
        with Arena(cpu) as arena:
            bench = Bench(arena)
            try:
                result = case.build(bench, *arguments)
            except (ValueError, AbortError):
                continue
            graph = bench.graph(result)
            op = capi.ggml_op_desc(result)
            with pytest.raises(ValueError, match=f"cpu_can.*: {op} .*of |supported"):
                compute(bench, graph, 2)


@pytest.mark.parametrize("case", ASSERTED, ids=ASSERTED_IDS)
def test_nothing_else_is_refused(cpu: Any, case: Asserted) -> None:
    """It computes with two threads, and of half precision nearly the same as of full."""
    found: list[Numbers] = []
    for arguments in case.right:
        with Arena(cpu) as arena:
            bench = Bench(arena)
            result = case.build(bench, *arguments)
            compute(bench, bench.graph(result), 2)
            if result.type in (F32, F16) and all(type in (F32, F16) for type in arguments):
                found.append(np.empty(tuple(reversed(list(result.ne))), NUMPY[result.type]))
                capi.ggml_backend_tensor_get(result, found[-1], 0)
    if case.name not in JUMPS:
        for other in found[1:]:
            np.testing.assert_allclose(other, found[0], rtol=1e-2, atol=1e-2)


# ---- graphs that a scheduler or another backend cannot reach


@pytest.fixture
def meta(cpu: Any) -> Iterator[Any]:
    require("ggml_backend_meta_device")
    with MetaDevice(["CPU", "CPU"], lambda tensor, n_devs: SplitState.mirrored()) as device:
        backend = capi.ggml_backend_dev_init(device.handle, None)
        yield backend
        capi.ggml_backend_free(backend)


def test_a_meta_tensor_stays_with_its_device(cpu: Any, meta: Any) -> None:
    with Arena(meta) as arena:
        weight = arena.weight(4, 4)
        capi.ggml_backend_tensor_set(weight, np.ones(16, np.float32), 0)
        ctx = arena.context()
        result = capi.ggml_relu(ctx, weight)
        graph = arena.graph(ctx, result, allocate=False)
        with pytest.raises(ValueError, match="reachable"):
            capi.ggml_backend_sched_graph_compute(scheduler(arena, cpu), graph)
        with pytest.raises(ValueError, match="reachable"):
            capi.ggml_backend_sched_alloc_graph(scheduler(arena, cpu), graph)
        with pytest.raises(ValueError, match="can_copy_to"):
            capi.ggml_backend_graph_copy(cpu, graph)
        with pytest.raises(ValueError, match=r"can_copy_to|allocated"):
            capi.ggml_backend_compare_graph_backend(meta, cpu, graph, lambda *_: True)
        capi.ggml_backend_sched_graph_compute(scheduler(arena, meta, cpu), graph)
        found = np.zeros(16, np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
        assert (found == 1).all()


# ---- indices


@dataclass
class Indexed:
    name: str
    build: Callable[[Bench, Any], Any]  # from a tensor of indices
    limit: int
    n: int = 2
    type: int = I32


def experts(t: Bench, ids: Any) -> Any:
    return capi.ggml_mul_mat_id(
        t.ctx, t(8, 4, 3), t(8, 1, 1), capi.ggml_reshape_2d(t.ctx, ids, 2, 1)
    )


def scan(t: Bench, ids: Any) -> Any:
    x, dt, a, b = t(1, 1, 1, 2), t(1, 1, 2), t(1, 1), t(4, 1, 1, 2)
    operands = (t(4, 1, 1, 3), x, dt, a, b, t(4, 1, 1, 2), ids)
    n_snapshots = len(inspect.signature(capi.ggml_ssm_scan).parameters) - 1 - len(operands)
    return capi.ggml_ssm_scan(t.ctx, *operands, *[1] * n_snapshots)  # older releases have none


INDEXED = [
    Indexed("get_rows", lambda t, ids: capi.ggml_get_rows(t.ctx, t(8, 4), ids), 4),
    Indexed(
        "get_rows:quantised", lambda t, ids: capi.ggml_get_rows(t.ctx, t(32, 4, type=Q8_0), ids), 4
    ),
    Indexed(
        "get_rows_back", lambda t, ids: capi.ggml_get_rows_back(t.ctx, t(8, 2), ids, t(8, 4)), 4
    ),
    Indexed(
        "set_rows", lambda t, ids: capi.ggml_set_rows(t.ctx, t(8, 4), t(8, 2), ids), 4, type=I64
    ),
    Indexed("set_rows:32 bits", lambda t, ids: capi.ggml_set_rows(t.ctx, t(8, 4), t(8, 2), ids), 4),
    Indexed("mul_mat_id", experts, 3),
    Indexed(
        "add_id",
        lambda t, ids: capi.ggml_add_id(
            t.ctx, t(8, 2, 1), t(8, 5), capi.ggml_reshape_2d(t.ctx, ids, 2, 1)
        ),
        5,
    ),
    Indexed("ssm_scan", scan, 3),
]
INDEXED_IDS = [case.name.replace(" ", "-") for case in INDEXED]
THREADS = pytest.mark.parametrize("threads", [1, 4])


def bad_indices(case: Indexed) -> list[list[int]]:
    return [[0, case.limit], [-1, 0], [0, (1 << 31) - 1], [-(1 << 31), 0]]


@contextmanager
def refused(result: Any, match: str = "") -> Iterator[None]:
    """An IndexError comes out, and before anything has run: the result is as it was."""
    mark = bytes([0x5A]) * capi.ggml_nbytes(result)
    found = bytearray(len(mark))
    capi.ggml_backend_tensor_set(result, mark, 0)
    with pytest.raises(IndexError, match=match):
        yield
    capi.ggml_backend_tensor_get(result, found, 0)
    assert found == mark


@THREADS
@pytest.mark.parametrize("case", INDEXED, ids=INDEXED_IDS)
def test_indices(case: Indexed, threads: int) -> None:
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, threads)
    with Arena(backend) as arena:
        bench = Bench(arena)
        ids = bench(case.n, type=case.type)
        capi.ggml_set_name(ids, "ids")
        result = case.build(bench, ids)
        graph = bench.graph(result)
        plan = capi.ggml_backend_graph_plan_create(backend, graph)
        work = capi.ggml_graph_plan(graph, threads)
        memory = ffi.new("char[]", max(work.work_size, 1))
        work.work_data = ffi.cast("uint8_t *", memory)
        for bad in bad_indices(case):
            capi.ggml_backend_tensor_set(ids, np.array(bad, NUMPY[case.type]), 0)
            wrong = next(i for i in bad if not 0 <= i < case.limit)
            op = capi.ggml_op_name(result.op)
            said = rf"index {wrong} in 'ids.*', of {op} .*is not in 0 \.\.\. {case.limit - 1}"
            with refused(result, said):
                capi.ggml_backend_graph_compute(backend, graph)
            with refused(result, said):
                capi.ggml_backend_graph_compute_async(backend, graph)
            with refused(result, said):
                capi.ggml_backend_graph_plan_compute(backend, plan)
            with refused(result, said):
                capi.ggml_graph_compute_with_ctx(arena.context(no_alloc=False), graph, threads)
            with refused(result, said):
                capi.ggml_graph_compute(graph, work)
        capi.ggml_backend_tensor_set(ids, np.array([case.limit - 1, 0], NUMPY[case.type]), 0)
        capi.ggml_backend_graph_compute(backend, graph)
        capi.ggml_backend_graph_plan_compute(backend, plan)
        capi.ggml_graph_compute_with_ctx(arena.context(no_alloc=False), graph, threads)
        capi.ggml_graph_compute(graph, work)
        capi.ggml_backend_graph_plan_free(backend, plan)
    capi.ggml_backend_free(backend)


@THREADS
@pytest.mark.parametrize("case", INDEXED, ids=INDEXED_IDS)
def test_indices_through_a_scheduler(case: Indexed, threads: int) -> None:
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, threads)
    with Arena(backend) as arena:
        bench = Bench(arena)
        ids = bench(case.n, type=case.type)
        capi.ggml_set_input(ids)
        result = case.build(bench, ids)
        graph = arena.graph(bench.ctx, result, allocate=False)
        sched = scheduler(arena, backend)
        with pytest.raises(IndexError, match="has not been allocated"):
            capi.ggml_backend_sched_graph_compute(sched, graph)
        capi.ggml_backend_sched_alloc_graph(sched, graph)
        for tensor, numbers in bench.tensors:
            if tensor.data:
                capi.ggml_backend_tensor_set(tensor, numbers, 0)
        for bad in bad_indices(case):
            capi.ggml_backend_tensor_set(ids, np.array(bad, NUMPY[case.type]), 0)
            with refused(result, rf"is not in 0 \.\.\. {case.limit - 1}"):
                capi.ggml_backend_sched_graph_compute(sched, graph)
            with refused(result, rf"is not in 0 \.\.\. {case.limit - 1}"):
                capi.ggml_backend_sched_graph_compute_async(sched, graph)
        capi.ggml_backend_tensor_set(ids, np.array([0, case.limit - 1], NUMPY[case.type]), 0)
        capi.ggml_backend_sched_graph_compute(sched, graph)
        capi.ggml_backend_sched_synchronize(sched)
    capi.ggml_backend_free(backend)


@THREADS
@pytest.mark.parametrize("viewed", [False, True], ids=["plain", "view"])
def test_indices_that_a_scheduler_copies(threads: int, viewed: bool) -> None:
    """They lie on another device: what counts is what is there, not the copy of the time before."""
    require_layout()
    far = buffer_type(is_host=False)
    other = capi.ggml_backend_dev_init(FakeDevice("Far0", buffers=far).pointer)
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, threads)
    with Arena(backend) as arena:
        table = arena.weight(8, 4)
        numbers = np.arange(32, dtype=np.float32).reshape(4, 8)
        capi.ggml_backend_tensor_set(table, numbers, 0)
        ctx, ctx_ids = arena.context(), arena.context()
        ids = arena.tensor(4, type=I32, ctx=ctx_ids, name="ids")
        buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx_ids, far)
        arena.callback(capi.ggml_backend_buffer_free, buffer)
        used = capi.ggml_view_1d(ctx, ids, 2, 4) if viewed else ids
        result = capi.ggml_get_rows(ctx, table, used)
        graph = arena.graph(ctx, result, allocate=False)
        sched = scheduler(arena, other, backend)
        capi.ggml_backend_sched_alloc_graph(sched, graph)
        assert "#" in capi.ggml_get_name(result.src[1])
        for wrong in (4, -1):
            capi.ggml_backend_tensor_set(ids, np.array([0, wrong, 0, 0], np.int32), 0)
            with refused(result, rf"index {wrong} in 'ids.*', of GET_ROWS"):
                capi.ggml_backend_sched_graph_compute(sched, graph)
            right = [3, 1, 2, 0]
            capi.ggml_backend_tensor_set(ids, np.array(right, np.int32), 0)
            capi.ggml_backend_sched_graph_compute(sched, graph)
            found = np.empty((2 if viewed else 4, 8), np.float32)
            capi.ggml_backend_tensor_get(result, found, 0)
            np.testing.assert_array_equal(found, numbers[right[1:3] if viewed else right])
    capi.ggml_backend_free(other)
    capi.ggml_backend_free(backend)


COPY_NAMES = pytest.mark.parametrize("name", ["ids#1", "CPU#ids#0"])


@COPY_NAMES
def test_indices_named_as_a_scheduler_names_its_copies(bench: Bench, name: str) -> None:
    ids = bench(2, type=I32, data=[0, 4])
    capi.ggml_set_name(ids, name)
    with pytest.raises(IndexError, match=f"index 4 in '{name}'"):
        bench.run(capi.ggml_get_rows(bench.ctx, bench(8, 4), ids))


@COPY_NAMES
@pytest.mark.parametrize("before", ["nothing", "an allocation", "another graph"])
@pytest.mark.parametrize("n_backends", [1, 2])
def test_a_scheduler_looks_at_indices_named_like_its_copies(
    bench: Bench, cpu: Any, name: str, before: str, n_backends: int
) -> None:
    bad, good = bench(2, type=I32, data=[0, 4]), bench(2, type=I32, data=[3, 0])
    for ids in (bad, good):
        capi.ggml_set_name(ids, name)
    table = bench(8, 4)
    wrong, right = [bench.graph(capi.ggml_get_rows(bench.ctx, table, ids)) for ids in (bad, good)]
    sched = scheduler(bench.arena, *[cpu, bench.arena.backend][-n_backends:])
    if before == "an allocation":
        capi.ggml_backend_sched_alloc_graph(sched, wrong)
    elif before == "another graph":
        capi.ggml_backend_sched_graph_compute(sched, right)
        capi.ggml_backend_sched_reset(sched)
    for _ in range(2):
        with pytest.raises(IndexError, match=f"index 4 in '{name}'"):
            capi.ggml_backend_sched_graph_compute(sched, wrong)
    capi.ggml_backend_sched_reset(sched)
    capi.ggml_backend_sched_graph_compute(sched, right)


def test_a_scheduler_looks_at_indices_of_a_file_named_like_its_copies(
    tmp_path: Any, cpu: Any
) -> None:
    """The context that a file makes is the caller's as well."""
    path = tmp_path / "ids.gguf"
    with Arena(cpu) as arena:
        gguf = arena.gguf()
        capi.gguf_add_tensor(gguf, arena.tensor(2, type=I32, name="CPU#ids#0"))
        capi.gguf_write_to_file(gguf, path, True)
        made = ffi.new("struct ggml_context **")
        arena.callback(capi.gguf_free, capi.gguf_init_from_file(path, no_alloc=True, ctx=made))
        arena.callback(capi.ggml_free, made[0])
        arena.allocate(made[0])
        ids = capi.ggml_get_tensor(made[0], "CPU#ids#0")
        capi.ggml_backend_tensor_set(ids, np.array([0, 4], np.int32), 0)
        ctx = arena.context()
        graph = arena.graph(ctx, capi.ggml_get_rows(ctx, arena.weight(8, 4), ids))
        with pytest.raises(IndexError, match="index 4 in 'CPU#ids#0'"):
            capi.ggml_backend_sched_graph_compute(scheduler(arena, cpu), graph)


def test_indices_on_a_meta_device(meta: Any) -> None:
    with Arena(meta) as arena:
        table, ids = arena.weight(8, 4), arena.weight(2, type=I32)
        numbers = np.arange(32, dtype=np.float32).reshape(4, 8)
        capi.ggml_backend_tensor_set(table, numbers, 0)
        ctx = arena.context()
        result = capi.ggml_get_rows(ctx, table, ids)
        graph = arena.graph(ctx, result, allocate=False)
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, meta)
        arena.callback(capi.ggml_backend_buffer_free, buffer)
        capi.ggml_backend_tensor_set(ids, np.array([0, 4], np.int32), 0)
        with pytest.raises(IndexError, match="index 4"):
            capi.ggml_backend_graph_compute(meta, graph)
        capi.ggml_backend_tensor_set(ids, np.array([3, 1], np.int32), 0)
        capi.ggml_backend_graph_compute(meta, graph)
        found = np.empty((2, 8), np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
        np.testing.assert_array_equal(found, numbers[[3, 1]])


def test_indices_of_a_view(bench: Bench) -> None:
    """Of a tensor of indices only those count that the view has."""
    ids = bench(4, type=I32, data=[99, 1, 3, -1])
    table = bench(8, 4)
    result = capi.ggml_get_rows(bench.ctx, table, capi.ggml_view_1d(bench.ctx, ids, 2, 4))
    np.testing.assert_array_equal(bench.run(result).reshape(2, 8), bench.data()[1][[1, 3]])
    result = capi.ggml_get_rows(bench.ctx, table, capi.ggml_view_1d(bench.ctx, ids, 2, 8))
    with pytest.raises(IndexError, match="index -1"):
        bench.run(result)


def test_indices_that_the_graph_copies(bench: Bench) -> None:
    ids = bench(4, 2, type=I32, data=[0, 1, 2, 3, 3, 2, 1, 4])
    copied = capi.ggml_cont(bench.ctx, capi.ggml_transpose(bench.ctx, ids))
    flat = capi.ggml_reshape_1d(bench.ctx, copied, 8)
    with pytest.raises(IndexError, match="index 4 in 't0'"):
        bench.run(capi.ggml_get_rows(bench.ctx, bench(8, 4), flat))
    found = bench.run(capi.ggml_get_rows(bench.ctx, bench(8, 5), flat))
    order = bench.data()[0].T.reshape(-1)
    np.testing.assert_array_equal(found.reshape(8, 8), bench.data()[2][order])


def test_indices_that_the_graph_computes(bench: Bench) -> None:
    """They are not there yet; neither are those that it writes over what is there."""
    a = bench(4, data=[4, 3, 2, 1])
    table = bench(8, 4)
    order = capi.ggml_argsort(bench.ctx, a, ASC)
    result = capi.ggml_get_rows(bench.ctx, table, order)
    np.testing.assert_array_equal(bench.run(result).reshape(4, 8), bench.data()[1][::-1])

    ids = bench(2, type=I32, data=[99, 99])
    written = capi.ggml_cpy(bench.ctx, bench(2, type=I32, data=[2, 0]), ids)
    graph = capi.ggml_new_graph(bench.ctx)
    result = capi.ggml_get_rows(bench.ctx, table, ids)
    capi.ggml_build_forward_expand(graph, written)
    capi.ggml_build_forward_expand(graph, result)
    capi.ggml_backend_alloc_ctx_tensors(bench.ctx, bench.arena.backend)
    for tensor, numbers in bench.tensors:
        capi.ggml_backend_tensor_set(tensor, numbers, 0)
    capi.ggml_backend_graph_compute(bench.arena.backend, graph)
    found = np.empty((2, 8), np.float32)
    capi.ggml_backend_tensor_get(result, found, 0)
    np.testing.assert_array_equal(found, bench.data()[1][[2, 0]])


def choice(bench: Bench, ids: Any) -> Any:
    """A product with the experts that `ids` name, of three: its kernel does not look at them."""
    return capi.ggml_mul_mat_id(bench.ctx, bench(8, 4, 3), bench(8, 1, 1), ids)


def test_indices_made_of_floats_that_no_kernel_looks_at(bench: Bench) -> None:
    """They are refused, whatever the floats are; of limited ones the range is known."""
    floats = bench(1, 1, data=[1.5])
    made = capi.ggml_cast(bench.ctx, floats, I32)
    with pytest.raises(IndexError, match=r"makes of floats, of MUL_MAT_ID .* 0 \.\.\. 2"):
        bench.run(choice(bench, capi.ggml_cont(bench.ctx, made)))


@pytest.mark.parametrize(("low", "high", "good"), [(0, 2, True), (0, 3, False), (-1, 2, False)])
def test_indices_made_of_limited_floats(bench: Bench, low: int, high: int, good: bool) -> None:
    floats = capi.ggml_clamp(bench.ctx, bench(1, 1, data=[1e9]), low, high)
    ids = capi.ggml_cast(bench.ctx, floats, I32)
    result = choice(bench, ids)
    if not good:
        with pytest.raises(IndexError, match="makes of floats"):
            bench.run(result)
        return
    found = bench.run(result)
    _, experts, x = bench.data()
    np.testing.assert_allclose(found.ravel(), experts[2] @ x.ravel(), rtol=1e-5)


@pytest.mark.parametrize("row", [0, 1])
def test_indices_out_of_a_table(bench: Bench, row: int) -> None:
    """Experts by a table of the tokens: the rows that are used are looked at, and no others."""
    table = bench(2, 2, type=I32, data=[0, 2, 99, 1])
    ids = capi.ggml_get_rows(bench.ctx, table, bench(1, type=I32, data=[row]))
    experts, x = bench(8, 4, 3), bench(8, 1, 1)
    result = capi.ggml_mul_mat_id(bench.ctx, experts, x, ids)
    if row:
        with pytest.raises(IndexError, match="index 99 in 't0', of MUL_MAT_ID"):
            bench.run(result)
        return
    found = bench.run(result).reshape(2, 4)
    np.testing.assert_allclose(found, bench.data()[2][[0, 2]] @ bench.data()[3].ravel(), rtol=1e-5)


ORDERS: list[tuple[str, Callable[[Any, Any], Any], int]] = [
    ("argsort", lambda ctx, a: capi.ggml_argsort(ctx, a, ASC), 6),
    ("the first of an argsort", lambda ctx, a: capi.ggml_argsort_top_k(ctx, a, 2), 6),
    ("top_k", lambda ctx, a: capi.ggml_top_k(ctx, a, 2), 6),
    ("argmax", lambda ctx, a: capi.ggml_argmax(ctx, a), 6),
    (
        "copied and reshaped",
        lambda ctx, a: capi.ggml_reshape_1d(
            ctx, capi.ggml_cont(ctx, capi.ggml_transpose(ctx, capi.ggml_argsort(ctx, a, ASC))), 6
        ),
        6,
    ),
    (
        "rows of an order",
        lambda ctx, a: capi.ggml_get_rows(
            ctx,
            capi.ggml_reshape_2d(ctx, capi.ggml_argsort(ctx, a, ASC), 3, 2),
            capi.ggml_argsort(ctx, capi.ggml_view_1d(ctx, a, 2, 0), ASC),
        ),
        6,
    ),
]


@THREADS
@pytest.mark.parametrize(("order", "limit"), [o[1:] for o in ORDERS], ids=[o[0] for o in ORDERS])
def test_indices_that_the_graph_computes_in_a_known_range(
    order: Callable[[Any, Any], Any], limit: int, threads: int
) -> None:
    """A table must have as many rows as there are numbers to be ordered: nothing runs before."""
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, threads)
    for rows in (limit, limit - 1):
        with Arena(backend) as arena:
            bench = Bench(arena)
            a, table = bench(6, data=[5, 4, 3, 2, 1, 0]), bench(8, rows)
            ids = order(bench.ctx, a)
            ids = capi.ggml_reshape_1d(bench.ctx, ids, capi.ggml_nelements(ids))
            result = capi.ggml_get_rows(bench.ctx, table, ids)
            graph = bench.graph(result)
            before = np.full(capi.ggml_nelements(result), 7, np.float32)
            capi.ggml_backend_tensor_set(result, before, 0)
            found = np.empty_like(before)
            if rows < limit:
                said = r"indices up to 5 that the graph computes, of GET_ROWS .* 0 \.\.\. 4"
                with pytest.raises(IndexError, match=said):
                    capi.ggml_backend_graph_compute(backend, graph)
                capi.ggml_backend_tensor_get(result, found, 0)
                np.testing.assert_array_equal(found, before)
            else:
                capi.ggml_backend_graph_compute(backend, graph)
                capi.ggml_backend_tensor_get(result, found, 0)
                chosen = np.empty(capi.ggml_nelements(ids), np.int32)
                capi.ggml_backend_tensor_get(ids, chosen, 0)
                np.testing.assert_array_equal(found.reshape(-1, 8), bench.data()[1][chosen])
    capi.ggml_backend_free(backend)


def test_indices_of_what_is_not_computed(bench: Bench) -> None:
    """A branch that ggml_build_forward_select leaves out may have any."""
    table = bench(8, 4)
    bad, good = (bench(1, type=I32, data=[i]) for i in (99, 2))
    rows = [capi.ggml_get_rows(bench.ctx, table, ids) for ids in (bad, good)]
    graph = capi.ggml_new_graph(bench.ctx)
    capi.ggml_build_forward_select(graph, rows, 1)
    buffer = capi.ggml_backend_alloc_ctx_tensors(bench.ctx, bench.arena.backend)
    bench.arena.callback(capi.ggml_backend_buffer_free, buffer)
    for tensor, numbers in bench.tensors:
        capi.ggml_backend_tensor_set(tensor, numbers, 0)
    capi.ggml_backend_graph_compute(bench.arena.backend, graph)
    found = np.empty(8, np.float32)
    capi.ggml_backend_tensor_get(rows[1], found, 0)
    np.testing.assert_array_equal(found, bench.data()[0][2])


# ---- indices of what is trained


@pytest.fixture(params=[1, 4], ids=lambda n: f"{n} threads")
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, request.param)
    with Arena(backend) as arena:
        yield Training(arena)
    capi.ggml_backend_free(backend)


class Training:
    """Rows of an embedding of 4 words, by data of two words each, are to be ones."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.sched = scheduler(arena, arena.backend)
        self.ctx = arena.context(1 << 24)
        weights = arena.context()
        self.embedding = capi.ggml_new_tensor_2d(weights, F32, 3, 4)
        self.inputs = capi.ggml_new_tensor_2d(weights, I32, 2, 2)
        capi.ggml_set_param(self.embedding)
        arena.allocate(weights)
        capi.ggml_backend_tensor_set(self.embedding, np.zeros(12, np.float32), 0)
        self.dataset = capi.ggml_opt_dataset_init(I32, F32, 2, 3, 6, 1)
        arena.callback(capi.ggml_opt_dataset_free, self.dataset)
        labels = capi.ggml_opt_dataset_labels(self.dataset)
        capi.ggml_backend_tensor_set(labels, np.ones(18, np.float32), 0)

    def words(self, words: list[list[int]]) -> None:
        data = capi.ggml_opt_dataset_data(self.dataset)
        capi.ggml_backend_tensor_set(data, np.array(words, np.int32), 0)

    def first(self, ctx: Any) -> Any:
        """The first word of each datum, as a vector of indices."""
        column = capi.ggml_view_2d(ctx, self.inputs, 1, 2, self.inputs.nb[1], 0)
        return capi.ggml_reshape_1d(ctx, capi.ggml_cont(ctx, column), 2)

    def rows(self, ctx: Any, ids: Any) -> Any:
        return capi.ggml_get_rows(ctx, self.embedding, ids)

    def optimizer(self, outputs: Any = None) -> Any:
        static = {"ctx_compute": self.ctx, "inputs": self.inputs, "outputs": outputs}
        made = capi.ggml_opt_init(
            backend_sched=self.sched,
            loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR,
            optimizer=capi.GGML_OPT_OPTIMIZER_TYPE_SGD,
            get_opt_pars=lambda: {"sgd": {"alpha": 0.25, "wd": 0.0}},
            **(static if outputs else {}),
        )
        self.arena.callback(capi.ggml_opt_free, made)
        return made

    def learnt(self) -> Numbers:
        found = np.empty((4, 3), np.float32)
        capi.ggml_backend_tensor_get(self.embedding, found, 0)
        return found


GOOD = [[0, 9], [1, 9], [3, 9], [0, 9], [1, 9], [3, 9]]


def test_indices_of_an_epoch(training: Training) -> None:
    """All of the data are looked at, but only the words that become indices."""
    optimizer = training.optimizer(training.rows(training.ctx, training.first(training.ctx)))
    for word in (4, -1):
        for place in (0, 5):
            bad = [list(datum) for datum in GOOD]
            bad[place][0] = word
            training.words(bad)
            with pytest.raises(IndexError, match=rf"ggml_opt_epoch: .*index {word}.* 0 \.\.\. 3"):
                capi.ggml_opt_epoch(optimizer, training.dataset, None, None, 4)
    assert not training.learnt().any()
    training.words(GOOD)
    capi.ggml_opt_epoch(optimizer, training.dataset, None, None, 6)
    assert (training.learnt()[[0, 1, 3]] > 0).all()
    assert not training.learnt()[2].any()


@pytest.mark.parametrize("name", ["inputs", "CPU#inputs#0"])
def test_indices_of_an_evaluation(training: Training, name: str) -> None:
    """Also where they are called as a scheduler calls its copies."""
    capi.ggml_set_name(training.inputs, name)
    optimizer = training.optimizer(training.rows(training.ctx, training.first(training.ctx)))
    labels = capi.ggml_opt_labels(optimizer)
    capi.ggml_opt_alloc(optimizer, True)
    for bad in ([4, 0, 0, 0], [0, 0, -1, 0]):
        capi.ggml_backend_tensor_set(training.inputs, np.array(bad, np.int32), 0)
        with pytest.raises(IndexError, match=r"ggml_opt_eval: .* is not in 0 \.\.\. 3"):
            capi.ggml_opt_eval(optimizer, None)
    assert not training.learnt().any()
    capi.ggml_backend_tensor_set(training.inputs, np.array([2, 9, 3, 9], np.int32), 0)
    capi.ggml_backend_tensor_set(labels, np.ones(6, np.float32), 0)
    capi.ggml_opt_eval(optimizer, None)
    assert (training.learnt()[[2, 3]] > 0).all()


def test_indices_of_an_evaluation_without_static_graphs(training: Training) -> None:
    """The graph is the caller's, who may have freed it when it has been evaluated."""
    optimizer = training.optimizer()
    ids = training.inputs

    def prepare() -> Any:
        ctx = capi.ggml_init(mem_size=1 << 24, no_alloc=True)
        graph = capi.ggml_new_graph_custom(ctx, 256, True)
        outputs = training.rows(ctx, training.first(ctx))
        capi.ggml_build_forward_expand(graph, outputs)
        capi.ggml_opt_prepare_alloc(optimizer, ctx, graph, ids, outputs)
        capi.ggml_opt_alloc(optimizer, False)
        return ctx

    ctx = prepare()
    capi.ggml_backend_tensor_set(ids, np.array([0, 0, 4, 0], np.int32), 0)
    for _ in range(2):
        with pytest.raises(IndexError, match="index 4"):
            capi.ggml_opt_eval(optimizer, None)
    capi.ggml_backend_tensor_set(ids, np.zeros(4, np.int32), 0)
    capi.ggml_opt_eval(optimizer, None)
    capi.ggml_free(ctx)
    with pytest.raises(AbortError, match="eval_ready"):
        capi.ggml_opt_eval(optimizer, None)


def test_indices_of_a_fit(training: Training) -> None:
    """Also where C goes through the epochs."""
    outputs = training.rows(training.ctx, training.first(training.ctx))
    numbers = training.sched, training.ctx, training.inputs, outputs, training.dataset
    mse, sgd = capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR, capi.GGML_OPT_OPTIMIZER_TYPE_SGD
    constant = ffi.addressof(lib, "ggml_opt_get_default_optimizer_params")
    training.words([[0, 9]] * 5 + [[4, 9]])
    with pytest.raises(IndexError, match=r"ggml_opt_epoch: .*index 4"):
        capi.ggml_opt_fit(*numbers, mse, sgd, None, 1, 6)
    with pytest.raises(IndexError, match=r"ggml_opt_fit: .*index 4"):
        call("ggml_opt_fit", *numbers, mse, sgd, constant, 1, 6, 0.0, True)
    assert not training.learnt().any()
    training.words(GOOD)
    call("ggml_opt_fit", *numbers, mse, sgd, constant, 1, 6, 0.0, True)
    assert training.learnt().any()


def test_indices_that_a_trained_graph_computes(training: Training) -> None:
    ctx = training.ctx
    wide = capi.ggml_new_tensor_2d(ctx, F32, 5, 2)
    optimizer = training.optimizer(training.rows(ctx, capi.ggml_argmax(ctx, wide)))
    capi.ggml_opt_alloc(optimizer, True)
    with pytest.raises(IndexError, match="indices up to 4 that the graph computes"):
        capi.ggml_opt_eval(optimizer, None)


def test_an_abort_in_training_with_one_thread_raises() -> None:
    """It computes with the threads of its scheduler's backends, not with the default's."""
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, 1)
    with Arena(backend) as arena:
        training = Training(arena)
        numbers = capi.ggml_cast(training.ctx, training.first(training.ctx), F32)
        ids = capi.ggml_cast(training.ctx, numbers, I32)  # the graph computes them
        optimizer = training.optimizer(training.rows(training.ctx, ids))
        training.words([[4, 0]] * 6)
        with pytest.raises(AbortError, match=r"ggml_opt_epoch: .*GGML_ASSERT"):
            capi.ggml_opt_epoch(optimizer, training.dataset, None, None, 6)
    capi.ggml_backend_free(backend)


# ---- results that the graph allocator would put over an operand that is read after it is written


@pytest.mark.parametrize("kept", [False, True], ids=["shared", "kept"])
@pytest.mark.parametrize("steps", [1, 2], ids=["in one step", "allocated first"])
def test_a_scheduler_does_not_let_results_write_over_operands(
    cpu: Any, kept: bool, steps: int
) -> None:
    """Where the graph is allocated in the computation, that is only known in it."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 8), np.float32)
    numbers = np.array([2, 0, 1], np.int32)
    with Arena(cpu) as arena:
        ctx = arena.context()
        first, second, ids = arena.weight(8, 3), arena.weight(8, 3), arena.weight(3, type=I32)
        for tensor, values in ((first, a), (second, b), (ids, numbers)):
            capi.ggml_backend_tensor_set(tensor, values, 0)
        rows = capi.ggml_neg(ctx, second)
        if kept:
            capi.ggml_set_output(rows)
        result = capi.ggml_add_id(ctx, first, rows, ids)
        capi.ggml_set_output(result)
        graph = arena.graph(ctx, result, allocate=False)
        sched = scheduler(arena, cpu)
        if steps == 2:
            capi.ggml_backend_sched_alloc_graph(sched, graph)
        for compute in (
            capi.ggml_backend_sched_graph_compute,
            capi.ggml_backend_sched_graph_compute_async,
        ):
            if not kept:
                with pytest.raises(ValueError, match=r"ADD_ID 'node_1' would write over NEG"):
                    compute(sched, graph)
                continue
            compute(sched, graph)
            capi.ggml_backend_sched_synchronize(sched)
            found = np.empty((3, 8), np.float32)
            capi.ggml_backend_tensor_get(result, found, 0)
            np.testing.assert_array_equal(found, a - b[numbers])
        capi.ggml_backend_sched_reset(sched)
        other = arena.graph(ctx, capi.ggml_neg(ctx, first), allocate=False)
        capi.ggml_backend_sched_graph_compute(sched, other)
