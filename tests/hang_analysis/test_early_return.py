"""DDP601 and DDP604 where ranks came back from a function without the collective in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from recordings import steps
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import RankExiting, Statement, Way
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

PAST = Statement(line=16, text="past if not path.exists():", opener=15)
ROUNDS = Statement(line=39, text="for step in range(9):")


def found(tmp_path: Path, made: dict[int, CallLog]) -> Finding:
    run = run_of(tmp_path, made, now=START + 7)
    (finding,) = CollectiveMismatch().examine(run)
    return finding


def waiting(made: CallLog, op: str, line: int, caller: int, **more: object) -> None:
    made.call(op, line, caller=caller, state=State.BEGUN, at=START + 5, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [(PAST,), (Statement(line=15, text="if ready:"),)])
def test_a_rank_is_further_down_in_the_function_that_called(
    tmp_path: Path, inside: tuple[Statement, ...]
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 27, caller=41)
    waiting(made[0], "broadcast", 20, 42, inside=inside)
    waiting(made[1], "DDP backward", 27, 43)
    finding = found(tmp_path, made)
    assert finding.rule == "early-return"
    assert finding.ranks == (1,)
    assert finding.location is not None and finding.location.line == 20
    assert "came back from `main` without this call" in finding.cause
    lines = [r.location.line for r in finding.related]
    assert lines[:1] == [15]
    assert len(lines) == len({*lines}), "each line is shown once"


def test_a_rank_is_in_the_next_round_of_the_loop(tmp_path: Path) -> None:
    """It made the call in the rounds before."""
    made = tapes()
    for tape in made.values():
        for step in range(3):
            tape.call("all_reduce", 10, caller=40, step=step, inside=())
            if step < 2:
                tape.call("all_gather", 20, caller=41, step=step, inside=(PAST,))
    waiting(made[0], "all_gather", 20, 41, step=2, inside=(PAST,))
    waiting(made[1], "all_reduce", 10, 40, step=3)
    for tape in made.values():
        around_callers(tape)
    finding = found(tmp_path, made)
    assert finding.rule == "early-return"
    assert finding.ranks == (1,)


def around_callers(tape: CallLog) -> None:
    """Put the loop around every line that called."""
    import msgspec

    from ddpdoctor.events import CallSite

    tape.events[:] = [
        msgspec.structs.replace(
            e,
            places=(
                *e.places[:1],
                *(msgspec.structs.replace(p, inside=(*p.inside, ROUNDS)) for p in e.places[1:]),
            ),
        )
        if isinstance(e, CallSite)
        else e
        for e in tape.events
    ]


def test_nothing_in_the_function_leads_around_the_call(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 27, caller=41)
    waiting(made[0], "broadcast", 20, 42)
    waiting(made[1], "DDP backward", 27, 43)
    assert found(tmp_path, made).rule != "early-return"


def test_the_other_rank_is_above(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 27, caller=41)
    waiting(made[0], "broadcast", 20, 44, inside=(PAST,))
    waiting(made[1], "DDP backward", 27, 43)
    assert found(tmp_path, made).rule != "early-return"


def test_a_rank_that_did_all_rounds_exited(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        for _ in range(3):
            tape.call("all_gather", 20, caller=41, inside=(PAST,))
    waiting(made[0], "all_gather", 20, 41, inside=(PAST,))
    for tape in made.values():
        around_callers(tape)
    leaves = [RankExiting(at=START + 6, how="return")]
    run = run_of(
        tmp_path, made, more={1: leaves}, ended={1: 0}, now=START + 9,
    )  # fmt: skip
    (finding,) = RankExitedEarly().examine(run)
    assert finding.rule == "early-return"
    assert "came back from `main` without this call in some round" in finding.cause


@pytest.mark.parametrize(
    ("more", "trains", "told"), [(0, 40, True), (1, 40, False), (0, 42, False)]
)
def test_a_rank_that_did_all_rounds_and_did_not_enter_a_branch(
    tmp_path: Path, more: int, trains: int, told: bool
) -> None:
    """Not where it took fewer steps, or may have left before the step of the last round."""
    made = tapes()
    sometimes = "if (epoch + 1) % 2 == 0:"
    through = {"caller": (30, 41), "branches": {30: "if self.synced is None:", 41: sometimes}}
    for rank, tape in made.items():
        for step in range(3 + more * (rank == 0)):
            tape.call("DDP backward", 27, caller=trains, step=step, internal=True)
            tape.call("all_gather", 20, step=step, **through)  # type: ignore[arg-type]
    made[0].call(
        "all_gather",
        20,
        state=State.BEGUN,
        at=START + 5,
        step=3 + more,
        **through,  # type: ignore[arg-type]
    )
    for tape in made.values():
        around_callers(tape)
    taken = {0: steps(3 + more), 1: [*steps(3), RankExiting(at=START + 6, how="return")]}
    run = run_of(tmp_path, made, more=taken, ended={1: 0}, now=START + 9)
    (finding,) = RankExitedEarly().examine(run)
    assert finding.rule == ("branch-not-entered" if told else "loop-exit")
    assert finding.location is not None
    assert finding.location.line == (29 if told else 39)


def test_a_rank_that_did_all_rounds_and_skipped_the_rest_of_one(tmp_path: Path) -> None:
    made = tapes()
    text = "if mask.sum() < 11:"
    past = Statement(line=25, text=text, kind="past", test="mask.sum() < 11", opener=24)
    setting = Statement(line=26, text="if args.amp:", kind="if", test="args.amp")
    loop = Statement(line=20, text="for batch in loader:", kind="for")
    for tape in made.values():
        for step in range(3):
            tape.call("DDP forward", 22, inside=(loop,), step=step, internal=True)
            tape.call("DDP backward", 27, inside=(setting, past, loop), step=step, internal=True)
            tape.call("all_gather", 28, inside=(setting, past, loop), step=step)
    made[0].call("DDP backward", 27, inside=(setting, past, loop), step=3, internal=True,
                 state=State.BEGUN, at=START + 5)  # fmt: skip
    taken = {0: steps(3), 1: [*steps(3), RankExiting(at=START + 6, how="return")]}
    run = run_of(tmp_path, made, more=taken, ended={1: 0}, now=START + 9)
    (finding,) = RankExitedEarly().examine(run)
    assert (finding.rule, str(finding.location)) == ("branch-not-entered", "train.py:24")
    assert f"skipped the rest of a round at `{text}`" in finding.cause


@pytest.mark.parametrize("catches", [True, False])
def test_a_rank_makes_its_calls_again_after_an_exception(tmp_path: Path, catches: bool) -> None:
    handler = (Way(line=45, text="except RuntimeError:", first=42, last=44),) if catches else ()
    tried = Statement(line=42, text="try:", kind="try", ways=handler)
    attempts = Statement(line=41, text="for attempt in range(3):")
    steps = Statement(line=39, text="for batch in loader:")
    made = tapes()
    for tape in made.values():
        tape.call("all_reduce", 10, inside=(tried, attempts, steps))
    made[0].call(
        "DDP backward", 12, inside=(tried, attempts, steps), state=State.BEGUN, at=START + 5
    )
    made[1].call("all_reduce", 10, inside=(tried, attempts, steps), state=State.BEGUN, at=START + 5)
    finding = found(tmp_path, made)
    assert (finding.rule == "retried") is catches
    if catches:
        assert finding.ranks == (1,)
        assert "`except RuntimeError:` (train.py:45) catches an exception" in finding.cause


@pytest.mark.parametrize("set_up", [0, 3])
def test_a_library_calls_the_function_in_a_loop_of_its_own(tmp_path: Path, set_up: int) -> None:
    """The rounds since training began say that it is past the call; what set it up does not."""
    made = tapes()
    for tape in made.values():
        for _ in range(set_up):
            tape.call("broadcast", 99, caller=40, step=0)
        for step in range(1, 7):
            tape.call("broadcast", 99, caller=40, step=step)
            if step < 6:
                tape.call("all_gather", 20, caller=40, step=step, inside=(PAST,))
                tape.call("DDP backward", 21, caller=40, step=step)
    waiting(made[0], "all_gather", 20, 40, step=6, inside=(PAST,))
    waiting(made[1], "broadcast", 99, 40, step=6)
    for tape in made.values():
        tape.events += steps(6)
    finding = found(tmp_path, made)
    assert (finding.rule, finding.ranks) == ("missing-call", (1,))
    assert finding.cause.count("`if not path.exists():` (train.py:15) leads out of it first") == 1
    assert [str(r.location) for r in finding.related][:1] == ["train.py:15"]
    assert "move it before `if not path.exists():`" in finding.fix
