"""GGUF files that ggml's own functions write: what would come out unreadable is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from _compute import Arena

from ggml_cffi import AbortError, capi, ffi
from ggml_cffi.enums import ggml_type
from ggml_cffi.gguf import GGUFFile, GGUFWriter


class Native:
    """A GGUF of ggml's with one tensor of F32, "a", of these numbers."""

    def __init__(self, arena: Arena, n: int = 64) -> None:
        self.gguf = arena.gguf()
        ctx = arena.context(1 << 16, no_alloc=False)
        tensor = arena.tensor(n, name="a", ctx=ctx)
        self.numbers = np.arange(n, dtype=np.float32)
        ffi.memmove(tensor.data, self.numbers, self.numbers.nbytes)
        capi.gguf_add_tensor(self.gguf, tensor)


def test_a_tensor_that_gets_a_larger_type_needs_other_data(arena: Arena, tmp_path: Path) -> None:
    """Those that it had are too few: they are not read any more."""
    native, path = Native(arena), tmp_path / "f"
    capi.gguf_set_tensor_type(native.gguf, "a", ggml_type.GGML_TYPE_F64)
    with pytest.raises(AbortError, match=r"info\.t\.data"):
        capi.gguf_write_to_file(native.gguf, path, False)
    short = ffi.new("char[]", 64 * 4)
    with pytest.raises(ValueError, match="data has 256 bytes, fewer than the 512 of the tensor"):
        capi.gguf_set_tensor_data(native.gguf, "a", short)
    doubles = ffi.from_buffer(native.numbers.astype(np.float64))
    capi.gguf_set_tensor_data(native.gguf, "a", doubles)
    capi.gguf_write_to_file(native.gguf, path, False)
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.tensors["a"].numpy(), native.numbers)


def test_a_tensor_that_gets_a_smaller_type_keeps_its_data(arena: Arena, tmp_path: Path) -> None:
    native, path = Native(arena), tmp_path / "f"
    capi.gguf_set_tensor_type(native.gguf, "a", ggml_type.GGML_TYPE_F16)
    capi.gguf_write_to_file(native.gguf, path, False)
    with GGUFFile(path) as file:
        halves = native.numbers.view(np.float16)[:64]
        np.testing.assert_array_equal(file.tensors["a"].numpy(), halves)


def test_an_alignment_that_the_tensors_do_not_have_is_not_written(
    arena: Arena, tmp_path: Path
) -> None:
    """ggml lays them out by 32, whatever the metadata say: nobody could read the file."""
    native, path = Native(arena), tmp_path / "f"
    path.write_bytes(b"before")
    capi.gguf_set_val_u32(native.gguf, "general.alignment", 64)
    said = "general.alignment would be 64, and the tensors are laid out by 32"
    with pytest.raises(ValueError, match=said):
        capi.gguf_write_to_file(native.gguf, path, False)
    with pytest.raises(ValueError, match=said):
        capi.gguf_get_meta_data(native.gguf)
    with open(tmp_path / "g", "wb") as file, pytest.raises(ValueError, match=said):
        capi.gguf_write_to_file_ptr(native.gguf, file, False)
    assert path.read_bytes() == b"before"
    capi.gguf_set_val_u32(native.gguf, "general.alignment", 32)
    capi.gguf_write_to_file(native.gguf, path, False)
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.tensors["a"].numpy(), native.numbers)


def test_a_file_that_was_read_with_an_alignment_keeps_it(arena: Arena, tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "f", alignment=128) as writer:
        writer.add_tensor("a", np.ones(5, np.float32))
        writer.add_tensor("b", np.ones(7, np.float32))
    address = ffi.new("struct ggml_context **")
    gguf = capi.gguf_init_from_file(tmp_path / "f", no_alloc=False, ctx=address)
    capi.gguf_write_to_file(gguf, tmp_path / "again", True)
    start = capi.gguf_get_data_offset(gguf)
    other = arena.gguf()
    capi.gguf_set_kv(other, gguf)
    with pytest.raises(ValueError, match="would be 128, and the tensors are laid out by 32"):
        capi.gguf_write_to_file(other, tmp_path / "other", True)
    capi.gguf_remove_key(gguf, "general.alignment")
    with pytest.raises(ValueError, match="would be 32, and the tensors are laid out by 128"):
        capi.gguf_write_to_file(gguf, tmp_path / "other", True)
    capi.gguf_free(gguf)
    capi.ggml_free(address[0])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "f").read_bytes()[:start]


def test_data_of_a_file_that_was_read_are_not_written(arena: Arena, tmp_path: Path) -> None:
    """ggml has no addresses of them, and would take what lies in the memory for some."""
    with GGUFWriter(tmp_path / "f") as writer:
        writer.add_tensor("a", np.ones(64, np.float32))
    gguf = capi.gguf_init_from_file(tmp_path / "f", no_alloc=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="it was read, and has no addresses"):
            capi.gguf_write_to_file(gguf, tmp_path / "g", False)
        numbers = ffi.from_buffer(np.ones(64, np.float32))
        capi.gguf_set_tensor_data(gguf, "a", numbers)  # not enough: it may be taken for a device's
    with open(tmp_path / "g", "wb") as file, pytest.raises(ValueError, match="it was read"):
        capi.gguf_write_to_file_ptr(gguf, file, False)
    capi.gguf_free(gguf)
    native = Native(arena)
    capi.gguf_write_to_file(native.gguf, tmp_path / "g", False)
    assert (tmp_path / "g").stat().st_size > 256


def test_a_file_is_closed_when_its_writing_aborts(arena: Arena, tmp_path: Path) -> None:
    gguf = arena.gguf()
    capi.gguf_add_tensor(gguf, arena.tensor(4, name="bare"))
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(AbortError):
            capi.gguf_write_to_file(gguf, tmp_path / "f", False)
    assert len(os.listdir("/proc/self/fd")) == len(before)
