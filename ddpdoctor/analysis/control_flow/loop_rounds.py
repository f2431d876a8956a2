"""What the loaders say of the rounds of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ...events import EpochBegan, EpochEnded, IndicesRead, LoaderSeen
from ...run import Location, Rank
from ..calls.call_logs import CallRecord

Leaver = tuple[Rank, float]
"""A rank, and until when what it did counts: it may have gone on after a call that failed."""


@dataclass(frozen=True)
class Iteration:
    """One iteration over a loader; `loader` is the same on all ranks."""

    loader: tuple[str, int]
    began: EpochBegan
    ended: EpochEnded | None

    @property
    def exhausted(self) -> bool:
        return self.ended is not None and self.ended.exhausted


def until_call(made: CallRecord) -> Leaver:
    return made.rank, made.call.began if made.call else inf


def is_last(same: Iteration, mine: list[Iteration]) -> bool:
    """Whether all after that one are over other loaders, began when it was over, and train
    nothing: an evaluation follows the loop."""
    over = same.ended.at if same.ended else inf
    return all(
        i.loader != same.loader and i.began.at >= over and not (i.ended and i.ended.backwards)
        for i in mine[mine.index(same) + 1 :]
    )


def iterations_of(leaver: Leaver, loop: Location | None) -> list[Iteration]:
    """The iterations over the loaders of a loop, or over all."""
    rank, until = leaver
    made = {e.loader: (str(rank.location(e.site)), e.made) for e in rank.of(LoaderSeen)}
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded) if e.at <= until}
    found = []
    for event in rank.of(EpochBegan):
        spot = rank.location(event.site)
        here = loop is None or (spot and (spot.file, spot.line) == (loop.file, loop.line))
        if here and event.at <= until:
            key = made.get(event.loader, ("", event.loader))
            found.append(Iteration(key, event, ends.get((event.loader, event.epoch))))
    return found


def skipped_in(leaver: Leaver, iterations: list[Iteration]) -> int:
    """Batches that no backward followed, of iterations in which one did, as far as is on record."""
    rank, until = leaver
    skipped = 0
    for iteration in iterations:
        number = iteration.began.loader, iteration.began.epoch
        read = (e for e in reversed(rank.of(IndicesRead)) if (e.loader, e.epoch) == number)
        reported = iteration.ended or next((e for e in read if e.at <= until), None)
        if reported is not None and reported.backwards:
            last = reported is not iteration.ended  # of what came last it is not known yet
            skipped += max(0, reported.batches - reported.backwards - last)
    return skipped


def steps_taken(leaver: Leaver) -> str:
    """`3 of its 6`, of the last iteration in which it skipped one."""
    rank, until = leaver
    ended = [e for e in rank.of(EpochEnded) if e.exhausted and 0 < e.backwards < e.batches]
    ended = [e for e in ended if e.at <= until]
    return f"{ended[-1].backwards} of its {ended[-1].batches}" if ended else "some"
