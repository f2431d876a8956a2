"""The picture of who waits for whom, over literal calls."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_missing import RankMissing
from recordings import make_run, steps
from tapes import START, CallLog, run_of, stall, stood

from ddpdoctor.events import RankStood
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


def deep(rank: int, line: int, caller: int) -> RankStood:
    """A rank seen at a line of a function that another line called."""
    seen = stood(rank, line, "dist.all_reduce(x)")
    (frame,) = (f for f in seen.frames if f.user)
    return msgspec.structs.replace(
        seen, frames=(*seen.frames, msgspec.structs.replace(frame, line=caller, function="main"))
    )


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
    assert waiting.whom == "wait for rank 1" and fault.whom == ""
    assert [(a.said, a.fault) for a in shown.drawings[0].arrows] == [
        ("ranks 0,2-3 wait for rank 1", True)
    ]
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
    assert sorted(b.whom for b in shown.boxes) == ["wait for rank 0", "waits for ranks 1-2"]
    assert all(len(d.arrows) == 2 for d in shown.drawings)


def test_arrows_run_beside_the_boxes_and_never_through_one(tmp_path: Path) -> None:
    world = MOST_BOXES
    made = {rank: CallLog(rank, world).call(line=9) for rank in range(world)}
    for rank, tape in made.items():
        tape.call("barrier" if rank % 2 else "all_reduce", line=12 + rank, state=State.BEGUN,
                  at=START + 5)  # fmt: skip
    shown = drawn(hung(tmp_path, made))
    assert shown is not None
    for drawing in shown.drawings:
        assert len(drawing.arrows) > world
        edge = drawing.form.wide
        for arrow in drawing.arrows:
            across = [float(x) for x in re.findall(r"[MH]([\d.]+)", arrow.path)]
            assert min(across) >= edge and max(across) <= drawing.width
        tops = sorted((box.y, box.height) for box in drawing.boxes)
        assert all(y + height < after for (y, height), (after, _) in itertools.pairwise(tops))


def test_the_picture_fits_a_screen_and_a_phone(tmp_path: Path) -> None:
    where = [stood(rank, 40 + rank, f"work({rank})" + "x" * 300) for rank in range(MOST_BOXES)]
    shown = drawn(hung(tmp_path, missing(MOST_BOXES), *where))
    assert shown is not None
    large, small = shown.drawings
    assert large.width <= 1100 and small.width <= 358
    assert max(len(line.text) for box in small.boxes for line in box.lines) <= 34


def test_a_rank_without_a_stack_stands_with_those_in_its_call(tmp_path: Path) -> None:
    stands = [stood(1, 33, "time.sleep(1000)"), *(deep(rank, 9, 20) for rank in (0, 2))]
    shown = drawn(hung(tmp_path, missing(4), *stands))
    assert shown is not None
    assert [b.ranks for b in shown.boxes] == [(1,), (0, 2, 3)]
    assert len(shown.boxes[1].stack) == 2, "the longer stack is shown"
    stands[-1] = deep(2, 9, 21)
    shown = drawn(hung(tmp_path / "b", missing(4), *stands))
    assert shown is not None
    assert sorted(len(b.ranks) for b in shown.boxes) == [1, 1, 2], "called from other lines"


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
    svg = text[text.index('<svg class="waits large"') : text.index("</svg>")]
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
