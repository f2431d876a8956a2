"""The time ledger as a picture: one stacked bar for each rank, without a script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...report.findings import RankTimes, Report
from ...run import counted, ranks_text
from ...run.ledger import (
    ACCOUNTS,
    COMMUNICATION,
    DOCTOR,
    LOSSES,
    OUTSIDE,
    START,
    TITLES,
    WAITING,
)
from ..safe_text import clean, duration
from .axis import round_marks

MOST_BARS = 64
"""Ranks shown; those that lose most come first."""

MOST_MARKS = 6

NAMES = {
    OUTSIDE: TITLES[OUTSIDE],
    WAITING: "waiting for other ranks",
    COMMUNICATION: "communication",
    DOCTOR: "the doctor",
}
"""Of accounts in the pictures of the page, where that is not their own name."""

LOST = (*(a for a in ACCOUNTS if a in LOSSES and a != DOCTOR), WAITING, DOCTOR)


def named(account: str) -> str:
    return NAMES.get(account, account)


def bars(report: Report) -> Iterator[str]:
    """The figure; nothing where no rank has trained."""
    rows = [row for row in report.ledger if _trained(row) > row.accounts.get(DOCTOR, 0.0)]
    if not rows:
        return
    # As exact as it is shown, so that ranks that lost as much stand in their order.
    rows.sort(key=lambda row: (-float(f"{_lost(row):.3g}"), row.rank))
    longest = max(map(_trained, rows))
    shown = [a for a in ACCOUNTS if a != START and any(row.accounts.get(a) for row in rows)]
    kept, lost = [a for a in shown if a not in LOST], [a for a in LOST if a in shown]
    order = "" if len(rows) == 1 else ", the rank that lost most first"
    yield f"<figure><figcaption>Where the time went after start-up{order}</figcaption>"
    yield f'<div class="legend">{"".join(map(_key, kept))}</div>'
    if lost:
        yield f'<div class="legend"><span>lost:</span>{"".join(map(_key, lost))}</div>'
    for row in rows[:MOST_BARS]:
        yield _bar(row, [*kept, *lost], longest)
    yield _axis(longest)
    if more := rows[MOST_BARS:]:
        yield f"<div>and {counted(len(more), 'rank')} that lost less</div>"
    yield "</figure>"


def _trained(row: RankTimes) -> float:
    """Seconds after start-up."""
    return sum(seconds for name, seconds in row.accounts.items() if name != START)


def _lost(row: RankTimes) -> float:
    return sum(row.accounts.get(name, 0.0) for name in LOST)


def _key(account: str) -> str:
    return f'<span><i class="{account}"></i>{named(account)}</span>'


def _bar(row: RankTimes, shown: list[str], longest: float) -> str:
    parts = [(name, row.accounts.get(name, 0.0)) for name in shown]
    said = ", ".join(_said(row, name, seconds) for name, seconds in parts if seconds > 0)
    pieces = "".join(
        f'<i class="{name}" style="width:{100 * seconds / longest:.2f}%" '
        f'title="{escape(_said(row, name, seconds))}"></i>'
        for name, seconds in parts
        if seconds > 0
    )
    label = escape(f"rank {row.rank}: {said}")
    sums = f"{duration(_lost(row))} of {duration(_trained(row))} lost"
    return (
        f'<div class="bar"><span>rank {row.rank}</span><div role="img" aria-label="{label}">'
        f"{pieces}</div><span>{sums}</span></div>"
    )


def _axis(longest: float) -> str:
    marks = "".join(
        f'<span style="left:{100 * at / longest:.2f}%">{text} s</span>'
        for at, text in round_marks(0.0, longest, MOST_MARKS)
        if at <= 0.97 * longest
    )
    return f'<div class="bar axis" aria-hidden="true"><span></span><div>{marks}</div></div>'


def _said(row: RankTimes, account: str, seconds: float) -> str:
    text = f"{named(account)} {duration(seconds)}"
    if account != WAITING or not row.waiting_for:
        return text
    last, most = max(row.waiting_for.items(), key=lambda pair: pair[1])
    known = ranks_text([int(last)]) if last.isdecimal() else clean(last, 40)
    return f"{text} ({duration(most)} of it for {known})"
