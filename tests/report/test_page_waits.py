"""The picture of who waits for whom, over literal calls."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_missing import RankMissing
from recordings import make_run, steps
from tapes import START, CallLog, run_of, stall, stood

from ddpdoctor.render import page
from ddpdoctor.render.page.waits import MOST_BOXES, Picture, picture
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

CHECKS = (CollectiveMismatch(), RankMissing())


def drawn(run: Run) -> Picture | None:
    return picture(diagnose(run, CHECKS, folder="runs/a"), run)


def hung(tmp_path: Path, made: dict[int, CallLog], *stands: object) -> Run:
    seen = [*stands, stall(START + 50, START + 5)]
    return run_of(tmp_path, made, nodes={0: seen}, ended=dict.fromkeys(made, -15))


def missing(world: int) -> dict[int, CallLog]:
    """All ranks but rank 1 are in a collective."""
    made = {rank: CallLog(rank, world) for rank in range(world)}
    for rank, tape in made.items():
        tape.call(line=9)
        if rank != 1:
            tape.call(line=9, state=State.BEGUN, at=START + 5)
    return made


def test_those_that_wait_share_a_box_and_point_to_the_rank_at_fault(tmp_path: Path) -> None:
    run = hung(tmp_path, missing(4), stood(1, 33, "time.sleep(1000)"))
    shown = drawn(run)
    assert shown is not None
    assert [(b.ranks, b.fault, b.waits) for b in shown.boxes] == [
        ((1,), True, False),
        ((0, 2, 3), False, True),
    ]
    fault, waiting = shown.boxes
    assert [a.said for a in shown.arrows] == ["wait for rank 1"]
    assert waiting.y < fault.y, "who holds up the others stands last"
    assert "time.sleep(1000)" in [line.text for line in fault.lines]
    assert shown.told[1].startswith("ranks 0,2-3: in all_reduce, for")
    assert shown.told[1].endswith("; wait for rank 1")


def test_ranks_in_unlike_calls_wait_for_each_other(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 3).call(line=9) for rank in range(3)}
    for rank, tape in made.items():
        op = "barrier" if rank == 0 else "all_reduce"
        tape.call(op, line=12 if rank == 0 else 9, state=State.BEGUN, at=START + 5)
    shown = drawn(hung(tmp_path, made))
    assert shown is not None
    assert sorted(a.said for a in shown.arrows) == ["wait for rank 0", "waits for ranks 1-2"]
    one, other = shown.arrows
    assert abs(one.y - other.y) > 15, "their words are in different lines"


def test_no_picture_where_nobody_stood_still() -> None:
    assert drawn(make_run(dict.fromkeys(range(2), steps(5)))) is None


def test_many_groups_are_cut_and_counted(tmp_path: Path) -> None:
    world = MOST_BOXES + 5
    made = missing(world)
    where = [stood(rank, 40 + rank, f"work({rank})") for rank in range(world)]
    shown = drawn(hung(tmp_path, made, *where))
    assert shown is not None
    assert len(shown.boxes) == MOST_BOXES
    assert shown.boxes[0].fault
    assert "5 more groups of ranks are not drawn" in shown.more


def test_hundreds_of_ranks_make_two_boxes(tmp_path: Path) -> None:
    shown = drawn(hung(tmp_path, missing(300)))
    assert shown is not None
    assert [len(b.ranks) for b in shown.boxes] == [1, 299]
    assert len(shown.boxes[1].title) <= 30


def test_lines_from_a_run_are_escaped_and_cut(tmp_path: Path) -> None:
    evil = "</text></svg><script>alert(1)</script>\u202e" + "x" * 500
    run = hung(tmp_path, missing(2), stood(1, 33, evil))
    text = page.html(diagnose(run, CHECKS, folder="runs/a"), run)
    svg = text[text.index('<svg class="waits"') : text.index("</svg>")]
    assert "&lt;/text&gt;&lt;/svg&gt;&lt;script&gt;" in svg
    assert "\u202e" not in text and "x" * 100 not in svg
    assert text.count("<script") == 1


def test_a_picture_that_fails_costs_the_picture_only(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken(run: Run) -> None:
        raise ValueError("no <b>")

    monkeypatch.setattr("ddpdoctor.render.page.waits.snapshot_of", broken)
    run = hung(tmp_path, missing(2))
    text = page.html(diagnose(run, (), folder="runs/a"), run)
    assert "the picture of waits could not be drawn: ValueError(&#39;no &lt;b&gt;&#39;)" in text
