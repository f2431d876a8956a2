"""What ranks exchange beside a model that they do not wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...events import CallBlock, CallRun, ObjectsGathered, Signature
from ...events.operations import operation
from ...run import Rank


def calls(rank: Rank) -> int:
    """How many calls that carry something are on record."""
    return _count(rank, lambda s, place: not operation(s.op).meets)


def objects(rank: Rank, least: float = 0) -> int:
    """How many exchanges of objects that may hold so many numbers."""
    entries = {e.call_site: e.entries for e in rank.of(ObjectsGathered)}
    return _count(
        rank,
        lambda s, place: (
            s.op.endswith(("_object", "_object_list")) and entries.get(place, least) >= least
        ),
    )


def reported(ranks: Iterable[Rank], numbers: int) -> str:
    """In words; `numbers` is how many floating-point numbers are among it. Empty for nothing."""
    ranks = list(ranks)
    if numbers:
        return f"the {numbers} numbers"
    if any(objects(rank) for rank in ranks):
        return "the objects"
    return "the numbers" if any(calls(rank) for rank in ranks) else ""


def _count(rank: Rank, wanted: Callable[[Signature, int], bool]) -> int:
    signatures = {s.id: s for s in rank.of(Signature)}
    blocks = {
        b.id: sum(
            s in signatures and wanted(signatures[s], place)
            for s, place in zip(b.codes[::2], b.codes[1::2], strict=True)
        )
        for b in rank.of(CallBlock)
    }
    return sum(run.repeat * blocks.get(run.block, 0) for run in rank.of(CallRun))
