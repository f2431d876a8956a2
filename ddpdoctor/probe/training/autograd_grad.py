"""Which nodes of the graph `torch.autograd.grad(..., create_graph=True)` created. Their operations
are no line of the user's; the line of the call stands for them.

Nodes are recognised by torch's sequence numbers, which rise in order of creation.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ..recording.recorder import Recorder
from ..recording.torch_compat import graph, node_number, saved
from ..recording.watcher import Args, Kwargs, Watcher
from .limits import GRAD_CALLS_KEPT


class NodeRange(NamedTuple):
    """The nodes from number `first` to before `end` were created by a call at `site`."""

    first: int
    end: int
    site: int


class AutogradGrad(Watcher):
    lost = "nodes that `torch.autograd.grad` created"

    def __init__(self) -> None:
        self._ranges: deque[NodeRange] = deque(maxlen=GRAD_CALLS_KEPT)

    def ends(self, recorder: Recorder, first: int) -> None:
        """After the call: remember the nodes that it created."""
        if first >= 0:
            self._ranges.append(NodeRange(first, graph.next_number(), recorder.site()))

    def site_of(self, node: Any) -> int:
        """The site of the call that created a node; -1 for nodes of a forward."""
        number = node_number(node)
        return next((t.site for t in reversed(self._ranges) if t.first <= number < t.end), -1)


def begins(args: Args, kwargs: Kwargs) -> int:
    """Before a call of `torch.autograd.grad`: the number of the next node, to be passed to `ends`;
    -1 if the call creates no graph."""
    creates = args[4] if len(args) > 4 else kwargs.get("create_graph")
    return graph.next_number() if creates else -1


def singular(node: Any) -> str:
    """The operation of a node (`sqrt`, say) if its input has a value at which the derivative is not
    finite; else empty."""
    kind = type(node).__name__.rstrip("0123456789").removesuffix("Backward").lower()
    try:
        if kind == "sqrt":
            found = (saved(node, "_saved_result") == 0).any()
        elif kind == "pow":
            exponent = saved(node, "_saved_exponent")
            found = exponent < 1 and (saved(node, "_saved_self") == 0).any()
        elif kind == "atan2":
            both = saved(node, "_saved_self"), saved(node, "_saved_other")
            found = ((both[0] == 0) & (both[1] == 0)).any()
        elif kind in ("acos", "asin"):
            found = (saved(node, "_saved_self").abs() == 1).any()
        else:
            return ""
    except (LookupError, AttributeError, RuntimeError, TypeError):  # a tensor as exponent, say
        return ""
    return kind if bool(found) else ""
