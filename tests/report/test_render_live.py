"""The table of a running run: what it shows, and that it leaves the ranks' output alone."""

from __future__ import annotations

import io
import re
import time

import pytest
from recordings import make_run, started, steps

from ddpdoctor import render
from ddpdoctor.render.live import LiveView
from ddpdoctor.run import Run


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
