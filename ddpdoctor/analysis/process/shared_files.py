"""Files that several ranks write or read, and whether a collective orders these accesses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from ...events import FileLocked, FileRead, FileWritten, Unwrapped, Wrapped
from ...report.findings import Related, Steps
from ...run import Location, Rank, Run

_DEFAULT = ".default"


@dataclass(frozen=True)
class Touch:
    """One rank's write or read of a file."""

    rank: Rank
    event: FileWritten | FileRead

    @property
    def location(self) -> Location | None:
        return self.rank.location(self.event.site)

    @property
    def callers(self) -> list[Location]:
        """The lines that called the one that accesses the file, innermost first."""
        spots = (self.rank.location(site) for site in self.event.callers)
        return [spot for spot in spots if spot is not None]

    @property
    def began(self) -> float:
        """When it began, seconds on the run's clock."""
        return self.rank.wall(self.event.at)

    @property
    def cut_off(self) -> bool:
        """Whether it is a save whose end is not on record: the rank ended in the middle of it."""
        return self.event.how == "save" and not self.event.ended

    @property
    def ended(self) -> float:
        """When it ended, seconds on the run's clock; infinite for a save that was cut off. For a
        plain `open`, whose end is not known, when it began."""
        return math.inf if self.cut_off else self.rank.wall(self.event.ended or self.event.at)


def steps_of(touches: Iterable[Touch]) -> Steps | None:
    """The optimizer steps in which files were accessed; None where no step is known."""
    every = list(touches)
    taken = {t.rank.steps for t in every if t.rank.state == "finished"}
    return Steps.of((t.event.step for t in every), taken=max(taken, default=0))


def key(rank: Rank, event: FileWritten | FileRead | FileLocked) -> tuple[str, str]:
    """What identifies a file: its path and, unless it is on a shared file system, its node."""
    return ("" if event.shared else rank.node, event.path)


def writes(run: Run) -> dict[tuple[str, str], list[Touch]]:
    """All writes of a run, by file (see `key`)."""
    found: dict[tuple[str, str], dict[tuple[int, float], Touch]] = {}
    for rank in run.ranks.values():
        for event in rank.of(FileWritten):  # the end of a save takes the place of its begin
            found.setdefault(key(rank, event), {})[rank.rank, event.at] = Touch(rank, event)
    return {file: list(touches.values()) for file, touches in found.items()}


def locked(run: Run) -> dict[tuple[str, str], dict[int, float]]:
    """Files (see `key`) that ranks asked to lock, with the time of each rank's first request."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for rank in run.ranks.values():
        for event in rank.of(FileLocked):
            found.setdefault(key(rank, event), {}).setdefault(rank.rank, rank.wall(event.at))
    return found


def met(first: Touch, second: Touch) -> bool:
    """Whether a collective of both ranks lies between the end of `first` and the begin of `second`:
    the count of calls of a group that both are in has gone up."""
    if first.cut_off:
        return False
    done, begun = first.event.marks_after, second.event.marks
    return any(
        number > done.get(group, -1)
        for group, number in begun.items()
        if group in done or group.endswith(_DEFAULT)
    )


def ordered(a: Touch, b: Touch) -> bool:
    """Whether a collective makes one of two accesses wait for the other."""
    return met(a, b) or met(b, a)


def hold_parts(run: Run) -> bool:
    """Whether each rank holds different parameters: a stage of a pipeline, or what DDP ignores
    (experts). A sharded model does not count, since its state may have been gathered."""
    wrapped = [w for rank in run.ranks.values() for w in rank.of(Wrapped)]
    if any(p.ignored and p.trainable for w in wrapped for p in w.parameters):
        return True
    trained = {
        frozenset((p.name, p.shape) for e in rank.of(Unwrapped) for p in e.parameters)
        for rank in run.ranks.values()
    }
    return len(trained) > 1 and not any(a <= b for a, b in permutations(trained, 2))


def called(run: Run, touches: Iterable[Touch]) -> tuple[Related, ...]:
    """The lines that called the helper function in which files are accessed, at most two: only
    where several lines of the run call it, or one of a function in another file."""
    every = [Touch(rank, event) for rank in run.ranks.values() for event in rank.of(FileWritten)]
    every += [Touch(rank, event) for rank in run.ranks.values() for event in rank.of(FileRead)]
    found: dict[tuple[str, int], Location] = {}
    for touch in touches:
        here, callers = touch.location, touch.callers
        if here is None or not callers:
            continue
        near = callers[0]
        spots = {_line(o.callers[0]) for o in every if o.callers and o.location == here}
        elsewhere = near.file != here.file and near.function != "<module>"
        if len(spots) > 1 or elsewhere:
            found.setdefault(_line(near), near)
    return tuple(Related("called from here", spot) for spot in list(found.values())[:2])


def _line(spot: Location) -> tuple[str, int]:
    return spot.file, spot.line
