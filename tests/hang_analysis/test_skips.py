"""DDP601 and DDP604 where ranks left out batches in several iterations over one loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from recordings import site
from tapes import START, run_of, tapes

from ddpdoctor.events import EpochBegan, EpochEnded, Event, ExceptionPassed, LoaderSeen, RankExiting
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

LOOP = ((8, "for x, y in loader:"), (6, "for epoch in range(9):"))


def epochs(skipped: Sequence[int], *, going_on: bool = False) -> list[Event]:
    """Iterations of six batches each; the last one may go on."""
    events: list[Event] = [
        site(50, "train.py", 8, "for x, y in loader:"),
        site(51, "train.py", 12, "raise ValueError(x)", function="check"),
        site(52, "train.py", 20, "return step(x)", function="guarded"),
        LoaderSeen(at=START, loader=0, site=50, loop_site=50, dataset="D", length=8, sampler="S"),
    ]
    for number, count in enumerate(skipped):
        began = START + number / 2
        events.append(EpochBegan(at=began, loader=0, epoch=number, step=6 * number, site=50,
                                 batches=6))  # fmt: skip
        if number < len(skipped) - 1 or not going_on:
            events.append(
                EpochEnded(at=began + 0.4, loader=0, epoch=number, batches=6, samples=6,
                           backwards=6 - count, exhausted=True)
            )  # fmt: skip
    return events


def caught(*numbers: int, message: str = "odd") -> list[Event]:
    """An exception in each of these iterations."""
    return [
        ExceptionPassed(at=START + n / 2 + 0.1, where="handler", kind="ValueError", message=message,
                        step=6 * n + 1, site=51, tried=52)
        for n in numbers
    ]  # fmt: skip


def found(tmp_path: Path, stays: list[Event], leaves: list[Event]) -> Finding:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 9, inside=LOOP)
    made[0].call("DDP backward", 9, inside=LOOP, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    run = run_of(tmp_path, made, more={0: stays, 1: leaves}, now=START + 7)
    (finding,) = CollectiveMismatch().examine(run)
    return finding


def test_batches_that_were_skipped_in_several_epochs_by_several_ranks(tmp_path: Path) -> None:
    stays = [*epochs((0, 1, 0, 0), going_on=True), *caught(1)]
    finding = found(tmp_path, stays, [*epochs((1, 0, 1, 1)), *caught(0, 2, 3)])
    assert finding.rule == "skipped-round"
    assert finding.ranks == (0, 1)
    assert finding.steps is not None
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (1, 19, 4)
    assert str(finding.location) == "train.py:8"
    assert 20 in [r.location.line for r in finding.related]


@pytest.mark.parametrize(
    ("stays", "leaves"),
    [
        ((), ()),  # nothing was seen
        ((2,), (0, 2, 3)),  # one that led to no skip
        ((1,), (0, 3)),  # not each time
    ],
)
def test_what_was_caught_does_not_say_why(
    tmp_path: Path, stays: tuple[int, ...], leaves: tuple[int, ...]
) -> None:
    ours = [*epochs((0, 1, 0, 0), going_on=True), *caught(*stays)]
    finding = found(tmp_path, ours, [*epochs((1, 0, 1, 1)), *caught(*leaves)])
    assert finding.rule == "skipped-round"
    assert finding.ranks == (0, 1)


def test_batches_that_all_skip_are_no_difference(tmp_path: Path) -> None:
    finding = found(tmp_path, epochs((2, 2, 0), going_on=True), epochs((2, 2, 1)))
    assert finding.rule == "skipped-round"
    assert finding.ranks == (1,)


@pytest.mark.parametrize(("skipped", "line"), [(4, 8), (0, 6)])
def test_who_skipped_batches_evaluated_afterwards_and_left(
    tmp_path: Path, skipped: int, line: int
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 9, inside=LOOP)
    made[0].call("DDP backward", 9, inside=LOOP)
    made[1].call(line=30, inside=((29, "for v in val:"), LOOP[1]))
    made[0].call("DDP backward", 9, inside=LOOP, state=State.BEGUN, at=START + 5)
    stays, leaves = epochs((0, 0), going_on=True), epochs((0, skipped))
    more = {0: stays, 1: [*leaves, RankExiting(at=START + 5, how="return")]}
    (finding,) = RankExitedEarly().examine(run_of(tmp_path, made, more=more, now=START + 8))
    assert finding.rule == ("skipped-round" if skipped else "loop-exit")
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == line


TRIED = ((7, "try:"), *LOOP)


@pytest.mark.parametrize(
    ("where", "tried", "lines", "told"),
    [
        ("forward", 9, (9, 10), "end the `try` before `loss.backward()` (train.py:10)"),
        ("forward", 10, (9, 10), "after the `try`"),  # all collectives in it were before
        ("backward", 10, (9, 10), "raise the exception again"),
        ("forward", 9, (9,), "after the `try`"),
        ("forward", 30, (9, 10), "after the `try`"),  # another `try`
    ],
)
def test_a_flag_does_not_meet_a_collective_in_the_same_try(
    tmp_path: Path, where: str, tried: int, lines: tuple[int, ...], told: str
) -> None:
    made = tapes()
    for tape in made.values():
        for line in lines:
            tape.call("DDP backward", line, "loss.backward()", inside=TRIED)
    made[0].call("DDP backward", lines[-1], "loss.backward()", inside=TRIED, state=State.BEGUN,
                 at=START + 5)  # fmt: skip
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    raised = [
        site(52, "train.py", tried, "the_line()", function="main"),
        *(
            ExceptionPassed(at=START + 0.1, where=each, kind="ValueError", message="odd", step=1,
                            site=51, tried=52 if each == "handler" else -1)
            for each in (where, "handler")
        ),
    ]  # fmt: skip
    first = [e for e in epochs((1,)) if getattr(e, "id", 0) != 52]
    run = run_of(
        tmp_path, made, more={0: epochs((0,), going_on=True), 1: [*first, *raised]}, now=START + 7
    )
    (finding,) = CollectiveMismatch().examine(run)
    assert finding.rule == "skipped-round"
    assert told in finding.fix


def test_a_rank_that_calls_in_a_thread_has_not_left_the_loop(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=LOOP)
    made[0].call(line=9, inside=LOOP)
    made[1].call("gather_object", 30, "dcp.async_save(state)", thread="saver", started=True, root=0)
    made[0].call("gather_object", 30, "dcp.async_save(state)", thread="saver", started=True, root=0)
    made[1].call(line=9, inside=LOOP)
    more = {n: epochs((0,), going_on=True) for n in range(2)}
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, more=more))
    assert finding.rule == "thread"
    assert not any("left" in r.label for r in finding.related)
