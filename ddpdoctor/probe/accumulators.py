"""The autograd nodes that write `.grad`: where DDP listens, so the truth of what it will see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .recorder import shielded

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


class FiringWatch:
    """Counts, during one backward only, how often each parameter's gradient becomes ready.

    Attributes:
        counts: by position; a position that is missing got no gradient.
    """

    def __init__(self, parameters: Sequence[Any], positions: Sequence[int]) -> None:
        self.counts: dict[int, int] = {}
        self.on_complete: Callable[[], None] | None = None
        self._total = len(positions)
        self._handles = [
            node.register_hook(shielded("accumulators", self._counter(position), LOST))
            for position, node in zip(positions, nodes_of(parameters), strict=True)
            if node is not None
        ]

    def _counter(self, position: int) -> Callable[[Any, Any], None]:
        counts = self.counts

        def fired(gradient_inputs: Any, gradient_outputs: Any) -> None:
            counts[position] = counts.get(position, 0) + 1
            if len(counts) == self._total and self.on_complete is not None:
                # DDP may now wait for the other ranks, for ever: what is known must be told here.
                complete, self.on_complete = self.on_complete, None
                complete()

        return fired

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
