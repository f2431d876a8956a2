"""NaN and infinity."""

from __future__ import annotations

from .base import Event


class NonFinite(Event, frozen=True, tag="non-finite"):
    """NaN or infinity on this rank, traced back to its origin if possible, that a step applied.

    Attributes:
        kind: what was not finite first: `input` of the wrapped forward, `parameter` or `buffer`
            before it, `loss` (all of these were finite), `gradient` (the loss was finite; the
            gradient is this rank's own, before averaging).
        step: steps of the optimizer concerned before it; `total` of all optimizers, -1 if not
            recorded.
        value: `nan` or `inf`.
        names: of the inputs, parameters or buffers; for a gradient, of the parameters nearest to
            the loss that got it.
        module, operation: where in the graph it arose, empty if unknown. `within` is the module in
            whose forward the line `origin_site` is, empty for the model's own.
        entered: the operation that got it as a constant; what made it needed no gradient.
        beyond: it entered the graph after the wrapped forward, whose outputs were `finite` or are
            `gone`.
        derivative_site: the call of `torch.autograd.grad` in which it arose; `operation` is then
            the one without a finite derivative, empty if unknown.
        rows: positions in the batch of an input.
        site: the line of the backward; `origin_site` the line where it arose, if known.
        gradients: for a parameter, the optimizer's state is not finite either: a gradient caused
            it.
        applied: an optimizer stepped with gradients that were not finite.
        stopped: the program raised or exited before the backward of this loss.
        skipped: number of backwards in a row that began with it while no optimizer stepped, from
            number `backward` of this rank on (-1 if not recorded).
        spared: number of steps, up to number `last`, that applied finite gradients of such a loss.
            Recorded at the first and at the end.
        largest: for a loss or gradient, the largest absolute value in the parameters then, 0 if
            unknown.
    """

    kind: str
    step: int
    value: str
    site: int
    origin_site: int = -1
    forward_site: int = -1
    names: tuple[str, ...] = ()
    count: int = 0
    module: str = ""
    operation: str = ""
    entered: str = ""
    beyond: str = ""
    derivative_site: int = -1
    rows: tuple[int, ...] = ()
    gradients: bool = False
    applied: bool = True
    skipped: int = 0
    backward: int = -1
    spared: int = 0
    last: int = -1
    total: int = -1
    largest: float = 0.0
    within: str = ""
    stopped: bool = False

    def describe(self) -> str:
        return f"{self.value} in {self.kind} {', '.join(self.names[:2])} at step {self.step}"


class LossValues(Event, frozen=True, tag="loss"):
    """The loss with which some backwards began, as this rank computed it: of the first backward of
    a step, if it is a finite number on the CPU. Recorded for each of the first steps, then for
    fewer and fewer.

    Attributes:
        steps: optimizer steps of this process before each.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
