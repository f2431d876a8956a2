"""The time ledger as a picture: one stacked bar for each rank, without a script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...report.findings import RankTimes, Report
from ...run import counted, ranks_text
from ...run.ledger import ACCOUNTS, DOCTOR, LOSSES, START, WAITING
from ..safe_text import clean, duration

MOST_BARS = 64
"""Ranks shown; those that lose most come first."""

COLOURS = {
    "loading": "#d98200",
    "forward": "#2a78c4",
    "backward": "#174a80",
    "optimizer": "#6b9ed6",
    "outside": "#9a9a9a",
    "evaluation": "#2e8b57",
    "checkpoint": "#8a6d3b",
    "waiting": "#c62828",
    "communication": "#e58a8a",
    "doctor": "#7b4fa3",
}
"""By account: what trains is blue, what is lost is red or orange."""

STYLE = """
.bar { display: flex; align-items: center; gap: .6rem; margin: .25rem 0 }
.bar > span:first-child { width: 5.5rem; text-align: right; flex: none }
.bar > div { display: flex; height: 1.1rem; flex: 1 } .bar > div > i { display: block }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85em }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
"""


def bars(report: Report) -> Iterator[str]:
    """The figure; nothing where no rank has trained."""
    rows = [row for row in report.ledger if _trained(row) > row.accounts.get(DOCTOR, 0.0)]
    if not rows:
        return
    rows.sort(key=lambda row: (-_lost(row), row.rank))
    longest = max(map(_trained, rows))
    shown = [a for a in ACCOUNTS if a != START and any(row.accounts.get(a) for row in rows)]
    yield "<figure><figcaption>Where the time went after start-up, the largest loss first"
    yield "</figcaption>"
    yield f'<div class="legend">{"".join(map(_key, shown))}</div>'
    for row in rows[:MOST_BARS]:
        yield _bar(row, shown, longest)
    if more := rows[MOST_BARS:]:
        yield f"<div>and {counted(len(more), 'rank')} that lost less</div>"
    yield "</figure>"


def _trained(row: RankTimes) -> float:
    """Seconds after start-up."""
    return sum(seconds for name, seconds in row.accounts.items() if name != START)


def _lost(row: RankTimes) -> float:
    return sum(row.accounts.get(name, 0.0) for name in (*LOSSES, WAITING))


def _key(account: str) -> str:
    return f'<span><i style="background:{COLOURS[account]}"></i>{account}</span>'


def _bar(row: RankTimes, shown: list[str], longest: float) -> str:
    parts = [(name, row.accounts.get(name, 0.0)) for name in shown]
    said = ", ".join(_said(row, name, seconds) for name, seconds in parts if seconds > 0)
    pieces = "".join(
        f'<i style="width:{100 * seconds / longest:.2f}%;background:{COLOURS[name]}" '
        f'title="{escape(_said(row, name, seconds))}"></i>'
        for name, seconds in parts
        if seconds > 0
    )
    label = escape(f"rank {row.rank}: {said}")
    return (
        f'<div class="bar"><span>rank {row.rank}</span><div role="img" aria-label="{label}">'
        f"{pieces}</div><span>{duration(_trained(row))}</span></div>"
    )


def _said(row: RankTimes, account: str, seconds: float) -> str:
    text = f"{account} {duration(seconds)}"
    if account != WAITING or not row.waiting_for:
        return text
    last, most = max(row.waiting_for.items(), key=lambda pair: pair[1])
    known = ranks_text([int(last)]) if last.isdecimal() else clean(last, 40)
    return f"{text} ({duration(most)} of it for {known})"
