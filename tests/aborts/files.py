"""GGUF files and quantisation."""

from __future__ import annotations

import os

import numpy as np
from _compute import F32

from ggml_cffi import capi, ffi

from ._site import GGUF, QUANTS, raw, site

Q4_0 = capi.GGML_TYPE_Q4_0

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


@site(GGUF, "gguf_get_arr_str", "get_type() == GGUF_TYPE_STRING")
def string_of_an_array_of_numbers(arena):
    gguf = arena.gguf()
    capi.gguf_set_arr_data(gguf, "numbers", capi.GGUF_TYPE_UINT8, np.arange(3, dtype=np.uint8))
    raw("gguf_get_arr_str", gguf, 0, 0)


@site(GGUF, "gguf_get_val_data", "get_type() != GGUF_TYPE_STRING")
def bytes_of_a_string(arena):
    gguf = arena.gguf()
    capi.gguf_set_val_str(gguf, "word", "one")
    capi.gguf_get_val_data(gguf, 0)


@site(GGUF, "gguf_set_tensor_data", "tensor not found: nobody")
def data_of_a_tensor_that_is_not_there(arena):
    raw("gguf_set_tensor_data", arena.gguf(), b"nobody", ffi.new("float *"))


@site(GGUF, "gguf_write_to_file", "info.t.data")
def tensor_without_data_in_a_file(arena):
    gguf = arena.gguf()
    capi.gguf_add_tensor(gguf, arena.tensor(4, name="weight"))
    raw("gguf_write_to_file", gguf, os.devnull.encode(), False)


# ---- quantisation: capi looks at all of it but the numbers themselves


def quantize(type, src, n_per_row, start=0):
    """Quantise a row at the raw level."""
    source = ffi.from_buffer("float[]", np.ascontiguousarray(src, np.float32))
    raw("ggml_quantize_chunk", type, source, ffi.new("char[4096]"), start, 1, n_per_row, ffi.NULL)


@site(QUANTS, "ggml_quantize_chunk", "imatrix != NULL")
def quantisation_without_the_weights_that_it_needs(arena):
    quantize(capi.GGML_TYPE_IQ2_XXS, np.ones(256), 256)


@site(QUANTS, "ggml_quantize_chunk", "start % type_traits[type].blck_size == 0")
def quantisation_from_inside_a_block(arena):
    quantize(Q4_0, np.ones(64), 32, start=16)


@site(QUANTS, "ggml_quantize_chunk", "start % n_per_row == 0")
def quantisation_from_inside_a_row(arena):
    quantize(Q4_0, np.ones(128), 64, start=32)


@site(QUANTS, "ggml_quantize_chunk", "result == nrows * row_size")
def quantisation_to_a_type_that_is_only_computed_with(arena):
    quantize(capi.GGML_TYPE_Q8_K, np.ones(256), 256)


def _rows(type, n_per_row):
    """A row that is no whole number of blocks."""
    return lambda arena: quantize(type, np.ones(n_per_row), n_per_row)


# the tables of IQ1 and IQ2 take ggml seconds to make
for _name, _row in (("IQ3_XXS", 32), ("IQ3_S", 32), ("IQ4_XS", 32), ("IQ4_NL", 16)):
    _provoke = _rows(getattr(capi, f"GGML_TYPE_{_name}"), _row)
    _provoke.__name__ = f"part_of_a_block_of_{_name}"
    site(QUANTS, "ggml_quantize_chunk", "n_per_row%QK")(_provoke)


def _strange(type, value):
    """Right arguments, with one number among them that is none, or none that ends."""

    def provoke(arena):
        numbers = np.linspace(-1, 1, 256, dtype=np.float32)
        numbers[7] = value
        capi.ggml_quantize_chunk(type, numbers, bytearray(4096), 0, 1, 256)

    return provoke


for _name, _value, _said in (
    ("IQ3_S", np.nan, "grid_index >= 0"),
    ("IQ3_S", np.inf, "scale >= 0"),
):
    _provoke = _strange(getattr(capi, f"GGML_TYPE_{_name}"), _value)
    _provoke.__name__ = f"{_name}_of_{_value}"
    site(QUANTS, "ggml_quantize_chunk", _said)(_provoke)
