"""What a test needs of ggml that not every release has: `needs`, a marker, and `require`.

A need is a fact of the build. Where it is not met the test is reported as "not in this release";
on the release that is the default a need that is not met is a failure.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from ggml_cffi import capi, ffi
from ggml_cffi._gen import build_info

NOT_IN_THIS_RELEASE = "not in this release"

needs = pytest.mark.needs
needs_meta = needs("ggml_backend_meta_device")

_PIN = Path(__file__).parents[1] / "ggml" / "pin.toml"
PINNED = f'ggml = "{build_info.GGML_VERSION}"' in _PIN.read_text(encoding="utf-8")


def has(need: str) -> bool:
    """Whether this build's ggml has it.

    `need` is a function or a constant by its C name; a parameter, ``ggml_ssm_scan(K)``; a field,
    ``struct ggml_backend_meta_split_state.nr``; a library that is linked, ``libggml-cpu``; or, for
    what no declaration tells, the release that brought it and what that is, ``0.15: no bug``.
    """
    if found := re.fullmatch(r"([\d.]+): .+", need):
        return numbers(build_info.GGML_VERSION) >= numbers(found[1])
    if found := re.fullmatch(r"(\w+)\((\w+)\)", need):
        return has(found[1]) and found[2] in inspect.signature(getattr(capi, found[1])).parameters
    if found := re.fullmatch(r"(struct \w+)\.(\w+)", need):
        try:
            struct = ffi.typeof(found[1])
        except ffi.error:
            return False
        return found[2] in dict(struct.fields or ())
    if need.startswith("lib"):
        return need[3:] in build_info.LIBRARIES
    assert re.fullmatch(r"\w+", need), need
    return need in capi.__coverage__.bound or (need.startswith("GGML_") and hasattr(capi, need))


def require(*needs: str) -> None:
    """Leave the test, as one that is not in this release, unless it has all of `needs`."""
    missing = [need for need in needs if not has(need)]
    if missing and PINNED:
        pytest.fail(f"the pinned release must have it: {', '.join(missing)}")
    if missing:
        not_here(missing[-1])  # what is said of the whole module comes last


def not_here(what: str) -> None:
    """Leave the test: this release, which is not the pinned one, is not known to have `what`."""
    assert not PINNED
    pytest.skip(f"{NOT_IN_THIS_RELEASE} (ggml {build_info.GGML_VERSION}): {what}")


def numbers(version: str) -> tuple[int, ...]:
    """A version that can be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
