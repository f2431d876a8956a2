"""What the program communicates itself, as far as it concerns data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from ...events import CallBlock, CallRun, CallSite, GroupReady, ObjectsGathered, Signature
from ...events.operations import OPERATIONS
from ...run import Rank

GATHERS = {name for name, o in OPERATIONS.items() if o.gathers and not o.several}
SUMS = {name for name, o in OPERATIONS.items() if o.reduces and not o.several}
HANDS_OUT = {name for name, o in OPERATIONS.items() if o.spreads}
MEETS = {name for name, o in OPERATIONS.items() if o.meets}
UNKNOWN = 1 << 40
"""Entries of an object that could not be counted."""

FEW = 8
"""Numbers in one call that report on the training, and are no samples, activations or gradients."""


@dataclass(frozen=True)
class Gathered:
    """What a rank handed over to be gathered while so many optimizer steps were taken.

    Attributes:
        numbers: at most, or numbers and letters where objects are gathered.
        site: the line of the largest part.
    """

    numbers: int
    site: int


def gathered(rank: Rank, step: int) -> Gathered | None:
    """What the rank gathered after `step` optimizer steps; None for nothing."""
    sizes = {s.id: s.numel for s in rank.of(Signature) if s.op in GATHERS}
    if not sizes:
        return None
    objects = {e.call_site: e.entries for e in rank.of(ObjectsGathered)}
    blocks = {
        b.id: b.codes for b in rank.of(CallBlock) if not sizes.keys().isdisjoint(b.codes[::2])
    }
    found: Counter[int] = Counter()
    for run in rank.of(CallRun):
        codes = blocks.get(run.block, ())
        for signature, place in zip(codes[::2], codes[1::2], strict=True):
            if signature in sizes and (times := _times(run, step)):
                size = sizes[signature]
                found[place] += times * (objects.get(place, UNKNOWN) if size < 0 else size)
    if not found:
        return None
    most = max(found, key=lambda place: found[place])
    lines = {s.id: s.line for s in rank.of(CallSite)}
    return Gathered(found.total(), lines.get(most, -1))


def _times(run: CallRun, step: int) -> int:
    """How often the block came after `step` optimizer steps."""
    if run.every == 0:
        return run.repeat if step == run.step else 0
    apart, between = divmod(step - run.step, run.every)
    return int(between == 0 and 0 <= apart < run.repeat)


def sums_over_all(rank: Rank) -> bool:
    """Whether more than single numbers are summed over all ranks, step after step."""
    calls = _counted(rank, SUMS, several=True)
    return any(run.group == 0 and run.repeat > 1 for run, _ in calls)


def only_reports_beyond(rank: Rank, ranks: frozenset[int]) -> bool:
    """Whether all that the rank is known to exchange with others than these is a few numbers."""
    inside = {g.group for g in rank.of(GroupReady) if ranks >= set(g.ranks)}
    much = {s.id for s in rank.of(Signature) if s.op not in MEETS and not 0 <= s.numel <= FEW}
    blocks = {b.id for b in rank.of(CallBlock) if much & set(b.codes[::2])}
    beyond = [r for r in rank.of(CallRun) if r.group not in inside]
    return bool(beyond) and not any(r.block in blocks for r in beyond)


def work_together(rank: Rank, ranks: frozenset[int], times: int) -> bool:
    """Whether these ranks exchange more than a few numbers so many times in a group of theirs that
    not all ranks are in: they share what they compute, and so what they compute it from."""
    world = max((len(g.ranks) for g in rank.of(GroupReady)), default=0)
    theirs = {g.group for g in rank.of(GroupReady) if ranks <= {*g.ranks} and len(g.ranks) < world}
    much = {
        s.id
        for s in rank.of(Signature)
        if not 0 <= s.numel <= FEW and s.op not in MEETS and not s.op.startswith("DDP")
    }
    return times <= sum(r.repeat * n for r, n in _of(rank, much) if r.group in theirs)


def handed_out(rank: Rank) -> int:
    """How often tensors or objects were received from another rank."""
    return sum(run.repeat * count for run, count in _counted(rank, HANDS_OUT))


def _counted(rank: Rank, ops: Set[str], *, several: bool = False) -> list[tuple[CallRun, int]]:
    wanted = {s.id for s in rank.of(Signature) if s.op in ops and (not several or s.numel != 1)}
    return _of(rank, wanted)


def _of(rank: Rank, wanted: set[int]) -> list[tuple[CallRun, int]]:
    """Where calls of these signatures were made, and how many in each round."""
    blocks = {b.id: sum(c in wanted for c in b.codes[::2]) for b in rank.of(CallBlock)}
    return [(r, n) for r in rank.of(CallRun) if (n := blocks.get(r.block, 0))]
