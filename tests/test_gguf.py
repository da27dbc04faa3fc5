"""Reading GGUF files: values, tensors, laziness, lifetimes; against the package gguf and ggml."""

from __future__ import annotations

import gc
import importlib.util
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _gguf import array, kv, make, string, tensor

from ggml_cffi import Context, capi, dequantize, quantize
from ggml_cffi.dtypes import type_name
from ggml_cffi.enums import ggml_type, gguf_type
from ggml_cffi.gguf import GGUFArray, GGUFError, GGUFFile, GGUFWriter

SCALARS = [
    (0, "<B", 255),
    (1, "<b", -128),
    (2, "<H", 65535),
    (3, "<h", -32768),
    (4, "<I", 2**32 - 1),
    (5, "<i", -(2**31)),
    (6, "<f", 0.5),
    (7, "<B", True),
    (10, "<Q", 2**64 - 1),
    (11, "<q", -(2**63)),
    (12, "<d", 0.1),
]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def gguf(need: Any) -> Any:
    need(importlib.util.find_spec("gguf"), "package gguf")
    return importlib.import_module("gguf")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("kind", "form", "value"), SCALARS)
def test_scalars(tmp_path: Path, version: int, kind: int, form: str, value: object) -> None:
    data = struct.pack(form, value)
    pairs = [kv("a", kind, data), kv("b", 9, array(kind, data * 3, 3))]
    with GGUFFile(write(tmp_path / "f", make(pairs, version=version))) as file:
        assert file.version == version
        found = file.metadata["a"]
        assert found == value and type(found) is type(value)
        assert file.metadata.type("a") == kind and isinstance(file.metadata.type("a"), gguf_type)
        many = file.metadata["b"]
        assert isinstance(many, GGUFArray) and many.type == kind
        assert many.tolist() == [value] * 3 and all(type(n) is type(value) for n in many)
        assert many[1] == many[-1] == value and type(many[1]) is type(value)
        numbers = many.numpy()
        assert numbers.dtype == (np.bool_ if kind == 7 else np.dtype(form))
        assert numbers.tolist() == [value] * 3 and numbers.flags.owndata


def test_strings_and_arrays(tmp_path: Path) -> None:
    texts = ["", "a", "ä€😀", "x" * 300, "nul\0in"]
    pairs = [
        kv("text", 8, string("grüße\n")),
        kv("texts", 9, array(8, b"".join(map(string, texts)), 5)),
        kv("none", 9, array(8, b"", 0)),
        kv("no numbers", 9, array(4, b"", 0)),
    ]
    with GGUFFile(write(tmp_path / "f", make(pairs))) as file:
        assert list(file.metadata) == ["text", "texts", "none", "no numbers"]
        assert len(file.metadata) == 4 and "text" in file.metadata and "x" not in file.metadata
        assert file.metadata["text"] == "grüße\n"
        found = file.metadata["texts"]
        assert (
            list(found) == texts == found.tolist() and found[2] == "ä€😀" and found[-1] == texts[-1]
        )
        assert found[1:4] == texts[1:4] and found[::-1] == texts[::-1]
        assert found == texts and found != texts[:-1] and found == found
        assert found.numpy().dtype == object and found.numpy().tolist() == texts
        assert "a" in found and found.index("a") == 1
        with pytest.raises(IndexError, match="index is 5, the array has 5 elements"):
            found[5]
        assert file.metadata["none"].tolist() == [] == file.metadata["no numbers"].tolist()
        assert file.metadata["no numbers"].numpy().dtype == np.uint32
        with pytest.raises(KeyError):
            file.metadata["x"]


def test_nested_arrays(tmp_path: Path) -> None:
    two = array(
        9, array(2, struct.pack("<2H", 1, 2), 2) + array(8, string("a") + string("b"), 2), 2
    )
    pairs = [kv("a", 9, array(9, two + array(9, b"", 0), 2)), kv("after", 7, b"\1")]
    with GGUFFile(write(tmp_path / "f", make(pairs))) as file:
        found = file.metadata["a"]
        assert found.type == gguf_type.GGUF_TYPE_ARRAY
        assert found.tolist() == [[[1, 2], ["a", "b"]], []]
        assert found[0][1][0] == "a" and found[0][0].type == 2
        assert found == [[[1, 2], ["a", "b"]], []] and file.metadata["after"] is True
        with pytest.raises(TypeError, match="array of arrays"):
            found.numpy()


@pytest.mark.parametrize("shape", ["short", "long", "empty", "zeros", "mixed", "huge"])
@pytest.mark.parametrize("n", [63, 64, 1000, 20_000])
def test_many_strings(tmp_path: Path, shape: str, n: int) -> None:
    """Where each of them begins is found without following them, but for sure."""
    rng = np.random.default_rng(n)
    n = min(n, 200) if shape == "huge" else n
    length = {
        "short": lambda: rng.integers(0, 20, n),
        "long": lambda: rng.integers(250, 270, n),
        "empty": lambda: np.zeros(n, int),
        "zeros": lambda: rng.integers(0, 40, n),
        "mixed": lambda: rng.choice([0, 1, 8, 255, 256, 300], n),
        "huge": lambda: rng.choice([3, 100_000, 140_000], n),
    }[shape]()
    letters = bytes(9) + b"\1\7" if shape == "zeros" else bytes(range(1, 128))
    texts = [bytes(rng.choice(np.frombuffer(letters, np.uint8), int(k))).decode() for k in length]
    pairs = [kv("a", 9, array(8, b"".join(map(string, texts)), n)), kv("after", 8, string("end"))]
    with GGUFFile(write(tmp_path / "f", make(pairs))) as file:
        assert file.metadata["after"] == "end"
        assert file.metadata["a"].tolist() == texts
        assert file.metadata["a"][n // 2] == texts[n // 2]


def test_bad_utf8_in_values_is_told_when_read(tmp_path: Path) -> None:
    texts = [b"good"] * 70 + [b"b\xffd"]
    pairs = [
        kv("s", 8, string(b"b\xffd")),
        kv("a", 9, array(8, b"".join(map(string, texts)), 71)),
    ]
    path = write(tmp_path / "f", make(pairs))
    with GGUFFile(path) as file:
        for key in ("s", "a"):
            with pytest.raises(GGUFError, match=f"metadata key '{key}', at byte .*is no UTF-8"):
                list(file.metadata[key])
        assert file.metadata["a"][:70] == ["good"] * 70
    with GGUFFile(path, errors="surrogateescape") as file:
        assert file.metadata["s"] == file.metadata["a"][70] == "b\udcffd"
        with GGUFWriter(tmp_path / "g") as writer:
            writer.update(dict(file.metadata))
    assert (tmp_path / "g").read_bytes() == path.read_bytes()
    with pytest.raises(LookupError):
        GGUFFile(path, errors="no such handler")


def test_tensors(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    data = numbers.tobytes() + np.arange(5, dtype=np.int16).tobytes() + bytes(22)
    infos = [
        tensor("a", [4, 3, 2], 0, 0),
        tensor("b", [5], 25, 96),
        tensor("none", [3, 0], 0, 128),
        tensor("one", [], 24, 128),
    ]
    with GGUFFile(write(tmp_path / "f", make([], infos, data + b"\7"))) as file:
        assert list(file.tensors) == ["a", "b", "none", "one"] and len(file.tensors) == 4
        a = file.tensors["a"]
        assert (a.name, a.type, a.ne, a.shape) == (
            "a",
            ggml_type.GGML_TYPE_F32,
            (4, 3, 2),
            (2, 3, 4),
        )
        assert a.nbytes == 96 and a.offset % 32 == 0
        assert (tmp_path / "f").read_bytes()[a.offset : a.offset + a.nbytes] == numbers.tobytes()
        assert a.data.tobytes() == numbers.tobytes() and a.data.dtype == np.uint8
        assert (a.numpy() == numbers).all() and a.numpy().shape == (2, 3, 4)
        for view in (a.data, a.numpy()):
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
        assert file.tensors["b"].numpy().tolist() == [0, 1, 2, 3, 4]
        assert file.tensors["none"].numpy().shape == (0, 3) and file.tensors["none"].nbytes == 0
        assert file.tensors["one"].numpy() == 7 and file.tensors["one"].numpy().shape == ()
        assert repr(a) == "<GGUFTensor 'a' f32 (2, 3, 4)>"
        with pytest.raises(KeyError):
            file.tensors["x"]
        del a, view


def test_tensors_are_arrays_to_numpy(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    with GGUFWriter(tmp_path / "f") as writer:
        writer.add_tensor("plain", numbers)
        writer.add_tensor("halves", numbers, "bf16")
        writer.add_tensor("blocks", numbers, "q8_0")
        writer.add_tensor("one", np.float32(7))
    with GGUFFile(tmp_path / "f") as file, Context() as ctx:
        plain, halves, blocks, one = file.tensors.values()
        found = np.asarray(plain)
        assert found.shape == (2, 64) and found.dtype == np.float32 and (found == numbers).all()
        assert not found.flags.writeable and np.shares_memory(found, plain.data)
        assert np.asarray(halves).dtype.name == "bfloat16" and np.asarray(one).shape == ()
        rounded = dequantize(quantize(numbers, "q8_0"), "q8_0")
        np.testing.assert_array_equal(np.asarray(blocks), rounded)
        assert np.asarray(blocks, np.float64).dtype == np.asarray(plain, "f8").dtype == np.float64
        np.testing.assert_array_equal(np.array(plain, "f8"), numbers)

        copies = plain.numpy(copy=True), blocks.numpy(copy=True), np.array(plain, copy=True)
        for copied in copies:
            assert copied.flags.writeable and not np.shares_memory(copied, plain.data)
        assert np.shares_memory(plain.numpy(copy=False), plain.data)
        for take in (blocks.numpy, blocks.__array__):
            with pytest.raises(ValueError, match=r"'blocks' q8_0 .* have to be copied"):
                take(copy=False)
        with pytest.raises(ValueError, match=r"'plain' f32 .* is not of float64"):
            plain.__array__(np.float64, copy=False)

        np.testing.assert_array_equal(quantize(plain, "q8_0"), quantize(numbers, "q8_0"))
        made = [ctx.from_numpy(t, f"made {t.name}") for t in (plain, halves, blocks)]
        written = ctx.tensor((2, 64), "f32", name="written")
        ctx.allocate("CPU")
        written.set(blocks)
        for tensor, kind in zip([*made, written], ("f32", "bf16", "f32", "f32"), strict=True):
            assert type_name(tensor.type) == kind
        for tensor in (made[2], written):
            np.testing.assert_array_equal(tensor.numpy(copy=True), rounded)
        np.testing.assert_array_equal(made[0].numpy(copy=True), numbers)
        del found


def test_closing_waits_for_arrays(tmp_path: Path) -> None:
    infos = [tensor("a", [4], 0, 0)]
    pairs = [kv("k", 8, string("v")), kv("l", 9, array(5, bytes(16), 4))]
    file = GGUFFile(write(tmp_path / "f", make(pairs, infos, bytes(32))))
    for take in (lambda: file.tensors["a"].data, lambda: file.tensors["a"].numpy()[1:]):
        view = take()
        with pytest.raises(BufferError, match="it stays open"):
            file.close()
        assert not file.closed and view.sum() == 0 and file.metadata["k"] == "v"
        del view
    copies = file.metadata["l"].numpy(), file.metadata["l"]
    a = file.tensors["a"]
    file.close()
    file.close()
    assert file.closed and copies[0].tolist() == [0] * 4 and "closed" in repr(file)
    for read in (lambda: file.metadata["k"], lambda: copies[1].tolist(), lambda: copies[1][0],
                 lambda: a.data, lambda: a.numpy(), lambda: file.load_into(None, "CPU")):  # type: ignore[arg-type]  # fmt: skip
        with pytest.raises(ValueError, match="the GGUFFile is closed"):
            read()
    assert list(file.metadata) == ["k", "l"] and a.shape == (4,)  # known without the file


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.own_memory
def test_a_thousand_files_leave_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "f", make([], [tensor("a", [4], 0, 0)], bytes(32)))
    bad = write(tmp_path / "bad", path.read_bytes()[:-24])
    gc.collect()
    before = descriptors()
    for _ in range(500):
        GGUFFile(path).close()
        forgotten = GGUFFile(path)
        view = forgotten.tensors["a"].numpy()
        del forgotten
        assert view.sum() == 0  # it keeps the map, not the file
        del view
        with pytest.raises(GGUFError):
            GGUFFile(bad)
    gc.collect()
    assert descriptors() == before and maps(path) == maps(bad) == 0


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "missing")
    with pytest.raises(GGUFError, match="is no regular file"):
        GGUFFile(tmp_path)
    with pytest.raises(GGUFError, match="is empty; expected the magic"):
        GGUFFile(write(tmp_path / "empty", b""))
    with pytest.raises(
        GGUFError, match=r"at byte 0, begins with b'PK\\x03\\x04'; expected the magic"
    ):
        GGUFFile(write(tmp_path / "zip", b"PK\3\4" + bytes(40)))
    big = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    with pytest.raises(GGUFError, match="is big-endian; expected little-endian"):
        GGUFFile(write(tmp_path / "big", big))
    for version in (0, 1, 4):
        with pytest.raises(
            GGUFError, match=f"the version, at byte 4, is {version}; expected 2 or 3"
        ):
            GGUFFile(write(tmp_path / "v", make([], version=version)))


def test_threads_read_one_file(tmp_path: Path) -> None:
    """While others read, closing either waits for them or they are told that it is closed."""
    texts = [f"token {i}" for i in range(500)]
    pairs = [
        kv("a", 9, array(8, b"".join(map(string, texts)), 500)),
        kv("n", 9, array(11, struct.pack("<500q", *range(500)), 500)),
    ]
    path = write(tmp_path / "f", make(pairs, [tensor("t", [8], 0, 0)], bytes(32)))
    for _ in range(8):
        file, wrong, end = GGUFFile(path), [], threading.Event()

        def work(file: GGUFFile = file, wrong: list[object] = wrong) -> None:
            try:
                while True:
                    if file.metadata["a"].tolist() != texts or sum(file.metadata["n"]) != 124750:
                        wrong.append("other values")
                    if file.tensors["t"].numpy().sum():
                        wrong.append("other numbers")
            except ValueError as error:
                if "closed" not in str(error):
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        while not file.closed:
            try:
                file.close()
            except BufferError:
                end.wait(0.0001)
        for thread in threads:
            thread.join()
        assert not wrong


# ---- against others


def reference_pairs(writer: Any, gguf: Any) -> dict[str, object]:
    kinds = gguf.GGUFValueType
    values: dict[str, object] = {}
    for name, value in (
        ("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -9), ("uint32", 2**31),
        ("int32", -7), ("float32", 0.25), ("bool", True), ("string", "héllo"),
        ("uint64", 2**63 + 1), ("int64", -(2**62)), ("float64", 0.1),
    ):  # fmt: skip
        writer.add_key_value(f"t.{name}", value, kinds[name.upper()])
        many, kind = [value, value], kinds[name.upper()]
        writer.add_key_value(f"l.{name}", many, kinds.ARRAY, sub_type=kind)
        values |= {f"t.{name}": value, f"l.{name}": [value, value]}
    return values


def write_reference(path: Path, gguf: Any, alignment: int | None = None) -> dict[str, object]:
    """A file of the package gguf's with values and tensors of many types."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    values = reference_pairs(writer, gguf)
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(np.dtype(dtype).name, (rng.standard_normal((3, 5)) * 50).astype(dtype))
    floats = rng.standard_normal((2, 3, 512), dtype=np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name, gguf.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_what_the_package_gguf_writes(tmp_path: Path, gguf: Any, alignment: int | None) -> None:
    path = tmp_path / "f.gguf"
    values = write_reference(path, gguf, alignment)
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert file.alignment == (alignment or 32) == theirs.alignment
        for key, value in values.items():
            assert file.metadata[key] == value
            assert theirs.fields[key].types[0] == file.metadata.type(key)
        assert set(file.metadata) == {k for k in theirs.fields if not k.startswith("GGUF.")}
        assert list(file.tensors) == [t.name for t in theirs.tensors]
        for other in theirs.tensors:
            ours = file.tensors[other.name]
            assert ours.type == other.tensor_type and list(ours.ne) == other.shape.tolist()
            assert ours.offset == other.data_offset and ours.nbytes == other.n_bytes
            assert ours.data.tobytes() == other.data.tobytes()
            expected = other.data
            if ours.type in (2, 8):  # Q4_0, Q8_0
                expected = gguf.dequantize(other.data, other.tensor_type)
            np.testing.assert_array_equal(ours.numpy(), expected)
            assert ours.numpy().shape == ours.shape == tuple(other.shape[::-1])
        with GGUFWriter(tmp_path / "again") as writer:
            writer.update(file.metadata)
            for name in file.tensors:
                writer.add_tensor(name, file.tensors[name])
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_what_ggml_reads(tmp_path: Path, gguf: Any) -> None:
    """ggml's own reader says the same of a file as ours, also of one that our writer has made."""
    path = tmp_path / "f.gguf"
    write_reference(path, gguf)
    ours = tmp_path / "ours.gguf"
    with GGUFFile(path) as file, GGUFWriter(ours, alignment=128) as writer:
        writer.update(file.metadata)
        for name in file.tensors:
            writer.add_tensor(name, file.tensors[name])
    getters = {"uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32",
               "int32": "i32", "float32": "f32", "bool": "bool", "string": "str", "uint64": "u64",
               "int64": "i64", "float64": "f64"}  # fmt: skip
    for one in (path, ours):
        native = capi.gguf_init_from_file(one, no_alloc=True)
        with GGUFFile(one) as file:
            assert capi.gguf_get_alignment(native) == file.alignment
            assert capi.gguf_get_version(native) == file.version
            assert capi.gguf_get_n_kv(native) == len(file.metadata)
            for index, key in enumerate(file.metadata):
                assert capi.gguf_get_key(native, index) == key
                assert capi.gguf_get_kv_type(native, index) == file.metadata.type(key)
                if key.startswith("t."):
                    get = getattr(capi, f"gguf_get_val_{getters[key[2:]]}")
                    assert get(native, index) == file.metadata[key]
                if key.startswith("l."):
                    assert capi.gguf_get_arr_n(native, index) == len(file.metadata[key])
                    assert capi.gguf_get_arr_type(native, index) == file.metadata[key].type
            start = capi.gguf_get_data_offset(native)
            assert capi.gguf_get_n_tensors(native) == len(file.tensors)
            for index, name in enumerate(file.tensors):
                found = file.tensors[name]
                assert capi.gguf_get_tensor_name(native, index) == name
                assert capi.gguf_get_tensor_type(native, index) == found.type
                assert capi.gguf_get_tensor_size(native, index) == found.nbytes
                assert start + capi.gguf_get_tensor_offset(native, index) == found.offset
        capi.gguf_free(native)


@pytest.mark.parametrize("n_tensors", [0, 1, 3])
def test_what_ggml_writes(tmp_path: Path, n_tensors: int) -> None:
    """A file of ggml's own writer is read, and written again byte for byte.

    It has no alignment of its own: ggml writes that key, and then pads to 32 all the same.
    """
    native = capi.gguf_init_empty()
    capi.gguf_set_val_str(native, "general.architecture", "test")
    capi.gguf_set_val_bool(native, "flag", True)
    capi.gguf_set_arr_str(native, "words", ["a", "", "c"])
    path = tmp_path / "f"
    arena = capi.ggml_init(mem_size=4096, no_alloc=False)
    for i in range(n_tensors):
        made = capi.ggml_new_tensor(arena, ggml_type.GGML_TYPE_F32, [5, i + 2])
        capi.ggml_set_name(made, f"t{i}")
        capi.ggml_set_f32(made, i + 0.5)
        capi.gguf_add_tensor(native, made)
    capi.gguf_write_to_file(native, path, False)
    capi.gguf_free(native)
    capi.ggml_free(arena)
    with GGUFFile(path) as file, GGUFWriter(tmp_path / "again") as writer:
        assert file.metadata["words"] == ["a", "", "c"] and file.metadata["flag"] is True
        assert [t.shape for t in file.tensors.values()] == [(i + 2, 5) for i in range(n_tensors)]
        writer.update(file.metadata)
        for name in file.tensors:
            writer.add_tensor(name, file.tensors[name])
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


# ---- a real model


@pytest.mark.slow
@pytest.mark.own_memory
def test_gemma_opens_lazily(gemma: Path) -> None:
    before = resident()
    begin = time.process_time()
    with GGUFFile(gemma) as file:
        took = time.process_time() - begin
        grown = resident() - before
        print(f"opened in {took * 1000:.0f} ms of a processor, {grown / 1e6:.1f} MB more in memory")
        assert took < 0.5
        assert grown < gemma.stat().st_size / 8
        begin = time.process_time()
        tokens = file.metadata["tokenizer.ggml.tokens"].tolist()
        took = time.process_time() - begin
        print(f"{len(tokens)} strings in {took * 1000:.0f} ms")
        assert len(tokens) == 262144 and tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert took < 2
        native = capi.gguf_init_from_file(gemma, no_alloc=True)
        key = capi.gguf_find_key(native, "tokenizer.ggml.tokens")
        assert all(capi.gguf_get_arr_str(native, key, i) == tokens[i] for i in range(0, 262144, 97))
        start = capi.gguf_get_data_offset(native)
        for index, name in enumerate(file.tensors):
            assert capi.gguf_get_tensor_name(native, index) == name
            assert file.tensors[name].offset == start + capi.gguf_get_tensor_offset(native, index)
        capi.gguf_free(native)


@pytest.mark.slow
def test_gemma_is_written_again_byte_for_byte(gemma: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    with GGUFFile(gemma) as file, GGUFWriter(again) as writer:
        writer.update(file.metadata)
        for name in file.tensors:
            writer.add_tensor(name, file.tensors[name])
    same = np.array_equal(np.memmap(gemma, mode="r"), np.memmap(again, mode="r"))
    again.unlink()
    assert same


def resident() -> int:
    """Bytes of this process in memory, the file's pages among them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
