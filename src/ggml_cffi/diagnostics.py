"""Counts of what ggml has handed out and what is lost, for tests and for services that run long.

All calls count, those through `lib` and `capi` as well as those of the objects. A type of handle is
called as its struct in C: ``ggml_context``, ``ggml_backend``, ``ggml_backend_buffer`` and so on.
None of these functions raises anything.
"""

from __future__ import annotations

from ._loader import ffi, lib

__all__ = ["caught_aborts", "leaked_handles", "live_handles"]


def live_handles() -> dict[str, int]:
    """Count, by type, the handles that were made for the caller and not freed yet.

    What belongs to another handle (the children of a multi buffer, what a graph copy holds) is
    counted with that one only. A type is listed whether there are any or not.
    """
    return {name: lib.ggml_cffi_live_handles(kind) for kind, name in _kinds()}


def leaked_handles() -> dict[str, int]:
    """Count, by type, the handles that are lost: ggml aborted while it freed them.

    Such a handle must not be used again, and what was not freed of it by then never is. What an
    object needed that stood for it is kept, and stays among the live ones.
    """
    return {name: lib.ggml_cffi_leaked_handles(kind) for kind, name in _kinds()}


def caught_aborts() -> int:
    """Count the aborts of ggml that became exceptions, in this process up to now."""
    return int(lib.ggml_cffi_caught_aborts())


def _kinds() -> list[tuple[int, str]]:
    return [
        (kind, ffi.string(lib.ggml_cffi_handle_name(kind)).decode())
        for kind in range(lib.ggml_cffi_n_handles())
    ]
