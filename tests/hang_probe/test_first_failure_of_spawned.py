"""DDP606 where a process that `torch.multiprocessing.spawn` started, and that is no rank, fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.hang.rank_died import RankDied
from recordings import PID, WALL, make_run, started
from tapes import START

from ddpdoctor.events import ProcessEnded, SpawnFailed, StackFrame
from ddpdoctor.probe.watchers.process import spawned_processes
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run, load
from ddpdoctor.storage.run_folder import EventWriter, RunFolder

CLOSED = "[../pair.cc:553] Connection closed by peer [127.0.0.1]:22410"


def found(run: Run) -> list[Finding]:
    return list(FirstFailure().examine(run))


def beside_ranks(at: float = 4.0, count: int = 3, message: str = "no socket", **end: object) -> Run:
    """Process 2 of a spawn raises; ranks 0 and 1 then end."""
    frame = StackFrame(file="/home/user/project/train.py", line=6, function="work", text="raise")
    told = SpawnFailed(
        at=0, wall=WALL + at, index=2, count=count, pid=7, kind="RuntimeError", message=message,
        frames=(frame,),
    )  # fmt: skip
    ends = [
        ProcessEnded(at=START + 5, rank=r, pid=PID + r, wall=0, **{"signal": 15, **end})  # type: ignore[arg-type]
        for r in (0, 1)
    ]
    ranks = {r: [started(r, 2, spawned=3)] for r in (0, 1)}
    return make_run(ranks, nodes={0: [told, *ends]}, ended=None)


@pytest.mark.parametrize("end", [{}, {"signal": None}])
def test_a_spawned_process_that_is_no_rank(end: dict[str, object]) -> None:
    run = beside_ranks(**end)
    (finding,) = found(run)
    assert finding.rule == "spawned-process"
    assert finding.ranks == ()
    assert finding.location is not None and finding.location.line == 6
    assert finding.evidence["consequences"][0]["ranks"] == "0-1"  # type: ignore[index,call-overload]
    assert list(RankDied().examine(run)) == []


@pytest.mark.parametrize("kwargs", [
    pytest.param({"at": 6.0}, id="after they ended"),
    pytest.param({"at": -90.0}, id="long before"),
    pytest.param({"count": 5}, id="spawned by another call"),
    pytest.param({"message": CLOSED}, id="it lost another one"),
    pytest.param({"signal": 9}, id="killed"),
])  # fmt: skip
def test_spawned_processes_that_are_not_why_ranks_end(kwargs: dict[str, object]) -> None:
    run = beside_ranks(**kwargs)  # type: ignore[arg-type]
    assert found(run) == []
    assert [f.code for f in RankDied().examine(run)] == ["DDP605"]


@pytest.mark.parametrize(("owner", "told"), [(None, 1), ("1", 0)])
def test_what_a_spawned_process_raises_that_is_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str | None, told: int
) -> None:
    monkeypatch.setenv("DDPDOCTOR_DIR", str(tmp_path))
    if owner:
        monkeypatch.setenv("DDPDOCTOR_OWNER", owner)
    monkeypatch.setattr(spawned_processes, "current_recorder", lambda: None)
    node = EventWriter(tmp_path / "node-0.jsonl")

    def fails(index: int) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        spawned_processes._Recording(fails)(2)
    node.close()
    (facts,) = load([RunFolder(tmp_path)]).nodes.values()
    events = facts.of(SpawnFailed)
    assert [(e.index, e.kind, e.message) for e in events] == [(2, "ValueError", "boom")] * told
    assert all(e.frames[-1].function == "fails" for e in events)
