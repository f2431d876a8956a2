"""DDP205."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from ddpdoctor.analysis.process.memory_samples import MIB, human, seen_from_outside
from ddpdoctor.events import MemorySample, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, ranks_do, ranks_text

HOST_RATIO, HOST_MORE = 1.5, 128 * MIB
DEVICE_RATIO, DEVICE_MORE = 1.25, 512 * MIB
FEWEST_SAMPLES = 5


class RankMemoryImbalance(Check):
    """One rank needs far more memory than its peers

    ## What it finds
    Ranks whose memory is far over that of the other ranks: on the device by its peak, on the host
    by the level at which the process stands through the later half of its training (what it needs
    for a moment, to write a checkpoint say, does not count).

    ## How it knows
    Each rank samples its memory between two steps (every 0.04 s at first, every 5 s at last), and
    the node's monitor does so from outside, once a second or less often. A rank is told whose peak,
    as torch's allocator counts it, is 1.25 times that of the median rank and 512 MB above it; or,
    where no device differs, whose host memory is 1.5 times and 128 MB above, by the median of the
    later half's samples. The finding is proven.

    ## Why it hurts
    The fullest rank limits the batch of all, and is the one that runs out of memory first.

    ## How to fix it
    Look at what only that rank does: data or a teacher model kept on one rank, evaluation and
    logging of whole outputs, longer samples, a checkpoint loaded twice.

    ## When it stays quiet
    A rank 0 that is a little higher, as it logs and saves; short peaks of host memory; ranks that
    train different parts of a model.
    """

    code = "DDP205"
    name = "rank-memory-imbalance"
    family = "memory"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        if len(run.ranks) < 2:
            return "a single rank left a record"
        return None if run.any(MemorySample) else "memory was not sampled"

    def examine(self, run: Run) -> Iterable[Finding]:
        device = {r: p for r in run.ranks.values() if (p := _device_peak(r))}
        found = self._judge(run, device, "device", DEVICE_RATIO, DEVICE_MORE)
        if found is None:
            host = {r: v for r in run.ranks.values() if (v := _host_level(run, r))}
            found = self._judge(run, host, "host", HOST_RATIO, HOST_MORE)
        if found is not None:
            yield found

    def _judge(
        self, run: Run, levels: Mapping[Rank, float], where: str, ratio: float, more: float
    ) -> Finding | None:
        if len(levels) < 2 or _parts_differ(levels):
            return None
        usual = statistics.median_low(levels.values())
        high = {r: v for r, v in levels.items() if v >= ratio * usual and v - usual >= more}
        if not high:
            return None
        rank, most = max(high.items(), key=lambda item: item[1])
        ranks = tuple(r.rank for r in high)
        named, holds = ranks_text(ranks), ranks_do(ranks, "hold")
        return self.finding(
            ranks=ranks,
            summary=(
                f"{ranks_do(ranks, 'need')} {human(most)} of {where} memory, "
                f"{most / usual:.1f} times as much as the others ({human(usual)})"
            ),
            cause=f"something is kept or done on {named} alone",
            fix=f"look for what runs on {named} only, and for data that {holds} alone",
            fix_kind=FixKind.CHECK,
            evidence={
                "where": where,
                "ranks": [{"rank": r.rank, "memory": human(v)} for r, v in levels.items()],
            },
            at=rank.wall(rank.of(MemorySample)[0].at),
        )


def _device_peak(rank: Rank) -> float:
    return float(max((s.device_peak_bytes for s in rank.of(MemorySample)), default=0))


def _host_level(run: Run, rank: Rank) -> float:
    """What the process held through the later half of its training."""
    samples = rank.of(MemorySample)
    if len(samples) < FEWEST_SAMPLES:
        return 0.0
    begin = (samples[0].at + samples[-1].at) / 2
    values = [s.rss_bytes for s in samples if s.at >= begin]
    values += [s.rss_bytes for s in seen_from_outside(run, rank) if begin <= s.at <= samples[-1].at]
    return float(statistics.median(values))


def _parts_differ(levels: Mapping[Rank, float]) -> bool:
    """Whether the ranks hold different models by design (pipeline or expert parts)."""
    sizes = {
        tuple(t.shape for w in r.of(Wrapped) for t in w.parameters) for r in levels if r.of(Wrapped)
    }
    return len(sizes) > 1
