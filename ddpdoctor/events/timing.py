"""Where a rank's time goes: its own phases, its waiting, and DDP's gradient synchronisation."""

from __future__ import annotations

from .base import Event, Part
from .stall import StackFrame

PHASES = ("data", "forward", "backward", "optimizer")
"""The phases of a step; its other time is counted by the phase that it follows."""


class Pace(Event, frozen=True, tag="pace"):
    """Medians over a few consecutive steps of one optimizer, in seconds. Which steps are measured
    depends on their number only, so all ranks measure the same ones.

    Attributes:
        step: the last of these `count` steps.
        waited_s: inside collectives, and in DDP's waiting for other ranks.
        own_s: all other time: in each of `PHASES`, then in the user's code after each of them.
            Batches and forwards of an evaluation count as the user's code.
        sites: the lines of `PHASES`, -1 for phases that did not occur.
        delayed_s: average time per step for which the rank was runnable but had no core.
    """

    optimizer: int
    step: int
    count: int
    wall_s: float
    waited_s: float
    own_s: tuple[float, ...]
    sites: tuple[int, ...] = ()
    delayed_s: float = 0.0


EVALUATING = 8
"""Added to the phase of an `Account`: in an evaluation."""
SAVING = 8
"""The phase of an `Account`: in `torch.save`, whatever the phase."""


class Account(Part, frozen=True):
    """Where time went on one rank: one phase, at or after one line.

    Attributes:
        phase: a `call_ring.Phase`, or that plus `EVALUATING`, or `SAVING`.
        site: the line of that phase; for the user's code, that of the phase before it.
        own_s: seconds, without those `waited_s` in collectives and the doctor's own.
        long_s: of these, in stretches of `LONG_S` or more at once.
        stretches: how often there were such, all between two optimizer steps counted once (the
            batches of an evaluation, say).
        first, last: the optimizer steps taken before the first and the last of these.
        longest_s: the longest of these.
    """

    phase: int
    site: int
    own_s: float
    waited_s: float = 0.0
    stretches: int = 0
    long_s: float = 0.0
    first: int = -1
    last: int = -1
    longest_s: float = 0.0


LONGEST_LIGHT = 256
"""Steps in a row at most that a rank does not look at closely (light ones)."""

LONG_S = 0.05
"""A shorter stretch of time in one phase is nothing that others would notice waiting for."""


class TimeLedger(Event, frozen=True, tag="time-ledger"):
    """Where all time of a rank went until now; recorded now and then, and at the end.

    The seconds of all accounts and of the doctor add up to `wall_s`.

    Attributes:
        step: optimizer steps so far, of all optimizers.
        wall_s: since the process started.
        doctor_s: in the doctor's own code, but for its start.
        backwards_timed: waiting inside of backwards was measured since the last record.
    """

    step: int
    wall_s: float
    doctor_s: float
    accounts: tuple[Account, ...]
    backwards_timed: bool = False


class Working(Event, frozen=True, tag="working"):
    """Where a rank was while others waited for it: the monitor asks it now and then.

    Attributes:
        step: optimizer steps of the rank so far.
        phase: a `call_ring.Phase`.
        frames: the program's lines, outermost first.
    """

    step: int
    phase: int
    frames: tuple[StackFrame, ...]


class SyncTimes(Event, frozen=True, tag="sync-times"):
    """Averages over the iterations that DDP timed (its first ten, and one in a hundred).

    Attributes:
        model: number of the wrapper; `iterations` it has done.
        forward_s, backward_s: computation; `communication_s` from the start of the first bucket to
            the end of the last; `overlap_s` the part of it while the backward still computed.
        bucket_bytes: sizes of the buckets in the order in which they are reduced.
    """

    model: int
    iterations: int
    forward_s: float
    backward_s: float
    communication_s: float
    overlap_s: float
    bucket_bytes: tuple[int, ...] = ()
    bucket_view: bool = False


class CommHook(Event, frozen=True, tag="comm-hook"):
    """The program registered a communication hook on a wrapped model; it replaces DDP's all-reduce.

    Attributes:
        name: of the function or class, preceded by the last part of its module's name.
    """

    model: int
    name: str
    site: int = -1

    def describe(self) -> str:
        return f"model {self.model}: communication hook {self.name}"


class SearchCost(Event, frozen=True, tag="search-cost"):
    """Number and total time of DDP's searches for unused parameters so far
    (`find_unused_parameters=True`). Recorded at powers of two and at the end."""

    model: int
    searches: int
    seconds: float
