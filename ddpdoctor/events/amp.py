"""Hyperparameters, and the loss scale of mixed precision with the steps that it skips."""

from __future__ import annotations

from .base import Event, Part
from .calls import Place


class Hyperparameters(Event, frozen=True, tag="hyperparameters"):
    """The options of an optimizer's parameter groups before a step. Recorded when they change: at
    every step up to 128, later at multiples of a power of two that grows (see `told_at`).

    Attributes:
        groups: per group, option to value; tensors are read, sequences are written as text. Only
            the first groups are recorded.
        read: the last step before this one at which the options were read, and were the earlier
            ones; -1 for none. Light steps do not read them.
        set_sites: by option that changed, the user's line that assigns it, if one was found;
            `set_through` that line and those of the calls that lead to it, innermost first.
        scheduler: in the first record, the class of the scheduler that was made for the optimizer,
            empty for none; `scheduler_site` the line; `initial` the rates of the groups by which
            schedulers multiply, empty where they have none.
    """

    optimizer: int
    step: int
    groups: tuple[dict[str, float | bool | str], ...]
    site: int = -1
    set_sites: dict[str, int] = {}
    set_through: dict[str, tuple[Place, ...]] = {}
    scheduler: str = ""
    scheduler_site: int = -1
    initial: tuple[float, ...] = ()
    read: int = -1


class OptionsRead(Event, frozen=True, tag="options-read"):
    """The last step at which the options of an optimizer were read. Recorded at the end."""

    optimizer: int
    step: int


class ScalerStep(Event, frozen=True, tag="scaler-step"):
    """A call of `GradScaler.step`. Recorded when the step is skipped, or when the scale, `set_site`
    or `each` changes.

    Attributes:
        scaler: number on this rank, in order of first step; call: zero-based, per scaler and
            optimizer.
        scale: loss scale of these gradients, -1 if it is on a device and could not be read without
            waiting.
        skipped: the optimizer did not step.
        set_site: the line that passed a new scale to `update` since the last call, -1 if none.
        backwards: synchronised backwards of this process so far, -1 if not counted; `each` of them
            came since the last call, and before every call until the next record.
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


class Logged(Part, frozen=True):
    """A number that the program hands to a framework by name (part of `SchedulerStep`).

    Attributes:
        site: the line that does so first.
        by: the framework's module with the function that is called for it.
    """

    name: str
    site: int
    by: str


class SchedulerStep(Event, frozen=True, tag="scheduler-step"):
    """A learning-rate scheduler was stepped; only some calls are recorded.

    Attributes:
        call: zero-based number of the call at this line.
        optimizer: the one whose options it sets; -1 if that has not stepped yet.
        scheduler: number of the scheduler object, in the order of their first calls.
        metric: what `ReduceLROnPlateau` is given, None if it is no finite number on the CPU.
        logged: where a framework steps the scheduler with a number that the program has logged and
            has not asked to be reduced, that number; None otherwise.
    """

    kind: str
    step: int
    call: int
    site: int
    optimizer: int = -1
    scheduler: int = 0
    metric: float | None = None
    logged: Logged | None = None


class MetricUsed(Event, frozen=True, tag="metric-used"):
    """A framework decides by a number that the program has logged and has not asked to be reduced;
    only some calls are recorded.

    Attributes:
        kind: the class that decides, as `ModelCheckpoint`.
        step, call, metric: as in `SchedulerStep`.
        site: the line of the program that called into the framework.
    """

    kind: str
    step: int
    call: int
    site: int
    metric: float
    logged: Logged


class ReducedMetric(Event, frozen=True, tag="reduced-metric"):
    """A number that the program hands to a framework by name, to be reduced over the ranks.
    Recorded for the first call with that name.

    Attributes:
        name: empty in the last record, if there are more names than are recorded.
        site: the line that does so.
    """

    name: str
    site: int


class ScheduleEnded(Event, frozen=True, tag="schedule-ended"):
    """What became of a learning-rate schedule that was planned for a number of steps. Recorded at
    the end of the rank.

    Attributes:
        planned: steps of the scheduler after which the schedule ends, or turns around; 0 for one
            without such a number, which is recorded where Accelerate steps it.
        calls: of `step` by the program; `counted` is the scheduler's own count, which differs where
            its state was loaded or set.
        optimizer: the one whose rate it sets, -1 if that never stepped; `steps` are its steps by
            the last call.
        rate: of its first parameter group after the last call, -1 if unknown.
        may_stop: a loop around the call can be left early (`break`, `return`), or has no known
            number of rounds.
        lengths: what `len(loader)` returned to the program before the scheduler was made, for any
            loader.
        site: the line that made it; `step_site` the line that steps it; `by` the module of a
            library that this line called, empty for none.
    """

    kind: str
    planned: int
    calls: int
    counted: int
    optimizer: int
    steps: int
    site: int
    step_site: int
    rate: float = -1.0
    may_stop: bool = False
    lengths: tuple[int, ...] = ()
    by: str = ""

    def describe(self) -> str:
        plan = f"planned for {self.planned} steps, " if self.planned else ""
        return f"{self.kind}: {plan}took {self.calls}"


FIRST_TOLD = 128
"""Steps that are all recorded; then one in 8 until the 1024th, and half as many after each doubling
of the steps."""


def told_at(step: int) -> bool:
    """Whether changed hyperparameters are recorded at a step; equal on all ranks."""
    return step % _every(step) == 0


def next_told_at(step: int) -> int:
    """The first step after `step` at which changed hyperparameters are recorded."""
    every = _every(step)
    return (step // every + 1) * every


def _every(step: int) -> int:
    return 1 if step < FIRST_TOLD else 1 << max(3, (step >> 7).bit_length())


class ClippedScaled(Event, frozen=True, tag="clipped-scaled"):
    """Gradients were clipped before `GradScaler` divided them by the loss scale.

    Attributes:
        limit: the second argument of the call that clips; scale: 0 where it is on a device.
        site: the line that clips; unscale_site: the one that divides them afterwards.
    """

    function: str
    limit: float
    scale: float
    step: int
    site: int
    unscale_site: int
