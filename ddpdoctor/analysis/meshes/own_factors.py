"""Ranks of a device mesh that multiply their shards of gradients by different factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import ShardScales
from ...run import Rank, Run

LEAST_STEPS = 2
"""A single step may be a trial."""
LEAST_GRADIENTS = 2
"""Gradients whose factors are known on several ranks."""
UNEQUAL, ROUNDINGS = 1e-3, 8.0
"""Relative difference of factors that are not the same, in all and in roundings of their type."""


@dataclass(frozen=True)
class OwnFactors:
    """Ranks of a mesh whose factors differ.

    Attributes:
        ranks: of the mesh, as far as they are on record.
        steps: in which they differ.
        events: of the ranks that scale at all, those that hold in these steps, at least one each.
        factors: by rank, the factor of one gradient in each of these steps.
    """

    ranks: tuple[int, ...]
    steps: list[int]
    events: dict[Rank, list[ShardScales]]
    factors: dict[int, list[float]]


def own_factors(run: Run) -> Iterator[OwnFactors]:
    """By optimizer and mesh, where ranks scale their shards differently in several steps."""
    keys = {(e.optimizer, e.ranks) for r in run.ranks.values() for e in r.of(ShardScales)}
    for optimizer, ranks in sorted(keys):
        members = {
            rank: mine
            for n in ranks
            if (rank := run.ranks.get(n)) is not None
            and (
                mine := [
                    e for e in rank.of(ShardScales) if (e.optimizer, e.ranks) == (optimizer, ranks)
                ]
            )
        }
        if len(members) > 1 and (found := _found(members)) is not None:
            yield found


def _found(members: dict[Rank, list[ShardScales]]) -> OwnFactors | None:
    steps: list[int] = []
    events: dict[Rank, list[ShardScales]] = {rank: [] for rank in members}
    factors: dict[int, list[float]] = {rank.rank: [] for rank in members}
    at = dict.fromkeys(members, 0)
    # A record holds until the next one of its rank.
    first = max(mine[0].step for mine in members.values())
    for step in sorted({e.step for mine in members.values() for e in mine if e.step >= first}):
        for rank, mine in members.items():
            while at[rank] + 1 < len(mine) and mine[at[rank] + 1].step <= step:
                at[rank] += 1
        now = {rank: mine[at[rank]] for rank, mine in members.items()}
        position = _differing(list(now.values()))
        if position is None:
            continue
        steps.append(step)
        for rank, event in now.items():
            events[rank].append(event)
            factors[rank.rank].append(event.factors[position])
    scaling = {
        rank: list(dict.fromkeys(mine))
        for rank, mine in events.items()
        if any(factor not in (0.0, 1.0) for e in mine for factor in e.factors)
    }
    if len(steps) < LEAST_STEPS or not scaling:
        return None
    known = {n: [f for f in mine if f] for n, mine in factors.items()}
    return OwnFactors(
        tuple(rank.rank for rank in members), steps, scaling, {n: k for n, k in known.items() if k}
    )


def _differing(events: list[ShardScales]) -> int | None:
    """The position of a gradient whose factors differ between ranks, if at least half of those do
    that are known on several ranks."""
    if len({len(e.factors) for e in events}) != 1:
        return None
    limit = 1 + max(UNEQUAL, ROUNDINGS * max(e.rounding for e in events))
    rows = [[f for f in row if f] for row in zip(*(e.factors for e in events), strict=True)]
    known = [n for n, row in enumerate(rows) if len(row) > 1]
    apart = [n for n in known if max(rows[n]) > min(rows[n]) * limit]
    if len(known) < LEAST_GRADIENTS or 2 * len(apart) < len(known):
        return None
    return max(apart, key=lambda n: len(rows[n]))
