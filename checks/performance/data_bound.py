"""DDP702: steps wait for the DataLoader."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.loader_check import no_loader
from ddpdoctor.analysis.process.thresholds import (
    FEWEST_STEPS_TIMED,
    LOADING_SHARE,
    MANY_WORKERS,
    NOTICEABLE_S,
    WARM_UP_STEPS,
)
from ddpdoctor.events import EpochEnded, LoaderSeen, StepDone
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, counted, ranks_text

NO_WORKERS = "no-workers"
FEW_WORKERS = "too-few-workers"
NO_CORES = "no-spare-cores"


class DataBound(Check):
    """Steps wait for data

    ## What it finds
    Training in which most steps spend much of their time waiting for the next batch of the
    DataLoader.

    ## How it knows
    Each rank measures the time of every step, and how much of it is spent in the `next` of its
    loaders. The first three steps are left out; at least eight must follow. With workers, as many
    steps as there are workers (at most four) are taken together, since workers deliver in turn.
    Four of five must wait at least 10 ms and two fifths of the median step. The finding is proven.

    ## Why it hurts
    The devices are idle while data is loaded. With several ranks the slowest loader sets the pace
    for all.

    ## How to fix it
    Load in the background: `DataLoader(..., num_workers=4, persistent_workers=True)`. With workers
    already, use more of them, as many as there are cores for, or a larger `prefetch_factor`. Decode
    and transform less per sample, or once beforehand.

    ## When it stays quiet
    - warm-up, and waits of a few milliseconds
    - waits in evaluation
    - single slow batches, as at the beginning of an epoch
    - workers that keep up in much of the run and are slowed down in the rest, as by other programs
      on the same cores
    """

    code = "DDP702"
    name = "data-bound"
    family = "performance"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        NO_WORKERS: "batches are loaded in the training process, and there are cores for workers",
        FEW_WORKERS: "workers are too slow, and there are cores for more",
        NO_CORES: "loading is too slow, and there are no cores for more workers",
    }
    effects = (Effect(("straggler",), rules=("slow-loading",), when=(When.FEWER_RANKS,)),)

    def unobserved(self, run: Run) -> str | None:
        if reason := no_loader(run):
            return reason
        fewest = WARM_UP_STEPS + FEWEST_STEPS_TIMED
        if not any(len(_steps(r)) >= FEWEST_STEPS_TIMED for r in run.ranks.values()):
            return f"fewer than {fewest} steps"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        waiting = {r.rank: w for r in run.ranks.values() if (w := _wait(r)) is not None}
        if not waiting:
            return
        rank = run.ranks[max(waiting, key=lambda r: waiting[r][0])]
        wait, step = waiting[rank.rank]
        loader = _training_loader(rank)
        steps = _steps(rank)
        workers = loader.workers if loader else 0
        share, spare = _cores(run, rank, workers)
        rule = NO_CORES if workers >= spare else FEW_WORKERS if workers else NO_WORKERS
        yield self.finding(
            rule=rule,
            ranks=tuple(waiting),
            steps=Steps.of(e.step for e in steps),
            subjects=(loader.dataset,) if loader else (),
            location=_line(rank, loader),
            label=f"num_workers={workers}",
            summary=f"steps on {ranks_text(waiting)} wait for data: {wait * 1e3:.0f} of "
            f"{step * 1e3:.0f} ms ({wait / step:.0%})"
            + (f" on rank {rank.rank}, which waits longest" if len(waiting) > 1 else ""),
            cause="every batch is loaded in the training process, while nothing else runs"
            if not workers
            else f"{counted(workers, 'worker')} cannot load batches as fast as the steps use them",
            fix=_fix(rule, rank, workers, share, spare),
            evidence={
                "typical wait and median step, ms": {
                    r: [round(a * 1e3, 1), round(b * 1e3, 1)] for r, (a, b) in waiting.items()
                },
                "steps": len(steps),
                "workers": workers,
            },
            at=rank.wall(steps[0].at),
        )


def _cores(run: Run, rank: Rank, workers: int) -> tuple[float, int]:
    """The cores of a rank's node per rank, and for how many workers of each rank these suffice: one
    core is for the rank itself. Where cores are not known, there is room for more workers."""
    cores = run.cores(rank.node)
    share = cores / sum(r.node == rank.node for r in run.ranks.values())
    return share, max(int(share) - 1, 0) if cores else workers + MANY_WORKERS


def _fix(rule: str, rank: Rank, workers: int, share: float, spare: int) -> str:
    if rule == NO_WORKERS:
        wanted = min(spare, MANY_WORKERS)
        return f"`DataLoader(..., num_workers={wanted}, persistent_workers=True)`"
    if rule == FEW_WORKERS:
        return (
            f"use more than {counted(workers, 'worker')}, a larger `prefetch_factor`, or less work "
            "per sample"
        )
    cores = f"{share:g} core{'' if share == 1 else 's'}"
    more = f"more than {workers} workers" if workers else "`num_workers=1`"
    return (
        "reduce the work per sample: decode, tokenise or transform once beforehand and store the "
        f"result. A rank and its workers have {cores} on {rank.node}, so {more} would only hide "
        "waits for a disk, a network or a GPU"
    )


def _steps(rank: Rank) -> list[StepDone]:
    """A rank's steps after the warm-up."""
    return rank.of(StepDone)[WARM_UP_STEPS:]


def _wait(rank: Rank) -> tuple[float, float] | None:
    """The typical wait and the median step in seconds; None where the wait is not much of the step.

    The wait is the first quintile: four of five steps wait at least that long. On a machine that is
    merely busy, some batches are late, but others are ready at once. Workers deliver in turn, one
    long wait and then short ones, so waits are averaged over as many steps as there are workers.
    """
    steps = _steps(rank)
    if len(steps) < FEWEST_STEPS_TIMED:
        return None
    loader = _training_loader(rank)
    length = min(max(1, loader.workers if loader else 0), FEWEST_STEPS_TIMED // 2)
    turns = [steps[n : n + length] for n in range(0, len(steps) - length + 1, length)]
    waits = [sum(e.data_s for e in t) / sum(e.count for e in t) for t in turns]
    wait = statistics.quantiles(waits, n=5, method="inclusive")[0]
    pace = statistics.median(sum(e.wall_s for e in t) / sum(e.count for e in t) for t in turns)
    return (wait, pace) if wait >= NOTICEABLE_S and wait >= LOADING_SHARE * pace else None


def _training_loader(rank: Rank) -> LoaderSeen | None:
    """The loader of the training loop: that with most batches in an epoch with backwards; any where
    no epoch has ended."""
    trained = [e for e in rank.of(EpochEnded) if e.backwards]
    seen = {e.loader: e for e in rank.of(LoaderSeen)}
    if not trained:
        return next(iter(seen.values()), None)
    return seen.get(max(trained, key=lambda e: e.batches).loader)


def _line(rank: Rank, loader: LoaderSeen | None) -> Location | None:
    """The line that creates the loader, else the loop over it."""
    if loader is None:
        return None
    return rank.location(loader.site) or rank.location(loader.loop_site)
