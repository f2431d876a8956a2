"""A block (`with lock:`) that a rank waits to enter while the ranks inside wait for that rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...report.findings import Related
from ...run import Location, ranks_do, ranks_text, shorten
from .snapshot import RankSnapshot

_ENTERS = ("__enter__", "__aenter__")


@dataclass(frozen=True)
class LockWait:
    """A rank that waits at the head of a block, and the ranks that are inside of it."""

    rank: int
    inside: list[int]
    head: Location

    @property
    def cause(self) -> str:
        return (
            f"rank {self.rank} waits to enter `{self.head.source}` ({self.head}), inside of which "
            f"{ranks_do(self.inside, 'wait')} for it: if only one can be inside at a time, as with "
            "a lock, they are deadlocked"
        )

    @property
    def fix(self) -> str:
        return (
            f"do not call collectives inside of `{self.head.source}`: leave it first and call them "
            "after it"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        return (Related(f"{ranks_text(self.inside)} entered here before", self.head),)


def entering(stand: RankSnapshot, waiting: list[RankSnapshot]) -> LockWait | None:
    """The block that an idle rank waits to enter while ranks inside wait for it; None for none."""
    if stand.stood is None or stand.busy or stand.stopped:
        return None
    for head in _entered(stand):
        inside = [s.rank.rank for s in waiting if _is_in(s, head)]
        if inside:
            return LockWait(stand.rank.rank, inside, head)
    return None


def _entered(stand: RankSnapshot) -> list[Location]:
    """The heads of blocks that a rank is about to enter by its stack; it may also be on such a line
    to leave the block."""
    frames = stand.stood.frames if stand.stood else ()
    cwd = stand.rank.cwd
    every = [(None, frame) for frame in frames[:1]] + list(pairwise(frames))
    return [
        Location(shorten(frame.file, cwd), frame.line, frame.function, frame.text.strip())
        for inner, frame in every
        if frame.user and frame.text.strip().startswith(("with ", "async with "))
        if inner is None or inner.function in _ENTERS
    ]


def _is_in(stand: RankSnapshot, head: Location) -> bool:
    """Whether the call of a rank is inside of a block."""
    made = stand.made
    for place in made.site.places if made and made.site else ():
        spot = stand.rank.location(place.site)
        if spot and (spot.file, spot.function) == (head.file, head.function):
            return any(
                around.line == head.line and around.kind == "with" for around in place.inside
            )
    return False
