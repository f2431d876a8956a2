"""DDP604 where ranks do not do the same rounds of a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from leavers import CLOSED, LOOPS, found, left
from tapes import CWD, START, CallLog, run_of

from ddpdoctor.events import (
    EpochBegan,
    EpochEnded,
    Event,
    ExceptionPassed,
    ExceptionRaised,
    LoaderSeen,
    RankExiting,
    Site,
    Statement,
    Way,
)
from ddpdoctor.report.findings import Steps
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State


def test_a_shorter_loop(tmp_path: Path) -> None:
    (finding,) = found(left(tmp_path))
    assert finding.rule == "loop-exit"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 8


@pytest.mark.parametrize(
    "unlike",
    [
        {"loop": (LOOPS[0], (7, "for epoch in range(n):"))},
        {"loop": ((9, "for p in model.parameters():"), *LOOPS)},
        {"loop": ((9, "for part in batch:"), *LOOPS)},
        {"loop": ((9, "if len(batch):"), *LOOPS)},
        {"loop": (*LOOPS, Statement(6, "try:", (Way(20, "except KeyboardInterrupt:", 7, 19),)))},
        {"loop": (LOOPS[0], Statement(7, "for epoch in range(3):", (Way(8, "if x:", 8, 9),)))},
    ],
)
def test_which_rounds_were_fewer_is_not_known(tmp_path: Path, unlike: dict[str, Any]) -> None:
    (finding,) = found(left(tmp_path, **unlike))
    assert finding.rule == "loop-exit"


def rounds(head: str, *, broken: bool = False, last: int = 12) -> Statement:
    """A loop in which a handler leaves out a part of the round."""
    way = Way(line=11, text="except ValueError:", first=9, last=last)
    exits = (Way(line=12, text="if done:", first=14, last=14),) if broken else ()
    return Statement(line=8, text=head, ways=(way,), exits=exits)


@pytest.mark.parametrize(
    ("loop", "line", "cause"),
    [
        (
            rounds("for i in range(80):"),
            11,
            "skipped rounds of the loop at train.py:8: `except Val",
        ),
        (rounds("for i in range(80):", broken=True), 8, "(train.py:12) ends it, or skipped a rou"),
        (rounds("for i in range(n):"), 8, "before the others, or skipped a round: `except ValueE"),
        (rounds("for i in range(80):", last=8), 8, ""),
    ],
)
def test_a_round_that_was_skipped(tmp_path: Path, loop: Statement, line: int, cause: str) -> None:
    (finding,) = found(left(tmp_path, loop=(loop,)))
    assert finding.rule == ("skipped-round" if line == 11 else "loop-exit")
    assert finding.location is not None
    assert finding.location.line == line


@pytest.mark.parametrize(
    ("head", "exit_line", "under", "waits_at", "line"),
    [
        ("while True:", 11, "if loss < 1:", 9, 11),
        ("for i in range(80):", 11, "if loss < 1:", 9, 11),
        ("for i in range(n):", 11, "if loss < 1:", 9, 8),  # it may have had fewer rounds
        ("for i in range(n):", 11, "if rank == 1:", 9, 11),
        ("for i in range(n):", 11, "if loss < 1:", 13, 11),  # it left in the middle of a round
        ("for i in range(n):", 11, "if loss < 1:", 10, 8),
        ("while True:", 12, "if loss < 1:", 11, 8),  # not between the two calls
    ],
)
def test_the_statement_that_ended_a_loop(
    tmp_path: Path, head: str, exit_line: int, under: str, waits_at: int, line: int
) -> None:
    way = Way(line=exit_line, text=under, first=exit_line + 2, last=14)
    loop = (Statement(line=8, text=head, exits=(way,)),)
    (finding,) = found(left(tmp_path, loop=loop, waits_at=waits_at))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == line


@pytest.mark.parametrize(
    ("inner", "under", "named"),
    [
        ("for x in batches(rank):", "if worse > 3:", False),  # these may have been fewer
        ("for i in range(5):", "if worse > 3:", True),
        ("for p in model.parameters():", "if worse > 3:", True),
        ("for i in range(5):", "except OSError:", False),
    ],
)
def test_what_may_not_have_ended_a_loop(
    tmp_path: Path, inner: str, under: str, named: bool
) -> None:
    way = Way(line=11, text=under, first=13, last=14)
    loop = ((8, inner), Statement(line=7, text="for epoch in range(3):", exits=(way,)))
    (finding,) = found(left(tmp_path, loop=loop))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == (11 if named else 7)


@pytest.mark.parametrize(
    ("outer", "flagged", "inner", "line", "named"),
    [
        ("for epoch in range(3):", True, "for i in range(5):", 7, True),
        ("for epoch in range(3):", False, "for i in range(5):", 8, True),
        ("while True:", True, "for x in batches(rank):", 7, True),
        ("for epoch in range(3):", True, "for x in batches(rank):", 7, False),
    ],
)
def test_the_statement_that_decides_in_nested_loops(
    tmp_path: Path, outer: str, flagged: bool, inner: str, line: int, named: bool
) -> None:
    """`if bad:` sets the flag and breaks the inner loop; `if stop:` then ends the outer one."""
    breaks = Way(line=11, text="if bad:", first=14, last=15)
    asks = Way(line=16, text="if stop:", first=18, last=18, set_line=11, set_by="if bad:")
    loop = (
        Statement(line=8, text=inner, exits=(breaks,)),
        Statement(line=7, text=outer, exits=(asks,) if flagged else ()),
    )
    (finding,) = found(left(tmp_path, loop=loop))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == (11 if named else line)
    if named:
        assert f"left the loop at train.py:{line} " in finding.cause
    else:
        assert "may end" in next(r.label for r in finding.related if r.location.line == 11)


def test_a_handler_that_ended_a_loop(tmp_path: Path) -> None:
    way = Way(line=11, text="except OSError:", first=13, last=14)
    loop = (Statement(line=8, text="for i in range(80):", exits=(way,)),)
    tried = Site(at=START, id=70, file=f"{CWD}/train.py", line=9, function="main")
    seen = ExceptionPassed(
        at=START + 3, where="handler", kind="OSError", message="full", step=7, tried=70
    )
    (finding,) = found(left(tmp_path, loop=loop, loaders={0: [], 1: [tried, seen]}))
    assert finding.rule == "loop-exit"


def test_what_was_caught_is_told(tmp_path: Path) -> None:
    bad = ExceptionPassed(
        at=START + 3, where="forward", kind="ValueError", message="odd\nvery", step=7
    )
    read: dict[int, list[Event]] = {0: [], 1: [bad]}
    loop = (rounds("for i in range(80):"),)
    (finding,) = found(left(tmp_path, loop=loop, loaders=read))
    assert finding.rule == "skipped-round"
    everywhere: dict[int, list[Event]] = {0: [bad], 1: [bad]}
    (finding,) = found(left(tmp_path / "all", loop=loop, loaders=everywhere))
    assert finding.rule == "skipped-round"
    closed = msgspec.structs.replace(bad, message=CLOSED)
    (finding,) = found(left(tmp_path / "lost", loop=loop, loaders={0: [], 1: [closed]}))
    assert finding.rule == "skipped-round"


@pytest.mark.parametrize(("text", "line"), [("for i in range(80):", 6), ("for i in range(n):", 8)])
def test_an_exception_that_ended_a_loop_and_was_caught(
    tmp_path: Path, text: str, line: int
) -> None:
    way = Way(line=6, text="except Exception: return", first=4, last=5)
    around = Statement(line=3, text="try:", ways=(way,))
    (finding,) = found(left(tmp_path, loop=((8, text), around)))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == line
    branched = ((9, "if i % 2:"), (8, text), around)
    (finding,) = found(left(tmp_path / "branched", loop=branched))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == 8


def test_batches_skipped_in_an_earlier_epoch(tmp_path: Path) -> None:
    whole = [
        msgspec.structs.replace(e, backwards=2) if isinstance(e, EpochEnded) else e
        for e in epochs(True, True)
    ]
    short = [*epochs(True), *whole[4:]]
    (finding,) = found(left(tmp_path, loaders={0: whole[:-1], 1: short}))
    assert finding.rule == "skipped-round"
    assert finding.location is not None
    assert finding.location.line == 8
    assert finding.related[0].location.line == 9


def test_a_lost_connection_that_was_caught_until_the_end(tmp_path: Path) -> None:
    def swallowed(op: str) -> Run:
        made = {rank: CallLog(rank, 2).call("DDP backward", 9) for rank in range(2)}
        for second in (5, 6, 7):
            made[1].call(op, 9, state=State.FAILED, at=START + second, lasts=0.5)
        raised = ExceptionRaised(at=START + 8, kind="RuntimeError", message=CLOSED, caught=True)
        site = Site(at=START, id=60, file=f"{CWD}/train.py", line=28, function="main")
        more: dict[int, list[Event]] = {
            0: [site, RankExiting(at=START + 4, how="sys.exit", status=0, site=60)],
            1: [raised, RankExiting(at=START + 8, how="return")],
        }
        return run_of(tmp_path / op, made, more=more)

    (finding,) = found(swallowed("DDP backward"))
    assert finding.rule == "exit-called"
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 28
    assert found(swallowed("barrier")) == []


def epochs(*ended: bool | None) -> list[Event]:
    """Iterations of the loader in line 8: over, left early, or not ended."""
    events: list[Event] = [
        Site(at=START, id=50, file=f"{CWD}/train.py", line=8, function="main"),
        LoaderSeen(at=START, loader=0, site=50, loop_site=50, dataset="D", length=8, sampler="S"),
    ]
    for number, exhausted in enumerate(ended):
        events.append(EpochBegan(at=START, loader=0, epoch=number, step=number, site=50, batches=2))
        if exhausted is not None:
            events.append(
                EpochEnded(at=START, loader=0, epoch=number, batches=2 if exhausted else 1,
                           samples=4, backwards=1, exhausted=exhausted)
            )  # fmt: skip
    return events


@pytest.mark.parametrize(
    ("waiter", "leaver", "line"),
    [
        (epochs(True, None), epochs(True), 7),  # it went through the loader, and began no more
        (epochs(True, False), epochs(True), 7),
        (epochs(True, None), epochs(True, False), 8),
        (epochs(None), epochs(False), 8),
    ],
)
def test_the_loop_that_was_left(
    tmp_path: Path, waiter: list[Event], leaver: list[Event], line: int
) -> None:
    (finding,) = found(left(tmp_path, loaders={0: waiter, 1: leaver}))
    assert finding.rule == "loop-exit"
    assert finding.location is not None
    assert finding.location.line == line


@pytest.mark.parametrize(("first", "follows"), [(0, False), (1, True), (3, True)])
def test_a_schedule_that_ranks_of_different_rounds_follow(
    tmp_path: Path, first: int, follows: bool
) -> None:
    loaders = {0: epochs(True, False), 1: epochs(False, False)}
    (finding,) = found(left(tmp_path, loaders=loaders))
    assert finding.rule == "loop-exit"
    assert finding.evidence["in_different_epochs_since_step"] == 1
    skew = msgspec.structs.replace(
        finding, check="hyperparameter-skew", ranks=(0, 1), steps=Steps.of([first])
    )
    assert RankExitedEarly().explains(finding, skew) is follows
    (even,) = found(left(tmp_path / "even", loaders={0: epochs(True, False), 1: epochs(True)}))
    assert not RankExitedEarly().explains(even, skew)


def test_a_loop_that_only_the_leaver_was_in(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[1].call(line=20, inside=((19, "for x in validation:"),))
    made[0].call(line=20, inside=((19, "for x in validation:"),))
    made[0].call(line=9, text="again", state=State.FAILED, at=START + 5, lasts=1)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    more = {0: [raised], 1: [RankExiting(at=START + 5.5, how="return")]}
    (finding,) = found(run_of(tmp_path, made, more=more, ended={0: 1}))  # type: ignore[arg-type]
    assert finding.rule == "program-ended"
    assert finding.location is not None
    assert finding.location.line == 9


@pytest.mark.parametrize(("within", "around", "told"), [
    (["if kl > 0.1:"], [], [11]),
    ([], ["if done(step):"], [11]),
    (["if kl > 0.1:"], ["if done(step):"], []),  # either
    (["break"], [], []),  # in every round, on all ranks
])  # fmt: skip
def test_the_statement_that_may_end_a_loop_within_the_one_that_was_left(
    tmp_path: Path, within: list[str], around: list[str], told: list[int]
) -> None:
    loops = (
        Statement(line=8, text="for k in range(n):",
                  exits=tuple(Way(line=11, text=t, first=12, last=12) for t in within)),
        Statement(line=7, text="for it in range(rounds):",
                  exits=tuple(Way(line=11 + len(within), text=t, first=14, last=14)
                              for t in around)),
    )  # fmt: skip
    (finding,) = found(left(tmp_path, loop=loops))
    assert finding.rule == "loop-exit"
    assert finding.location is not None and finding.location.line == 7
    may = [r.location.line for r in finding.related if "may end" in r.label]
    assert may == told
