"""DDP104."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ddpdoctor.events import LoaderSeen, RankSample, StepDone, ThreadsSeen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Location, Rank, Run

FAR_OVER = 2.0
"""Threads per core beyond which they mostly wait for each other."""

CROWDED = 1.5
FEWEST_SAMPLES = 3


class CpuOversubscribed(Check):
    """Far more threads than cores

    ## What it finds
    Ranks on one machine whose threads (those torch computes with, and DataLoader workers) are more
    than twice the cores they may run on.

    ## How it knows
    After its third optimizer step, and then every five seconds at most, a rank records how many
    threads torch computes with; once a second (less often in a long run) the node's monitor
    measures how many threads of the ranks and their workers run or wait for a core. Cores are
    counted by affinity and by the CPU quota of the control group, which is what a container really
    has. A number of compute threads that somebody chose (`OMP_NUM_THREADS`,
    `torch.set_num_threads`) counts as it is; torch's own choice counts only where 1.5 threads per
    core wanted to run at once, and workers only where more than two did, by the median of three
    samples or more of each rank. The finding is proven.

    ## Why it hurts
    The threads of one parallel loop wait for each other, and each of them waits for a core: steps
    take several times as long as with fewer threads, and every rank waits for the slowest.

    ## How to fix it
    Cores divided by ranks: `OMP_NUM_THREADS=<that>` in the environment, or
    `torch.set_num_threads(...)` before the first step; fewer DataLoader workers, or fewer ranks.

    ## When it stays quiet
    torchrun's `OMP_NUM_THREADS=1`; ranks that each have cores of their own; the compute threads of
    ranks that train on GPUs (their workers count); threads that exist but are idle, where nobody
    asked for them.
    """

    code = "DDP104"
    name = "cpu-oversubscribed"
    family = "launch"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(ThreadsSeen) else "no rank trained long enough to count its threads"

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
        each = event.compute <= share  # the number of threads is as it should be
        return self.finding(
            ranks=tuple(seen),
            location=_spot(rank, event, too_many),
            label=f"too many {'workers' if not too_many else 'ranks' if each else 'threads'}",
            summary=(
                f"{len(ranks)} ranks with {compute} threads to compute with and "
                f"{sum(workers.values())} workers share {cores:g} cores on {node}"
            ),
            cause="threads of one rank wait for cores that the threads of another rank hold"
            if not each
            else f"ranks{' and their workers' * any(workers.values())} wait for cores that others "
            f"hold, though no rank computes with more than its share, {share}",
            fix=_fewer(sum(workers.values()), len(ranks) > cores)
            if each
            else _fix(rank, event, share, too_many),
            fix_kind=FixKind.CHECK if each and len(ranks) > cores else FixKind.SAFE,
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
                "threads that wanted to run at once": wanted,
            },
            at=rank.wall(event.at),
        )


def _samples(run: Run, rank: Rank) -> list[RankSample]:
    """What the monitor saw of a rank while it trained."""
    steps = rank.of(StepDone)
    pid = rank.started.pid if rank.started else 0
    return [
        s
        for n in run.nodes.values()
        for s in n.of(RankSample)
        if s.pid == pid and steps and steps[0].at < s.at <= steps[-1].at
    ]


def _runnable(run: Run, ranks: list[Rank]) -> float | None:
    """Threads of all these ranks that ran or waited for a core at once, while they trained."""
    total = 0.0
    for rank in ranks:
        known = [s.runnable for s in _samples(run, rank) if s.runnable is not None]
        if len(known) < FEWEST_SAMPLES:
            return None
        total += statistics.median(known)
    return round(total, 1)


def _workers(run: Run, rank: Rank) -> int:
    seen = [s.children for s in _samples(run, rank)]
    reported = max((e.workers for e in rank.of(LoaderSeen)), default=0)
    return min(reported, max(seen)) if seen else reported


def _spot(rank: Rank, event: ThreadsSeen, compute: bool) -> Location | None:
    loaders = [e for e in rank.of(LoaderSeen) if e.workers]
    if not compute and loaders:
        return rank.location(loaders[0].site)
    return rank.location(event.site)


def _fewer(workers: int, ranks: bool) -> str:
    """Of what there may be less, where the number of threads is as it should be."""
    many = ["fewer `num_workers`"] * bool(workers) + ["fewer ranks on this machine"] * ranks
    return ", or ".join(many)


def _fix(rank: Rank, event: ThreadsSeen, share: int, compute: bool) -> str:
    spot = rank.location(event.site) if compute and event.set_there else None
    if spot is None:
        return (
            f"OMP_NUM_THREADS={share} in the environment, or "
            f"`torch.set_num_threads({share})` before the first step"
            + ("" if compute else "; fewer `num_workers`")
        )
    given = rank.started.environment.get("OMP_NUM_THREADS", "") if rank.started else ""
    enough = given.isdecimal() and 0 < int(given) <= share
    return f"`torch.set_num_threads({share})` at {spot}, which overrides OMP_NUM_THREADS" + (
        f", or leave it out: OMP_NUM_THREADS is {given} already" if enough else ""
    )
