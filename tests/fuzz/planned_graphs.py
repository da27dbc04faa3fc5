"""Random graphs for meta devices: operations and parts of networks, with leaves cut at random.

What comes of a cut is left to ggml and to the planner; a graph is drawn with a guess of it alone,
so that operands often go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from _release import has
from operations import OPERATIONS, Recipe
from programs import BF16, F16, F32, I32, Builder, Call, Drawn, Leaf

from ggml_cffi import capi
from ggml_cffi.meta import SplitState

Q8_0, Q4_0 = capi.GGML_TYPE_Q8_0, capi.GGML_TYPE_Q4_0
WEIGHTS = (F32, F32, F16, BF16, Q8_0, Q4_0)


HAS_REPEATS = has("struct ggml_backend_meta_split_state.nr")


class Placed(NamedTuple):
    """Where a leaf is: a weight, cut in some way, or an input, which is never cut."""

    is_static: bool
    split: SplitState


class Guess(NamedTuple):
    """A tensor is held in these shares along an axis, as far as one can see."""

    axis: int
    shares: tuple[int, ...]


INPUT = Placed(False, SplitState.mirrored())
MIRRORED = Placed(True, SplitState.mirrored())

_ELEMENTWISE = {
    "ggml_add",
    "ggml_sub",
    "ggml_mul",
    "ggml_div",
    "ggml_add_id",
    "ggml_scale",
    "ggml_norm",
    "ggml_rms_norm",
    "ggml_silu",
    "ggml_gelu",
    "ggml_relu",
    "ggml_swiglu_split",
    "ggml_rope",
    "ggml_rope_ext",
    "ggml_cont",
    "ggml_soft_max",
    "ggml_soft_max_ext",
    "ggml_l2_norm",
    "ggml_sqr",
    "ggml_tanh",
    "ggml_clamp",
}


class PlannedBuilder(Builder):
    """Draws leaves with a place for each.

    `style` is how likely leaves are cut: 0 never, 1 as what they meet is, 2 in any way.
    """

    def __init__(self, ctx: Any, dims: Sequence[int], n_devs: int, style: int) -> None:
        super().__init__(ctx, dims, {**OPERATIONS, **MORE, **PARTS})
        self.n_devs = n_devs
        self.style = style
        self.places: dict[int, Placed] = {}
        self.guesses: dict[int, Guess] = {}
        self.met: Guess | None = None  # of the operand that was drawn before
        self._wish: Placed | None = None

    # ---- cuts

    def shares(self, n: int, unit: int = 1) -> tuple[int, ...]:
        """A part of n for each device, of whole units; some have none."""
        units, n_devs = n // unit, self.n_devs
        if self.choose(3) == 0:  # any
            cuts = sorted(self.choose(units + 1) for _ in range(n_devs - 1))
        else:  # as even as it goes
            cuts = [units * (j + 1) // n_devs for j in range(n_devs - 1)]
        borders = [0, *cuts, units]
        return tuple((b - a) * unit for a, b in pairwise(borders))

    def cut(self, axis: int, n: int, unit: int = 1) -> Placed:
        return Placed(True, SplitState.split(axis, self.shares(n, unit)))

    def cut_in_segments(self, axis: int, lengths: Sequence[int], unit: int = 1) -> Placed:
        """Each part of the axis is cut by itself, and stands once or twice."""
        rows, repeats = [], []
        for n in lengths:
            nr = 2 if n % (2 * unit) == 0 and self.choose(2) and HAS_REPEATS else 1
            rows.append(self.shares(n // nr, unit))
            repeats.append(nr)
        return Placed(True, SplitState.segments(axis, rows, repeats))

    def _any_cut(self, leaf: Leaf) -> Placed:
        unit = capi.ggml_blck_size(leaf.type)
        ne = (*leaf.ne, 1, 1, 1, 1)[:4]
        axes = [a for a in range(3) if ne[a] > (unit if a == 0 else 1)]
        kind = self.choose(10)
        if kind == 0 or not axes:
            return MIRRORED
        if kind == 1 and leaf.type == F32:
            return Placed(True, SplitState.partial())
        axis = self.one_of(axes)
        unit = unit if axis == 0 else 1
        if kind < 5 and axis < 2 and ne[3] == 1 and (axis or ne[2] == 1):
            first = ne[axis] // unit // self.one_of((2, 3, 4)) * unit
            return self.cut_in_segments(axis, [first, ne[axis] - first], unit)
        return self.cut(axis, ne[axis], unit)

    def _place(self, leaf: Leaf) -> Placed:
        wish, self._wish = self._wish, None
        if 0 in leaf.ne:
            return INPUT
        if wish is not None:
            return wish
        if self.style == 0:
            return self.one_of((INPUT, MIRRORED))
        if leaf.limit is not None:
            return self._any_cut(leaf) if self.choose(16) == 15 else INPUT
        if self.style == 2:
            return self._any_cut(leaf)
        met = self.met
        if met is not None and self.choose(12) < 11:
            n = (*leaf.ne, 1, 1, 1, 1)[met.axis]
            unit = capi.ggml_blck_size(leaf.type) if met.axis == 0 else 1
            whole = not any(share % unit for share in met.shares)
            if n == sum(met.shares) > unit and whole and met.axis < 3:
                return Placed(True, SplitState.split(met.axis, met.shares))
            return INPUT
        return self.one_of((INPUT, MIRRORED, INPUT, self._any_cut(leaf)))

    # ---- tensors

    def weight(self, type: int, ne: Sequence[int], place: Placed) -> Drawn:
        self._wish = place
        return self.leaf(type, ne)

    def keep(self, record: Leaf | Call, handle: Any, limit: int | None = None) -> Drawn:
        drawn = super().keep(record, handle, limit)
        if isinstance(record, Leaf):
            place = self.places[drawn.at] = self._place(record)
            if place.split.is_split:
                self.guesses[drawn.at] = Guess(int(place.split.axis), place.split.shares)
        else:
            guess = self._guess(record, drawn)
            if guess is not None:
                self.guesses[drawn.at] = guess
        self.met = self.guesses.get(drawn.at)
        return drawn

    def any(self, *args: Any, **more: Any) -> Drawn:
        drawn = super().any(*args, **more)
        self.met = self.guesses.get(drawn.at)
        return drawn

    def of(self, ne: Sequence[int], types: Sequence[int] = (F32,), plain: bool = False) -> Drawn:
        met = self.met
        if met is not None:  # what is held in another way would seldom do
            shape = (*ne, 1, 1, 1, 1)[:4]
            found = [
                t
                for t in self.tensors
                if t.ne == shape and t.type in types and self.guesses.get(t.at) == met
            ]
            drawn = found[-1] if found and self.choose(2) else self.leaf(self.one_of(types), ne)
            self.met = met
            return drawn
        return super().of(ne, types, plain=True)

    def node(self, function: str, choices: bytes) -> Drawn | None:
        self.met = None
        if function in PARTS:
            self._bytes = iter(choices)
            return PARTS[function](self)
        return super().node(function, bytes([min(choices[0], 231)]) + choices[1:])  # none spoiled

    def _guess(self, call: Call, drawn: Drawn) -> Guess | None:
        refs = [a.at for a in call.args if hasattr(a, "at")]
        held = [self.guesses.get(at) for at in refs]
        name, first = call.function, held[0] if held else None
        if name in ("ggml_mul_mat", "ggml_mul_mat_id"):
            x = held[1]
            if first is not None and first.axis == 1 and x is None:
                return Guess(0, first.shares)
            return x if first is None and x is not None and x.axis == 1 else None
        if first is None:
            return None
        if name in _ELEMENTWISE and drawn.ne == self.tensors[refs[0]].ne:
            return first
        if name in ("ggml_permute", "ggml_transpose"):
            axes = call.args[1:5] if name == "ggml_permute" else (1, 0, 2, 3)
            return Guess(axes[first.axis], first.shares)
        if name in ("ggml_reshape_3d", "ggml_view_3d") and first.axis == 0:
            d = drawn.ne[0]
            return None if not d or any(n % d for n in first.shares) else Guess(1, _parts(first, d))
        if name == "ggml_flash_attn_ext":
            return Guess(1, first.shares)
        if name in ("ggml_reshape_2d", "ggml_cont_2d") and first.axis == 1:
            d = drawn.ne[0] // sum(first.shares)
            return Guess(0, tuple(n * d for n in first.shares))
        return None


def _segments(rows: Sequence[Sequence[int]], repeats: Sequence[int] = ()) -> Placed:
    """Of the rows of a weight; repeats are segments of their own where ggml has none."""
    repeats = repeats or [1] * len(rows)
    if not HAS_REPEATS:
        rows = [row for row, nr in zip(rows, repeats, strict=True) for _ in range(nr)]
        repeats = [1] * len(rows)
    return Placed(True, SplitState.segments(1, rows, repeats))


def _parts(guess: Guess, d: int) -> tuple[int, ...]:
    return tuple(n // d for n in guess.shares)


# ---- parts of networks, as they are written for several devices

Part = Callable[[PlannedBuilder], Drawn]
PARTS: dict[str, Part] = {}


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


def _hidden(b: PlannedBuilder) -> Drawn:
    """Activations that are whole on each device."""
    found = [
        t
        for t in b.tensors
        if t.type == F32
        and t.contiguous
        and t.ne[0] % 32 == 0
        and t.ne[0] * t.ne[1] == t.elements > 0
        and t.at not in b.guesses
    ]
    if found and b.choose(4):
        return found[-1 - b.choose(min(len(found), 3))]
    return b.weight(F32, (b.one_of((64, 32, 96, 128)), b.one_of((3, 1, 2, 5, 8))), INPUT)


def _column(b: PlannedBuilder, x: Drawn, n: int, place: Placed) -> Drawn:
    return b.made("ggml_mul_mat", b.weight(b.one_of(WEIGHTS), (x.ne[0], n), place), x)


def _row(b: PlannedBuilder, x: Drawn, n: int) -> Drawn:
    """A row-parallel product, cut as its operand is."""
    guess = b.guesses.get(x.at)
    whole = guess is not None and guess.axis == 0 and sum(guess.shares) == x.ne[0] > 1
    types = [
        t
        for t in WEIGHTS
        if x.ne[0] % capi.ggml_blck_size(t) == 0
        and not (whole and any(s % capi.ggml_blck_size(t) for s in guess.shares))
        and not (whole and x.ne[0] <= capi.ggml_blck_size(t))
    ]
    place = Placed(True, SplitState.split(0, guess.shares)) if whole else MIRRORED
    if b.choose(24) == 23 and x.ne[0] > 32:
        types, place = [F32], b.cut(0, x.ne[0])
    return b.made("ggml_mul_mat", b.weight(b.one_of(types), (x.ne[0], n), place), x)


def _after(b: PlannedBuilder, x: Drawn, y: Drawn) -> Drawn:
    """What commonly follows a row-parallel product."""
    kind = b.choose(6)
    if kind == 0:
        return y
    if kind == 1:
        return b.made("ggml_cont", y)
    if kind == 2:
        return b.made("ggml_mul", y, b.weight(F32, (y.ne[0],), b.one_of((INPUT, MIRRORED))))
    if kind == 3 or y.ne != x.ne:
        return b.made("ggml_add", y, b.weight(F32, (y.ne[0],), b.one_of((INPUT, MIRRORED))))
    return b.made("ggml_add", y, x) if kind == 4 else b.made("ggml_add", x, y)


@part
def feed_forward(b: PlannedBuilder) -> Drawn:
    x = _hidden(b)
    n = b.one_of((64, 96, 128, 32, 12))
    place = b.cut(1, n, b.one_of((32, 1)) if n % 32 == 0 else 1)
    up = _column(b, x, n, place)
    kind = b.choose(4)
    if kind == 0:
        h = b.made("ggml_swiglu_split", _column(b, x, n, place), up)
    elif kind == 1:
        bias = b.weight(F32, (n,), Placed(True, SplitState.split(0, place.split.shares)))
        h = b.made("ggml_gelu", b.made("ggml_add", up, bias))
    else:
        h = b.made(b.one_of(("ggml_silu", "ggml_relu", "ggml_sqr")), up)
    return _after(b, x, _row(b, h, x.ne[0]))


@part
def fused_gate_and_up(b: PlannedBuilder) -> Drawn:
    x = _hidden(b)
    n = b.one_of((32, 64, 8))
    shares = b.shares(n, 8)
    place = (
        _segments([shares], [2]),
        _segments([shares, shares]),
        b.cut(1, 2 * n),
    )[b.choose(3)]
    both = _column(b, x, 2 * n, place)
    if b.choose(2):
        h = b.made(b.one_of(("ggml_swiglu", "ggml_geglu", "ggml_swiglu_swapped")), both)
    else:
        views = [
            b.made("ggml_view_2d", both, n, x.ne[1], both.nb[1], i * n * both.nb[0]) for i in (0, 1)
        ]
        h = b.made("ggml_mul", b.made("ggml_silu", b.made("ggml_cont", views[0])), views[1])
    if b.choose(4):
        b.guesses[h.at] = Guess(0, shares)
    return _after(b, x, _row(b, h, x.ne[0]))


def _attention(b: PlannedBuilder, x: Drawn, q: Drawn, k: Drawn, v: Drawn, d: int) -> Drawn:
    """Of heads that are rows of the second axis."""
    tokens = x.ne[1]
    if b.choose(2):
        positions = b.leaf(I32, (tokens,), 1000)
        q, k = (b.made("ggml_rope", one, positions, d, 2 * b.choose(2)) for one in (q, k))
    q, k = (b.made("ggml_permute", one, 0, 2, 1, 3) for one in (q, k))
    mask = b.weight(F16, (tokens, tokens), INPUT) if b.choose(2) else None
    if b.choose(2):
        v = b.made("ggml_permute", v, 0, 2, 1, 3)
        made = b.made("ggml_flash_attn_ext", q, k, v, mask, d**-0.5, 0.0, 0.0, *_sinks(b, q))
        made = b.made("ggml_reshape_2d", made, d * q.ne[2], tokens)
    else:
        scores = b.made("ggml_mul_mat", k, q)
        b.guesses.update({scores.at: b.guesses[q.at]} if q.at in b.guesses else {})
        weights = b.made("ggml_soft_max_ext", scores, mask, d**-0.5, 0.0, *_sinks(b, q))
        v = b.made("ggml_cont", b.made("ggml_permute", v, 1, 2, 0, 3))
        made = b.made("ggml_mul_mat", v, weights)
        b.guesses.update({made.at: b.guesses[q.at]} if q.at in b.guesses else {})
        made = b.made("ggml_cont_2d", b.made("ggml_permute", made, 0, 2, 1, 3), d * q.ne[2], tokens)
    return _after(b, x, _row(b, made, x.ne[0]))


def _sinks(b: PlannedBuilder, q: Drawn) -> tuple[Drawn, ...]:
    """A number for each head, cut as the heads are, or otherwise; or none."""
    if b.choose(4) or not hasattr(capi, "ggml_flash_attn_ext_add_sinks"):
        return ()
    heads, guess, place = q.ne[2], b.guesses.get(q.at), MIRRORED
    if heads > 1:
        place = b.cut(0, heads)
        if guess is not None and guess.axis == 2 and sum(guess.shares) == heads and b.choose(4):
            place = Placed(True, SplitState.split(0, guess.shares))
    return (b.weight(F32, (heads,), place),)


@part
def part_of_a_weight(b: PlannedBuilder) -> Drawn:
    """A view of a weight, or of one that is reshaped, at any place where its type can begin."""
    kind = b.one_of(WEIGHTS)
    block, size = capi.ggml_blck_size(kind), capi.ggml_type_size(kind)
    n, rows = block * b.one_of((4, 2, 8)) if block > 1 else b.one_of((64, 16)), b.one_of((8, 4, 6))
    place = b.one_of((MIRRORED, b.cut(0, n, block), b.cut(1, rows), b.cut(0, n, block)))
    w = b.weight(kind, (n, rows), place)
    if b.choose(2):
        shape = (n // 2, 2, rows) if n % (2 * block) == 0 and b.choose(2) else (n, 2, rows // 2)
        w = b.made("ggml_reshape_3d", w, *shape)
    cells = w.ne[0] // block
    width, outer = 1 + b.choose(cells), 1 + b.choose(w.ne[1])
    offset = b.choose(cells - width + 1) * size + b.choose(w.ne[1] - outer + 1) * w.nb[1]
    view = b.made(
        "ggml_view_3d", w, width * block, outer, w.ne[2], w.nb[1], w.nb[2], offset
    )  # fmt: skip
    return b.made("ggml_cast", view, F32)


@part
def attention(b: PlannedBuilder) -> Drawn:
    x, d = _hidden(b), b.one_of((8, 32, 16))
    group, kv = b.one_of((1, 2)), b.one_of((4, 2, 3, 1))
    shares = b.shares(kv) if kv > 1 else (1,) + (0,) * (b.n_devs - 1)
    heads = []
    for n, factor in ((kv * group, group), (kv, 1), (kv, 1)):
        place = Placed(True, SplitState.split(1, [s * factor * d for s in shares]))
        made = _column(b, x, n * d, place if b.choose(16) else b.cut(1, n * d))
        heads.append(b.made("ggml_reshape_3d", made, d, n, x.ne[1]))
    return _attention(b, x, *heads, d)


@part
def fused_attention(b: PlannedBuilder) -> Drawn:
    x, d = _hidden(b), b.one_of((8, 16))
    group, kv = b.one_of((1, 2)), b.one_of((4, 2))
    shares = b.shares(kv)
    rows = [[s * factor * d for s in shares] for factor in (group, 1, 1)]
    place = b.one_of(
        (
            _segments(rows),
            _segments(rows[:2], [1, 2]),
            b.cut(1, (group + 2) * kv * d),
        )
    )
    fused = _column(b, x, (group + 2) * kv * d, place)
    step, heads, offset = fused.nb[0] * d, [], 0
    for n in (group * kv, kv, kv):
        heads.append(b.made("ggml_view_3d", fused, d, n, x.ne[1], step, fused.nb[1], offset))
        offset += n * step
        if b.choose(2):
            heads[-1] = b.made("ggml_cont", heads[-1])
    return _attention(b, x, *heads, d)


@part
def experts(b: PlannedBuilder) -> Drawn:
    x = _hidden(b)
    n, e, used, tokens = b.one_of((32, 64, 8)), b.one_of((4, 3)), b.one_of((2, 1, 3)), x.ne[1]
    probs = b.made("ggml_soft_max", _column(b, x, e, MIRRORED))
    ids = b.made("ggml_argsort_top_k", probs, used)
    rows = b.made("ggml_reshape_3d", x, x.ne[0], 1, tokens)
    unit = 32 if n % 32 == 0 and b.choose(2) else 1
    place = b.cut(1, n, unit) if b.choose(8) else b.cut(2, e)
    up = b.made("ggml_mul_mat_id", b.weight(b.one_of(WEIGHTS), (x.ne[0], n, e), place), rows, ids)
    held = Placed(True, SplitState.split(0, place.split.shares))
    if b.choose(3) == 0 and place.split.axis == 1:
        up = b.made("ggml_add_id", up, b.weight(F32, (n, e), held), ids)
    h = b.made("ggml_silu", up)
    if place.split.axis != 1:
        held = MIRRORED
    types = [
        t
        for t in WEIGHTS
        if not any(s % capi.ggml_blck_size(t) for s in (n, *held.split.ne))
        and n > capi.ggml_blck_size(t)
    ]
    y = b.made("ggml_mul_mat_id", b.weight(b.one_of(types), (n, x.ne[0], e), held), h, ids)
    kind = b.choose(4)
    if kind == 0:
        y = b.made("ggml_cont", y)
    elif kind == 1:
        partial = Placed(True, SplitState.partial())
        bias = b.weight(F32, (x.ne[0], e), b.one_of((partial, partial, MIRRORED)))
        y = b.made("ggml_add_id", y, bias, ids)
    scores = b.made("ggml_reshape_3d", probs, 1, e, tokens)
    y = b.made("ggml_mul", y, b.made("ggml_get_rows", scores, ids))
    views = [b.made("ggml_view_2d", y, y.ne[0], tokens, y.nb[2], i * y.nb[1]) for i in range(used)]
    total = views[0]
    for one in views[1:]:
        total = b.made("ggml_add", total, one)
    return total if used > 1 else b.made("ggml_cont", total)


@part
def embedding(b: PlannedBuilder) -> Drawn:
    n, vocabulary = b.one_of((64, 32, 96)), b.one_of((5, 16))
    place = b.one_of((MIRRORED, b.cut(0, n, 32), b.cut(0, n, 32), b.cut(1, vocabulary)))
    kinds = [t for t in WEIGHTS if n > capi.ggml_blck_size(t)]
    table = b.weight(b.one_of(kinds), (n, vocabulary), place)
    return b.made("ggml_get_rows", table, b.leaf(I32, (b.one_of((3, 1, 5)),), vocabulary))


@part
def norm(b: PlannedBuilder) -> Drawn:
    x = _hidden(b)
    y = b.made(b.one_of(("ggml_rms_norm", "ggml_norm")), x, 1e-5)
    return b.made("ggml_mul", y, b.weight(F32, (x.ne[0],), b.one_of((INPUT, MIRRORED))))


@part
def column(b: PlannedBuilder) -> Drawn:
    """A column-parallel product whose result is used as it is."""
    x = _hidden(b)
    n = b.one_of((32, 64, 12, 6))
    place = b.cut(1, n) if b.choose(3) else b.cut_in_segments(1, (n // 2, n - n // 2))
    return _column(b, x, n, place)


@part
def row(b: PlannedBuilder) -> Drawn:
    """A row-parallel product of static operands."""
    n, place = 64, b.cut(0, 64, b.one_of((32, 1, 8)))
    x = b.weight(F32, (n, b.one_of((3, 1))), place)
    return _after(b, x, _row(b, x, b.one_of((64, 32, 5))))


@part
def cache(b: PlannedBuilder) -> Drawn:
    """Rows written into a static tensor, or into a result."""
    x, n = _hidden(b), b.one_of((8, 16))
    place = b.cut(0, x.ne[0], 32) if b.choose(2) else MIRRORED
    into = b.weight(b.one_of((F32, F16)), (x.ne[0], n), place)
    if b.choose(2):
        into = b.made("ggml_cont", into)
    ids = b.leaf(capi.GGML_TYPE_I64, (min(x.ne[1], n),), n, True)
    rows = b.weight(F32, (x.ne[0], ids.ne[0]), place)
    return b.made("ggml_set_rows", into, rows, ids)


# ---- operations that other graphs have not


def _im2col_3d(b: Builder) -> Sequence[Any]:
    kernel = b.of((3, 3, 3, 2), (F16,), plain=True)
    return kernel, b.of((8, 4, 4, 2), plain=True), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, F16


def _conv_3d_direct(b: Builder) -> Sequence[Any]:
    kernel = b.of((3, 3, 2, 4), (F16,), plain=True)
    return kernel, b.of((8, 4, 4, 2), plain=True), 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 2


def _im2col_back(b: Builder) -> Sequence[Any]:
    gradient = b.of((18, 6, 4, 1), plain=True)
    return gradient, b.of((3, 3, 2, 4), plain=True), [8, 6, 2, 1], 1, 1, 0, 0, 1, 1, True


def _pool_2d_back(b: Builder) -> Sequence[Any]:
    gradient = b.of((4, 2, 3), plain=True)
    x = b.of((8, 4, 3), plain=True)
    return gradient, x, capi.GGML_OP_POOL_MAX, 2, 2, 2, 2, 0.0, 0.0


def _add_rel_pos(b: Builder) -> Sequence[Any]:
    a = b.of((4, 6, 2), plain=True)
    return a, b.of((2, 3, 2, 2), plain=True), b.of((2, 3, 2, 2), plain=True)


def _delta_net(b: Builder) -> Sequence[Any]:
    size, heads, tokens, seqs = 64, b.one_of((2, 4)), b.one_of((1, 3)), 1
    q, k, v = (b.of((size, heads, tokens, seqs), plain=True) for _ in range(3))
    g, beta = (b.of((1, heads, tokens, seqs), plain=True) for _ in range(2))
    return q, k, v, g, beta, b.of((size, size, heads, seqs), plain=True), 1


def _hc_comb(b: Builder) -> Sequence[Any]:
    mixes = b.of((24, b.one_of((3, 1))), plain=True)
    return mixes, b.of((3,), plain=True), b.of((24,), plain=True), 1e-5, 2


def _hc_pre(b: Builder) -> Sequence[Any]:
    x = b.of((16, 4, 3), plain=True)
    return x, b.of((4, 3), plain=True)


def _hc_post(b: Builder) -> Sequence[Any]:
    x, residual = b.of((16, 3), plain=True), b.of((16, 4, 3), plain=True)
    return x, residual, b.of((4, 3), plain=True), b.of((4, 4, 3), plain=True)


def _roll(b: Builder) -> Sequence[Any]:
    a = b.f32()
    return a, *[b.choose(n) for n in a.ne]


def _rel_pos(b: Builder) -> Sequence[Any]:
    return b.of((8, 5), (F16,), plain=True), 3, 3


def _win_unpart(b: Builder) -> Sequence[Any]:
    return b.of((8, 2, 2, 4), plain=True), 4, 4, 2


def _adamw(b: Builder) -> Sequence[Any]:
    a = b.made("ggml_cont", b.filled())
    m, v = (b.made("ggml_sqr", b.of(a.ne, plain=True)) for _ in range(2))
    return a, b.of(a.ne, plain=True), m, v, b.leaf(F32, (7,))


def _sgd(b: Builder) -> Sequence[Any]:
    a = b.made("ggml_cont", b.filled())
    return a, b.of(a.ne, plain=True), b.leaf(F32, (2,))


MORE: dict[str, Recipe] = {
    f"ggml_{name}": recipe
    for name, recipe in {
        "im2col_3d": _im2col_3d,
        "conv_3d_direct": _conv_3d_direct,
        "im2col_back": _im2col_back,
        "pool_2d_back": _pool_2d_back,
        "add_rel_pos": _add_rel_pos,
        "gated_delta_net": _delta_net,
        "dsv4_hc_comb": _hc_comb,
        "dsv4_hc_pre": _hc_pre,
        "dsv4_hc_post": _hc_post,
        "get_rel_pos": _rel_pos,
        "opt_step_adamw": _adamw,
        "opt_step_sgd": _sgd,
        "win_unpart": _win_unpart,
        "roll": _roll,
    }.items()
    if hasattr(capi, f"ggml_{name}")
}

FUNCTIONS = list({**OPERATIONS, **MORE})
__all__ = ["FUNCTIONS", "PARTS", "Placed", "PlannedBuilder"]
