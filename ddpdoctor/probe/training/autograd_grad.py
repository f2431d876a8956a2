"""Parts of the graph that `torch.autograd.grad(..., create_graph=True)` made: no line of the user's
stands for their operations. Nodes are told apart by torch's numbers, which rise as they are made.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ..recording.recorder import Recorder
from ..recording.torch_compat import graph, node_number, saved

MOST = 64


class NodeRange(NamedTuple):
    """Nodes from number `first` to before `end` were made by a call at `site`."""

    first: int
    end: int
    site: int


_ranges: deque[NodeRange] = deque(maxlen=MOST)


def forget() -> None:
    _ranges.clear()


def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Before a call of `torch.autograd.grad`: what `ends` wants to know of it."""
    creates = args[4] if len(args) > 4 else kwargs.get("create_graph")
    return graph.next_number() if creates else -1


def ends(recorder: Recorder, first: int) -> None:
    if first >= 0:
        _ranges.append(NodeRange(first, graph.next_number(), recorder.site()))


def site_of(node: Any) -> int:
    """The line of the call that made a node, -1 for those of a forward."""
    number = node_number(node)
    return next((t.site for t in reversed(_ranges) if t.first <= number < t.end), -1)


def singular(node: Any) -> str:
    """The operation of a forward's node, where it was given what it has no finite derivative at."""
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
    except (LookupError, AttributeError, RuntimeError, TypeError):  # an exponent of several, say
        return ""
    return kind if bool(found) else ""
