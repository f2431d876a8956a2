"""Which ranks, or workers of a rank, deliver the same samples of a stream, which has no indices."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .content import WHOLE, Row, overlap, rows, same_pass
from .loaders import Reader

MATERIAL = 0.3
"""Share of a stream's samples that another rank or worker has to deliver too."""


class Sharing(NamedTuple):
    """Who delivers the same samples.

    Attributes:
        best: how many of these two of them do, and of how many.
        parts: the sets of ranks that deliver the same, where some ranks do not, and any two deliver
            the same or nothing in common.
    """

    ranks: frozenset[int] = frozenset()
    best: tuple[int, int] = (0, 0)
    parts: tuple[tuple[int, ...], ...] = ()


def together(readers: list[Reader], number: int, share: float = MATERIAL) -> Sharing:
    """Those that deliver at least that share of the other's samples in an epoch."""
    # One worker of each rank: what the workers of one rank share must not hide it.
    first = {r.rank.rank: _by_worker(r, number)[0] for r in readers}
    best, clear = (0, 0), True
    of_rank = {r: frozenset({r}) for r in first}
    for a, b in itertools.combinations(readers, 2):
        common, of = overlap(first[a.rank.rank], first[b.rank.rank])
        apart = of > 0 and not common
        if not of or common / of < share:
            common, of = same_pass([a, b], workers=False, since=number)
        if of:
            one = of_rank[a.rank.rank] | of_rank[b.rank.rank]
            of_rank |= dict.fromkeys(one, one)
            best = max(best, (common, of))
        clear = clear and (common >= WHOLE * of if of else apart)
    sets = [tuple(sorted(s)) for s in dict.fromkeys(of_rank.values())]
    several = tuple(s for s in sets if len(s) > 1)
    ranks = frozenset(r for s in several for r in s)
    return Sharing(ranks, best, several if clear and len(sets) > 1 else ())


def later(readers: list[Reader]) -> tuple[int, Sharing]:
    """From which epoch on ranks deliver the same samples, in all that were looked at until the
    last, and most of them."""
    found = 0, Sharing()
    for number in range(min(len(r.epochs) for r in readers) - 1, 0, -1):
        epochs = [r.epochs[number] for r in readers]
        if not all(e.content and e.trained for e in epochs):
            continue
        sharing = together(readers, number, WHOLE)
        known = found[1].ranks
        at_once = len({e.began.step for e in epochs}) == 1
        if not sharing.ranks or not at_once or (known and known != sharing.ranks):
            break
        found = number, sharing
    return found


def shares(reader: Reader) -> bool:
    """Whether two workers of a rank deliver much of the same."""
    common, of = between_workers(reader)
    return of > 0 and common / of >= MATERIAL


def between_workers(reader: Reader) -> tuple[int, int]:
    """How many samples two workers of a rank both deliver, and of how many."""
    if reader.seen.workers < 2:
        return 0, 0
    first, second, *_ = _by_worker(reader)
    return overlap(first, second)


def all_share(readers: list[Reader]) -> bool:
    """The workers of every rank deliver the same rows, each in an order of its own."""
    return all(r.seen.workers > 1 and same_pass([r], workers=True)[1] for r in readers)


def _by_worker(reader: Reader, number: int = 0) -> list[list[Row]]:
    """Digests of the samples that each worker delivered in an epoch; they take turns."""
    workers = max(1, reader.seen.workers)
    found: list[list[Row]] = [[] for _ in range(workers)]
    for batch, row in rows(reader.epochs[number]):
        found[batch % workers].append(row)
    return found
