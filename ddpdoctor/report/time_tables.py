"""The time ledger as the report shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ..run.ledger import ACCOUNTS, BACKWARD, FORWARD, OPTIMIZER, TITLES, Ledger, RankTime
from .findings import RankTimes, Table

SHORTEST_S = 5.0
"""After the start-up: of a shorter run the table says little about a longer one like it."""

REST = "rest"

TOGETHER = {"training": (FORWARD, BACKWARD, OPTIMIZER)}
"""Accounts in one column of the table, which is to fit on a console. The page and `findings.json`
have each of them."""

MOST_ROWS = 16
"""Of more ranks, those with the most in each account are shown, and the median."""


def time_rows(ledger: Ledger) -> tuple[RankTimes, ...]:
    """Every account of every rank."""
    return tuple(
        RankTimes(
            rank=r.rank,
            wall_s=round(r.wall_s, 3),
            accounts={name: round(r.accounts[name], 3) for name in ACCOUNTS},
            waiting_for={str(n): round(s, 3) for n, s in sorted(r.waited_for.items())},
        )
        for r in ledger.ranks.values()
    )


def time_lost(ledger: Ledger) -> str:
    """What was lost, of runs that are long enough and lost much."""
    return ledger.much_lost() if ledger.training_s >= SHORTEST_S else ""


def time_tables(ledger: Ledger) -> list[Table]:
    """One line per rank, of many those at the ends of an account; and what was lost of all."""
    if ledger.training_s < SHORTEST_S:
        return []
    ranks = list(ledger.ranks.values())
    shown = ledger.shown()
    columns = ("rank", "all", *(TITLES.get(c, c) for c in _columns(shown)), REST)
    said = ledger.efficiency()
    return [
        Table(
            title="Seconds by account" + (f" ({said})" if said else ""),
            columns=columns,
            rows=tuple(_rows(ranks, shown)),
        )
    ]


def _rows(ranks: Sequence[RankTime], shown: list[str]) -> Iterator[tuple[str, ...]]:
    if len(ranks) <= MOST_ROWS:
        yield from (_row(rank, shown) for rank in ranks)
        return
    ends: dict[int, RankTime] = {}
    for name in shown:
        most = max(ranks, key=lambda r: r.accounts[name])
        ends[most.rank] = most
    for rank in sorted(ends.values(), key=lambda r: r.rank):
        yield _row(rank, shown)
    middle = {a: median(r.accounts[a] for r in ranks) for a in ACCOUNTS}
    whole = median(r.wall_s for r in ranks)
    median_rank = RankTime(-1, whole, middle, {}, ())
    yield (f"median of {len(ranks)}", *_row(median_rank, shown)[1:])


def _columns(shown: list[str]) -> dict[str, list[str]]:
    """The accounts of each column."""
    columns: dict[str, list[str]] = {}
    for name in shown:
        column = next((c for c, accounts in TOGETHER.items() if name in accounts), name)
        columns.setdefault(column, []).append(name)
    return columns


def _row(rank: RankTime, shown: list[str]) -> tuple[str, ...]:
    seconds = [sum(rank.accounts[name] for name in names) for names in _columns(shown).values()]
    every = (rank.wall_s, *seconds, rank.wall_s - sum(seconds))
    return (str(rank.rank), *(f"{max(s, 0.0):.1f}" for s in every))
