"""DDP's own gradient synchronisation: what it measures, and what averages in its place."""

from __future__ import annotations

from .base import Event


class SyncTimes(Event, frozen=True, tag="sync-times"):
    """Averages over the iterations that DDP timed (its first ten, and one in a hundred).

    Attributes:
        model: number of the wrapper; iterations that it has done.
        forward_s, backward_s: computing; communication_s from the first bucket's start to the
            last one's end; overlap_s of that while the backward still computed.
        bucket_bytes: sizes of the buckets in the order they are sent.
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
    """The program gave a wrapped model a communication hook, which averages in DDP's place.

    Attributes:
        name: of the function or class, with the last part of its module's.
    """

    model: int
    name: str
    site: int = -1

    def describe(self) -> str:
        return f"model {self.model}: communication hook {self.name}"
