"""Ranks of groups under the numbers of the run.

The launcher numbers the processes, and so do the records. A script may form its own world of some
of them, or several worlds side by side, in which the ranks are counted anew: rank 1 of one world
is another process than rank 1 of the next.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from ..events import Event, InitEntered
from .rank import Rank

Table = Mapping[int, int]
"""Rank of a world to the number of its process."""


def under_the_launchers_numbers(ranks_by_number: Mapping[int, Rank]) -> dict[int, Rank]:
    """The ranks under the launcher's numbers; a rank whose world counts differently comes as a
    copy."""
    ranks = {number: _as_recorded(rank) for number, rank in ranks_by_number.items()}
    met = {number: place for number, rank in ranks.items() if (place := _place(rank)) is not None}
    if all(claimed == number for number, (_, claimed) in met.items()):
        return ranks
    worlds: dict[tuple[str, int], dict[int, int]] = {}
    for number, (world, claimed) in met.items():
        if worlds.setdefault(world, {}).setdefault(claimed, number) != number:
            return ranks  # two processes with one rank: `rank-mismatch` tells it
    return {
        number: _told_by(rank, worlds[met[number][0]]) if number in met else rank
        for number, rank in ranks.items()
    }


def _as_recorded(rank: Rank) -> Rank:
    """The rank as it was recorded: several nodes are joined from what one node made of it."""
    if rank.as_recorded is None:
        return rank
    own = copy.copy(rank.as_recorded)
    own.stalled = rank.stalled
    return own


def _place(rank: Rank) -> tuple[tuple[str, int], int] | None:
    """Where the rank met the others and of how many, and as which of them; None where it met nobody
    or more than once."""
    inits = rank.of(InitEntered)
    group = rank.default_group
    if len(inits) != 1 or group is None:
        return None
    claimed = inits[0].rank if inits[0].rank >= 0 else inits[0].env_rank
    return ((inits[0].rendezvous, len(group.ranks)), claimed) if claimed >= 0 else None


def _told_by(rank: Rank, table: Table) -> Rank:
    other = copy.copy(rank)
    other.as_recorded = rank
    other.replace_events(lambda event: _translated(event, table))
    other.numbers = dict(table)
    other.look_again()  # the ring is read by these numbers
    return other


def _translated(event: Event, table: Table) -> Event:
    """A group without those of whom nothing is known: they cannot be compared."""
    changed = {
        name: _renumbered(getattr(event, name), table) for name in _fields_of_ranks(type(event))
    }
    return msgspec.structs.replace(event, **changed) if changed else event


def _renumbered(value: Any, table: Table) -> Any:
    """A rank, or ranks; -1 stands for none, or for one of whom nothing is known."""
    if isinstance(value, tuple):
        renumbered = (_renumbered(v, table) for v in value)
        return tuple(
            new for new, old in zip(renumbered, value, strict=True) if new != -1 or old == -1
        )
    return table.get(value, -1)


@lru_cache(maxsize=256)
def _fields_of_ranks(kind: type[Event]) -> tuple[str, ...]:
    return tuple(set(kind.RANKS) & set(kind.__struct_fields__))
