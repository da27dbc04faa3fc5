"""The types of `ffi` and `lib`, cffi's raw level, as far as a type checker can know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ._gen.types import Handle, ReadableBuffer, VoidP


class CType(Protocol):
    """A C type."""

    @property
    def cname(self) -> str:
        """C's spelling."""
        ...

    @property
    def kind(self) -> str:
        """One of primitive, bool, enum, pointer, array, struct, union, function, void."""
        ...


class FFI(Protocol):
    """What of cffi's FFI object is of use here; cffi's documentation has the rest."""

    @property
    def NULL(self) -> VoidP:
        """The null pointer."""
        ...

    def new(self, cdecl: str, init: object = None) -> Any:
        """Allocate C memory, owned by the result."""
        ...

    def cast(self, cdecl: str, value: object) -> Any:
        """Convert a value or a pointer as C does."""
        ...

    def string(self, cdata: Handle, maxlen: int = -1) -> bytes:
        """Copy a C string."""
        ...

    def buffer(self, cdata: Handle, size: int = -1) -> memoryview:
        """Give the memory behind a pointer."""
        ...

    def from_buffer(
        self, cdecl: str, buffer: ReadableBuffer, require_writable: bool = False
    ) -> Handle:
        """Give the address of an object's memory, and keep it alive."""
        ...

    def typeof(self, value: object) -> CType:
        """Give the C type of a value or of a name."""
        ...

    def sizeof(self, value: object) -> int:
        """Count the bytes of a type or a value."""
        ...

    def addressof(self, value: object, *fields: str | int) -> Handle:
        """Give a pointer to a struct, one of its fields, or a function of `lib`."""
        ...


class Lib(Protocol):
    """All bound functions, constants and enumerators, as cffi has them.

    Every call is guarded: one that fails gives zero, and the error stays with the thread until the
    next guarded call. `ggml_cffi.capi` raises instead.
    """

    def __getattr__(self, name: str) -> Callable[..., object]: ...
