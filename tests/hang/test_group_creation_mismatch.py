"""DDP607 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.group_creation_mismatch import GroupCreationMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from tapes import START, CallLog, run_of, stall

from ddpdoctor.events import RankExiting, Signature, StepDone
from ddpdoctor.report.diagnose import fold
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

NEW = -2


def found(run: Run) -> list[Finding]:
    return list(GroupCreationMismatch().examine(run))


def test_every_rank_its_own_group(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        mine = (0, 1) if rank < 2 else (2, 3)
        tape.call("new_group", 9, group=NEW, ranks=mine)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "different-order"
    assert set(finding.subjects) == {"[0, 1]", "[2, 3]"}


@pytest.mark.parametrize("branch", ["if rank in ranks:", "if tensor_parallel > 1:"])
@pytest.mark.parametrize("third", [(1, 2), (0,)])
def test_groups_that_only_their_members_make(
    tmp_path: Path, branch: str, third: tuple[int, ...]
) -> None:
    made = {rank: CallLog(rank, 3) for rank in range(3)}
    for rank, tape in made.items():
        mine = (0, 1) if rank < 2 else third
        tape.call("new_group", 9, group=NEW, ranks=mine, inside=((8, branch),))
    (finding,) = found(run_of(tmp_path, made))
    own = "rank in ranks" in branch and third == (1, 2)
    assert finding.ranks == ((0, 1, 2) if own else (2,))
    assert finding.rule == ("members-only" if own else "different-order")
    assert 8 in [r.location.line for r in finding.related] or not own


def test_groups_that_are_made_while_the_training_goes_on(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        for step in range(3):
            tape.call(line=5, step=step)
        tape.call("new_group", 9, group=NEW, ranks=(0, 1) if rank < 2 else (2, 3), step=3)
    taken = StepDone(at=START, optimizer=0, step=8, site=-1, wall_s=0.1)
    (finding,) = found(run_of(tmp_path, made, more={rank: [taken] for rank in made}))
    assert finding.rule == "different-order"
    assert finding.steps is not None and finding.steps.first == 3


def apart(working: bool = False) -> dict[int, CallLog]:
    """Ranks that made different groups, went on, and then wait in two different collectives."""
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    around = [(20, 'if __name__ == "__main__":')]
    for rank, tape in made.items():
        mine = (0, 1) if rank < 2 else (2, 3)
        tape.call("new_group", 9, group=NEW, ranks=mine, inside=around)
        tape.group(1, "1", mine)
        where = 0 if rank in (0, 3) else 1
        state = State.DONE if working and rank == 3 else State.BEGUN
        tape.call(
            "barrier" if where == 0 else "all_reduce", 11, group=where, state=state, at=START + 5
        )
    return made


def test_they_got_past_it_and_wait_elsewhere(tmp_path: Path) -> None:
    (finding,) = found(
        run_of(tmp_path, apart(), nodes={0: [stall(START + 40, START + 5)]}, now=START + 41)
    )
    assert finding.rule == "different-order"
    assert finding.deadlocked
    assert not [r for r in finding.related if "branch" in r.label]


def test_one_of_them_still_works(tmp_path: Path) -> None:
    (finding,) = found(
        run_of(
            tmp_path, apart(working=True), nodes={0: [stall(START + 40, START + 5)]}, now=START + 41
        )
    )
    assert finding.rule == "different-order"
    assert not finding.deadlocked


def test_only_some_ranks_make_it(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("new_group", 9, group=NEW, ranks=(0,), state=State.BEGUN, at=START + 5)
    made[1].call(line=12, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "never-created"
    assert finding.ranks == (1,)
    assert finding.deadlocked
    assert finding.location is not None
    assert finding.location.line == 9


def test_a_line_that_makes_a_group_on_the_way(tmp_path: Path) -> None:
    """A loader over an `IterDataPipe` does, where one rank alone iterates it."""
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    on_zero = ((8, "if rank == 0:"),)
    made[0].call("new_group", 9, "for batch in loader:", group=NEW, ranks=(0, 1), inside=on_zero,
                 state=State.BEGUN, at=START + 5)  # fmt: skip
    made[1].call("barrier", 12, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert (finding.rule, finding.label) == ("never-created", "never run by rank 1")
    assert [r.location.line for r in finding.related] == [8]
    assert finding.fix.startswith("run this line on every rank")


def test_some_ranks_made_it_and_all_are_over(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("new_group", 9, group=NEW, ranks=(0,))
    more = {r: [RankExiting(at=START + 5, how="return")] for r in made}
    (finding,) = found(run_of(tmp_path, made, more=more))
    assert finding.rule == "never-created"
    assert finding.ranks == (1,)


def test_same_groups_in_the_same_order(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for tape in made.values():
        for ranks in ((0, 1), (2, 3)):
            tape.call("new_group", 9, group=NEW, ranks=ranks)
    assert found(run_of(tmp_path, made)) == []


def test_a_rank_that_is_only_late(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("new_group", 9, group=NEW, ranks=(0,), state=State.BEGUN, at=START + 5)
    assert found(run_of(tmp_path, made, now=START + 8)) == []


def test_a_rank_whose_record_ends_before_its_calls(tmp_path: Path) -> None:
    """The disk was full: that it made a group stands in its ring, which one stands nowhere."""
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for tape in made.values():
        tape.call("new_group", 9, group=NEW, ranks=(0, 1))
    made[1].events = [e for e in made[1].events if not isinstance(e, Signature)]
    assert found(run_of(tmp_path, made)) == []


def test_what_fails_after_groups_in_another_order_follows_from_it(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        tape.call("new_group", 9, group=NEW, ranks=(0, 1) if rank < 2 else (2, 3))
        if rank < 3:
            tape.call(line=11, state=State.BEGUN, at=START + 5)
    more = {3: [RankExiting(at=START + 6, how="return")]}
    run = run_of(tmp_path, made, more=more, nodes={0: [stall(START + 40, START + 5)]})
    checks = RankExitedEarly(), GroupCreationMismatch()
    every = [finding for check in checks for finding in check.examine(run)]
    assert len(every) == 2
    (root,) = fold(every, {check.name: check for check in checks})
    assert root.check == "group-creation-mismatch"
