"""How ranks are told to stop, without ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from recordings import make_run, steps, write_folder

from ddpdoctor.events import ExceptionRaised
from ddpdoctor.monitor.stop_agreement import (
    END_OF_BLOCK,
    LEFT,
    Judge,
    Place,
    Request,
    is_meeting_point,
)
from ddpdoctor.report.registry import find
from ddpdoctor.run import Recording


def test_ranks_meet_after_the_first_calls_and_at_powers_of_two() -> None:
    assert [n for n in range(40) if is_meeting_point(n)] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    assert is_meeting_point(END_OF_BLOCK)


def test_nobody_waits_for_a_rank_whose_call_raised(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(3)}, ended=None)
    recording, place, judge = Recording(folder), Place(folder.path), Judge(folder)
    place.ask(Request("error"))
    place.counter(0).set(3)
    place.counter(1).set(LEFT)
    judge.look(recording.refresh(), recording.refresh)
    assert place.looked_at() == 3


def test_ranks_that_record_in_another_node_s_folder_are_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3)}, world_size=2, ended=None)
    recording, place, judge = Recording(folder), Place(folder.path), Judge(folder)
    run = recording.refresh()
    assert run.world_size == 2
    place.ask(Request("error"))
    place.counter(0).set(1)
    came = max(rank.started.wall for rank in run.ranks.values() if rank.started)
    monkeypatch.setattr("time.time", lambda: came + 1)
    judge.look(run, recording.refresh)
    assert place.looked_at() == 0
    monkeypatch.setattr("time.time", lambda: came + 5)
    judge.look(run, recording.refresh)
    assert place.looked_at() == 1


def test_a_restart_is_judged_where_it_is_recorded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3)}, ended=None)
    again = folder.attempt_path(1)
    again.mkdir()
    assert not Judge(folder, 1).asked
    Place(again).ask(Request("error"))
    assert Judge(folder, 1).asked
    assert not Judge(folder).asked


def test_a_clean_run_is_looked_at_once_all_ranks_have_come(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(3)}, ended=None)
    recording, place, judge = Recording(folder), Place(folder.path), Judge(folder)
    judge.look(recording.refresh(), recording.refresh)
    assert not judge.asked
    place.ask(Request("error"))
    place.ask(Request("note"))  # the first decides
    one, other = place.counter(0), place.counter(1)
    one.set(2)
    judge.look(recording.refresh(), recording.refresh)
    assert judge.asked and place.looked_at() == 0
    other.set(2)
    judge.look(recording.refresh(), recording.refresh)
    assert place.looked_at() == 2
    assert place.read() is None
    assert place.counts() == {0: 2, 1: 2}


def test_what_we_raised_is_no_failure_of_the_program() -> None:
    raised = ExceptionRaised(at=0, kind="ddpdoctor.FaultFound", message="error[DDP301]", frames=())
    own = ExceptionRaised(at=0, kind="ValueError", message="no", frames=())
    check = find("first-failure")
    assert check is not None
    caught = msgspec.structs.replace(raised, caught=True)
    ended = {0: 1, 1: 1}
    assert not list(check.examine(make_run({0: [caught], 1: [caught]}, ended=ended)))
    assert list(check.examine(make_run({0: [caught, own], 1: [caught]}, ended=ended)))
    assert not list(check.examine(make_run({0: [raised], 1: [raised]}, ended=ended)))
    assert list(check.examine(make_run({0: [own], 1: [own]}, ended=ended)))
