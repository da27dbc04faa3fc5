"""GGUF files, the format in which models for ggml are kept: reading, loading and writing.

The format is described in ggml's ``docs/gguf.md``. `GGUFFile` reads versions 2 and 3, `GGUFWriter`
writes them. Files may come from anybody: whatever is wrong with one raises `GGUFError`.
"""

from ..errors import GGUFError
from ._metadata import GGUFArray, Metadata
from ._reader import GGUFFile, GGUFTensor, GGUFTensors
from ._writer import GGUFWriter

__all__ = [
    "GGUFArray",
    "GGUFError",
    "GGUFFile",
    "GGUFTensor",
    "GGUFTensors",
    "GGUFWriter",
    "Metadata",
]
