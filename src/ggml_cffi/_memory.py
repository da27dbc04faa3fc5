"""Memory that ggml could not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import capi
from .errors import GGMLError, StatusMemoryError


@contextlib.contextmanager
def raises_memory_error() -> Iterator[None]:
    """Around an allocation: ggml's NULL or false, which has no other reason there."""
    try:
        yield
    except GGMLError as error:
        if type(error) is not GGMLError:
            raise
        raise StatusMemoryError(str(error), capi.GGML_STATUS_ALLOC_FAILED) from None
