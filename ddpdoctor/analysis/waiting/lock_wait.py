"""A block (`with lock:`) that a rank waits to enter, while those in it wait for that rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...report.findings import Related
from ...run import Location, ranks_text, shorten
from .snapshot import RankSnapshot

_ENTERS = ("__enter__", "__aenter__")


@dataclass(frozen=True)
class LockWait:
    """One rank at the head of a block, and those that are inside."""

    rank: int
    inside: list[int]
    head: Location

    @property
    def cause(self) -> str:
        waits = f"{ranks_text(self.inside)} wait{'s' if len(self.inside) == 1 else ''}"
        return (
            f"rank {self.rank} waits to enter `{self.head.source}` ({self.head}), inside of which "
            f"{waits} for it: if that lets only one in at a time, as a lock does, none of them can "
            "go on"
        )

    @property
    def fix(self) -> str:
        return (
            f"make no collective inside of `{self.head.source}`: leave it first, and let the ranks "
            "meet behind it"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        return (Related(f"{ranks_text(self.inside)} came in here before", self.head),)


def entering(stand: RankSnapshot, waiting: list[RankSnapshot]) -> LockWait | None:
    """The block that a rank waits to enter without computing, and the ranks that wait for it
    inside of that."""
    if stand.stood is None or stand.busy or stand.stopped:
        return None
    for head in _entered(stand):
        inside = [s.rank.rank for s in waiting if _is_in(s, head)]
        if inside:
            return LockWait(stand.rank.rank, inside, head)
    return None


def _entered(stand: RankSnapshot) -> list[Location]:
    """The heads of blocks that the stack of a rank is about to enter: one may be at such a line to
    leave the block, too."""
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
    """Whether a rank's call is in that block."""
    made = stand.made
    for place in made.site.places if made and made.site else ():
        spot = stand.rank.location(place.site)
        if spot and (spot.file, spot.function) == (head.file, head.function):
            return any(
                around.line == head.line and around.text.startswith(("with ", "async with "))
                for around in place.inside
            )
    return False
