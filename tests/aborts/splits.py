"""The meta backend: graphs on a device that cuts as it should, and answers that no check has seen.

`split` is how the device of the area "meta backend" cuts, through the package's own checks. Reads
and writes that ggml would abort over are refused there (`test_meta_parts.py`). The area "split
states" has a device whose split function is plain C, which gives whatever `ANSWERS` says: nothing
of the package looks at it. Answers over which ggml reads out of bounds are not there.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _fake_backend import FakeDevice, buffer_type
from _native import address, argument_type, compile_library

from ggml_cffi import capi, ffi
from ggml_cffi.meta import SplitState, split_function

from ._site import META, SPLIT, raw, site

Q4_0 = capi.GGML_TYPE_Q4_0

# ---- meta backend: its device cuts "columns" on axis 1, "rows" on axis 0, "fused" in two segments


@site(META, "ggml_gallocr_alloc_graph", "split_states_equal(src_ss[0], src_ss[1])")
def product_of_unequal_cuts(arena):
    ctx = arena.context()
    hidden = capi.ggml_mul_mat(ctx, arena.weight(8, 8, name="columns"), arena.tensor(8, 2))
    arena.graph(ctx, capi.ggml_mul_mat(ctx, arena.weight(8, 4, name="uneven"), hidden))


@site(META, "ggml_gallocr_alloc_graph", "src_ss[0].axis != GGML_BACKEND_SPLIT_AXIS_0")
def norm_along_the_cut(arena):
    ctx = arena.context()
    arena.graph(ctx, capi.ggml_rms_norm(ctx, arena.weight(8, 4, name="rows"), 1e-6))


@site(META, "ggml_gallocr_alloc_graph", "ret.axis != GGML_BACKEND_SPLIT_AXIS_UNKNOWN")
def sum_of_a_cut_and_a_whole(arena):
    ctx = arena.context()
    arena.graph(ctx, capi.ggml_add(ctx, arena.weight(8, 4, name="rows"), arena.tensor(8, 4)))


@site(META, "ggml_backend_tensor_get", "fatal error")
def read_of_a_partial_product(arena):
    ctx = arena.context()
    x = arena.tensor(8, 2)
    capi.ggml_set_input(x)
    hidden = capi.ggml_mul_mat(ctx, arena.weight(8, 8, name="columns"), x)
    result = capi.ggml_mul_mat(ctx, arena.weight(8, 4, name="rows"), hidden)
    arena.graph(ctx, result)
    capi.ggml_backend_tensor_get(result, bytearray(32), 0)


@site(META, "ggml_backend_meta_n_backends", "ggml_backend_is_meta(meta_backend)")
def children_of_a_plain_backend(arena):
    simple = capi.ggml_backend_meta_simple_backend(arena.backend, 0)
    capi.ggml_backend_meta_n_backends(simple)


def split(info, n_devs):
    """How the meta device of the sites cuts: by the tensor's name."""
    if info.name == "fused":
        return SplitState.segments(0, [[2, 2], [2, 2]])
    if info.name == "fused columns":
        return SplitState.segments(1, [[1, 1], [1, 1]])
    if info.name == "uneven":
        return SplitState.by_ratio(info, 0, [3, 1])
    axis = {"up": 1, "columns": 1, "down": 0, "rows": 0}.get(info.name)
    if axis is None:
        return SplitState.mirrored()
    return SplitState.by_ratio(info, axis, [1] * n_devs)


# ---- answers that nobody checks

SOURCE = """
#include <stdint.h>
#include <string.h>

struct state { int axis; int64_t ne[16*16]; uint32_t nr[16]; uint32_t n_segments; };
struct answers { uintptr_t name_offset, n; const char ** names; const struct state * states; };

struct state split(const char * tensor, const struct answers * answers) {
    for (uintptr_t i = 0; i < answers->n; ++i) {
        if (strcmp(tensor + answers->name_offset, answers->names[i]) == 0) {
            return answers->states[i];
        }
    }
    struct state mirrored = { .axis = 10, .nr = { 1 }, .n_segments = 1 };
    return mirrored;
}
"""


class Answer(SimpleNamespace):
    """A split state as it is handed to ggml, right or wrong, for two devices."""

    def __init__(self, axis: int, ne: Any = (), n_segments: int = 1, nr: Any = (1,)) -> None:
        super().__init__(axis=axis, ne=ne, n_segments=n_segments, nr=nr)

    def write(self, state: Any) -> None:
        state.axis, state.n_segments = self.axis, self.n_segments
        for field in ("ne", "nr"):
            for index, value in enumerate(getattr(self, field)):
                getattr(state, field)[index] = value


MIRRORED, PARTIAL, NONE, UNKNOWN = 10, 11, 98, 99
ANSWERS = {
    "up": Answer(1, [8, 8]),  # of the product that is computed after each site
    "down": Answer(0, [8, 8]),
    "columns": Answer(1, [2, 2]),
    "rows": Answer(0, [4, 4]),
    "no whole blocks": Answer(0, [48, 16]),
    "too few": Answer(1, [1, 2]),
    "no segments": Answer(1, [2, 2], n_segments=0),
    "no repeats": Answer(1, [2, 2], nr=[0]),
    "17 mirrored segments": Answer(MIRRORED, n_segments=17, nr=[1] * 16),
    "negative": Answer(1, [5, -1]),
    "one element": Answer(1, [1, 0]),
    "segments": Answer(1, [1, 1, 1, 1], n_segments=2, nr=[1, 1]),
    "segments of rows": Answer(0, [2, 2, 2, 2], n_segments=2, nr=[1, 1]),
    "segments of matrices": Answer(2, [1, 1, 1, 1], n_segments=2, nr=[1, 1]),
    "mirrored segments": Answer(MIRRORED, n_segments=2, nr=[1, 1]),
    "partial": Answer(PARTIAL),
    "none": Answer(NONE),
    "unknown": Answer(UNKNOWN),
    "axis 3": Answer(3, [2, 2]),
    "axis 5": Answer(5),
    "axis 12": Answer(12),
    "axis -1": Answer(-1),
}
#: Over these ggml reads out of bounds before it looks: they are refused and never get there.
REFUSED = {
    "17 segments on an axis": Answer(1, [1] * 4 + [0] * 30, n_segments=17, nr=[1] * 17),
    "2**32 - 1 segments": Answer(1, [2, 2], n_segments=2**32 - 1),
    "axis 4": Answer(4, [1, 1]),
    "a number for no device": Answer(1, [2]),
    "a number for three devices": Answer(1, [2, 1, 1]),
    "one repeat for two segments": Answer(1, [1, 1, 1, 1], n_segments=2, nr=[1]),
    "2**32 repeats of nothing": Answer(1, [2, 2, 0, 0], n_segments=2, nr=[1, 2**32]),
}
_kept: list[Any] = []  # ggml never forgets a meta device


def unchecked_device(folder: Path, *devices: Any) -> Any:
    """A meta device over two devices, the CPU twice by default, that answers with `ANSWERS`."""
    cpu = capi.ggml_backend_dev_by_name("CPU")
    pointers = ffi.new("struct ggml_backend_device *[]", list(devices) or [cpu, cpu])
    library = compile_library(SOURCE, folder / f"split{len(_kept)}.so")
    names = [ffi.new("char[]", name.encode()) for name in ANSWERS]
    array = ffi.new("char *[]", names)
    states = ffi.new("struct ggml_backend_meta_split_state[]", len(names))
    assert ffi.sizeof(states[0]) == 4 + 4 + 8 * 256 + 4 * 16 + 4 + 4  # as in SOURCE
    for state, answer in zip(states, ANSWERS.values(), strict=True):
        answer.write(state)
    words = [ffi.offsetof("struct ggml_tensor", "name"), len(names)]
    words += [int(ffi.cast("uintptr_t", pointer)) for pointer in (array, states)]
    userdata = ffi.new("uintptr_t[]", words)
    _kept.append((library, names, array, states, userdata, pointers))
    function = ffi.cast(argument_type("ggml_backend_meta_device", 2), address(library, "split"))
    return raw("ggml_backend_meta_device", pointers, 2, function, userdata)


#: What ggml says of split states and of calls on a meta device, in its own order; each row has the
#: places in the pinned release that it leads to.
ROWS = {
    "more than 16 devices": {"ggml-backend-meta.cpp:217"},
    "axis 0, and a number that is no multiple of the block size": {"ggml-backend-meta.cpp:800"},
    "a sum that is not the axis's; no segments or no repeats": {"ggml-backend-meta.cpp:804"},
    "more than 16 segments": {"ggml-backend-meta.cpp:1138"},
    "a negative number, though the sum is right": {"ggml-backend-meta.cpp:1578"},
    "an axis of one element": {"ggml-backend.cpp:333"},
    "an allocation on a device fails": {"ggml-backend-meta.cpp:1522", "ggml-backend-meta.cpp:1578"},
    "a multi buffer on a device": {"ggml-backend-meta.cpp:1156"},
    "a cut tensor with gaps": {"ggml-backend-meta.cpp:1261", "ggml-backend-meta.cpp:1375"},
    "segments of a tensor of too many axes, or on axis 2": {
        "ggml-backend-meta.cpp:1266",
        "ggml-backend-meta.cpp:1271",
        "ggml-backend-meta.cpp:1298",
    },
    "part of a cut tensor": {"ggml-backend-meta.cpp:1330", "ggml-backend-meta.cpp:1331"},
    "part of a segmented tensor": {"ggml-backend-meta.cpp:1274", "ggml-backend-meta.cpp:1301"},
    "asynchronous, of segments": {"ggml-backend-meta.cpp:1691"},
    "a graph with gradients": {"ggml-backend-meta.cpp:1783"},
    "a source in no meta buffer": {"ggml-backend-meta.cpp:463"},
    "GGML_META_DEBUG and segments": {"ggml-backend-meta.cpp:1080"},
    # what is said of the axis itself
    "mirrored segments": {"ggml-backend-meta.cpp:1264"},
    "PARTIAL, read": {"ggml-backend-meta.cpp:1467"},
    "PARTIAL, not F32": {"ggml-backend-meta.cpp:1354"},
    "NONE": {"ggml-backend-meta.cpp:1105"},
    "UNKNOWN": {"ggml-backend-meta.cpp:1137"},
    "axis 3, or what is no axis": {"ggml-backend-meta.cpp:1367"},
}
(
    DEVICES, BLOCKS, SUM, SEGMENTS, NEGATIVE, ONE, MEMORY, MULTI, GAPS, AXES, PART, PART_SEGMENTS,
    ASYNC, GRADIENTS, FOREIGN, DEBUG,
    MIRRORED_SEGMENTS, PARTIAL_READ, PARTIAL_TYPE, NO_WISH, NOT_KNOWN, NO_AXIS,
) = ROWS  # fmt: skip

ALLOCATE = "ggml_backend_alloc_ctx_tensors"
SET, GET = "ggml_backend_tensor_set", "ggml_backend_tensor_get"


def write(tensor, offset=0, size=None):
    data = bytes(capi.ggml_nbytes(tensor) - offset if size is None else size)
    capi.ggml_backend_tensor_set(tensor, data, offset)


def read(tensor):
    capi.ggml_backend_tensor_get(tensor, bytearray(capi.ggml_nbytes(tensor)), 0)


def transposed(arena):
    """A tensor with gaps between its elements, cut as the one that it is a view of."""
    weight = arena.weight(8, 4, name="columns")
    view = capi.ggml_transpose(arena.context(), weight)
    capi.ggml_backend_view_init(view)
    return view


@site(SPLIT, "ggml_backend_meta_device", "n_devs <= GGML_BACKEND_META_MAX_DEVICES", DEVICES)
def seventeen_devices(arena):
    cpu = capi.ggml_backend_dev_by_name("CPU")
    devices = ffi.new("struct ggml_backend_device *[]", [cpu] * 17)
    callback = ffi.cast(argument_type("ggml_backend_meta_device", 2), 8)  # it is not called
    raw("ggml_backend_meta_device", devices, 17, callback, ffi.NULL)


@site(SPLIT, ALLOCATE, "% granularity == 0", BLOCKS)
def cut_inside_a_block(arena):
    arena.weight(64, 4, type=Q4_0, name="no whole blocks")


@site(SPLIT, ALLOCATE, "ne_sum == tensor->ne[ret.axis]", SUM)
def cut_of_less_than_all(arena):
    arena.weight(8, 4, name="too few")


@site(SPLIT, ALLOCATE, "ne_sum == tensor->ne[ret.axis]", SUM)
def cut_in_no_segments(arena):
    arena.weight(8, 4, name="no segments")


@site(SPLIT, ALLOCATE, "ne_sum == tensor->ne[ret.axis]", SUM)
def cut_in_segments_that_stand_nowhere(arena):
    arena.weight(8, 4, name="no repeats")


@site(SPLIT, ALLOCATE, "split_state.n_segments <= 16", SEGMENTS)
def seventeen_segments_of_what_is_not_cut(arena):
    """On an axis ggml would read the numbers behind the last one before it looks."""
    arena.weight(8, 4, name="17 mirrored segments")


@site(SPLIT, ALLOCATE, "meta_buf_ctx->bufs[i]", NEGATIVE)
def negative_share(arena):
    arena.weight(8, 4, name="negative")


@site(SPLIT, SET, "tensor not allocated", ONE)
def cut_of_one_element(arena):
    write(arena.weight(8, 1, name="one element"))


@site(SPLIT, ALLOCATE, "meta_buf_ctx->bufs[i]", MEMORY)
def weight_too_large_for_a_device(arena):
    arena.weight(1 << 50, name="huge")


@site(SPLIT, "ggml_backend_alloc_buffer", "bufs.back() != nullptr", MEMORY)
def buffer_too_large_for_a_device(arena):
    capi.ggml_backend_alloc_buffer(arena.backend, 1 << 60)


@site(SPLIT, "ggml_backend_view_init", "multi buffers are not supported", MULTI)
def two_buffers_on_one_device(arena):
    """What is allocated of a view of tensors that did not fit into one buffer of a device."""
    small = FakeDevice("Small0", buffers=buffer_type(is_host=False, max_size=256))
    cpu = capi.ggml_backend_dev_by_name("CPU")
    device = capi.ggml_backend_meta_device([small.pointer, cpu], split)
    arena.callback(split_function(device).close)
    ctx = arena.context()
    tensors = [arena.tensor(64, ctx=ctx) for _ in range(2)]
    buffers = capi.ggml_backend_dev_buffer_type(device)
    buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buffers)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_backend_view_init(capi.ggml_view_tensor(arena.context(), tensors[0]))


@site(SPLIT, SET, "ggml_is_contiguous(tensor)", GAPS)
def write_of_a_transposed_cut(arena):
    write(transposed(arena))


@site(SPLIT, GET, "ggml_is_contiguous(tensor)", GAPS)
def read_of_a_transposed_cut(arena):
    read(transposed(arena))


@site(SPLIT, SET, "tensor->ne[3] == 1", AXES)
def segments_of_four_axes(arena):
    write(arena.weight(8, 4, 2, 2, name="segments"))


@site(SPLIT, SET, "tensor->ne[2] == 1", AXES)
def segments_of_rows_of_matrices(arena):
    write(arena.weight(8, 4, 2, name="segments of rows"))


@site(SPLIT, SET, "split_state.axis == GGML_BACKEND_SPLIT_AXIS_1", AXES)
def segments_on_axis_2(arena):
    write(arena.weight(8, 4, 4, name="segments of matrices"))


@site(SPLIT, SET, "offset % chunk_size_full == 0", PART)
def write_from_inside_an_unchecked_cut(arena):
    write(arena.weight(8, 4, name="columns"), offset=32)


@site(SPLIT, SET, "size % chunk_size_full == 0", PART)
def write_of_part_of_an_unchecked_cut(arena):
    write(arena.weight(8, 4, name="columns"), size=32)


@site(SPLIT, "ggml_backend_tensor_get", "offset % chunk_size_full == 0")
def read_from_inside_a_cut(arena):
    capi.ggml_backend_tensor_get(arena.weight(8, 4, name="rows"), bytearray(32), 16)


@site(SPLIT, "ggml_backend_tensor_get_async", "split_state.n_segments == 1")
def asynchronous_read_of_segments(arena):
    tensor = arena.weight(8, 4, name="segments of rows")
    capi.ggml_backend_tensor_get_async(arena.backend, tensor, bytearray(128), 0)


@site(SPLIT, SET, "offset % row_stride == 0", PART_SEGMENTS)
def write_from_inside_a_row_of_segments(arena):
    write(arena.weight(8, 4, name="segments of rows"), offset=4)


@site(SPLIT, SET, "offset % row_stride == 0", PART_SEGMENTS)
def write_from_inside_a_matrix_of_segments(arena):
    write(arena.weight(8, 4, 2, name="segments"), offset=32)


@site(SPLIT, "ggml_backend_tensor_set_async", "split_state.n_segments == 1", ASYNC)
def asynchronous_write_of_unchecked_segments(arena):
    tensor = arena.weight(8, 4, name="segments")
    capi.ggml_backend_tensor_set_async(arena.backend, tensor, bytes(128), 0)


@site(SPLIT, "ggml_backend_graph_compute", "cgraph->grads == nullptr", GRADIENTS)
def gradients_on_a_meta_device(arena):
    ctx = arena.context()
    graph = capi.ggml_new_graph_custom(ctx, 64, True)
    capi.ggml_build_forward_expand(graph, capi.ggml_sqr(ctx, arena.weight(8, 4)))
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, arena.backend)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_backend_graph_compute(arena.backend, graph)


@site(SPLIT, "ggml_gallocr_alloc_graph", "ggml_backend_buffer_is_meta(meta_buf)", FOREIGN)
def source_on_another_device(arena):
    ctx, weights = arena.context(), arena.context()
    weight = arena.tensor(8, 4, ctx=weights)
    cpu = capi.ggml_backend_cpu_buffer_type()
    buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(weights, cpu)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    arena.graph(ctx, capi.ggml_sqr(ctx, weight))


@site(SPLIT, "ggml_gallocr_alloc_graph", "split_state.n_segments == 1", DEBUG, alone=True)
def segments_where_ggml_tells_of_them(arena):
    os.environ["GGML_META_DEBUG"] = "1"
    arena.callback(os.environ.pop, "GGML_META_DEBUG")
    ctx = arena.context()
    arena.graph(ctx, capi.ggml_sqr(ctx, arena.weight(8, 4, name="segments of rows")))


@site(SPLIT, SET, "split_state.axis >= 0", MIRRORED_SEGMENTS)
def segments_of_what_is_not_cut(arena):
    write(arena.weight(8, 4, name="mirrored segments"))


@site(SPLIT, GET, "fatal error", PARTIAL_READ)
def read_of_addends(arena):
    tensor = arena.weight(8, 4, name="partial")
    write(tensor)
    read(tensor)


@site(SPLIT, SET, "tensor->type == GGML_TYPE_F32", PARTIAL_TYPE)
def addends_of_half_precision(arena):
    write(arena.weight(8, 4, type=capi.GGML_TYPE_F16, name="partial"))


@site(SPLIT, ALLOCATE, "ret.axis != GGML_BACKEND_SPLIT_AXIS_NONE", NO_WISH)
def no_wish(arena):
    arena.weight(8, 4, name="none")


@site(SPLIT, ALLOCATE, "split_state.axis != GGML_BACKEND_SPLIT_AXIS_UNKNOWN", NOT_KNOWN)
def axis_that_is_not_known(arena):
    arena.weight(8, 4, name="unknown")


@site(SPLIT, SET, "fatal error", NO_AXIS)
def cut_on_axis_3(arena):
    write(arena.weight(8, 4, 2, 4, name="axis 3"))


@site(SPLIT, SET, "fatal error", NO_AXIS)
def cut_on_axis_5(arena):
    write(arena.weight(8, 4, name="axis 5"))


@site(SPLIT, SET, "fatal error", NO_AXIS)
def cut_on_axis_12(arena):
    write(arena.weight(8, 4, name="axis 12"))


@site(SPLIT, SET, "fatal error", NO_AXIS)
def cut_on_an_axis_before_the_first(arena):
    write(arena.weight(8, 4, name="axis -1"))
