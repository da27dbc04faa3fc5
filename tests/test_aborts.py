"""Where ggml would end the process, a call raises AbortError, and all goes on working.

`SITES` holds one small function for each assertion of ggml; which line each is on is up to the ggml
that runs, so nothing here names one.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from _compute import F32, Arena, check_product

from ggml_cffi import capi, ffi
from ggml_cffi.errors import AbortError, GGMLError
from ggml_cffi.meta import MetaDevice, SplitState

I32 = capi.GGML_TYPE_I32
Q4_0 = capi.GGML_TYPE_Q4_0

GRAPH = "graph building"
VIEW = "views"
ALLOC = "allocation"
ACCESS = "reads and writes"
GGUF = "gguf"
META = "meta backend"
AREAS = (GRAPH, VIEW, ALLOC, ACCESS, GGUF, META)


class Site(NamedTuple):
    """An assertion of ggml: who leads to it, and what its message says."""

    name: str
    area: str
    function: str
    fragment: str
    provoke: Callable[[Arena], object]


SITES: list[Site] = []


def site(area: str, function: str, fragment: str) -> Callable[..., Any]:
    """The function below makes `function` abort; the message has `fragment` in it."""

    def add(provoke: Callable[[Arena], object]) -> Callable[[Arena], object]:
        name = provoke.__name__.strip("_").replace("_", " ")
        SITES.append(Site(name, area, function, fragment, provoke))
        return provoke

    return add


# ---- graph building


@site(GRAPH, "ggml_mul_mat", "ggml_can_mul_mat(a, b)")
def product_of_matrices_that_do_not_fit(arena):
    ctx = arena.context()
    capi.ggml_mul_mat(ctx, arena.tensor(4, 3), arena.tensor(5, 3))


@site(GRAPH, "ggml_mul_mat", "!ggml_is_transposed(a)")
def product_with_a_transposed_matrix(arena):
    ctx = arena.context()
    turned = capi.ggml_transpose(ctx, arena.tensor(3, 4))
    capi.ggml_mul_mat(ctx, turned, arena.tensor(4, 3))


@site(GRAPH, "ggml_add", "ggml_can_repeat(b, a)")
def sum_of_other_shapes(arena):
    capi.ggml_add(arena.context(), arena.tensor(4, 3), arena.tensor(3, 3))


@site(GRAPH, "ggml_concat", "dim >= 0 && dim < GGML_MAX_DIMS")
def concatenation_along_a_fifth_axis(arena):
    capi.ggml_concat(arena.context(), arena.tensor(4), arena.tensor(4), 4)


@site(GRAPH, "ggml_concat", "a->type == b->type")
def concatenation_of_two_types(arena):
    capi.ggml_concat(arena.context(), arena.tensor(4), arena.tensor(4, type=I32), 0)


@site(GRAPH, "ggml_get_rows", "b->type == GGML_TYPE_I32")
def rows_by_floats(arena):
    capi.ggml_get_rows(arena.context(), arena.tensor(4, 3), arena.tensor(2))


@site(GRAPH, "ggml_soft_max_ext", "mask->ne[0] == a->ne[0]")
def soft_max_with_a_narrow_mask(arena):
    capi.ggml_soft_max_ext(arena.context(), arena.tensor(8, 2), arena.tensor(4, 2), 1.0, 0.0)


@site(GRAPH, "ggml_rope", "a->ne[2] == b->ne[0]")
def rope_with_too_few_positions(arena):
    positions = arena.tensor(2, type=I32)
    capi.ggml_rope(arena.context(), arena.tensor(8, 2, 3), positions, 8, 0)


@site(GRAPH, "ggml_mul_mat_set_prec", "a->op == GGML_OP_MUL_MAT")
def precision_of_no_product(arena):
    capi.ggml_mul_mat_set_prec(arena.tensor(4), capi.GGML_PREC_F32)


@site(GRAPH, "ggml_upscale", "scale_factor > 1")
def upscale_by_one(arena):
    capi.ggml_upscale(arena.context(), arena.tensor(4, 4), 1, capi.GGML_SCALE_MODE_NEAREST)


@site(GRAPH, "ggml_build_forward_expand", "cgraph->n_nodes < cgraph->size")
def more_nodes_than_a_graph_holds(arena):
    ctx = arena.context()
    graph = capi.ggml_new_graph_custom(ctx, 4, False)
    node = arena.tensor(4)
    for _ in range(6):
        node = capi.ggml_sqr(ctx, node)
    capi.ggml_build_forward_expand(graph, node)


@site(GRAPH, "ggml_graph_node", "i < cgraph->n_nodes")
def node_that_is_not_there(arena):
    capi.ggml_graph_node(capi.ggml_new_graph(arena.context()), 3)


# ---- views


@site(VIEW, "ggml_reshape_2d", "ggml_nelements(a) == ne0*ne1")
def reshape_to_another_number(arena):
    capi.ggml_reshape_2d(arena.context(), arena.tensor(12), 5, 3)


@site(VIEW, "ggml_reshape_1d", "ggml_is_contiguous(a)")
def reshape_of_a_transposed_matrix(arena):
    ctx = arena.context()
    capi.ggml_reshape_1d(ctx, capi.ggml_transpose(ctx, arena.tensor(4, 3)), 12)


@site(VIEW, "ggml_permute", "axis3 >= 0 && axis3 < GGML_MAX_DIMS")
def permutation_with_a_fifth_axis(arena):
    capi.ggml_permute(arena.context(), arena.tensor(4, 3), 0, 1, 2, 4)


@site(VIEW, "ggml_permute", "axis0 != axis1")
def permutation_with_an_axis_twice(arena):
    capi.ggml_permute(arena.context(), arena.tensor(4, 3), 1, 1, 2, 3)


@site(VIEW, "ggml_cpy", "ggml_nelements(a) == ggml_nelements(b)")
def copy_of_another_number(arena):
    capi.ggml_cpy(arena.context(), arena.tensor(4), arena.tensor(5))


@site(VIEW, "ggml_cont_2d", "ggml_nelements(a) == (ne0*ne1*ne2*ne3)")
def contiguous_copy_of_another_number(arena):
    capi.ggml_cont_2d(arena.context(), arena.tensor(12), 5, 3)


@site(VIEW, "ggml_backend_view_init", "tensor->view_src != NULL")
def view_init_of_no_view(arena):
    capi.ggml_backend_view_init(arena.tensor(4))


@site(VIEW, "ggml_backend_view_init", "tensor->view_src->buffer != NULL")
def view_init_before_its_source(arena):
    capi.ggml_backend_view_init(capi.ggml_view_tensor(arena.context(), arena.tensor(4)))


# ---- allocation


@site(ALLOC, "ggml_new_tensor_1d", "obj_new")
def context_that_is_full(arena):
    ctx = arena.context(1024)
    for _ in range(9):
        capi.ggml_new_tensor_1d(ctx, F32, 4)


@site(ALLOC, "ggml_backend_alloc_ctx_tensors", "ggml_get_no_alloc(ctx) == true")
def buffer_for_a_context_with_memory(arena):
    ctx = arena.context(no_alloc=False)
    arena.tensor(4, ctx=ctx)
    capi.ggml_backend_alloc_ctx_tensors(ctx, arena.backend)


@site(ALLOC, "ggml_tallocr_alloc", "not enough space in the buffer")
def buffer_that_is_full(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_tallocr_alloc(capi.ggml_tallocr_new(buffer), arena.tensor(1024))


@site(ALLOC, "ggml_backend_tensor_alloc", "tensor->buffer == NULL")
def tensor_that_has_its_memory(arena):
    tensor = arena.weight(4)
    capi.ggml_backend_tensor_alloc(tensor.buffer, tensor, tensor.data)


@site(ALLOC, "ggml_backend_tensor_alloc", "ggml_backend_buffer_get_size(buffer)")
def address_behind_the_buffer(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    base = ffi.cast("char *", capi.ggml_backend_buffer_get_base(buffer))
    capi.ggml_backend_tensor_alloc(buffer, arena.tensor(4), base + 4096)


@site(ALLOC, "ggml_backend_tensor_alloc", "addr >= ")
def address_before_the_buffer(arena):
    buffer = capi.ggml_backend_alloc_buffer(arena.backend, 64)
    arena.callback(capi.ggml_backend_buffer_free, buffer)
    capi.ggml_backend_tensor_alloc(buffer, arena.tensor(4), ffi.cast("void *", 64))


@site(ALLOC, "ggml_backend_cpu_buffer_from_ptr", "buffer pointer must be aligned")
def memory_that_is_not_aligned(arena):
    memory = ffi.new("char[4096]")
    aligned = memory + (-int(ffi.cast("uintptr_t", memory)) % 64)
    capi.ggml_backend_cpu_buffer_from_ptr(aligned + 1, 1024)


@site(ALLOC, "ggml_backend_multi_buffer_set_usage", "ggml_backend_buffer_is_multi_buffer(buffer)")
def usage_of_the_parts_of_a_plain_buffer(arena):
    buffer = arena.weight(4).buffer
    capi.ggml_backend_multi_buffer_set_usage(buffer, capi.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)


# ---- reads and writes


@site(ACCESS, "ggml_backend_tensor_set", "tensor write out of bounds")
def write_behind_the_end(arena):
    capi.ggml_backend_tensor_set(arena.weight(4), bytes(16), 4)


@site(ACCESS, "ggml_backend_tensor_get", "tensor read out of bounds")
def read_behind_the_end(arena):
    capi.ggml_backend_tensor_get(arena.weight(4), bytearray(17), 0)


@site(ACCESS, "ggml_backend_tensor_memset", "tensor write out of bounds")
def fill_behind_the_end(arena):
    capi.ggml_backend_tensor_memset(arena.weight(4), 0, 12, 8)


@site(ACCESS, "ggml_backend_tensor_set_async", "tensor write out of bounds")
def asynchronous_write_behind_the_end(arena):
    capi.ggml_backend_tensor_set_async(arena.backend, arena.weight(4), bytes(20), 0)


@site(ACCESS, "ggml_backend_tensor_get_async", "tensor read out of bounds")
def asynchronous_read_behind_the_end(arena):
    capi.ggml_backend_tensor_get_async(arena.backend, arena.weight(4), bytearray(20), 0)


@site(ACCESS, "ggml_backend_tensor_set", "tensor buffer not set")
def write_without_memory(arena):
    capi.ggml_backend_tensor_set(arena.tensor(4), bytes(16), 0)


@site(ACCESS, "ggml_backend_tensor_get", "tensor buffer not set")
def read_without_memory(arena):
    capi.ggml_backend_tensor_get(arena.tensor(4), bytearray(16), 0)


@site(ACCESS, "ggml_backend_tensor_copy", "cannot copy tensors with different layouts")
def copy_to_another_layout(arena):
    capi.ggml_backend_tensor_copy(arena.weight(4), arena.weight(5))


@site(ACCESS, "ggml_get_f32_1d", "fatal error")
def element_of_a_quantized_tensor(arena):
    capi.ggml_get_f32_1d(arena.weight(32, type=Q4_0), 0)


# ---- gguf


@site(GGUF, "gguf_get_key", "key_id >= 0 && key_id < gguf_get_n_kv(ctx)")
def key_that_is_not_there(arena):
    capi.gguf_get_key(arena.gguf(), 0)


@site(GGUF, "gguf_get_val_u32", "type_to_gguf_type<T>::value == type")
def value_of_another_type(arena):
    gguf = arena.gguf()
    capi.gguf_set_val_f32(gguf, "number", 1.5)
    capi.gguf_get_val_u32(gguf, 0)


@site(GGUF, "gguf_get_val_str", "get_ne() == 1")
def one_value_of_an_array(arena):
    gguf = arena.gguf()
    capi.gguf_set_arr_str(gguf, "words", ["one", "two"])
    capi.gguf_get_val_str(gguf, 0)


@site(GGUF, "gguf_get_arr_type", "is_array")
def array_type_of_a_number(arena):
    gguf = arena.gguf()
    capi.gguf_set_val_u32(gguf, "number", 1)
    capi.gguf_get_arr_type(gguf, 0)


@site(GGUF, "gguf_get_arr_data", "get_type() != GGUF_TYPE_STRING")
def data_of_strings(arena):
    gguf = arena.gguf()
    capi.gguf_set_arr_str(gguf, "words", ["one", "two"])
    capi.gguf_get_arr_data(gguf, 0)


@site(GGUF, "gguf_set_val_u32", "must be power of 2")
def alignment_of_three(arena):
    capi.gguf_set_val_u32(arena.gguf(), "general.alignment", 3)


@site(GGUF, "gguf_set_val_str", "must be type u32")
def alignment_in_words(arena):
    capi.gguf_set_val_str(arena.gguf(), "general.alignment", "wide")


@site(GGUF, "gguf_set_val_u32", "!key.empty()")
def key_without_a_name(arena):
    capi.gguf_set_val_u32(arena.gguf(), "", 1)


@site(GGUF, "gguf_get_tensor_name", "tensor_id >= 0")
def tensor_number_that_is_not_there(arena):
    capi.gguf_get_tensor_name(arena.gguf(), 2)


@site(GGUF, "gguf_add_tensor", "duplicate tensor name: weight")
def tensor_name_twice(arena):
    gguf, tensor = arena.gguf(), arena.tensor(4, name="weight")
    capi.gguf_add_tensor(gguf, tensor)
    capi.gguf_add_tensor(gguf, tensor)


@site(GGUF, "gguf_set_tensor_type", "tensor not found: nobody")
def tensor_name_that_is_not_there(arena):
    capi.gguf_set_tensor_type(arena.gguf(), "nobody", F32)


@site(GGUF, "gguf_set_tensor_type", "not divisible by block size of new type")
def rows_that_are_no_whole_blocks(arena):
    gguf = arena.gguf()
    capi.gguf_add_tensor(gguf, arena.tensor(4, name="weight"))
    capi.gguf_set_tensor_type(gguf, "weight", Q4_0)


# ---- meta backend: its device cuts "columns" on axis 1, "rows" on axis 0, "fused" in two segments


@site(META, "ggml_backend_tensor_set", "offset % chunk_size_full == 0")
def write_from_inside_a_cut(arena):
    capi.ggml_backend_tensor_set(arena.weight(8, 4, name="columns"), bytes(32), 32)


@site(META, "ggml_backend_tensor_set", "size % chunk_size_full == 0")
def write_of_part_of_a_cut(arena):
    capi.ggml_backend_tensor_set(arena.weight(8, 4, name="columns"), bytes(32), 0)


@site(META, "ggml_backend_tensor_get", "offset % chunk_size_full == 0")
def read_from_inside_a_cut(arena):
    capi.ggml_backend_tensor_get(arena.weight(8, 4, name="rows"), bytearray(32), 16)


@site(META, "ggml_backend_tensor_set", "offset % row_stride == 0")
def write_from_inside_a_segmented_row(arena):
    capi.ggml_backend_tensor_set(arena.weight(8, 4, name="fused"), bytes(32), 4)


@site(META, "ggml_backend_tensor_set_async", "offset == 0")
def asynchronous_write_from_an_offset(arena):
    tensor = arena.weight(8, 4, name="rows")
    capi.ggml_backend_tensor_set_async(arena.backend, tensor, bytes(32), 32)


@site(META, "ggml_backend_tensor_get_async", "split_state.n_segments == 1")
def asynchronous_read_of_segments(arena):
    tensor = arena.weight(8, 4, name="fused")
    capi.ggml_backend_tensor_get_async(arena.backend, tensor, bytearray(128), 0)


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


# ---- the tests


def split(info, n_devs):
    """How the meta device of the sites cuts: by the tensor's name."""
    if info.name == "fused":
        return SplitState.segments(0, [[2, 2], [2, 2]])
    if info.name == "uneven":
        return SplitState.by_ratio(info, 0, [3, 1])
    axis = {"up": 1, "columns": 1, "down": 0, "rows": 0}.get(info.name)
    if axis is None:
        return SplitState.mirrored()
    return SplitState.by_ratio(info, axis, [1] * n_devs)


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[bool, Any]]:
    """One CPU backend and one meta backend for all of the sites: they have to last."""
    cpu = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(cpu, 2)
    device = MetaDevice(["CPU", "CPU"], split, on_error="raise")
    meta = capi.ggml_backend_dev_init(device.handle)
    for index in range(2):
        capi.ggml_backend_cpu_set_n_threads(capi.ggml_backend_meta_simple_backend(meta, index), 1)
    yield {False: cpu, True: meta}
    capi.ggml_backend_free(meta)
    capi.ggml_backend_free(cpu)


def abort(one: Site, backend: Any) -> AbortError:
    """Let a site abort; the error, and what the site had made is freed."""
    with Arena(backend) as arena, pytest.raises(AbortError) as caught:
        one.provoke(arena)
    return caught.value


@pytest.mark.parametrize("one", SITES, ids=lambda one: f"{one.area}: {one.name}")
def test_an_abort_raises_and_the_backend_goes_on(one: Site, backends: dict[bool, Any]) -> None:
    backend = backends[one.area == META]
    error = abort(one, backend)
    assert one.fragment in error.message
    assert error.message in str(error)
    assert error.file is not None and error.file.endswith((".c", ".cpp", ".h"))
    assert error.line is not None and error.line > 0
    assert error.message.startswith(f"{error.file}:{error.line}: ")
    assert error.function == one.function
    check_product(backend, len(one.name))


def test_at_least_25_sites_in_all_six_areas(
    backends: dict[bool, Any],
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    found: dict[tuple[str, int], Site] = {}
    for one in SITES:
        error = abort(one, backends[one.area == META])
        assert error.file is not None and error.line is not None
        found.setdefault((os.path.basename(error.file), error.line), one)
    for backend in backends.values():
        check_product(backend)
    lines = [f"{f}:{n}  {one.area}: {one.fragment}" for (f, n), one in sorted(found.items())]
    record_property("assertion sites", "; ".join(lines))
    with capsys.disabled():
        print(f"\n{len(found)} assertion sites:", *lines, sep="\n  ")
    assert len(found) >= 25
    for area in AREAS:
        assert sum(one.area == area for one in found.values()) >= 4, area


def test_one_site_many_times(backends: dict[bool, Any]) -> None:
    with Arena(backends[False]) as arena:
        ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
        used = capi.ggml_used_mem(ctx)
        messages = set()
        for _ in range(2000):
            with pytest.raises(AbortError) as caught:
                capi.ggml_mul_mat(ctx, a, b)
            messages.add(str(caught.value))
        assert len(messages) == 1
        assert capi.ggml_used_mem(ctx) == used


def test_the_error_is_consumed_by_the_call_that_set_it(backends: dict[bool, Any]) -> None:
    with Arena(backends[False]) as arena:
        tensor = arena.weight(4)
        with pytest.raises(AbortError):
            capi.ggml_backend_tensor_set(tensor, bytes(20), 0)
        assert capi.ggml_get_name(tensor) == ""
        assert capi.ggml_is_quantized(F32) is False  # a zero that is no error
        capi.ggml_backend_tensor_set(tensor, np.arange(4, dtype=np.float32), 0)
        assert capi.ggml_get_f32_1d(tensor, 0) == 0.0


def test_the_error_survives_pickling(backends: dict[bool, Any]) -> None:
    error = abort(SITES[0], backends[False])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is AbortError
    for field in ("message", "file", "line", "function", "args"):
        assert getattr(again, field) == getattr(error, field)
    assert isinstance(error, GGMLError)


def test_other_threads_go_on_while_one_aborts() -> None:
    """Three threads compute, two abort all the time, each with things of its own."""
    end = time.monotonic() + 1.5
    done = dict.fromkeys(range(5), 0)
    errors: list[BaseException] = []

    def compute(number: int) -> None:
        backend = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(backend, 1)
        try:
            while time.monotonic() < end and not errors:
                check_product(backend, number + done[number])
                done[number] += 1
        finally:
            capi.ggml_backend_free(backend)

    def fail(number: int) -> None:
        backend = capi.ggml_backend_cpu_init()
        sites = [one for one in SITES if one.area != META]
        try:
            while time.monotonic() < end and not errors:
                abort(sites[done[number] % len(sites)], backend)
                done[number] += 1
        finally:
            capi.ggml_backend_free(backend)

    def run(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    works = [compute, compute, compute, fail, fail]
    threads = [threading.Thread(target=run, args=(w, i)) for i, w in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(count >= 5 for count in done.values()), done


def test_an_abort_in_a_callback_can_be_caught_there(backends: dict[bool, Any]) -> None:
    """A call inside a callback has a guard of its own; the call around it goes on."""
    caught: list[AbortError] = []
    with Arena(backends[False]) as arena:
        ctx, other = arena.context(), arena.context()
        wrong = arena.tensor(4, 3), arena.tensor(5, 3)

        def double(dst, a, ith, nth):
            with pytest.raises(AbortError) as error:
                capi.ggml_mul_mat(other, *wrong)
            caught.append(error.value)
            for i in range(4):
                capi.ggml_set_f32_1d(dst, i, 2 * capi.ggml_get_f32_1d(a, i))

        x = arena.weight(4)
        capi.ggml_backend_tensor_set(x, np.arange(4, dtype=np.float32), 0)
        result = capi.ggml_map_custom1(ctx, x, double)
        capi.ggml_backend_graph_compute(arena.backend, arena.graph(ctx, result))
        found = np.empty(4, np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
    assert len(caught) == 1 and caught[0].function == "ggml_mul_mat"
    np.testing.assert_array_equal(found, [0, 2, 4, 6])
    check_product(backends[False])


def test_an_abort_in_a_callback_comes_out_of_the_call(backends: dict[bool, Any]) -> None:
    with Arena(backends[False]) as arena:
        ctx, other = arena.context(), arena.context()
        wrong = arena.tensor(4, 3), arena.tensor(5, 3)
        fail = lambda dst, a, ith, nth: capi.ggml_mul_mat(other, *wrong)  # noqa: E731
        graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, arena.weight(4), fail))
        with pytest.raises(AbortError) as caught:
            capi.ggml_backend_graph_compute(arena.backend, graph)
    assert caught.value.function == "ggml_mul_mat"
    check_product(backends[False])


# ---- aborts inside a kernel


#: Rows of a table by the order of more numbers than it has rows: only the kernel can tell.
KERNEL = """
import numpy as np
from ggml_cffi import capi

def compute(threads):
    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, threads)
    ctx = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    numbers = capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 64)
    table = capi.ggml_new_tensor_2d(ctx, capi.GGML_TYPE_F32, 4, 3)
    order = capi.ggml_argsort(ctx, numbers, capi.GGML_SORT_ORDER_ASC)
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, capi.ggml_get_rows(ctx, table, order))
    buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
    capi.ggml_backend_tensor_set(numbers, np.arange(64, dtype=np.float32), 0)
    try:
        capi.ggml_backend_graph_compute(backend, graph)
    finally:
        capi.ggml_backend_buffer_free(buffer)
        capi.ggml_free(ctx)
        capi.ggml_backend_free(backend)
"""


def child(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", KERNEL + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )


def test_an_abort_in_a_kernel_of_several_threads_ends_the_process() -> None:
    result = child("compute(threads=2)\nprint('still here')")
    assert result.returncode == -signal.SIGABRT, result.stderr
    assert result.stdout == ""
    assert re.search(r"^\S+:\d+: GGML_ASSERT\(.*\) failed$", result.stderr, re.M)
    assert "Fatal Python error: Aborted" in result.stderr
    assert "in compute" in result.stderr


def test_an_abort_in_a_kernel_of_one_thread_raises() -> None:
    result = child("""
        from ggml_cffi.errors import AbortError
        for _ in range(3):
            try:
                compute(threads=1)
            except AbortError as error:
                print(error.function, error.line > 0)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ggml_backend_graph_compute True\n" * 3
