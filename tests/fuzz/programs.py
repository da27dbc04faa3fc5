"""Random graphs: programs, and what draws mostly valid operands for the calls in them.

A program is a list of plain records, so that the same graph can be made in several contexts:
``Leaf``s and ``Call``s, whose tensors are given by their places in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ggml_cffi import capi, enums, errors

F32, F16, BF16 = capi.GGML_TYPE_F32, capi.GGML_TYPE_F16, capi.GGML_TYPE_BF16
I32, I64 = capi.GGML_TYPE_I32, capi.GGML_TYPE_I64
FLOATS = (F32, F16, BF16)
HALVES = (F32, F16)
BLOCKS = (
    capi.GGML_TYPE_Q4_0,
    capi.GGML_TYPE_Q8_0,
    capi.GGML_TYPE_Q5_1,
    capi.GGML_TYPE_Q4_K,
    capi.GGML_TYPE_Q6_K,
)
TYPES = tuple(t for t in enums.ggml_type if t != capi.GGML_TYPE_COUNT)

#: What a call may raise; anything else is a fault.
REFUSALS = (
    errors.GGMLError,
    ValueError,
    TypeError,
    OverflowError,
    MemoryError,
    IndexError,
)
#: Steps of an optimiser, which take parameters alone, and write into them.
STEPS = ("ggml_opt_step_adamw", "ggml_opt_step_sgd")
#: Arguments that are seldom right.
INTEGERS = (0, 1, -1, 2, 3, 7, 33, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63), 2**64)
NUMBERS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e38, 1e-45, 1e300)

MAX_ELEMENTS = 8192  # of a tensor that is drawn
MAX_RESULT = 1 << 18  # bytes of one that is computed


class Ref(NamedTuple):
    """The tensor that stands at a place of the program."""

    at: int


class Leaf(NamedTuple):
    """A tensor with data of its own."""

    type: int
    ne: tuple[int, ...]
    limit: int | None  # indices, below this
    distinct: bool  # of which no two in a row are the same


class Call(NamedTuple):
    """A function of capi, but for its context; tensors among the arguments are `Ref`s."""

    function: str
    args: tuple[Any, ...]
    spoiled: bool = False  # one of the arguments has been replaced by whatever came

    def __str__(self) -> str:
        shown = (f"t{a.at}" if isinstance(a, Ref) else repr(a) for a in self.args)
        return f"{self.function}({', '.join(shown)})"


class Drawn:
    """A tensor of a program while it is drawn."""

    def __init__(self, at: int, handle: Any, inner: list[Any], limit: int | None = None) -> None:
        self.at = at
        self.handle = handle
        self.inner = inner  # all tensors that the call has made, this one the last
        self.type = int(handle.type)
        self.ne = tuple(handle.ne)
        self.nb = tuple(handle.nb)
        self.limit = limit  # of the integers in it, where they are known to be below one

    @property
    def elements(self) -> int:
        return capi.ggml_nelements(self.handle)

    @property
    def contiguous(self) -> bool:
        return capi.ggml_is_contiguous(self.handle)

    @property
    def root(self) -> Any:
        return self.handle.view_src or self.handle


#: After so many arguments of an attention come its sinks, if it has any.
SINKS = {"ggml_flash_attn_ext": 7, "ggml_soft_max_ext": 4}


def execute(ctx: Any, record: Leaf | Call, tensors: Sequence[Any]) -> Any:
    """Make a record's tensor, given those of the records before it."""
    if isinstance(record, Leaf):
        return capi.ggml_new_tensor(ctx, record.type, list(record.ne))
    args = [tensors[a.at] if isinstance(a, Ref) else a for a in record.args]
    if record.function in STEPS:
        args[0].flags |= capi.GGML_TENSOR_FLAG_PARAM  # ggml_set_param takes leaves alone
    n = SINKS.get(record.function, len(args))
    made = getattr(capi, record.function)(ctx, *args[:n])
    for sinks in args[n:]:
        add = record.function.removesuffix("_ext" if "soft_max" in record.function else "")
        getattr(capi, f"{add}_add_sinks")(made, sinks)
    return made


def tensors_of(ctx: Any, after: Any = None) -> Iterator[Any]:
    """The tensors of a context, those that a call makes on the way among them."""
    t = capi.ggml_get_next_tensor(ctx, after) if after else capi.ggml_get_first_tensor(ctx)
    while t is not None:
        yield t
        t = capi.ggml_get_next_tensor(ctx, t)


def writes(tensor: Any) -> bool:
    """Whether an operation writes into memory that another tensor has."""
    return bool(tensor.view_src) and tensor.op not in VIEWS


VIEWS = (
    capi.GGML_OP_NONE,
    capi.GGML_OP_RESHAPE,
    capi.GGML_OP_VIEW,
    capi.GGML_OP_PERMUTE,
    capi.GGML_OP_TRANSPOSE,
)


def overlaps_itself(t: Any) -> bool:
    """Whether two elements of a tensor may share memory."""
    end = capi.ggml_type_size(t.type)
    block = capi.ggml_blck_size(t.type)
    axes = [(t.nb[i], t.ne[i] // (block if i == 0 else 1)) for i in range(4) if t.ne[i] > 1]
    for step, count in sorted(axes):
        if step < end:
            return True
        end = step * (count - 1) + end
    return False


def aliased(t: Any) -> bool:
    """An operation reads what it writes: what it computes then depends on the order of its threads.

    C's rules, too, leave what becomes of it to the caller.
    """
    if not writes(t):
        return False
    same = [
        s
        for s in t.src
        if s
        and (s.view_src or s) == t.view_src
        and (s.view_offs, tuple(s.ne), tuple(s.nb)) != (t.view_offs, tuple(t.ne), tuple(t.nb))
    ]
    if t.op in (capi.GGML_OP_CPY, capi.GGML_OP_SET_ROWS):
        # the destination is the last of the sources
        same = [s for s in [s for s in t.src if s][:-1] if (s.view_src or s) == t.view_src]
    elif t.op not in _ELEMENTWISE:
        same += [s for s in list(t.src)[1:] if s and (s.view_src or s) == t.view_src]
    return bool(same)


_ELEMENTWISE = (
    capi.GGML_OP_ADD,
    capi.GGML_OP_SUB,
    capi.GGML_OP_MUL,
    capi.GGML_OP_DIV,
)


#: For each function of capi, what draws its arguments.
Operations = Mapping[str, Callable[["Builder"], Sequence[Any]]]


class Builder:
    """Draws a program from choices, some bytes a node, and the extents that shapes consist of."""

    def __init__(self, ctx: Any, dims: Sequence[int], operations: Operations) -> None:
        self.ctx = ctx
        self.operations = operations
        self.dims = dims
        self.records: list[Leaf | Call] = []
        self.tensors: list[Drawn] = []
        self.counts = {"tried": 0, "accepted": 0, "refused": 0, "too large": 0, "aliased": 0}
        self.refused: list[str] = []
        self._bytes: Iterable[int] = iter(())
        self._last: Any = None

    # ---- choices

    def choose(self, n: int) -> int:
        """One of n, 0 where no choices are left."""
        return next(self._bytes, 0) % max(n, 1)  # type: ignore[call-overload]

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.choose(len(options))]

    def extent(self) -> int:
        return self.one_of(self.dims)

    # ---- tensors

    def shape(self, type: int = F32, rank: int = 4) -> tuple[int, ...]:
        ne = [self.extent() if i < 2 or self.choose(2) else 1 for i in range(rank)]
        return self.fitting(type, ne)

    def fitting(self, type: int, ne: Sequence[int]) -> tuple[int, ...]:
        """A shape with whole blocks and not too many elements."""
        block = capi.ggml_blck_size(type)
        found = [ne[0] if ne[0] % block == 0 else block, *ne[1:], *[1] * (4 - len(ne))]
        elements = 1
        for i, n in enumerate(found):
            if elements * max(n, 1) > MAX_ELEMENTS:
                found[i] = n = 1 if i else block
            elements *= max(n, 1)
        return tuple(found)

    def leaf(
        self, type: int, ne: Sequence[int], limit: int | None = None, distinct: bool = False
    ) -> Drawn:
        record = Leaf(int(type), tuple(ne), limit, distinct)
        return self.keep(record, execute(self.ctx, record, ()), limit)

    def keep(self, record: Leaf | Call, handle: Any, limit: int | None = None) -> Drawn:
        self.records.append(record)
        drawn = Drawn(len(self.tensors), handle, self._new(), limit)
        self.tensors.append(drawn)
        return drawn

    def _new(self) -> list[Any]:
        """The tensors that have been made in the context since the last time."""
        found = list(tensors_of(self.ctx, self._last))
        self._last = found[-1] if found else self._last
        return found

    def made(self, function: str, *args: Any) -> Drawn:
        """A tensor that a valid call makes."""
        refs = tuple(Ref(a.at) if isinstance(a, Drawn) else a for a in args)
        record = Call(function, refs)
        return self.keep(record, execute(self.ctx, record, [t.handle for t in self.tensors]))

    def any(
        self,
        types: Sequence[int] = (F32,),
        where: Callable[[Drawn], bool] = lambda t: True,
        new: Callable[[int], Sequence[int]] | None = None,
    ) -> Drawn:
        """A tensor of one of these types that there is, or a new one."""
        found = [t for t in self.tensors if t.type in types and where(t)]
        if found and self.choose(5):
            return found[-1 - self.choose(min(len(found), 12))]
        type = self.one_of(types)
        return self.leaf(type, new(type) if new else self.shape(type))

    def of(self, ne: Sequence[int], types: Sequence[int] = (F32,), plain: bool = False) -> Drawn:
        """A tensor of this shape, in one of several layouts unless it has to be `plain`."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        found = [
            t
            for t in self.tensors
            if t.ne == ne and t.type in types and (t.contiguous or not plain)
        ]
        if found and self.choose(3):
            return found[-1 - self.choose(min(len(found), 12))]
        type = self.one_of(types)
        layout = 0 if plain else self.choose(8)
        if layout == 6 and capi.ggml_blck_size(type) == 1:
            wide = self.leaf(type, (ne[0] * 2, *ne[1:]))
            return self.made("ggml_view_4d", wide, *ne, *wide.nb[1:], wide.nb[1] // 2)
        if layout == 7:
            return self.made(
                "ggml_permute", self.leaf(type, (ne[0], ne[2], ne[1], ne[3])), 0, 2, 1, 3
            )
        return self.leaf(type, ne)

    def f32(self, where: Callable[[Drawn], bool] = lambda t: True) -> Drawn:
        return self.any((F32,), where)

    def plain(self, types: Sequence[int] = (F32,)) -> Drawn:
        return self.any(types, lambda t: t.contiguous)

    def floats(self) -> Drawn:
        return self.any(FLOATS)

    def filled(self, types: Sequence[int] = (F32,)) -> Drawn:
        """A contiguous tensor that is not empty."""
        return self.any(
            types,
            lambda t: t.contiguous and t.elements > 0,
            lambda type: [max(n, 1) for n in self.shape(type)],
        )

    def vector(self, n: int, types: Sequence[int] = (F32,)) -> Drawn:
        return self.of((n,), types, plain=True)

    def repeated(self, t: Drawn, types: Sequence[int] = (F32,)) -> Drawn:
        """A tensor that can be repeated to the shape of another."""
        axes = self.choose(8)
        ne = tuple(
            n if (i == 0 and not axes & 4) or axes >> i & 1 else 1 for i, n in enumerate(t.ne)
        )
        return self.of(t.ne if axes == 7 else ne, types)

    def ids(
        self, ne: Sequence[int], limit: int, distinct: bool = False, types: Sequence[int] = (I32,)
    ) -> Drawn:
        """Indices below a limit."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        if not distinct:
            found = [
                t
                for t in self.tensors
                if t.ne == ne and t.type in types and t.limit is not None and t.limit <= limit
            ]
            if found and self.choose(3):
                return found[-1]
        return self.leaf(self.one_of(types), ne, limit, distinct)

    # ---- nodes

    def arguments(self, function: str) -> Sequence[Any]:
        return self.operations[function](self)

    def node(self, function: str, choices: bytes) -> Drawn | None:
        """Draw a call of a function; None where it is refused."""
        self._bytes = iter(choices[1:])
        args = list(self.arguments(function))
        spoiled = bool(choices) and choices[0] >= 232
        if spoiled:
            self._spoil(args, choices[0])
        self.counts["tried"] += 1
        refs = tuple(Ref(a.at) if isinstance(a, Drawn) else a for a in args)
        record = Call(function, refs, spoiled)
        try:
            handle = execute(self.ctx, record, [t.handle for t in self.tensors])
        except REFUSALS as error:
            self._new()  # what it has made all the same
            self.counts["refused"] += 1
            self.refused.append(f"{record}: {error}")
            return None
        if capi.ggml_nbytes(handle) > MAX_RESULT:
            self._new()
            self.counts["too large"] += 1
            return None
        if aliased(handle):
            self._new()
            self.counts["aliased"] += 1
            return None
        self.counts["accepted"] += 1
        return self.keep(record, handle, self._limit(function, args))

    def _limit(self, function: str, args: Sequence[Any]) -> int | None:
        if function in ("ggml_argsort", "ggml_argmax", "ggml_top_k", "ggml_argsort_top_k"):
            return int(args[0].ne[0]) if isinstance(args[0], Drawn) else None
        if function.startswith(
            ("ggml_reshape", "ggml_cont", "ggml_dup", "ggml_view", "ggml_permute")
        ):
            return args[0].limit if isinstance(args[0], Drawn) else None
        return None

    def _spoil(self, args: list[Any], how: int) -> None:
        """Replace one argument by one that is seldom right."""
        at = self.choose(len(args)) if args else 0
        old = args[at] if args else None
        if isinstance(old, Drawn):
            if how % 8 == 0:
                args[at] = self.leaf(*(lambda t: (t, self.shape(t)))(self.one_of(TYPES)))
            elif how % 8 == 1:
                args[at] = None
            else:
                args[at] = self.one_of(self.tensors)
        elif isinstance(old, float):
            args[at] = self.one_of(NUMBERS)
        elif isinstance(old, list):
            args[at] = [self.one_of(INTEGERS) for _ in range(self.choose(6))]
        elif old is None:
            args[at] = self.one_of(self.tensors) if self.tensors else None
        else:
            args[at] = self.one_of(INTEGERS)
