"""Reads what stands before the tensors' data: bounded, whatever the bytes are.

No count or length is believed before the file is large enough for it, so that time and memory are
bounded by the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from .. import capi
from ..dtypes import type_name
from ..enums import ggml_type
from ..errors import GGUFError
from . import _format as fmt
from ._strings import StringError, follow

_INT64_MAX = (1 << 63) - 1


class Value(NamedTuple):
    """Where a value lies in the file, and of what type it is."""

    type: int
    start: int
    end: int


class Entry(NamedTuple):
    """What the file says of a tensor; `start` is the byte of the file that its data begins at."""

    type: ggml_type
    ne: tuple[int, ...]
    start: int
    nbytes: int


class Parser:
    """Reads the head of a file from `data`: bytes, or a map of the file.

    `stage` says how far it came: magic, version, counts, metadata, tensors, layout, done.
    """

    def __init__(self, data: Any, size: int, name: str) -> None:
        self.data = data
        self.size = size
        self.name = name
        self.at: int = 0
        self.stage: str = "magic"
        self.version: int = 0
        self.alignment: int = fmt.DEFAULT_ALIGNMENT
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, Entry] = {}
        self.strings: dict[int, Sequence[int]] = {}
        self.data_start: int = 0
        self._n_arrays = 0  # in other arrays

    def run(self) -> None:
        """Read it all. Raises GGUFError for what is wrong."""
        n_tensors, n_keys = self._header()
        self.stage = "metadata"
        for index in range(n_keys):
            self._pair(index)
        self._find_alignment()
        self.stage = "tensors"
        for index in range(n_tensors):
            self._tensor(index)
        self.stage = "layout"
        self._layout()
        self.stage = "done"

    # ---- the parts

    def _header(self) -> tuple[int, int]:
        magic = bytes(self.data[:4])
        if magic != fmt.MAGIC:
            self.fail(0, "the file", f"begins with {magic!r}", f"the magic {fmt.MAGIC!r}")
        self.at = 4
        self.stage = "version"
        version = self._u32("the version")
        if version not in fmt.VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in fmt.VERSIONS:
                self.fail(4, "the file", "is big-endian", "little-endian: it has to be converted")
            self.fail(4, "the version", f"is {version}", "2 or 3")
        self.version = version
        self.stage = "counts"
        n_tensors = self._u64("the number of tensors")
        n_keys = self._u64("the number of metadata keys")
        room = self.size - self.at
        for at, what, n, least in (
            (8, "tensors", n_tensors, 24),
            (16, "metadata keys", n_keys, 14),
        ):
            most = min(room // least, fmt.MAX_COUNT)
            if n > most:
                self.fail(at, f"the number of {what}", f"is {n}", f"at most {most}")
        return n_tensors, n_keys

    def _pair(self, index: int) -> None:
        at = self.at
        key = self._text(f"metadata key {index}", fmt.MAX_KEY)
        what = f"metadata key {key!r}"
        if not key or "\0" in key:
            self.fail(at, f"metadata key {index}", f"is {key!r}", "a name")
        if key in self.metadata:
            self.fail(at, what, "stands there twice", "each key once")
        kind = self._u32(f"the type of {what}")
        start = self.at
        self.at = self.skip(kind, start, what)
        self.metadata[key] = Value(kind, start, self.at)
        if kind == fmt.BOOL and self.data[start] > 1:
            self.fail(start, what, f"is {self.data[start]}", "0 or 1, a bool")

    def _find_alignment(self) -> None:
        value = self.metadata.get(fmt.ALIGNMENT_KEY)
        if value is None:
            return
        what = f"metadata key {fmt.ALIGNMENT_KEY!r}"
        if fmt.kind_name(value.type) != "uint32":
            self.fail(value.start, what, f"is of type {fmt.kind_name(value.type)}", "uint32")
        (self.alignment,) = fmt.U32.unpack_from(self.data, value.start)
        if not self.alignment or self.alignment & (self.alignment - 1):
            self.fail(value.start, what, f"is {self.alignment}", "a power of two")

    def _tensor(self, index: int) -> None:
        at = self.at
        name = self._text(f"the name of tensor {index}", fmt.MAX_NAME)
        what = f"tensor {name!r}"
        if "\0" in name:
            self.fail(at, f"the name of tensor {index}", f"is {name!r}", "no zero in it")
        if name in self.tensors:
            self.fail(at, what, "stands there twice", "each name once")
        at = self.at
        n_dims = self._u32(f"the number of dimensions of {what}")
        if n_dims > fmt.MAX_DIMS:
            self.fail(at, what, f"has {n_dims} dimensions", f"at most {fmt.MAX_DIMS}")
        at = self.at
        ne = tuple(self._u64(f"dimension {i} of {what}") for i in range(n_dims))
        n_elements = 1
        for i, n in enumerate(ne):
            if n > _INT64_MAX:
                self.fail(
                    at + 8 * i, f"dimension {i} of {what}", f"is {n - (1 << 64)}", "0 or more"
                )
            n_elements *= n or 1
        if n_elements >= _INT64_MAX:
            self.fail(at, what, f"has dimensions {list(ne)}", "fewer than 2^63 elements")
        at = self.at
        number = self._u32(f"the type of {what}")
        kind = element_types().get(number)
        if kind is None:
            self.fail(at, what, f"is of type {number}", "a type that ggml has")
        block = capi.ggml_blck_size(kind)
        if (ne[0] if ne else 1) % block:
            row = ne[0] if ne else 1
            self.fail(at, what, f"has rows of {row} of {type_name(kind)}", f"a multiple of {block}")
        count = 0 if 0 in ne else n_elements
        at = self.at
        offset = self._u64(f"the offset of {what}")
        if offset % self.alignment:
            self.fail(at, what, f"has offset {offset}", f"a multiple of {self.alignment}")
        self.tensors[name] = Entry(kind, ne, offset, count // block * capi.ggml_type_size(kind))

    def _layout(self) -> None:
        """Whether the tensors lie in the file, and apart from each other."""
        self.data_start = fmt.padded(self.at, self.alignment)
        if not self.tensors:
            return
        for name, entry in self.tensors.items():
            start = self.data_start + entry.start
            end = start + entry.nbytes
            if end > self.size:
                what = f"the data of tensor {name!r}"
                self.fail(
                    start, what, f"ends at byte {end}", f"at most {self.size}, the file's end"
                )
            self.tensors[name] = entry._replace(start=start)
        before, end = "", 0
        for name in sorted(self.tensors, key=lambda name: self.tensors[name].start):
            entry = self.tensors[name]
            if not entry.nbytes:
                continue
            if entry.start < end:
                what = f"the data of tensor {name!r}"
                self.fail(entry.start, what, f"lies in that of {before!r}", f"byte {end} or later")
            before, end = name, entry.start + entry.nbytes

    # ---- pieces

    def skip(self, kind: int, at: int, what: str, depth: int = 0) -> int:
        """Where a value ends; it fits into the file. Raises GGUFError."""
        size = fmt.SIZES.get(kind)
        if size is not None:
            return self._fits(at, size, what)
        if kind == fmt.STRING:
            return self._string(at, what, fmt.MAX_STRING)[1]
        if kind != fmt.ARRAY:
            self.fail(at - 4, what, f"is of type {kind}", "one of 0 to 12")
        body = self._fits(at, fmt.ARRAY_HEAD.size, what)
        if depth >= fmt.MAX_NESTING:
            self.fail(at, what, "is an array too deep", f"at most {fmt.MAX_NESTING} in each other")
        element, count = fmt.ARRAY_HEAD.unpack_from(self.data, at)
        least = fmt.SIZES.get(element) or {fmt.STRING: 8, fmt.ARRAY: 12}.get(element)
        if least is None:
            self.fail(at, what, f"is an array of type {element}", "one of 0 to 12")
        room = min((self.size - body) // least, fmt.MAX_ARRAY)
        if count > room:
            self.fail(at + 4, what, f"has {count} elements", f"at most {room}")
        if element == fmt.STRING:
            try:
                starts, end = follow(self.data, body, count, self.size)
            except StringError as error:
                has = "has no length" if error.length is None else f"has length {error.length}"
                left = self.size - error.at - 8
                self.fail(error.at, f"string {error.index} of {what}", has, f"at most {left}")
            if starts is not None:
                self.strings[at] = starts
            return end
        if element == fmt.ARRAY:
            self._n_arrays += count if self.stage == "metadata" else 0
            if self._n_arrays > fmt.MAX_COUNT:
                self.fail(at + 4, what, f"has {count} arrays", f"at most {fmt.MAX_COUNT} in all")
            end = body
            for _ in range(count):
                end = self.skip(fmt.ARRAY, end, what, depth + 1)
            return end
        return int(body + count * least)

    def _string(self, at: int, what: str, longest: int) -> tuple[int, int]:
        """Where a string begins and ends."""
        start = self._fits(at, 8, what)
        (length,) = fmt.U64.unpack_from(self.data, at)
        room = min(self.size - start, longest)
        if length > room:
            self.fail(at, what, f"has length {length}", f"at most {room}")
        return start, start + int(length)

    def _text(self, what: str, longest: int) -> str:
        at = self.at
        start, self.at = self._string(at, what, longest)
        try:
            return bytes(self.data[start : self.at]).decode()
        except UnicodeDecodeError as error:
            self.fail(start + error.start, what, "is no UTF-8", "UTF-8")

    def _fits(self, at: int, size: int, what: str) -> int:
        if at + size > self.size:
            self.fail(at, what, f"ends with the file, at byte {self.size}", f"{size} bytes")
        return at + size

    def _u32(self, what: str) -> int:
        return self._number(fmt.U32, what)

    def _u64(self, what: str) -> int:
        return self._number(fmt.U64, what)

    def _number(self, form: struct.Struct, what: str) -> int:
        at = self.at
        self.at = self._fits(at, form.size, what)
        return int(form.unpack_from(self.data, at)[0])

    def fail(self, at: int, what: str, found: str, expected: str) -> NoReturn:
        """Raise GGUFError for what stands at a byte."""
        what, found = (t if len(t) <= 200 else f"{t[:200]}..." for t in (what, found))
        raise GGUFError(f"{self.name}: {what}, at byte {at}, {found}; expected {expected}")


_types: dict[int, ggml_type] = {}


def element_types() -> dict[int, ggml_type]:
    """The types of tensors that ggml has, by number; those that have gone have no block."""
    if not _types:
        known = [kind for kind in ggml_type if not kind.name.endswith("_COUNT")]
        _types.update({int(kind): kind for kind in known if capi.ggml_blck_size(kind)})
    return _types
