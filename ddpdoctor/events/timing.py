"""Where a rank's time goes: its own phases, its waiting, and DDP's gradient synchronisation."""

from __future__ import annotations

from .base import Event

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
