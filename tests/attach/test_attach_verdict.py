"""What is said of two looks at the stacks of a job, over literal stacks."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor.attach.own import is_own
from ddpdoctor.attach.records import (
    Frame,
    JobLook,
    Look,
    RankLook,
    RecordError,
    Thread,
    Worker,
    read,
    write,
)
from ddpdoctor.attach.stands import classes, stand_of
from ddpdoctor.attach.text import page
from ddpdoctor.attach.verdict import judge
from ddpdoctor.report.findings import Confidence, Finding, Severity

TORCH = "/opt/lib/python3.11/site-packages/torch"
TRAIN = "/home/user/train.py"


def frames(line: int, source: str, *above: tuple[str, str]) -> tuple[Frame, ...]:
    """The program at a line, and the functions of torch above it, innermost first."""
    return (
        *(Frame(name, f"{TORCH}/{file}", 9) for name, file in above),
        Frame("main", TRAIN, line, source),
    )


ALL_REDUCE = frames(
    30, "dist.all_reduce(loss)", ("all_reduce", "distributed/distributed_c10d.py"),
    ("wrapper", "distributed/c10d_logger.py"),
)  # fmt: skip
BROADCAST = frames(
    31, "dist.broadcast(x, 0)", ("broadcast", "distributed/distributed_c10d.py"),
)  # fmt: skip
BACKWARD = frames(
    20, "loss.backward()", ("_engine_run_backward", "autograd/graph.py"),
    ("backward", "autograd/__init__.py"), ("backward", "_tensor.py"),
)  # fmt: skip
SLEEP = frames(40, "time.sleep(1000)")
LOADER = frames(
    15, "for x in loader:", ("_try_get_data", "utils/data/dataloader.py"),
    ("__next__", "utils/data/dataloader.py"),
)  # fmt: skip
ITEM = frames(22, "total += loss.item()")


INIT = frames(
    5, "dist.init_process_group()", ("rendezvous", "distributed/rendezvous.py"),
    ("init_process_group", "distributed/distributed_c10d.py"),
)  # fmt: skip
RECV = frames(50, "dist.recv(x, 1)", ("recv", "distributed/distributed_c10d.py"))
HANDLE = frames(51, "work.wait()")
PYTHON = f"{sysconfig.get_path('stdlib')}"


def python(line: int, source: str, *above: tuple[str, str]) -> tuple[Frame, ...]:
    """The program at a line, and functions of Python's library above it, innermost first."""
    inner = (Frame(name, f"{PYTHON}/{file}", 9) for name, file in above)
    return (*inner, Frame("main", TRAIN, line, source))


JOIN = python(60, "thread.join()", ("join", "threading.py"))


def thread(name: str, stack: tuple[Frame, ...], **more: object) -> Thread:
    return Thread(name=name, **{"looks": (Look(stack), Look(stack)), **more})  # type: ignore[arg-type]


def rank(number: int, stack: tuple[Frame, ...], **more: object) -> RankLook:
    fields = {"looks": (Look(stack), Look(stack)), **more}
    return RankLook(rank=number, pid=100 + number, **fields)  # type: ignore[arg-type]


def job(*ranks: RankLook, world: int = 0, launched: int = 0, looks: int = 2) -> JobLook:
    return JobLook(looks=looks, address="h:1", node="n0", world_size=world or len(ranks),
                   launched=launched or len(ranks), command="python train.py", at=0.0,
                   apart_s=1.0, ranks=ranks)  # fmt: skip


def told(*ranks: RankLook, **more: int) -> tuple[str, str, tuple[int, ...], int]:
    finding = one(*ranks, **more)
    return (
        finding.code,
        finding.rule,
        finding.ranks,
        finding.location.line if finding.location else 0,
    )


def one(*ranks: RankLook, **more: int) -> Finding:
    (finding,) = judge(job(*ranks, **more))
    assert finding.confidence is Confidence.SUSPECTED
    return finding


@pytest.mark.parametrize(("stack", "kind", "op"), [
    (ALL_REDUCE, "collective", "all_reduce"),
    (BACKWARD, "backward", "backward"),
    (SLEEP, "user", ""),
    (LOADER, "loader", "the next batch"),
    (ITEM, "device", "total += loss.item()"),
    (INIT, "init", "init_process_group"),
    (python(7, "done.wait()", ("wait", "threading.py")), "user", ""),
    (frames(6, "model = DDP(net)", ("_verify_param_shape_across_processes", "distributed/utils.py"),
            ("__init__", "nn/parallel/distributed.py")), "collective", "DDP()"),
])  # fmt: skip
def test_what_a_rank_does(stack: tuple[Frame, ...], kind: str, op: str) -> None:
    stand = stand_of(rank(0, stack))
    assert (stand.kind, stand.op) == (kind, op)
    assert stand.place is not None and stand.place.file == TRAIN


def test_one_rank_is_elsewhere() -> None:
    ranks = rank(0, BACKWARD), rank(1, SLEEP), rank(2, BACKWARD)
    assert told(*ranks) == ("DDP603", "idle", (1,), 40)
    assert "ranks 0,2 wait in backward" in one(*ranks).summary.replace("ranks 0 and 2", "ranks 0,2")
    busy = told(rank(0, BACKWARD), rank(1, SLEEP, cpu=0.9))
    assert busy == ("DDP603", "busy", (1,), 40)
    stopped = one(rank(0, BACKWARD), rank(1, SLEEP, state="T"))
    assert (stopped.rule, stopped.ranks) == ("stopped", (1,)) and "kill -CONT 101" in stopped.fix


def test_a_rank_that_reads_a_device_waits_like_one_in_a_collective() -> None:
    assert told(rank(0, ITEM, cpu=1.0), rank(1, SLEEP)) == ("DDP603", "idle", (1,), 40)


def test_a_rank_waits_for_a_batch() -> None:
    worker = Worker(7, "S", 0.0, (Frame("__getitem__", "/home/user/data.py", 8, "open(path)"),))
    finding = one(rank(0, ALL_REDUCE), rank(1, LOADER, workers=(worker,)))
    assert (finding.code, finding.ranks) == ("DDP608", (1,))
    assert "data.py:8 `open(path)`" in finding.cause
    dead = one(rank(0, ALL_REDUCE), rank(1, LOADER, workers=(replace(worker, state="Z"),)))
    assert "worker 7 has ended" in dead.cause
    stopped = one(rank(0, ALL_REDUCE), rank(1, LOADER, workers=(replace(worker, state="T"),)))
    assert "worker 7 is stopped" in stopped.cause and "kill -CONT 7" in stopped.fix
    assert told(rank(0, LOADER), rank(1, LOADER))[:3] == ("DDP608", "data-stall", (0, 1))


def test_ranks_wait_in_different_calls() -> None:
    ranks = rank(0, ALL_REDUCE), rank(1, BROADCAST), rank(2, ALL_REDUCE)
    assert told(*ranks) == ("DDP601", "different-calls", (1,), 31)


def test_ranks_that_go_on_wait_for_nobody() -> None:
    """Healthy jobs, seen twice in the same calls by chance: their main threads wake in each."""
    through = rank(0, ALL_REDUCE, wakes=60.0), rank(1, SLEEP, wakes=60.0)
    assert judge(job(*through)) == []
    computing = rank(0, BACKWARD, cpu=0.2), rank(1, BACKWARD, cpu=0.4)
    assert judge(job(*computing)) == []
    arrived = RankLook(rank=1, pid=101, looks=(Look(SLEEP), Look(ALL_REDUCE)))
    assert judge(job(rank(0, ALL_REDUCE), arrived)) == []
    text = page(job(*through), [], 80)
    assert "no rank was seen to wait" in text and "what moves" not in text
    moves = page(job(rank(0, ALL_REDUCE, looks=(Look(SLEEP), Look(ALL_REDUCE)))), [], 80)
    assert "what moves, goes on" in moves
    polls = one(rank(0, ALL_REDUCE), rank(1, SLEEP, wakes=50.0))
    crowded = one(rank(0, ALL_REDUCE), rank(1, SLEEP, cpu=0.2, wanted=0.9))
    assert crowded.rule == "busy", "it computes, on a machine whose cores others use"
    assert polls.rule == "busy" and "went on 50 times a second" in polls.cause


def test_a_rank_has_no_process_any_more() -> None:
    finding = one(rank(0, ALL_REDUCE), world=2, launched=2)
    assert (finding.code, finding.rule, finding.ranks) == ("DDP604", "no-process", (1,))
    assert finding.location is None, "the rank that is gone was not there"
    assert [(r.label, r.location.line) for r in finding.related] == [("rank 0 waits here", 30)]


def test_a_rank_of_the_second_node_has_no_process_any_more() -> None:
    there = rank(3, ALL_REDUCE, local_rank=1)
    assert told(there, world=4, launched=2)[:3] == ("DDP604", "no-process", (2,))


def test_ranks_in_init_process_group_poll_and_wait_all_the_same() -> None:
    polls = rank(0, INIT, wakes=100.0), rank(2, INIT, wakes=100.0)
    assert told(*polls, world=3, launched=3)[:3] == ("DDP604", "no-process", (1,))
    assert told(polls[0], rank(1, SLEEP))[:3] == ("DDP603", "idle", (1,))
    assert "h:1" in one(polls[0], rank(1, INIT)).cause


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_rank_is_named_first_wherever_it_stands(state: str) -> None:
    same_place = one(rank(0, BACKWARD), rank(1, BACKWARD, state=state), rank(2, BACKWARD))
    assert (same_place.rule, same_place.ranks) == ("stopped", (1,))
    assert ("kill -CONT 101" in same_place.fix) == (state == "T")
    nobody_waits = one(rank(0, SLEEP, cpu=1.0), rank(1, SLEEP, state=state))
    assert (nobody_waits.rule, nobody_waits.ranks) == ("stopped", (1,))
    assert "wait" not in nobody_waits.summary
    elsewhere = one(rank(0, BACKWARD), rank(1, SLEEP), rank(2, BACKWARD, state=state))
    assert (elsewhere.rule, elsewhere.ranks) == ("stopped", (2,))


def test_ranks_of_a_class_have_one_state() -> None:
    stands = [stand_of(r) for r in (rank(0, BACKWARD, state="R"), rank(1, BACKWARD, state="T"),
                                    rank(2, BACKWARD, state="S"))]  # fmt: skip
    assert [[s.rank.rank for s in those] for those in classes(stands)] == [[0, 2], [1]]


def test_a_thread_that_trains_is_judged_in_place_of_the_main_thread() -> None:
    ranks = [rank(n, JOIN, threads=(thread("log", SLEEP), thread("train", ALL_REDUCE)))
             for n in (0, 1)]  # fmt: skip
    assert told(*ranks)[:3] == ("DDP609", "all-in-one-call", (0, 1))
    late = rank(1, JOIN, threads=(thread("train", SLEEP),))
    finding = one(ranks[0], late)
    assert (finding.rule, finding.ranks) == ("other-thread", (1,))
    assert finding.location and finding.location.line == 60
    assert [r.location.line for r in finding.related] == [40, 30]
    text = page(job(ranks[0], late), [finding], 80)
    assert "rank 1, thread train" in text and "in thread train" in text


def test_the_thread_that_the_main_thread_waits_for_is_shown() -> None:
    busy = thread("crunch", frames(54, "n += 1"), wanted=1.0)
    finding = one(rank(0, ALL_REDUCE), rank(1, JOIN, threads=(busy,), cpu=0.4))
    assert (finding.rule, finding.related[0].location.line) == ("other-thread", 54)
    assert "computes" in finding.cause and "crunch" in finding.summary


@pytest.mark.parametrize("stack", [
    frames(99, "with OTHER:"),
    python(99, "with OTHER:", ("__enter__", "threading.py")),
    frames(99, "OTHER.acquire()"),
])  # fmt: skip
def test_the_thread_that_holds_a_lock_is_named(stack: tuple[Frame, ...]) -> None:
    saver = thread("saver", frames(92, "with self.lock:"), holds=("module.OTHER",))
    idle = thread("log", SLEEP)
    both = one(rank(0, ALL_REDUCE), rank(1, stack, threads=(idle, saver), holds=("LOCK",)))
    assert (both.rule, both.ranks) == ("lock", (1,))
    assert "held by thread `saver` at " in both.cause and "log" not in both.cause
    assert both.related[0].location.line == 92
    circle = one(rank(0, ALL_REDUCE), rank(1, stack, threads=(saver,), holds=("x.lock",)))
    assert "neither can go on" in circle.cause
    unknown = one(rank(0, ALL_REDUCE), rank(1, stack, threads=(idle,)))
    assert unknown.rule == "lock" and "who holds that is not seen" in unknown.cause


def test_what_is_said_of_cpu_time_agrees_with_the_cores() -> None:
    some = one(rank(0, ALL_REDUCE), rank(1, SLEEP, cpu=0.2))
    assert some.rule == "idle" and "uses 0.2 cores" in some.cause and "no CPU" not in some.cause
    assert "uses no CPU time" in one(rank(0, ALL_REDUCE), rank(1, SLEEP, cpu=0.04)).cause


def test_ranks_that_wake_between_looks_are_slow_and_not_stuck() -> None:
    late = one(rank(0, ALL_REDUCE, wakes=2.0), rank(1, SLEEP, wakes=3.0))
    assert (late.rule, late.ranks, late.severity) == ("slow", (1,), Severity.WARNING)
    assert "3 times" in late.cause
    stuck = one(rank(0, ALL_REDUCE), rank(1, SLEEP, wakes=3.0))
    assert (stuck.rule, stuck.severity) == ("idle", Severity.ERROR)
    assert "again and again" in stuck.cause
    assert one(rank(0, ALL_REDUCE, wakes=2.0), rank(1, SLEEP)).rule == "idle"
    assert judge(job(rank(0, ALL_REDUCE, wakes=2.0), rank(1, BROADCAST, wakes=2.0))) == []


def test_the_number_of_looks_is_told() -> None:
    seen = job(rank(0, ALL_REDUCE), rank(1, SLEEP), looks=6)
    (finding,) = judge(seen)
    assert "6 looks" in finding.cause and "--seconds 30" in finding.fix
    assert "looked at 6 times in 1.0 s" in page(seen, [finding], 80)


def test_each_place_is_named_with_its_ranks() -> None:
    finding = one(rank(0, ALL_REDUCE), rank(1, ALL_REDUCE), rank(2, BROADCAST), rank(3, SLEEP))
    there = "ranks 0-1 wait in all_reduce (/home/user/train.py:30) and rank 2 in broadcast ("
    assert finding.summary.startswith(there)


@pytest.mark.parametrize("others", [(), (HANDLE,)])
def test_messages_that_nobody_answers(others: tuple[tuple[Frame, ...], ...]) -> None:
    also = [rank(2 + n, stack) for n, stack in enumerate(others)]
    finding = one(rank(0, RECV), rank(1, RECV), *also)
    assert (finding.rule, finding.ranks) == ("no-answer", (0, 1))
    assert "send first" in finding.fix and "collectives" not in finding.fix
    mixed = one(rank(0, RECV), rank(1, BROADCAST))
    assert mixed.rule == "different-calls" and "`send` of its peer" in mixed.fix


def test_all_evidence_is_printed() -> None:
    ranks = [rank(n, frames(n, "x", ("barrier", "distributed/c.py"))) for n in range(20)]
    seen = job(*ranks, rank(20, SLEEP))
    text = page(seen, judge(seen), 80)
    assert "more line" not in text and "findings.json" not in text
    assert "barrier (/home/user/train.py:19)" in text


def test_all_wait_in_one_call() -> None:
    here = rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)
    assert told(*here)[:3] == ("DDP609", "all-in-one-call", (0, 1))
    elsewhere = one(*here, world=4)
    assert elsewhere.rule == "others-missing" and "2 ranks are elsewhere" in elsewhere.cause


@pytest.mark.parametrize("ranks", [
    pytest.param((rank(0, BACKWARD, looks=(Look(SLEEP), Look(BACKWARD))),
                  rank(1, SLEEP, looks=(Look(BACKWARD), Look(SLEEP)))), id="all-move"),
    pytest.param((rank(0, BACKWARD, cpu=1.0), rank(1, BACKWARD, cpu=1.0)), id="compute"),
    pytest.param((rank(0, SLEEP), rank(1, SLEEP)), id="nobody-waits"),
])  # fmt: skip
def test_nothing_is_said_where_no_rank_waits(ranks: tuple[RankLook, ...]) -> None:
    assert judge(job(*ranks)) == []
    assert "no rank" in page(job(*ranks), [], 80)


def test_a_file_of_before_threads_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    content = json.loads(write((job(rank(0, ALL_REDUCE), rank(1, SLEEP)),)))
    (old,) = content["jobs"]
    del old["looks"]
    for one_of in old["ranks"]:
        del one_of["threads"], one_of["holds"]
    path.write_text(json.dumps(content))
    (seen,) = read([path])
    assert [f.rule for f in judge(seen)] == ["idle"]


def test_files_of_two_nodes_are_one_job(tmp_path: Path) -> None:
    first = job(rank(0, ALL_REDUCE), rank(1, ALL_REDUCE), world=4)
    second = replace(job(rank(2, ALL_REDUCE), rank(3, SLEEP), world=4), node="n1")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, seen in zip(paths, (first, second), strict=True):
        path.write_bytes(write((seen,)))
    (together,) = read(paths)
    assert (together.node, together.launched) == ("n0, n1", 4)
    (finding,) = judge(together)
    assert (finding.code, finding.ranks) == ("DDP603", (3,))
    text = page(together, [finding], 80)
    assert "4 of 4 ranks on n0, n1" in text and "rank-missing" in text


@pytest.mark.parametrize("content", ["{}", "ddpdoctor-attach", '{"kind": "ddpdoctor-attach", '
                                     '"version": 99, "jobs": []}'])  # fmt: skip
def test_a_file_that_is_no_record(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(RecordError):
        read([path])


def test_whose_a_file_is() -> None:
    assert is_own(f"{TORCH}/_tensor.py") and is_own("<frozen importlib._bootstrap>")
    assert not is_own(TRAIN)
