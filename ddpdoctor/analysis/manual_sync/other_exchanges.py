"""What ranks communicate besides the gradients of a model without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...events import CallBlock, CallRun, ObjectsGathered, Signature
from ...events.operations import operation
from ...run import Rank


def calls(rank: Rank) -> int:
    """How many recorded collective calls carry data."""
    return _count(rank, lambda s, place: not operation(s.op).meets)


def objects(rank: Rank, least: float = 0) -> int:
    """How many recorded collective calls carry objects that may hold `least` numbers."""
    entries = {e.call_site: e.entries for e in rank.of(ObjectsGathered)}
    return _count(
        rank,
        lambda s, place: (
            s.op.endswith(("_object", "_object_list")) and entries.get(place, least) >= least
        ),
    )


def reported(ranks: Iterable[Rank], numbers: int) -> str:
    """What the ranks communicate, as a phrase; empty for nothing.

    Args:
        numbers: how many floating-point elements they communicate.
    """
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
