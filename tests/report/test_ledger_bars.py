"""The time ledger as bars in the page."""

from __future__ import annotations

import itertools
import math
import re

import msgspec
import pytest
from recordings import make_run, site, steps, torch_loaded

from ddpdoctor.render import page
from ddpdoctor.render.page import build
from ddpdoctor.render.page.ledger_bars import MOST_BARS, bars
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import RankTimes, Report
from ddpdoctor.run.ledger import ACCOUNTS, START

CSS = (build.FILES / "page.css").read_text()


def colours() -> tuple[dict[str, str], dict[str, str]]:
    """The variables of the style sheet that are colours, for light and dark pages."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.S)[:2]
    named = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in (light, dark)]
    return named[0], named[1]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""

    def light(colour: str) -> float:
        parts = [c / 255 for c in rgb(colour)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def report_of(*rows: RankTimes) -> Report:
    events = [torch_loaded(), site(1, "train.py", 88, "opt.step()"), *steps(10, site=1)]
    report = diagnose(make_run({0: events, 1: events}), (), folder="runs/a")
    return msgspec.structs.replace(report, ledger=rows)


def row(rank: int, waiting: float, **more: float) -> RankTimes:
    accounts = {"start-up": 5.0, "forward": 6.0 - waiting, "waiting": waiting, **more}
    return RankTimes(
        rank=rank, wall_s=11, accounts=accounts, waiting_for={"0": waiting} if waiting else {}
    )


def test_every_account_has_a_colour_in_the_light_and_in_the_dark() -> None:
    light, dark = colours()
    for account in {*ACCOUNTS} - {START}:
        assert account in light and account in dark
        assert f".{account} {{ --c: var(--{account}) }}" in CSS


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_and_can_be_told_apart(mode: int) -> None:
    named = colours()[mode]
    names = [*({*ACCOUNTS} - {START}), "ddp", "open"]
    for name in names:
        assert contrast(named[name], named["panel"]) >= 2.5, name
    for one, other in itertools.combinations([n for n in names if n != "open"], 2):
        apart = math.dist(rgb(named[one]), rgb(named[other]))
        assert apart >= 40, f"{one} looks like {other}"


def test_the_rank_that_loses_most_comes_first_and_start_up_is_left_out() -> None:
    text = page.html(report_of(row(0, 0), row(1, 3.0)))
    labels = re.findall(r'aria-label="(rank .*?)"', text)
    assert [label.split(":")[0] for label in labels] == ["rank 1", "rank 0"]
    assert "waiting for other ranks 3 s (3 s of it for rank 0)" in labels[0]
    assert "start-up" not in labels[0]
    widths = [float(w) for w in re.findall(r'style="width:([\d.]+)%', text)]
    assert widths == [50.0, 50.0, 100.0]
    assert "3 s of 6 s lost" in text and "0 ms of 6 s lost" in text


def test_ranks_that_lose_as_much_as_can_be_seen_stand_in_their_order() -> None:
    text = "".join(bars(report_of(row(0, 1.001), row(1, 1.002), row(2, 1.4))))
    assert re.findall(r'aria-label="(rank \d)', text) == ["rank 2", "rank 0", "rank 1"]


def test_what_is_lost_stands_together_under_its_own_key() -> None:
    text = "".join(bars(report_of(row(0, 2.0, loading=1.0, outside=1.0))))
    kept, lost = re.findall(r'<div class="legend">(.*?)</div>', text)
    assert "forward" in kept and "other code" in kept
    assert lost.startswith("<span>lost:</span>") and "loading" in lost
    bar = re.search(r'role="img".*?</div>', text)
    assert bar and re.findall(r'<i class="(\w+)"', bar[0]) == [
        "forward", "outside", "loading", "waiting",
    ]  # fmt: skip


def test_the_axis_is_in_seconds() -> None:
    text = "".join(bars(report_of(row(0, 2.0), row(1, 0.0))))
    assert re.findall(r'left:([\d.]+)%">(.*?)<', text) == [
        ("0.00", "0 s"), ("16.67", "1 s"), ("33.33", "2 s"), ("50.00", "3 s"), ("66.67", "4 s"),
        ("83.33", "5 s"),
    ]  # fmt: skip


def test_a_run_that_did_not_train_has_no_bars() -> None:
    assert list(bars(report_of())) == []
    only = RankTimes(rank=0, wall_s=5, accounts={"start-up": 5.0})
    assert list(bars(report_of(only))) == []


def test_many_ranks_are_cut_and_counted() -> None:
    text = "".join(bars(report_of(*(row(n, n / 100) for n in range(MOST_BARS + 3)))))
    assert text.count('class="bar"') == MOST_BARS
    assert "and 3 ranks that lost less" in text


def test_names_of_ranks_are_escaped() -> None:
    hostile = RankTimes(rank=1, wall_s=9, accounts={"waiting": 4.0}, waiting_for={"<script>": 4.0})
    assert "<script>" not in "".join(bars(report_of(hostile)))
