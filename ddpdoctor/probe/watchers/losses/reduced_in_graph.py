"""Is a tensor that is part of the loss all-reduced in place?

Autograd does not see a collective that writes into a tensor: the loss follows from the values of
all ranks, its gradient from those of this rank. The node that made the tensor is kept until the
next backward and searched for in the graph of the loss; nothing of it is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ....events import ReducedInGraph
from ...collectives import call_hooks
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...tensors.autograd_nodes import divisor_of, leads_to, linear, nodes_between
from ...training import lifecycle
from ...training.records import Backward
from ...training.wrapped_models import WrappedModels
from ..gradients.gradient_sync import GradientSync
from .limits import REDUCED_KEPT, REDUCED_LOOKED_AT
from .loss_scaling import averaged, group_size


class _Reduced(NamedTuple):
    """A tensor of a graph that was all-reduced in place.

    Attributes:
        node: that made it; site: the line of the call.
    """

    node: Any
    group: int
    shape: tuple[int, ...]
    site: int


class ReducedInGraphs(Watcher):
    """
    Attributes:
        reduced: what was reduced since the last backward.
        looked: by line of the call, tensors that were looked for; lines on record are no more.
    """

    lost = "whether tensors of the loss are all-reduced in place"
    after = (GradientSync,)

    def __init__(self) -> None:
        self.reduced: list[_Reduced] = []
        self.looked: dict[int, int] = {}
        self.grad_enabled: Callable[[], bool] = bool

    def install(self) -> None:
        import torch

        self.grad_enabled = torch.is_grad_enabled

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: call_hooks.Call) -> None:
        if call.op != "all_reduce" or len(self.reduced) >= REDUCED_KEPT:
            return
        for tensor in call.tensors:
            node = tensor.grad_fn if tensor.requires_grad else None
            if node is None or not self.grad_enabled():
                continue  # functions that know their own gradient call it with gradients off
            # DDP's mean is right for the mean of all ranks; hooks may multiply the gradient.
            if call.reduces_by != "SUM" or tensor._backward_hooks:
                continue
            site = recorder.site()
            if self.looked.setdefault(site, 0) < REDUCED_LOOKED_AT:
                self.looked[site] += 1
                self.reduced.append(_Reduced(node, call.group, tuple(tensor.shape), site))

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        reduced, self.reduced = self.reduced, []
        if not reduced:
            return
        pending = [m for m in WrappedModels.current.live() if m.pending]
        roots = [r.grad_fn for r in backward.roots if getattr(r, "grad_fn", None) is not None]
        for one in reduced:
            model = next((m for m in pending if m.group == one.group), None)
            if model is None or self.looked[one.site] > REDUCED_LOOKED_AT or group_size(model) < 2:
                continue
            linear = _is_linear(roots, one.node, group_size(model))
            if linear is not None and leads_to(one.node, averaged(model)):
                self.looked[one.site] = REDUCED_LOOKED_AT + 1
                recorder.emit(
                    ReducedInGraph(
                        at=time.monotonic(),
                        model=model.number,
                        step=recorder.step,
                        size=group_size(model),
                        shape=one.shape,
                        site=one.site,
                        backward_site=backward.site,
                        linear=linear,
                    )
                )


def _is_linear(roots: list[Any], target: Any, size: int) -> bool | None:
    """Whether the loss is linear in what a node made, which the ranks have summed; None where it
    does not follow from it, or the gradient there may not be that of this rank: a program may
    multiply by the world size, or have functions with gradients of their own."""
    between = nodes_between(roots, target)
    if between is None:
        return None
    if any(abs(divisor_of(n) * size - 1) < 1e-6 or _of_the_program(n) for n in between):
        return None
    return all(map(linear, between))


def _of_the_program(node: Any) -> bool:
    """Whether a node is a Python function with a backward of its own, other than DDP's."""
    import torch

    custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return custom and "DDPSink" not in node.name()
