"""How a graph is cut over the devices of a meta device: a model of what ggml does.

It tells the generator which operations can be had of which operands, and names the graphs that
ggml computes wrongly or dies of. docs/limits.md lists them by these names; should one of them be
refused or mended, it goes from `Limit` and from there, and is an exception or a right value like
all others.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from programs import writes

from ggml_cffi import capi


class State(NamedTuple):
    """Cut along an axis, or mirrored (axis None); `partial`: a sum that has not been made yet."""

    axis: int | None
    shares: tuple[int, ...] = ()  # how many elements along the axis each device gets
    partial: bool = False


MIRRORED = State(None)
PARTIAL = State(None, (), True)


class Refused(Exception):
    """ggml would abort over it."""


class Limit(enum.Enum):
    """The graphs of docs/limits.md that a meta device computes wrongly."""

    SUM_PUT_OFF = "a sum over the devices that ggml puts off"
    EMPTY_SHARE = "an empty share of a row-parallel product"
    NARROWED = "a view that narrows what is cut"
    GATE_AND_UP = "gate and up that are cut as one"
    JOINED = "a reshape that joins the cut axis with others"
    ACROSS = "a reshape across the cut"
    SOFT_MAX = "soft_max along the cut"
    REPEAT = "repeat along the cut"
    ROPE = "rope along the cut"
    POSITIONS = "rope along the positions"
    GROUP_NORM = "group_norm of a group that is cut"
    CONCAT = "concat of what is mirrored and what is cut"
    ADD_ID = "add_id of rows to choose from that are cut"
    ADD_ID_TO = "add_id to rows that are cut"
    MASK = "flash_attn_ext with a mask that is cut"
    HELD_DIFFERENTLY = "rows held in different ways"
    BLOCKS = "blocks that the cut goes through"
    WRITTEN = "writing in place into a static tensor"


class KnownFault(Exception):
    """ggml would compute it wrongly or die of it."""


def _op(*names: str) -> tuple[int, ...]:
    return tuple(int(getattr(capi, f"GGML_OP_{n}")) for n in names if hasattr(capi, f"GGML_OP_{n}"))


_ALIKE = _op(
    "SQR", "SQRT", "LOG", "SIN", "COS", "SCALE", "CLAMP", "LEAKY_RELU", "FILL", "UNARY", "GLU",
    "SOFT_MAX", "SOFT_MAX_BACK", "REPEAT", "REPEAT_BACK", "SILU_BACK",
)  # fmt: skip
_BY_ROW = _op(
    "NORM", "RMS_NORM", "RMS_NORM_BACK", "L2_NORM", "GROUP_NORM", "SUM_ROWS", "MEAN", "CUMSUM",
    "ARGMAX", "COUNT_EQUAL", "ARGSORT", "TOP_K", "CROSS_ENTROPY_LOSS", "CROSS_ENTROPY_LOSS_BACK",
)  # fmt: skip
_BROADCAST = _op("ADD", "SUB", "MUL", "DIV", "ADD_ID")
_PRODUCTS = _op("MUL_MAT", "MUL_MAT_ID")


def _together(states: list[State]) -> State:
    """All operands are held alike."""
    first = states[0]
    if any(s != first for s in states):
        raise Refused("operands are held in different ways")
    return first


def _all_here(states: list[State]) -> State:
    if any(s.axis is not None for s in states):
        raise Refused("an operand is cut")
    return MIRRORED


def _reshaped(node: Any, source: Any, state: State) -> State:
    if state.axis is None:
        return MIRRORED
    if state.axis == capi.ggml_n_dims(source) - 1:
        axis = capi.ggml_n_dims(node) - 1
        before, after = source.ne[state.axis], node.ne[axis]
    else:
        inner = 1
        for i in range(state.axis + 1):
            inner *= source.ne[i]
        product = 1
        for axis in range(4):
            product *= node.ne[axis]
            if product % inner == 0:
                break
            if product > inner:
                raise KnownFault(Limit.ACROSS.value)
        else:
            raise Refused("shape mismatch")
        if product != inner:
            raise KnownFault(Limit.JOINED.value)
        before, after = source.ne[state.axis], node.ne[axis]
    shares = [n * after for n in state.shares]
    if any(n % before for n in shares):
        raise Refused("a share that does not divide")
    return State(axis, tuple(n // before for n in shares))


def result(node: Any, sources: list[tuple[Any, State]]) -> State:
    """The state of a node; raises Refused. A partial sum has been added up for all that use it."""
    op = int(node.op)
    tensors = [t for t, _ in sources]
    states = [MIRRORED if s.partial else s for _, s in sources]
    if op == capi.GGML_OP_NONE or capi.ggml_is_empty(node):
        return MIRRORED
    if not states or op in _op("LIGHTNING_INDEXER"):
        raise Refused("there is no rule")
    if any(capi.ggml_is_empty(t) for t in tensors):
        raise Refused("an operand is empty")
    first, second = states[0], states[1] if len(states) > 1 else MIRRORED
    if op in _PRODUCTS:
        if first.axis is None and second.axis is None:
            return MIRRORED
        if first.axis == 1 and second.axis is None:
            return State(0, first.shares)
        if first.axis is None and second.axis == 1:
            return second
        if first.axis == 0 and second == first:
            return PARTIAL
        raise Refused("a product")
    if op in _BROADCAST:
        if len(states) > 2 and states[2].axis is not None:
            raise Refused("indices are cut")
        if first.axis is not None and second.axis is None and tensors[1].ne[first.axis] == 1:
            return first
        return _together(states[:2])
    if op in _ALIKE:
        return _together(states)
    if op in _BY_ROW:
        if first.axis == 0:
            raise Refused("rows are cut")
        if any(s != first for s in states):  # which ggml does not look at: a kernel aborts
            raise KnownFault(Limit.HELD_DIFFERENTLY.value)
        return first
    if op in _op("RESHAPE", "CONT", "CPY"):
        return _reshaped(node, tensors[0], first)
    if op in _op("VIEW"):
        if first.axis is None:
            return MIRRORED
        if tuple(node.nb) == tuple(tensors[0].nb):
            return first
        raise Refused("a view of what is cut")
    if op in _op("PERMUTE", "TRANSPOSE"):
        if first.axis is None:
            return MIRRORED
        if op in _op("PERMUTE"):
            return State(int(node.op_params[first.axis]), first.shares)
        return State(first.axis ^ 1 if first.axis < 2 else first.axis, first.shares)
    if op in _op("GET_ROWS"):
        return first if first.axis == 0 and second.axis is None else _all_here(states)
    if op in _op("ROPE"):
        if second.axis is not None:
            raise Refused("positions are cut")
        return first if all(s.axis is None for s in states[2:]) else _all_here(states)
    if op in _op("PAD"):
        if first.axis is not None and any(node.op_params[2 * first.axis : 2 * first.axis + 2]):
            raise Refused("padding along the cut")
        return first
    if op in _op("CONCAT"):
        axis = int(node.op_params[0])
        if first.axis is None and second.axis is None:
            return MIRRORED
        if axis in (first.axis, second.axis):
            raise Refused("along the cut")
        if first.axis is None or second.axis is None:
            return second if first.axis is None else first
        return _together(states)
    if op in _op("FLASH_ATTN_EXT"):
        if any(s.axis != 2 for s in states[:3]) or states[0].axis is None:
            raise Refused("attention is for heads that are cut")
        return State(1, first.shares)
    return _all_here(states)


def known_fault(node: Any, sources: list[tuple[Any, State]], state: State) -> Limit | None:
    """Why ggml would compute a node wrongly or die of it."""
    op = int(node.op)
    states = [MIRRORED if s.partial else s for _, s in sources]
    cut = [s for s in states if s.axis is not None]
    if writes(node):
        return Limit.WRITTEN
    if cut and op in _op("VIEW") and tuple(node.ne) != tuple(sources[0][0].ne):
        return Limit.NARROWED
    if op in _op("GLU") and len(states) == 1 and states[0].axis == 0:
        return Limit.GATE_AND_UP
    if op in _op("SOFT_MAX", "SOFT_MAX_BACK") and states[0].axis == 0:
        return Limit.SOFT_MAX
    if op in _op("REPEAT", "REPEAT_BACK") and cut:
        return Limit.REPEAT
    if op in _op("ROPE") and states[0].axis == 0:
        return Limit.ROPE
    if op in _op("ROPE") and states[0].axis == 2:
        return Limit.POSITIONS
    if op in _op("ADD_ID") and states[1].axis == 1:
        return Limit.ADD_ID
    if op in _op("ADD_ID") and states[0].axis in (1, 2):
        return Limit.ADD_ID_TO
    if op in _op("FLASH_ATTN_EXT") and any(
        s == node.src[3] and t.axis is not None for s, t in sources
    ):
        return Limit.MASK
    if op in _op("GROUP_NORM") and cut:
        return Limit.GROUP_NORM
    if op in _op("CONCAT") and len(cut) == 1:
        return Limit.CONCAT
    if state.axis == 0 and any(n % capi.ggml_blck_size(node.type) for n in state.shares):
        return Limit.BLOCKS
    if state.partial and 0 in states[0].shares:
        return Limit.EMPTY_SHARE
    return None
