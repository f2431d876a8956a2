"""Collectives of the program's own that say something about data: gathered results, inputs that one
rank sends to others, values exchanged in groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass

from ...events import (
    CallBlock,
    CallRun,
    CallSite,
    EpochBegan,
    GatheredWhole,
    GroupReady,
    ObjectsGathered,
    ResultDropped,
    Signature,
)
from ...events.operations import OPERATIONS
from ...run import Rank, members
from .thresholds import FEW

GATHERS = {name for name, o in OPERATIONS.items() if o.gathers and not o.several}
SUMS = {name for name, o in OPERATIONS.items() if o.reduces and not o.several}
SPREADS = {name for name, o in OPERATIONS.items() if o.spreads}
MEETS = {name for name, o in OPERATIONS.items() if o.meets}
EXCHANGES = {name for name, o in OPERATIONS.items() if not o.spreads and not o.meets}
UNKNOWN = 1 << 40
"""Entries of an object that could not be counted: more than any result needs."""


@dataclass(frozen=True)
class Gathered:
    """What a rank passed to gathering collectives at one count of optimizer steps.

    Attributes:
        numbers: how many numbers at most; of objects, numbers and letters.
        site: the line of the call that gathers the largest part.
    """

    numbers: int
    site: int


def gathered(rank: Rank, evaluation: EpochBegan) -> Gathered | None:
    """What the rank gathered in an evaluation or after it, before the next optimizer step; None for
    nothing."""
    sizes = {s.id: s.numel for s in rank.of(Signature) if s.op in GATHERS}
    if not sizes:
        return None
    objects = {e.call_site: e.entries for e in rank.of(ObjectsGathered)}
    found: Counter[int] = Counter()
    for signature, place, times in _calls(rank, sizes.keys(), evaluation.step, evaluation):
        size = sizes[signature]
        found[place] += times * (objects.get(place, UNKNOWN) if size < 0 else size)
    if not found:
        return None
    most = max(found, key=lambda place: found[place])
    lines = {s.id: s.line for s in rank.of(CallSite)}
    return Gathered(found.total(), lines.get(most, -1))


@dataclass(frozen=True)
class Rows:
    """The tensors that one line gathered at one count of optimizer steps.

    Attributes:
        rows: in the first dimension of what this rank passed, in all `calls` together.
        site: the line of the call.
        by: the module of a library that the program called for it, empty for torch itself.
    """

    rows: int
    calls: int
    site: int
    by: str


def rows_used_whole(rank: Rank, evaluation: EpochBegan) -> list[Rows]:
    """What the rank gathered in an evaluation or after it, before the next optimizer step, by lines
    after which nothing selects among the rows."""
    whole = {e.call_site: e.by for e in rank.of(GatheredWhole)}
    if not whole:
        return []
    sizes = {s.id: s.shape[0] for s in rank.of(Signature) if s.op in GATHERS and s.shape}
    rows: Counter[int] = Counter()
    calls: Counter[int] = Counter()
    for signature, place, times in _calls(rank, sizes.keys(), evaluation.step, evaluation):
        if place in whole:
            rows[place] += times * sizes[signature]
            calls[place] += times
    lines = {s.id: s.line for s in rank.of(CallSite)}
    return [Rows(n, calls[p], lines.get(p, -1), whole[p]) for p, n in rows.items()]


def values_exchanged(
    rank: Rank,
    step: int,
    ops: Set[str] = EXCHANGES,
    *,
    since: EpochBegan | None = None,
    until: EpochBegan | None = None,
) -> bool:
    """Whether the program reduced or gathered values, by one of `ops`, after `step` optimizer steps
    and before the next, and not only on lines that drop the result.

    Args:
        since: only what was called after this iteration over a loader began counts.
        until: and before that one began.
    """
    made = {s.id for s in rank.of(Signature) if s.op in ops and not s.op.startswith("DDP")}
    dropped = {e.site for e in rank.of(ResultDropped) if not e.handle}
    lines = {s.id: s.line for s in rank.of(CallSite)} if dropped else {}
    return any(
        lines.get(place, -1) not in dropped
        for _, place, _ in _calls(rank, made, step, since, until)
    )


def _calls(
    rank: Rank,
    wanted: Set[int],
    step: int,
    since: EpochBegan | None,
    until: EpochBegan | None = None,
) -> Iterator[tuple[int, int, int]]:
    """Signature, call site and number of calls with one of these signatures, after `step` optimizer
    steps and before the next, in no order."""
    before, later = _called_before(since), _called_before(until)
    blocks = {b.id: b.codes for b in rank.of(CallBlock) if not wanted.isdisjoint(b.codes[::2])}
    for run in rank.of(CallRun):
        codes = blocks.get(run.block, ())
        length = len(codes) // 2
        for index, (signature, place) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
            # In its group the call has the number `run.first + length * repetition + index`.
            first = run.first + index
            passed = max(0, -((first - before.get(run.group, 0)) // length))
            end = max(0, -((first - later[run.group]) // length)) if run.group in later else None
            if signature in wanted and (times := _times(run, step, passed, end)):
                yield signature, place, times


def _called_before(began: EpochBegan | None) -> dict[int, int]:
    """By group, how many collectives the rank had called when an iteration over a loader began."""
    known = began.calls if began is not None else ()
    return dict(zip(known[::2], known[1::2], strict=True))


def _times(run: CallRun, step: int, passed: int, end: int | None) -> int:
    """How often a block of calls was made after `step` optimizer steps and before the next, of its
    repetitions from number `passed` to before `end`."""
    last = run.repeat if end is None else min(end, run.repeat)
    if run.every == 0:
        return max(0, last - passed) if step == run.step else 0
    round_, between = divmod(step - run.step, run.every)
    return int(between == 0 and passed <= round_ < last)


def sums_over_all(rank: Rank) -> bool:
    """Whether more than single numbers are summed over all ranks, again and again."""
    calls = _counted(rank, SUMS, several=True)
    return any(run.group == 0 and run.repeat > 1 for run, _ in calls)


def only_reports_beyond(rank: Rank, ranks: frozenset[int]) -> bool:
    """Whether the rank exchanges no more than a few numbers per call with ranks outside of `ranks`.
    False where it exchanges nothing with them."""
    inside = {g.group for g in rank.of(GroupReady) if ranks >= members(g)}
    much = {s.id for s in rank.of(Signature) if s.op not in MEETS and not 0 <= s.numel <= FEW}
    blocks = {b.id for b in rank.of(CallBlock) if much & set(b.codes[::2])}
    beyond = [r for r in rank.of(CallRun) if r.group not in inside]
    return bool(beyond) and not any(r.block in blocks for r in beyond)


def exchange_in_own_group(rank: Rank, ranks: frozenset[int], times: int) -> bool:
    """Whether these ranks exchange more than a few numbers at least `times` times in a group that
    holds all of them but not all ranks. They then share what they compute, so they may well compute
    it from the same inputs."""
    world = max((len(g.ranks) for g in rank.of(GroupReady)), default=0)
    theirs = {g.group for g in rank.of(GroupReady) if ranks <= {*g.ranks} and len(g.ranks) < world}
    much = {
        s.id
        for s in rank.of(Signature)
        if not 0 <= s.numel <= FEW and s.op not in MEETS and not s.op.startswith("DDP")
    }
    return times <= sum(r.repeat * n for r, n in _of(rank, much) if r.group in theirs)


def received_from_peers(rank: Rank) -> int:
    """How often the rank took part in calls that send one rank's values to others (broadcast)."""
    return sum(run.repeat * count for run, count in _counted(rank, SPREADS))


def _counted(rank: Rank, ops: Set[str], *, several: bool = False) -> list[tuple[CallRun, int]]:
    wanted = {s.id for s in rank.of(Signature) if s.op in ops and (not several or s.numel != 1)}
    return _of(rank, wanted)


def _of(rank: Rank, wanted: set[int]) -> list[tuple[CallRun, int]]:
    """The runs of calls that hold these signatures, and how many of them each repetition has."""
    blocks = {b.id: sum(c in wanted for c in b.codes[::2]) for b in rank.of(CallBlock)}
    return [(r, n) for r in rank.of(CallRun) if (n := blocks.get(r.block, 0))]
