"""straggler: the line at which a rank was seen while the others waited for it."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.performance.straggler import Straggler
from ledgers import LedgerOf
from recordings import CWD, make_run

from ddpdoctor.analysis.process.late_lines import late_line
from ddpdoctor.events import StackFrame, Working
from ddpdoctor.report.findings import Finding, Steps
from ddpdoctor.run import Rank
from ddpdoctor.storage.call_ring import Phase


def frames(*lines: tuple[str, int]) -> tuple[StackFrame, ...]:
    return tuple(
        StackFrame(file=f"{CWD}/train.py", line=n, function=f, user=True) for f, n in lines
    )


MAIN, TRAIN, DRAW = ("<module>", 40), ("train", 14), ("draw", 5)
DRAWS = frames(MAIN, TRAIN, DRAW)


def looks(*stacks: tuple[StackFrame, ...], step: int = 3) -> list[Working]:
    return [Working(at=0, step=step, phase=Phase.USER, frames=frames) for frames in stacks]


def seen(events: list[Working], phase: Phase | None = None) -> tuple[int, int, int] | None:
    """The line, and in how many of how many looks."""
    rank: Rank = make_run({0: events}).ranks[0]
    found = late_line(rank, Steps(2, 8, 7), phase)
    return None if found is None else (found.spot.line, found.times, found.looks)


def test_the_innermost_line_that_most_looks_have_in_common() -> None:
    assert seen(looks(DRAWS, DRAWS, DRAWS)) == (5, 3, 3)
    others = [frames(MAIN, TRAIN, ("draw", n)) for n in (6, 7)]
    assert seen(looks(DRAWS, *others)) == (14, 3, 3)
    # Not most of them, or nothing in common.
    assert seen(looks(DRAWS, DRAWS, *others)) == (14, 4, 4)
    assert seen(looks(*(frames(("f", n)) for n in range(4)))) is None


def test_looks_that_do_not_count() -> None:
    assert seen(looks(DRAWS, DRAWS)) is None
    assert seen(looks(DRAWS, DRAWS, DRAWS, step=10)) is None
    assert seen(looks(DRAWS, DRAWS, DRAWS), Phase.FORWARD) is None
    assert seen(looks((), (), ())) is None


def late(*stacks: tuple[StackFrame, ...]) -> Finding:
    """Rank 0 is late after its optimizer's step (line 13 of `train`) and was looked at."""
    every = [LedgerOf(), LedgerOf()]
    for n in range(1, 9):
        every[0].steps(8 * n, forward=0.3, outside=0.5)
        every[1].steps(8 * n, forward=0.3, waits=0.5)
    (finding,) = Straggler().examine(
        make_run({0: every[0].events + looks(*stacks), 1: every[1].events})
    )
    return finding


@pytest.mark.parametrize(
    ("stack", "line", "related"),
    [
        # The call in the function that trains; beside it where the rank was seen.
        (frames(MAIN, ("main", 14), DRAW), 14, [5, 13]),
        # The function that trains has ended: the line itself, and what called it.
        (frames(MAIN, DRAW), 5, [40, 13]),
        (frames(("main", 14)), 14, [13]),
        # The line of the phase itself.
        (frames(MAIN, ("main", 13)), 13, []),
    ],
)
def test_the_line_that_is_shown(
    stack: tuple[StackFrame, ...], line: int, related: list[int]
) -> None:
    finding = late(stack, stack, stack)
    assert finding.location is not None and finding.location.line == line
    assert [r.location.line for r in finding.related] == related


def test_without_looks_the_line_of_the_phase_is_shown() -> None:
    finding = late()
    assert finding.location is not None and finding.location.line == 13
    assert finding.label.startswith("rank 0 spends 500 ms after this line")
