"""GGUF files that are wrong: each is refused in words or opens, and costs no more than its size."""

from __future__ import annotations

import collections
import contextlib
import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _gguf import array, kv, make, string, tensor

from ggml_cffi import capi
from ggml_cffi.errors import GGMLError
from ggml_cffi.gguf import GGUFArray, GGUFError, GGUFFile, GGUFWriter
from ggml_cffi.gguf._parse import Parser

HUGE = (2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def small(nested: bool = True) -> bytes:
    """A file with every type of value and several tensors."""
    words = array(8, string("a") + string("") + string("ccc"), 3)
    pairs = [
        kv("general.architecture", 8, string("test")),
        kv("general.alignment", 4, struct.pack("<I", 64)),
        *(
            kv(f"n{k}", k, bytes(s))
            for k, s in zip(
                (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), (1, 1, 2, 2, 4, 4, 4, 1, 8, 8, 8), strict=True
            )
        ),
        kv("words", 9, words),
        *([kv("nested", 9, array(9, words + array(2, bytes(4), 2), 2))] if nested else []),
        kv("many", 9, array(8, b"".join(string(f"w{i}") for i in range(80)), 80)),
    ]
    infos = [
        tensor("a", [8, 2], 0, 0),
        tensor("b", [32, 3], 2, 64),
        tensor("none", [0], 1, 128),
        tensor("c", [5, 1, 2, 2], 24, 128),
    ]
    return make(pairs, infos, bytes(range(148)), alignment=64)


def read_all(path: Path) -> str:
    """Open a file and read all of it. Gives what GGUFError said, else an empty text."""
    try:
        with GGUFFile(path) as file:
            for value in file.metadata.values():
                value.tolist() if isinstance(value, GGUFArray) else value
            for entry in file.tensors.values():
                assert entry.data.nbytes == entry.nbytes
                entry.numpy()
    except GGUFError as error:
        return str(error)
    return ""


def said(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return read_all(path)


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = small()
    stages: collections.Counter[str] = collections.Counter()
    assert said(tmp_path / "f", whole) == ""
    for n in range(len(whole)):
        message = said(tmp_path / "f", whole[:n])
        assert message, f"opens with {n} of {len(whole)} bytes"
        stages[stage(whole[:n])] += 1
    print(dict(stages))
    assert set(stages) == {"magic", "version", "counts", "metadata", "tensors", "layout"}


def stage(data: bytes) -> str:
    parser = Parser(data, len(data), "f")
    with contextlib.suppress(GGUFError):
        parser.run()
    return parser.stage


def one(name: str = "t", ne: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return make([], [tensor(name, ne, kind, offset)], bytes(4096))


def alignment(kind: int, value: bytes) -> bytes:
    return make([kv("general.alignment", kind, value)], [tensor("t", [4], 0, 0)], bytes(64))


def deep(n: int) -> bytes:
    value = array(0, b"\1", 1)
    for _ in range(n):
        value = array(9, value, 1)
    return make([kv("deep", 9, value)])


WRONG = {
    "key twice": (
        make([kv("k", 0, b"1"), kv("k", 0, b"2")]),
        "key 'k', at byte 38, stands there twice",
    ),
    "tensor twice": (
        make([], [tensor("t", [4], 0, 0)] * 2, bytes(96)),
        "tensor 't', .*stands there twice",
    ),
    "empty key": (make([kv("", 0, b"1")]), "metadata key 0, at byte 24, is ''; expected a name"),
    "zero in a key": (make([kv("a\0b", 0, b"1")]), "expected a name"),
    "zero in a name": (one("a\0b"), "expected no zero in it"),
    "key no UTF-8": (make([kv(b"a\xff", 0, b"1")]), "metadata key 0, at byte 33, is no UTF-8"),
    "name no UTF-8": (
        make([], [tensor(b"\xc3", [4], 0, 0)], bytes(64)),
        "tensor 0, .* is no UTF-8",
    ),
    "value no UTF-8": (make([kv("k", 8, string(b"\xff"))]), "key 'k', at byte 45, is no UTF-8"),
    "key too long": (make([kv("k" * 65536, 0, b"1")]), "has length 65536; expected at most 65535"),
    "name too long": (one("n" * 64), "has length 64; expected at most 63"),
    "value type": (make([kv("k", 13, b"1")]), "is of type 13; expected one of 0 to 12"),
    "value type huge": (make([kv("k", 2**32 - 1, b"1")]), "is of type 4294967295"),
    "element type": (make([kv("k", 9, array(13, b"", 0))]), "is an array of type 13"),
    "no bool": (make([kv("k", 7, b"\2")]), "key 'k', .* is 2; expected 0 or 1, a bool"),
    "no bool in an array": (
        make([kv("k", 9, array(7, b"\0\1\3", 3))]),
        "is 3; expected 0 or 1, a bool",
    ),
    "too deep": (deep(9), "an array too deep; expected at most 8"),
    "endless depth": (make([kv("k", 9, array(9, b"", 1) * 20_000)]), "an array too deep"),
    "alignment 0": (alignment(4, bytes(4)), "is 0; expected a power of two"),
    "alignment 48": (alignment(4, struct.pack("<I", 48)), "is 48; expected a power of two"),
    "alignment's type": (
        alignment(10, struct.pack("<Q", 32)),
        "is of type uint64; expected uint32",
    ),
    "alignment huge": (alignment(4, struct.pack("<I", 2**31)), "the file's end"),
    "five axes": (one(ne=(1, 1, 1, 1, 1)), "has 5 dimensions; expected at most 4"),
    "negative axis": (one(ne=(4, -1)), "dimension 1 of tensor 't', .* is -1; expected 0 or more"),
    "product too large": (one(ne=(2**32, 2**32)), "expected fewer than 2\\^63 elements"),
    "product wraps": (one(ne=(2**16, 2**16, 2**16, 2**16)), "expected fewer than 2\\^63"),
    "product behind a zero": (one(ne=(0, 2**62, 2**62)), "expected fewer than 2\\^63"),
    "bytes overflow": (one(ne=(2**62,)), "the file's end"),
    "type that has gone": (one(kind=4), "is of type 4; expected a type that ggml has"),
    "type unknown": (one(kind=1000), "is of type 1000; expected a type that ggml has"),
    "type negative": (one(kind=2**32 - 1), "expected a type that ggml has"),
    "half a block": (one(ne=(48,), kind=2), "has rows of 48 of q4_0; expected a multiple of 32"),
    "a block without axes": (one(ne=(), kind=2), "has rows of 1 of q4_0"),
    "misaligned": (one(offset=16), "has offset 16; expected a multiple of 32"),
    "beyond the file": (one(offset=4096), "ends at byte .*; expected at most .*, the file's end"),
    "far beyond": (one(offset=2**64 - 32), "the file's end"),
    "overlapping": (
        make([], [tensor("a", [16], 0, 0), tensor("b", [4], 0, 32)], bytes(96)),
        "the data of tensor 'b', .* lies in that of 'a'",
    ),
    "the same place": (
        make([], [tensor("a", [4], 0, 0), tensor("b", [4], 0, 0)], bytes(96)),
        "lies in that of",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told(tmp_path: Path, case: str) -> None:
    data, message = WRONG[case]
    path = tmp_path / "f"
    path.write_bytes(data)
    told = read_all(path)
    assert told.startswith(f"{path}: ") and re.search(message, told), told
    assert len(told) < 1000


@pytest.mark.parametrize("n", HUGE)
def test_counts_and_lengths_that_are_huge(tmp_path: Path, n: int) -> None:
    huge = struct.pack("<Q", n)
    for data in (
        make(n_tensors=n),
        make(n_keys=n),
        make(n_tensors=n, n_keys=n),
        make([huge + b"key"]),
        make([kv("k", 8, huge + b"text")]),
        *(make([kv("k", 9, array(kind, b"12345678" * 4, n))]) for kind in range(13)),
        make([kv("k", 9, array(8, huge + b"text", 1))]),
        make([kv("k", 9, array(8, string("x") * 70 + huge + b"text", 71))]),
        make([kv("k", 9, array(9, array(4, b"", n), 1))]),
        make([], [huge + b"name"]),
        one(offset=n // 32 * 32),
        one(ne=(n,)),
    ):
        tracemalloc.start()
        begin = time.process_time()
        assert said(tmp_path / "f", data)
        assert time.process_time() - begin < 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


RIGHT = {
    "nothing": make(),
    "no padding at the end": make([], [tensor("t", [1], 24, 0)], b"1"),
    "a gap": make([], [tensor("a", [4], 0, 0), tensor("b", [4], 0, 64)], bytes(80)),
    "another order": make([], [tensor("a", [4], 0, 32), tensor("b", [4], 0, 0)], bytes(48)),
    "no axes": one(ne=()),
    "empty name": one(""),
    "depth of 8": deep(7),
    "more behind": make([], [tensor("t", [4], 0, 0)], bytes(1000)),
    "63 bytes of name": one("ä" * 31 + "x"),
    "an empty one on another": make(
        [], [tensor("a", [0], 0, 0), tensor("b", [4], 0, 0)], bytes(16)
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_rare_but_right_opens(tmp_path: Path, case: str) -> None:
    assert said(tmp_path / "f", RIGHT[case]) == ""


# ---- the bound


BOUND = 40
"""Bytes of memory for each of the file's, in the worst case; and 4 MiB at once for many strings."""


def worst(kind: str, n: int) -> bytes:
    """Files of what takes most memory for its bytes."""
    keys = [b"%06d" % i for i in range(n)]
    seventy = array(8, bytes(8 * 70), 70)
    return {
        "keys": lambda: make([kv(key, 0, b"1") for key in keys]),
        "tensors": lambda: make([], [tensor(key, [0], 24, 0) for key in keys]),
        "empty strings": lambda: make([kv("k", 9, array(8, bytes(8 * n), n))]),
        "strings": lambda: make([kv("k", 9, array(8, string("ab") * n, n))]),
        "few strings each": lambda: make([kv("k", 9, array(9, seventy * (n // 70), n // 70))]),
        "empty arrays": lambda: make([kv("k", 9, array(9, array(0, b"", 0) * n, n))]),
        "numbers": lambda: make([kv("k", 9, array(0, bytes(n * 16), n * 16))]),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["keys", "tensors", "empty strings", "strings", "few strings each", "empty arrays", "numbers"],
)
def test_memory_and_time_are_bounded_by_the_size(tmp_path: Path, kind: str) -> None:
    data = worst(kind, 20_000)
    path = tmp_path / "f"
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.process_time()
    file = GGUFFile(path)
    took = time.process_time() - begin
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{kind}: {most / len(data):.1f} bytes and {took / len(data) * 1e6:.2f} s for 1e6 bytes")
    assert most < BOUND * len(data) + (4 << 20)
    assert took < 20  # tracing makes it several times slower
    if isinstance(value := file.metadata.get("k"), GGUFArray):
        assert len(value.tolist()) == len(value)
    file.close()


# ---- mutations


class Places:
    """Where what stands in a file, as the parser finds it."""

    def __init__(self, data: bytes) -> None:
        parser = Parser(data, len(data), "f")
        parser.run()
        self.numbers: list[tuple[int, int]] = [(8, 8), (16, 8)]  # offset, size
        self.of_tensors: list[tuple[int, int]] = []
        self.texts: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int]] = []  # whole keys and tensors
        at = 24
        for value in parser.metadata.values():
            (length,) = struct.unpack_from("<Q", data, at)
            self.numbers += [(at, 8), (at + 8 + length, 4)]
            self.texts.append((at + 8, length))
            if value.type in (8, 9):
                self.numbers += [(value.start, 8 if value.type == 8 else 4)]
            if value.type == 9:
                self.numbers += [(value.start + 4, 8)]
                body = range(value.start + 12, max(value.start + 13, value.end - 8), 3)
                self.numbers += [(i, 8) for i in body][:12]
            self.pieces.append((at, value.end))
            at = value.end
        for _ in parser.tensors:
            (length,) = struct.unpack_from("<Q", data, at)
            begin, at = at, at + 8 + length
            (n_dims,) = struct.unpack_from("<I", data, at)
            self.texts.append((begin + 8, length))
            self.of_tensors += [(begin, 8), (at, 4)]
            self.of_tensors += [(at + 4 + 8 * i, 8) for i in range(n_dims)]
            at += 4 + 8 * n_dims
            self.of_tensors += [(at, 4), (at + 4, 8)]
            at += 12
            self.pieces.append((begin, at))


def mutate(data: bytes, places: Places, rng: random.Random) -> bytes:
    """One to three changes: of a number, a text, whole pieces, or any bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.6:
            at, size = rng.choice(
                rng.choice((places.numbers, places.of_tensors, places.of_tensors))
            )
            old = int.from_bytes(out[at : at + size], "little")
            near = [
                old + 1,
                old - 1,
                old * 2,
                old // 2,
                old + 32,
                old - 32,
                old ^ 1 << rng.randrange(8 * size),
            ]
            far = [
                0,
                1,
                2**31 - 1,
                2**31,
                2**32 - 1,
                2**62,
                2**63 - 1,
                2**63,
                2**64 - 1,
                rng.getrandbits(8 * size),
                rng.randrange(64),
                len(data),
            ]
            number = rng.choice(near if rng.random() < 0.6 else far) % (1 << 8 * size)
            out[at : at + size] = number.to_bytes(size, "little")
        elif kind < 0.75:
            at, length = rng.choice(places.texts)
            if 0 < length <= len(out) - at:
                out[at + rng.randrange(length)] = rng.choice((0, 0x80, 0xC3, 0xFF, 0x61))
        elif kind < 0.85:  # a piece twice, or in another's place, at the same length or not
            begin, end = rng.choice(places.pieces)
            at, to = rng.choice(places.pieces)
            out[at : rng.choice((at, to))] = data[begin:end]
        elif kind < 0.93:
            at = rng.randrange(max(1, len(out)))
            out[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        else:
            del out[rng.randrange(1, max(2, len(out))) :]
    return bytes(out)


def test_mutations(tmp_path: Path) -> None:
    """1,000 files that are nearly right: each is refused in words or opens."""
    data = small()
    places, rng = Places(data), random.Random(4)
    stages: collections.Counter[str] = collections.Counter()
    opened = refused_later = 0
    for _ in range(1000):
        mutated = mutate(data, places, rng)
        begin = time.process_time()
        reached = stage(mutated)
        message = said(tmp_path / "f", mutated) if mutated else "empty"
        assert time.process_time() - begin < 2
        assert bool(message) or reached == "done"
        opened += not message
        refused_later += bool(message) and reached == "done"
        stages[reached] += 1
    print(f"stage reached: {dict(stages)}; opened {opened}, refused in a value {refused_later}")
    beyond = sum(n for name, n in stages.items() if name not in ("magic", "version"))
    assert beyond >= 900
    assert all(stages[name] >= 10 for name in ("counts", "metadata", "tensors", "layout", "done"))
    assert opened > 20


def test_what_opens_is_written_again_alike(tmp_path: Path) -> None:
    """Whatever opens of 300 more: its copy says the same."""
    data = small()
    places, rng = Places(data), random.Random(5)
    n = 0
    for _ in range(300):
        if said(tmp_path / "f", mutate(data, places, rng)):
            continue
        n += 1
        with GGUFFile(tmp_path / "f") as file, GGUFWriter(tmp_path / "g") as writer:
            writer.update(file.metadata)
            for name, entry in file.tensors.items():
                writer.add_tensor(name, entry)
            del entry
        with GGUFFile(tmp_path / "f") as file, GGUFFile(tmp_path / "g") as again:
            one, other = ({k: f.metadata.raw(k) for k in f.metadata} for f in (file, again))
            assert one == other  # bytes: NaN is no number that is equal to itself
            said_of = [
                [(t.name, t.type, t.ne) for t in one.tensors.values()] for one in (file, again)
            ]
            assert said_of[0] == said_of[1]
            for name in file.tensors:
                assert np.array_equal(file.tensors[name].data, again.tensors[name].data)
    assert n > 10


def test_mutations_as_ggml_sees_them(tmp_path: Path) -> None:
    """What ggml's own reader opens opens here too, and the same is in it, but for what is told."""
    path = tmp_path / "f"
    data = small(nested=False)
    places, rng = Places(data), random.Random(7)
    both = stricter = 0
    # of the last: a product of dimensions that wraps to zero gets past ggml's own check
    stricter_for = (
        "is no UTF-8|a bool|file's end|expected a name|expected no zero|expected at most|"
        r"fewer than 2\^63 elements"
    )
    for _ in range(400):
        message = said(path, mutate(data, places, rng))
        try:
            native = capi.gguf_init_from_file(path, no_alloc=True)
        except GGMLError:
            continue
        if message:
            assert re.search(stricter_for, message), message
            stricter += 1
        else:
            both += 1
            with GGUFFile(path) as file:
                start = capi.gguf_get_data_offset(native)
                for index, name in enumerate(file.tensors):
                    assert capi.gguf_get_tensor_name(native, index) == name
                    assert capi.gguf_get_tensor_type(native, index) == file.tensors[name].type
                    at = start + capi.gguf_get_tensor_offset(native, index)
                    assert at == file.tensors[name].offset
                assert capi.gguf_get_n_kv(native) == len(file.metadata)
        capi.gguf_free(native)
    print(f"both open {both}, ggml alone {stricter}")
    assert both > 10


def test_random_bytes_behind_a_right_header(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        head = b"GGUF" + struct.pack("<IQQ", 3, rng.integers(3), rng.integers(4))
        words = said(tmp_path / "f", head + rng.bytes(int(rng.integers(300))))
        assert not words or "expected" in words


def test_a_file_that_is_mostly_a_hole(tmp_path: Path) -> None:
    """A large file costs nothing by its size alone."""
    data: Any = make([], [tensor("t", [2**30], 0, 0)])
    path = tmp_path / "f"
    path.write_bytes(data)
    with open(path, "r+b") as out:
        out.truncate(len(data) + 2**32)
    tracemalloc.start()
    with GGUFFile(path) as file:
        assert file.tensors["t"].nbytes == 2**32 and file.tensors["t"].data[-1] == 0
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
