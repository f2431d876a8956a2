"""The helper that the other tests build their runs with."""

from __future__ import annotations

from pathlib import Path

from recordings import CWD, START, make_run, site, started, steps, write_folder

from ddpdoctor.events import Stopped
from ddpdoctor.run import load


def test_three_lines_make_a_finished_run() -> None:
    run = make_run({0: steps(3), 1: steps(2)})
    assert [r.steps for r in run.ranks.values()] == [3, 2]
    assert run.outcome() == "completed"
    assert run.world_size == 2
    assert [r.state for r in run.ranks.values()] == ["finished", "finished"]


def test_events_follow_each_other_in_the_order_given() -> None:
    run = make_run({0: [site(1, "train.py", 7, "x = 1"), *steps(2, site=1)]})
    ats = [e.at for e in run.ranks[0]]
    assert ats == sorted(ats)
    assert ats[0] == START
    location = run.ranks[0].location(1)
    assert location is not None
    assert (location.file, location.line, location.source) == ("train.py", 7, "x = 1")
    assert run.ranks[0].cwd == CWD


def test_ends_and_missing_ranks_and_twins() -> None:
    run = make_run(
        {0: [], 1: [], 3: []}, ended={0: 1, 1: -9, 3: None}, world_size=4, twins={0: [steps(5)]}
    )
    assert [r.state for r in run.ranks.values()] == ["failed", "killed", "lost"]
    assert run.missing == [2]
    assert [t.steps for t in run.ranks[0].twins] == [5]


def test_started_can_be_changed() -> None:
    run = make_run({0: [started(0, 1, node="elsewhere")]}, stopped="doctor")
    assert run.ranks[0].node == "elsewhere"
    assert run.nodes[0].of(Stopped)[0].by == "doctor"


def test_attempts_are_kept_apart(tmp_path: Path) -> None:
    write_folder(tmp_path, {0: steps(1)}, ended={0: 1})
    folder = write_folder(tmp_path, {0: steps(4)}, attempt=1)
    assert folder.attempts() == [0, 1]
    assert load([folder], 0).ranks[0].state == "failed"
    assert load([folder], 1).ranks[0].state == "finished"
