"""The time ledger as bars in the page."""

from __future__ import annotations

import re

import msgspec
from recordings import make_run, site, steps, torch_loaded

from ddpdoctor.render import page
from ddpdoctor.render.page.ledger_bars import COLOURS, MOST_BARS, bars
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import RankTimes, Report
from ddpdoctor.run.ledger import ACCOUNTS, START


def report_of(*rows: RankTimes) -> Report:
    events = [torch_loaded(), site(1, "train.py", 88, "opt.step()"), *steps(10, site=1)]
    report = diagnose(make_run({0: events, 1: events}), (), folder="runs/a")
    return msgspec.structs.replace(report, ledger=rows)


def row(rank: int, waiting: float, **more: float) -> RankTimes:
    accounts = {"start-up": 5.0, "forward": 6.0 - waiting, "waiting": waiting, **more}
    return RankTimes(
        rank=rank, wall_s=11, accounts=accounts, waiting_for={"0": waiting} if waiting else {}
    )


def test_every_account_has_a_colour() -> None:
    assert COLOURS.keys() == {*ACCOUNTS} - {START}


def test_the_rank_that_loses_most_comes_first_and_start_up_is_left_out() -> None:
    text = page.html(report_of(row(0, 0), row(1, 3.0)))
    labels = re.findall(r'aria-label="(rank .*?)"', text)
    assert [label.split(":")[0] for label in labels] == ["rank 1", "rank 0"]
    assert "waiting 3 s (3 s of it for rank 0)" in labels[0]
    assert "start-up" not in labels[0]
    widths = [float(w) for w in re.findall(r'<i style="width:([\d.]+)%', text)]
    assert widths == [50.0, 50.0, 100.0]


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
