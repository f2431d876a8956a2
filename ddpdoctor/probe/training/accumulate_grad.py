"""The autograd nodes that write `.grad`: where DDP listens, so the truth of what it will see."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from ..recording.recorder import shielded

LOST = "which gradients a backward made ready"


@cache
def _edges() -> Any:
    import torch

    class Edges(torch.autograd.Function):
        """Takes all parameters at once: its inputs' nodes are theirs. Thirty times cheaper than
        `torch.autograd.graph.get_gradient_edge` on each."""

        @staticmethod
        def forward(ctx: Any, *parameters: Any) -> Any:
            return torch.empty(())

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("never part of a loss")

    return Edges


def nodes_of(parameters: Sequence[Any]) -> list[Any]:
    """The AccumulateGrad node of each parameter, None for those that need no gradient.

    A node keeps its parameter alive: let go of them at once.
    """
    import torch

    if not any(p.requires_grad for p in parameters):
        return [None] * len(parameters)
    with torch.enable_grad():
        edges = _edges().apply(*parameters).grad_fn.next_functions
    return [node for node, _ in edges]


class GradientHooks:
    """Shows what arrives at the `.grad` of parameters for the time of one backward.

    They stand on the tensors: a hook on a node leaves behind, once removed, what autograd calls in
    every backward to come (2 us per parameter, as much as a hook that is there), and so does an
    empty dictionary of hooks.

    Attributes:
        alone: in the last backward that was looked at no tensor had hooks of the user's.
    """

    def __init__(self) -> None:
        self._hooked: list[tuple[Any, bool]] = []
        self.alone = False

    def add(self, looks: Iterable[tuple[Any, Callable[[Any], None]]]) -> None:
        """Call each look with the gradient, None where the graph gives none, before it is
        accumulated into the parameter that it stands with."""
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            for parameter, look in looks:
                hooks = parameter._backward_hooks
                self._hooked.append((parameter, hooks is None))
                if hooks is None:  # as `register_hook` does, five times cheaper
                    parameter._backward_hooks = OrderedDict({self: look})
                else:
                    hooks[self] = look
            hooked = (p._backward_hooks for p, _ in self._hooked)
            self.alone = all(type(key) is GradientHooks for hooks in hooked for key in hooks)

    def remove(self) -> None:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            for parameter, first in self._hooked:
                hooks = parameter._backward_hooks
                if hooks is not None:
                    hooks.pop(self, None)
                    if first and not hooks:
                        parameter._backward_hooks = None
        self._hooked.clear()


class Captures:
    """`torch.autograd.grad` inside of a backward: what arrives at a parameter is not accumulated.

    Attributes:
        depth: how many are running.
    """

    depth = 0


class FiringWatch:
    """Counts, during one backward only, how often each parameter's gradient becomes ready.

    Attributes:
        counts: by position; a position that is missing was not reached.
        given: positions reached with a gradient. The others among `counts` DDP takes for ready
            too: with `find_unused_parameters` it leads the backward to all outputs of the forward,
            also to those that the loss is not made of.
    """

    def __init__(self, parameters: Sequence[Any], positions: Sequence[int]) -> None:
        self.counts: dict[int, int] = {}
        self.given: set[int] = set()
        self.on_complete: Callable[[], None] | None = None
        self._total = len(positions)
        Captures.depth = 0
        fired = shielded("accumulators", self._fired, LOST)
        self._hooks = GradientHooks()
        self._hooks.add(
            (parameter, partial(fired, position))
            for position, parameter in zip(positions, parameters, strict=True)
            if parameter.requires_grad
        )

    def _fired(self, position: int, gradient: Any) -> None:
        if Captures.depth:
            return
        counts = self.counts
        counts[position] = counts.get(position, 0) + 1
        if gradient is not None:
            self.given.add(position)
        if len(counts) == self._total and self.on_complete is not None:
            # DDP may now wait for the other ranks, for ever: what is known must be told here.
            complete, self.on_complete = self.on_complete, None
            complete()

    def stop(self) -> None:
        self._hooks.remove()
