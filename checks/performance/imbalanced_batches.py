"""DDP704: batches of different size on the ranks within a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.forward_inputs import Inputs, inputs
from ddpdoctor.analysis.process.thresholds import (
    EXCESS,
    FEWEST_FORWARDS,
    LATER_FORWARDS,
    LEADING,
    LOST_S,
    LOST_TO_SIZES,
)
from ddpdoctor.events import (
    BatchSeen,
    EpochBegan,
    ForwardInput,
    OptimizerSeen,
    StepDone,
)
from ddpdoctor.report.declarations import Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run
from ddpdoctor.run.ledger import BACKWARD, COMMUNICATION, FORWARD, WAITING, ledger_of

ONE_RANK_MORE = "one-rank-more-samples"
ONE_RANK_LONGER = "one-rank-longer-samples"
UNCOORDINATED = "uncoordinated-batches"

_BUCKETS = (
    "sort samples into buckets of similar length, and use the same bucket on all ranks in a step"
)


class ImbalancedBatches(Check):
    """Batch sizes differ between ranks within a step

    ## What it finds
    Inputs of a wrapped model whose size (tokens, pixels, samples) differs between the ranks in most
    of the examined steps, or in all of them from some step on.

    ## How it knows
    Each rank records how many elements and rows its inputs have, at the first 16 forwards of a
    model, then at every eighth and later fewer, the same on all ranks. The largest input is
    compared with the mean of the ranks. It must exceed the mean by a quarter in half of at least
    eight forwards, or in all of at least four forwards from some forward on. The finding is proven
    for these forwards.

    Where the rank with the largest input changes from step to step, the sizes alone cost nothing
    that is known. Time lost is taken as the smaller of two sums: what the ranks waited in
    collectives, and what the larger inputs can have taken longer of the time in forwards and
    backwards. Less than a tenth of the training time, less than a second, or waits that are not
    seen (NCCL): a note.

    ## Why it hurts
    Every step takes as long as its largest batch; the other ranks wait. The average over ranks also
    gives a sample of a small batch more weight than one of a large batch.

    ## How to fix it
    Use the same batch size on all ranks. Batch sequences by length or by number of tokens such that
    the batches of one step have about the same size on all ranks.

    ## When it stays quiet
    - differences of less than a quarter
    - single batches, as the last of an epoch
    - training inside `Join`

    If the loss is weighted by the batch size, so that each sample has the same weight on all ranks,
    the sizes are intended: a note.
    """

    code = "DDP704"
    name = "imbalanced-batches"
    family = "performance"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        ONE_RANK_MORE: "one rank nearly always has the largest batch",
        ONE_RANK_LONGER: "one rank nearly always has the longest samples, all have as many",
        UNCOORDINATED: "the rank with the largest batch changes from step to step",
    }
    requires = (seen(ForwardInput, otherwise="no forward of a wrapped model seen"),)
    effects = (Effect(("straggler",), when=(When.SAME_RANKS,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        if any(e.joined for r in run.ranks.values() for e in r.of(EpochBegan)):
            return
        for given in inputs(run):
            if len(given.ranks) == run.world_size:
                yield from self._judge(run, given)

    def _judge(self, run: Run, inputs_of: Inputs) -> Iterator[Finding]:
        given, model = inputs_of.by_rank, inputs_of.model
        common = [n for n in inputs_of.common() if all(f[n].numbers for f in given.values())]
        if len(common) < FEWEST_FORWARDS:
            return
        begin = 0
        excess = [_excess([f[n].numbers for f in given.values()]) for n in common]
        if statistics.median(excess) < EXCESS:
            # Few of the later forwards were recorded, so the median is that of the first ones.
            begin = next((i for i, more in enumerate(excess) if more >= EXCESS), len(common))
            common, excess = common[begin:], excess[begin:]
            if (
                len(common) < LATER_FORWARDS
                or common[-1] - common[0] < FEWEST_FORWARDS
                or min(excess) < EXCESS
            ):
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
        steady = leads >= LEADING * len(common)
        equal_rows = all(len({f[n].rows for f in given.values()}) == 1 for n in common)
        rule = UNCOORDINATED
        if steady:
            rule = ONE_RANK_LONGER if equal_rows else ONE_RANK_MORE
        bound = typical / (1 + typical)
        lost_s, lost = _lost(run, typical)
        costs = steady or (lost_s >= LOST_S and lost >= LOST_TO_SIZES)
        meant = _weighted(run, model)
        unequal = [n for n, more in zip(common, excess, strict=True) if more >= EXCESS]
        yield self.finding(
            rule=rule,
            severity=self.severity if costs and not meant else Severity.NOTE,
            ranks=(largest,) if steady else tuple(given),
            steps=_steps(rank, model, [[given[largest][n] for n in f] for f in (unequal, common)]),
            subjects=(f"inputs of {inputs_of.kind}",),
            location=rank.location(first.site),
            label="size differs between ranks",
            summary=f"the largest batch of a step is on average {typical:.0%} above the mean of "
            "the ranks"
            + (f", mostly on rank {largest}" if steady else "")
            + (", though not from the beginning" if begin else ""),
            cause=_cause(rule, largest, equal_rows),
            fix="use the same batch size on all ranks, unless the loss weights ranks by theirs on "
            f"purpose; if samples differ in size, {_BUCKETS}"
            if rule == ONE_RANK_MORE
            else _BUCKETS,
            evidence={
                "elements per input, mean": {r: round(m) for r, m in means.items()},
                "rows per input, mean": {r: round(m, 1) for r, m in rows.items()},
                "forwards compared": len(common),
                "time lost, at most": f"{min(bound, lost) if lost_s else bound:.0%}",
            },
            at=rank.wall(first.at),
        )


def _excess(sizes: list[int]) -> float:
    """By how much the largest size exceeds the mean, as a share of the mean."""
    return max(sizes) / statistics.mean(sizes) - 1


def _lost(run: Run, typical: float) -> tuple[float, float]:
    """The seconds that a rank can have lost to unequal sizes, on average, and their share of the
    training time; 0 where waiting is not seen.

    Args:
        typical: the excess of the largest input over the mean.
    """
    ledger = ledger_of(run.ranks)
    if not ledger.training_s or any(rank.waits_on_gpu for rank in run.ranks.values()):
        return 0.0, 0.0
    ranks = ledger.ranks.values()
    # Ranks that wait for each other by turns have no one that they wait for in sum.
    waited = statistics.mean(r.accounts[WAITING] + r.accounts[COMMUNICATION] for r in ranks)
    own = statistics.mean(r.accounts[FORWARD] + r.accounts[BACKWARD] - r.untimed_s for r in ranks)
    lost = min(waited, typical * own)
    return lost, lost / ledger.training_s


def _steps(rank: Rank, model: int, forwards: list[list[ForwardInput]]) -> Steps | None:
    """The steps of the first list of forwards, counted among those of the second; None where no
    step of the model's optimizer is on record."""
    own = {o.optimizer for o in rank.of(OptimizerSeen) if model in o.models}
    done = [(e.at, e.step + 1) for e in rank.of(StepDone) if e.optimizer in own]
    if not done:
        return None
    concerned, compared = (
        {max((step for at, step in done if at <= f.at), default=0) for f in some}
        for some in forwards
    )
    return Steps(min(concerned), max(concerned), len(concerned), len(compared))


def _cause(rule: str, larger: int, equal_rows: bool) -> str:
    """`larger`: the rank with most on average; `equal_rows`: batches have equally many samples."""
    if rule == ONE_RANK_LONGER:
        return f"rank {larger} gets longer samples in nearly all steps, but equally many"
    if rule == ONE_RANK_MORE:
        return f"rank {larger} gets more samples, or larger ones, in nearly all steps"
    return "each rank batches its samples independently, so sizes differ within a step" + (
        ": equally many samples on all ranks, but of different length" * equal_rows
    )


def _weighted(run: Run, model: int) -> bool:
    """Whether the loss gives each sample the same weight in spite of unequal batches, as a sum
    does, or a mean times the batch size."""
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
