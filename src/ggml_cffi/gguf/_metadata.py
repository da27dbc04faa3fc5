"""The metadata of a GGUF file, as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

import numpy as np
import numpy.typing as npt

from ..enums import gguf_type
from . import _format as fmt
from ._parse import Parser, Value
from ._strings import follow_few


class _Source:
    """The open file that values are read from."""

    def __init__(self, parser: Parser, errors: str) -> None:
        self.parser = parser
        self.errors = errors
        self.closed = False

    @property
    def data(self) -> Any:
        """The map; not to be given to np.ndarray, which would not keep it open: see `whole`."""
        if self.closed:
            raise ValueError("the GGUFFile is closed")
        return self.parser.data

    def whole(self) -> npt.NDArray[np.uint8]:
        """The file as an array, which keeps the map from being closed, as its views do."""
        return np.frombuffer(self.data, np.uint8)

    def value(self, kind: int, at: int, what: str) -> Any:
        """The value that begins at a byte."""
        if kind == fmt.ARRAY:
            return GGUFArray(self, at, what)
        if kind == fmt.STRING:
            return self.text(at, what)
        (number,) = fmt.SCALARS[kind].unpack_from(self.data, at)
        return bool(number) if kind == fmt.BOOL else number

    def text(self, at: int, what: str) -> str:
        data = self.data
        (length,) = fmt.U64.unpack_from(data, at)
        return self._decode(data[at + 8 : at + 8 + length], at + 8, what)

    def _decode(self, text: bytes, at: int, what: str) -> str:
        try:
            return str(text, "utf-8", self.errors)
        except UnicodeDecodeError as error:
            expected = "UTF-8, or errors='surrogateescape'"
            self.parser.fail(at + error.start, what, "is no UTF-8", expected)


class Metadata(Mapping[str, Any]):
    """Keys and values of a GGUF file, in its order; values are read when they are asked for.

    Integers are int, exact at 64 bits, floating point numbers float, bools bool, strings str, and
    arrays `GGUFArray`. Reading a string that is no UTF-8 raises GGUFError, unless the file was
    opened with other `errors`; after the file is closed, all reading raises ValueError.
    """

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._values = source.parser.metadata

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._source.value(value.type, value.start, f"metadata key {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def type(self, key: str) -> gguf_type:
        """The type of a key's value, as the file has it. Raises KeyError for no such key."""
        return gguf_type(self._values[key].type)

    def raw(self, key: str) -> bytes:
        """The bytes of a key's value, as they lie in the file. Raises KeyError for no such key."""
        value: Value = self._values[key]
        return bytes(self._source.data[value.start : value.end])

    def __repr__(self) -> str:
        return f"<Metadata of {len(self)} keys>"


class GGUFArray(Sequence[Any]):
    """An array of a GGUF file's metadata; elements are read when they are asked for.

    An element of an array of arrays is a `GGUFArray`. Equal to a list, a tuple or another one of
    equal elements. Raises as `Metadata` does.
    """

    __hash__: ClassVar[None]  # type: ignore[assignment] # it compares as a list does

    def __init__(self, source: _Source, start: int, what: str) -> None:
        self._source = source
        self._start = start
        self._what = what
        element, self._count = fmt.ARRAY_HEAD.unpack_from(source.data, start)
        self._element = int(element)
        self._begins: Sequence[int] | None = source.parser.strings.get(start)

    @property
    def type(self) -> gguf_type:
        """The type of the elements."""
        return gguf_type(self._element)

    def __len__(self) -> int:
        return int(self._count)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """An element, or a list of those of a slice."""
        if isinstance(index, slice):
            return self._read(range(len(self))[index])
        try:
            at = range(len(self))[index]
        except IndexError:
            raise IndexError(f"index is {index}, the array has {len(self)} elements") from None
        return self._read(range(at, at + 1))[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def tolist(self) -> list[Any]:
        """All elements: much faster than one by one. Those of an array of arrays are lists."""
        found = self._read(range(len(self)))
        return [one.tolist() for one in found] if self._element == fmt.ARRAY else found

    def numpy(self) -> npt.NDArray[Any]:
        """A copy of all elements, of the array's own dtype; of strings dtype object.

        Raises TypeError for an array of arrays.
        """
        if self._element == fmt.ARRAY:
            raise TypeError(f"{self._what} is an array of arrays: take its elements one by one")
        if self._element == fmt.STRING:
            found = np.empty(len(self), object)
            found[:] = self.tolist()
            return found
        numbers: npt.NDArray[Any] = self._numbers(range(len(self))).copy()
        return numbers

    def raw(self) -> bytes:
        """Its bytes as they lie in the file: type and number of the elements, then those."""
        parser = self._source.parser
        end = parser.skip(fmt.ARRAY, self._start, self._what)
        return bytes(self._source.data[self._start : end])

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an array of metadata has to be copied")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (GGUFArray, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<GGUFArray of {len(self)} {fmt.kind_name(self._element)}>"

    # ---- reading

    def _read(self, wanted: range) -> list[Any]:
        if self._element in fmt.SIZES:
            numbers: list[Any] = self._numbers(wanted).tolist()
            return numbers
        begins = self._find()
        if self._element == fmt.ARRAY:
            return [GGUFArray(self._source, begins[i], self._what) for i in wanted]
        if len(wanted) < 64:
            return [self._source.text(int(begins[i]), self._what) for i in wanted]
        return self._texts(begins, wanted)

    def _numbers(self, wanted: range) -> npt.NDArray[Any]:
        dtype, start = fmt.DTYPES[self._element], self._start + fmt.ARRAY_HEAD.size
        data = self._source.data
        if not len(wanted):
            return np.empty(0, dtype)
        if len(wanted) == 1:  # an export of a map of the file for every element would be slow
            begin = start + wanted[0] * dtype.itemsize
            every = found = np.frombuffer(data[begin : begin + dtype.itemsize], dtype)
        else:
            every = np.ndarray((len(self),), dtype, self._source.whole(), start)
            whole = wanted.step == 1
            found = every[wanted.start : wanted.stop] if whole else every[np.asarray(wanted)]
        if self._element == fmt.BOOL and (found > 1).any():
            bad = int(np.flatnonzero(found > 1)[0])
            at, number = start + wanted[bad], int(found[bad])
            del every, found  # the traceback would keep the file open
            self._source.parser.fail(at, self._what, f"is {number}", "0 or 1, a bool")
        return found.view(np.bool_) if self._element == fmt.BOOL else found

    def _find(self) -> Sequence[int]:
        """Where the elements begin, of strings or arrays."""
        if self._begins is None:
            parser, at = self._source.parser, self._start + fmt.ARRAY_HEAD.size
            if self._element == fmt.STRING:
                self._begins = follow_few(self._source.data, at, len(self), parser.size)[0]
            else:
                found = []
                for _ in range(len(self)):
                    found.append(at)
                    at = parser.skip(fmt.ARRAY, at, self._what)
                self._begins = found
        return self._begins

    def _texts(self, begins: Sequence[int], wanted: range) -> list[str]:
        """Many strings at once."""
        starts = np.asarray(begins, np.int64)[np.asarray(wanted)] + 8
        data, errors = self._source.data, self._source.errors
        every = np.ndarray((len(data) - 7,), "<u8", self._source.whole(), strides=(1,))
        lengths = every[starts - 8].astype(np.int64)
        ends = starts + lengths
        first = int(starts.min())
        text = data[first : int(ends.max())]  # slices of bytes are quicker than those of a map
        pairs = zip((starts - first).tolist(), (ends - first).tolist(), strict=True)
        try:
            return [str(text[start:end], "utf-8", errors) for start, end in pairs]
        except UnicodeDecodeError:
            return [self._source.text(int(begins[i]), self._what) for i in wanted]
