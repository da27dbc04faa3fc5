"""The operations of ggml on tensors: all that the C API builds, and some that NumPy's users know.

Names are ggml's without the prefix. Shapes in their docstrings are ggml's too, and so are the axes
and lengths that they take: the innermost axis first. The constants that docstrings name, such as
GGML_ROPE_TYPE_NEOX, are in `capi`.
"""

from __future__ import annotations

from ._custom import custom
from ._gen import ops as _generated
from ._gen.ops import *  # noqa: F403

__all__ = ["custom"]
__all__ += _generated.__all__
