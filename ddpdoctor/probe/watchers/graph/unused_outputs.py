"""Which unused parameters did the forward use, though the loss left out the result?

When a backward left parameters without gradient, tensors in the variables of running functions are
followed through the autograd graph to these parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ...recording.frames import variables
from ...recording.recorder import Recorder
from ...recording.torch_compat import node_number
from ...training.tracked_model import Model
from .limits import OUTPUT_FRAMES, OUTPUT_NODES, OUTPUT_VALUES


def unused_results(recorder: Recorder, model: Model, unused: tuple[int, ...]) -> tuple[int, ...]:
    """Positions of unused parameters that a tensor of the last forward depends on."""
    import torch

    if model.first_node < 0 or not unused:
        return ()
    with torch._C.DisableTorchFunctionSubclass():
        held = [t.grad_fn for t in _live_tensors(recorder)]
    wanted = {id(p): i for i in unused if (p := model.parameters[i]()) is not None}
    found: set[int] = set()
    seen: set[Any] = set()
    ahead = [node for node in held if node_number(node) >= model.first_node]
    while ahead and len(seen) < OUTPUT_NODES and len(found) < len(wanted):
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if id(leaf) in wanted:
            found.add(wanted[id(leaf)])
        ahead += [n for n, _ in node.next_functions if n is not None]
    return tuple(sorted(found))


def _live_tensors(recorder: Recorder) -> Iterator[Any]:
    """Tensors with a graph in the variables of the user's running functions."""
    frame, frames = sys._getframe(1), 0
    while frame is not None and frames < OUTPUT_FRAMES:
        if recorder.sites.kind(frame.f_code) == "user":
            frames += 1
            for value in list(variables(frame).values())[:OUTPUT_VALUES]:
                yield from filter(_has_graph, _items(value))
        frame = frame.f_back  # type: ignore[assignment]


def _items(value: Any) -> Iterator[Any]:
    """The items of a container, without calling methods that a user's subclass may override."""
    for kind, items in ((dict, dict.values), (list, list.__iter__), (tuple, tuple.__iter__)):
        if issubclass(type(value), kind):
            return islice(items(value), OUTPUT_VALUES)
    return iter([value])


def _has_graph(value: Any) -> bool:
    import torch

    return issubclass(type(value), torch.Tensor) and value.grad_fn is not None
