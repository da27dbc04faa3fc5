"""Writes GGUF files."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .. import capi, quants
from .._handles import Closing
from .._progress import Progress, Tell, telling
from ..dtypes import (
    as_array,
    castable,
    check_range,
    element_type,
    is_quantized,
    numpy_dtype,
    type_name,
)
from ..enums import ggml_type
from ..errors import GGUFError
from ..tensor import Tensor, raw_bytes
from . import _format as fmt
from ._metadata import Metadata
from ._reader import GGUFTensor
from ._values import encode, text

_SLICE = 1 << 24
"""Bytes that are written at once."""

_HOLE = 1 << 16
"""Bytes of zeros that are worth no memory."""

Source = Callable[[], Iterator[Any]]
"""Gives the bytes of a tensor, piece by piece."""


class _Planned:
    """A tensor that is to be written."""

    def __init__(self, kind: ggml_type, ne: tuple[int, ...], nbytes: int, source: Source) -> None:
        self.kind = kind
        self.ne = ne
        self.nbytes = nbytes
        self.source = source


class GGUFWriter(Closing):
    """Writes a GGUF file when it is closed; until then there is nothing at `path`, or what was.

    `set` and `update` give metadata, `add_tensor` and `add_raw` tensors, in the order that the file
    has them in. What they were given is read when the file is written, not before: so no second
    copy is needed, and arrays, files and contexts must stay as they are until then.

    As a context manager it writes at the end of the block, and nothing after an exception. The file
    is written under another name in the same folder and then renamed: there is never half of one.

    `alignment` of the tensors' data in bytes is a power of two; any but 32 becomes the metadata key
    ``general.alignment``. `version` is 2 or 3, which are laid out alike. The format is that of
    ggml's ``docs/gguf.md``, and files are laid out as ggml writes them.

    Raises ValueError for another alignment or version, FileNotFoundError for no such folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], alignment: int = fmt.DEFAULT_ALIGNMENT, version: int = 3
    ) -> None:
        self.path: Path = Path(path)
        if version not in fmt.VERSIONS:
            raise ValueError(f"version is {version!r}, expected 2 or 3")
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self.path.absolute().parent}")
        self.version = version
        self._metadata: dict[str, tuple[int, bytes]] = {}
        self._tensors: dict[str, _Planned] = {}
        self._alignment = fmt.DEFAULT_ALIGNMENT
        self._closed = False
        if alignment != fmt.DEFAULT_ALIGNMENT:
            self.set(fmt.ALIGNMENT_KEY, alignment, "uint32")

    # ---- metadata

    def set(self, key: str, value: object, type: object = None) -> None:
        """Set a key of the metadata; one that is there keeps its place.

        `type` is a `gguf_type` or its name, such as ``"uint32"``; of an array that of the elements.
        By default NumPy's scalars and arrays and a file's arrays have their own; an int is int32,
        or int64 or uint64 where it has to be, a float is float64, and the elements of a list
        likewise, all of one type. Models want uint32 and float32 for most keys.

        Numbers of a file's `Metadata` are Python's, and do not know their types there: `update`
        keeps those, and so does ``set(key, metadata[key], metadata.type(key))``.

        The format has arrays of arrays, and `GGUFFile` reads them; ggml itself does not, nor what
        opens files through it, llama.cpp among them.

        Raises TypeError for values and types that do not go together, and for an empty list without
        a type (ValueError); ValueError for a number that the type cannot hold, for a key that is
        empty or longer than 65,535 bytes, and for an alignment that is no power of two.
        """
        self._check_open()
        _check_key(key)
        self._put(key, *encode(key, value, type))

    def update(self, metadata: Mapping[str, object]) -> None:
        """Set all keys of a mapping. A file's `Metadata` are copied with their types, exactly.

        Raises as `set` does.
        """
        self._check_open()
        for key in metadata:
            if isinstance(metadata, Metadata):
                self._put(key, metadata.type(key), metadata.raw(key))
            else:
                self.set(key, metadata[key])

    def _put(self, key: str, kind: int, data: bytes) -> None:
        if key == fmt.ALIGNMENT_KEY:
            number = int.from_bytes(data, "little")
            if fmt.kind_name(kind) != "uint32" or not number or number & (number - 1):
                found = f"{number} of type {fmt.kind_name(kind)}"
                raise ValueError(f"{key} is {found}, expected a power of two, uint32")
            self._alignment = number
        self._metadata[key] = (kind, data)

    # ---- tensors

    def add_tensor(
        self,
        name: str,
        data: npt.ArrayLike | Tensor | GGUFTensor,
        type: object = None,
        imatrix: npt.ArrayLike | None = None,
    ) -> None:
        """Add a tensor: an array, a `Tensor`, or one of another file.

        `type` is what `dtypes.element_type` takes. Arrays keep theirs by default, and become others
        by NumPy's casts or by `quantize`, which takes `imatrix`. A `Tensor` and a file's tensor are
        copied as they are; for another `type` give their numbers (``tensor.numpy()``).

        Raises ValueError for a name that is there already or longer than 63 bytes, for more than 4
        axes, and where the last axis is no multiple of the type's block; TypeError for what is no
        array of numbers, OverflowError for integers that `type` cannot hold.
        """
        if isinstance(data, (Tensor, GGUFTensor)):
            if type is not None and element_type(type) != data.type:
                raise TypeError(
                    f"tensor {name!r} is of type {type_name(data.type)}, and is copied as it is: "
                    f"give its numbers to have {type_name(element_type(type))}"
                )
            shape = data.shape
            source = _of_tensor(data) if isinstance(data, Tensor) else _of_bytes(data.data)
            self._plan(name, data.type, shape, source)
            return
        array = as_array(data, f"tensor {name!r}")
        kind = element_type(array.dtype if type is None else type)
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            raise TypeError(f"tensor {name!r} has dtype {array.dtype}, expected real numbers")
        self._plan(name, kind, array.shape, _of_array(array, kind, imatrix))

    def add_raw(
        self,
        name: str,
        data: bytes | bytearray | memoryview | npt.NDArray[Any],
        type: object,
        shape: int | Sequence[int],
    ) -> None:
        """Add a tensor of `type` and NumPy's `shape` by its bytes, any contiguous buffer.

        Raises ValueError where `data` has another number of bytes, and as `add_tensor` does.
        """
        axes = _axes(name, shape)
        buffer: Any = data  # NumPy's arrays are buffers, which their types do not say
        if isinstance(data, np.ndarray):
            as_array(data, f"tensor {name!r}")
        given = memoryview(buffer)
        if "O" in given.format:
            raise TypeError(f"tensor {name!r} has Python objects, expected bytes or numbers")
        kind = element_type(type)
        wanted = _nbytes(name, kind, axes)
        if given.nbytes != wanted:
            raise ValueError(f"tensor {name!r} has {given.nbytes} bytes, expected {wanted}")
        flat = np.frombuffer(given, np.uint8) if wanted else np.empty(0, np.uint8)
        self._plan(name, kind, axes, _of_bytes(flat))

    def _plan(self, name: str, kind: ggml_type, shape: tuple[int, ...], source: Source) -> None:
        self._check_open()
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}, expected a str")
        if len(name.encode()) > fmt.MAX_NAME or "\0" in name:
            raise ValueError(f"name is {name!r}, expected at most {fmt.MAX_NAME} bytes, none zero")
        if name in self._tensors:
            raise ValueError(f"there is a tensor {name!r} already")
        nbytes = _nbytes(name, kind, shape)
        self._tensors[name] = _Planned(kind, tuple(int(n) for n in reversed(shape)), nbytes, source)

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether the file has been written, or given up."""
        return self._closed

    def close(self, progress: Progress = None) -> None:
        """Write the file. Closing twice is fine.

        `progress(done, total)` is called in bytes of the tensors' data. What it raises, and what
        reading a tensor raises, comes out of here: then there is no file, and it is closed. Without
        it there is a bar, as for `GGUFFile.load_into`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._write(progress)
        finally:
            self._metadata, self._tensors = {}, {}  # let go of the arrays

    def discard(self) -> None:
        """Write nothing, and close it."""
        self._closed = True
        self._metadata, self._tensors = {}, {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the GGUFWriter is closed")

    def _write(self, progress: Progress) -> None:
        target = Path(os.path.realpath(self.path))  # a link stays one
        made = target.with_name(f".{target.name[:100]}-{secrets.token_hex(8)}.part")
        try:
            with open(made, "xb") as file:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                head = self._head()
                file.write(head)
                _pad(file, len(head), self._alignment)
                total = sum(tensor.nbytes for tensor in self._tensors.values())
                with telling(total, progress) as tell:
                    self._data(file, total, tell)
                file.flush()
                os.fsync(file.fileno())  # before it has its name: nobody finds half of it there
            os.replace(made, target)
            _sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise

    def _head(self) -> bytes:
        counts = fmt.U64.pack(len(self._tensors)) + fmt.U64.pack(len(self._metadata))
        parts = [fmt.MAGIC, fmt.U32.pack(self.version), counts]
        for key, (kind, data) in self._metadata.items():
            parts += [text(key, "a key"), fmt.U32.pack(kind), data]
        offset = 0
        for name, tensor in self._tensors.items():
            parts += [text(name, "a name"), fmt.U32.pack(len(tensor.ne))]
            parts += [fmt.U64.pack(n) for n in tensor.ne]
            parts += [fmt.U32.pack(tensor.kind), fmt.U64.pack(offset)]
            offset += fmt.padded(tensor.nbytes, self._alignment)
        return b"".join(parts)

    def _data(self, file: BinaryIO, total: int, tell: Tell) -> None:
        done = 0
        for name, tensor in self._tensors.items():
            written = 0
            for piece in tensor.source():
                written += file.write(piece)
                tell(done + written, total)
            if written != tensor.nbytes:
                raise GGUFError(f"tensor {name!r} gave {written} bytes, expected {tensor.nbytes}")
            done += written
            _pad(file, written, self._alignment)

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{len(self._tensors)} tensors"
        return f"<GGUFWriter {self.path}: {what}>"


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise TypeError(f"key is {key!r} ({type(key).__name__}), expected a str")
    if not key or "\0" in key or len(key.encode()) > fmt.MAX_KEY:
        raise ValueError(f"key is {key!r:.200}, expected 1 to {fmt.MAX_KEY} bytes, none zero")


def _sync_folder(folder: Path) -> None:
    """Let the names in it last, where the file system can tell."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _axes(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape that the format can say."""
    try:
        given = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        axes = tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"tensor {name!r}: shape is {shape!r}, expected integers") from None
    if any(n < 0 for n in axes):
        raise ValueError(f"tensor {name!r}: shape is {axes}, expected 0 or more")
    if math.prod(n or 1 for n in axes) >= 2**63 - 1:
        raise ValueError(f"tensor {name!r}: shape is {axes}, which is too large")
    return axes


def _nbytes(name: str, kind: ggml_type, shape: tuple[int, ...]) -> int:
    if len(shape) > fmt.MAX_DIMS:
        raise ValueError(f"tensor {name!r} has shape {shape}, expected at most {fmt.MAX_DIMS} axes")
    block = capi.ggml_blck_size(kind)
    if (shape[-1] if shape else 1) % block:
        raise ValueError(
            f"tensor {name!r} has shape {shape}: its last axis must be a multiple of {block}, a "
            f"block of {type_name(kind)}"
        )
    count = 1
    for n in shape:
        count *= int(n)
    return count // block * capi.ggml_type_size(kind)


def _pad(file: BinaryIO, written: int, alignment: int) -> None:
    """Zeros up to the next multiple of the alignment; a hole where there are many."""
    missing = fmt.padded(written, alignment) - written
    if missing < _HOLE:
        file.write(bytes(missing))
    else:
        file.truncate(file.seek(missing, os.SEEK_CUR))


# ---- where bytes come from


def _of_bytes(data: npt.NDArray[np.uint8]) -> Source:
    def read() -> Iterator[Any]:
        for begin in range(0, len(data), _SLICE):
            yield data[begin : begin + _SLICE]

    return read


def _of_tensor(tensor: Tensor) -> Source:
    handle = tensor.handle
    if not tensor.has_memory and tensor.size:
        raise ValueError(f"{tensor!r} has no memory")
    if not capi.ggml_is_contiguous(handle):
        raise ValueError(f"{tensor!r} is not contiguous: give its numbers")

    def read() -> Iterator[Any]:
        # whole: a meta device cannot read any part
        return _of_bytes(raw_bytes(tensor) if tensor.size else np.empty(0, np.uint8))()

    return read


def _of_array(array: npt.NDArray[Any], kind: ggml_type, imatrix: npt.ArrayLike | None) -> Source:
    if is_quantized(kind):
        if not array.ndim:
            raise ValueError(f"a single number cannot be quantised to {type_name(kind)}")

        def read() -> Iterator[Any]:
            return _of_bytes(quants.quantize(array, kind, imatrix).reshape(-1))()

        return read
    dtype = numpy_dtype(kind)
    assert dtype is not None  # all others are quantised
    if array.dtype != dtype and not castable(array.dtype, dtype, "same_kind"):
        raise TypeError(f"the array has dtype {array.dtype}, which {type_name(kind)} cannot hold")
    check_range(array, dtype, type_name(kind))
    if array.flags.c_contiguous and array.dtype == dtype:
        return _of_bytes(array.reshape(-1).view(np.uint8))

    def read_converted() -> Iterator[Any]:
        return _of_bytes(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8))()

    return read_converted
