"""A rank that lacks averaging backwards: what DDP407 says explains where that rank is."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.drift.unsynced_step import UnsyncedStep
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from recordings import steps
from replicas import digests, replica
from replicas import run_of as drift_run
from tapes import START, CallLog
from tapes import run_of as hang_run

from ddpdoctor.events import Digests, Event, SyncPattern
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

CHECKS = [
    ParameterDrift(), GradientDrift(), CollectiveMismatch(), RankExitedEarly(), UnsyncedStep(),
]  # fmt: skip
COUNT = 8
"""Rounds of the loop."""


def told(run: Run) -> tuple[Finding, ...]:
    return diagnose(run, CHECKS).findings


def pattern(step: int, reason: str = "", synced: int = 1, unsynced: int = 3) -> SyncPattern:
    return SyncPattern(
        at=0, model=0, optimizer=0, step=step, synced=synced, unsynced=unsynced, reason=reason
    )


def local(first: int, last: int) -> list[Event]:
    """Every step averages but those from `first` to `last`."""
    bad = pattern(first, "no_sync", 0, 4)
    return [pattern(0), bad, *([pattern(last + 1)] if last + 1 < COUNT else [])]


def looked(number: int, parts: int, lacks: dict[int, int]) -> Digests:
    """Parameters that are equal until `parts`; `lacks`: of the backwards by then, which are not
    made, by step."""
    rows = {n: [n, n, n, number if n >= parts else 9] for n in range(COUNT)}
    made = [n + 1 - sum(lost for at, lost in lacks.items() if at <= n) for n in rows]
    return digests("parameters", rows, backwards=tuple(made))


def test_a_backward_that_one_rank_lacks_is_no_step_that_the_others_skip() -> None:
    ranks = {0: [pattern(0), looked(0, 4, {})], 1: [*local(3, 3), looked(1, 4, {3: 1})]}
    (finding,) = told(drift_run(ranks, count=COUNT))
    assert (finding.code, finding.ranks) == ("DDP407", (1,))
    (effect,) = finding.consequences
    assert effect.code == "DDP402"


@pytest.mark.parametrize("events", [local(3, 3), [pattern(0)], []])
def test_a_step_that_one_rank_skips_is_one_all_the_same(events: list[Event]) -> None:
    extra = {2: -1} if events else {2: -2}
    ranks = {0: [pattern(0), looked(0, 2, extra)], 1: [*events, looked(1, 2, {})]}
    codes = {f.code: f for f in told(drift_run(ranks, count=COUNT))}
    assert codes["DDP402"].ranks == (0,)


def calls(lead: int, *, op: str = "DDP backward") -> dict[int, CallLog]:
    """Rank 0 waits in a backward, rank 1 has taken `lead` steps more and is behind the loop."""
    made = {n: CallLog(n, 2) for n in range(2)}
    loop = ((8, "for step in range(8):"),)
    for tape in made.values():
        for n in range(COUNT - lead):
            tape.call(op, line=9, inside=loop, step=n)
    made[0].call(op, line=9, inside=loop, step=COUNT - lead, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5, step=COUNT)
    return made


def hung(tmp_path: Path, lead: int, unsynced: list[Event], **options: str) -> Run:
    more = {
        n: [*replica(), *(unsynced if n else [pattern(0)]), *steps(COUNT if n else COUNT - lead)]
        for n in range(2)
    }
    return hang_run(tmp_path, calls(lead, **options), more=more, now=START + 7)


@pytest.mark.parametrize("first", [2, 7])
def test_where_a_rank_is_that_lacks_backwards_follows_from_it(tmp_path: Path, first: int) -> None:
    lead = COUNT - first
    (finding,) = told(hung(tmp_path, lead, local(first, COUNT - 1)))
    assert finding.code == "DDP407"
    assert [c.code for c in finding.consequences] == ["DDP601"]


@pytest.mark.parametrize(
    ("lead", "events", "options"),
    [
        pytest.param(4, local(3, 3), {}, id="further ahead than that"),
        pytest.param(1, local(2, 5), {}, id="it would be further ahead"),
        pytest.param(1, local(3, 3), {"op": "all_reduce"}, id="another call"),
        pytest.param(6, local(3, 3), {}, id="before the step"),
        pytest.param(
            1, [pattern(0), pattern(3, "second backward", 1, 1), pattern(4)], {}, id="averaged too"
        ),
    ],
)
def test_what_has_another_cause_stands_alone(
    tmp_path: Path, lead: int, events: list[Event], options: dict[str, str]
) -> None:
    codes = [f.code for f in told(hung(tmp_path, lead, events, **options))]
    assert sorted(codes) == ["DDP407", "DDP601"]


@pytest.mark.parametrize(("lead", "follows"), [(1, True), (3, False)])
def test_a_rank_that_leaves_so(lead: int, follows: bool) -> None:
    check = UnsyncedStep()
    (mine,) = check.examine(drift_run({0: [pattern(0)], 1: local(3, 3)}, count=COUNT))
    left = RankExitedEarly().finding(
        ranks=(1,), subjects=("DDP backward",), summary="", cause="", fix="",
        evidence={"steps_taken": {"1": COUNT, "0": COUNT - lead}}, deadlocked=True,
    )  # fmt: skip
    assert check.explains(mine, left) is follows
