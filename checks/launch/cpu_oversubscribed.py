"""DDP104: more compute threads, DataLoader workers or ranks than CPU cores."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.memory_samples import seen_from_outside
from ddpdoctor.analysis.process.thresholds import CROWDED, FAR_OVER, FEWEST_THREAD_SAMPLES
from ddpdoctor.events import LoaderSeen, RankSample, StepDone, ThreadsSeen
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Location, Rank, Run, counted

TOO_MANY_THREADS = "too-many-threads"
TOO_MANY_WORKERS = "too-many-workers"
TOO_MANY_RANKS = "too-many-ranks"

_LABELS = {
    TOO_MANY_THREADS: "too many threads",
    TOO_MANY_WORKERS: "too many workers",
    TOO_MANY_RANKS: "too many ranks",
}


class CpuOversubscribed(Check):
    """Far more threads than CPU cores

    ## What it finds
    Ranks on one machine with more than two threads per available core. torch's compute threads and
    DataLoader workers count.

    ## How it knows
    Each rank records how many threads torch computes with, after its third optimizer step and then
    at most every five seconds. The node's monitor samples, once a second or less often, how many
    threads of the ranks and their workers run or wait for a core. Cores are counted by CPU
    affinity and by the CPU quota of the control group, so a container's limit counts.

    A number of threads that was set (`OMP_NUM_THREADS`, `torch.set_num_threads`) is taken as it is.
    torch's default counts only if 1.5 threads per core were runnable at once, and workers only if
    more than two were (median of at least three samples of each rank). The finding is proven.

    ## Why it hurts
    The threads of a parallel loop wait for each other, and each of them waits for a core. Steps
    take several times as long as with fewer threads, and all ranks wait for the slowest.

    ## How to fix it
    Divide the cores by the ranks: set `OMP_NUM_THREADS` to that in the environment, or call
    `torch.set_num_threads(...)` before the first step. Use fewer DataLoader workers or fewer ranks.

    ## When it stays quiet
    - torchrun's default, `OMP_NUM_THREADS=1`
    - ranks that are pinned to separate cores
    - compute threads of ranks that train on GPUs (their workers do count)
    - idle threads of torch's default pool
    """

    code = "DDP104"
    name = "cpu-oversubscribed"
    family = "launch"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        TOO_MANY_THREADS: "torch computes with more threads than a rank's share of the cores",
        TOO_MANY_WORKERS: "DataLoader workers need more cores than there are",
        TOO_MANY_RANKS: "there are more ranks than cores, each with no more threads than its share",
    }
    requires = (seen(ThreadsSeen, otherwise="no rank trained long enough to count its threads"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        by_node: dict[str, list[Rank]] = {}
        for rank in run.ranks.values():
            if rank.of(ThreadsSeen):
                by_node.setdefault(rank.node, []).append(rank)
        for node, ranks in by_node.items():
            finding = self._judge(run, node, ranks)
            if finding is not None:
                yield finding

    def _judge(self, run: Run, node: str, ranks: list[Rank]) -> Finding | None:
        seen = {r.rank: max(r.of(ThreadsSeen), key=lambda e: e.compute) for r in ranks}
        on_cpu = {n: e for n, e in seen.items() if e.device == "cpu"}
        cores = run.cores(node)
        if not cores:
            return None
        compute = sum(e.compute for e in on_cpu.values())
        workers = {r.rank: _workers(run, r) for r in ranks}
        wanted = _runnable(run, ranks)
        asked = any(e.asked and e.compute > 1 for e in on_cpu.values())
        too_many = compute > FAR_OVER * cores and (
            asked or (wanted is not None and wanted >= CROWDED * cores)
        )
        crowded = wanted is not None and wanted > FAR_OVER * cores + 1
        if not too_many and not (crowded and compute + sum(workers.values()) > FAR_OVER * cores):
            return None
        rank = max(ranks, key=lambda r: seen[r.rank].compute)
        event = seen[rank.rank]
        share = max(1, int(cores) // len(ranks))
        within_share = event.compute <= share  # reducing compute threads would not help
        rule = TOO_MANY_WORKERS
        if too_many:
            rule = TOO_MANY_RANKS if within_share else TOO_MANY_THREADS
        return self.finding(
            rule=rule,
            ranks=tuple(seen),
            location=_line_to_change(rank, event, too_many),
            label=_LABELS[rule],
            summary=(
                f"{counted(len(ranks), 'rank')} with {counted(compute, 'compute thread')} and "
                f"{counted(sum(workers.values()), 'DataLoader worker')} in total share {cores:g} "
                f"CPU core{'' if cores == 1 else 's'} on {node}"
            ),
            cause="threads of different ranks compete for the same cores"
            if not within_share
            else f"ranks{' and their workers' * any(workers.values())} compete for the same cores, "
            f"although no rank uses more compute threads than its share ({share})",
            fix=_fewer_processes(sum(workers.values()), len(ranks) > cores)
            if within_share
            else _fewer_threads(rank, event, share, too_many),
            fix_kind=FixKind.CHECK if within_share and len(ranks) > cores else FixKind.SAFE,
            evidence={
                "ranks": [
                    {
                        "rank": n,
                        "compute threads": e.compute,
                        "threads alive": e.alive,
                        "workers": workers[n],
                    }
                    for n, e in seen.items()
                ],
                "cores allowed": cores,
                "runnable threads at once": wanted,
            },
            at=rank.wall(event.at),
        )


def _samples(run: Run, rank: Rank) -> list[RankSample]:
    """The monitor's samples of a rank's process between its first and its last step."""
    steps, every = rank.of(StepDone), seen_from_outside(run, rank)
    return [s for s in every if steps and steps[0].at < s.at <= steps[-1].at]


def _runnable(run: Run, ranks: list[Rank]) -> float | None:
    """Threads of all these ranks that ran or waited for a core at once: the sum of the medians of
    their samples; None if a rank has too few."""
    total = 0.0
    for rank in ranks:
        known = [s.runnable for s in _samples(run, rank) if s.runnable is not None]
        if len(known) < FEWEST_THREAD_SAMPLES:
            return None
        total += statistics.median(known)
    return round(total, 1)


def _workers(run: Run, rank: Rank) -> int:
    """DataLoader workers of a rank: those its loader asked for, at most the child processes that
    the monitor saw."""
    seen = [s.children for s in _samples(run, rank)]
    reported = max((e.workers for e in rank.of(LoaderSeen)), default=0)
    return min(reported, max(seen)) if seen else reported


def _line_to_change(rank: Rank, event: ThreadsSeen, compute: bool) -> Location | None:
    """The line that sets the number of threads, or, if these are not what is too many (`compute`),
    that makes the loader."""
    loaders = [e for e in rank.of(LoaderSeen) if e.workers]
    if not compute and loaders:
        return rank.location(loaders[0].site)
    return rank.location(event.site)


def _fewer_processes(workers: int, ranks: bool) -> str:
    """What to reduce where the number of compute threads is right already."""
    many = ["reduce `num_workers`"] * bool(workers) + ["start fewer ranks on this machine"] * ranks
    return ", or ".join(many)


def _fewer_threads(rank: Rank, event: ThreadsSeen, share: int, compute: bool) -> str:
    """How to give each rank `share` compute threads; `compute`: these alone are too many."""
    spot = rank.location(event.site) if compute and event.set_there else None
    if spot is None:
        return (
            f"set `OMP_NUM_THREADS={share}` in the environment, or call "
            f"`torch.set_num_threads({share})` before the first step"
            + ("" if compute else "; reduce `num_workers`")
        )
    given = rank.started.environment.get("OMP_NUM_THREADS", "") if rank.started else ""
    enough = given.isdecimal() and 0 < int(given) <= share
    return f"call `torch.set_num_threads({share})` at {spot}; this overrides OMP_NUM_THREADS" + (
        f". Or remove the call: OMP_NUM_THREADS is {given} already" if enough else ""
    )
