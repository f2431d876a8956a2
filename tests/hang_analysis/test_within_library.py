"""Ranks at one line of the program, and at different places of the library that it calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of, stall, stood

from ddpdoctor.events import RankStood, StackFrame
from ddpdoctor.storage.call_ring import State

LIBRARY = "/usr/lib/python3/site-packages/trainer"
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def standing(rank: int, op: str, *functions: tuple[str, int]) -> RankStood:
    """In a collective, in functions of the library, in line 45 of the program."""
    own = stood(rank, 45, "trainer.fit()")
    frames = [StackFrame(file=TORCH, line=9, function=op)]
    frames += [
        StackFrame(file=f"{LIBRARY}/{name}.py", line=line, function=name)
        for name, line in reversed(functions)
    ]
    return RankStood(at=START + 9, rank=rank, pid=own.pid, frames=(*frames, *own.frames))


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        ((("loop", 5), ("step", 8), ("train", 2)), "within-library"),
        ((("loop", 5), ("step", 8), ("checkpoint", 2)), "within-library"),
        ((("begin", 1),), "unexplained"),
        ((), "unexplained"),
    ],
)
def test_where_the_library_went_different_ways(
    tmp_path: Path, other: tuple[tuple[str, int], ...], rule: str
) -> None:
    made = {0: CallLog(0, 2), 1: CallLog(1, 2)}
    for rank, log in made.items():
        log.call(line=45, text="trainer.fit()")
        op = "broadcast" if rank else "all_reduce"
        log.call(op, line=45, text="trainer.fit()", state=State.WAITING)
    stacks = [
        standing(0, "all_reduce", ("loop", 5), ("step", 7), ("checkpoint", 3), ("save", 4)),
        standing(1, "broadcast", *other),
    ]
    run = run_of(tmp_path, made, nodes={0: [stall(START + 9, START + 2), *stacks]})
    (finding,) = CollectiveMismatch().examine(run)
    assert finding.rule == rule
    if rule == "within-library":
        assert "in `step` (trainer/step.py)" in finding.cause
        assert "rank 0 was in `checkpoint` and `save` (trainer/save.py:4)" in finding.cause


def test_a_rank_that_goes_on_training(tmp_path: Path) -> None:
    """Functions named `backward` lead to DDP's own collective."""
    made = {0: CallLog(0, 2), 1: CallLog(1, 2)}
    for rank, log in made.items():
        log.call(line=45, text="trainer.fit()")
        op = "all_gather" if rank else "DDP backward"
        log.call(op, line=45, text="trainer.fit()", state=State.WAITING)
    stacks = [
        standing(0, "backward", ("loop", 5), ("step", 7), ("train", 3)),
        standing(1, "all_gather", ("loop", 5), ("finish", 2)),
    ]
    run = run_of(tmp_path, made, nodes={0: [stall(START + 9, START + 2), *stacks]})
    (finding,) = CollectiveMismatch().examine(run)
    assert finding.rule == "within-library"
