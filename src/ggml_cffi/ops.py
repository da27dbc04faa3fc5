"""The operations of ggml on tensors: all that the C API builds, and some that NumPy's users know.

Names are ggml's without the prefix; so are shapes in their docstrings: the innermost axis first.
"""

from __future__ import annotations

from ._custom import custom
from ._gen import ops as _generated
from ._gen.ops import *  # noqa: F403

__all__ = ["custom"]
__all__ += _generated.__all__
