"""The timeline of the page: bars from the records, who waits for whom, and what is left out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from recordings import START, make_run, steps
from tapes import CallLog, run_of, tapes
from toys import ToyStep

from ddpdoctor.events import ExceptionRaised, Pace, RankExiting, StepDone
from ddpdoctor.render import page
from ddpdoctor.render.page.lanes import MOST_RANKS, MOST_WINDOWS, Window, windows
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import RankTimes
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State


def drawn(run: Run, *checks: object) -> list[Window]:
    return windows(diagnose(run, checks, folder="runs/a"), run)  # type: ignore[arg-type]


def timed(count: int, **fields: float) -> list[StepDone]:
    """Steps of 0.1 s that follow each other."""
    return [
        StepDone(at=START + 1 + 0.1 * n, optimizer=0, step=n, site=-1, wall_s=0.1, **fields)
        for n in range(count)
    ]


def test_phases_are_shares_of_a_step() -> None:
    made = timed(20, data_s=0.02, forward_s=0.02, backward_s=0.04, optimizer_s=0.01)
    (window,) = drawn(make_run({0: made, 1: made}))
    assert window.title == "The last steps"
    assert window.ranks == ("rank 0", "rank 1")
    assert window.kinds == ("loading", "forward", "backward", "optimizer", "outside")
    said = [bar.said for bar in window.bars]
    assert "rank 1, step 19: backward 40 ms" in said
    assert not any("step 3:" in text for text in said), "only the last steps"


def test_what_was_waited_is_taken_out_of_the_backward() -> None:
    paced = Pace(at=START + 3, optimizer=0, step=19, count=8, wall_s=0.1, waited_s=0.03,
                 own_s=(0.0,) * 8)  # fmt: skip
    made = [*timed(20, backward_s=0.04), paced]
    (window,) = drawn(make_run({0: made}))
    said = [bar.said for bar in window.bars]
    assert "rank 0, step 19: waiting 30 ms" in said
    assert "rank 0, step 19: backward 10 ms" in said


def test_who_comes_last_is_waited_for(tmp_path: Path) -> None:
    made = tapes()
    for n in range(4):
        made[0].call(at=START + 2 + n, lasts=0.5)
        made[1].call(at=START + 2.4 + n, lasts=0.1)
    (window,) = drawn(run_of(tmp_path, made))
    assert {wait.said for wait in window.waits} == {
        "all_reduce: rank 1 comes last, 0.4 s after the first"
    }
    waiting = [bar for bar in window.bars if bar.kind == "waiting"]
    assert {bar.said.partition(":")[0] for bar in waiting} == {"rank 0"}
    assert all(wait.y1 < wait.y2 for wait in window.waits), "from rank 0 to rank 1"


def test_a_call_that_is_never_left_points_to_who_never_came(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(at=START + 2)
    made[0].call("barrier", at=START + 3, state=State.BEGUN)
    (window,) = drawn(run_of(tmp_path, made))
    assert [wait.said for wait in window.waits] == ["rank 0 in barrier: waiting for rank 1"]
    (opened,) = (bar for bar in window.bars if bar.kind == "open")
    assert (opened.label, opened.x + opened.width) == ("barrier", 100)


def test_nobody_is_said_to_be_late_where_a_member_is_not_on_record(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 3) for rank in range(2)}
    made[0].call(at=START + 2, lasts=0.5)
    made[1].call(at=START + 2.4, lasts=0.1)
    (window,) = drawn(run_of(tmp_path, made))
    assert not window.waits
    assert "waiting" not in window.kinds


def test_the_rank_that_others_wait_for_is_shown_in_a_large_run(tmp_path: Path) -> None:
    world, last = MOST_RANKS + 8, MOST_RANKS + 5
    made = {rank: CallLog(rank, world) for rank in range(world)}
    for rank, log in made.items():
        log.call(at=START + (3 if rank == last else 2), lasts=0.1 if rank == last else 1.1)
    run = run_of(tmp_path, made)
    row = RankTimes(rank=0, wall_s=9, accounts={}, waiting_for={str(last): 1.0, "evil": 9.0})
    report = diagnose(run, (), folder="runs/a")
    (window,) = windows(msgspec.structs.replace(report, ledger=(row,)), run)
    assert window.ranks[-1] == f"rank {last}"
    assert len(window.waits) == MOST_RANKS - 1
    (unseen,) = windows(msgspec.structs.replace(report, ledger=()), run)
    assert not unseen.waits, "no line leads to a rank that is not shown"
    assert "waiting" in unseen.kinds


def test_the_step_of_a_finding_has_a_window_of_its_own() -> None:
    made = timed(60, backward_s=0.04)
    last, around = drawn(make_run({0: made, 1: made}), ToyStep())
    assert (around.finding, around.title) == ("DDP997-1", "Around step 4, the first one of")
    assert {bar.said for bar in around.bars if bar.kind == "band"} == {"step 4"}
    assert not [bar for bar in last.bars if bar.kind == "band"]


def test_a_finding_of_an_earlier_attempt_has_no_window() -> None:
    made = timed(60, backward_s=0.04)
    run = make_run({0: made, 1: made})
    report = diagnose(run, (ToyStep(),), folder="runs/a")
    before = tuple(msgspec.structs.replace(f, attempt=0) for f in report.findings)
    assert len(windows(msgspec.structs.replace(report, findings=before), run)) == 1


def test_every_link_of_the_timeline_leads_somewhere() -> None:
    made = timed(60, backward_s=0.04)
    run = make_run({0: made, 1: made})
    text = page.html(diagnose(run, (ToyStep(),), folder="runs/a"), run)
    names = set(re.findall(r' id="([^"]+)"', text))
    assert {*re.findall(r'href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)} <= names


def test_a_failure_is_marked(tmp_path: Path) -> None:
    made = tapes()
    made[0].call(at=START + 2).call(at=START + 3)
    made[1].call(at=START + 2)
    made[1].events.append(ExceptionRaised(at=START + 2.5, kind="ValueError", message="no <b>"))
    (window,) = drawn(run_of(tmp_path, made))
    assert [(m.kind, m.label) for m in window.marks] == [("fails", "ValueError")]


def test_everything_that_is_drawn_is_in_the_key(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(at=START + 2)
    made[0].call("barrier", at=START + 3, state=State.BEGUN)
    made[1].events += [
        ExceptionRaised(at=START + 2.5, kind="ValueError", message="no"),
        RankExiting(at=START + 2.6, how="exception", status=1),
    ]
    (window,) = drawn(run_of(tmp_path, made))
    classes = {one.kind for one in (*window.bars, *window.marks)} | {"wait"}
    assert {"open", "fails", "leaves"} <= classes == {kind for kind, _ in window.keys}
    assert all(said for _, said in window.keys)
    assert [m.label for m in window.marks if m.kind == "leaves"] == [""], "no text on bars"


def test_the_band_is_in_the_key_and_the_axis_has_round_seconds() -> None:
    made = timed(60, backward_s=0.04)
    run = make_run({0: made, 1: made})
    _, around = drawn(run, ToyStep())
    assert dict(around.keys)["band"] == "the step of the finding"
    assert dict(around.keys)["outside"] == "other code"
    labels = [text for _, text in around.ticks]
    assert 2 <= len(labels) <= 6 and all(re.fullmatch(r"\d+\.\d s", text) for text in labels)
    assert "seconds since the first rank started" in page.html(diagnose(run, (), folder="a"), run)


def test_where_no_time_is_on_record_there_is_no_picture() -> None:
    run = make_run({0: [], 1: []})
    assert drawn(run) == []
    assert 'id="timeline"' not in page.html(diagnose(run, (), folder="runs/a"), run)


def test_many_ranks_and_findings_are_cut_and_counted() -> None:
    made = timed(60)
    run = make_run(dict.fromkeys(range(MOST_RANKS + 3), made))
    report = diagnose(run, (ToyStep(),), folder="runs/a")
    (window, *rest) = windows(report, run)
    assert len(window.ranks) == MOST_RANKS
    assert window.more == "3 more ranks of the run not drawn"
    assert len(rest) < MOST_WINDOWS


def test_steps_without_sense_are_no_harm() -> None:
    odd = [
        StepDone(at=1e300, optimizer=0, step=3, site=-1, wall_s=1e308, count=-5),
        StepDone(at=START, optimizer=0, step=2**60, site=-1, wall_s=-4, backward_s=-1e9),
        *steps(3),
    ]
    run = make_run({0: odd, 1: odd})
    text = page.html(diagnose(run, (ToyStep(),), folder="runs/a"), run)
    assert "could not be drawn" not in text
    assert "nan" not in text.lower().replace("finance", "")
