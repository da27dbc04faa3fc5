"""Where ggml would end the process: `SITES` has one small function for each assertion of ggml.

Which line an assertion is on is up to the ggml that runs: only what is said of the pinned release
names lines.
"""

from __future__ import annotations

from . import building, files, memory, scheduling, splits, training
from ._site import AREAS, SITES, Site, guard_class
from .splits import ROWS

__all__ = ["AREAS", "ROWS", "SITES", "Site", "guard_class"]

_MODULES = (building, files, memory, scheduling, splits, training)  # which fill SITES
