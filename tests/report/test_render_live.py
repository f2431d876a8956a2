"""The table of a running run: what it shows, and that it leaves the ranks' output alone."""

from __future__ import annotations

import io
import re
import time

import msgspec
import pytest
from recordings import START, WALL, make_run, monitor, started, steps
from toys import ToyStep

from ddpdoctor import render
from ddpdoctor.events import (
    EpochBegan,
    EpochEnded,
    Event,
    OptimizerSeen,
    Pace,
    RankSample,
    StallSeen,
    StepDone,
)
from ddpdoctor.render.live import LiveView, LogLines
from ddpdoctor.run import Run, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def running(*counts: int) -> Run:
    ranks = {
        r: [started(r, len(counts), wall=time.time()), *steps(n)] for r, n in enumerate(counts)
    }
    return make_run(ranks, ended=None)


def test_the_table_stands_in_rows_of_its_own() -> None:
    out = Terminal()
    view = LiveView("runs/a", out)
    view.update(running(3, 2))
    first = out.getvalue()
    assert "\x1b[1;16r" in first  # the ranks scroll in rows 1 to 16 of 24
    rows = [int(row) for row in re.findall(r"\x1b\[(\d+);1H", first)]
    assert rows == list(range(17, 25))
    assert first.count("\x1b7") == first.count("\x1b8")
    assert "running, 2 ranks" in first
    view.update(running(4, 3))
    second = out.getvalue()[len(first) :]
    assert "r\x1b8" not in second  # reserved once
    assert "\n" not in second
    view.close()
    assert "\x1b[r" in out.getvalue()[len(first) + len(second) :]
    length = len(out.getvalue())
    view.update(running(5, 5))
    view.close()
    assert len(out.getvalue()) == length


def test_a_resized_screen_is_reserved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    with LiveView("runs/a", out) as view:
        view.update(running(1))
        monkeypatch.setenv("LINES", "40")
        view.update(running(1))
        assert "\x1b[1;28r" in out.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_silent_where_there_is_no_room(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "8")
    with LiveView("runs/a", stream) as view:
        view.update(running(3, 2))
    assert stream.getvalue() == ""


def test_a_terminal_that_goes_away_is_survived() -> None:
    out = Terminal()
    view = LiveView("runs/a", out)
    view.update(running(1))
    out.close()
    view.update(running(2))
    view.close()


def test_many_ranks_share_rows_the_late_ones_first() -> None:
    text = render.now(running(*[9] * 50, 3, *[9] * 49), "runs/a", 80)
    rows = [line.split()[:3] for line in text.split("\n") if " running " in line]
    assert rows == [["50", "running", "3"], ["0-49,51-99", "running", "9"]]


def test_silence_is_told() -> None:
    old = make_run({0: [started(0, 1, wall=time.time() - 300), *steps(2)]}, ended=None)
    assert re.search(r"no new record for (4 min 5\d|5 min \d) s", render.now(old, "a", 80))
    assert "no new record" not in render.now(running(2), "a", 80)


def training(rate: float, *seen: Event, batches: int = 100, seconds: float = 60.0) -> Run:
    """Two ranks in the first epoch, `seconds` after their start, at so many steps a second, and
    what the monitor has seen."""
    wall = time.time() - seconds
    ranks: dict[int, list[Event]] = {}
    for rank in range(2):
        taken = [
            StepDone(
                at=START + n / rate, optimizer=0, step=n, site=-1, wall_s=1 / rate, backwards=1
            )
            for n in range(int(seconds * rate))
        ]
        ranks[rank] = [
            started(rank, 2, wall=wall),
            EpochBegan(at=START, loader=0, epoch=0, step=0, site=-1, batches=batches),
            *taken,
            Pace(at=START + seconds - 1, optimizer=0, step=8, count=8, wall_s=1 / rate,
                 waited_s=0.25 / rate, own_s=()),
        ]  # fmt: skip
    sample = RankSample(at=START + 5, rank=0, pid=5000, rss_bytes=1_500_000_000)
    return make_run(ranks, ended=None, nodes={0: [monitor(), sample, *seen]})


def test_speed_epoch_waiting_and_memory_are_told() -> None:
    text = render.now(training(1.0), "runs/a", 100)
    assert "step 60, 1 steps/s, epoch 0: 60 of 100 batches, 4" in text
    assert " s left, ranks wait 25 % of the time" in text
    assert "1.5 GB" in text


def test_ranks_that_stand_still_have_no_speed() -> None:
    now = START + time.time() - WALL  # of the node
    run = training(1.0, StallSeen(at=now + 1, since=now - 1, hang_after=1))
    text = render.now(run, "runs/a", 100)
    assert "step 60" in text and "steps/s" not in text


def test_a_speed_that_fell_is_told() -> None:
    one = StepDone(at=0, optimizer=0, step=0, site=-1, wall_s=0.1)
    taken = [msgspec.structs.replace(one, at=START + n / 10, step=n) for n in range(900)]
    late = [
        StepDone(at=START + 90 + n, optimizer=0, step=900 + n, site=-1, wall_s=1) for n in range(40)
    ]
    run = make_run({0: [started(0, 1, wall=time.time() - 129), *taken, *late]}, ended=None)
    rank = run.ranks[0]
    now = progress.clock(rank)
    fast = progress.speed(rank, now)
    assert fast is not None and fast.before is not None
    assert fast.per_second == pytest.approx(1, rel=0.05) and fast.before > 5
    said = re.search(
        r"1 steps/s \(a step takes (.*) times as long as before\)", render.now(run, "a", 100)
    )
    assert said is not None and 5 < float(said[1]) < 11
    stands = progress.speed(rank, now + 271)
    assert stands is not None and stands.per_second < 0.2


def test_no_epoch_where_batches_and_steps_are_not_known_to_go_together() -> None:
    two = [OptimizerSeen(at=START, optimizer=n, kind="SGD", site=-1) for n in range(2)]
    steps_of = [
        StepDone(at=START + n / 10, optimizer=n % 2, step=n // 2, site=-1, wall_s=0.1, backwards=1)
        for n in range(60)
    ]
    began = EpochBegan(at=START, loader=0, epoch=0, step=0, site=-1, batches=100)
    run = make_run({0: [started(0, 1), began, *two, *steps_of]}, ended=None)
    assert progress.epoch(run.ranks[0], START + 6) is None
    over = EpochEnded(at=START + 6, loader=0, epoch=0, batches=30, samples=30, backwards=30,
                      exhausted=True)  # fmt: skip
    again = EpochBegan(at=START + 6, loader=0, epoch=1, step=40, site=-1, batches=30)
    run = make_run({0: [started(0, 1), began, *two, *steps_of, over, again]}, ended=None)
    seen = progress.epoch(run.ranks[0], START + 6)
    assert seen is not None and (seen.number, seen.done) == (1, 15)  # 20 steps are 15 batches


def test_findings_are_counted_and_listed() -> None:
    finding = ToyStep().finding(summary="it is wrong", cause="", fix="")
    text = render.now(running(3), "runs/a", 80, findings=[finding])
    assert "1 error so far" in text
    assert "[DDP997] toy-step: it is wrong" in text
    assert "no finding so far" in render.now(running(3), "runs/a", 80, findings=[])


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    lines = LogLines(said.append)
    lines.update(running(3, 2), [])
    assert said == []
    monkeypatch.setattr(lines, "_next", 0.0)
    lines.update(training(1.0), [])
    lines.update(training(1.0), [])
    assert len(said) == 1
    assert re.match(r"after 60 s: step 60, 1 steps/s, epoch 0: .*, no finding so far$", said[0])
