"""Calls in another order on lines that read alike: what is a fault, and what may be meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from msgspec import structs
from tapes import CWD, START, CallLog, run_of, tapes

from ddpdoctor.events import CallSite, Event, Place, Site, Statement, StepDone
from ddpdoctor.report.findings import Finding, Steps
from ddpdoctor.run import Run

LOSS, COUNT = 8, 18
LOOP = Statement(line=4, text="for x in loader:")
IF = Statement(line=7, text="if mine:")
ELSE = Statement(line=17, text="else:  # if mine:", opener=7)
ON_RANK = Statement(line=7, text="if turn == rank:")
TRAINED: dict[int, list[Event]] = {
    r: [StepDone(at=START, optimizer=0, step=5, site=-1, wall_s=0.1)] for r in range(3)
}


def found(run: Run) -> list[Finding]:
    return list(CollectiveMismatch().examine(run))


def reduced(
    tape: CallLog, *lines: int, step: int = 0, op: str = "all_reduce", **around: int
) -> None:
    for line in lines:
        tape.call(op, line, "call(t)", inside=(LOOP,), step=step, **around)  # type: ignore[arg-type]


@pytest.mark.parametrize("caller", [(), 30], ids=["on their own", "called from one line"])
def test_two_lines_that_read_alike_in_every_step(
    tmp_path: Path, caller: int | Sequence[int]
) -> None:
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(6):
            lines = (COUNT, LOSS) if rank == 2 and step > 1 else (LOSS, COUNT)
            reduced(tape, *lines, step=step, caller=caller)  # type: ignore[arg-type]
    (finding,) = found(run_of(tmp_path, made, more=TRAINED))
    assert finding.rule == "reordered"
    assert finding.ranks == (2,)
    assert finding.location is not None
    assert finding.location.line == COUNT
    assert finding.steps == Steps(2, 5, 4)


def test_two_lines_that_read_alike_without_steps(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        reduced(tape, *((COUNT, LOSS) if rank else (LOSS, COUNT)) * 3)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "reordered"
    assert finding.ranks == (0, 1)
    assert finding.evidence["times"] == 3


def test_behind_a_barrier_that_has_a_line_of_its_own_on_each_rank(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.call("barrier", 2 + rank, "dist.barrier()")
        reduced(tape, *((COUNT, LOSS) if rank else (LOSS, COUNT)) * 3)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "reordered"
    assert finding.evidence["call_number"] == 1


@pytest.mark.parametrize(
    ("first", "second"), [(IF, ELSE), (ON_RANK, LOOP)], ids=["two arms", "a turn of the rank"]
)
def test_each_rank_takes_its_turn(tmp_path: Path, first: Statement, second: Statement) -> None:
    made = tapes()
    for rank, tape in made.items():
        for turn in (0, 1) * 4:
            mine = turn == rank
            line, head = (LOSS, first) if mine else (COUNT, second)
            tape.call(line=line, text="call(t)", inside=(head, LOOP) if head != LOOP else (LOOP,))
    assert found(run_of(tmp_path, made)) == []


def test_each_of_three_ranks_takes_its_turn_by_way_of_one_line(tmp_path: Path) -> None:
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(4):
            reduced(tape, *(LOSS if turn == rank else COUNT for turn in range(3)), step=step)
    assert found(run_of(tmp_path, made, more=TRAINED)) == []


def test_each_rank_is_on_one_of_the_lines_in_a_step(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        for step in range(6):
            reduced(tape, COUNT if (step + rank) % 2 else LOSS, step=step)
    assert found(run_of(tmp_path, made, more=TRAINED)) == []


def test_each_rank_goes_by_its_own_data(tmp_path: Path) -> None:
    made = tapes()
    orders = ((0, 1, 0, 0, 1, 1, 0, 1, 0, 1), (1, 0, 0, 1, 1, 0, 1, 0, 1, 0))
    for rank, tape in made.items():
        reduced(tape, *(COUNT if kind else LOSS for kind in orders[rank]))
    assert found(run_of(tmp_path, made)) == []


@pytest.mark.parametrize("op", ["barrier", "all_reduce"])
def test_what_carries_nothing_and_what_comes_seldom(tmp_path: Path, op: str) -> None:
    made = tapes()
    for rank, tape in made.items():
        rounds = 6 if op == "barrier" else 2
        reduced(tape, *((COUNT, LOSS) if rank else (LOSS, COUNT)) * rounds, op=op)
    assert found(run_of(tmp_path, made)) == []


def named(tape: CallLog, *names: str, step: int = 0, op: str = "all_reduce") -> None:
    for name in names:
        tape.call(op, LOSS, "dist.all_reduce(v)", step=step, caller=30, hands_on=1, key=name)


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_line_in_a_loop_over_names(tmp_path: Path, rounds: int) -> None:
    """Who takes them in another order each time mixes them up as well."""
    made = tapes(3)
    for rank, tape in made.items():
        for step in range(rounds):
            names = "a", "b", "c"
            turned = ("c", "b", "a") if step else ("b", "a", "c")
            named(tape, *turned if rank == 2 else names, step=step)
    (finding,) = found(run_of(tmp_path, made, more=TRAINED))
    assert finding.rule == "key-order"
    assert finding.ranks == (2,)
    assert finding.location is not None and finding.location.line == 30


def lacked(
    tmp_path: Path, ours: str, theirs: str, steps: int = 3, after: int = 0, within: str = ""
) -> list[Finding]:
    """One letter is one name; in the last step rank 1 has `theirs`, and after the loop all make
    another call, rank 1 on line `after` where it is given."""
    made = tapes()
    loop = Statement(line=7, text="for k, v in figures.items():", kind="for")
    test = Statement(line=LOSS, text="if large:", kind="if")
    for rank, tape in made.items():
        for step in range(steps):
            for name in theirs if rank and step == steps - 1 else ours:
                tape.call("all_reduce", LOSS, "dist.all_reduce(v)", step=step, inside=(loop,),
                          key=f"k = {name!r}")  # fmt: skip
                if name == "b":  # which line 20 sets
                    last = tape.events[-1]
                    assert isinstance(last, CallSite)
                    spot = Site(at=START, id=77, file=f"{CWD}/model.py", line=20, function="f")
                    place = Place(site=77, inside=(test,))
                    tape.events[-1:] = [spot, structs.replace(last, set_at=place)]
            last_step = step == steps - 1
            line = after if after and rank and last_step else COUNT
            inside = (loop,) if within and rank and last_step else ()
            tape.call("all_reduce", line, "other(x)", step=step, inside=inside)
    return found(run_of(tmp_path, made, more=TRAINED))


@pytest.mark.parametrize(
    ("theirs", "lacks"), [("ac", "b"), ("a", "b` and `c"), ("ab", "c"), ("bc", "a")]
)
def test_a_loop_over_names_that_lacks_one_on_a_rank(
    tmp_path: Path, theirs: str, lacks: str
) -> None:
    (finding,) = lacked(tmp_path, "abc", theirs)
    assert (finding.rule, finding.ranks) == ("lacking-name", (1,))
    assert f"no all_reduce for `{lacks}`" in finding.summary
    assert finding.location is not None and finding.location.line == LOSS
    lines = [r.location.line for r in finding.related]
    assert (20 in lines) is (lacks[0] == "b")


@pytest.mark.parametrize(
    ("theirs", "after", "within"),
    [
        ("abd", 0, ""),  # each has a name of its own
        ("abc", 0, ""),
        ("ab", 30, "the loop"),  # the other branch in the loop makes the call
    ],
)
def test_names_that_no_rank_lacks(tmp_path: Path, theirs: str, after: int, within: str) -> None:
    rules = [f.rule for f in lacked(tmp_path, "abc", theirs, after=after, within=within)]
    assert "lacking-name" not in rules
    assert not rules or within


@pytest.mark.parametrize("by_framework", [True, False])
def test_other_names_that_a_framework_reduces(tmp_path: Path, by_framework: bool) -> None:
    """As many on each rank, so that nothing hangs: the values are mixed."""
    made = tapes()
    for rank, tape in made.items():
        for step in range(3):
            for name in ("loss", "night" if rank else "day"):
                tape.call("all_reduce", LOSS, "trainer.fit(model)", step=step,
                          key=f"name = {name!r}", through="fit" * by_framework)  # fmt: skip
                last = tape.events[-1]
                assert isinstance(last, CallSite)
                spot = Site(at=START, id=77, file=f"{CWD}/model.py", line=20, function="f")
                tape.events[-1:] = [spot, structs.replace(last, set_at=Place(site=77))]
            tape.call("barrier", COUNT, "barrier()", step=step)
    told = found(run_of(tmp_path, made, more=TRAINED))
    assert [(f.rule, f.ranks) for f in told] == [("lacking-name", (1,))] * by_framework
    if told:
        assert told[0].location is not None and told[0].location.line == 20
        assert "no all_reduce for `day`" in told[0].summary


def test_names_that_say_nothing(tmp_path: Path) -> None:
    """Each rank has its own task in every step, or names of its own; barriers carry nothing."""
    for number, (mine, yours, op) in enumerate(
        ((["a", "b"], ["b", "a"], ""), (["a", "b"], ["c", "d"], ""), (["a"], ["b"], ""),
         (["a", "b"], ["b", "a"], "barrier"))
    ):  # fmt: skip
        made = tapes()
        for rank, tape in made.items():
            for step in range(6):
                names = yours if rank else mine
                by_step = [names[step % len(names)]] if not number else names
                named(tape, *by_step, step=step, op=op or "all_reduce")
        assert found(run_of(tmp_path / str(number), made, more=TRAINED)) == [], number


def test_names_that_are_on_record_for_one_round_only(tmp_path: Path) -> None:
    """As those of parameters are: later rounds are not compared, and not called right."""
    made = tapes()
    for rank, tape in made.items():
        named(tape, *(("b", "a") if rank else ("a", "b")), step=0)
        for step in range(1, 6):
            named(tape, "", "", step=step)
    (finding,) = found(run_of(tmp_path, made, more=TRAINED))
    assert finding.rule == "key-order"
    assert finding.steps is not None
    assert (finding.steps.count, finding.steps.compared) == (1, 1)
