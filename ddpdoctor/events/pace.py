"""Where a rank's own time goes, and how long it waits for the others."""

from __future__ import annotations

from .base import Event

PHASES = ("data", "forward", "backward", "optimizer")
"""What a step is made of; the rest of its time lies after one of these."""


class Pace(Event, frozen=True, tag="pace"):
    """Medians over a few consecutive steps of one optimizer, in seconds; which steps are looked at
    depends on their number alone, so it is the same on every rank.

    Attributes:
        step: the last of them; there are `count`.
        waited_s: inside of collectives and in DDP's own waiting for the other ranks.
        own_s: all other time: in each of `PHASES`, then in the user's code after each of them.
            What nothing is trained on (batches and forwards of an evaluation) is the user's code.
        sites: the lines of `PHASES`, -1 where the rank has not been there.
        delayed_s: of each step, on average, the rank could have run but had no core to run on.
    """

    optimizer: int
    step: int
    count: int
    wall_s: float
    waited_s: float
    own_s: tuple[float, ...]
    sites: tuple[int, ...] = ()
    delayed_s: float = 0.0
