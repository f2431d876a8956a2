"""DDP703."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import SyncTimes, Wrapped
from ddpdoctor.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run

SHARE = 0.3
NOTICEABLE_S = 0.020
"""Below this much per step it is not worth a change, whatever its share."""

MIB = 1 << 20
SMALL_BUCKET = 4 * MIB
MANY_BUCKETS = 6


class CommunicationBound(Check):
    """Steps wait for gradients to be averaged

    ## What it finds
    DDP models whose gradient synchronisation takes much of each step beyond what is hidden behind
    the backward: by DDP's own timing, on the rank that waits least, so that waiting for a slow
    peer does not count.

    ## Why it hurts
    That part of every step computes nothing, and grows with the number of ranks.

    ## How to fix it
    Send less often (gradient accumulation with `no_sync()`), less (`fp16_compress_hook`), or
    earlier (`bucket_cap_mb`, `gradient_as_bucket_view=True`, `static_graph=True`); a larger batch
    per rank makes the rest of the step longer. The note gives sizes and times.

    ## When it stays quiet
    Synchronisation that the backward hides; a few milliseconds; ranks that only wait for a slower
    one.
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
            exposed = _exposed(times)
            step = times.forward_s + times.backward_s + exposed
            if exposed < NOTICEABLE_S or exposed < SHARE * step:
                continue
            yield self._tell(seen, rank, times, exposed, step)

    def _tell(
        self,
        seen: dict[Rank, SyncTimes],
        rank: Rank,
        times: SyncTimes,
        exposed: float,
        step: float,
    ) -> Finding:
        wrapped = next((w for w in rank.of(Wrapped) if w.model == times.model), None)
        size = sum(times.bucket_bytes)
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            subjects=(wrapped.kind,) if wrapped else (),
            location=rank.location(wrapped.site) if wrapped else None,
            label=f"{exposed * 1e3:.0f} ms of each step",
            summary=(
                f"averaging gradients takes {exposed * 1e3:.0f} ms of a step of "
                f"{step * 1e3:.0f} ms beyond what the backward hides ({100 * exposed / step:.0f} %)"
            ),
            cause=(
                f"{size / MIB:.3g} MB of gradients in {_count(times)} go around "
                f"in {times.communication_s * 1e3:.0f} ms"
            ),
            fix=_fix(times),
            fix_kind=FixKind.CHECK,
            evidence={
                "ranks": [
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


def _latest(rank: Rank, model: int) -> SyncTimes | None:
    return next((e for e in reversed(rank.of(SyncTimes)) if e.model == model), None)


def _exposed(times: SyncTimes) -> float:
    return max(0.0, times.communication_s - times.overlap_s)


def _count(times: SyncTimes) -> str:
    count = len(times.bucket_bytes)
    return f"{count} bucket{'s' if count > 1 else ''}"


def _fix(times: SyncTimes) -> str:
    ideas = ["accumulate gradients over several batches under `ddp.no_sync()`"]
    small = times.bucket_bytes and max(times.bucket_bytes) < SMALL_BUCKET
    if small and len(times.bucket_bytes) >= MANY_BUCKETS:
        ideas.append("try `bucket_cap_mb=25` or more: the buckets are small")
    if not times.bucket_view:
        ideas.append("`gradient_as_bucket_view=True` saves a copy")
    if sum(times.bucket_bytes) >= MIB:
        ideas.append(
            "`ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)` sends half as much "
            "(`bf16_compress_hook` with NCCL)"
        )
    return "; ".join(ideas)
