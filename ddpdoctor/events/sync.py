"""What synchronised between optimizer steps, and what did not."""

from __future__ import annotations

from .base import Event


class SyncPattern(Event, frozen=True, tag="sync-pattern"):
    """How the gradients that an optimizer step applies came about. Told when it changes.

    Attributes:
        step: of the optimizer; holds until the next record for the same model and optimizer.
        synced, unsynced: backwards into these gradients since they were cleared, by whether they
            averaged them over the ranks.
        reason: empty where the last of them did; else why not: `no_sync` (the forward ran with
            synchronisation off), `forward only` (off at the forward, on again at the backward),
            `second backward` (no forward of its own), `autograd.grad` or `not reduced`.
        site: the line to blame for `reason`; `forward_site` and `backward_site` of the last one.
        once: a backward at one line synchronised this many times the same parameters, the most
            of any line; `line` is that line.
        late: where synchronisation was switched off after the forward of one that synchronised.
        talked: the program handed the gradients to collectives of its own before the step;
            carried: numbers of any kind that it handed over since that backward began.
        exposed_s: DDP's own estimate of the time a backward waits for communication, 0 unknown;
            backward_s what an averaging backward takes in all.
    """

    model: int
    optimizer: int
    step: int
    synced: int = 0
    unsynced: int = 0
    reason: str = ""
    site: int = -1
    forward_site: int = -1
    backward_site: int = -1
    once: int = 0
    line: int = -1
    late: int = -1
    talked: bool = False
    carried: int = 0
    exposed_s: float = 0.0
    backward_s: float = 0.0


class Carried(Event, frozen=True, tag="carried"):
    """Whether an optimizer step applied gradients that had not been cleared since the step before.

    Told for the first step that can be judged and when it changes; where they were cleared in every
    step before, only once some steps in a row have applied old ones (`step` is the first); the last
    step before these that was seen not to is then told once more.

    Attributes:
        site: the line of the step; `backward_site` of the first backward onto the old gradients.
        parameters: how many were looked at.
    """

    optimizer: int
    step: int
    carried: bool
    site: int = -1
    backward_site: int = -1
    parameters: int = 0


class LossScaled(Event, frozen=True, tag="loss-scaled"):
    """The loss was divided by the size of the model's group before a backward.

    Told once per line of the backward.

    Attributes:
        step: since which it may have been; divisor: that size.
        site: the user's line that divides; `backward_site`.
        expression: it as written; empty, and `site` -1, where no line was found until the end of
            the run: the number may be another one.
    """

    model: int
    step: int
    divisor: float
    site: int
    backward_site: int
    expression: str = ""


class GradientReduced(Event, frozen=True, tag="gradient-reduced"):
    """The program itself issued a collective on gradients that DDP averages.

    Told at the first calls of a line, then rarely, and at the last.

    Attributes:
        op: the reduction (`SUM`, `AVG`, ...).
        call: zero-based number of the step in which this line did so.
        copied: on copies of them, each alone or all in one flat tensor.
    """

    model: int
    op: str
    step: int
    site: int
    call: int = 0
    copied: bool = False


class BatchSeen(Event, frozen=True, tag="batch"):
    """The leading size of a model's input and how its loss was reduced; told when it changes.

    Attributes:
        forward: forwards with gradients of this model before it.
        reduction: `sum`, `mean`, or empty where unknown.
        weight: what the loss was multiplied by on its way to the backward; 0 where a sum was by
            numbers that are not known.
    """

    model: int
    forward: int
    size: int
    reduction: str = ""
    weight: float = 1.0
    site: int = -1


class SteppedInside(Event, frozen=True, tag="stepped-inside"):
    """Optimizers stepped parameters of a wrapped model inside its backward, when its group had not
    communicated in that backward. Recorded before the next backward, at first of each, then at
    powers of two, and at the end of the run.

    Attributes:
        first: number of the first of these steps, of its optimizer, at the line `site`.
        count: such backwards so far, of `backwards` in all; the last at `backward_site`.
        parameters: digest of all that DDP averages, 0 where it could not be taken.
        carried: numbers of any kind that the program itself exchanged since the first.
    """

    model: int
    first: int
    count: int
    backwards: int
    parameters: int = 0
    carried: int = 0
    site: int = -1
    backward_site: int = -1


class KeptBack(Event, frozen=True, tag="kept-back"):
    """An optimizer whose parameters `fully_shard` shards found no gradient to apply, though
    backwards had made some: they were kept whole, and not reduced. Recorded once, and once more
    when a step has some to apply after all (`applied`).

    Attributes:
        parameters: how many of the optimizer's are sharded; site: of the step.
    """

    optimizer: int
    step: int
    parameters: int
    applied: bool = False
    site: int = -1
