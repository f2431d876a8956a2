"""DDP604 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from leavers import CLOSED, found, left
from recordings import PID
from tapes import CWD, START, WALL, CallLog, run_of, stall

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    Frame,
    GroupDestroyed,
    InitEntered,
    ProcessEnded,
    RankExiting,
    Site,
    Statement,
    Way,
)
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State


def test_the_victim_caught_its_error_and_left_with_a_status(tmp_path: Path) -> None:
    run = left(tmp_path, caught=True)
    (finding,) = found(run)
    assert finding.rule == "loop-exit"
    assert finding.ranks == (1,)
    (lost,) = FirstFailure().examine(run)
    assert lost.rule == "lost-peers"
    assert lost.ranks == (0,)
    assert RankExitedEarly().explains(finding, lost)


def test_it_failed_itself(tmp_path: Path) -> None:
    raised = ExceptionRaised(at=START + 5.4, kind="ValueError", message="boom")
    leaver: list[object] = [raised, RankExiting(at=START + 5.5, how="exception", status=1)]
    assert found(left(tmp_path, leaver=leaver)) == []


def test_all_leave_together(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    ends = {r: [RankExiting(at=START + 5 + r, how="return")] for r in made}
    assert found(run_of(tmp_path, made, more=ends)) == []


ON_ZERO = (Statement(line=30, text="if rank == 0:"),)


def in_no_call(folder: Path, other: list[Event]) -> Run:
    """Rank 0 lost its peer in communication that is no call of its log."""
    frames = (
        Frame(file=f"{CWD}/train.py", line=31, function="main", user=True, inside=ON_ZERO),
        Frame(file="/torch/distributed/tensor/_api.py", line=7, function="full_tensor"),
    )
    raised = ExceptionRaised(at=START + 6, kind="RuntimeError", message=CLOSED, frames=frames)
    status = 1 if any(isinstance(e, ExceptionRaised) for e in other) else 0
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    return run_of(folder, made, more={0: [raised], 1: other}, ended={0: 1, 1: status})


def test_a_peer_that_was_lost_in_communication_of_torchs_own(tmp_path: Path) -> None:
    (finding,) = found(in_no_call(tmp_path, [RankExiting(at=START + 5, how="return")]))
    assert finding.rule == "entered-alone"
    assert finding.ranks == (0,)
    assert finding.evidence["left"] == "rank 1"
    assert [str(r.location) for r in finding.related] == ["train.py:30"]


def test_a_peer_that_failed_or_was_still_there(tmp_path: Path) -> None:
    boom = ExceptionRaised(at=START + 4, kind="ValueError", message="boom")
    assert (
        found(in_no_call(tmp_path, [boom, RankExiting(at=START + 5, how="exception", status=1)]))
        == []
    )
    assert found(in_no_call(tmp_path / "b", [RankExiting(at=START + 7, how="return")])) == []


@pytest.mark.parametrize("line", [30, 8])
def test_a_call_that_only_some_ranks_make_at_the_end(tmp_path: Path, line: int) -> None:
    made = {
        rank: CallLog(rank, 2).call(line=9, inside=((line, "if rank == 0:"),)) for rank in range(2)
    }
    made[0].call("barrier", 31, inside=((30, "if rank == 0:"),), state=State.FAILED, at=START + 5,
                 lasts=1)  # fmt: skip
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    more: dict[int, list[Event]] = {
        0: [raised],
        1: [RankExiting(at=START + 5.5, how="return")],
    }
    (finding,) = found(run_of(tmp_path, made, more=more, ended={0: 1}))
    assert finding.rule == ("entered-alone" if line == 8 else "program-ended")
    assert finding.ranks == ((0,) if line == 8 else (1,))
    assert finding.location is not None
    assert finding.location.line == 31


def test_a_group_that_was_destroyed_before_the_others_were_done(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=7, state=State.FAILED, at=START + 5, lasts=1)
    line = Site(at=START, id=60, file=f"{CWD}/train.py", line=4, function="finish")
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    more: dict[int, list[Event]] = {0: [raised], 1: [line, GroupDestroyed(at=START + 5.9, site=60)]}
    cleaned = ProcessEnded(at=START + 7, rank=1, pid=PID + 1, signal=15, by_launcher=True,
                           wall=WALL + 7)  # fmt: skip
    (finding,) = found(run_of(tmp_path, made, more=more, nodes={0: [cleaned]}))
    assert finding.rule == "group-destroyed"
    assert finding.ranks == (1,)
    assert str(finding.location) == "train.py:4"


@pytest.mark.parametrize("again", [True, False])
def test_a_group_that_was_destroyed_to_be_formed_again(tmp_path: Path, again: bool) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=7, state=State.BEGUN, at=START + 6)
    end = GroupDestroyed(at=START + 5, site=60)
    joins = InitEntered(at=START + 5.1, backend="gloo", init_method="", rank=-1, world_size=-1,
                        env_rank=1, env_world_size=2, env_local_rank=1, timeout_s=-1,
                        site=60)  # fmt: skip
    more: dict[int, list[Event]] = {1: [end, *([joins] if again else [])]}
    run = run_of(tmp_path, made, more=more, nodes={0: [stall(START + 30, START + 6)]})
    assert [f.ranks for f in found(run)] == ([] if again else [(1,)])


@pytest.mark.parametrize("omitted", [True, False])
def test_a_message_that_was_not_sent(tmp_path: Path, omitted: bool) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    loop = ((8, "for k in range(3):"),)
    for k in range(3):
        for rank, tape in made.items():
            last = rank == 0 and k == 2
            sends = () if omitted and rank == 1 and k == 1 else (1 - rank,)
            tape.call("batch_isend_irecv", 9, inside=loop, sends=sends, receives=(1 - rank,),
                      state=State.FAILED if last else State.DONE,
                      at=START + 5 if last else None, lasts=1 if last else 0.01)  # fmt: skip
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    more: dict[int, list[Event]] = {0: [raised], 1: [RankExiting(at=START + 5.5, how="return")]}
    (finding,) = found(run_of(tmp_path, made, more=more, ended={0: 1}))
    assert finding.rule == "unmatched-message"
    assert finding.ranks == (1,)
    assert (" 2 messages" in finding.cause) is omitted


@pytest.mark.parametrize(("before", "certain"), [(2, True), (0, False)])
def test_a_branch_that_the_rank_that_left_never_entered(
    tmp_path: Path, before: int, certain: bool
) -> None:
    loop = (8, "for epoch in range(9):")
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for epoch in range(3):
        for rank, tape in made.items():
            if rank == 0 and epoch < before:
                tape.call("DDP forward", 12, inside=((11, "if self.chief:"), loop))
            else:
                tape.call("DDP forward", 9, inside=(loop,))
            tape.call("DDP backward", 10, inside=(loop,))
    made[0].call(
        "DDP forward", 12, inside=((11, "if self.chief:"), loop), state=State.BEGUN, at=START + 5
    )
    leaving = [RankExiting(at=START + 5, how="return")]
    (finding,) = found(run_of(tmp_path, made, more={1: leaving}, now=START + 8))
    assert finding.rule == ("entered-alone" if certain else "loop-exit")
    assert finding.ranks == ((0,) if certain else (1,))


@pytest.mark.parametrize(("loops", "rule"), [(False, "entered-alone"), (True, "program-ended")])
def test_a_rank_that_came_to_the_end_of_the_program(tmp_path: Path, loops: bool, rule: str) -> None:
    """Another line that reads the same is another call; in a loop it may have left that."""
    around = ((11, "if state.best is not None:"), *([(8, "while due():")] if loops else []))
    made = {rank: CallLog(rank, 2).call("barrier", 3, "dist.barrier()") for rank in range(2)}
    made[0].call("barrier", 12, "dist.barrier()", inside=around, state=State.BEGUN, at=START + 5)
    gone = [RankExiting(at=START + 5, how="return")]
    (finding,) = found(run_of(tmp_path, made, more={1: gone}, now=START + 8))
    assert finding.rule == rule
    assert finding.ranks == ((1,) if loops else (0,))


@pytest.mark.parametrize("entered", [(0,), (1, 2)])
def test_who_is_at_fault_where_only_some_enter_a_branch(
    tmp_path: Path, entered: tuple[int, ...]
) -> None:
    made = {rank: CallLog(rank, 3).call(line=9) for rank in range(3)}
    for rank in entered:
        made[rank].call("barrier", 31, inside=ON_ZERO, state=State.FAILED, at=START + 5, lasts=1)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    gone = RankExiting(at=START + 5.5, how="return")
    more: dict[int, list[Event]] = {r: [raised if r in entered else gone] for r in made}
    run = run_of(tmp_path, made, more=more, ended=dict.fromkeys(entered, 1))
    (finding,) = found(run)
    assert finding.rule == ("entered-alone" if entered == (0,) else "branch")
    assert finding.ranks == (0,)
    (lost,) = FirstFailure().examine(run)
    assert lost.rule == "lost-peers"
    assert RankExitedEarly().explains(finding, lost)


@pytest.mark.parametrize(
    ("ended", "stalled", "now", "stuck"),
    [
        (None, False, 9, False),  # its interpreter may be ending its workers and threads
        (None, True, 14, False),
        (None, True, 16, True),
        (7, False, 10, False),
        (7, False, 13, True),
    ],
)
def test_proven_only_when_nothing_more_can_come_of_its_end(
    tmp_path: Path, ended: int | None, stalled: bool, now: int, stuck: bool
) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=9, state=State.BEGUN, at=START + 5)
    seen: list[Event] = [stall(START + 12, START + 5)] if stalled else []
    if ended is not None:
        end = ProcessEnded(at=START + ended, rank=1, pid=PID + 1, wall=WALL + ended, status=0)
        seen.append(end)
    more = {1: [RankExiting(at=START + 5, how="sys.exit", status=0)]}
    (finding,) = found(run_of(tmp_path, made, more=more, nodes={0: seen}, now=START + now))
    assert finding.rule == "exit-raised"
    assert finding.deadlocked is stuck


@pytest.mark.parametrize("how", ["sys.exit", "return"])
def test_nothing_caught_the_exit_that_a_signal_handler_raised(tmp_path: Path, how: str) -> None:
    handler = Way(line=11, text="except Exception:", first=8, last=10)
    loop = (
        Statement(line=8, text="for step in range(9):"),
        Statement(line=7, text="try:", ways=(handler,)),
    )
    leaver: list[object] = [RankExiting(at=START + 5.5, how=how)]
    (finding,) = found(left(tmp_path, leaver=leaver, loop=loop))
    assert finding.rule == ("exit-raised" if how == "sys.exit" else "loop-exit")


@pytest.mark.parametrize("how", ["sys.exit", "return"])
def test_what_the_program_called_to_leave_is_named(tmp_path: Path, how: str) -> None:
    leaver: list[object] = [RankExiting(at=START + 5.5, how=how, status=0, site=900)]
    (finding,) = found(left(tmp_path, leaver=leaver))
    assert finding.rule == ("exit-called" if how == "sys.exit" else "loop-exit")


@pytest.mark.parametrize("op", ["all_reduce", "DDP backward"])
def test_only_members_of_the_group_that_is_waited_in(tmp_path: Path, op: str) -> None:
    """Rank 0 lost its partner in a call that both have begun; ranks 2 and 3 have their own."""
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        tape.group(1, str(rank // 2 + 1), (0, 1) if rank < 2 else (2, 3))
        state = State.DONE if rank else State.FAILED
        tape.call(op, 9, group=1, state=state, at=START + 2, lasts=0.1 if rank else 4)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    ends = {r: [RankExiting(at=START + 5, how="return")] for r in range(1, 4)}
    said = found(run_of(tmp_path, made, more={0: [raised], **ends}, ended={0: 1}))
    assert [f.ranks for f in said] == ([(1,)] if op.startswith("DDP") else [])
