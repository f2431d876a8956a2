"""The line at which a rank was while the others waited for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...events import StackFrame, Working
from ...report.findings import Related, Steps
from ...run import Location, Phase, Rank
from .thresholds import FEWEST_LOOKS, SEEN_THERE


@dataclass(frozen=True)
class LateLine:
    """A line, and how many of the `looks` at the rank found it there.

    Attributes:
        called_by: the lines that called it, outermost first.
    """

    spot: Location
    called_by: tuple[Location, ...]
    times: int
    looks: int

    def at_fault(self, phase: Location | None, label: str) -> tuple[Location, str, list[Related]]:
        """The line to show, its label, and lines to show with it: the line that calls what is slow,
        in the function that trains, or else the slow line itself.

        Args:
            phase: the line of the phase that is slow, or after which the rank is slow; `label` says
                so of it.
        """
        seen = f"seen here in {self.times} of {self.looks} looks while the others waited"
        related = [Related(label, phase)] if phase is not None else []
        if str(self.spot) == str(phase):
            return self.spot, label, []
        trains = (phase.file, phase.function) if phase is not None else None
        for call in self.called_by:
            if (call.file, call.function) == trains and str(call) != str(phase):
                return call, "calls what takes so long", [Related(seen, self.spot), *related]
        if self.called_by and str(self.called_by[-1]) != str(phase):
            related.insert(0, Related("called here", self.called_by[-1]))
        return self.spot, seen, related


def late_line(rank: Rank, steps: Steps, phase: Phase | None = None) -> LateLine | None:
    """Where a rank was most of the time while the others waited for it: the innermost line of the
    program that most looks have in common.

    Args:
        steps: only looks in these steps count.
        phase: only those in this phase, None for any.
    """
    stacks = [
        e.frames
        for e in rank.of(Working)
        if steps.first <= e.step <= steps.last + 1 and phase in (None, e.phase) and e.frames
    ]
    if len(stacks) < FEWEST_LOOKS:
        return None
    common: tuple[StackFrame, ...] = ()
    times = 0
    while True:
        deeper = Counter(s[: len(common) + 1] for s in stacks if len(s) > len(common))
        here = [(seen, n) for seen, n in deeper.items() if seen[:-1] == common]
        longest, count = max(here, key=lambda one: one[1], default=(common, 0))
        if count < SEEN_THERE * len(stacks):
            break
        common, times = longest, count
    if not common:
        return None
    *called_by, spot = (rank.frame_location(frame) for frame in common)
    return LateLine(spot, tuple(called_by), times, len(stacks))
