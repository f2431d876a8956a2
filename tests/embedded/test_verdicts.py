"""How ranks are told to stop, without ranks."""

from __future__ import annotations

from pathlib import Path

from recordings import make_run, steps, write_folder

from ddpdoctor.events import ExceptionRaised
from ddpdoctor.registry import find
from ddpdoctor.run import Recording
from ddpdoctor.verdicts import Judge, Place, Request, is_meeting_point


def test_ranks_meet_at_powers_of_two() -> None:
    assert [n for n in range(20) if is_meeting_point(n)] == [2, 4, 8, 16]


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
    ended = {0: 1, 1: 1}
    assert not list(check.examine(make_run({0: [raised], 1: [raised]}, ended=ended)))
    assert list(check.examine(make_run({0: [own], 1: [own]}, ended=ended)))
