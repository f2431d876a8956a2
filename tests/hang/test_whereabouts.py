"""Where ranks stood that somebody ended before the stall time."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.rank_missing import RankMissing
from recordings import PID, START, WALL
from tapes import Tape, run_of, stood

from ddpdoctor import render
from ddpdoctor.diagnose import diagnose
from ddpdoctor.events import Event, ProcessEnded, Stopped
from ddpdoctor.ring import State


@pytest.mark.parametrize(("seconds", "told"), [(28, True), (0.4, False)])
def test_where_they_stood_is_told(tmp_path: Path, seconds: float, told: bool) -> None:
    made = {rank: Tape(rank, 2).call(line=9) for rank in range(2)}
    made[0].call("barrier", 31, state=State.WAITING, at=START + 5)
    made[1].progress_at = START + 5
    at = START + 5 + seconds
    seen: list[Event] = [
        Stopped(at=at, by="terminate", reason="SIGTERM"),
        *(ProcessEnded(at=at + 0.1, rank=r, pid=PID + r, wall=WALL, signal=15, by_launcher=True)
          for r in made),
        stood(1, 14, "fcntl.flock(f, fcntl.LOCK_EX)", at=at + 0.1),
    ]  # fmt: skip
    run = run_of(tmp_path, made, nodes={0: seen}, outcome="killed")
    report = diagnose(run, [RankMissing()])
    places = [r.stood for r in report.ranks]
    assert places == (["in barrier at train.py:31 for 28 s", "at train.py:14 in main"] * told
                      or ["", ""])  # fmt: skip
    text = " ".join(render.text(report).split())
    assert ("rank 0 was in barrier at train.py:31 for 28 s, rank 1 was at" in text) is told
    assert all(r.last == r.stood for r in report.ranks) is told
