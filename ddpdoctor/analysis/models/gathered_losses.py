"""Losses of tensors that were gathered from all ranks, of which a backward gives back a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...events import GatheredInGraph

SAME_GRADIENT, OFTEN = 0.02, 3
"""How far, relative to their norm, the gradients of what was gathered differ between ranks that
compute the same loss, and in how many forwards they must agree."""

DROPPED = 0.05
"""What part of the gradient of all ranks' tensors, by its norm, is dropped at least."""

Rows = dict[int, list[dict[int, GatheredInGraph]]]
"""By line on the first rank, the records of all ranks, forward by forward."""


def gathered_losses(events: Mapping[int, Sequence[GatheredInGraph]]) -> tuple[Rows, Rows]:
    """By rank, what it gathered for the loss of one model.

    Returns:
        The lines that gather tensors from which all ranks compute the same loss, in every forward
            compared; and those from which each computes one of its own, and drops the gradient of
            the others.
    """
    tables: dict[int, dict[tuple[int, int], GatheredInGraph]] = {}
    for number, of_rank in events.items():
        table = tables.setdefault(number, {})
        for event in of_rank:
            key = event.forward, sum(forward == event.forward for forward, _ in table)
            table[key] = event
    common = set.intersection(*map(set, tables.values())) if tables else set()
    found: Rows = {}
    for key in sorted(common):
        row = {number: table[key] for number, table in tables.items()}
        found.setdefault(next(iter(row.values())).site, []).append(row)
    often = {site: rows for site, rows in found.items() if len(rows) >= OFTEN}
    same = {s: [_same_gradient([*row.values()]) for row in rows] for s, rows in often.items()}
    return (
        {s: rows for s, rows in often.items() if all(same[s])},
        {s: rows for s, rows in often.items() if not any(same[s]) and all(map(_drops, rows))},
    )


def _drops(row: Mapping[int, GatheredInGraph]) -> bool:
    """Whether every rank drops a part of the gradient that counts."""
    return all(e.dropped >= DROPPED * e.norm for e in row.values())


def _same_gradient(events: list[GatheredInGraph]) -> bool:
    """Whether the gradients of all ranks' parts are equal, but for rounding."""
    first = events[0]
    allowed = SAME_GRADIENT * max(e.norm for e in events)
    return all(
        abs(e.norm - first.norm) <= allowed and math.dist(e.sketch, first.sketch) <= allowed
        for e in events
    )
