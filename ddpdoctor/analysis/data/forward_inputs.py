"""What the forwards of wrapped models were given, compared between the ranks that share a model."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...events import Averaged, ForwardInput, GroupReady, Unwrapped, Wrapped
from ...run import Rank, Run
from .data_calls import handed_out, work_together

FEWEST, LATER = 3, 4
"""Forwards to compare: that agree throughout, or from one of them to the last."""

ENOUGH = 8
"""Batches of a loader that are the same on ranks with other indices, which is no chance."""

DRAWN_SHARE = 6
"""One forward in so many that follows a draw of its inputs makes them toy data."""

TOY_DRAWS = 300
"""Draws beyond which a generator's state cannot tell how many there were."""


@dataclass(eq=False)
class Inputs:
    """The sampled forwards of one model on the ranks of one group.

    Attributes:
        kind: the model's class.
        by_rank: rank to number of the forward to what it was given.
    """

    model: int
    kind: str
    ranks: frozenset[int]
    by_rank: dict[int, dict[int, ForwardInput]]

    def common(self) -> list[int]:
        """Forwards on record on all ranks."""
        numbers = [set(f) for f in self.by_rank.values()]
        return sorted(set.intersection(*numbers)) if numbers else []


@lru_cache(maxsize=1)
def inputs(run: Run) -> tuple[Inputs, ...]:
    """For every model and every group that shares it."""
    found: dict[tuple[int, frozenset[int]], dict[int, dict[int, ForwardInput]]] = defaultdict(dict)
    kinds: dict[int, str] = {}
    for rank in run.ranks.values():
        groups = {g.group: frozenset(g.ranks) for g in rank.of(GroupReady)}
        given: dict[int, dict[int, ForwardInput]] = defaultdict(dict)
        for event in rank.of(ForwardInput):
            given[event.model][event.forward] = event
        for wrapped in rank.of(Wrapped):
            group = groups.get(wrapped.group)
            if wrapped.model in given and group is not None:
                found[wrapped.model, group][rank.rank] = given[wrapped.model]
                kinds.setdefault(wrapped.model, wrapped.kind)
    return tuple(Inputs(m, kinds[m], g, by) for (m, g), by in found.items() if len(by) > 1)


def in_parts(run: Run, ranks: frozenset[int], size: int) -> bool:
    """Whether these ranks give a wrapped model, at every forward compared, each its own rows of one
    batch: in the order of the ranks, without overlap; or unlike ones that are together no more than
    a batch (`x[rank::world_size]`).

    Args:
        size: samples in a batch.
    """
    return any(
        _in_parts(given, ranks) or _shared_out(given, ranks, size)
        for given in inputs(run)
        if ranks <= given.by_rank.keys()
    )


def _shared_out(given: Inputs, ranks: frozenset[int], size: int) -> bool:
    common = given.common()
    rows = [[given.by_rank[r][n] for r in ranks] for n in common]
    return len(common) >= FEWEST and all(
        0 < sum(e.rows for e in each) <= size
        and len({e.digest for e in each} - {0}) == len(ranks)
        and all(e.fed for e in each)
        for each in rows
    )


def _in_parts(given: Inputs, ranks: frozenset[int]) -> bool:
    common = given.common()
    members = [given.by_rank[r] for r in sorted(ranks)]
    return len(common) >= FEWEST and all(
        0 < a[n].rows <= b[n].begins - a[n].begins
        for a, b in itertools.pairwise(members)
        for n in common
    )


def fed_alike(run: Run, ranks: frozenset[int]) -> int:
    """How many batches of a loader, unlike each other, these ranks gave a wrapped model alike, at
    every forward compared; 0 where they did not."""
    best = 0
    for given in inputs(run):
        if not ranks <= given.by_rank.keys():
            continue
        members = [given.by_rank[r] for r in sorted(ranks)]
        fed = [n for n in given.common() if all(f[n].fed and f[n].training for f in members)]
        found = [{f[n].digest for f in members} for n in fed]
        if any(len(digests) > 1 or 0 in digests for digests in found):
            return 0
        unlike = len(set().union(*found))
        best = max(best, unlike if unlike >= ENOUGH else 0)
    return best


@dataclass(eq=False)
class EqualInputs:
    """Ranks that fed a model the same inputs at every forward compared, or from one on.

    Attributes:
        differed: the last forward before at which they were not the same, -1 where they always are.
        drawn: the inputs were drawn from the global random generators just before.
        constant: they (nearly) never change over time: toy data.
        meant: they were handed out by one of the ranks, or the ranks exchange what they compute
            from them in a smaller group of theirs.
    """

    ranks: tuple[int, ...]
    forwards: list[int]
    event: ForwardInput
    drawn: bool
    meant: bool
    differed: int = -1
    constant: bool = False

    @property
    def late(self) -> bool:
        return self.differed >= 0

    @property
    def toy(self) -> bool:
        return self.drawn or self.constant


def alike(run: Run, given: Inputs) -> Iterator[EqualInputs]:
    """Groups of ranks whose inputs agree, forward by forward; where these are the same over time,
    too, only of what the model is trained on."""
    common = [
        n
        for n in given.common()
        if all(f[n].digest and not f[n].fed for f in given.by_rank.values())
    ]
    trained = [n for n in common if all(f[n].training for f in given.by_rank.values())]
    common = trained or common  # what is only shown to the model says nothing of training
    if len(common) < FEWEST:
        return
    sequences = {r: [f[n].digest for n in common] for r, f in given.by_rank.items()}
    whole = list(_agreeing(sequences, len(common)))
    for ranks, begin in whole or _agreeing(sequences, LATER):
        constant = len(set(sequences[ranks[0]][begin:])) < (FEWEST if whole else LATER)
        if constant and not (whole and trained):
            continue
        first, same = given.by_rank[ranks[0]], common[begin:]
        if begin and any(first[n].carried for n in same):
            continue  # the state that it was carried on from may be another one
        yield EqualInputs(
            ranks,
            same,
            first[same[0]],
            _drawn([first[n] for n in same]),
            all(_meant(run.ranks[r], frozenset(ranks), len(same)) for r in ranks),
            common[begin - 1] if begin else -1,
            constant,
        )


def _meant(rank: Rank, ranks: frozenset[int], times: int) -> bool:
    return handed_out(rank) >= times or work_together(rank, ranks, times)


def _agreeing(sequences: dict[int, list[int]], last: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Ranks whose sequences end alike in the last so many places, and from which place on they are
    alike."""
    ends = Counter(tuple(s[-last:]) for s in sequences.values())
    for end in (e for e, count in ends.items() if count > 1):
        ranks = tuple(sorted(r for r, s in sequences.items() if tuple(s[-last:]) == end))
        rows = list(zip(*(sequences[r] for r in ranks), strict=True))
        yield ranks, next((n for n in range(len(rows), 0, -1) if len(set(rows[n - 1])) > 1), 0)


def _drawn(events: Sequence[ForwardInput | Averaged]) -> bool:
    """About as many random numbers were drawn as the inputs hold: toy data, made on the spot.

    A step may draw once for several forwards (the halves of a GAN), and part of an input may
    come from elsewhere, so some of the forwards and half of the numbers suffice.
    """
    known = [e for e in events if e.drawn >= 0 and e.numbers]
    ample = [e for e in known if e.drawn >= 0.5 * min(e.numbers, TOY_DRAWS)]
    return len(ample) >= max(1, len(known) // DRAWN_SHARE)


# --- models without a wrapper ---------------------------------------------------------------------


@dataclass(eq=False)
class SameWork:
    """Ranks that computed the same gradients, bit for bit, in each step compared.

    Attributes:
        steps: of the optimizer; event: of the first of them.
        seen: what the model was given is known, and the same on these ranks.
        drawn, constant: as in `EqualInputs`.
    """

    ranks: tuple[int, ...]
    steps: list[int]
    event: Averaged
    kind: str
    seen: bool
    drawn: bool
    constant: bool


def same_work(run: Run) -> Iterator[SameWork]:
    """Of models whose gradients the program itself exchanges, all of them, on every rank: groups of
    ranks whose own gradients agree before that."""
    numbers = {e.optimizer for r in run.ranks.values() for e in r.of(Averaged)}
    for optimizer in sorted(numbers) if run.world_size > 1 else ():
        tables = {
            number: {e.step: e for e in rank.of(Averaged) if e.optimizer == optimizer and e.alone}
            for number, rank in run.ranks.items()
        }
        common = sorted(set.intersection(*(set(t) for t in tables.values())))
        if len(tables) < run.world_size or len(common) < FEWEST:
            continue
        rows = {n: tuple(t[step] for step in common) for n, t in tables.items()}
        local = {n: tuple(e.local for e in events) for n, events in rows.items()}
        for values, count in Counter(local.values()).items():
            if count < 2 or len({v for v in values if any(v)}) < FEWEST:
                continue
            ranks = tuple(sorted(n for n, mine in local.items() if mine == values))
            first, given = rows[ranks[0]], {tuple(e.inputs for e in rows[n]) for n in ranks}
            inputs = given.pop()
            if given:
                continue
            known = all(inputs)
            constant = known and len(set(inputs)) < FEWEST
            kinds = (u.kind for u in run.ranks[ranks[0]].of(Unwrapped) if u.optimizer == optimizer)
            kind = next(kinds, "") or "a set of parameters"
            yield SameWork(ranks, common, first[0], kind, known, _drawn(first), constant)
