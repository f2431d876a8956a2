"""Which gradients a backward produces: hooks for the time of one backward, on what arrives at each
parameter's AccumulateGrad node. DDP's own hooks are there too, so this is what DDP sees."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from ..recording.recorder import shielded
from .tracked_model import Model

LOST = "which gradients a backward made ready"


@cache
def _edges() -> Any:
    import torch

    class Edges(torch.autograd.Function):
        """A function of all parameters: the next functions of its node are their AccumulateGrad
        nodes. Thirty times cheaper than `torch.autograd.graph.get_gradient_edge` on each."""

        @staticmethod
        def forward(ctx: Any, *parameters: Any) -> Any:
            return torch.empty(())

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("never part of a loss")

    return Edges


def nodes_of(parameters: Sequence[Any]) -> list[Any]:
    """The AccumulateGrad node of each parameter, None for those that require no gradient.

    A node keeps its parameter alive: do not keep it.
    """
    import torch

    if not any(p.requires_grad for p in parameters):
        return [None] * len(parameters)
    with torch.enable_grad():
        edges = _edges().apply(*parameters).grad_fn.next_functions
    return [node for node, _ in edges]


class GradientHooks:
    """Hooks on the gradients of parameters, for the time of one backward.

    They are tensor hooks: a hook on a node leaves something behind when removed that autograd calls
    in every later backward (2 us per parameter, as much as the hook itself). So does an empty
    dictionary of tensor hooks, which is why it is removed too.

    Attributes:
        alone: no tensor had hooks of the program's in the last backward.
    """

    def __init__(self) -> None:
        self._hooked: list[tuple[Any, bool]] = []
        self.alone = False

    def add(self, looks: Iterable[tuple[Any, Callable[[Any], None]]]) -> None:
        """Have each callback called with the gradient of its parameter before that is accumulated;
        with None if the graph reaches the parameter without a gradient."""
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
        """Remove the hooks; call it after the backward."""
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
    """`torch.autograd.grad` inside of a backward: gradients then arrive but are not accumulated.

    Attributes:
        depth: how many such calls are running.
    """

    depth = 0


class FiringWatch:
    """Counts, during one backward, how often the gradient of each parameter becomes ready.

    Attributes:
        counts: by position; a position that is missing was not reached.
        given: positions reached with a gradient. DDP takes the others in `counts` for ready too:
            with `find_unused_parameters` the backward visits all outputs of the forward, also those
            that the loss does not use.
        on_complete: called once when all parameters are ready, inside the backward.
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
            # DDP may now wait for the other ranks, for ever: what is known must be recorded here.
            complete, self.on_complete = self.on_complete, None
            complete()

    def stop(self) -> None:
        """Stop counting; call it after the backward."""
        self._hooks.remove()


class LastGradient:
    """When a backward has computed its last gradient: from then on DDP waits for the other ranks.

    A hook that stays on one AccumulateGrad node, that of the gradient which arrived last in the
    last backward whose gradients were counted: to add one to the root of each backward and to
    remove it costs ten times as much. DDP keeps the node, which keeps the hook.

    Attributes:
        place: number of the model, and position in its `parameters`; None if there is no hook.
        at: when its gradient was accumulated last.
        handle: of the hook.
    """

    __slots__ = ("at", "handle", "place")

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self.at = 0.0
        self.handle: Any = None

    def follow(self, model: Model) -> bool:
        """Put the hook where the last gradient arrived; whether there is one."""
        position = model.last_position
        parameter = None if position < 0 else model.parameters[position]()
        if parameter is None or not parameter.requires_grad:
            return False
        if (place := (model.number, position)) != self.place:
            self.stop()
            self.handle = nodes_of([parameter])[0].register_hook(self._accumulated)
            self.place = place
        return True

    def stop(self) -> None:
        """Remove the hook."""
        handle, self.handle, self.place = self.handle, None, None
        if handle is not None:
            handle.remove()

    def _accumulated(self, *gradients: Any) -> None:  # called by torch: nothing here can fail
        self.at = time.monotonic()
