"""Numbers that are none: NaN and infinity."""

from __future__ import annotations

from .base import Event


class NonFinite(Event, frozen=True, tag="non-finite"):
    """A NaN or infinity on this rank, as far back as it could be followed, and a step taken on it.

    Attributes:
        kind: what was not finite first: `input` of the wrapped forward, `parameter` or `buffer`
            before it, `loss` (all of these were finite), `gradient` (the loss was finite, and the
            gradient was this rank's own, before any averaging).
        step: steps of the optimizer concerned before it; `total` of all optimizers, -1 where that
            was not recorded.
        value: `nan` or `inf`.
        names: of the inputs, parameters or buffers; for a gradient, of the parameters nearest to
            the loss that got it.
        module, operation: where in the graph it arose, empty where that cannot be told.
            `within`: the one in whose forward the line is that made it, empty for the model's own.
        entered: the operation that was given it as a constant: what made it needed no gradient.
        beyond: it came in after the wrapped forward, of which what was returned was `finite`, or is
            `gone`.
        derivative_site: the call of `torch.autograd.grad` that it arose in: `operation` is what has
            no finite derivative there, empty where that is not known.
        rows: positions in the batch of an input.
        site: the backward; origin_site: the line that made it, as near as it is known.
        gradients: of a parameter: its optimizer's state has it too, so that a gradient brought it.
        applied: the optimizer stepped with gradients that were not finite.
        skipped: so many backwards in a row began with it, from the one of number `backward` of this
            rank on (-1 where that was not recorded), and no optimizer stepped meanwhile.
        spared: so many steps, up to number `last`, were taken on it of which the gradients were
            finite all the same. Told at the first, and at the end.
        largest: of a loss or gradient, the largest number in the parameters then, 0 where that is
            not known.
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

    def describe(self) -> str:
        return f"{self.value} in {self.kind} {', '.join(self.names[:2])} at step {self.step}"
