"""The operations of random graphs: for each function of capi, what draws its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from programs import BF16, BLOCKS, F16, F32, FLOATS, HALVES, I32, I64, Builder, Drawn

from ggml_cffi import capi

Recipe = Callable[[Builder], Sequence[Any]]
OPERATIONS: dict[str, Recipe] = {}


def _enter(names: str, recipe: Recipe, inplace: bool = False) -> None:
    for name in names.split():
        OPERATIONS[f"ggml_{name}"] = recipe
        if inplace:
            OPERATIONS[f"ggml_{name}_inplace"] = recipe


def _binary(b: Builder) -> Sequence[Any]:
    a = b.floats()
    return a, b.repeated(a, (F32, a.type))


def _same(b: Builder) -> Sequence[Any]:
    a = b.filled()
    return a, b.of(a.ne)


def _factors(n: int, b: Builder, rank: int) -> list[int]:
    """`rank` extents with the product n."""
    found = []
    for _ in range(rank - 1):
        f = b.one_of(
            [d for d in range(1, min(n, 64) + 1) if n and n % d == 0] or [0 if n == 0 else 1]
        )
        found.append(f)
        n = n // f if f else 0
    return [*found, n]


def _reshape(rank: int) -> Recipe:
    def recipe(b: Builder) -> Sequence[Any]:
        a = b.plain((*FLOATS, I32))
        return a, *_factors(a.elements, b, rank)

    return recipe


def _cont(rank: int) -> Recipe:
    def recipe(b: Builder) -> Sequence[Any]:
        a = b.any((*FLOATS, I32))
        return a, *_factors(a.elements, b, rank)

    return recipe


def _view(rank: int) -> Recipe:
    def recipe(b: Builder) -> Sequence[Any]:
        a = b.any((*FLOATS, I32, *BLOCKS))
        block = capi.ggml_blck_size(a.type)
        first = [b.choose(n // (block if i == 0 else 1) + 1) for i, n in enumerate(a.ne)]
        ne = [
            n // (block if i == 0 else 1) - f
            for (i, n), f in zip(enumerate(a.ne), first, strict=True)
        ]
        ne = [max(n - b.choose(2), 0) for n in ne]
        ne = [ne[0] * block, *ne[1:]][:rank]
        offset = sum(f * s for f, s in zip(first, a.nb, strict=True))
        return a, *ne, *a.nb[1:rank], offset

    return recipe


def _permute(b: Builder) -> Sequence[Any]:
    a = b.any((*FLOATS, I32, *BLOCKS))
    axes = [0, 1, 2, 3]
    if capi.ggml_blck_size(a.type) > 1:
        axes = [0, *[axes.pop(1 + b.choose(len(axes) - 1)) for _ in range(3)]]
        return a, *axes
    return a, *[axes.pop(b.choose(len(axes))) for _ in range(4)]


def _mul_mat(b: Builder) -> Sequence[Any]:
    a = b.any((F32, F32, F16, BF16, *BLOCKS), lambda t: t.nb[0] == capi.ggml_type_size(t.type))
    n = b.extent()
    ne2 = a.ne[2] * b.one_of((1, 1, 2, 3))
    ne3 = a.ne[3] * b.one_of((1, 1, 2))
    return a, b.of((a.ne[0], n, ne2, ne3))


def _mul_mat_id(b: Builder) -> Sequence[Any]:
    a = b.any(
        (F32, F16, *BLOCKS), lambda t: t.ne[3] == 1 and t.contiguous, lambda t: (*b.shape(t)[:3], 1)
    )
    used = b.one_of((1, 1, 2)) if a.ne[2] > 1 else 1
    tokens = b.extent()
    x = b.of((a.ne[0], b.one_of((1, used)), tokens))
    return a, x, b.ids((used, tokens), a.ne[2], distinct=True)


def _out_prod(b: Builder) -> Sequence[Any]:
    a = b.any((F32, F32, F16, *BLOCKS), lambda t: t.nb[0] == capi.ggml_type_size(t.type))
    return a, b.of((b.extent(), a.ne[1], a.ne[2], a.ne[3]))


def _concat(b: Builder) -> Sequence[Any]:
    a = b.any((*FLOATS, I32))
    axis = b.choose(4)
    ne = list(a.ne)
    ne[axis] = b.extent()
    return a, b.of(ne, (a.type,)), axis


def _repeat(b: Builder) -> Sequence[Any]:
    a = b.any((F32, F16, BF16, I32))
    return a, *[n * b.one_of((1, 1, 2, 3)) for n in a.ne]


def _repeat_like(b: Builder) -> Sequence[Any]:
    a = b.any((F32, F16, I32))
    return a, b.of([n * b.one_of((1, 1, 2)) for n in a.ne], (F32, I32))


def _repeat_back(b: Builder) -> Sequence[Any]:
    a = b.f32()
    return a, b.of([n // 2 if n % 2 == 0 and b.choose(2) else n for n in a.ne])


def _add_id(b: Builder) -> Sequence[Any]:
    a = b.any((F32,), lambda t: t.ne[3] == 1, lambda t: (*b.shape(t)[:3], 1))
    n = max(b.extent(), 1)
    return a, b.of((a.ne[0], n)), b.ids((a.ne[1], a.ne[2]), n)


def _set(rank: int) -> Recipe:
    def recipe(b: Builder) -> Sequence[Any]:
        a = b.plain((F32, I32))
        ne = [b.choose(n + 1) if i < rank else 1 for i, n in enumerate(a.ne)]
        first = [b.choose(n - m + 1) for n, m in zip(a.ne, ne, strict=True)]
        offset = sum(f * s for f, s in zip(first, a.nb, strict=True))
        x = b.of(ne, (a.type,))
        return a, x, *({1: (), 2: a.nb[1:2], 4: a.nb[1:4]}[rank]), offset

    return recipe


def _acc(b: Builder) -> Sequence[Any]:
    a, x, *rest = _set(4)(b)
    return a, x, *rest


def _cpy(b: Builder) -> Sequence[Any]:
    a = b.any((*FLOATS, I32, *BLOCKS))
    to = (F32, F16, BF16, *BLOCKS[:2]) if a.type in FLOATS else (a.type, F32)
    if b.choose(3):
        return a, b.of(a.ne, [t for t in to if a.ne[0] % capi.ggml_blck_size(t) == 0])
    return a, b.leaf(F32, b.fitting(F32, _factors(a.elements, b, 4)))


def _cast(b: Builder) -> Sequence[Any]:
    a = b.any((*FLOATS, *BLOCKS, I32))
    to = (F32, F16, BF16, *BLOCKS) if a.type in FLOATS else (F32,)
    return a, b.one_of([t for t in to if a.ne[0] % capi.ggml_blck_size(t) == 0])


def _get_rows(b: Builder) -> Sequence[Any]:
    a = b.any((*FLOATS, *BLOCKS), lambda t: t.nb[0] == capi.ggml_type_size(t.type))
    return a, b.ids((b.extent() if a.ne[1] else 0, a.ne[2], a.ne[3]), a.ne[1])


def _get_rows_back(b: Builder) -> Sequence[Any]:
    rows, n = max(b.extent(), 1), max(b.extent(), 1)
    a = b.of((b.extent(), n), plain=True)
    return a, b.ids((n,), rows), b.of((a.ne[0], rows), plain=True)


def _set_rows(b: Builder) -> Sequence[Any]:
    a = b.any((F32, F16, BF16, capi.GGML_TYPE_Q8_0), lambda t: t.contiguous)
    rows = b.choose(a.ne[1] + 1)
    x = b.of((a.ne[0], rows, a.ne[2], a.ne[3]))
    return a, x, b.ids((rows, a.ne[2]), a.ne[1], distinct=True, types=(I64, I32))


def _norm(b: Builder) -> Sequence[Any]:
    return b.f32(lambda t: t.nb[0] == 4), b.one_of((1e-5, 1e-6, 0.0, 1.0))


def _group_norm(b: Builder) -> Sequence[Any]:
    return b.f32(lambda t: t.nb[0] == 4), b.one_of((1, 2, 4)), 1e-5


def _mask(b: Builder, ne0: int, ne1: int, types: Sequence[int]) -> Drawn | None:
    return b.of((ne0, ne1), types, plain=True) if b.choose(2) else None


def _soft_max_ext(b: Builder) -> Sequence[Any]:
    a = b.plain()
    return a, _mask(b, a.ne[0], a.ne[1], HALVES), b.one_of((1.0, 0.125)), 0.0


def _glu(b: Builder) -> Sequence[Any]:
    return (
        b.any(
            HALVES,
            lambda t: t.contiguous and t.ne[0] % 2 == 0,
            lambda t: (2 * b.extent(), *b.shape(t)[1:]),
        ),
    )


def _glu_split(b: Builder) -> Sequence[Any]:
    a = b.plain(HALVES)
    return a, b.of(a.ne, (a.type,), plain=True)


def _rope_args(b: Builder) -> tuple[Drawn, Drawn, int]:
    a = b.any(
        HALVES,
        lambda t: t.ne[0] % 2 == 0 and t.nb[0] == capi.ggml_type_size(t.type),
        lambda t: (2 * b.extent(), *b.shape(t)[1:]),
    )
    return (
        a,
        b.ids((a.ne[2],), 1000),
        2 * b.choose(a.ne[0] // 2 + 1) if b.choose(3) == 0 else a.ne[0],
    )


def _rope(b: Builder) -> Sequence[Any]:
    a, positions, dims = _rope_args(b)
    return a, positions, dims, b.one_of((0, 2))


def _rope_ext(b: Builder) -> Sequence[Any]:
    a, positions, dims = _rope_args(b)
    factors = b.of((max(a.ne[0] // 2, 1),), plain=True) if b.choose(3) == 1 else None
    return a, positions, factors, dims, b.one_of((0, 2)), 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0


def _rope_multi(b: Builder) -> Sequence[Any]:
    a = b.any(
        (F32,),
        lambda t: t.ne[0] % 4 == 0 and t.nb[0] == 4,
        lambda t: (4 * max(b.extent(), 1), *b.shape(t)[1:]),
    )
    half = a.ne[0] // 4
    return (
        a, b.ids((a.ne[2] * 4,), 100), None, a.ne[0], [half, half, 0, 0], capi.GGML_ROPE_TYPE_MROPE,
        0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0,
    )  # fmt: skip


def _flash(b: Builder) -> Sequence[Any]:
    d, n, m = b.one_of((4, 8, 32, 64)), max(b.extent(), 1), max(b.extent(), 1)
    heads = b.one_of((1, 2, 4))
    shared = b.one_of([h for h in (1, 2, 4) if heads % h == 0])
    types = (F32, F16) if d % 32 else (F32, F16, capi.GGML_TYPE_Q8_0)
    q = b.of((d, n, heads))
    k = b.of((d, m, shared), types)
    return (
        q,
        k,
        b.of((d, m, shared), (k.type,)),
        _mask(b, m, n, (F16,)),
        d**-0.5,
        0.0,
        b.one_of((0.0, 0.0, 8.0)),
    )


def _conv_1d(b: Builder) -> Sequence[Any]:
    n, channels = max(b.extent(), 3), max(b.extent(), 1)
    kernel = b.of((b.one_of((1, 2, 3)), channels, max(b.extent(), 1)), HALVES, plain=True)
    return (
        kernel,
        b.of((n, channels, b.one_of((1, 1, 1, 2))), plain=True),
        b.one_of((1, 2)),
        b.choose(3),
        1,
    )


def _conv_2d(b: Builder) -> Sequence[Any]:
    channels = max(b.extent() % 8, 1)
    kernel = b.of(
        (b.one_of((1, 2, 3)), b.one_of((1, 3)), channels, b.one_of((1, 4))), HALVES, plain=True
    )
    x = b.of((max(b.extent(), 3), max(b.extent() % 16, 3), channels, b.one_of((1, 2))), plain=True)
    return kernel, x, b.one_of((1, 2)), 1, b.choose(2), b.choose(2), 1, b.one_of((1, 1, 2))


def _im2col(b: Builder) -> Sequence[Any]:
    kernel, x, *numbers = _conv_2d(b)
    return kernel, x, *numbers, True, b.one_of((F16, F32))


def _conv_2d_dw(b: Builder) -> Sequence[Any]:
    channels = max(b.extent() % 8, 1)
    kernel = b.of((3, 3, 1, channels), HALVES, plain=True)
    return kernel, b.of((max(b.extent(), 3), 4, channels, 2), plain=True), 1, 1, 1, 1, 1, 1


def _conv_transpose_1d(b: Builder) -> Sequence[Any]:
    channels = max(b.extent() % 16, 1)
    kernel = b.of((b.one_of((1, 3)), b.one_of((1, 2)), channels), HALVES, plain=True)
    return kernel, b.of((max(b.extent(), 1), channels), plain=True), b.one_of((1, 2)), 0, 1


def _conv_transpose_2d(b: Builder) -> Sequence[Any]:
    channels = max(b.extent() % 8, 1)
    kernel = b.of((2, 2, b.one_of((1, 3)), channels), (F16, F32), plain=True)
    return kernel, b.of((max(b.extent() % 16, 1), 3, channels), plain=True), b.one_of((1, 2))


def _pool_1d(b: Builder) -> Sequence[Any]:
    a = b.any(HALVES, lambda t: t.contiguous and t.ne[0] >= 2, lambda t: (8, *b.shape(t)[1:]))
    return a, b.one_of((capi.GGML_OP_POOL_MAX, capi.GGML_OP_POOL_AVG)), 2, b.one_of((2, 1)), 0


def _pool_2d(b: Builder) -> Sequence[Any]:
    a = b.any(
        HALVES, lambda t: t.contiguous and min(t.ne[:2]) >= 2, lambda t: (8, 4, *b.shape(t)[2:])
    )
    op = b.one_of((capi.GGML_OP_POOL_MAX, capi.GGML_OP_POOL_AVG))
    return a, op, 2, 2, b.one_of((2, 1)), 2, b.one_of((0.0, 1.0)), 0.0


def _upscale(b: Builder) -> Sequence[Any]:
    mode = (
        capi.GGML_SCALE_MODE_NEAREST,
        capi.GGML_SCALE_MODE_BILINEAR,
        capi.GGML_SCALE_MODE_BICUBIC,
    )
    return b.filled(), b.one_of((2, 1, 3)), b.one_of(mode)


def _ssm_conv(b: Builder) -> Sequence[Any]:
    width, inner, tokens = b.one_of((4, 2, 3)), max(b.extent(), 1), max(b.extent(), 1)
    return b.of((width - 1 + tokens, inner, b.one_of((1, 2))), plain=True), b.of(
        (width, inner), plain=True
    )


def _ssm_scan(b: Builder) -> Sequence[Any]:
    state, head, heads, groups, tokens, seqs = (
        16,
        b.one_of((1, 4)),
        b.one_of((2, 4)),
        b.one_of((1, 2)),
        max(b.extent() % 8, 1),
        b.one_of((1, 2)),
    )
    a0 = 1 if head > 1 else state
    return (
        b.of((state, head, heads, seqs), plain=True),
        b.of((head, heads, tokens, seqs), plain=True),
        b.of((heads, tokens, seqs), plain=True),
        b.of((a0, heads), plain=True),
        b.of((state, groups, tokens, seqs), plain=True),
        b.of((state, groups, tokens, seqs), plain=True),
        b.ids((seqs,), seqs),
        1,
    )


def _attention_like(n: int, extra: Callable[[int, int, int, Builder], Sequence[Any]]) -> Recipe:
    def recipe(b: Builder) -> Sequence[Any]:
        size, heads, seqs = 64, b.one_of((1, 2)), b.one_of((1, 2))
        tokens = seqs * b.one_of((1, 2, 3))
        heads_of = [b.of((size, heads, tokens), plain=True) for _ in range(n)]
        return *heads_of, *extra(size, heads, seqs, b)

    return recipe


def _state(size: int, heads: int, seqs: int, b: Builder) -> Drawn:
    return b.of((size * size * heads, seqs), plain=True)


def _cross_entropy(b: Builder) -> Sequence[Any]:
    a = b.filled()
    return a, b.of(a.ne, plain=True)


def _square(b: Builder) -> Drawn:
    n = max(b.extent(), 1)
    return b.of((n, n, b.one_of((1, 2))), plain=True)


def _solve_tri(b: Builder) -> Sequence[Any]:
    a = _square(b)
    return a, b.of((max(b.extent(), 1), a.ne[1], a.ne[2]), plain=True), True, True, False


def _lightning(b: Builder) -> Sequence[Any]:
    d, heads, tokens, cells = 64, b.one_of((2, 4)), max(b.extent() % 8, 1), max(b.extent() % 64, 1)
    return (
        b.of((d, heads, tokens), plain=True),
        b.of((d, 1, cells), HALVES, plain=True),
        b.of((heads, tokens), plain=True),
        b.of((cells, tokens), (F16,), plain=True),
    )


def _add_cast(b: Builder) -> Sequence[Any]:
    a = b.any((F16, BF16, *BLOCKS), lambda t: t.nb[0] == capi.ggml_type_size(t.type))
    return a, b.of(a.ne), F32


_enter(
    "abs sgn neg step tanh elu relu sigmoid exp floor ceil round trunc expm1 softplus sqr sqrt "
    "log sin cos",
    lambda b: (b.floats(),),
    inplace=True,
)
_enter("gelu gelu_erf gelu_quick silu", lambda b: (b.any(HALVES),), inplace=True)
_enter("hardswish hardsigmoid", lambda b: (b.floats(),))
_enter("unary", lambda b: (b.floats(), b.choose(22)), inplace=True)
_enter("xielu", lambda b: (b.plain(FLOATS), 0.8, 0.8, 0.5, -1e-6))
_enter("leaky_relu", lambda b: (b.plain(HALVES), 0.1, bool(b.choose(2))))
_enter("add sub mul div", _binary, inplace=True)
_enter("add1", lambda b: (b.floats(), b.leaf(F32, (1,))), inplace=True)
_enter("add_id", _add_id)
_enter("add_cast", _add_cast)
_enter("scale", lambda b: (b.plain(), b.one_of((0.5, -2.0, 0.0))), inplace=True)
_enter("scale_bias", lambda b: (b.plain(), 0.5, 1.0), inplace=True)
_enter("clamp", lambda b: (b.plain(HALVES), -1.0, b.one_of((1.0, 0.25))))
_enter("dup", lambda b: (b.any((*FLOATS, I32)),), inplace=True)
_enter("cont transpose", lambda b: (b.any((*FLOATS, I32)),))
_enter("permute", _permute)
for _rank in range(1, 5):
    _enter(f"reshape_{_rank}d", _reshape(_rank))
    _enter(f"cont_{_rank}d", _cont(_rank))
    _enter(f"view_{_rank}d", _view(_rank))
_enter("reshape", lambda b: (lambda a: (a, b.of(_factors(a.elements, b, 4))))(b.plain()))
_enter("cpy", _cpy)
_enter("cast", _cast)
_enter("set acc", _set(4), inplace=True)
_enter("set_1d", _set(1), inplace=True)
_enter("set_2d", _set(2), inplace=True)
_enter("concat", _concat)
_enter("repeat_4d", _repeat)
_enter("repeat", _repeat_like)
_enter("repeat_back", _repeat_back)
_enter("sum", lambda b: (b.floats(),))
_enter("sum_rows cumsum mean argmax", lambda b: (b.f32(lambda t: t.nb[0] == 4),))
_enter("count_equal", lambda b: (lambda a: (a, b.of(a.ne, (I32,), plain=True)))(b.plain((I32,))))
_enter("argsort", lambda b: (b.plain(), b.choose(2)))
_enter(
    "argsort_top_k top_k",
    lambda b: (lambda a: (a, b.choose(a.ne[0]) + 1 if a.ne[0] else 0))(b.plain()),
)
_enter("mul_mat", _mul_mat)
_enter("mul_mat_id", _mul_mat_id)
_enter("out_prod", _out_prod)
_enter("get_rows", _get_rows)
_enter("get_rows_back", _get_rows_back)
_enter("set_rows", _set_rows)
_enter("norm rms_norm l2_norm", _norm, inplace=True)
_enter("group_norm", _group_norm, inplace=True)
_enter("rms_norm_back", lambda b: (*_same(b), 1e-5))
_enter("silu_back", _glu_split)
_enter("soft_max", lambda b: (b.plain(),), inplace=True)
_enter("soft_max_ext", _soft_max_ext)
_enter("soft_max_ext_back", lambda b: (*_cross_entropy(b), 1.0, 0.0))
_enter("diag_mask_inf diag_mask_zero", lambda b: (b.plain(), b.choose(4)), inplace=True)
_enter(
    "diag",
    lambda b: (
        b.any(
            (F32,),
            lambda t: t.ne[1] == 1 and t.nb[0] == 4,
            lambda t: (b.extent(), 1, *b.shape(t)[2:]),
        ),
    ),
)
_enter("tri", lambda b: (_square(b), b.choose(4)))
_enter(
    "reglu geglu swiglu geglu_erf geglu_quick "
    "reglu_swapped geglu_swapped swiglu_swapped geglu_erf_swapped geglu_quick_swapped",
    _glu,
)
_enter("glu", lambda b: (*_glu(b), b.choose(6), bool(b.choose(2))))
_enter("reglu_split geglu_split swiglu_split geglu_erf_split geglu_quick_split", _glu_split)
_enter("glu_split", lambda b: (*_glu_split(b), b.choose(6)))
_enter("swiglu_oai", lambda b: (lambda a: (a, b.of(a.ne, plain=True), 1.7, 7.0))(b.plain()))
_enter("rope", _rope, inplace=True)
_enter("rope_ext", _rope_ext, inplace=True)
_enter("rope_ext_back", _rope_ext)
_enter("rope_multi", _rope_multi)
_enter("flash_attn_ext", _flash)
_enter("pad pad_circular", lambda b: (b.f32(), *[b.choose(3) for _ in range(4)]))
_enter("pad_ext", lambda b: (b.f32(), *[b.choose(3) for _ in range(8)]))
_enter(
    "pad_reflect_1d",
    lambda b: (
        b.any((F32,), lambda t: t.contiguous and t.ne[0] > 2, lambda t: (8, *b.shape(t)[1:])),
        b.choose(3),
        b.choose(2),
    ),
)
_enter("roll", lambda b: (b.f32(), *[b.choose(max(n, 1)) - n // 2 for n in [b.extent()] * 4]))
_enter("upscale", _upscale)
_enter("interpolate", lambda b: (b.filled(), *[max(b.extent(), 1) % 32 + 1, 3, 1, 1], b.choose(3)))
_enter("fill", lambda b: (b.any(HALVES), 2.5), inplace=True)
_enter("arange", lambda b: (0.0, float(b.extent() + 1), b.one_of((1.0, 0.5))))
_enter("timestep_embedding", lambda b: (b.vector(max(b.extent(), 1)), b.one_of((8, 7)), 100))
_enter("conv_1d", _conv_1d)
_enter("conv_2d conv_2d_direct", _conv_2d)
_enter("im2col", _im2col)
_enter("conv_2d_dw conv_2d_dw_direct", _conv_2d_dw)
_enter("conv_transpose_1d", _conv_transpose_1d)
_enter("conv_transpose_2d_p0", _conv_transpose_2d)
_enter("pool_1d", _pool_1d)
_enter("pool_2d", _pool_2d)
_enter("ssm_conv", _ssm_conv)
_enter("ssm_scan", _ssm_scan)
_enter("rwkv_wkv7", _attention_like(6, lambda s, h, q, b: (_state(s, h, q, b),)))
_enter("gated_linear_attn", _attention_like(4, lambda s, h, q, b: (_state(s, h, q, b), 1.0)))
_enter(
    "rwkv_wkv6",
    _attention_like(
        3,
        lambda s, h, q, b: (
            b.of((s, h), plain=True),
            b.of((s, h, 2 * q), plain=True),
            _state(s, h, q, b),
        ),
    ),
)
_enter(
    "win_part",
    lambda b: (
        b.any((F32,), lambda t: t.contiguous and t.ne[3] == 1, lambda t: (*b.shape(t)[:3], 1)),
        b.one_of((2, 3, 1)),
    ),
)
_enter("cross_entropy_loss", _cross_entropy)
_enter("cross_entropy_loss_back", lambda b: (b.of((1,), plain=True), *_cross_entropy(b)))
_enter("solve_tri", _solve_tri)
_enter("lightning_indexer", _lightning)

for _name in [name for name in OPERATIONS if not hasattr(capi, name)]:
    del OPERATIONS[_name]  # this ggml lacks it
