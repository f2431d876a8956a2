"""Memory of ranks over time: robust figures from noisy samples."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from ...events import RankSample
from ...run import Rank, Run
from .thresholds import MIB


def human(size: float) -> str:
    """A size in bytes as `12 MB` or `1.5 GB`, in units of 1024."""
    for unit, factor in (("GB", 1 << 30), ("MB", MIB), ("KB", 1 << 10)):
        if abs(size) >= factor:
            number = size / factor
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{size:.0f} B"


def medians(values: Sequence[float], parts: int) -> list[float]:
    """The median of each of `parts` stretches of equal length."""
    edges = [len(values) * n // parts for n in range(parts + 1)]
    return [statistics.median(values[a:b]) for a, b in pairwise(edges) if b > a]


def seen_from_outside(run: Run, rank: Rank) -> list[RankSample]:
    """The samples that the node's monitor took of a rank's process."""
    return _by_process(run).get((rank.rank, rank.pid), [])


@lru_cache(maxsize=1)
def _by_process(run: Run) -> dict[tuple[int, int], list[RankSample]]:
    found: dict[tuple[int, int], list[RankSample]] = defaultdict(list)
    for sample in (s for node in run.nodes.values() for s in node.of(RankSample)):
        found[sample.rank, sample.pid].append(sample)
    return found
