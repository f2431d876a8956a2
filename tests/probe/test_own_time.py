"""The doctor's own time is on record and told, however short the run and whatever its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recordings import ends, make_run, started, steps
from sampling import inherited

from ddpdoctor.events import NotObserved, ProbeCost
from ddpdoctor.probe.recording import recorder as recording
from ddpdoctor.probe.recording import startup_cost
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.storage.run_folder import EventWriter

KILLED = "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("wall_s", [10.0, 0.5])
def test_it_is_told_of_every_run(wall_s: float) -> None:
    cost = ProbeCost(at=9.0, own_s=wall_s / 100, wall_s=wall_s, start_s=wall_s / 200, steps=3)
    overhead = diagnose(make_run({0: [started(0, 1), *steps(3), cost]}), []).overhead
    assert (overhead.measured_percent, overhead.own_s) == (1.0, wall_s / 100)
    assert (overhead.wall_s, overhead.start_s) == (wall_s, wall_s / 200)


def test_the_rank_in_which_it_is_most_is_told_of() -> None:
    costs = [ProbeCost(at=9.0, own_s=own, wall_s=9.0, steps=3) for own in (0.09, 0.27, 0.18)]
    run = make_run({r: [started(r, 3), *steps(3), cost] for r, cost in enumerate(costs)})
    overhead = diagnose(run, []).overhead
    assert (overhead.measured_percent, overhead.own_s) == (3.0, 0.27)


def test_of_a_rank_that_only_started_it_is_told_until_its_end() -> None:
    begin = started(0, 1)
    cost = ProbeCost(at=begin.at + 0.1, own_s=0.1, wall_s=0.1, steps=0, start_s=0.1)
    run = make_run({0: [begin, cost]}, nodes={0: ends({0: -9})})
    rank = run.ranks[0]
    assert rank.ended is not None
    overhead = diagnose(run, []).overhead
    assert overhead.wall_s == pytest.approx(0.1 + rank.ended.at - cost.at)


def test_no_rank_no_figure() -> None:
    assert diagnose(make_run({}), []).overhead.measured_percent is None


def test_it_goes_on_record_early_and_then_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(recording.time, "monotonic", lambda: now)
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    for _ in range(300):
        now += 0.1
        recorder.emit(NotObserved(at=now, check="a", reason="b"))
    writer.close()
    told = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    positions = [n for n, line in enumerate(told) if "probe-cost" in line]
    assert positions[0] <= 3
    assert 6 <= len(positions) <= 12


def test_what_it_takes_to_start_is_counted(tmp_path: Path) -> None:
    with startup_cost.counted():
        recording.time.sleep(0.05)
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    recorder.emit_cost(anyway=True)
    writer.close()
    assert recorder.start_ns >= 50_000_000
    assert recorder.own_ns == 0  # what may be afforded while training is reckoned without
    assert '"start_s":0.0' in (tmp_path / "rank-0.jsonl").read_text()


def test_a_rank_that_was_killed_in_its_first_second(tmp_path: Path) -> None:
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    command = ["run", "--out", str(out), "--nproc-per-node", "2", str(script)]
    subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *command],
        env=inherited(),
        timeout=100,
        capture_output=True,
    )
    overhead = open_run([str(out)]).report([]).overhead
    assert overhead.measured_percent is not None and 0 < overhead.measured_percent < 100
    assert overhead.own_s is not None and overhead.start_s is not None
    assert 0 < overhead.start_s <= overhead.own_s


def test_the_share_is_of_the_time_since_the_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it becomes a rank late; a second examination in it has its own time."""
    monkeypatch.setattr(startup_cost, "_age_s", lambda: 30.0)
    monkeypatch.setattr(startup_cost._startup, "emitted", False)
    assert startup_cost.before(100.0, 2 * 10**9) == 70.0
    assert startup_cost.before(100.0, 2 * 10**9) == 98.0
    monkeypatch.undo()
    assert 0 < startup_cost._age_s() < 24 * 3600
