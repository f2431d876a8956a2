"""The maps of ranks and steps: folded, coloured, left out where nothing is on record."""

from __future__ import annotations

import pytest
from recordings import START, make_run, steps

from ddpdoctor.events import BatchSeen, LossValues, MemorySample, Pace, StepDone
from ddpdoctor.render import page
from ddpdoctor.render.page.maps import LEVELS, MOST_COLUMNS, MOST_ROWS, Map, maps
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import Run


def drawn(run: Run) -> dict[str, Map]:
    return {one.name: one for one in maps(diagnose(run, (), folder="runs/a"), run).maps}


def timed(count: int, slow: tuple[int, ...] = ()) -> list[StepDone]:
    return [e for n in range(count) for e in steps(1, first=n, wall_s=0.5 if n in slow else 0.1)]


def test_a_slow_step_is_the_darkest_cell() -> None:
    shown = drawn(make_run({0: timed(10), 1: timed(10, slow=(6,))}))["steps"]
    assert (shown.rows, shown.columns[:2]) == (("rank 0", "rank 1"), ("step 0", "step 1"))
    assert shown.cells[1][5:8] == ("0.1 s", "0.5 s", "0.1 s")
    assert shown.cells[0][0] == "", "the first step began with the program"
    assert shown.paths[LEVELS - 1] == "M6 1h1v1h-1z"
    assert shown.said == "Highest on rank 1 in step 6: 0.5 s."
    assert (shown.low, shown.high) == ("0.1 s", "0.5 s")


def test_almost_equal_values_have_one_colour() -> None:
    made = [e for n in range(9) for e in steps(1, first=n, wall_s=0.1 + n / 10_000)]
    shown = drawn(make_run({0: made, 1: made}))["steps"]
    assert [bool(path) for path in shown.paths] == [True] + [False] * (LEVELS - 1)


def test_large_runs_are_folded_and_the_worst_rank_is_shown() -> None:
    ranks = {rank: timed(1000, slow=(500,) if rank == 7 else ()) for rank in range(100)}
    shown = drawn(make_run(ranks))["steps"]
    assert len(shown.rows) <= MOST_ROWS and len(shown.columns) <= MOST_COLUMNS
    assert shown.rows[0] == "ranks 0-2"
    assert shown.said.startswith("Highest on ranks 6-8 in steps 495-505")
    assert len(shown.labels) == len(shown.rows)


def test_waiting_and_memory() -> None:
    paced = Pace(at=START + 3, optimizer=0, step=9, count=4, wall_s=0.1, waited_s=0.03,
                 own_s=(0.0,) * 8)  # fmt: skip
    held = [MemorySample(at=START + n, step=n, rss_bytes=n * 10**9, peak_rss_bytes=0)
            for n in (2, 6)]  # fmt: skip
    shown = drawn(make_run({0: [*timed(10), paced, *held]}))
    assert shown["waiting"].cells[0][4:8] == ("", "", "30 ms", "30 ms")
    assert shown["memory"].cells[0][1:8] == (
        "", *["2.00 GB"] * 4, "6.00 GB", "6.00 GB",
    )  # fmt: skip
    assert "device" not in shown


def test_of_several_ranks_the_one_that_waits_least_is_shown() -> None:
    def paced(waited: float) -> list[object]:
        return [*timed(8), Pace(at=START + 3, optimizer=0, step=7, count=8, wall_s=0.1,
                                waited_s=waited, own_s=(0.0,) * 8)]  # fmt: skip

    ranks = {rank: paced(0.0 if rank == 4 else 0.05) for rank in range(MOST_ROWS * 2)}
    shown = drawn(make_run(ranks))["waiting"]  # type: ignore[arg-type]
    assert [row[7] for row in shown.cells[1:4]] == ["50 ms", "0 ms", "50 ms"]
    assert "waits least" in shown.note


def test_the_key_has_the_range_of_the_data() -> None:
    made = [e for n in range(9) for e in steps(1, first=n, wall_s=0.1 + n / 1000)]
    shown = drawn(make_run({0: made, 1: made}))["steps"]
    assert (shown.low, shown.high) == ("0.101 s", "0.108 s")
    used = {n for n, path in enumerate(shown.paths) if path}
    assert used == set(shown.shades), "no colour that is not on the map"
    same = drawn(make_run({0: timed(6)}))["steps"]
    assert (same.low, same.high) == ("0.1 s", "")
    many = drawn(make_run({r: timed(50, slow=(20,) if r == 0 else ()) for r in range(4)}))["steps"]
    assert many.high == "0.5 s"
    assert "The strongest colour stands for" in many.note


def test_what_a_cell_stands_for_is_said() -> None:
    paced = Pace(at=START + 3, optimizer=0, step=9, count=4, wall_s=0.1, waited_s=0.03,
                 own_s=(0.0,) * 8)  # fmt: skip
    held = MemorySample(at=START, step=2, rss_bytes=10**9, peak_rss_bytes=0)
    shown = drawn(make_run({0: [*timed(10), paced, held]}))
    assert shown["steps"].note == "Measured in each step."
    assert shown["waiting"].note == "Measured as the mean of up to 4 steps at a time."
    assert shown["memory"].note == "A value stands until the next one was measured."
    assert shown["waiting"].gaps and shown["memory"].gaps
    folded = drawn(make_run({0: timed(MOST_COLUMNS * 2)}))["steps"]
    assert folded.each == 2
    assert folded.note == "A cell is the mean of its steps."


def test_steps_are_named_below_first_last_and_between() -> None:
    run = make_run({0: timed(41)})
    shown = drawn(run)["steps"]
    assert [text for _, text in shown.ticks] == ["step 0", "10", "20", "30", "40"]
    assert [x for x, _ in shown.ticks] == sorted(x for x, _ in shown.ticks)
    assert shown.ticks[2][0] == pytest.approx(100 * 20.5 / 41, abs=0.01)
    assert "a column for each step;" in page.html(diagnose(run, (), folder="runs/a"), run)
    many = make_run({0: timed(1000)})
    assert [t for _, t in drawn(many)["steps"].ticks] == [
        "step 0", "200", "400", "600", "800", "999",
    ]  # fmt: skip
    assert "a column for 11 steps;" in page.html(diagnose(many, (), folder="runs/a"), many)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "no optimizer step is on record"), (2, "fewer than three steps")]
)
def test_what_is_not_drawn_is_said_in_a_line(count: int, said: str) -> None:
    run = make_run({0: steps(count), 1: steps(count)})
    text = page.html(diagnose(run, (), folder="runs/a"), run)
    assert said in text
    assert 'id="maps"' not in text
    few = make_run({0: steps(5)})
    text = page.html(diagnose(few, (), folder="runs/a"), few)
    assert "Not drawn: waiting for other ranks in a step (not on record)" in text


def test_numbers_without_sense_are_left_out() -> None:
    odd = [*steps(3), *steps(1, first=2**50, wall_s=1e308), *steps(1, first=4, wall_s=-3.0)]
    run = make_run({0: odd, 1: [*steps(5), *steps(1, first=5, wall_s=float("1e300"))]})
    assert "could not be drawn" not in page.html(diagnose(run, (), folder="runs/a"), run)


def test_loss_and_batch_size_last_until_the_next_value() -> None:
    losses = [
        LossValues(at=START + 1, steps=(0, 1), values=(2.5, -1.5)),
        LossValues(at=START + 2, steps=(3,), values=(0.25,)),
    ]
    sizes = [BatchSeen(at=START + n, model=0, forward=n, size=8 - n, step=n) for n in (0, 4)]
    run = make_run({0: [*timed(6), *losses, *sizes], 1: [*timed(6), *losses[:1], *sizes[:1]]})
    shown = drawn(run)
    assert shown["loss"].cells[0] == ("2.5", "-1.5", "-1.5", "0.25", "0.25", "0.25")
    assert (shown["loss"].low, shown["loss"].high) == ("-1.5", "2.5")
    assert shown["batch"].cells == (("8", "8", "8", "8", "4", "4"), ("8",) * 6)
    alike = make_run({0: [*timed(6), *sizes[:1]], 1: [*timed(6), *sizes[:1]]})
    told = maps(diagnose(alike, (), folder="runs/a"), alike)
    assert "batch size (8 everywhere)" in told.left_out
