"""DDP205: one rank needs far more memory than the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.memory_samples import human, seen_from_outside
from ddpdoctor.analysis.process.thresholds import (
    DEVICE_MORE,
    DEVICE_RATIO,
    FEWEST_MEMORY_SAMPLES,
    HOST_MORE,
    HOST_RATIO,
)
from ddpdoctor.events import MemorySample, Wrapped
from ddpdoctor.report.declarations import seen, several_records
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, ranks_do, ranks_text


class RankMemoryImbalance(Check):
    """One rank needs far more memory than the others

    ## What it finds
    Ranks whose memory is far above that of the other ranks: on the device by its peak, on the host
    by its typical level in the second half of training. (Short peaks of host memory, as when a
    checkpoint is written, do not count.)

    ## How it knows
    Each rank samples its memory between two steps (every 0.04 s at first, later every 5 s), and the
    node's monitor samples it from outside, once a second or less often. The peak on the device, by
    torch's allocator, must be 1.25 times that of the median rank and 512 MB above it. If no device
    differs like this, host memory must be 1.5 times that of the median rank and 128 MB above it, by
    the median of the samples of the second half. The finding is proven.

    ## Why it hurts
    The fullest rank limits the batch size of all ranks, and is the first to run out of memory.

    ## How to fix it
    Look for what only that rank does: data or a teacher model kept on one rank, evaluation and
    logging of whole outputs, longer samples, a checkpoint loaded twice.

    ## When it stays quiet
    - a rank 0 that needs a little more, because it logs and saves
    - short peaks of host memory
    - ranks that train different parts of a model
    """

    code = "DDP205"
    name = "rank-memory-imbalance"
    family = "memory"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "device-memory": "the peak on the device is far above that of the other ranks",
        "host-memory": "host memory in the second half of training is far above the others'",
    }
    requires = (several_records, seen(MemorySample, otherwise="memory was not sampled"))

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
        return self.finding(
            rule=f"{where}-memory",
            ranks=ranks,
            summary=(
                f"{ranks_do(ranks, 'need')} {human(most)} of {where} memory, "
                f"{most / usual:.1f} times as much as the others ({human(usual)})"
            ),
            cause=f"something is kept or done only on {ranks_text(ranks)}",
            fix=f"look for code that runs only on {ranks_text(ranks)}, and for data kept there",
            fix_kind=FixKind.CHECK,
            evidence={
                "where": where,
                "ranks": [{"rank": r.rank, "memory": human(v)} for r, v in levels.items()],
            },
            at=rank.wall(rank.of(MemorySample)[0].at),
        )


def _device_peak(rank: Rank) -> float:
    """The peak of torch's allocator on the rank's device, bytes; 0 where it has none."""
    return float(max((s.device_peak_bytes for s in rank.of(MemorySample)), default=0))


def _host_level(run: Run, rank: Rank) -> float:
    """The median host memory of the process in the second half of its training, bytes; 0 where too
    few samples were taken."""
    samples = rank.of(MemorySample)
    if len(samples) < FEWEST_MEMORY_SAMPLES:
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
