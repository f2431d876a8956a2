"""DDP703."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ddpdoctor.events import Pace, StepDone, SyncPattern, SyncTimes, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run

SHARE = 0.25
"""Of the whole step, the optimizer and loading included."""
NOTICEABLE_S = 0.020
"""Below this much per step it is not worth a change, whatever its share."""

MIB = 1 << 20
SMALLEST = MIB
"""Less goes around in no time: whoever waits for it waits for another rank."""
SMALL_BUCKET = 4 * MIB
MANY_BUCKETS = 6


class CommunicationBound(Check):
    """Steps wait for gradients to be averaged

    ## What it finds
    DDP models whose gradient synchronisation takes much of each step beyond what is hidden behind
    the backward. A step is the optimizer's, with all the batches that it accumulates.

    ## How it knows
    DDP itself times its first ten iterations, and one in a hundred after that; its averages are
    read after the twelfth step, then every 20 s at most. What is not hidden is taken from the rank
    that waits least, so that waiting for a slow peer does not count, and by as much less as the
    median step is shorter than the timed ones: it must be 20 ms and a quarter of the median step.
    So must what is left of it without the time for which the ranks of a node, one after the other,
    had no core: where they take turns, all of them wait for each other. The finding is proven.

    ## Why it hurts
    That part of every step computes nothing, and grows with the number of ranks.

    ## How to fix it
    Send less often (gradient accumulation with `no_sync()`, or more of it), less
    (`fp16_compress_hook`), or
    earlier (`bucket_cap_mb`, `gradient_as_bucket_view=True`, `static_graph=True`); a larger batch
    per rank makes the rest of the step longer. The note gives sizes and times.

    ## When it stays quiet
    Synchronisation that the backward hides; a few milliseconds; ranks that only wait for a
    slower one, or for each other's turn on a core; less than a megabyte of gradients.
    """

    code = "DDP703"
    name = "communication-bound"
    family = "performance"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(SyncTimes) else "no DDP model trained for more than ten steps"

    def examine(self, run: Run) -> Iterable[Finding]:
        numbers = sorted({e.model for r in run.ranks.values() for e in r.of(SyncTimes)})
        for model in numbers:
            seen = {r: e for r in run.ranks.values() if (e := _latest(r, model)) is not None}
            if len(seen) < 2:
                continue
            rank, times = min(seen.items(), key=lambda item: _exposed(item[1]))
            if 0 < sum(times.bucket_bytes) < SMALLEST:
                continue
            step = _step(rank, times)
            least = max(NOTICEABLE_S, SHARE * step.wall_s)
            if step.exposed_s - _without_a_core(run, seen) >= least:
                yield self._report(seen, rank, times, step)

    def _report(
        self, seen: dict[Rank, SyncTimes], rank: Rank, times: SyncTimes, step: _Step
    ) -> Finding:
        wrapped = next((w for w in rank.of(Wrapped) if w.model == times.model), None)
        name = (rank.names_of(wrapped)[0] if wrapped else "") or "ddp"
        size = sum(times.bucket_bytes)
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            subjects=(wrapped.kind,) if wrapped else (),
            location=rank.location(wrapped.site) if wrapped else None,
            label=f"{step.exposed_s * 1e3:.0f} ms of each step",
            summary=(
                f"averaging gradients takes {step.exposed_s * 1e3:.0f} ms of a step of "
                f"{step.wall_s * 1e3:.0f} ms beyond what the backward hides "
                f"({step.exposed_s / step.wall_s:.0%})"
            ),
            cause=(
                f"{size / MIB:.3g} MB of gradients in {_count(times)} go around "
                f"in {times.communication_s * 1e3:.0f} ms"
                + (f", {step.averaging} times a step" if step.averaging > 1 else "")
            ),
            fix=_fix(times, step, name),
            fix_kind=FixKind.CHECK,
            evidence={
                "backwards in a step": step.backwards,
                "of them averaging": step.averaging,
                "each averaging one": [
                    {
                        "rank": r.rank,
                        "forward ms": round(e.forward_s * 1e3, 1),
                        "backward ms": round(e.backward_s * 1e3, 1),
                        "communication ms": round(e.communication_s * 1e3, 1),
                        "hidden ms": round(e.overlap_s * 1e3, 1),
                    }
                    for r, e in seen.items()
                ],
                "buckets": [f"{b / MIB:.1f} MB" for b in times.bucket_bytes[:12]],
            },
            at=rank.wall(times.at),
        )


@dataclass(frozen=True)
class _Step:
    """A usual step of the optimizer.

    Attributes:
        averaging: how many of its backwards average.
        exposed_s: of all these, how long communication is not hidden.
    """

    wall_s: float
    backwards: int
    averaging: int
    exposed_s: float


def _step(rank: Rank, times: SyncTimes) -> _Step:
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
    """Of a step, for how long the ranks of a node had no core, if one after the other; without end
    where that was not measured and there are fewer cores than ranks."""
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
    """Backwards of most steps that average and that do not: the last step of an epoch often has
    fewer."""
    held: Counter[tuple[int, int]] = Counter()
    ends = [e.step for e in patterns[1:]] + [steps[-1].step + 1 if steps else 0]
    for one, end in zip(patterns, ends, strict=False):
        if one.synced:
            held[one.synced, one.unsynced] += end - one.step
    return held.most_common(1)[0][0] if held else (1, 0)


def _latest(rank: Rank, model: int) -> SyncTimes | None:
    return next((e for e in reversed(rank.of(SyncTimes)) if e.model == model), None)


def _exposed(times: SyncTimes) -> float:
    return max(0.0, times.communication_s - times.overlap_s)


def _count(times: SyncTimes) -> str:
    count = len(times.bucket_bytes)
    return f"{count} bucket{'s' if count > 1 else ''}"


def _fix(times: SyncTimes, step: _Step, name: str) -> str:
    ideas = [_accumulation(step, name)]
    small = times.bucket_bytes and max(times.bucket_bytes) < SMALL_BUCKET
    if small and len(times.bucket_bytes) >= MANY_BUCKETS:
        ideas.append("try `bucket_cap_mb=25` or more: the buckets are small")
    if not times.bucket_view:
        ideas.append("`gradient_as_bucket_view=True` saves a copy")
    if sum(times.bucket_bytes) >= MIB:
        ideas.append(
            f"`{name}.register_comm_hook(None, default_hooks.fp16_compress_hook)` sends half as "
            "much (`bf16_compress_hook` with NCCL)"
        )
    return "; ".join(ideas)


def _accumulation(step: _Step, name: str) -> str:
    if step.averaging > 1:
        return (
            f"all but the last of the {step.backwards} backwards of a step under `{name}.no_sync()`"
        )
    if step.backwards > 1:
        return (
            f"accumulate gradients over more batches: `no_sync` covers {step.backwards - 1} of "
            f"the {step.backwards} of a step now"
        )
    return f"accumulate gradients over several batches under `{name}.no_sync()`"
