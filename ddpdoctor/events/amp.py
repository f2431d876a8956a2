"""Mixed precision: the loss scale and the steps that it skips; and other hyper-parameters."""

from __future__ import annotations

from .base import Event


class Hyperparameters(Event, frozen=True, tag="hyperparameters"):
    """The values of an optimizer's groups before a step. Told when they change: up to step 128 at
    every step, later at steps that are a multiple of a growing power of two (see `told_at`).

    Attributes:
        groups: per group, option to value; tensors are read, sequences are spelled out. Of many
            groups only the first ones are told.
        set_sites: by option that changed, the user's line that assigns it, where one was found.
    """

    optimizer: int
    step: int
    groups: tuple[dict[str, float | bool | str], ...]
    site: int = -1
    set_sites: dict[str, int] = {}


class ScalerStep(Event, frozen=True, tag="scaler-step"):
    """A `GradScaler.step`: told when the scale, who sets it or `each` changes and when the step is
    skipped.

    Attributes:
        scaler: number on this rank, in order of first step; call: zero-based, per scaler and
            optimizer.
        scale: loss scale that these gradients were made with, -1 where it is on a device and
            could not be read without waiting.
        skipped: the optimizer did not step.
        set_site: the line that gave `update` a new scale since the call before, -1 where none did;
            told when it changes.
        backwards: of this process that had averaged gradients by then, -1 where they were not
            counted; each: since the call before, and before every call until the next record.
    """

    scaler: int
    optimizer: int
    call: int
    step: int
    scale: float
    skipped: bool
    site: int = -1
    kind: str = "GradScaler"
    set_site: int = -1
    backwards: int = -1
    each: int = 0


class SchedulerStep(Event, frozen=True, tag="scheduler-step"):
    """A learning-rate scheduler was stepped; only some calls are recorded.

    Attributes:
        call: zero-based number of the call at this line.
        optimizer: whose options it sets; -1 for one that has not stepped yet.
    """

    kind: str
    step: int
    call: int
    site: int
    optimizer: int = -1


def told_at(step: int) -> bool:
    """Whether changed hyper-parameters are told at a step; the same on every rank."""
    return step < 128 or step % (1 << (step >> 7).bit_length()) == 0


def next_told_at(step: int) -> int:
    """The first step after this one at which they are."""
    every = 1 << (step >> 7).bit_length()
    return (step // every + 1) * every
