"""What ranks recorded differently before their calls diverged, and before other findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from leavers import CLOSED
from msgspec import structs
from tapes import CWD, START, run_of, tapes

from ddpdoctor.events import (
    CallSite,
    CommHook,
    Event,
    ExceptionRaised,
    FileRead,
    FlagSet,
    Loaded,
    RankExiting,
    ScalerStep,
    Site,
    SyncPattern,
    Unwrapped,
)
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run, State


def diverging(tmp_path: Path, first: Any = None, *, kinds: tuple[str, str] = ("", "")) -> Run:
    """Rank 0 makes a call that rank 1 does not, after it recorded `first`."""
    made = tapes(2)
    for rank, tape in made.items():
        for step in range(3):
            tape.call(line=5, numel=64, step=step)
        if kinds[rank]:
            tape.events.append(Unwrapped(at=START, optimizer=0, kind=kinds[rank], site=-1,
                                         step_site=-1, parameters=()))  # fmt: skip
    if first is not None:
        made[0].events.append(first)
    made[0].call("broadcast", 8, step=3)
    for tape in made.values():
        tape.call("all_gather", 9, step=3)
    return run_of(tmp_path, made)


def mismatch(run: Run) -> Finding:
    (finding,) = CollectiveMismatch().examine(run)
    return finding


HOOK = CommHook(at=START + 1, model=0, name="powerSGD_hook", site=-1)


@pytest.mark.parametrize("first, advice", [
    (HOOK, "register the same communication hook"),
    (SyncPattern(at=START + 1, model=0, optimizer=0, step=1, synced=1, unsynced=2),
     "the same micro-batch"),
    (Loaded(at=START + 1, what="state", model=0, step=0, site=-1), "load the same state"),
])  # fmt: skip
def test_it_is_the_cause_where_nothing_else_is_known(
    tmp_path: Path, first: Any, advice: str
) -> None:
    finding = mismatch(diverging(tmp_path, first))
    assert finding.rule == "recorded-difference"
    assert advice in finding.fix
    assert mismatch(diverging(tmp_path / "none")).rule == "unexplained"


def test_what_is_recorded_later_is_no_reason(tmp_path: Path) -> None:
    late = CommHook(at=START + 500, model=0, name="powerSGD_hook", site=-1)
    assert mismatch(diverging(tmp_path, late)).rule == "unexplained"


@pytest.mark.parametrize(("at", "reason"), [(5, True), (15, False)])
def test_what_only_some_do_once_they_part_is_no_reason(
    tmp_path: Path, at: float, reason: bool
) -> None:
    made = tapes(2)
    for tape in made.values():
        tape.call(line=5, numel=64, at=START + 10)
    made[0].events.append(structs.replace(HOOK, at=START + at))
    made[0].call("broadcast", 8, at=START + 20)
    for tape in made.values():
        tape.call("all_gather", 9, at=START + 30)
    rule = "recorded-difference" if reason else "unexplained"
    assert mismatch(run_of(tmp_path, made)).rule == rule


@pytest.mark.parametrize(("at", "said"), [(5, "communication hook on rank 0 only"), (15, "")])
def test_what_only_some_do_after_the_last_call_is_not_said_of_a_hang(
    tmp_path: Path, at: float, said: str
) -> None:
    made = tapes(2)
    for tape in made.values():
        tape.call(line=5, numel=64, at=START + 10)
    made[0].events.append(structs.replace(HOOK, at=START + at))
    made[0].call("broadcast", 8, at=START + 20, state=State.BEGUN)
    made[1].call("barrier", 9, at=START + 20, state=State.BEGUN)
    assert differed(run_of(tmp_path, made)) == said


HEAD = "for step in range(start, 40):"


def resuming(
    tmp_path: Path,
    *,
    rounds: tuple[int, int] = (28, 40),
    head: str = HEAD,
    how: str = "load",
    loads: tuple[int, ...] = (0,),
    leaves: bool = False,
) -> Run:
    """Rank 0 may load a file and begin a loop later; the ranks are in different rounds of it, or
    rank 0 `leaves` it first."""
    made = tapes(2)
    for rank, log in made.items():
        if rank in loads:
            log.events += [
                FileRead(at=START, path="/runs/last.pt", site=900, how=how, step=0),
                Site(at=START, id=900, file=f"{CWD}/train.py", line=3, function="load",
                     text="state = torch.load(path)"),
            ]  # fmt: skip
        log.call("DDP forward", 9, inside=((8, head),), at=START + 2)
        if leaves and rank:
            waits = {"at": START + 5.0, "lasts": 1, "state": State.FAILED}
            log.call("DDP forward", 9, inside=((8, head),), **waits)
            log.events.append(
                ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED, caught=False)
            )
        elif leaves:
            log.events.append(RankExiting(at=START + 5.5, how="return"))
        else:
            branch = (10, "if step % 10 == 0:") if rank else (8, head)
            inside = tuple(dict.fromkeys((branch, (8, head))))
            op, line = ("all_reduce", 11) if rank else ("DDP forward", 9)
            log.call(op, line, inside=inside, at=START + 3, state=State.BEGUN)
        log.events = [_with_rounds(event, rounds[rank]) for event in log.events]
    return run_of(tmp_path, made, ended={1: 1} if leaves else {})


def _with_rounds(event: Event, count: int) -> Event:
    if not isinstance(event, CallSite):
        return event
    places = (structs.replace(place, rounds={8: count}) for place in event.places)
    return structs.replace(event, places=tuple(places))


def test_ranks_that_resume_alone_are_in_other_rounds(tmp_path: Path) -> None:
    finding = mismatch(resuming(tmp_path))
    assert (finding.rule, finding.ranks) == ("resumed-on-some-ranks", (0,))
    assert finding.location is not None
    assert (finding.location.line, finding.related[0].location.line) == (3, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"rounds": (40, 40)},
        {"rounds": (40, 28)},  # those who did not load it begin later
        {"head": "for step in range(n):"},
        {"head": "for step in range(1, n):"},
        {"how": "open"},
        {"loads": ()},
        {"loads": (0, 1)},
    ],
)
def test_ranks_that_are_in_other_rounds_for_another_reason(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    assert mismatch(resuming(tmp_path, **other)).rule != "resumed-on-some-ranks"


def test_ranks_that_resume_alone_leave_first(tmp_path: Path) -> None:
    (finding,) = RankExitedEarly().examine(resuming(tmp_path, leaves=True))
    assert (finding.rule, finding.ranks) == ("resumed-on-some-ranks", (0,))
    assert finding.location is not None
    assert finding.location.line == 3
    epochs = structs.replace(finding, check="sampler-seed-skew", rule="different-epochs")
    assert RankExitedEarly().explains(finding, epochs)
    (other,) = RankExitedEarly().examine(resuming(tmp_path / "even", leaves=True, loads=()))
    assert other.rule == "loop-exit"


@pytest.mark.parametrize(
    ("tests", "line", "rule"),
    [
        (("asked()", "trainer.is_global_zero"), 40, "flag-on-some-ranks"),
        (("asked()",), 40, "unexplained"),
        (("asked()", "trainer.is_global_zero"), 41, "unexplained"),
    ],
)
def test_a_flag_that_some_ranks_set_before_a_library_goes_on(
    tmp_path: Path, tests: tuple[str, ...], line: int, rule: str
) -> None:
    made = tapes(2)
    flag = FlagSet(30, "trainer.should_stop = True", tests)
    for tape in made.values():
        tape.call("barrier", 33)
        tape.events = [
            structs.replace(e, places=tuple(structs.replace(p, flags=(flag,)) for p in e.places))
            if isinstance(e, CallSite)
            else e
            for e in tape.events
        ]
    made[0].call("all_reduce", 40, "trainer.fit(model)")
    made[1].call("broadcast", line, "trainer.fit(model)")
    finding = mismatch(run_of(tmp_path, made))
    assert finding.rule == rule
    if rule != "unexplained":
        assert finding.location is not None and finding.location.line == 30


class Silent(CollectiveMismatch):
    """As `CollectiveMismatch`, with a finding that speaks of nothing.

    ## What it finds
    Stands for a check that knows another cause.
    """

    def examine(self, run: Run) -> list[Finding]:
        at = run.ranks[0].wall(START + 100)
        return [self.finding(summary="ranks differ", cause="", fix="", ranks=(0,), at=at)]


def differed(run: Run) -> str | None:
    (finding,) = diagnose(run, [Silent()]).findings
    return finding.differed


def test_a_finding_has_the_first_difference_before_it(tmp_path: Path) -> None:
    found = differed(diverging(tmp_path, HOOK))
    assert found == "communication hook on rank 0 only"
    assert differed(diverging(tmp_path / "none")) == ""


def test_stages_of_a_pipeline_differ_by_design(tmp_path: Path) -> None:
    assert differed(diverging(tmp_path, HOOK, kinds=("Encoder", "Decoder"))) is None


def test_a_finding_does_not_say_it_twice(tmp_path: Path) -> None:
    (finding,) = diagnose(diverging(tmp_path, HOOK), [CollectiveMismatch()]).findings
    assert "communication hook on rank 0 only" in finding.cause
    assert finding.differed == ""


def test_small_numbers_in_a_sentence_do_not_speak_of_a_difference(tmp_path: Path) -> None:
    class Speaks(Silent):
        """As `Silent`, with the numbers of both ranks.

        ## What it finds
        Stands for a check that knows another cause.
        """

        def examine(self, run: Run) -> list[Finding]:
            (finding,) = super().examine(run)
            return [structs.replace(finding, cause="rank 1 and rank 0 differ by 2 calls")]

    made = tapes(2)
    for rank, tape in made.items():
        tape.events.append(SyncPattern(at=START + 1, model=0, optimizer=0, step=1,
                                       synced=1 + rank, unsynced=0))  # fmt: skip
        tape.call(line=5, numel=64)
    (finding,) = diagnose(run_of(tmp_path, made), [Speaks()]).findings
    assert finding.differed is not None
    assert "1 on rank 0, 2 on rank 1" in finding.differed


@pytest.mark.parametrize(
    ("skips", "line", "rule"),
    [
        ((1,), 92, "scaler-skipped-step"),
        ((0, 1), 92, ""),  # both skipped it
        ((1,), 80, ""),  # another line
    ],
)
def test_a_step_with_collectives_that_a_scaler_skipped(
    tmp_path: Path, skips: tuple[int, ...], line: int, rule: str
) -> None:
    made = tapes()
    more: dict[int, list[Event]] = {0: [], 1: []}
    for rank, tape in made.items():
        tape.call(line=20)
        op, at, caller = ("broadcast", 33, 92) if rank == 0 else ("reduce", 58, 91)
        tape.call(op, at, caller=caller, state=State.BEGUN)
        if rank in skips:
            more[rank] = [
                Site(at=START, id=900, file=f"{CWD}/train.py", line=line, function="fit",
                     text="call()"),
                ScalerStep(at=START + 5, scaler=0, optimizer=-1, call=3, step=3, scale=8.0,
                           skipped=True, site=900),
            ]  # fmt: skip
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, more=more))
    assert (finding.rule == "scaler-skipped-step") is bool(rule)
    if rule:
        assert (finding.ranks, finding.location and finding.location.line) == ((1,), 92)
        assert "ShardedGradScaler" in finding.fix
