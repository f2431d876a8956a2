"""Ranks that run different numbers of backwards before a step, each of which communicates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.drift.unsynced_step import UnsyncedStep
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import Site, StepDone
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run

LOOP, STEPS = (20, "for batch in micro_batches:"), (18, "for step in range(total):")
STEP = 95
"""Number of the site of the step."""


def took(tape: CallLog, step: int, backwards: int, **fields: int) -> None:
    at = START + 20 * (step + 1)
    values = {"optimizer": 0, "site": STEP, **fields}
    tape.events.append(
        StepDone(at=at, step=step, wall_s=0.1, backwards=backwards, **values)  # type: ignore[arg-type]
    )


def ran(*ranks: Sequence[int], calls: bool = True, first: Sequence[str] = ()) -> dict[int, CallLog]:
    """Ranks that run so many backwards in each step, with two calls each, or two in each step."""
    made = tapes(len(ranks))
    for rank, tape in made.items():
        tape.events.append(
            Site(at=START, id=STEP, file="/home/user/project/train.py", line=30, function="main",
                 text="optimizer.step()")
        )  # fmt: skip
        if first:
            after(tape, first[rank], 9, 0)
        for step, backwards in enumerate(ranks[rank]):
            for _ in range(backwards if calls else 1):
                tape.call("all_gather", 21, inside=(LOOP, STEPS), step=step)
                tape.call("reduce_scatter", 22, inside=(LOOP, STEPS), step=step)
            took(tape, step, backwards)
    return made


def after(tape: CallLog, op: str, line: int, step: int) -> None:
    tape.call(op, line, step=step)


def findings(run: Run) -> list[Finding]:
    return [f for f in UnsyncedStep().examine(run) if f.rule == "uneven-backwards"]


def test_a_run_that_completes(tmp_path: Path) -> None:
    run = run_of(tmp_path, ran((2, 2, 3, 2, 4), (2, 2, 4, 2, 3)))
    assert UnsyncedStep().unobserved(run) is None
    (finding,) = findings(run)
    assert (finding.ranks, finding.location and finding.location.line) == ((0, 1), 20)
    assert finding.steps is not None
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (2, 4, 2)
    assert finding.evidence["calls_up_to_the_step"] == {"rank 0": 14, "rank 1": 16}


def test_the_run_hangs_later(tmp_path: Path) -> None:
    made = ran((2, 3, 2, 2), (2, 4, 2, 2))
    after(made[0], "barrier", 40, 4)
    run = run_of(tmp_path, made)
    (finding,) = CollectiveMismatch().examine(run)
    assert (finding.rule, finding.ranks) == ("uneven-backwards", (0, 1))
    assert finding.location is not None
    assert finding.location.line == 20
    assert finding.steps is not None
    assert finding.steps.first == 1
    assert not findings(run)


def test_the_calls_diverge_before(tmp_path: Path) -> None:
    made = ran((2, 3, 2, 2), (2, 4, 2, 1), first=("broadcast", "barrier"))
    finding = next(iter(CollectiveMismatch().examine(run_of(tmp_path, made))))
    assert finding.rule != "uneven-backwards"


def other_turns() -> dict[int, CallLog]:
    made = ran((2, 3, 2), (2, 4, 1))
    took(made[0], 0, 1, optimizer=1)
    made[0].events[-1] = StepDone(
        at=START + 1, optimizer=1, step=0, site=STEP, wall_s=0.1, backwards=1
    )
    return made


def more_calls() -> dict[int, CallLog]:
    """Calls that have nothing to do with the backwards."""
    made = ran((2, 3, 2), (2, 4, 2), calls=False)
    for step in (1, 2):
        after(made[1], "all_reduce", 50, 1)
        after(made[0], "all_reduce", 50, step)
    for tape in made.values():
        after(tape, "all_reduce", 60, 3)
    return made


@pytest.mark.parametrize(
    "made",
    [
        lambda: ran((2, 3, 2), (2, 4, 2), calls=False),
        lambda: ran((2, 3, 2), (2, 3, 2)),
        lambda: ran((2, 2), (2, 3)),
        other_turns,
        more_calls,
    ],
    ids=[
        "one backward of a step communicates", "even", "nobody is in another step afterwards",
        "optimizers take other turns", "other calls",
    ],
)  # fmt: skip
def test_no_fault(tmp_path: Path, made) -> None:  # type: ignore[no-untyped-def]
    assert findings(run_of(tmp_path, made())) == []
