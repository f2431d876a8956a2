"""Ranks that part again and again: what is told of each time, and which one a stop follows from."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.collective_shape_mismatch import CollectiveShapeMismatch
from ddpdoctor.checks.hang.rank_missing import RankMissing
from ddpdoctor.checks.hang.stall import Stall
from tapes import START, CallLog, run_of, stall, stood, tapes

from ddpdoctor.events import CallBlock, CallRun, Event, StepDone
from ddpdoctor.report.diagnose import fold
from ddpdoctor.report.findings import Finding, Steps
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import Phase, State

CHECKS = CollectiveMismatch(), CollectiveShapeMismatch(), RankMissing(), Stall()


def found(run: Run) -> list[Finding]:
    every = [f for check in CHECKS for f in check.examine(run)]
    return fold(sorted(every, key=lambda f: f.at), {check.name: check for check in CHECKS})


def a_step(tape: CallLog, step: int, **arguments: object) -> None:
    """Gradients, a metric and a count; `arguments` are those of the metric."""
    tape.call(line=5, numel=64, step=step)
    tape.call(line=7, step=step, **arguments)  # type: ignore[arg-type]
    tape.call(line=9, numel=1, step=step)


def trained(made: dict[int, CallLog], steps: int = 100_000) -> dict[int, list[Event]]:
    """The ranks have optimizers, which took so many steps."""
    last = StepDone(at=START, optimizer=0, step=steps - 1, site=-1, wall_s=0.1)
    return {rank: [last] for rank in made}


def test_a_stop_follows_from_the_last_mismatch_before_it(tmp_path: Path) -> None:
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(8):
            a_step(tape, step, dtype="int32" if rank == 1 and step == 2 else "float32")
        root = 2 if rank == 2 else 0
        at = START + 40
        if rank == 1:
            tape.call("reduce", 12, root=root, step=8, at=at)
            tape.call("all_gather", 14, step=8, at=at + 0.1, state=State.BEGUN)
        else:
            tape.call("reduce", 12, root=root, step=8, at=at, state=State.BEGUN)
    seen = {0: [stall(START + 55, START + 40), *(stood(r, 12, "reduce()") for r in range(3))]}
    run = run_of(tmp_path, made, now=START + 55, nodes=seen)
    dtypes, roots = found(run)
    assert not dtypes.deadlocked
    assert dtypes.consequences == ()
    assert roots.ranks == (2,)
    assert roots.deadlocked
    assert [c.check for c in roots.consequences] == ["stall"]


def test_a_rank_that_is_missing_long_after_a_mismatch(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        for step in range(8):
            a_step(tape, step, dtype="int32" if rank == 1 and step == 2 else "float32")
    made[0].call(line=5, numel=64, step=8, at=START + 40, state=State.BEGUN)
    made[1].now(Phase.USER, 20, "time.sleep(1e9)").progress_at = START + 40
    seen = {0: [stall(START + 55, START + 40), stood(1, 20, "time.sleep(1e9)", cpu=0.0)]}
    run = run_of(tmp_path, made, now=START + 55, nodes=seen)
    dtypes, missing = found(run)
    assert not dtypes.deadlocked
    assert missing.check == "rank-missing"
    assert missing.ranks == (1,)


def test_a_stop_in_the_next_calls_still_follows_from_it(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        a_step(tape, 0)
        a_step(tape, 1, numel=3 if rank == 1 else 4)
    made[0].call(line=5, numel=64, step=2, at=START + 40, state=State.BEGUN)
    made[1].now(Phase.USER, 20, "x.item()").progress_at = START + 40
    seen = {0: [stall(START + 55, START + 40), stood(1, 20, "x.item()", cpu=0.0)]}
    (finding,) = found(run_of(tmp_path, made, now=START + 55, nodes=seen))
    assert finding.rule == "arguments"
    assert [c.check for c in finding.consequences] == ["rank-missing"]


def test_every_time_counts(tmp_path: Path) -> None:
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(12):
            culprits = rank == 1 and step >= 4 and step % 2 == 0
            a_step(tape, step, reduce_op="MAX" if culprits else "SUM")
    run = run_of(tmp_path, made, more=trained(made))
    (finding,) = found(run)
    assert finding.rule == "arguments"
    assert finding.steps == Steps(4, 10, 4)
    assert finding.ranks == (1,)
    assert finding.evidence["times"] == 4


def test_a_swap_that_comes_again_and_a_mismatch_between(tmp_path: Path) -> None:
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(12):
            lines = (7, 6) if rank == 2 and step in (3, 9) else (6, 7)
            for line in lines:
                tape.call(line=line, step=step)
            dtype = "int32" if rank == 1 and step == 5 else "float32"
            tape.call(line=9, numel=1, step=step, dtype=dtype)
    run = run_of(tmp_path, made, more=trained(made))
    swap, dtypes = found(run)
    assert swap.steps == Steps(3, 9, 2)
    assert swap.ranks == (2,)
    assert dtypes.steps == Steps(5, 5, 1)


def test_from_a_call_too_many_on_all_is_a_consequence(tmp_path: Path) -> None:
    """A parameter of a loop is left out: from there on the others' shapes meet other ones."""
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(8):
            for n in range(80):
                if (rank, step, n) != (1, 2, 10):
                    tape.call(line=5, numel=1 + n // 2, step=step)
            tape.call(line=9, numel=1, step=step)
    (finding,) = found(run_of(tmp_path, made, more=trained(made)))
    assert finding.rule == "arguments"
    assert finding.steps is not None
    assert finding.steps.first == 2


def test_a_mismatch_in_each_of_many_rounds(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        for _ in range(2):
            a_step(tape, 1, reduce_op="MAX" if rank else "SUM")
        tape.events += [
            CallBlock(at=START, id=0, codes=(0, 0, 1, 1, 2, 2)),
            CallRun(at=START, group=0, first=0, block=0, repeat=100_000, step=0),
        ]
    (finding,) = found(run_of(tmp_path, made, more=trained(made)))
    assert finding.rule == "arguments"
    assert finding.steps == Steps(0, 1999, 2000, 2000)


LOOP = ((4, "for x in loader:"),)


@pytest.mark.parametrize(
    ("line", "inside", "averages", "step"),
    [
        (9, (), False, None),
        (9, LOOP, False, 2),
        (5, (), False, None),
        (5, LOOP, False, 3),
        (9, (), True, 3),
    ],
)
def test_the_step_after_which_the_ranks_part(
    tmp_path: Path, line: int, inside: tuple[tuple[int, str], ...], averages: bool, step: int | None
) -> None:
    made = tapes()
    for tape in made.values():
        for taken in range(3):
            tape.call("DDP backward", 7, inside=LOOP, step=taken)
    made[0].call(line=line, inside=inside, step=3, state=State.BEGUN)
    if averages:
        made[1].call("DDP backward", 7, inside=LOOP, step=3, state=State.BEGUN)
    else:
        made[1].call(line=line, inside=inside, numel=1, step=3, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made, more=trained(made, 3), now=START + 7))
    assert finding.steps == (Steps(step, step, 1) if step is not None else None)
    rows = finding.evidence["calls"]
    assert isinstance(rows, list)
    assert [row.get("step") for row in rows] == [step, step]


def test_the_steps_after_which_the_ranks_part_in_a_run_that_ends_well(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        for step in (2, 4, 6):
            tape.call(line=9, dtype="int32" if rank else "float32", step=step).call("barrier", 10)
    (finding,) = found(run_of(tmp_path, made, more=trained(made, 6)))
    assert finding.rule == "arguments"
    assert finding.steps == Steps(1, 5, 3)
