"""What is said of two looks at the stacks of a job, over literal stacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor.attach.records import (
    Frame,
    JobLook,
    Look,
    RankLook,
    RecordError,
    Worker,
    read,
    write,
)
from ddpdoctor.attach.text import page
from ddpdoctor.attach.verdict import is_own, judge, stand_of
from ddpdoctor.report.findings import Confidence, Finding

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


def rank(number: int, stack: tuple[Frame, ...], **more: object) -> RankLook:
    fields = {"looks": (Look(stack), Look(stack)), **more}
    return RankLook(rank=number, pid=100 + number, **fields)  # type: ignore[arg-type]


def job(*ranks: RankLook, world: int = 0, launched: int = 0) -> JobLook:
    return JobLook(address="h:1", node="n0", world_size=world or len(ranks),
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
    (frames(5, "dist.init_process_group()", ("rendezvous", "distributed/rendezvous.py"),
            ("init_process_group", "distributed/distributed_c10d.py")), "init",
     "init_process_group"),
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
    assert "workers 7 have ended" in dead.cause
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
    assert "what moves, goes on" in page(job(*through), [], 80)
    polls = one(rank(0, ALL_REDUCE), rank(1, SLEEP, wakes=50.0))
    crowded = one(rank(0, ALL_REDUCE), rank(1, SLEEP, cpu=0.2, wanted=0.9))
    assert crowded.rule == "busy", "it computes, on a machine whose cores others use"
    assert polls.rule == "busy" and "went on 50 times a second" in polls.cause


def test_a_rank_has_no_process_any_more() -> None:
    assert told(rank(0, ALL_REDUCE), world=2, launched=2)[:3] == (
        "DDP604", "no-process", (1,),
    )  # fmt: skip


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
