"""Workers of a DataLoader that copy the memory which they shared with their rank at their start."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import ChildMemory, LoaderSeen, Payload
from ...run import Rank, Run
from .memory_samples import seen_from_outside
from .thresholds import COPIED, FEWEST_COPIES, FEWEST_WORKER_SAMPLES


@dataclass(frozen=True)
class Copies:
    """What the workers of a rank have copied.

    Attributes:
        loader: the loader with workers that was iterated first.
        before, after: private bytes of the worker that copied most, first and last.
        seconds: between these two.
        copied: bytes that all workers copied together; `workers` are how many.
        rows: the largest list that its dataset is known to hold, if any.
    """

    rank: Rank
    loader: LoaderSeen
    before: int
    after: int
    seconds: float
    copied: int
    workers: int
    rows: Payload | None


def worker_copies(run: Run) -> list[Copies]:
    """The ranks whose workers copy memory, most first.

    Forked workers share all pages of their rank until someone writes. Pages that a worker writes
    become private without any growth of its resident memory, which is what is asked for here.
    """
    found = [c for rank in run.ranks.values() if (c := _copies(run, rank)) is not None]
    return sorted(found, key=lambda c: -c.copied)


def _copies(run: Run, rank: Rank) -> Copies | None:
    loader = next((e for e in rank.of(LoaderSeen) if e.workers), None)
    if loader is None:
        return None
    seen: dict[int, list[tuple[float, ChildMemory]]] = {}
    for sample in seen_from_outside(run, rank):
        for child in sample.forked:
            seen.setdefault(child.pid, []).append((sample.at, child))
    copying = {pid: series for pid, series in seen.items() if _copied(series) >= COPIED}
    # Workers of several epochs follow each other: together count those that were there at once.
    together = _largest_group(copying)
    if len(together) < FEWEST_COPIES:
        return None
    series = max(together, key=_copied)
    (begin, first), (end, last) = series[0], series[-1]
    lists = [p for p in loader.payloads if p.kind in ("text", "other") and p.length > 0]
    return Copies(
        rank=rank,
        loader=loader,
        before=first.private_bytes,
        after=last.private_bytes,
        seconds=end - begin,
        copied=sum(map(_copied, together)),
        workers=len(together),
        rows=max(lists, key=lambda p: p.length, default=None),
    )


def _copied(series: list[tuple[float, ChildMemory]]) -> int:
    """By how many bytes a worker's private memory has grown beyond its resident memory, 0 where
    less than half of the growth is of pages that were shared before."""
    if len(series) < FEWEST_WORKER_SAMPLES:
        return 0
    first, last = series[0][1], series[-1][1]
    grown = last.private_bytes - first.private_bytes
    copied = grown - max(0, last.rss_bytes - first.rss_bytes)
    return copied if 2 * copied >= grown else 0


def _largest_group(
    series: dict[int, list[tuple[float, ChildMemory]]],
) -> list[list[tuple[float, ChildMemory]]]:
    """Of the workers, those that were alive at one moment and copied most together."""
    groups = (
        [s for s in series.values() if s[0][0] <= other[-1][0] <= s[-1][0]]
        for other in series.values()
    )
    return max(groups, key=lambda group: sum(map(_copied, group)), default=[])
