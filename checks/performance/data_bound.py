"""DDP702: steps wait for the DataLoader."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.data.loader_check import no_loader
from ddpdoctor.analysis.process.thresholds import (
    FEWEST_EPOCHS,
    FEWEST_STEPS_TIMED,
    LOADING_SHARE,
    LOST_S,
    MANY_WORKERS,
    NOTICEABLE_S,
    WARM_UP_STEPS,
)
from ddpdoctor.events import EpochEnded, LoaderSeen, StepDone, TimeLedger
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, counted, ranks_do, ranks_text
from ddpdoctor.run.ledger import LOADING, Line, RankTime, ledger_of

NO_WORKERS = "no-workers"
FEW_WORKERS = "too-few-workers"
NO_CORES = "no-spare-cores"
EPOCH_STARTS = "slow-epoch-starts"


class DataBound(Check):
    """Steps wait for data

    ## What it finds
    Training in which most steps spend much of their time waiting for the next batch of the
    DataLoader, or much of the run passes before the first batches of its epochs.

    ## How it knows
    Each rank measures the time of every step, and how much of it is spent in the `next` of its
    loaders. The first three steps are left out; at least eight must follow. With workers, as many
    steps as there are workers (at most four) are taken together, since workers deliver in turn.
    Four of five must wait at least 10 ms and two fifths of the median step. The finding is proven.

    Waits in some steps only show in sums: of the time from the end of the start-up to the end of
    the run, two fifths must have passed in stretches of 50 ms and more in the loader, about one or
    two in each of at least three epochs, of which the first is left out.

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
    - waits on a GPU's host while the GPU still works on the step before
    - single slow batches, as at the beginning of an epoch, that take less than two fifths of the
      run
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
        EPOCH_STARTS: "the time is lost where epochs begin, as workers are started anew",
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
            yield from self._epoch_starts(run)
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

    def _epoch_starts(self, run: Run) -> Iterable[Finding]:
        """Loaders that take long before the first batches of each epoch."""
        ledger = ledger_of(run.ranks)
        slow = {n: s for n in ledger.ranks if (s := _slow_start(run.ranks[n], ledger.ranks[n]))}
        if not slow:
            return
        number = max(slow, key=lambda n: slow[n].lost_s)
        worst, rank, whole_s = slow[number], run.ranks[number], ledger.ranks[number].training_s
        loader = worst.loader
        each = worst.lost_s / worst.epochs
        anew = loader.workers > 0 and not loader.persistent
        yield self.finding(
            rule=EPOCH_STARTS,
            ranks=tuple(slow),
            steps=Steps(max(worst.line.first, 0), max(worst.line.last, 0), worst.line.stretches),
            subjects=(loader.dataset,),
            location=_line(rank, loader),
            label=f"{each:.1f} s before the first batches of each epoch",
            summary=f"{ranks_do(slow, 'wait')} for data at the beginning of each epoch: "
            f"{worst.lost_s:.1f} of {whole_s:.1f} s ({worst.lost_s / whole_s:.0%})"
            + (f" on rank {number}, which waits longest" if len(slow) > 1 else ""),
            cause=f"{counted(loader.workers, 'worker')} of each rank "
            f"{'starts' if loader.workers == 1 else 'start'} anew in each epoch"
            if anew
            else "each iteration over the loader begins with a long wait: the data set or the "
            "sampler does in each epoch what could be done once",
            fix="keep the workers from one epoch to the next: `DataLoader(..., "
            f"num_workers={loader.workers}, persistent_workers=True)`"
            if anew
            else "do the work at the beginning of `__iter__` once, in `__init__`",
            evidence={
                "seconds before the first batches, by rank": {
                    r: round(s.lost_s, 1) for r, s in slow.items()
                },
                "epochs after the first": worst.epochs,
                "workers": loader.workers,
            },
            at=rank.wall(rank.of(TimeLedger)[0].at),
        )


@dataclass(frozen=True)
class _SlowStart:
    """A loader that takes long before the first batches of each epoch.

    Attributes:
        epochs: those after the first; in these, `lost_s` were spent waiting.
    """

    loader: LoaderSeen
    line: Line
    epochs: int
    lost_s: float


def _slow_start(rank: Rank, time: RankTime) -> _SlowStart | None:
    loader = _training_loader(rank)
    if loader is None:
        return None
    ended = sum(e.loader == loader.loader and e.backwards > 0 for e in rank.of(EpochEnded))
    for line in time.lines:
        if line.account != LOADING or line.site != loader.loop_site or ended < FEWEST_EPOCHS:
            continue
        lost_s = line.long_s * (ended - 1) / ended
        enough = lost_s >= max(LOST_S, LOADING_SHARE * time.training_s)
        if enough and ended <= line.stretches <= 2 * ended:
            return _SlowStart(loader, line, ended - 1, lost_s)
    return None


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
    waits = [sum(e.data_s - e.overlapped_s for e in t) / sum(e.count for e in t) for t in turns]
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
