"""DDP609 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ddpdoctor.checks.hang.stall import Stall
from recordings import ring_of, started, torch_loaded
from tapes import CWD, START, CallLog, run_of, stall, stood

from ddpdoctor.events import (
    CommHook,
    FlightEntry,
    FlightLog,
    GroupDestroyed,
    InitEntered,
    Site,
    StackFrame,
    Statement,
    StepDone,
    Way,
)
from ddpdoctor.report.findings import Confidence, Finding, Severity
from ddpdoctor.run import Run, load
from ddpdoctor.storage.call_ring import State
from ddpdoctor.storage.run_folder import RunFolder


def found(run: Run) -> list[Finding]:
    return list(Stall().examine(run))


def pair(ops: tuple[str, str]) -> dict[int, CallLog]:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        tape.call(ops[rank], 9, peer=1 - rank, state=State.BEGUN, at=START + 5)
    return made


def test_both_receive(tmp_path: Path) -> None:
    (finding,) = found(run_of(tmp_path, pair(("recv", "recv")), now=START + 8))
    assert finding.rule == "cycle"
    assert (finding.severity, finding.confidence) == (Severity.ERROR, Confidence.PROVEN)
    assert finding.deadlocked
    assert "a message that is sent only afterwards" in finding.cause


def test_both_send(tmp_path: Path) -> None:
    (finding,) = found(run_of(tmp_path, pair(("send", "send")), now=START + 8))
    assert finding.rule == "cycle"
    assert "until another one receives its message" in finding.cause


def pipeline(*counts: tuple[int, int]) -> dict[int, CallLog]:
    """Two stages, with the micro-batches that each does in every round; the last one hangs."""
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for number, (sent, received) in enumerate(counts):
        last = number == len(counts) - 1
        for tape, there, back, n, m in (
            (made[0], "send", "recv", sent, received),
            (made[1], "recv", "send", received, sent),
        ):
            peer = 1 - tape.rank
            for _ in range(min(n, m) if last else n):
                tape.call(there, 9, peer=peer)
            for _ in range(0 if last else n):
                tape.call(back, 12, peer=peer)
            if last:
                more = n > m  # on the side that begins one more
                tape.call(there if more else back, 9 if more else 12, peer=peer,
                          state=State.BEGUN, at=START + 5)  # fmt: skip
    return made


def test_a_message_more_than_the_other_stage_sends(tmp_path: Path) -> None:
    (finding,) = found(run_of(tmp_path, pipeline((4, 4), (4, 4), (4, 4), (4, 5)), now=START + 8))
    assert finding.rule == "extra-message"
    assert (finding.ranks, str(finding.location)) == ((1,), "train.py:9")
    assert [r.location.line for r in finding.related] == [12, 12]


def test_a_message_less_than_the_other_stage_takes(tmp_path: Path) -> None:
    made = pipeline((4, 4), (4, 4), (4, 4), (3, 3))
    made[1].calls.pop()
    made[1].call("recv", 9, peer=0, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "missing-message"
    assert (finding.ranks, str(finding.location)) == ((0,), "train.py:9")


def test_rounds_of_as_many_messages_as_they_like(tmp_path: Path) -> None:
    made = pipeline((4, 4), (2, 2), (5, 5), (4, 4), (3, 4))
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "cycle"
    assert finding.ranks == (0, 1)
    assert {str(finding.location), *(str(r.location) for r in finding.related)} == {
        "train.py:9", "train.py:12",
    }  # fmt: skip


def test_a_receive_that_is_missing(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("send", 9, peer=1, state=State.BEGUN, at=START + 5)
    made[1].call("all_gather", 12, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "message-after-collective"


@pytest.mark.parametrize(("bounds", "line"), [((7, 9), 6), ((7, 8), 9), ((9, 9), 6)])
def test_a_message_that_is_left_out_in_one_round(
    tmp_path: Path, bounds: tuple[int, int], line: int
) -> None:
    way = Way(line=6, text="if i == 3: continue", first=bounds[0], last=bounds[1])
    loop = (Statement(line=4, text="for i in range(20):", ways=(way,)),)
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for _ in range(3):
        made[0].call("send", 15, peer=1).call("recv", 16, peer=1)
        made[1].call("recv", 5, peer=0, inside=loop).call("send", 9, peer=0, inside=loop)
    made[0].call("send", 15, peer=1).call("recv", 16, peer=1, state=State.BEGUN, at=START + 5)
    made[1].call("recv", 5, peer=0, inside=loop)
    made[1].call("recv", 5, peer=0, inside=loop, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "missing-message"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == line


@pytest.mark.parametrize(
    ("rounds", "way", "line"), [(5, "exits", 7), (5, "ways", 7), (5, "", 9), (1, "exits", 5)]
)
def test_a_message_left_out_by_who_has_left_the_loop(
    tmp_path: Path, rounds: int, way: str, line: int
) -> None:
    ways = {way: (Way(line=7, text="if i == last: break", first=8, last=9),)} if way else {}
    loop = (Statement(line=4, text="for i in range(n):", **ways),)
    made = {rank: CallLog(rank, 3) for rank in range(3)}
    for i in range(rounds + 1):
        made[0].call("send", 9, peer=1, inside=loop)
        made[1].call("recv", 5, peer=0, inside=loop)
        if i < rounds:
            made[1].call("send", 9, peer=2, inside=loop)
            made[2].call("recv", 5, peer=1, inside=loop)
    made[2].call("recv", 5, peer=1, inside=loop, state=State.BEGUN, at=START + 5)
    for rank in (0, 1):
        made[rank].call("barrier", 19, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == ("missing-message" if rounds > 1 else "message-after-collective")
    assert finding.ranks == ((1,) if rounds > 1 else (1, 2))
    assert finding.location is not None
    assert finding.location.line == line


def test_a_loop_of_messages_that_is_over(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for _ in range(5):
        made[0].call("send", 9, peer=1)
        made[1].call("recv", 5, peer=0)
    made[0].call("barrier", 19, state=State.BEGUN, at=START + 5)
    made[1].call("recv", 5, peer=0, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "message-after-collective"
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize("line", [5, 7])
def test_two_rings_at_once(tmp_path: Path, line: int) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        where = 5 if rank < 2 else line
        tape.call("recv", where, peer=rank ^ 1, state=State.BEGUN, at=START + 5)
    findings = found(run_of(tmp_path, made, now=START + 8))
    together = line == 5
    assert [f.ranks for f in findings] == ([(0, 1, 2, 3)] if together else [(0, 1), (2, 3)])


def test_a_message_left_out_before_a_collective(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for _ in range(3):
        made[0].call("send", 9, peer=1).call("all_gather", 12)
        made[1].call("recv", 5, peer=0).call("all_gather", 12)
    made[0].call("send", 9, peer=1, state=State.BEGUN, at=START + 5)
    made[1].call("all_gather", 12, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == "missing-message"
    assert (finding.ranks, str(finding.location)) == ((1,), "train.py:5")


def test_a_message_on_its_way(tmp_path: Path) -> None:
    assert found(run_of(tmp_path, pair(("send", "recv")), now=START + 8)) == []


def test_a_message_that_does_not_arrive(tmp_path: Path) -> None:
    nodes = {0: [stall(START + 40, START + 5)]}
    run = run_of(tmp_path, pair(("send", "recv")), nodes=nodes, now=START + 41)
    (finding,) = found(run)
    assert finding.rule == "waiting-messages"
    assert finding.confidence is Confidence.SUSPECTED


def test_all_in_one_collective(tmp_path: Path) -> None:
    made = {r: CallLog(r, 2).call(line=9, state=State.BEGUN, at=START + 5) for r in range(2)}
    seen = [
        stood(0, 9, "all_reduce(x)"),
        stood(1, 9, "all_reduce(x)"),
        stall(START + 50, START + 5),
    ]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended={0: -15, 1: -15}))
    assert finding.rule == "same-collective"
    assert finding.severity is Severity.WARNING
    (row,) = finding.evidence["stacks"]  # type: ignore[misc]
    assert row["ranks"] == "0-1"  # type: ignore[index]


def test_all_at_one_number_in_different_collectives(tmp_path: Path) -> None:
    made = {r: CallLog(r, 2) for r in range(2)}
    made[0].call("barrier", 8, state=State.BEGUN, at=START + 5)
    made[1].call(line=9, state=State.BEGUN, at=START + 5)
    seen = [stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended={0: -15, 1: -15}))
    assert finding.rule == "waiting-messages"


def test_all_are_at_one_line_of_their_own(tmp_path: Path) -> None:
    made = {r: CallLog(r, 3).call(line=5) for r in range(3)}
    seen = [*(stood(r, 9, "event.wait()") for r in made), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended=dict.fromkeys(made, -15)))
    assert finding.rule == "own-code"


def test_no_stall_on_record(tmp_path: Path) -> None:
    made = {r: CallLog(r, 2).call(line=9, state=State.BEGUN, at=START + 5) for r in range(2)}
    assert found(run_of(tmp_path, made, now=START + 300)) == []


def test_a_process_that_left_and_does_not_end(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=5) for rank in range(2)}
    over = {r: [GroupDestroyed(at=START + 5, name="", site=-1)] for r in made}
    at_exit = StackFrame(file="/usr/lib/python3.11/threading.py", line=1590, function="_shutdown")
    seen = [
        stood(
            1, 9, "", frames=(at_exit,), threads=("uploader (up.py:2)",),
            thread_frames=(StackFrame(file="up.py", line=2, function="uploader", user=True),),
        ),
        stall(START + 50, START + 5),
    ]  # fmt: skip
    run = run_of(tmp_path, made, more=over, nodes={0: seen}, ended={0: 0, 1: -15})
    (finding,) = found(run)
    assert finding.rule == "not-exiting"
    assert (finding.ranks, finding.severity) == ((1,), Severity.WARNING)
    assert str(finding.location) == "up.py:2"


@pytest.mark.parametrize(("outermost", "named"), [("flush", True), ("<module>", False)])
def test_what_python_calls_at_exit_does_not_return(
    tmp_path: Path, outermost: str, named: bool
) -> None:
    made = {rank: CallLog(rank, 2).call(line=5) for rank in range(2)}
    over = {r: [GroupDestroyed(at=START + 5, name="", site=-1)] for r in made}
    frames = tuple(
        StackFrame(file="up.py", line=n, function=f, user=True) for n, f in ((7, "wait"), (9, ""))
    )
    frames = (frames[0], msgspec.structs.replace(frames[1], function=outermost))
    seen = [stood(1, 9, "", frames=frames), stall(START + 50, START + 5)]
    run = run_of(tmp_path, made, more=over, nodes={0: seen}, ended={0: 0, 1: -15})
    (finding,) = found(run)
    assert ("flush, which Python calls at exit" in finding.cause) is named
    assert str(finding.location) == "up.py:7"


def test_all_in_the_backward_of_a_model_with_a_hook(tmp_path: Path) -> None:
    made = {
        r: CallLog(r, 2).call("DDP backward", 9, state=State.BEGUN, at=START + 5) for r in (0, 1)
    }
    nodes = {0: [stall(START + 20, START + 5)]}
    (finding,) = found(run_of(tmp_path / "none", made, nodes=nodes))
    assert finding.rule == "same-collective"
    hook = {r: [CommHook(at=START, model=0, name="powerSGD_hook")] for r in made}
    (finding,) = found(run_of(tmp_path / "hook", made, more=hook, nodes=nodes))
    assert finding.rule == "same-collective"
    barrier = {r: CallLog(r, 2).call("barrier", 9, state=State.BEGUN, at=START + 5) for r in made}
    (finding,) = found(run_of(tmp_path / "barrier", barrier, more=hook, nodes=nodes))
    assert finding.rule == "same-collective"


@pytest.mark.parametrize(
    ("backend", "hosts", "network"),
    [("gloo", ("a", "a"), False), ("gloo", ("a", "b"), True), ("cuda:nccl", ("a", "a"), True)],
)
def test_the_network_is_spoken_of_where_there_is_one(
    tmp_path: Path, backend: str, hosts: tuple[str, str], network: bool
) -> None:
    made = {r: CallLog(r, 2).call(line=8) for r in (0, 1)}
    for tape in made.values():
        tape.call("barrier", 9, state=State.BEGUN, at=START + 5)
        tape.events[0] = msgspec.structs.replace(tape.events[0], backend=backend)
    more = {r: [started(r, 2, node=host)] for r, host in enumerate(hosts)}
    nodes = {0: [stall(START + 20, START + 5)]}
    (finding,) = found(run_of(tmp_path, made, more=more, nodes=nodes))
    assert finding.rule == "same-collective"


@pytest.mark.parametrize(
    ("backend", "rule"), [("gloo", "same-collective"), ("nccl", "first-collective")]
)
def test_the_first_collective_connects_the_devices(tmp_path: Path, backend: str, rule: str) -> None:
    made = {r: CallLog(r, 2).call("DDP()", 9, state=State.BEGUN, at=START + 5) for r in (0, 1)}
    for tape in made.values():
        tape.events[0] = msgspec.structs.replace(tape.events[0], backend=backend)
    (finding,) = found(run_of(tmp_path, made, nodes={0: [stall(START + 20, START + 5)]}))
    assert finding.rule == rule


def test_a_rank_that_imports_is_not_in_the_collective(tmp_path: Path) -> None:
    made = {r: CallLog(r, 2).call("DDP()", 9, state=State.BEGUN, at=START + 5) for r in (0, 1)}
    where = stood(0, 9, "model = DDP(net)")
    reading = StackFrame(file="<frozen importlib._bootstrap_external>", line=147, function="_stat")
    first = msgspec.structs.replace(where, frames=(reading, *where.frames))
    seen = [first, stood(1, 9, "model = DDP(net)"), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}))
    assert (finding.rule, finding.ranks) == ("importing", (0,))
    assert "rank 0 is still importing modules" in finding.cause


def formed(at: float, rendezvous: str) -> InitEntered:
    return InitEntered(
        at=at, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=0, env_world_size=2,
        env_local_rank=0, timeout_s=-1, site=90, rendezvous=rendezvous,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "since", "again"),
    [
        (("host:1", "host:1"), START + 3, True),
        (("host:1", "host:2"), START + 3, False),
        (("host:1",), START + 3, False),
        (("host:1", "host:1"), START + 0.5, False),  # a call of that group came through
    ],
)
def test_a_group_that_was_formed_again_at_the_same_place(
    tmp_path: Path, places: tuple[str, ...], since: float, again: bool
) -> None:
    made = {
        r: CallLog(r, 2).call(line=7, at=START + 2).call(line=9, state=State.BEGUN, at=START + 5)
        for r in range(2)
    }
    inits = [formed(at, p) for at, p in zip((START + 0.1, since), places, strict=False)]
    line = Site(at=START, id=90, file=f"{CWD}/train.py", line=3, function="main", text="init()")
    more = {r: [line, *inits] for r in made}
    (finding,) = found(run_of(tmp_path, made, more=more, nodes={0: [stall(START + 20, START + 5)]}))
    assert finding.rule == ("group-formed-again" if again else "same-collective")
    assert finding.location is not None and (finding.location.line == 3) is again


def test_a_rank_without_a_record_is_not_said_to_be_there(tmp_path: Path) -> None:
    made = {0: CallLog(0, 2).call("barrier", 9, state=State.BEGUN, at=START + 5)}
    run = run_of(tmp_path, made, nodes={0: [stall(START + 20, START + 5)]}, world_size=2)
    (finding,) = found(run)
    assert finding.rule == "missing-record"
    made[1] = CallLog(1, 2).call("barrier", 9, state=State.BEGUN, at=START + 5)
    run = run_of(tmp_path / "both", made, nodes={0: [stall(START + 20, START + 5)]})
    (finding,) = found(run)
    assert finding.rule == "same-collective"


@pytest.mark.parametrize("another", [False, True], ids=["no ring", "the ring of another run"])
def test_a_rank_whose_calls_are_unknown_is_not_said_to_be_there(
    tmp_path: Path, another: bool
) -> None:
    made = {r: CallLog(r, 2).call("barrier", 9, state=State.BEGUN, at=START + 5) for r in range(2)}
    torch = {1: [torch_loaded()]}
    run = run_of(tmp_path, made, more=torch, nodes={0: [stall(START + 20, START + 5)]})
    path = run.ranks[1].path
    path.with_suffix(".ring").unlink()
    if another:
        ring_of(7, path).begin(0, 5, 0, 0, -1)
    (finding,) = found(load([RunFolder(tmp_path / "run")]))
    assert finding.rule == "missing-record"


def test_records_of_another_program_say_nothing(tmp_path: Path) -> None:
    made = {0: CallLog(0, 1).call("barrier", 9, state=State.BEGUN, at=START + 5)}
    standing = stood(0, 9, "dist.barrier()")
    run = run_of(tmp_path, made, nodes={0: [stall(START + 20, START + 5), standing]})
    path = run.ranks[0].path
    assert path is not None
    path.write_text('{"hello": [1, 2]}\n')
    assert found(load([RunFolder(tmp_path / "run")])) == []


@pytest.mark.parametrize("wrong", [True, False])
def test_a_ring_that_receives_from_where_it_sends(tmp_path: Path, wrong: bool) -> None:
    made = {rank: CallLog(rank, 4) for rank in range(4)}
    for rank, tape in made.items():
        right, left = (rank + 1) % 4, (rank - 1) % 4
        tape.call("batch_isend_irecv", 9, sends=(right,), receives=(right if wrong else left,),
                  state=State.WAITING, at=START + 5)  # fmt: skip
    findings = found(run_of(tmp_path, made, now=START + 8))
    assert len(findings) == wrong
    assert all(f.rule == "wrong-peers" for f in findings)


@pytest.mark.parametrize(
    ("line", "told"),
    [("return _get_default_store().get(key)", True), ("self.store.wait([k])", True),
     ("restored = cache.get(key)", False)],
)  # fmt: skip
def test_ranks_that_wait_for_a_key_of_a_store(tmp_path: Path, line: str, told: bool) -> None:
    made = {rank: CallLog(rank, 2).call("barrier", 9) for rank in range(2)}
    seen = [stall(START + 40, START + 5), *(stood(r, 20, line) for r in made)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}))
    assert finding.rule == "own-code"


def threads(*orders: tuple[str, str] | None, of_torch: bool = False) -> dict[int, CallLog]:
    """The main thread and another one make the same calls of one group; with `orders`, torch's
    flight recorder has those in flight in these.

    Args:
        of_torch: torch makes the calls, that of the other thread where a line has started it.
    """
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        tape.call("all_gather", 24, thread="ckpt_0", started=of_torch, internal=of_torch)
        tape.call("all_reduce", 40, internal=of_torch)
        tape.call("all_reduce", 40, state=State.BEGUN, at=START + 5)
        if order := orders[rank]:
            entries = (FlightEntry(18 + n, op, "", "", False) for n, op in enumerate(order))
            tape.events.append(FlightLog(at=START + 7, group="0", entries=tuple(entries)))
    return made


@pytest.mark.parametrize("of_torch", [False, True])
def test_threads_that_share_a_group(tmp_path: Path, of_torch: bool) -> None:
    made = threads(None, None, of_torch=of_torch)
    (finding,) = found(
        run_of(tmp_path, made, now=START + 50, nodes={0: [stall(START + 20, START + 5)]})
    )
    assert (finding.rule, str(finding.location)) == ("several-threads", "train.py:24")
    assert (finding.confidence, finding.deadlocked) == (Confidence.SUSPECTED, False)


def test_threads_that_shared_a_group_in_another_order(tmp_path: Path) -> None:
    made = threads(("all_reduce", "all_gather"), ("all_gather", "all_reduce"))
    (finding,) = found(
        run_of(tmp_path, made, now=START + 50, nodes={0: [stall(START + 20, START + 5)]})
    )
    assert finding.rule == "several-threads"
    assert (finding.confidence, finding.deadlocked) == (Confidence.PROVEN, True)


@pytest.mark.parametrize(("state", "rule"), [
    (State.RETURNED, "unwaited-send"), (State.DONE, "waiting-messages"),
])  # fmt: skip
def test_a_handle_that_nobody_waits_for(tmp_path: Path, state: State, rule: str) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("isend", 22, peer=1, state=state).call(
        "recv", 27, peer=1, state=State.BEGUN, at=START + 5
    )
    made[1].call("isend", 30, peer=0).call("recv", 36, peer=0, state=State.BEGUN, at=START + 5)
    (finding,) = found(
        run_of(tmp_path, made, now=START + 50, nodes={0: [stall(START + 20, START + 5)]})
    )
    assert finding.rule == rule
    assert "same collective" not in finding.cause
    assert finding.ranks == ((0,) if rule == "unwaited-send" else (0, 1))


@pytest.mark.parametrize(("steps", "rule"), [
    (6, "skipped-collective"), (5, "message-after-collective"),
])  # fmt: skip
def test_a_stage_that_went_past_the_collective_of_the_others(
    tmp_path: Path, steps: int, rule: str
) -> None:
    made = {rank: CallLog(rank, 3) for rank in range(3)}
    for rank in range(2):
        made[rank].call("all_gather", 47, state=State.BEGUN, at=START + 5, step=6)
    made[2].call("recv", 73, peer=1, state=State.BEGUN, at=START + 5, step=steps)
    for rank, tape in made.items():
        tape.events += [step_done(n) for n in range(steps if rank == 2 else 6)]
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == rule
    assert (finding.ranks == (2,)) is (rule == "skipped-collective")


def step_done(step: int) -> StepDone:
    return StepDone(
        at=START + 1 + step / 10, optimizer=0, step=step, site=-1, wall_s=0.1, data_s=0.0,
        forward_s=0.0, backward_s=0.0, optimizer_s=0.0, backwards=1, synced=1,
    )  # fmt: skip
