"""DDP206: memory grows from step to step until the run ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ddpdoctor.analysis.process.memory_samples import human, medians
from ddpdoctor.analysis.process.thresholds import (
    DEVICE_GROWTH,
    DEVICE_SHARE,
    FEWEST_GROWTH_SAMPLES,
    FEWEST_GROWTH_STEPS,
    HOST_SHARE,
    KNOWN_GROWTH,
    LEVEL,
    MANY_ROWS,
    PARTS,
    SLOWER,
    UNKNOWN_GROWTH,
    UNKNOWN_STEPS,
    WARM_UP_SHARE,
)
from ddpdoctor.analysis.process.worker_memory import Copies, worker_copies
from ddpdoctor.events import EpochEnded, LoaderSeen, MemoryHeld, MemorySample, StepDone
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_do, whom

GRAPHS = "graphs-kept"
SUM = "losses-summed"
CONTAINER = "tensors-kept"
UNKNOWN = "holder-unknown"
COPIES = "workers-copy"


@dataclass(frozen=True)
class Growth:
    """Memory of a rank that grows until the end of the run.

    Attributes:
        where: `host` or `device`.
        levels: the median of each stretch of samples, in bytes.
        first: the index of the stretch in which the growth begins; 0 also if it began earlier.
        begin, end: the steps in the middle of that stretch and of the last one.
        held: the growing container that was found to hold the memory, if any.
        at: when the first of these samples was taken, seconds on the run's clock.
    """

    rank: Rank
    where: str
    levels: list[float]
    first: int
    begin: int
    end: int
    steps: Steps
    held: MemoryHeld | None
    at: float

    @property
    def total(self) -> float:
        return self.levels[-1] - self.levels[self.first]

    @property
    def per_step(self) -> float:
        return self.total / (self.end - self.begin)

    @property
    def rule(self) -> str:
        """Which rule of the check explains the growth: by what holds the memory."""
        if self.held is None:
            return UNKNOWN
        if self.held.kind == "graph":
            return SUM
        return GRAPHS if self.held.graphs else CONTAINER


class MemoryGrowth(Check):
    """Memory grows with every step

    ## What it finds
    Host or device memory of a rank that rises throughout the run, after the warm-up, and still
    rises at the end. If a container is found that gains a tensor with each step (a list of losses
    with their autograd graphs, say), or a sum that keeps the graph of every loss, the finding names
    it and the line that adds to it. And workers of a DataLoader that copy the rank's memory while
    they read a dataset of Python objects.

    ## How it knows
    Between two steps (two forwards, where no steps are taken) each rank records its resident memory
    and the memory that torch has allocated on the device: every 0.04 s at first, later every 5 s.
    The samples after the warm-up (a fifth of the run, and the first epoch) are divided into six
    stretches. Their medians must rise one after the other, over at least 30 steps. While memory
    seems to grow, or losses and outputs stay alive, the entries of the program's containers are
    counted twice, some steps apart. The growth must reach

    - 1 MB if a container that keeps graphs is found
    - 8 MB if a container of plain tensors explains at least two fifths of it
    - 8 MB and 1% on the device if no container is found; on the host 64 MB, 4% and 500 steps

    Of workers the doctor's monitor reads, in at most 1% of its time, how much memory they share
    with no other process. Forked workers share everything with their rank at first; each page that
    they write becomes a copy, and reading a Python object writes its reference count. At least two
    workers of a rank must copy 128 MB each, while their resident memory does not grow by as much.

    The figures leave out stretches at the beginning that are about level. The finding is proven.

    ## Why it hurts
    The run ends with an out-of-memory error after hours, often on one rank first, for which the
    others then wait.

    ## How to fix it
    Keep numbers, not graphs: `losses.append(loss.item())` or `loss.detach()`. Evaluate under
    `torch.no_grad()`. Clear containers when they have been used. Keep what workers read in a few
    tensors, numpy arrays, Arrow tables or files mapped into memory: these have one reference count
    each, not one per row.

    ## When it stays quiet
    - growth that levels off, as caches do
    - the first steps, and the first epoch of a dataset that may cache its items (unless graphs are
      kept)
    - memory that goes up and down
    - a rise of host memory in a short run, if no container of the program explains it
    - a loader with a single worker: its pages may be private because the rank wrote to its own
    """

    code = "DDP206"
    name = "memory-growth"
    family = "memory"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        GRAPHS: "a container keeps tensors with their autograd graphs",
        SUM: "a sum of losses keeps the autograd graph of each of them",
        CONTAINER: "a container keeps tensors without graphs",
        UNKNOWN: "memory grows, and no container that explains it was found",
        COPIES: "loader workers copy the pages that they shared with their rank",
    }
    effects = (
        Effect(("rank-memory-imbalance",)),
        Effect(("rank-died",), rules=("out-of-memory", "unknown-end")),
        # The kernel kills with SIGKILL where memory runs out.
        Effect(("rank-died",), rules=("killed-outside",), when=(When.about("SIGKILL"),)),
        Effect(("first-failure",), errors=(ErrorKind.OUT_OF_MEMORY,)),
    )

    def unobserved(self, run: Run) -> str | None:
        if worker_copies(run):
            return None
        if not run.any(MemorySample):
            return "memory was not sampled"
        most = max(len(r.of(MemorySample)) for r in run.ranks.values())
        short = most < FEWEST_GROWTH_SAMPLES
        return "the run was too short to tell growth from noise" if short else None

    def examine(self, run: Run) -> Iterable[Finding]:
        for where in ("device", "host"):
            growing = [g for r in run.ranks.values() if (g := _growth(r, where)) is not None]
            if growing:
                yield self._report(run, max(growing, key=lambda g: (g.held is not None, g.total)),
                                 growing)  # fmt: skip
                break
        if copies := worker_copies(run):
            yield self._workers(run, copies)

    def _workers(self, run: Run, copies: list[Copies]) -> Finding:
        """The finding about workers that copy; `copies` of all ranks on which they do."""
        most = copies[0]
        ranks = tuple(sorted(c.rank.rank for c in copies))
        rows, dataset = most.rows, most.loader.dataset
        named = rows is not None and rows.length >= MANY_ROWS
        what = f"`{rows.name}` of {dataset}, {rows.length:,} entries" if rows and named else dataset
        return self.finding(
            rule=COPIES,
            ranks=ranks,
            subjects=(dataset,),
            location=most.rank.location(most.loader.site),
            label="its workers copy what they read",
            summary=(
                f"{most.workers} workers of a DataLoader on {whom(ranks, run.world_size)} copy the "
                f"memory they share: each grows from {human(most.before)} to {human(most.after)} "
                f"in {most.seconds:.0f} s, {human(most.copied)} together"
            ),
            cause=(
                f"the workers read Python objects ({what}); each read writes the object's reference"
                " count, and a forked worker copies the page that it writes to"
            ),
            fix=(
                "hold the rows in tensors, numpy arrays, an Arrow table or a file mapped into "
                "memory instead of lists, dicts and strings; fewer workers copy less"
            ),
            fix_kind=FixKind.CHECK,
            evidence={
                "dataset": dataset,
                "largest list": f"{rows.name}, {rows.length} entries" if rows else "not known",
                "private memory of a worker": [human(most.before), human(most.after)],
                "ranks": [
                    {"rank": c.rank.rank, "workers": c.workers, "copied": human(c.copied)}
                    for c in copies
                ],
            },
            at=most.rank.wall(most.loader.at),
        )

    def _report(self, run: Run, worst: Growth, growing: list[Growth]) -> Finding:
        ranks = tuple(g.rank.rank for g in growing)
        most = f" (rank {worst.rank.rank})" if len(ranks) > 1 else ""
        held = worst.held
        too = _keep_as_much(run, worst, ranks)
        return self.finding(
            rule=worst.rule,
            ranks=tuple(sorted((*ranks, *too))),
            steps=worst.steps,
            subjects=(held.name,) if held and held.name else (),
            location=_line(worst),
            label="keeps a tensor in every step"
            if held
            else "memory grows with each of these steps",
            summary=(
                f"{worst.where} memory of {whom(ranks, run.world_size)} grows by "
                f"{human(worst.per_step)} per step{most}, {human(worst.total)} from step "
                f"{worst.begin} to {worst.end}"
            ),
            cause=_cause(worst.rule, held)
            + (f"; {ranks_do(too, 'keep')} as many, without visible growth" if too else ""),
            fix=_fix(worst.rule, held),
            fix_kind=FixKind.CHECK,
            evidence={
                "where": worst.where,
                "growth per step in bytes": round(worst.per_step),
                "measured from step": worst.begin,
                "measured to step": worst.end,
                "memory through the run": [human(v) for v in worst.levels],
                "held by": _holder(held),
                "ranks": [{"rank": g.rank.rank, "growth": human(g.total)} for g in growing],
            },
            at=worst.at,
        )


def _keep_as_much(run: Run, worst: Growth, reported: tuple[int, ...]) -> tuple[int, ...]:
    """Other ranks on which the same container keeps as many graphs per step, although their memory
    does not visibly grow: they free other memory at the same time."""
    known = worst.held
    if known is None or not known.graphs:
        return ()
    others = {n: _held(r) for n, r in run.ranks.items() if n not in reported}
    wanted = (True, known.name, known.kind)
    return tuple(
        n
        for n, e in others.items()
        if e is not None
        and (e.graphs, e.name, e.kind) == wanted
        and e.grown * known.steps == known.grown * e.steps
    )


def _growth(rank: Rank, where: str) -> Growth | None:
    """The growth of a rank's memory on the `host` or its `device`; None where it does not grow, or
    too little to be sure."""
    held = _held(rank)
    samples = _after_warm_up(rank, held is not None and held.graphs)
    if len(samples) < FEWEST_GROWTH_SAMPLES:
        return None
    values = [float(s.device_bytes if where == "device" else s.rss_bytes) for s in samples]
    levels = medians(values, PARTS)
    if not _rises(levels, known=held is not None and held.graphs):
        return None
    total = levels[-1] - levels[0]
    # Evaluation takes no steps: there the forwards count.
    for counts in ([s.step for s in samples], [s.forwards for s in samples]):
        middles = list(map(round, medians(counts, PARTS)))
        if middles[-1] > middles[0]:
            break
    else:
        return None
    done = counts[-1] - counts[0]
    first = _first_that_grows(levels, middles)
    begun, last = middles[first] if first else counts[0], counts[-1] - 1
    if held is not None and not held.graphs and not _accounts_for(held, done, total):
        held = None
    if done < FEWEST_GROWTH_STEPS or total < _least(where, held, done, levels[0]):
        return None
    return Growth(
        rank=rank,
        where=where,
        levels=levels,
        first=first,
        begin=middles[first],
        end=middles[-1],
        # A sample counts the steps before it. What is kept before may lie where memory was free.
        steps=Steps(begun, last, last + 1 - begun, last + 1 - begun),
        held=held,
        at=rank.wall(samples[0].at),
    )


def _first_that_grows(levels: list[float], middles: list[int]) -> int:
    """The index of the stretch in which growth begins: memory is about level before.

    Args:
        levels: the median memory of each stretch, bytes.
        middles: the median step of each stretch.
    """
    rises = zip(pairwise(levels), pairwise(middles), strict=True)
    slopes = [(b - a) / max(1, after - before) for (a, b), (before, after) in rises]
    return next(n for n, slope in enumerate(slopes) if slope >= LEVEL * max(slopes))


def _least(where: str, held: MemoryHeld | None, steps: int, level: float) -> float:
    """The growth in bytes that is beyond doubt. `level`: the memory at the beginning, in bytes."""
    if held is not None:
        return KNOWN_GROWTH if held.graphs else 8 * KNOWN_GROWTH
    if where == "device":
        return max(DEVICE_GROWTH, DEVICE_SHARE * level)
    return max(UNKNOWN_GROWTH, HOST_SHARE * level) if steps >= UNKNOWN_STEPS else float("inf")


def _accounts_for(held: MemoryHeld, steps: int, total: float) -> bool:
    """Whether a container gains at least two fifths of what the process gained (`total` bytes)."""
    return held.entry_bytes * held.grown / max(held.steps, 1) * steps >= 0.4 * total


def _held(rank: Rank) -> MemoryHeld | None:
    """The growing container that was found in a rank: of several one that keeps graphs, else that
    which gained most bytes; None where there is none."""
    seen = [e for e in rank.of(MemoryHeld) if e.graphs or not _slows(rank, e)]
    return max(seen, key=lambda e: (e.graphs, e.grown * e.entry_bytes), default=None)


def _slows(rank: Rank, held: MemoryHeld) -> bool:
    """Whether a container gains less and less, as a cache does."""
    same = [e for e in rank.of(MemoryHeld) if (e.site, e.kind) == (held.site, held.kind)]
    rates = [e.grown / max(e.steps, 1) for e in same]
    return rates[-1] < SLOWER * max(rates)


def _after_warm_up(rank: Rank, graphs: bool) -> list[MemorySample]:
    """The samples after the warm-up. The first epoch belongs to the warm-up, as a dataset may cache
    its items, unless the rank keeps `graphs`."""
    samples = rank.of(MemorySample)
    if not samples:
        return []
    begin = samples[0].at + WARM_UP_SHARE * (samples[-1].at - samples[0].at)
    if not graphs and rank.of(LoaderSeen):
        training = [e.at for e in rank.of(EpochEnded) if e.exhausted]
        begin = max(begin, min(training, default=float("inf")))
    return [s for s in samples if s.at >= begin]


def _rises(levels: list[float], *, known: bool) -> bool:
    """Whether memory rises from stretch to stretch, at the end about as much as at the beginning.

    If a container is known to grow (`known`), the rise may be uneven: memory comes in blocks.
    """
    rises = [b - a for a, b in pairwise(levels)]
    total = levels[-1] - levels[0]
    if len(rises) < PARTS - 1 or min(rises) < (-0.1 * total if known else 1):
        return False
    early, late = sum(rises[:2]), sum(rises[-2:])
    return late >= (0.25 if known else 0.5) * early and late > 0


def _line(growth: Growth) -> Location | None:
    """The line that adds to the container; else that of the optimizer's step."""
    if growth.held is not None:
        found = growth.rank.location(growth.held.site)
        if found is not None:
            return found
    steps = growth.rank.of(StepDone)
    return growth.rank.location(steps[-1].site) if steps else None


def _holder(held: MemoryHeld | None) -> str:
    if held is None:
        return "not found"
    name = held.name or "a container of the program"
    if held.kind == "graph":
        return f"{name}, a sum of {held.length} losses with their autograd graphs"
    what = "tensors with their autograd graphs" if held.graphs else "tensors"
    return f"{name}, a {held.kind} of {held.length} {what}, {held.grown} more in {held.steps} steps"


def _cause(rule: str, held: MemoryHeld | None) -> str:
    if held is None:
        return "something keeps memory of each step; no growing container of tensors was found"
    name = f"`{held.name}`" if held.name else f"a {held.kind}"
    if rule == SUM:
        return f"{name} sums losses as tensors and so keeps the autograd graph of each of them"
    what = "tensors, each with its autograd graph" if rule == GRAPHS else "tensors"
    return f"{name} keeps {what}"


def _fix(rule: str, held: MemoryHeld | None) -> str:
    if held is None:
        return "keep `loss.item()` or `loss.detach()` instead of tensors with autograd graphs"
    if rule == SUM:
        return f"add numbers to `{held.name}`: `loss.item()` or `loss.detach()` instead of the loss"
    if rule == GRAPHS:
        return "append `loss.item()` or `loss.detach()`; evaluate under `torch.no_grad()`"
    name = f"`{held.name}`" if held.name else f"the {held.kind}"
    return f"clear {name} when it has been used, or keep numbers instead of tensors"
