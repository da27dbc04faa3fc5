"""Writing GGUF files."""

from __future__ import annotations

import importlib.util
import os
import stat
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _gguf import array, kv, make, string, tensor
from _release import needs_meta

from ggml_cffi import MetaDevice, SplitState, capi, ops, quants
from ggml_cffi.context import Context
from ggml_cffi.enums import ggml_type, gguf_type
from ggml_cffi.errors import AbortError, GGMLError
from ggml_cffi.gguf import GGUFError, GGUFFile, GGUFWriter

FORMS = {
    "uint8": ("<B", 0, 255), "int8": ("<b", -128, 127), "uint16": ("<H", 0, 65535),
    "int16": ("<h", -32768, 32767), "uint32": ("<I", 0, 2**32 - 1),
    "int32": ("<i", -(2**31), 2**31 - 1), "uint64": ("<Q", 0, 2**64 - 1),
    "int64": ("<q", -(2**63), 2**63 - 1), "float32": ("<f", -0.5, 1.5),
    "float64": ("<d", 0.1, 1e300),
}  # fmt: skip


def write(path: Path, fill: Callable[[GGUFWriter], object], **options: Any) -> bytes:
    with GGUFWriter(path, **options) as writer:
        fill(writer)
    return path.read_bytes()


@pytest.mark.parametrize("version", [2, 3])
def test_an_empty_file(tmp_path: Path, version: int) -> None:
    assert write(tmp_path / "f", lambda w: None, version=version) == make(version=version)


@pytest.mark.parametrize("name", FORMS)
def test_numbers_of_every_type(tmp_path: Path, name: str) -> None:
    form, low, high = FORMS[name]
    kind = gguf_type[f"GGUF_TYPE_{name.upper()}"]
    dtype = np.dtype(name)

    def fill(writer: GGUFWriter) -> None:
        writer.set("a", low, name)
        writer.set("b", high, kind)
        writer.set("c", dtype.type(high))
        writer.set("d", [low, high], int(kind))
        writer.set("e", np.array([low, high], dtype))
        writer.set("f", np.array([low, high], dtype.newbyteorder(">"))[::-1])
        writer.set("g", [dtype.type(low)])
        writer.set("h", np.array(low, dtype))
        writer.set("i", np.array([[low], [high]], dtype))

    one, two = struct.pack(form, low), struct.pack(form, high)
    pairs = [
        kv("a", kind, one), kv("b", kind, two), kv("c", kind, two),
        kv("d", 9, array(kind, one + two, 2)), kv("e", 9, array(kind, one + two, 2)),
        kv("f", 9, array(kind, two + one, 2)), kv("g", 9, array(kind, one, 1)), kv("h", kind, one),
        kv("i", 9, array(9, array(kind, one, 1) + array(kind, two, 1), 2)),
    ]  # fmt: skip
    assert write(tmp_path / "f", fill) == make(pairs)
    if name.startswith(("int", "uint")):
        for value in (low - 1, high + 1):
            with pytest.raises(ValueError, match=f"is {value}, which {name} cannot hold"):
                GGUFWriter(tmp_path / "g").set("a", value, name)
    elif name == "float32":
        with pytest.raises(ValueError, match="which float32 cannot hold"):
            GGUFWriter(tmp_path / "g").set("a", 1e300, name)


VALUES: list[tuple[object, int, bytes]] = [
    (True, 7, b"\1"),
    (np.bool_(False), 7, b"\0"),
    ("hé", 8, string("hé")),
    ("", 8, string("")),
    (1, 5, struct.pack("<i", 1)),
    (-(2**31), 5, struct.pack("<i", -(2**31))),
    (2**31, 11, struct.pack("<q", 2**31)),
    (-(2**63), 11, struct.pack("<q", -(2**63))),
    (2**63, 10, struct.pack("<Q", 2**63)),
    (0.1, 12, struct.pack("<d", 0.1)),
    ([1, 2**40], 9, array(11, struct.pack("<2q", 1, 2**40), 2)),
    ([1, 0.5], 9, array(12, struct.pack("<2d", 1, 0.5), 2)),
    ((True, False), 9, array(7, b"\1\0", 2)),
    (np.array([True, False]), 9, array(7, b"\1\0", 2)),
    (["a", ""], 9, array(8, string("a") + string(""), 2)),
    (np.array(["a", "bc"]), 9, array(8, string("a") + string("bc"), 2)),
    (np.array(["a", "bc"], object), 9, array(8, string("a") + string("bc"), 2)),
    ([[1], ["a"], [[True]]], 9, array(9, array(5, b"\1\0\0\0", 1) + array(8, string("a"), 1)
                                      + array(9, array(7, b"\1", 1), 1), 3)),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "data"), VALUES, ids=[repr(v[0])[:30] for v in VALUES])
def test_python_values(tmp_path: Path, value: object, kind: int, data: bytes) -> None:
    assert write(tmp_path / "f", lambda w: w.set("k", value)) == make([kv("k", kind, data)])
    with GGUFFile(tmp_path / "f") as file:
        found = file.metadata["k"]
        assert found == (list(value) if isinstance(value, (np.ndarray, tuple)) else value)


def test_a_value_of_a_file_by_its_key(tmp_path: Path) -> None:
    """Numbers of a mapping are Python's; the file tells their types."""

    def fill(writer: GGUFWriter) -> None:
        writer.set("u", 5, "uint32")
        writer.set("f", 1.5, "float32")
        writer.set("s", "text")
        writer.set("numbers", [1, 2], "uint32")
        writer.set("empty", [], "uint8")
        writer.set("nested", [[1], [2, 3]], "uint16")

    whole = write(tmp_path / "f", fill)
    with GGUFFile(tmp_path / "f") as file:
        m = file.metadata
        assert write(tmp_path / "g", lambda w: w.update(m)) == whole
        assert write(tmp_path / "g", lambda w: [w.set(k, m[k], m.type(k)) for k in m]) == whole
        write(tmp_path / "g", lambda w: w.update(dict(m)))
        with GGUFFile(tmp_path / "g") as python:
            names = {key: python.metadata.type(key).name for key in ("u", "f")}
            assert names == {"u": "GGUF_TYPE_INT32", "f": "GGUF_TYPE_FLOAT64"}
            for key in ("numbers", "empty", "nested"):
                assert python.metadata.raw(key) == m.raw(key)


def test_arrays_of_arrays_are_for_this_package_alone(tmp_path: Path) -> None:
    """They are in the format; ggml's reader refuses them."""
    write(tmp_path / "f", lambda w: w.set("k", [[1, 2], [3, 4]]))
    with GGUFFile(tmp_path / "f") as file:
        assert file.metadata["k"] == [[1, 2], [3, 4]]
    with pytest.raises(GGMLError, match="invalid GGUF type 9"):
        capi.gguf_init_from_file(str(tmp_path / "f"))


BAD: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (ValueError, "an empty array: type must say of what", ([],)),
    (TypeError, "values of several types", ([1, "a"],)),
    (TypeError, "values of several types", ([True, 1],)),
    (TypeError, "arrays and other values", ([1, [1]],)),
    (TypeError, r"is None \(NoneType\), expected a number", (None,)),
    (TypeError, r"is b'a' \(bytes\)", (b"a",)),
    (TypeError, "is 1j", (1j,)),
    (TypeError, "dtype complex128, for which the format has no type", (np.zeros(2, complex),)),
    (TypeError, "dtype float16, for which", (np.zeros(2, np.float16),)),
    (ValueError, "64 bits cannot hold", (2**64,)),
    (ValueError, "64 bits cannot hold", ([-1, 2**63],)),
    (TypeError, "is 1.5 .float., expected int32", (1.5, "int32")),
    (TypeError, "is True .bool., expected uint8", (True, "uint8")),
    (TypeError, "is 1, expected a bool", (1, "bool")),
    (TypeError, "is 1, expected a str", (1, "string")),
    (TypeError, "is 'a' .str., expected float32", ("a", "float32")),
    (ValueError, "type is 'int', expected one of uint8", (1, "int")),
    (ValueError, "type is 13, expected one of 0 to 12", (1, 13)),
    (TypeError, "type is 1.5, expected a gguf_type", (1, 1.5)),
    (ValueError, "type is array, expected that of the elements", ([1], "array")),
    (ValueError, "is no text: surrogates not allowed", ("\ud800",)),
    (ValueError, "too deep", ([[[[[[[[[1]]]]]]]]],)),
]


@pytest.mark.parametrize(("error", "message", "arguments"), BAD, ids=[str(b[2])[:30] for b in BAD])
def test_values_that_do_not_fit(
    tmp_path: Path, error: type[Exception], message: str, arguments: tuple[Any, ...]
) -> None:
    writer = GGUFWriter(tmp_path / "f")
    with pytest.raises(error, match=message):
        writer.set("key", *arguments)
    writer.close()
    assert (tmp_path / "f").read_bytes() == make()


def test_keys_and_alignment(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "f", alignment=8)
    for key in ("", "a\0", "k" * 65536):
        with pytest.raises(ValueError, match="expected 1 to 65535 bytes"):
            writer.set(key, 1)
    with pytest.raises(TypeError, match=r"key is 1 .int., expected a str"):
        writer.set(1, 1)  # type: ignore[arg-type]
    for value, kind in ((0, "uint32"), (48, "uint32"), (64, "uint64")):
        with pytest.raises(ValueError, match="expected a power of two, uint32"):
            writer.set("general.alignment", value, kind)
    writer.set("b", 1)
    writer.set("general.alignment", 64, "uint32")  # it keeps its place
    writer.add_tensor("t", np.zeros(1, np.int8))
    writer.close()
    pairs = [kv("general.alignment", 4, struct.pack("<I", 64)), kv("b", 5, struct.pack("<i", 1))]
    expected = make(pairs, [tensor("t", [1], 24, 0)], bytes(64), alignment=64)
    assert (tmp_path / "f").read_bytes() == expected
    for options in ({"alignment": 48}, {"alignment": 0}, {"version": 1}):
        with pytest.raises(ValueError, match="expected"):
            GGUFWriter(tmp_path / "f", **options)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        GGUFWriter(tmp_path / "no" / "f")


# ---- tensors


def test_arrays(tmp_path: Path) -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    floats = rng.standard_normal((3, 4, 64), dtype=np.float32)
    arrays: dict[str, tuple[Any, Any]] = {
        **{np.dtype(t).name: (rng.integers(-9, 9, (3, 5)).astype(t), None)
           for t in ("f4", "f2", "f8", "i1", "i2", "i4", "i8")},
        "bfloat16": (floats.astype(ml_dtypes.bfloat16), None),
        "f32 as bf16": (floats, "bf16"), "f32 as f16": (floats, np.float16),
        "strided": (floats[::2, ::-1, ::3], None), "fortran": (np.asfortranarray(floats), None),
        "swapped": (floats.astype(">f4"), None), "ints as f32": (np.arange(6), "f32"),
        "0-d": (np.float32(2.5), None), "empty": (np.empty((0, 3), np.float32), None),
        "list": ([[1.5, 2.5]], "f32"),
    }  # fmt: skip

    def fill(writer: GGUFWriter) -> None:
        for name, (numbers, kind) in arrays.items():
            writer.add_tensor(name, numbers, kind)

    write(tmp_path / "f", fill)
    with GGUFFile(tmp_path / "f") as file:
        assert list(file.tensors) == list(arrays)
        for name, (numbers, kind) in arrays.items():
            found = file.tensors[name].numpy()
            wanted = np.asarray(numbers)
            if kind is not None:
                dtypes = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}
                wanted = wanted.astype(dtypes.get(kind, kind))
            assert found.shape == wanted.shape and found.dtype == wanted.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found, wanted)
        del found


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_K", "q6_K", "iq2_xxs", "mxfp4"])
def test_quantised(tmp_path: Path, kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 2, 512), dtype=np.float32)
    weights = np.abs(numbers[0, 0])
    blocks = quants.quantize(numbers, kind, weights)

    def fill(writer: GGUFWriter) -> None:
        writer.add_tensor("made", numbers, kind, imatrix=weights)
        writer.add_raw("given", blocks, kind, numbers.shape)
        writer.add_raw("bytes", blocks.tobytes(), kind, [6, 512])

    write(tmp_path / "f", fill)
    with GGUFFile(tmp_path / "f") as file:
        for name in file.tensors:
            assert file.tensors[name].data.tobytes() == blocks.tobytes()
            shape = (6, 512) if name == "bytes" else (3, 2, 512)
            assert file.tensors[name].numpy().shape == shape == file.tensors[name].shape
        np.testing.assert_array_equal(file.tensors["made"].numpy(), quants.dequantize(blocks, kind))


@needs_meta
def test_tensors_of_contexts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((4, 64), dtype=np.float32)
    meta = MetaDevice(["CPU", "CPU"], lambda info, n: SplitState.by_ratio(info, 0, [1, 1]))
    with meta, Context() as ctx, Context() as other:
        made = [ctx.from_numpy(numbers, "a"), ctx.from_numpy(numbers, "b", "q8_0"),
                ctx.from_numpy(np.float32(1), "c")]  # fmt: skip
        without = ctx.input((3,), name="no")
        ctx.allocate("CPU")
        spread = [other.from_numpy(numbers, "d"), other.from_numpy(numbers, "e", "q4_0")]
        other.allocate(meta)
        with GGUFWriter(tmp_path / "f") as writer:
            for one in [*made, *spread]:
                writer.add_tensor(one.name, one)
            with pytest.raises(ValueError, match="has no memory"):
                writer.add_tensor("no", without)
            with pytest.raises(ValueError, match="is not contiguous: give its numbers"):
                writer.add_tensor("no", ops.transpose(made[0]))
            with pytest.raises(TypeError, match="is copied as it is: give its numbers"):
                writer.add_tensor("no", made[0], "f16")
        with GGUFFile(tmp_path / "f") as file:
            for one in [*made, *spread]:
                found = file.tensors[one.name]
                assert (found.type, found.shape) == (one.type, one.shape)
                np.testing.assert_array_equal(found.numpy(), one.numpy())


def test_a_context_closed_before_the_file_is_written(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "f")
    with Context() as ctx:
        made = ctx.from_numpy(np.zeros(4, np.float32), "a")
        ctx.allocate("CPU")
        writer.add_tensor("a", made)
    with pytest.raises(ValueError, match="Context is closed"):
        writer.close()
    assert os.listdir(tmp_path) == []


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "f")
    good = np.zeros((2, 32), np.float32)
    writer.add_tensor("ä" * 31 + "x", good)
    for error, message, act in (
        (ValueError, "there is a tensor", lambda: writer.add_tensor("ä" * 31 + "x", good)),
        (ValueError, "at most 63 bytes", lambda: writer.add_tensor("n" * 64, good)),
        (ValueError, "none zero", lambda: writer.add_tensor("a\0", good)),
        (TypeError, "name is 1", lambda: writer.add_tensor(1, good)),  # type: ignore[arg-type]
        (ValueError, "at most 4 axes", lambda: writer.add_tensor("a", np.zeros((1,) * 5))),
        (ValueError, "a multiple of 32, a", lambda: writer.add_tensor("a", good[:, 1:], "q4_0")),
        (ValueError, "a single number", lambda: writer.add_tensor("a", np.float32(1), "q4_0")),
        (TypeError, "dtype complex64", lambda: writer.add_tensor("a", good.astype("c8"), "f32")),
        (TypeError, "dtype <U1", lambda: writer.add_tensor("a", "x", "f32")),
        (ValueError, "for NumPy's uint8", lambda: writer.add_tensor("a", np.zeros(3, "u1"))),
        (TypeError, "which i8 cannot hold", lambda: writer.add_tensor("a", good, "i8")),
        (OverflowError, "has -129, which", lambda: writer.add_tensor("a", [0, -129], "i8")),
        (OverflowError, "has 70000, which", lambda: writer.add_tensor("a", [70000], "f16")),
        (ValueError, "has 3 bytes, expected 4", lambda: writer.add_raw("a", b"123", "f32", [1])),
        (ValueError, "expected 0 or more", lambda: writer.add_raw("a", b"", "f32", [-1])),
        (ValueError, "too large", lambda: writer.add_raw("a", b"", "f32", [2**64, 0])),
        (ValueError, "too large", lambda: writer.add_raw("a", b"", "f32", [2**62, 0, 4])),
        (TypeError, "expected integers", lambda: writer.add_raw("a", b"1234", "f32", [1.0])),
        (TypeError, "Python objects", lambda: writer.add_raw("a", np.array([None]), "i64", 1)),
        (ValueError, "is no type of ggml's", lambda: writer.add_raw("a", b"", "q9", [1])),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            act()
    writer.close()
    with GGUFFile(tmp_path / "f") as file:
        assert list(file.tensors) == ["ä" * 31 + "x"]


def test_scalars_of_numpy(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "f") as writer:
        writer.set("text", np.str_("a"))
        writer.set("texts", ["a", np.str_("b")])
        writer.set("flag", np.bool_(True))
        writer.set("number", np.int16(-3))
    with GGUFFile(tmp_path / "f") as file:
        found = {key: file.metadata[key] for key in ("text", "flag", "number")}
        assert found == {"text": "a", "flag": True, "number": -3}
        assert list(file.metadata["texts"]) == ["a", "b"]


# ---- all or nothing


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut there is the old one, or all of the new one."""
    path, done = tmp_path / "f", []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("sync", name.parent, os.fstat(descriptor).st_size if name.is_file() else 0))

    def replaced(made: Path, target: Path) -> None:
        done.append(("replace", target.parent, made.stat().st_size))
        replace(made, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with GGUFWriter(path) as writer:
        writer.add_tensor("x", np.ones((100, 100), np.float32))
    size = path.stat().st_size
    assert done == [
        ("sync", tmp_path, size),
        ("replace", tmp_path, size),
        ("sync", tmp_path.parent, 0),
    ]


class Stop(Exception):
    pass


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")

    def stop(done: int, total: int) -> None:
        assert len(os.listdir(tmp_path)) == 2  # the one that is being written
        if done:
            raise Stop

    def fail(writer: GGUFWriter) -> None:
        writer.add_tensor("a", np.zeros(3, np.float32))
        raise Stop

    with pytest.raises(Stop):
        write(path, fail)
    writer = GGUFWriter(path)
    writer.discard()
    assert writer.closed
    for act in (lambda: writer.set("a", 1), lambda: writer.add_tensor("b", np.zeros(1, "f4")),
                lambda: writer.update({"a": 1})):  # fmt: skip
        with pytest.raises(ValueError, match="the GGUFWriter is closed"):
            act()
    writer = GGUFWriter(path)
    writer.add_tensor("a", np.zeros(3, np.float32))
    with pytest.raises(Stop):
        writer.close(stop)
    writer = GGUFWriter(path)
    writer.add_tensor("a", np.full(256, np.nan, np.float32), "iq3_s", np.ones(256))
    with pytest.raises((AbortError, GGUFError)):
        writer.close()
    writer.close()
    assert os.listdir(tmp_path) == ["f"] and path.read_bytes() == b"before"
    discarded = GGUFWriter(path)
    discarded.discard()
    discarded.close()
    assert path.read_bytes() == b"before"


def test_a_reader_sees_the_old_file_or_the_new(tmp_path: Path) -> None:
    path, end, wrong = tmp_path / "f", threading.Event(), []

    def fill(n: int) -> Callable[[GGUFWriter], object]:
        return lambda w: (w.set("n", n), w.add_tensor("t", np.full(5000, n, np.int32)))

    def watch() -> None:
        while not end.is_set():
            try:
                with GGUFFile(path) as file:
                    numbers = file.tensors["t"].numpy()
                    if (numbers != file.metadata["n"]).any():
                        wrong.append("mixed")
                    del numbers
            except Exception as error:
                wrong.append(error)

    write(path, fill(0))
    thread = threading.Thread(target=watch)
    thread.start()
    for n in range(50):
        write(path, fill(n))
    end.set()
    thread.join()
    assert not wrong and os.listdir(tmp_path) == ["f"]


def test_rights_of_the_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", lambda w: None)
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
        (tmp_path / "new").chmod(0o604)
        write(tmp_path / "new", lambda w: None)
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "f")
    write(tmp_path / "link", lambda w: None)
    assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "folder") == ["f"]


def test_a_large_alignment_takes_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    with GGUFWriter(tmp_path / "f", alignment=1 << 30) as writer:
        writer.add_tensor("a", np.arange(4, dtype=np.float32))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    status = (tmp_path / "f").stat()
    assert status.st_size == 2 << 30 and status.st_blocks * 512 < 1 << 20
    with GGUFFile(tmp_path / "f") as file:
        assert file.tensors["a"].offset == 1 << 30
        assert file.tensors["a"].data.view(np.float32).sum() == 6


def test_progress_and_a_file_written_over_itself(tmp_path: Path) -> None:
    """Its own tensors can be copied: they are read from the old file, which is still there."""
    path = tmp_path / "f"
    numbers = np.arange(5000, dtype=np.float32)
    write(path, lambda w: w.add_tensor("a", numbers))
    seen: list[tuple[int, int]] = []
    file = GGUFFile(path)
    writer = GGUFWriter(path)
    writer.add_tensor("a", file.tensors["a"])
    writer.add_tensor("b", numbers, "f16")
    with pytest.raises(BufferError):
        file.close()  # until it is written
    writer.close(lambda *n: seen.append(n))
    file.close()
    assert seen == [(20000, 30000), (30000, 30000)]
    with GGUFFile(path) as file:
        assert (file.tensors["a"].numpy() == numbers).all() and len(file.tensors) == 2


# ---- against the package gguf


def test_what_the_package_gguf_reads(tmp_path: Path, need: Any) -> None:
    need(importlib.util.find_spec("gguf"), "package gguf")
    import gguf

    path = tmp_path / "f.gguf"
    values = {name: [low, high] for name, (_, low, high) in FORMS.items()}
    numbers = np.random.default_rng(0).standard_normal((3, 2, 512), dtype=np.float32)
    kinds = ["f32", "f16", "q4_0", "q8_0", "q5_1", "q6_K", "f64"]
    with GGUFWriter(path, alignment=64) as writer:
        writer.set("general.architecture", "llama")
        writer.set("flags", [True, False])
        writer.set("words", ["", "ä", "x"])
        for name, pair in values.items():
            writer.set(name, pair[0], name)
            writer.set(f"many.{name}", pair, name)
        for kind in kinds:
            writer.add_tensor(kind, numbers, kind)
    reader = gguf.GGUFReader(path)
    assert reader.alignment == 64
    for name, pair in values.items():
        wanted = [np.dtype(name).type(n) for n in pair]
        assert reader.fields[name].contents() == wanted[0]
        assert reader.fields[f"many.{name}"].contents() == wanted
        assert reader.fields[name].types[-1].name == name.upper()
    assert reader.fields["words"].contents() == ["", "ä", "x"]
    assert reader.fields["flags"].contents() == [True, False]
    assert [t.name for t in reader.tensors] == kinds
    with GGUFFile(path) as file:
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert theirs.shape.tolist() == [512, 2, 3] and theirs.data_offset == ours.offset
            found = theirs.data
            if "q" in theirs.name:
                found = gguf.dequantize(found, theirs.tensor_type)
            np.testing.assert_array_equal(found, ours.numpy())


def test_what_ggml_loads(tmp_path: Path) -> None:
    """ggml reads the data of a file of ours as well, which has to be padded for that."""
    path = tmp_path / "f"
    numbers = np.arange(5, dtype=np.float32)
    write(path, lambda w: (w.set("a", 1), w.add_tensor("t", numbers), w.add_tensor("u", numbers)))
    from ggml_cffi import ffi

    made = ffi.new("struct ggml_context *[1]")
    native = capi.gguf_init_from_file(path, no_alloc=False, ctx=made)
    found = np.empty(5, np.float32)
    handle = capi.ggml_get_tensor(made[0], "u")
    assert handle.type == ggml_type.GGML_TYPE_F32
    ffi.buffer(ffi.from_buffer(found))[:] = ffi.buffer(handle.data, 20)[:]
    assert found.tolist() == numbers.tolist()
    capi.ggml_free(made[0])
    capi.gguf_free(native)


def test_a_thousand_writers_leave_nothing(tmp_path: Path) -> None:
    numbers = np.zeros(8, np.float32)
    references = sys.getrefcount(numbers)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(500):
        writer = GGUFWriter(tmp_path / "f")
        writer.add_tensor("a", numbers)
        if i % 2:
            writer.close()
    del writer
    assert sys.getrefcount(numbers) == references
    assert len(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == ["f"]
