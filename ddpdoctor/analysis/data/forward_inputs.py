"""Inputs of forwards of wrapped models, and gradients of unwrapped ones, compared between the ranks
that train a model together."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...events import Averaged, ForwardInput, GroupReady, LossValues, Unwrapped, Wrapped
from ...run import Rank, Run
from .data_calls import exchange_in_own_group, received_from_peers
from .loaders import Reader, batch_size
from .rng_state import NAMES
from .thresholds import DRAWN_SHARE, FEWEST, LATER, NO_ACCIDENT, RICH, TOY_DRAWS

SAME_LOSS = 1e-3
"""Relative difference of the ranks' losses up to which they are computed from the same values."""


@dataclass(eq=False)
class Inputs:
    """The recorded inputs of one model on the ranks of one group.

    Attributes:
        kind: the model's class.
        by_rank: by rank and number of the forward.
    """

    model: int
    kind: str
    ranks: frozenset[int]
    by_rank: dict[int, dict[int, ForwardInput]]

    def common(self) -> list[int]:
        """Numbers of the forwards that are on record on all ranks, ascending."""
        numbers = [set(f) for f in self.by_rank.values()]
        return sorted(set.intersection(*numbers)) if numbers else []


@lru_cache(maxsize=1)
def inputs(run: Run) -> tuple[Inputs, ...]:
    """The inputs of every wrapped or sharded model, for every group that shares it."""
    found: dict[tuple[int, frozenset[int]], dict[int, dict[int, ForwardInput]]] = defaultdict(dict)
    kinds: dict[int, str] = {}
    for rank in run.ranks.values():
        groups = {g.group: frozenset(g.ranks) for g in rank.of(GroupReady)}
        given: dict[int, dict[int, ForwardInput]] = defaultdict(dict)
        for event in rank.of(ForwardInput):
            given[event.model][event.forward] = event
            if event.ranks:
                found[event.model, frozenset(event.ranks)][rank.rank] = given[event.model]
                kinds.setdefault(event.model, event.kind)
        for wrapped in rank.of(Wrapped):
            group = groups.get(wrapped.group)
            if wrapped.model in given and group is not None:
                found[wrapped.model, group][rank.rank] = given[wrapped.model]
                kinds.setdefault(wrapped.model, wrapped.kind)
    return tuple(Inputs(m, kinds[m], g, by) for (m, g), by in found.items() if len(by) > 1)


def _inputs_from(run: Run, readers: Sequence[Reader]) -> Iterator[list[list[ForwardInput]]]:
    """For every model that all of these ranks feed: the compared forwards, each with the inputs of
    every rank, in the order of the ranks. Forwards known to be fed by other loaders are left out.
    """
    loaders = {r.rank.rank: {epoch.seen.loader for epoch in r.epochs} for r in readers}
    for given in inputs(run):
        if not loaders.keys() <= given.by_rank.keys():
            continue
        each = ({r: given.by_rank[r][n] for r in sorted(loaders)} for n in given.common())
        yield [
            list(forward.values())
            for forward in each
            if all(not e.loaders or loaders[r] & set(e.loaders) for r, e in forward.items())
        ]


def sharded_inputs(run: Run, readers: Sequence[Reader]) -> bool:
    """Whether these ranks feed a model, at every compared forward, each its own part of one batch
    of this loader: consecutive rows in the order of the ranks, distinct ones that together are no
    more than a batch (`x[rank::world_size]`), or parts of each sample (of a sequence, say)."""
    size = batch_size(readers)
    wrapped = any(
        len(forwards) >= FEWEST
        and (
            all(map(_consecutive_rows, forwards))
            or all(_distinct_rows(f, size) for f in forwards)
            or all(all(e.fed for e in f) and _parts_of_batch(f) for f in forwards)
        )
        for forwards in _inputs_from(run, readers)
    )
    return wrapped or _unwrapped_parts(run, [r.rank for r in readers])


def _parts_of_batch(forward: Sequence[ForwardInput] | Sequence[Averaged]) -> bool:
    """Whether ranks are given different inputs, which together are no more than the batch that each
    of them has got last."""
    digests = {e.digest if isinstance(e, ForwardInput) else e.inputs for e in forward}
    sizes = (max(getattr(e, "sizes", ()), default=e.numbers) for e in forward)
    batches = {e.batch for e in forward}
    distinct = len(digests - {0}) == len(forward)
    return distinct and len(batches) == 1 and 0 < sum(sizes) <= batches.pop()


def _unwrapped_parts(run: Run, ranks: Sequence[Rank]) -> bool:
    """The same for a model without a wrapper whose gradients the program synchronises."""
    for optimizer in {e.optimizer for e in ranks[0].of(Averaged)}:
        tables = [{e.step: e for e in r.of(Averaged) if e.optimizer == optimizer} for r in ranks]
        common = set.intersection(*({n for n, e in t.items() if e.inputs} for t in tables))
        if len(common) >= FEWEST and all(_parts_of_batch([t[n] for t in tables]) for n in common):
            return True
    return False


def _distinct_rows(forward: list[ForwardInput], size: int) -> bool:
    return (
        0 < sum(e.rows for e in forward) <= size
        and len({e.digest for e in forward} - {0}) == len(forward)
        and all(e.fed for e in forward)
    )


def _consecutive_rows(forward: list[ForwardInput]) -> bool:
    return all(0 < a.rows <= b.begins - a.begins for a, b in itertools.pairwise(forward))


def equal_batches(run: Run, readers: Sequence[Reader]) -> int:
    """How many distinct batches of a loader these ranks fed a wrapped model, the same ones on every
    rank at every compared forward; 0 where some differ."""
    best = 0
    for forwards in _inputs_from(run, readers):
        fed = [forward for forward in forwards if all(e.fed and e.training for e in forward)]
        found = [{e.digest for e in forward} for forward in fed]
        if any(len(digests) > 1 or 0 in digests for digests in found):
            return 0
        distinct = len(set().union(*found))
        best = max(best, distinct if distinct >= NO_ACCIDENT else 0)
    return best


def unequal_batches(run: Run, readers: Sequence[Reader]) -> bool:
    """Whether these ranks fed some wrapped model other inputs than each other at every compared
    forward of training."""
    return any(
        len(fed) >= NO_ACCIDENT and all(len({e.digest for e in f} - {0}) == len(f) for f in fed)
        for forwards in _inputs_from(run, readers)
        if (fed := [f for f in forwards if all(e.training for e in f)])
    )


@dataclass(eq=False)
class EqualInputs:
    """Ranks that fed a model the same inputs at every compared forward, or from one of them on.

    Attributes:
        kind: the model's class.
        forwards: the compared forwards with equal inputs; `events` are their records on the first
            of the ranks.
        differed: the last compared forward before, with other inputs; -1 where there is none.
        drawn: the inputs were drawn from the global random generators just before.
        constant: they (nearly) never change over time: toy data.
        part: only this one of several inputs is the same, counted from 0; -1 for all.
        intended: one of the ranks sent them to the others, or the ranks exchange what they compute
            from them in a smaller group of their own, or each computes another loss from them; or
            no step applies what most of them give.
        apart: the first rank gets them so many forwards later than the others (negative: earlier);
            None where they are the same ones at each forward, to the end.
        compared: where `apart` is a number, how many inputs of the first rank are on record.
        generator: the global generator that is in the same state on all ranks at these forwards,
            another one at each; empty for none.
    """

    kind: str
    ranks: tuple[int, ...]
    forwards: list[int]
    events: list[ForwardInput]
    drawn: bool
    intended: bool
    differed: int
    constant: bool
    part: int = -1
    apart: int | None = None
    compared: int = 0
    generator: str = ""

    @property
    def event(self) -> ForwardInput:
        return self.events[0]

    @property
    def rule(self) -> str:
        if self.part >= 0:
            return "equal-part-of-inputs"
        if self.apart is not None:
            return "inputs-drawn-alike"
        if self.drawn:
            return "equal-random-inputs"
        return "constant-inputs" if self.constant else "equal-inputs"

    @property
    def late(self) -> bool:
        """Whether the inputs differed at first."""
        return self.differed >= 0

    @property
    def toy(self) -> bool:
        return self.drawn or self.constant


def equal_inputs(run: Run, given: Inputs) -> Iterator[EqualInputs]:
    """Groups of ranks with equal inputs, forward by forward. Inputs that are also constant over
    time are yielded only where the model is trained on them."""
    common = [
        n
        for n in given.common()
        if all(f[n].digest and not f[n].fed for f in given.by_rank.values())
    ]
    trained = [n for n in common if all(f[n].training for f in given.by_rank.values())]
    common = trained or common  # what an evaluation feeds the model says nothing of training
    if len(common) < FEWEST:
        return
    sequences = {r: [f[n].digest for n in common] for r, f in given.by_rank.items()}
    whole = list(_equal_to_the_end(sequences, len(common)))
    for ranks, begin in whole or _equal_to_the_end(sequences, LATER):
        constant = len(set(sequences[ranks[0]][begin:])) < (FEWEST if whole else LATER)
        if constant and not (whole and trained):
            continue
        same = common[begin:]
        events = [given.by_rank[ranks[0]][n] for n in same]
        if begin and any(e.carried for e in events):
            continue  # a recurrent state is not in the digest, and may differ
        yield EqualInputs(
            given.kind,
            ranks,
            same,
            events,
            _drawn(events),
            all(_intended(run.everyone[r], frozenset(ranks), len(same)) for r in ranks)
            or _other_work(run, ranks, events),
            common[begin - 1] if begin else -1,
            constant,
        )


def equal_parts(run: Run, given: Inputs) -> Iterator[EqualInputs]:
    """The first of several inputs that is the same on all ranks at every compared forward, while
    another one differs on each: what differs was drawn from generators in states of their own, so
    that what does not is data that the ranks do not divide.

    Inputs of one number per sample (a time, a class) and those that never change may be common.
    """
    numbers = [
        n
        for n in given.common()
        if all(f[n].parts and f[n].training and not f[n].fed for f in given.by_rank.values())
    ]
    ranks = tuple(sorted(given.by_rank))
    forwards = [[given.by_rank[r][n] for r in ranks] for n in numbers]
    if len(numbers) < NO_ACCIDENT or any(len({e.digest for e in f}) < len(f) for f in forwards):
        return
    for part in range(min(len(e.parts) for f in forwards for e in f)):
        digests = [{e.parts[part] for e in f} for f in forwards]
        rich = all(e.sizes[part] >= RICH * max(1, e.rows) for f in forwards for e in f)
        if rich and all(len(d) == 1 for d in digests):
            if len(set().union(*digests)) < NO_ACCIDENT:
                continue
            events = [f[0] for f in forwards]
            intended = all(
                _intended(run.everyone[r], frozenset(ranks), len(numbers)) for r in ranks
            ) or _other_work(run, ranks[:1], events)
            yield EqualInputs(given.kind, ranks, numbers, events, False, intended, -1, False, part)
            return


def inputs_drawn_alike(run: Run, given: Inputs) -> Iterator[EqualInputs]:
    """Ranks that feed a model the same inputs at first, until something shifts what one of them
    draws; or always the same ones, but some forwards apart. Inputs that come again on a rank are
    left out, and so are forwards apart unless the generators tell that the inputs were drawn:
    ranks may go through the same batches, each from another one on."""
    seen = {rank: _once(forwards) for rank, forwards in given.by_rank.items()}
    first, *others = sorted(seen)
    shifts: dict[int, list[int]] = {}
    for rank in others:
        apart = Counter(seen[first][d] - seen[rank][d] for d in seen[first].keys() & seen[rank])
        shift, count = apart.most_common(1)[0] if apart else (0, 0)
        if count >= NO_ACCIDENT:
            shifts.setdefault(shift, []).append(rank)
    for shift, ranks in shifts.items():
        both = [
            n
            for d, n in seen[first].items()
            if all(d in seen[r] and seen[r][d] + shift == n for r in ranks)
        ]
        compared = sorted(seen[first].values())
        together = (first, *ranks)
        pairs = [
            [given.by_rank[first][n], *(given.by_rank[r][n - shift] for r in ranks)] for n in both
        ]
        generator = _drawn_from(pairs)
        known = generator or (not shift and both == compared[: len(both)])
        if len(both) < NO_ACCIDENT or not known:
            continue
        if any(_intended(run.everyone[r], frozenset(together), len(both)) for r in together):
            continue
        events = [given.by_rank[first][n] for n in both]
        if shift and _drawn(events):
            continue  # toy data, as where each step has a seed of its own: step + rank
        yield EqualInputs(
            given.kind, together, both, events, _drawn(events), False, -1, False,
            apart=shift, compared=len(compared), generator=generator,
        )  # fmt: skip


def _drawn_from(forwards: list[list[ForwardInput]]) -> str:
    """The global generator that is in the same state on all ranks, a new one at each forward."""
    for at, name in enumerate(NAMES):
        states = [
            {e.states[at] for e in f} if all(e.states for e in f) else set() for f in forwards
        ]
        if all(len(s) == 1 for s in states) and len(set().union(*states)) == len(states):
            return name
    return ""


def _once(forwards: dict[int, ForwardInput]) -> dict[int, int]:
    """The numbers of the forwards in training that no loader feeds, by the digest of their inputs;
    without inputs that come several times."""
    events = [e for e in forwards.values() if e.digest and e.training and not e.fed]
    count = Counter(e.digest for e in events if not e.carried)
    return {e.digest: e.forward for e in events if count[e.digest] == 1}


def _intended(rank: Rank, ranks: frozenset[int], times: int) -> bool:
    return received_from_peers(rank) >= times or exchange_in_own_group(rank, ranks, times)


def _other_work(run: Run, ranks: Sequence[int], events: Sequence[ForwardInput]) -> bool:
    """Whether equal inputs are no work done twice: no step applies what most of these forwards of
    the first rank give (a warm-up), or each rank computes another loss from them, although the
    model draws no random numbers, since each takes other parts or targets."""
    steps = sorted({e.step for e in events} - {-1})
    if len(steps) == 1 and any(run.everyone[r].steps > len(events) for r in ranks):
        return True
    if any(e.inside > 0 for e in events) or not any(e.inside == 0 for e in events):
        return False
    losses = [
        {
            s: v
            for e in run.everyone[r].of(LossValues)
            for s, v in zip(e.steps, e.values, strict=True)
        }
        for r in ranks
    ]
    known = [[table[s] for table in losses] for s in steps if all(s in t for t in losses)]
    apart = sum(max(row) - min(row) > SAME_LOSS * max(map(abs, row)) for row in known)
    return len(known) >= FEWEST and 2 * apart > len(known)


def _equal_to_the_end(
    sequences: dict[int, list[int]], last: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Groups of ranks whose sequences have the same last `last` items, and the position from which
    on all of their items are equal."""
    ends = Counter(tuple(s[-last:]) for s in sequences.values())
    for end in (e for e, count in ends.items() if count > 1):
        ranks = tuple(sorted(r for r, s in sequences.items() if tuple(s[-last:]) == end))
        rows = list(zip(*(sequences[r] for r in ranks), strict=True))
        yield ranks, next((n for n in range(len(rows), 0, -1) if len(set(rows[n - 1])) > 1), 0)


def _drawn(events: Sequence[ForwardInput | Averaged]) -> bool:
    """Whether about as many random numbers were drawn as the inputs hold: random toy data.

    A step may draw once for several forwards (the halves of a GAN), and part of an input may
    come from elsewhere, so some of the forwards and half of the numbers suffice.
    """
    known = [e for e in events if e.drawn >= 0 and e.numbers]
    ample = [e for e in known if e.drawn >= 0.5 * min(e.numbers, TOY_DRAWS)]
    return len(ample) >= max(1, len(known) // DRAWN_SHARE)


# --- models without a wrapper ---------------------------------------------------------------------


@dataclass(eq=False)
class EqualGradients:
    """Ranks that computed the same gradients, bit for bit, in each compared step of an optimizer.

    Attributes:
        steps: the compared steps; `event` is the record of the first.
        kind: the model's class, or words for parameters of no module.
        seen: the inputs of the model are known, and are the same on these ranks.
        drawn, constant: as in `EqualInputs`.
    """

    ranks: tuple[int, ...]
    steps: list[int]
    event: Averaged
    kind: str
    seen: bool
    drawn: bool
    constant: bool


def _kept_from_last_step(events: Sequence[Averaged]) -> bool:
    """Whether the gradients before the exchange are those that the step before applied: the program
    exchanges other tensors, and sets these afterwards (master weights)."""
    return any(b.step == a.step + 1 and b.local == a.applied for a, b in itertools.pairwise(events))


def equal_gradients(run: Run) -> Iterator[EqualGradients]:
    """Groups of ranks whose own gradients are equal before the program synchronises them manually,
    for models of which it does so with all gradients on every rank."""
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
        if any(map(_kept_from_last_step, rows.values())):
            continue
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
            kinds = (
                u.kind for u in run.everyone[ranks[0]].of(Unwrapped) if u.optimizer == optimizer
            )
            kind = next(kinds, "") or "a set of parameters"
            yield EqualGradients(ranks, common, first[0], kind, known, _drawn(first), constant)
