"""DDP702."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ddpdoctor.events import EpochEnded, LoaderSeen, ProbeTrouble, StepDone
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_text

WARM_UP = 3
FEWEST = 8
SHARE = 0.4
MANY_WORKERS = 4
NOTICEABLE_S = 0.010
"""Below this much per step waiting is not worth a change, whatever its share."""


class DataBound(Check):
    """Steps wait for data

    ## What it finds
    Training in which a step spends much of its time in the loader's `next`, waiting for a batch:
    in four of five steps, the first ones left out.

    ## How it knows
    Each rank measures how long every step takes, and how much of that it waits in its loaders'
    `next`. The first three steps are left out, eight or more must follow; with workers, as many
    steps as there are of these (four at most) are taken together, since they deliver in turn. Four
    of five must wait 10 ms and two fifths of the median step. The finding is proven.

    ## Why it hurts
    The devices stand idle while data is read. With several ranks the slowest loader sets the pace
    of all.

    ## How to fix it
    Load in the background: `DataLoader(..., num_workers=4, persistent_workers=True)`, more workers
    or a larger `prefetch_factor` where there are some, as many as there are cores for; decode and
    transform less per sample, or once, beforehand.

    ## When it stays quiet
    Warm-up; waits of a few milliseconds; waits in evaluation; single slow batches, as at the
    beginning of an epoch; workers that keep up in much of the run and are held up in the rest, as
    by other programs on the same cores.
    """

    code = "DDP702"
    name = "data-bound"
    family = "performance"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        if not run.any(LoaderSeen):
            failed = run.any(ProbeTrouble)
            return "no DataLoader was seen" if failed else "no DataLoader was iterated"
        fewest = WARM_UP + FEWEST
        if not any(len(_steps(r)) >= FEWEST for r in run.ranks.values()):
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
        yield self.finding(
            ranks=tuple(waiting),
            steps=Steps.of(e.step for e in steps),
            subjects=(loader.dataset,) if loader else (),
            location=_spot(rank, loader),
            label=f"num_workers={workers}",
            summary=f"steps wait for data: {wait * 1e3:.0f} of {step * 1e3:.0f} ms on rank "
            f"{rank.rank} ({wait / step:.0%}; {ranks_text(waiting)})",
            cause="every batch is loaded in the training process itself, while nothing else runs"
            if not workers
            else f"{workers} workers do not load as fast as the steps consume",
            fix=_fix(run, rank, workers),
            evidence={
                "usual wait and median step, ms": {
                    r: [round(a * 1e3, 1), round(b * 1e3, 1)] for r, (a, b) in waiting.items()
                },
                "steps": len(steps),
                "workers": workers,
            },
            at=rank.wall(steps[0].at),
        )

    def explains(self, mine: Finding, other: Finding) -> bool:
        loading = other.check == "straggler" and other.evidence.get("phase") == "loading"
        return loading and set(other.ranks) < set(mine.ranks)


def _fix(run: Run, rank: Rank, workers: int) -> str:
    """Workers on cores that nobody else needs; one of a rank's own is for the rank itself."""
    cores = run.cores(rank.node)
    share = cores / sum(r.node == rank.node for r in run.ranks.values())
    spare = int(share) - 1 if cores else workers + MANY_WORKERS
    if not workers and spare > 0:
        wanted = min(spare, MANY_WORKERS)
        return f"`DataLoader(..., num_workers={wanted}, persistent_workers=True)`"
    if workers < spare:
        return f"more than {workers} workers, a larger `prefetch_factor`, or less work per sample"
    return (
        "less work per sample: decode, tokenise or transform once, beforehand, and store that; "
        f"each rank has {share:g} core{'' if share == 1 else 's'} on {rank.node} for itself and "
        + (f"its workers, so more than {workers}" if workers else "a worker, so `num_workers=1`")
        + " would hide only its waiting for a disk, a network or a GPU"
    )


def _steps(rank: Rank) -> list[StepDone]:
    return rank.of(StepDone)[WARM_UP:]


def _wait(rank: Rank) -> tuple[float, float] | None:
    """Usual wait and usual step in seconds, where waiting is much of it.

    Four fifths of the run wait at least that long: on a machine that is merely busy, some batches
    are late, but others are there at once. Workers deliver in turn, one long wait and then as many
    short ones, so the wait is that of as many steps as there are workers.
    """
    steps = _steps(rank)
    if len(steps) < FEWEST:
        return None
    loader = _training_loader(rank)
    length = min(max(1, loader.workers if loader else 0), FEWEST // 2)
    turns = [steps[n : n + length] for n in range(0, len(steps) - length + 1, length)]
    waits = [sum(e.data_s for e in t) / sum(e.count for e in t) for t in turns]
    wait = statistics.quantiles(waits, n=5, method="inclusive")[0]
    pace = statistics.median(sum(e.wall_s for e in t) / sum(e.count for e in t) for t in turns)
    return (wait, pace) if wait >= NOTICEABLE_S and wait >= SHARE * pace else None


def _training_loader(rank: Rank) -> LoaderSeen | None:
    trained = [e for e in rank.of(EpochEnded) if e.backwards]
    seen = {e.loader: e for e in rank.of(LoaderSeen)}
    if not trained:
        return next(iter(seen.values()), None)
    return seen.get(max(trained, key=lambda e: e.batches).loader)


def _spot(rank: Rank, loader: LoaderSeen | None) -> Location | None:
    if loader is None:
        return None
    return rank.location(loader.site) or rank.location(loader.loop_site)
