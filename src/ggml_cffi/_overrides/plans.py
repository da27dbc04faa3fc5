"""Computing with a plan of one's own: a callback inside a struct."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _runtime
from .._callbacks import Attached
from .._gen import enums
from .._handles import raw
from .._loader import ffi
from ._base import bound, call

if TYPE_CHECKING:
    from .._gen import types

_GRAPH = "struct ggml_cgraph *"
_PLAN = "struct ggml_cplan *"


@bound
def ggml_graph_compute(
    cgraph: types.ggml_cgraph,
    cplan: types.ggml_cplan,
    abort_callback: Callable[[], bool] | types.FunctionP | None = None,
) -> enums.ggml_status:
    """Compute a graph as its plan says, a struct or a pointer to one.

    `abort_callback` is asked between the nodes of the graph, on this thread, and stops the
    computation with True, which raises StatusError; None: that of the plan is. It is kept for the
    call.
    """
    function = "ggml_graph_compute"
    graph = raw(cgraph, _GRAPH, f"{function}: cgraph")
    plan = raw(_runtime.reference(cplan, False), _PLAN, f"{function}: cplan")
    if abort_callback is None:
        return _computed(function, graph, plan)
    with Attached() as attached:
        mine: Any = ffi.new(_PLAN, plan[0])
        mine.abort_callback, mine.abort_callback_data = attached.add(
            "ggml_abort_callback", abort_callback, "call", None, function, "abort_callback", None
        )
        return _computed(function, graph, mine)


def _computed(function: str, graph: Any, plan: Any) -> enums.ggml_status:
    return enums.ggml_status(call(function, graph, plan))
