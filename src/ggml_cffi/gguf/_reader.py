"""Open GGUF files."""

from __future__ import annotations

import codecs
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import capi, quants
from .._handles import Closing
from ..dtypes import is_quantized, numpy_dtype, type_name
from ..enums import ggml_type
from ..errors import GGUFError
from ._metadata import Metadata, _Source
from ._parse import Entry, Parser

if TYPE_CHECKING:
    from .._progress import Progress
    from ..backend import Backend
    from ..context import Context
    from ..device import Device
    from ..tensor import Tensor


class GGUFFile(Closing):
    """An open GGUF file of version 2 or 3: its metadata, and its tensors by name.

    Nothing is read but what stands before the tensors' data; the rest when it is asked for, from a
    map of the file. Do not change or truncate a file while it is open: reading what is no longer
    there ends the process (SIGBUS). `GGUFWriter` never does that.

    `metadata` is a mapping of Python values, `tensors` one of `GGUFTensor`. `errors` is how strings
    of the metadata that are no UTF-8 are read, as `bytes.decode` has it; ``"surrogateescape"``
    keeps the bytes, and `GGUFWriter` writes them as they were. `name` is the path, `version` that
    of the format, `alignment` what the tensors' data is aligned to, in bytes.

    The format is that of ggml's ``docs/gguf.md``. Raises OSError where the file cannot be opened,
    LookupError for no such `errors`, and GGUFError, with the place and what was expected, where it
    is no valid GGUF file: for big-endian ones too, of which ggml can do nothing.
    """

    def __init__(self, path: str | os.PathLike[str], errors: str = "strict") -> None:
        self.name: str = str(Path(path))
        codecs.lookup_error(errors)
        self._lock = threading.RLock()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._fd = fd
        self._end = weakref.finalize(self, os.close, fd)
        self._end.atexit = False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError(f"{self.name} is no regular file")
            if not status.st_size:
                raise GGUFError(f"{self.name} is empty; expected the magic b'GGUF'")
            self._map = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
            parser = Parser(self._map, status.st_size, self.name)
            try:
                parser.run()
            except BaseException:
                self._map.close()
                raise
        except BaseException:
            self._end()
            raise
        self._source = _Source(parser, errors)
        self.version: int = parser.version
        self.alignment: int = parser.alignment
        self.metadata: Metadata = Metadata(self._source)
        self.tensors: GGUFTensors = GGUFTensors(self._source)

    def load_into(
        self,
        ctx: Context,
        target: Device | Backend | str,
        names: Iterable[str] | Mapping[str, str] | None = None,
        progress: Progress = None,
        buffer_type: str | None = None,
    ) -> dict[str, Tensor]:
        """Make the tensors of these names, all by default, in `ctx`, with memory and numbers.

        A mapping has for each name in `ctx` the one in the file: an embedding that is the output as
        well can be loaded as both, ``{"output.weight": "token_embd.weight", ...}``, to be split
        otherwise as an output. Where they lie in a map of the file, both are the same memory.

        Where the device computes in host memory (the CPU) they lie in a private map of the file:
        nothing is read before it is used, and what is written to them stays in memory. Elsewhere
        they are written in slices, so that there is never a second copy of the whole. They are
        weights; their number of axes is that in the file. The file may be closed afterwards.

        `buffer_type` names another kind of memory than the device's own, as in `Context.allocate`:
        the tensors are copied there, and written as a whole where it keeps weights in an order of
        its own (CPU_REPACK, AMX); `Device.supports_weight` says which it takes.

        `progress(done, total)` is called in bytes, after each slice, or tensor that is mapped; what
        it raises ends the loading. Without it a bar on stderr shows that with tqdm if it is
        installed, stderr is a terminal and it takes over a second; False: never, True: also where
        it is no terminal.

        Raises GGUFError for a name that the file has not, TypeError for what is no Context, device
        or name, MemoryError where there is not enough (AbortError on a meta device, where ggml
        aborts), SplitError where the split function of one fails, ValueError for no such buffer
        type and for a tensor that it does not take. Then `ctx` is as before.
        """
        from ._load import load

        entries = self._entries(names)
        with self._lock:  # a descriptor that is closed meanwhile may soon be another file's
            return load(self._source.data, self._fd, entries, ctx, target, progress, buffer_type)

    def _entries(self, names: Iterable[str] | Mapping[str, str] | None) -> dict[str, Entry]:
        every = self._source.parser.tensors
        if names is None:
            return dict(every)
        if isinstance(names, str):
            raise TypeError(f"names is {names!r}, expected several names")
        wanted = names if isinstance(names, Mapping) else {name: name for name in names}
        for name in (one for pair in wanted.items() for one in pair):
            if not isinstance(name, str):
                raise TypeError(f"names has {name!r} ({type(name).__name__}), expected a str")
        for name in wanted.values():
            if name not in every:
                raise GGUFError(f"{self.name}: there is no tensor {name!r}, which names has")
        return {name: every[source] for name, source in wanted.items()}

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._source.closed

    def close(self) -> None:
        """Close it, after what is being loaded from it. Closing twice is fine.

        Raises BufferError, and stays open, while arrays share memory with it.
        """
        with self._lock:
            try:
                self._map.close()
            except BufferError:
                raise BufferError(
                    f"arrays share the memory of the GGUFFile {self.name}: it stays open"
                ) from None
            self._source.closed = True
            self._end()

    def __repr__(self) -> str:
        what = "closed" if self.closed else f"{len(self.tensors)} tensors"
        return f"<GGUFFile {self.name}: {what}>"


class GGUFTensors(Mapping[str, "GGUFTensor"]):
    """The tensors of a GGUF file by name, in its order."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._entries = source.parser.tensors

    def __getitem__(self, name: str) -> GGUFTensor:
        return GGUFTensor(self._source, name, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"<GGUFTensors: {len(self)}>"


class GGUFTensor:
    """A tensor of a GGUF file: what the file says of it, and its numbers when asked for.

    `ne` is in ggml's order, the innermost axis first, of as many axes as the file has; `shape` is
    in NumPy's. `offset` is the byte of the file that its data begins at, `nbytes` their number.
    """

    __slots__ = ("_entry", "_source", "name")

    def __init__(self, source: _Source, name: str, entry: Entry) -> None:
        self._source = source
        self._entry = entry
        self.name: str = name

    @property
    def type(self) -> ggml_type:
        """The type of its elements."""
        return self._entry.type

    @property
    def ne(self) -> tuple[int, ...]:
        """The number of elements along each axis, the innermost first."""
        return self._entry.ne

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis, the innermost last."""
        return self._entry.ne[::-1]

    @property
    def offset(self) -> int:
        """Where its data begins, in bytes from the file's begin."""
        return self._entry.start

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return self._entry.nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Its bytes, as an array that cannot be written and shares memory with the file's map.

        Raises ValueError once the file is closed.
        """
        start = self._entry.start if self.nbytes else 0
        return self._source.whole()[start : start + self.nbytes]

    def numpy(self, copy: bool | None = None) -> npt.NDArray[Any]:
        """Its numbers, in `shape`: float32 for quantised types, else the dtype of its type.

        Those of quantised types are a copy, all others a view of the file's map that cannot be
        written. ``copy=True`` always copies, ``copy=False`` raises ValueError where it would.

        Raises ValueError once the file is closed, NotSupportedError for the types that ggml cannot
        convert to numbers, and ImportError for bf16 where ml_dtypes is not installed.
        """
        if not is_quantized(self.type):
            view = self.data.view(self._dtype).reshape(self.shape)
            return view.copy() if copy else view
        if copy is False:
            raise ValueError(f"{self!r} is quantised: its numbers have to be copied")
        shape = self.shape or (1,)
        row = shape[-1] // capi.ggml_blck_size(self.type) * capi.ggml_type_size(self.type)
        return quants.dequantize(self.data.reshape(*shape[:-1], row), self.type)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """That of the array that `numpy` gives."""
        return np.dtype(np.float32 if is_quantized(self.type) else numpy_dtype(self.type))

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if dtype is None or np.dtype(dtype) == self._dtype:
            return self.numpy(copy)
        if copy is False:
            raise ValueError(f"{self!r} is not of {np.dtype(dtype)}: it has to be copied")
        return self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"<GGUFTensor {self.name!r} {type_name(self.type)} {self.shape}>"
