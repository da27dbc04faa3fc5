"""In words: what a function requires of its arguments, by the predicate's name in ggml/*.hpp."""

from __future__ import annotations

import re

WORDS = {
    "aligned_as_said": "the tensors are laid out by the alignment that the metadata say",
    "all_f32": "the kernel reads all its operands as float32",
    "allocated": "all tensors of the graph have memory that the backend reaches",
    "backends_idle": "nothing computes on the backends",
    "buffer_of": "the tensor is in a buffer",
    "are_loaded": "no backend of them has been unloaded",
    "can_copy": "tensors of a meta device are written from host memory, and copied nowhere",
    "can_copy_to": "the tensors of a meta device cannot be copied to another backend",
    "can_differentiate": "ggml has the gradients of all that parameters are part of",
    "can_schedule": "there is memory for the scheduler",
    "can_set": "memory that keeps weights in an order of its own takes them whole, if it has one",
    "can_train": "ggml has the gradients, and what computes them reads them as they lie",
    "can_unload": "the backend is a loadable module of which nothing lives",
    "can_work": "there is memory for the work of the computation",
    "conv_output": "the kernel fits into the image, with padding, strides and dilation",
    "convertible": "ggml converts numbers to float types and float32 to i32, no others",
    "copyable_blocks": "blocks are copied between contiguous tensors, or ones of the same layout",
    "data_in_host_memory": "the data is in host memory",
    "element": "the index is inside the tensor",
    "equal_sequences": "the tokens are as many for each sequence",
    "first_axis_can_move": "blocks of a quantised type lie along the first axis, which stays",
    "fits": "the memory does not reach behind the end of the address space",
    "graph_is_as_planned": "the graph is there still, and as it was when the plan was made",
    "has_backward": "the training has a graph for its optimiser",
    "has_data": "the data of the tensors are at addresses that were set",
    "has_dot_product": "there are products of this type; not of i8, i16, i32, i64, f64, q8_1, q8_K",
    "has_from_float": "ggml can convert to this type",
    "has_to_float": "ggml can convert from this type",
    "idle": "nothing computes on it",
    "in_range": "the index is in range",
    "is_f32": "the type is f32",
    "is_f32_or_f16": "the type is f32 or f16",
    "is_free": "no training uses the scheduler",
    "is_int": "the number has 32 bits",
    "is_plan": "it is a plan of this backend",
    "is_planned_for": "the graph can be given memory",
    "made_in": "the tensor was made in this context",
    "made_without": "it is not made of the result that it is added to",
    "may_allocate": "the training has a graph, and its scheduler",
    "may_change": "the graph is not being computed",
    "may_evaluate": "the training has the graph that was allocated, and its scheduler",
    "may_free": "no graph in its memory is being computed",
    "may_go": "no graph of its tensors is being computed",
    "may_reserve": "no graph in its memory is being computed",
    "may_split": "no training uses the scheduler",
    "may_train": "the training has its scheduler",
    "meta_fills": "a tensor of a meta device is not filled with a byte",
    "meta_gives_first": "a meta device gives all tensors of a context memory, and once",
    "meta_moves_async": "a meta device moves tensors asynchronously as a whole",
    "meta_reads": "of a tensor that is cut, a meta device reads whole slices across the cut",
    "meta_takes_copy": "of a tensor that is cut, a meta device writes whole slices across the cut",
    "meta_writes": "of a tensor that is cut, a meta device writes whole slices across the cut",
    "no_null": "none of them is NULL",
    "not_computing": "nothing computes with it",
    "not_empty": "the tensor has elements",
    "not_quantising": "this thread does not quantise meanwhile",
    "of_this_process": "its threads run in this process",
    "padded": "twice the padding has 32 bits, and the dilated kernel 64",
    "padding": "there is no more padding than a number of 32 bits says",
    "permutable": "extents and strides are numbers of 32 bits",
    "plain_rows": "the rows lie one after the other",
    "pool_output": "the window fits into the image, with padding and strides",
    "prepare": "the graph can be given memory",
    "reordered": "memory that keeps weights in an order of its own is not read, or written in part",
    "reset_or_allocated_for": "the scheduler is reset, or allocated for this very graph",
    "room": "the context has room for it",
    "room_for_graphs": "the context has room for it",
    "rope_dims": "whole pairs of a row are turned, and no more than it has",
    "rope_factors": "there is a factor for each pair of a row that is turned",
    "rope_sections": "the sections are as many as the mode takes",
    "shape": "no extent is negative, rows are whole blocks, and the bytes can be counted",
    "takes_host_pointers": "the device computes in memory that it is given",
    "unused": "nothing uses it any more",
    "view": "the view lies inside the tensor whose memory it is",
    "window": "the region lies inside the tensor, and its rows do not overlap",
    "windows": "the windows are as many as 32 bits can count",
}

_PREDICATE = re.compile(r"^!?(\w+)\(")


def explained(message: str) -> str:
    """What the guard says of a requirement that is not met, with the words for it."""
    expression, colon, arguments = message.partition(": ")
    found = _PREDICATE.match(expression)
    words = WORDS.get(found.group(1)) if found and " && " not in expression else None
    return f"{expression} ({words}){colon}{arguments}" if words else message
