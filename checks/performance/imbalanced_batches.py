"""DDP704."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ddpdoctor.events import (
    BatchSeen,
    EpochBegan,
    ForwardInput,
    GroupReady,
    OptimizerSeen,
    StepDone,
    Wrapped,
)
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run

FEWEST, LATER = 8, 4
"""Forwards to compare: of the whole run, or from one of them to the last."""
EXCESS = 0.25
"""By how much the largest batch of a step exceeds the average one, before it is told."""
STEADY = 0.9
"""Share of the steps in which the same rank has the largest batch, before it is told alone."""

BUCKETS = "sort samples into buckets of like length, the same bucket on all ranks in a step"


class ImbalancedBatches(Check):
    """Ranks work on batches of different size within a step

    ## What it finds
    Inputs of a wrapped model whose size (tokens, pixels, samples) differs between the ranks within
    most of the steps that were looked at, or within all of them from one step on.

    ## How it knows
    At the first 16 forwards of a model, then at every eighth and ever fewer, the same on every
    rank, each rank records how many numbers and rows its inputs hold. The largest is compared with
    the mean over the ranks: it must exceed that by a quarter in half of the forwards compared,
    eight at least, or in all of them from one on, four at least. The finding is proven for these.

    ## Why it hurts
    Every step lasts as long as its largest batch; the ranks with less wait. The average over ranks
    also gives each sample of a small batch more weight than one of a large batch.

    ## How to fix it
    Give all ranks the same batch size; batch sequences by length, or by a number of tokens, in
    such a way that the batches of one step are alike on all ranks.

    ## When it stays quiet
    Equal batches; differences of less than a quarter; single batches, as the last of an epoch;
    training inside `Join`. Where the loss is weighted so that each sample counts alike on all
    ranks, the sizes are meant, and it is a note.
    """

    code = "DDP704"
    name = "imbalanced-batches"
    family = "performance"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(ForwardInput) else "no forward of a wrapped model seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        if any(e.joined for r in run.ranks.values() for e in r.of(EpochBegan)):
            return
        for model, sizes in _by_model(run).items():
            yield from self._judge(run, model, sizes)

    def _judge(
        self, run: Run, model: int, given: dict[int, dict[int, ForwardInput]]
    ) -> Iterator[Finding]:
        common = sorted(set.intersection(*(set(f) for f in given.values())))
        common = [n for n in common if all(f[n].numbers for f in given.values())]
        if len(given) < 2 or len(common) < FEWEST:
            return
        begin = 0
        excess = [_excess([f[n].numbers for f in given.values()]) for n in common]
        if statistics.median(excess) < EXCESS:
            # All of the first forwards were looked at, and few of the later ones.
            begin = next((i for i, more in enumerate(excess) if more >= EXCESS), len(common))
            common, excess = common[begin:], excess[begin:]
            if len(common) < LATER or common[-1] - common[0] < FEWEST or min(excess) < EXCESS:
                return
        means = {r: statistics.mean(f[n].numbers for n in common) for r, f in given.items()}
        rows = {r: statistics.mean(f[n].rows for n in common) for r, f in given.items()}
        largest = max(means, key=lambda r: means[r])
        typical = statistics.mean(excess)
        rank = run.ranks[largest]
        first = given[largest][common[0]]
        leads = sum(
            all(f[n].numbers < given[largest][n].numbers for r, f in given.items() if r != largest)
            for n in common
        )
        steady = leads >= STEADY * len(common)
        alike = all(len({f[n].rows for f in given.values()}) == 1 for n in common)
        meant = _weighted(run, model)
        unequal = [n for n, more in zip(common, excess, strict=True) if more >= EXCESS]
        yield self.finding(
            severity=Severity.NOTE if meant else self.severity,
            ranks=(largest,) if steady else tuple(given),
            steps=_steps(rank, model, [[given[largest][n] for n in f] for f in (unequal, common)]),
            subjects=(f"inputs of {next(w.kind for w in rank.of(Wrapped) if w.model == model)}",),
            location=rank.location(first.site),
            label="not equally large on all ranks",
            summary=f"the largest batch of a step is on average {typical:.0%} larger than the "
            "mean over ranks"
            + (f", mostly on rank {largest}" if steady else "")
            + (", though not from the beginning" if begin else ""),
            cause=_cause(largest if steady else None, alike),
            fix=f"the same batch size on all ranks; where samples differ in size: {BUCKETS}"
            if steady and not alike
            else BUCKETS,
            evidence={
                "numbers per input, mean": {r: round(m) for r, m in means.items()},
                "rows per input, mean": {r: round(m, 1) for r, m in rows.items()},
                "forwards compared": len(common),
                "time lost, at most": f"{typical / (1 + typical):.0%}",
            },
            at=rank.wall(first.at),
        )

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check == "straggler" and other.ranks == mine.ranks


def _excess(sizes: list[int]) -> float:
    """By how much the largest exceeds the mean, as a share of that."""
    return max(sizes) / statistics.mean(sizes) - 1


def _steps(rank: Rank, model: int, forwards: list[list[ForwardInput]]) -> Steps | None:
    """The steps of the first of these forwards, among those of the second that were compared."""
    own = {o.optimizer for o in rank.of(OptimizerSeen) if model in o.models}
    done = [(e.at, e.step + 1) for e in rank.of(StepDone) if e.optimizer in own]
    if not done:
        return None
    concerned, compared = (
        {max((step for at, step in done if at <= f.at), default=0) for f in some}
        for some in forwards
    )
    return Steps(min(concerned), max(concerned), len(concerned), len(compared))


def _cause(larger: int | None, alike: bool) -> str:
    """`larger`: the rank that nearly always has the most; `alike`: all have as many rows."""
    if larger is None:
        return "each rank batches its samples by itself, so that sizes differ within a step" + (
            ": as many rows on all ranks, of other lengths" * alike
        )
    if alike:
        return f"rank {larger} gets the longer samples in nearly all steps, and as many of them"
    return f"rank {larger} gets more samples, or larger ones, in nearly all steps"


def _weighted(run: Run, model: int) -> bool:
    """Whether the loss makes up for batches of unequal size: a sum, or a mean times the size."""
    tables = [
        {e.forward: e for e in r.of(BatchSeen) if e.model == model} for r in run.ranks.values()
    ]
    moments = set.intersection(*(set(t) for t in tables))
    unequal = 0
    for moment in moments:
        batches = [t[moment] for t in tables]
        known = [e for e in batches if e.size and e.reduction]
        shares = [e.weight / (e.size if e.reduction == "mean" else 1) for e in known]
        if len(shares) < len(batches) or max(shares) - min(shares) > 0.01 * abs(max(shares)):
            return False
        unequal += len({e.size for e in batches}) > 1
    return unequal > 0


def _by_model(run: Run) -> dict[int, dict[int, dict[int, ForwardInput]]]:
    """Model to rank to number of the forward, for models that all ranks share."""
    found: dict[int, dict[int, dict[int, ForwardInput]]] = defaultdict(dict)
    for rank in run.ranks.values():
        whole = {g.group for g in rank.of(GroupReady) if len(g.ranks) == run.world_size}
        shared = {w.model for w in rank.of(Wrapped) if w.group in whole}
        for event in rank.of(ForwardInput):
            if event.model in shared:
                found[event.model].setdefault(rank.rank, {})[event.forward] = event
    return found
