"""The enums of ggml as IntEnum classes, under their C tags, with their C enumerators."""

from ._gen.enums import *  # noqa: F403
