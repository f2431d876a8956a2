"""Ranks that alone load a checkpoint, and begin a loop later for it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ...events import CallSite, FileRead
from ...report.findings import Effect, Evidence, Related
from ...run import Location, Rank, ranks_do, ranks_text
from .jumps import loops_around

_FROM_START = re.compile(r"for .+ in .*range\((?!-?\d+,)[^(),]+,.+\).*:")
"""A loop over numbers from one that is computed."""


RESUMED_ON_SOME = "resumed-on-some-ranks"

OTHER_EPOCHS = Effect(("sampler-seed-skew",), of=(RESUMED_ON_SOME,), rules=("different-epochs",))
"""For checks with that rule: the epochs that are left differ for it, too."""


@dataclass(frozen=True)
class Resumed:
    """
    Attributes:
        ranks: those that load the checkpoint, at `line`.
        loop: the head of a loop that has fewer rounds on them; `rounds` by rank.
    """

    ranks: tuple[int, ...]
    line: Location
    path: str
    loop: Location
    rounds: dict[int, int]

    @property
    def cause(self) -> str:
        first, other = self.ranks[0], next(n for n in self.rounds if n not in self.ranks)
        file = self.path.rpartition("/")[2]
        return (
            f"{ranks_do(self.ranks, 'load')} `{file}` and the others do not: "
            f"`{self.loop.source}` ({self.loop}) has {self.rounds[first]} rounds on "
            f"{ranks_text([first])} and {self.rounds[other]} on {ranks_text([other])}"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        return (Related("begins later where it was loaded", self.loop),)

    @property
    def evidence(self) -> Evidence:
        return {"rounds_of_the_loop": {f"rank {n}": count for n, count in self.rounds.items()}}


def resumed(loop: Location, ranks: Collection[Rank], until: float) -> Resumed | None:
    """The last checkpoint that only some of these ranks loaded before a moment on the run's clock,
    if exactly on them a loop counts from a later start."""
    if not _FROM_START.fullmatch(loop.source):
        return None
    rounds = {rank.rank: _rounds(loop, rank) for rank in sorted(ranks, key=lambda r: r.rank)}
    loads = {rank.rank: _loads(rank, until) for rank in ranks}
    every = {line: event for mine in loads.values() for line, event in mine.items()}
    for line in sorted(every, key=lambda each: every[each].at, reverse=True):
        here = tuple(n for n in rounds if line in loads[n])
        fewer = {rounds[n] for n in here}
        usual = {rounds[n] for n in rounds if n not in here}
        if len(usual) == 1 and min(usual | fewer) >= 0 and max(fewer) < min(usual):
            return Resumed(here, line, every[line].path, loop, rounds)
    return None


def _rounds(loop: Location, rank: Rank) -> int:
    """How many rounds a loop has by the values that its variables had; -1 where that is not known,
    or not the same each time."""
    key = (loop.file, loop.line, loop.function)
    counts = {
        site.places[depth].rounds.get(loop.line, -1)
        for site in rank.of(CallSite)
        for at, _, depth, _ in loops_around(rank, site)
        if at == key
    }
    return counts.pop() if len(counts) == 1 else -1


def _loads(rank: Rank, until: float) -> dict[Location, FileRead]:
    """The lines at which a rank loaded a file by `torch.load`, with the last one."""
    found: dict[Location, FileRead] = {}
    for event in rank.of(FileRead):
        line = rank.location(event.site)
        loaded = event.how == "load" and not event.failed and rank.wall(event.at) <= until
        if line is not None and loaded:
            found[line] = event
    return found
