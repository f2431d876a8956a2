"""The time ledger as the report shows it."""

from __future__ import annotations

from ..run.ledger import ACCOUNTS, Ledger, RankTime
from .findings import RankTimes, Table

SHORTEST_S = 5.0
"""After the start-up: of a shorter run the table says little about a longer one like it."""

OTHER = "other"


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


def time_tables(ledger: Ledger) -> list[Table]:
    """One line per rank, and what was lost of all."""
    if ledger.training_s < SHORTEST_S:
        return []
    ranks = list(ledger.ranks.values())
    shown = ledger.shown()
    columns = ("rank", "all", *shown, OTHER)
    said = ledger.efficiency()
    return [
        Table(
            title="Seconds by account" + (f" ({said})" if said else ""),
            columns=columns,
            rows=tuple(_row(r, shown) for r in ranks),
        )
    ]


def _row(rank: RankTime, shown: list[str]) -> tuple[str, ...]:
    seconds = [rank.accounts[name] for name in shown]
    every = (rank.wall_s, *seconds, rank.wall_s - sum(seconds))
    return (str(rank.rank), *(f"{max(s, 0.0):.1f}" for s in every))
