"""What goes into a forward, the loss, NaN and infinity."""

from __future__ import annotations

from .base import Event

ROWS_RECORDED = 10
"""Rows of a batch that are not finite, of which the first are on record."""


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
        rows: positions in the batch of an input, the first `ROWS_RECORDED`.
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


class ForwardInput(Event, frozen=True, tag="forward-input"):
    """The inputs of a forward of a wrapped or sharded model, at selected forwards, the same ones on
    every rank.

    Attributes:
        model: its number; negative for one that `fully_shard` shards, whose class is `kind` and
            whose data `ranks` divide among them.
        forward: number of the forward with gradients, per model.
        digest: of the content of the inputs, 0 if they could not be read (on a device).
        numbers: how many numbers the inputs hold; `rows` how many samples.
        parts: if there are several inputs, a digest of each of the first ones; `sizes` how many
            numbers they hold.
        begins: if the input is a slice of another tensor's rows, the first row.
        fed: a DataLoader delivered a batch since the last forward, or the inputs are its last one.
        drawn: lower bound for the random numbers drawn from global generators since the last step;
            -1 if unknown.
        training: the model was in `train()` mode.
        carried: some input was the output of the last forward (a recurrent state); it is not
            digested.
        loaders: those whose last batch the inputs are, or are views of; empty if unknown (copies on
            another device).
        batch: numbers in the largest part of the batch that a loader delivered last.
        states: digests of the states of torch's, numpy's and Python's global generators; empty
            where a loader feeds the model.
        step: optimizer steps of this process before it; -1 if unknown.
        inside: lower bound for the random numbers drawn from global generators in the recorded
            forward before it and its backward (by dropout, say); -1 if unknown.
    """

    model: int
    forward: int
    site: int
    digest: int
    numbers: int
    rows: int
    fed: bool
    drawn: int = -1
    training: bool = True
    begins: int = 0
    carried: bool = False
    loaders: tuple[int, ...] = ()
    kind: str = ""
    ranks: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    batch: int = 0
    states: tuple[int, ...] = ()
    step: int = -1
    inside: int = -1

    RANKS = ("ranks",)
