"""The C API of ggml, thin: every bound function under its C name, with enums and constants.

A call that fails raises: an abort of ggml is an `AbortError`, a failed ``ggml_status`` a
`StatusError`, NULL from a function that may fail a `GGMLError` with the reason, NULL or None for an
argument that may not be NULL a ValueError. Pointers are opaque cffi cdata and yours to free: using
one after its free, or freeing it twice, is not caught at this level. Freeing a backend, scheduler,
plan, thread pool or optimiser inside a computation that uses it, from a callback, is a ValueError.
A ggml context, and what is made in it, is for one thread at a time, and so is computing on a
backend or with a scheduler: a lock of yours keeps others out meanwhile. Without one, the behaviour
is undefined, as in C: wrong numbers, or the end of the process. Every call releases the GIL.

Where C takes an array and its length, Python gives a sequence; what C writes through a pointer is
returned; a struct by value is made from keywords; a callback is a Python function.
NumPy arrays that are written to a tensor, or read from one, must be of its type, or of raw bytes.
`__coverage__` says what of the headers is bound.

The last line of a docstring names the function's guard class: after an abort inside a ``throw``
function everything goes on; inside a ``compute`` one too if a single thread computes, with more the
process ends, with ggml's message and Python's traceback (docs/limits.md); a ``nothrow`` function
frees, and what it could not free is lost.
"""

# isort: off - what is written by hand stands for what is generated
from ._family import *  # noqa: F403
from ._gen.capi import *  # noqa: F403
from ._gen.capi import __coverage__ as __coverage__
from ._overrides import *  # noqa: F403

# isort: on

# For help(), which lists only these; type checkers read the imports.
globals()["__all__"] = sorted(name for name in globals() if not name.startswith("_"))
