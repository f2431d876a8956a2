"""DDP703: gradient synchronisation takes much of each step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.process.thresholds import (
    MANY_BUCKETS,
    SMALL_BUCKET,
    SMALLEST_SYNC,
    SYNC_NOTICEABLE_S,
    SYNC_SHARE,
)
from ddpdoctor.events import Pace, StepDone, SyncPattern, SyncTimes, Wrapped
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, counted

MIB = 1 << 20
EVERY_BACKWARD = "every-backward-synchronised"
ACCUMULATING = "already-accumulating"
ONE_BACKWARD = "one-backward-per-step"


class CommunicationBound(Check):
    """Gradient synchronisation takes much of each step

    ## What it finds
    DDP models whose gradient all-reduce takes much of each optimizer step without overlapping with
    the backward. All batches that a step accumulates count.

    ## How it knows
    DDP itself times its first ten iterations and then one in a hundred; its averages are read after
    the twelfth step, then at most every 20 s. The exposed time (communication that does not overlap
    with computation) is that of the rank with the shortest, so that waiting for a slow rank does
    not count. It is reduced by as much as the median step is shorter than the timed ones.

    The exposed time must be 20 ms and a quarter of the median step. It must still be so without the
    time in which the ranks of a node, added up, had no CPU core: ranks that take turns on a core
    wait for each other. The finding is proven.

    ## Why it hurts
    The devices are idle in this part of every step, and it grows with the number of ranks.

    ## How to fix it
    Synchronise less often (gradient accumulation with `no_sync()`), less data
    (`fp16_compress_hook`), or earlier (`bucket_cap_mb`, `gradient_as_bucket_view=True`,
    `static_graph=True`). A larger batch per rank makes the rest of the step longer. The note gives
    sizes and times.

    ## When it stays quiet
    - synchronisation that overlaps with the backward, or takes a few milliseconds
    - ranks that only wait for a slower one, or for each other's turn on a core
    - less than a megabyte of gradients
    """

    code = "DDP703"
    name = "communication-bound"
    family = "performance"
    severity = Severity.NOTE
    rules: ClassVar[Mapping[str, str]] = {
        EVERY_BACKWARD: "several backwards of a step are synchronised, where the last would do",
        ACCUMULATING: "gradients are accumulated without synchronisation already",
        ONE_BACKWARD: "each step has one backward, which is synchronised",
    }
    requires = (seen(SyncTimes, otherwise="no DDP model trained for more than ten steps"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        numbers = sorted({e.model for r in run.ranks.values() for e in r.of(SyncTimes)})
        for model in numbers:
            seen = {r: e for r in run.ranks.values() if (e := _latest(r, model)) is not None}
            if len(seen) < 2:
                continue
            rank, times = min(seen.items(), key=lambda item: _exposed(item[1]))
            if 0 < sum(times.bucket_bytes) < SMALLEST_SYNC:
                continue
            step = _step(rank, times)
            least = max(SYNC_NOTICEABLE_S, SYNC_SHARE * step.wall_s)
            if step.exposed_s - _without_a_core(run, seen) >= least:
                yield self._report(seen, rank, times, step)

    def _report(
        self, seen: dict[Rank, SyncTimes], rank: Rank, times: SyncTimes, step: _Step
    ) -> Finding:
        wrapped = next((w for w in rank.of(Wrapped) if w.model == times.model), None)
        name = (rank.names_of(wrapped)[0] if wrapped else "") or "ddp"
        size = sum(times.bucket_bytes)
        return self.finding(
            rule=step.rule,
            ranks=tuple(r.rank for r in seen),
            subjects=(wrapped.kind,) if wrapped else (),
            location=rank.location(wrapped.site) if wrapped else None,
            label=f"waits {step.exposed_s * 1e3:.0f} ms for gradients in each step",
            summary=(
                f"each step spends {step.exposed_s * 1e3:.0f} of its {step.wall_s * 1e3:.0f} ms "
                f"({step.exposed_s / step.wall_s:.0%}) waiting for gradient all-reduce that the "
                "backward does not hide"
            ),
            cause=(
                f"the all-reduce of {size / MIB:.3g} MB of gradients in "
                f"{counted(len(times.bucket_bytes), 'bucket')} takes "
                f"{times.communication_s * 1e3:.0f} ms"
                + (f", {step.averaging} times a step" if step.averaging > 1 else " in all")
            ),
            fix=_fix(times, step, name),
            fix_kind=FixKind.CHECK,
            evidence={
                "backwards per step": step.backwards,
                "synchronised backwards per step": step.averaging,
                "each synchronised backward": [
                    {
                        "rank": r.rank,
                        "forward ms": round(e.forward_s * 1e3, 1),
                        "backward ms": round(e.backward_s * 1e3, 1),
                        "communication ms": round(e.communication_s * 1e3, 1),
                        "overlap ms": round(e.overlap_s * 1e3, 1),
                    }
                    for r, e in seen.items()
                ],
                "buckets": [f"{b / MIB:.1f} MB" for b in times.bucket_bytes[:12]],
            },
            at=rank.wall(times.at),
        )


@dataclass(frozen=True)
class _Step:
    """A typical step of the optimizer.

    Attributes:
        wall_s: its duration.
        backwards: how many backwards it has.
        averaging: how many of these all-reduce gradients.
        exposed_s: in all of these, the communication that does not overlap with computation.
    """

    wall_s: float
    backwards: int
    averaging: int
    exposed_s: float

    @property
    def rule(self) -> str:
        if self.averaging > 1:
            return EVERY_BACKWARD
        return ACCUMULATING if self.backwards > 1 else ONE_BACKWARD


def _step(rank: Rank, times: SyncTimes) -> _Step:
    """The typical step of the optimizer of a model."""
    patterns = [e for e in rank.of(SyncPattern) if e.model == times.model]
    optimizer = patterns[0].optimizer if patterns else 0
    steps = [e for e in rank.of(StepDone) if e.optimizer == optimizer]
    averaging, others = _usual([e for e in patterns if e.optimizer == optimizer], steps)
    walls = [(b.at - a.at) / b.count for a, b in itertools.pairwise(steps)]
    exposed = averaging * _exposed(times)
    timed = averaging * (times.forward_s + times.backward_s) + exposed
    wall = statistics.median(walls) if walls else timed
    return _Step(wall, averaging + others, averaging, max(0.0, exposed - max(0.0, timed - wall)))


def _without_a_core(run: Run, ranks: Iterable[Rank]) -> float:
    """For how many seconds of a step the ranks of a node had no CPU core, added up, of the node
    where it is most; infinite where it was not measured and a node has fewer cores than ranks."""
    held: dict[str, float] = defaultdict(float)
    for rank in ranks:
        paces = rank.of(Pace)
        here = sum(r.node == rank.node for r in run.ranks.values())
        if paces:
            held[rank.node] += statistics.median(e.delayed_s for e in paces)
        elif here > run.cores(rank.node) > 0:
            return math.inf
    return max(held.values(), default=0.0)


def _usual(patterns: list[SyncPattern], steps: list[StepDone]) -> tuple[int, int]:
    """How many backwards of a step all-reduce gradients and how many do not, in most steps: the
    last step of an epoch often has fewer."""
    held: Counter[tuple[int, int]] = Counter()
    ends = [e.step for e in patterns[1:]] + [steps[-1].step + 1 if steps else 0]
    for one, end in zip(patterns, ends, strict=False):
        if one.synced:
            held[one.synced, one.unsynced] += end - one.step
    return held.most_common(1)[0][0] if held else (1, 0)


def _latest(rank: Rank, model: int) -> SyncTimes | None:
    return next((e for e in reversed(rank.of(SyncTimes)) if e.model == model), None)


def _exposed(times: SyncTimes) -> float:
    """Seconds of communication in a backward that do not overlap with computation."""
    return max(0.0, times.communication_s - times.overlap_s)


def _fix(times: SyncTimes, step: _Step, name: str) -> str:
    ideas = [_accumulation(step, name)]
    small = times.bucket_bytes and max(times.bucket_bytes) < SMALL_BUCKET
    if small and len(times.bucket_bytes) >= MANY_BUCKETS:
        ideas.append("try `bucket_cap_mb=25` or more, since the buckets are small")
    if not times.bucket_view:
        ideas.append("set `gradient_as_bucket_view=True`, which saves a copy")
    if sum(times.bucket_bytes) >= MIB:
        ideas.append(
            f"call `{name}.register_comm_hook(None, default_hooks.fp16_compress_hook)`, which "
            "halves the data (`bf16_compress_hook` with NCCL)"
        )
    return "; ".join(ideas)


def _accumulation(step: _Step, name: str) -> str:
    if step.rule == EVERY_BACKWARD:
        return (
            f"run all but the last of the {step.backwards} backwards of a step under "
            f"`{name}.no_sync()`"
        )
    if step.rule == ACCUMULATING:
        return (
            f"accumulate gradients over more batches: now `no_sync` covers {step.backwards - 1} of "
            f"{step.backwards} per step"
        )
    return f"accumulate gradients over several batches under `{name}.no_sync()`"
