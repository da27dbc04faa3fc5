"""Tensors: n-dimensional arrays of ggml's, as NumPy's neighbours."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from . import capi, quants
from ._handles import address, holding
from ._loader import ffi, lib, tensor_class
from ._placement import is_reordered
from .capi import types
from .context import Context
from .dtypes import as_array, castable, check_range, is_quantized, numpy_dtype, type_name
from .enums import ggml_op, ggml_type

if TYPE_CHECKING:

    class _Base:
        """What C++ has at hand of a tensor (ggml/building.hpp)."""

        _handle: types.ggml_tensor
        _context: Context
        _room: object  # the context's lock
        _ndim: int
        # what ggml has of it; ValueError where it is freed, whatever other threads do
        _ne: tuple[int, int, int, int]
        _nb: tuple[int, int, int, int]
        _kind: int
        _made_by: int
        _label: bytes
        _has_place: bool

        def _again(self) -> npt.NDArray[Any] | None:
            """Another view of the array that was remembered, None where that has gone."""

        def _remember(self, views: dict[int, object], array: npt.NDArray[Any], /) -> None:
            """Put an array that shares the tensor's memory there, for as long as this object is."""

else:
    from ._loader import TensorBase as _Base

__all__ = ["Tensor"]

_BF16 = ggml_type.GGML_TYPE_BF16


class Tensor(_Base):
    """A tensor of a context: numbers, or the result of an operation that is yet to be computed.

    `shape` is in NumPy's order, the innermost axis last, `ne` in ggml's. A tensor keeps its context
    alive. Two objects may stand for the same tensor: they are equal then.
    """

    __slots__ = ("__weakref__",)
    __array_ufunc__ = None  # NumPy's operators leave it to ours

    def __init__(
        self, handle: types.ggml_tensor, context: Context, ndim: int | None = None
    ) -> None:
        self._handle = handle
        self._context = context
        self._room = context._lock  # where building.hpp makes what it is an operand of
        self._ndim = n_dims(handle) if ndim is None else ndim

    # ---- what it is

    @property
    def _address(self) -> int:
        return address(self._handle)

    @property
    def handle(self) -> types.ggml_tensor:
        """The pointer, for `capi`. Raises ValueError once the context is closed."""
        self._check_open()
        return self._handle

    @property
    def context(self) -> Context:
        """Where it is described."""
        return self._context

    @property
    def name(self) -> str:
        """Its name, which may be empty; at most 63 bytes of UTF-8."""
        self._check_open()
        return self._label.decode("utf-8", "surrogateescape")

    @name.setter
    def name(self, name: str) -> None:
        with self._held():
            capi.ggml_set_name(self.handle, name)

    @property
    def type(self) -> ggml_type:
        """The type of its elements."""
        self._check_open()
        return ggml_type(self._kind)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array that `numpy` gives: float32 for quantised types."""
        self._check_open()
        return _dtype(self._kind)

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """The number of elements along each of ggml's four axes, the innermost first."""
        self._check_open()
        return self._ne

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis, the innermost last."""
        self._check_open()
        return outer_first(self._ne, self._ndim)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.ne)

    @property
    def nbytes(self) -> int:
        """The bytes from its first element to its last."""
        with self._held():
            return capi.ggml_nbytes(self.handle)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from an element to the next along each axis.

        Along the last axis of a quantised tensor from a block to the next.
        """
        self._check_open()
        return outer_first(self._nb, self._ndim)

    @property
    def op(self) -> ggml_op:
        """The operation that makes it; GGML_OP_NONE for what is no result."""
        self._check_open()
        return ggml_op(self._made_by)

    @property
    def has_memory(self) -> bool:
        """Whether it has memory, for numbers to be read and written; an empty one needs none."""
        return not self.size or self._has_place

    @property
    def shares_memory(self) -> bool:
        """Whether `numpy` gives a view: of host memory it does, if that is not quantised."""
        with self._held():
            return _shares_memory(self.handle)

    def _check_open(self) -> None:
        if self._context.closed:
            raise ValueError("the Tensor's Context is closed")

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """While it stays, should another thread close the context."""
        self._check_open()
        home: object = self._context
        return holding((home,)) if isinstance(home, Context) else contextlib.nullcontext()

    # ---- operations

    @property
    def T(self) -> Tensor:
        """The last two axes exchanged, as a view; a tensor of one axis stays as it is.

        Blocks cannot be turned: of a quantised tensor it is the transpose of its numbers as
        float32, but ``x @ w.T`` uses the quantised tensor itself.
        """
        from . import ops

        if self._ndim < 2:
            return self
        quantized = is_quantized(self.type)
        return ops.transpose(ops.cast(self, ggml_type.GGML_TYPE_F32) if quantized else self)

    def __getitem__(self, key: object) -> Tensor:
        """A view of a part of it, by NumPy's basic indexing.

        Raises IndexError for an index out of range or too many, TypeError for arrays and lists
        (`ops.get_rows` takes rows), ValueError for steps and parts of blocks that ggml cannot view.
        """
        from ._indexing import index

        return index(self, key)

    def __add__(self, other: object) -> Any:
        return _binary("add", self, other)

    def __radd__(self, other: object) -> Any:
        return _binary("add", other, self)

    def __sub__(self, other: object) -> Any:
        return _binary("sub", self, other)

    def __rsub__(self, other: object) -> Any:
        return _binary("sub", other, self)

    def __mul__(self, other: object) -> Any:
        return _binary("mul", self, other)

    def __rmul__(self, other: object) -> Any:
        return _binary("mul", other, self)

    def __truediv__(self, other: object) -> Any:
        return _binary("div", self, other)

    def __rtruediv__(self, other: object) -> Any:
        return _binary("div", other, self)

    def __matmul__(self, other: object) -> Any:
        from ._arithmetic import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: object) -> Any:
        from ._arithmetic import matmul

        return matmul(other, self)

    def __neg__(self) -> Tensor:
        from ._arithmetic import negative

        return negative(self)

    # ---- numbers

    def numpy(self, copy: bool | None = None) -> npt.NDArray[Any]:
        """The numbers as an array of `shape` and `dtype`.

        A view that shares its memory where it can be (`shares_memory`), with the tensor's strides;
        else a copy. ``copy=True`` always copies, ``copy=False`` raises ValueError where it would.

        Raises ValueError for a tensor that has no memory (an input that is not allocated, a result
        that is no output of a compiled graph), for weights in memory that keeps them in an order of
        its own (CPU_REPACK, AMX), and for what ggml cannot read of a meta device's: what each
        device has an addend of (PARTIAL). A part of a tensor that is cut takes the reading of all
        slices across the cut that it lies in.
        """
        view = self._again()
        if view is None:
            view = _view(self)
        if view is not None:
            return view.copy() if copy else view
        if copy is False:
            raise ValueError(f"{self!r} shares no memory with NumPy: it has to be copied")
        return _read(self)

    def set(self, array: npt.ArrayLike, casting: str = "same_kind") -> None:
        """Write numbers: an array of the same shape, of any layout and byte order.

        Another dtype is converted as NumPy's `casting` allows; a quantised tensor takes real
        numbers. The tensor's shape may have more axes of length 1 in front. A quantised tensor
        takes its blocks as well, as they are: uint8 of shape ``(..., bytes of a row)``, as
        `quantize` gives them, or all in one row, as `GGUFTensor.data` does.

        Integers must be in the range of the tensor's type, but with ``casting="unsafe"``: then they
        wrap as NumPy's do. Floats that are too large become infinite, with NumPy's RuntimeWarning.

        A part of a meta device's tensor that ggml cannot write by itself is written with what is
        around it, which is read before: nothing else of this package writes there meanwhile.

        Raises ValueError for another shape, for a tensor without memory and for a part of what each
        device has an addend of (PARTIAL), TypeError for a dtype that cannot be converted,
        OverflowError for integers out of range; then nothing is written.
        """
        self._store(check_numbers(self, as_array(array), casting))

    def _store(self, numbers: npt.NDArray[Any]) -> None:
        """Write what `check_numbers` has looked at."""
        check_memory(self)
        view = self._again()
        if view is None:
            view = _view(self)
        if view is not None:
            view[...] = numbers
        else:
            with self._held():
                write(self, numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if dtype is None or np.dtype(dtype) == self.dtype:
            return self.numpy(copy)
        if copy is False:
            raise ValueError(f"{self!r} is not of {np.dtype(dtype)}: it has to be copied")
        return self.numpy().astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """The numbers as a capsule of the DLPack protocol; shares memory where `numpy` does.

        Takes the protocol's keywords. Raises BufferError where the memory cannot be shared and
        ``copy=False`` asks for it, and what `numpy` raises.
        """
        from ._dlpack import give

        copy = kwargs.pop("copy", None)
        if copy is False and not self.shares_memory and self.size:
            raise BufferError(f"{self!r} shares no memory: it has to be copied")
        return give(self.numpy(copy or None), **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where the numbers of the capsule are: in the CPU's memory."""
        return 1, 0

    def __setitem__(self, key: object, value: npt.ArrayLike) -> None:
        """Write numbers into a part, which they are broadcast to, as `set` of the part does.

        Nothing is left in the Context, which keeps the description of each ``tensor[key]`` until it
        is closed. Raises what indexing and `set` raise; TypeError for a Tensor, which graphs write
        (`ops.cpy`, `ops.set_rows`).
        """
        from ._indexing import assign

        assign(self, key, value)

    def __len__(self) -> int:
        if not self._ndim:
            raise TypeError("the Tensor has no axis")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        """Views of its parts along the first axis."""
        return (self[i] for i in range(len(self)))

    def __contains__(self, value: object) -> NoReturn:
        raise TypeError(f"{self!r} is not searched: look in its numpy()")

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self!r} is neither true nor false: look at its numpy(), or for None")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self._address == other._address

    def __hash__(self) -> int:
        return hash(self._address)

    def __repr__(self) -> str:
        if self._context.closed:
            return "<Tensor of a closed Context>"
        name = f" {self.name!r}" if self.name else ""
        op = "" if self.op == ggml_op.GGML_OP_NONE else f" by {capi.ggml_op_name(self.op)}"
        return f"<Tensor{name} {type_name(self.type)} {self.shape}{op}>"


_POINTER = ffi.typeof("struct ggml_tensor *")
tensor_class(Tensor, _POINTER, ffi.cast(_POINTER, ffi.NULL))


def _binary(name: str, left: object, right: object) -> Any:
    from ._arithmetic import binary

    return binary(name, left, right)


#: As many axes as it takes to tell the shape, those of no elements too; none for a single number.
n_axes: Callable[[Any], int] = lib.ggml_cffi_n_axes


def n_dims(handle: Any) -> int:
    """As `n_axes`, but that a single number has one, as ggml counts."""
    return n_axes(handle) or 1


# ---- memory


def _root(handle: Any) -> Any:
    return handle.view_src or handle


def _buffer(handle: Any) -> Any:
    return _root(handle).buffer


def outer_first(of_axes: Iterable[int], n: int) -> tuple[int, ...]:
    """What ggml says of each axis, in NumPy's order; `n` axes."""
    return tuple(reversed(list(of_axes)[:n]))


@functools.cache
def _dtype(kind: int) -> np.dtype[Any]:
    """That of the array which the numbers of a type come in."""
    found = None if is_quantized(kind) else numpy_dtype(kind)
    return np.dtype(np.float32) if found is None else found


_HAS_META = hasattr(lib, "ggml_backend_buffer_is_meta")  # some releases have no meta devices


def is_meta(buffer: Any) -> bool:
    """Whether a buffer is a meta device's."""
    return _HAS_META and capi.ggml_backend_buffer_is_meta(buffer)


def _shares_memory(handle: Any) -> bool:
    buffer = _buffer(handle)
    return bool(
        handle.data
        and buffer
        and capi.ggml_backend_buffer_is_host(buffer)
        and not is_meta(buffer)
        and not is_quantized(handle.type)
    )


def is_without_memory(handle: Any) -> bool:
    """Whether a tensor, or what it is a view of, has yet to be allocated."""
    return not _buffer(handle) and not handle.data


def _why_none(tensor: Tensor) -> str:
    if tensor.op == ggml_op.GGML_OP_NONE:
        context = tensor._context
        if context._has_input(tensor):
            return "it is an input of graphs, which are given its numbers at each run"
        kind = "a constant" if tensor._address in context._pending else "an input"
        return f"Context.allocate gives it some; without, it is {kind} of the graphs that it is in"
    return "it is a result; those of a compiled graph are read as the graph's outputs"


def check_numbers(tensor: Tensor, numbers: npt.NDArray[Any], casting: str) -> npt.NDArray[Any]:
    """The numbers in the tensor's shape. Raises what `Tensor.set` says of those that do not fit."""
    wanted = tensor.shape
    given = numbers.shape
    extra = len(given) - len(wanted)
    short = given[max(extra, 0) :] if all(n == 1 for n in given[: max(extra, 0)]) else given
    padded = (1,) * (len(wanted) - len(short)) + short
    if padded != wanted:
        told = ""
        if numbers.dtype == np.uint8 and is_quantized(tensor.type):
            rows = blocks_shape(tensor.type, wanted)
            if given in (rows, (math.prod(rows),)):
                return numbers.reshape(rows)
            told = f", or {rows} of its blocks"
        raise ValueError(f"the array has shape {given}, expected {wanted} of {tensor!r}{told}")
    check_cast(tensor, numbers, casting)
    return numbers.reshape(wanted)


def check_cast(tensor: Tensor, numbers: npt.NDArray[Any], casting: str = "same_kind") -> None:
    """Raise what `Tensor.set` says of a dtype, or of integers, that do not fit."""
    kind = tensor.dtype
    if not castable(numbers.dtype, kind, casting):
        raise TypeError(
            f"the array has dtype {numbers.dtype}, which cannot be cast to {kind} of {tensor!r} "
            f"with casting={casting!r}"
        )
    if casting != "unsafe":
        check_range(numbers, kind, tensor)


def _view(tensor: Tensor) -> npt.NDArray[Any] | None:
    """An array that shares the tensor's memory, and keeps its context open; None where none can."""
    context = tensor._context
    with context._lock:
        handle, ndim = tensor.handle, tensor._ndim
        if not _shares_memory(handle):
            return None
        dtype, shape = _dtype(handle.type), outer_first(handle.ne, ndim)
        nbytes = capi.ggml_nbytes(handle)
        if not nbytes or 0 in shape:
            return np.empty(shape, dtype)
        # it refers to what owns the memory, not to the object that stands for that: a circle that
        # goes through an array is one that Python's collector cannot see
        context._lent.begin()  # first: an interrupt in between lets memory stay, and frees none
        try:
            lease = ffi.gc(handle.data, context._lent.end)
        except MemoryError:  # not after an interrupt: a lease that is there by then ends by itself
            context._lent.end()
            raise
        memory, strides = ffi.buffer(lease, nbytes), outer_first(handle.nb, ndim)
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, 0, strides)
        tensor._remember(context._lent.views, array)
        view: npt.NDArray[Any] = array.view()
        return view


def _blocks(tensor: Tensor, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The numbers in the bytes from the tensor's first element to its last."""
    kind, shape, strides = tensor.type, tensor.shape or (1,), tensor.strides or (0,)
    if not is_quantized(kind):
        dtype = np.dtype("u2") if kind == _BF16 else tensor.dtype
        numbers = np.ndarray(tensor.shape, dtype, data, strides=tensor.strides)
        copied: npt.NDArray[Any] = numbers.view(tensor.dtype).copy()
        return copied
    return quants.dequantize(block_rows(kind, shape, strides, data), kind)


def block_rows(
    kind: ggml_type, shape: tuple[int, ...], strides: tuple[int, ...], data: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """The rows of a quantised tensor as bytes, in the memory from its first element on."""
    rows: npt.NDArray[np.uint8] = np.ndarray(
        blocks_shape(kind, shape), np.uint8, data, strides=(*strides[:-1], 1)
    )
    return rows


def blocks_shape(kind: ggml_type, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in bytes of a quantised tensor."""
    row = shape[-1] // capi.ggml_blck_size(kind) * capi.ggml_type_size(kind)
    return (*shape[:-1], row)


def check_readable(tensor: Tensor) -> None:
    """Raise ValueError for a weight in memory that keeps it in an order of its own."""
    if is_reordered(tensor.handle):
        kind = capi.ggml_backend_buffer_name(_buffer(tensor.handle))
        raise ValueError(f"{tensor!r} cannot be read: {kind} keeps it in an order of its own")


def check_memory(tensor: Tensor) -> None:
    """Raise ValueError for a tensor that has no memory, and say why it has none."""
    if not tensor.has_memory:
        raise ValueError(f"{tensor!r} has no memory: {_why_none(tensor)}")


def _read(tensor: Tensor) -> npt.NDArray[Any]:
    with tensor._held():
        check_memory(tensor)
        if not tensor.size:
            return np.empty(tensor.shape, tensor.dtype)
        return _blocks(tensor, raw_bytes(tensor))


def raw_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes from the first element to the last of a tensor with memory that is not empty."""
    if is_meta(_buffer(tensor.handle)):
        from .meta import _parts

        return _parts.read(tensor)
    check_readable(tensor)
    data = np.empty(tensor.nbytes, np.uint8)
    capi.ggml_backend_tensor_get(tensor.handle, data, 0)
    return data


def _encode(tensor: Tensor, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of the tensor's rows, one after the other."""
    if is_quantized(tensor.type):
        if numbers.dtype == np.uint8 and numbers.shape != tensor.shape:
            return numbers  # blocks, as `check_numbers` has them
        return quants.quantize(np.atleast_1d(numbers), tensor.type)
    return np.ascontiguousarray(numbers, tensor.dtype).reshape(-1).view(np.uint8)


def _put(tensor: Tensor, data: npt.NDArray[np.uint8], memory: npt.NDArray[np.uint8]) -> None:
    """Put the bytes of the rows where they belong in the memory from the first element on."""
    kind, shape, strides = tensor.type, tensor.shape, tensor.strides
    if is_quantized(kind):
        rows = block_rows(kind, shape or (1,), strides or (0,), memory)
        rows[...] = data.reshape(rows.shape)
    else:
        dtype = np.dtype("u2") if kind == _BF16 else tensor.dtype
        numbers: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, strides=strides)
        numbers[...] = data.view(dtype).reshape(shape)


def write(tensor: Tensor, numbers: npt.NDArray[Any]) -> None:
    """Write numbers of the tensor's shape into memory that is not shared with NumPy."""
    if not tensor.size:
        return
    if is_meta(_buffer(tensor.handle)):
        from .meta import _parts

        data = np.ascontiguousarray(_encode(tensor, numbers)).reshape(-1)
        _parts.write(tensor, data, lambda memory: _put(tensor, data, memory))
        return
    if tensor.handle.view_src and is_reordered(tensor.handle):
        kind = capi.ggml_backend_buffer_name(_buffer(tensor.handle))
        raise ValueError(f"{tensor!r} is a part of a weight that {kind} takes as a whole")
    data = _encode(tensor, numbers)
    if capi.ggml_is_contiguous(tensor.handle):
        capi.ggml_backend_tensor_set(tensor.handle, np.ascontiguousarray(data), 0)
        return
    row = data.reshape(-1, data.size // max(1, math.prod(tensor.ne[1:])))
    if tensor.strides[-1] != capi.ggml_type_size(tensor.type):
        raise ValueError(f"{tensor!r}: only in host memory can rows be written that are apart")
    _, *outer = tensor.ne
    _, *steps = tensor.handle.nb
    for line, index in zip(row, np.ndindex(*reversed(outer)), strict=True):
        offset = sum(i * step for i, step in zip(reversed(index), steps, strict=True))
        capi.ggml_backend_tensor_set(tensor.handle, np.ascontiguousarray(line), offset, line.size)
