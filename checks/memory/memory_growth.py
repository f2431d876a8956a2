"""DDP206."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ddpdoctor.analysis.process.memory_samples import MIB, human, medians
from ddpdoctor.events import EpochEnded, LoaderSeen, MemoryHeld, MemorySample, StepDone
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_do, ranks_text

PARTS = 6
FEWEST_SAMPLES = 12
WARM_UP = 0.2
"""The first part of the run, in which pools, caches and optimizer state come to be."""

FEWEST_STEPS = 30
UNKNOWN_STEPS, UNKNOWN_GROWTH, HOST_SHARE = 500, 64 * MIB, 0.04
"""Host memory rises by itself for a while: the allocator's pools, kernels for each new shape."""

DEVICE_GROWTH, DEVICE_SHARE = 8 * MIB, 0.01
KNOWN_GROWTH = 1 * MIB
"""Enough where it is known what holds the memory."""

LEVEL = 0.2
"""Of the steepest rise: stretches at the beginning that rise less a step are before the growth."""

SLOWER = 0.6
"""What a container gains per step, at last against at most: less than this levels off."""


@dataclass(frozen=True)
class Growth:
    """Memory that grew to the end: `where` is `host` or `device`, `levels` its stretches.

    Attributes:
        first: the stretch in which the growth begins, 0 also where it may have begun before.
        begin, end: the steps in the middle of this one, and of the last.
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


class MemoryGrowth(Check):
    """Memory grows with every step

    ## What it finds
    Memory of a rank, on the host or on its device, that rises through all of the run and is still
    rising at the end, after the warm-up. Where a container that gains a tensor with each step is
    found (a list of losses that keep their graphs, say), or a sum that drags the graph of every
    loss along, it is named with the line that adds to it.

    ## How it knows
    Between two steps (between two forwards, where no steps are taken) each rank records its
    resident memory and what torch has allocated on the device: every 0.04 s at first, every 5 s at
    last. The samples after the warm-up (a fifth of the run, and the first epoch) are cut into six
    stretches, whose medians must rise one after the other, over 30 steps or more. While memory
    seems to grow, or losses and outputs stay alive, the program's containers are counted, and again
    some steps later: growth is told from 1 MB on where one is found that keeps graphs, from 8 MB on
    where one of plain tensors explains two fifths of it, and where none is found from 8 MB and 1%
    on (on the host from 64 MB, 4% and 500 steps on). Where the first stretches are about level, the
    figures are of the steps after them, else of those after the warm-up; something may have been
    kept before, in memory that was free. The finding is proven.

    ## Why it hurts
    The run ends with an out-of-memory error after hours, often on one rank first, and the others
    wait for it.

    ## How to fix it
    Keep numbers, not graphs: `losses.append(loss.item())` or `loss.detach()`; run evaluation under
    `torch.no_grad()`; clear what is collected when it has been used.

    ## When it stays quiet
    Growth that levels off, as caches do; the first steps; the first epoch of a data set, which may
    be caching its items, unless graphs are what is kept; memory that goes up and down; a rise
    of host memory in a short run that nothing the program keeps accounts for.
    """

    code = "DDP206"
    name = "memory-growth"
    family = "memory"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        if not run.any(MemorySample):
            return "memory was not sampled"
        most = max(len(r.of(MemorySample)) for r in run.ranks.values())
        return None if most >= FEWEST_SAMPLES else "the run was too short to tell growth from noise"

    def examine(self, run: Run) -> Iterable[Finding]:
        for where in ("device", "host"):
            growing = [g for r in run.ranks.values() if (g := _growth(r, where)) is not None]
            if growing:
                yield self._report(run, max(growing, key=lambda g: (g.held is not None, g.total)),
                                 growing)  # fmt: skip
                return

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "rank-memory-imbalance":
            return True
        killed = other.check in ("rank-died", "first-failure")
        return killed and "memory" in (other.summary + str(other.evidence)).lower()

    def _report(self, run: Run, worst: Growth, growing: list[Growth]) -> Finding:
        ranks = tuple(g.rank.rank for g in growing)
        who = "all ranks" if len(ranks) == run.world_size > 1 else ranks_text(ranks)
        most = f", that of rank {worst.rank.rank}" if len(ranks) > 1 else ""
        held = worst.held
        too = _keep_as_much(run, worst, ranks)
        return self.finding(
            ranks=tuple(sorted((*ranks, *too))),
            steps=worst.steps,
            subjects=(held.name,) if held and held.name else (),
            location=_spot(worst),
            label="keeps a tensor with every step" if held else "more memory after each of these",
            summary=(
                f"{worst.where} memory of {who} grows{most} by {human(worst.per_step)} a step, "
                f"{human(worst.total)} from step {worst.begin} to {worst.end}"
            ),
            cause=_cause(held) + (f"; {ranks_do(too, 'keep')} them too" if too else ""),
            fix=_fix(held),
            fix_kind=FixKind.CHECK,
            evidence={
                "where": worst.where,
                "growth per step in bytes": round(worst.per_step),
                "levels through the run": [human(v) for v in worst.levels],
                "held by": _holder(held),
                "ranks": [{"rank": g.rank.rank, "grew by": human(g.total)} for g in growing],
            },
            at=worst.at,
        )


def _keep_as_much(run: Run, worst: Growth, reported: tuple[int, ...]) -> tuple[int, ...]:
    """Other ranks where the same container keeps the graphs of as many steps: what they gain is
    hidden by what they give back."""
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
    held = _held(rank)
    samples = _after_warm_up(rank, held is not None and held.graphs)
    if len(samples) < FEWEST_SAMPLES:
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
    if done < FEWEST_STEPS or total < _least(where, held, done, levels[0]):
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
    """The stretch before which memory was about level."""
    rises = zip(pairwise(levels), pairwise(middles), strict=True)
    slopes = [(b - a) / max(1, after - before) for (a, b), (before, after) in rises]
    return next(n for n, slope in enumerate(slopes) if slope >= LEVEL * max(slopes))


def _least(where: str, held: MemoryHeld | None, steps: int, level: float) -> float:
    """Growth that is beyond doubt."""
    if held is not None:
        return KNOWN_GROWTH if held.graphs else 8 * KNOWN_GROWTH
    if where == "device":
        return max(DEVICE_GROWTH, DEVICE_SHARE * level)
    return max(UNKNOWN_GROWTH, HOST_SHARE * level) if steps >= UNKNOWN_STEPS else float("inf")


def _accounts_for(held: MemoryHeld, steps: int, total: float) -> bool:
    """Whether what a container gains is most of what the process gained."""
    return held.entry_bytes * held.grown / max(held.steps, 1) * steps >= 0.4 * total


def _held(rank: Rank) -> MemoryHeld | None:
    """What was found growing; what keeps graphs before what does not."""
    seen = [e for e in rank.of(MemoryHeld) if e.graphs or not _slows(rank, e)]
    return max(seen, key=lambda e: (e.graphs, e.grown * e.entry_bytes), default=None)


def _slows(rank: Rank, held: MemoryHeld) -> bool:
    """A container that gains less and less is a cache: what it has not seen gets rare."""
    same = [e for e in rank.of(MemoryHeld) if (e.site, e.kind) == (held.site, held.kind)]
    rates = [e.grown / max(e.steps, 1) for e in same]
    return rates[-1] < SLOWER * max(rates)


def _after_warm_up(rank: Rank, graphs: bool) -> list[MemorySample]:
    """Samples in which growth counts."""
    samples = rank.of(MemorySample)
    if not samples:
        return []
    begin = samples[0].at + WARM_UP * (samples[-1].at - samples[0].at)
    if not graphs and rank.of(LoaderSeen):
        training = [e.at for e in rank.of(EpochEnded) if e.exhausted]
        begin = max(begin, min(training, default=float("inf")))
    return [s for s in samples if s.at >= begin]


def _rises(levels: list[float], *, known: bool) -> bool:
    """Whether it goes up from stretch to stretch, and at the end as at the beginning.

    Where something is known to grow (`known`), memory that is taken in lumps will do.
    """
    rises = [b - a for a, b in pairwise(levels)]
    total = levels[-1] - levels[0]
    if len(rises) < PARTS - 1 or min(rises) < (-0.1 * total if known else 1):
        return False
    early, late = sum(rises[:2]), sum(rises[-2:])
    return late >= (0.25 if known else 0.5) * early and late > 0


def _spot(growth: Growth) -> Location | None:
    if growth.held is not None:
        found = growth.rank.location(growth.held.site)
        if found is not None:
            return found
    steps = growth.rank.of(StepDone)
    return growth.rank.location(steps[-1].site) if steps else None


def _holder(held: MemoryHeld | None) -> str:
    if held is None:
        return "not found"
    name = held.name or "a container of the program's"
    if held.kind == "graph":
        return f"{name}, a sum of {held.length} losses with their graphs"
    what = "tensors that keep their graphs" if held.graphs else "tensors"
    return f"{name}, a {held.kind} of {held.length} {what}, {held.grown} more in {held.steps} steps"


def _cause(held: MemoryHeld | None) -> str:
    if held is None:
        return "something keeps what each step makes; no growing container of tensors was found"
    if held.kind == "graph":
        return f"`{held.name}` sums up losses as tensors: the graph of each of them stays with it"
    what = "tensors, and each of them its autograd graph" if held.graphs else "tensors"
    return f"`{held.name or held.kind}` keeps {what}"


def _fix(held: MemoryHeld | None) -> str:
    if held is None:
        return "keep `loss.item()` or `loss.detach()` instead of tensors that the graph hangs on"
    if held.kind == "graph":
        return f"`{held.name} += loss.item()`, or `loss.detach()`"
    if held.graphs:
        return "append `loss.item()` or `loss.detach()`; evaluate under `torch.no_grad()`"
    return f"clear `{held.name or 'it'}` when it has been used, or keep numbers instead of tensors"
