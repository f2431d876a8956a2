"""DDP304."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import (
    Bypassed,
    GroupDestroyed,
    GroupReady,
    RankExiting,
    StepDone,
    SyncPattern,
)
from ddpdoctor.events.drift import UNHELD
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, title_of


class DdpBypassed(Check):
    """Gradients are computed around DistributedDataParallel

    ## What it finds
    Optimizer steps on gradients of a wrapped model that no forward of the wrapper led to:
    `model.module(x)`, a method of the inner module (`model.module.loss(x)`), the raw model kept
    under another name, a wrapper that was made and not used. It names the line of that call. Also
    where no optimizer holds the model and the program itself applies such gradients, again and
    again.

    ## How it knows
    In every backward a few gradients of each wrapped model and the count of its group's collectives
    are looked at before and after: one that reaches the model although no forward of the wrapper
    waits for it, and in which the group does not communicate, went around the wrapper. It is told
    where an optimizer then applies these very gradients, nothing else carried them to the other
    ranks, and the call around the wrapper was found or the wrapper was not called at all since the
    step before. Where no optimizer holds the model, three such backwards must have found its
    parameters changed. The finding is proven.

    ## Why it hurts
    DDP averages gradients in the backward of its own forward. A forward that goes around it trains
    every rank on its own data alone, in silence: the models drift apart, and the one that is saved
    has seen one rank's share of the data.

    ## How to fix it
    Call the wrapper: `model(x)`. Where another method is needed, let `forward` choose it:
    `model(x, mode="loss")`.

    ## When it stays quiet
    Evaluation, generation and saving through `model.module`; copies (EMA); a regulariser on
    `model.module.weight` in the backward of a proper forward; micro-batches under `no_sync`;
    gradients that were cleared, or synchronised by hand, before the step; one process, or ranks
    that have destroyed their groups.
    """

    code = "DDP304"
    name = "ddp-bypassed"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            seen = {r: es for r in run.ranks.values() if (es := _events(r, model))}
            if not seen:
                continue
            discarded = any(e.discarded for es in seen.values() for e in es)
            if discarded and len(seen) < 2:
                continue  # one process that goes on alone, after the others are done
            yield self._report(run, model, seen)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check in (
            "gradient-drift", "parameter-drift", "unsynced-step", "model-not-wrapped",
            "optimizer-state-drift", "parameters-changed-after-wrap",
        )  # fmt: skip

    def _report(self, run: Run, model: int, seen: dict[Rank, list[Bypassed]]) -> Finding:
        rank, events = next(iter(seen.items()))
        first, last = events[0], _to_its_end(rank, events[-1])
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        call = next((e.call_site for e in reversed(events) if e.call_site >= 0), -1)
        spot = rank.location(call) or rank.location(first.site)
        wrapper, _ = models.names_in_code(rank, wrapped)
        title = title_of(rank, wrapped)
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            steps=Steps(first.step, last.step, last.count),
            subjects=(title,),
            location=spot,
            label="goes around the wrapper" if call >= 0 else "backward of a forward around DDP",
            related=models.related(rank, ((wrapped.here, wrapped.site), ("backward", first.site))),
            summary=f"{_applied(title, last)} that went around DistributedDataParallel, "
            f"{models.on_ranks(run, (r.rank for r in seen))}",
            cause=_cause(title, last),
            fix="keep what `DistributedDataParallel(...)` returns, and call that; the model it "
            f"wraps needs a name of its own: no `{wrapper} = {wrapper}.module`"
            if last.discarded
            else f"call the wrapper: `{wrapper}(x)`, not `{wrapper}.module(x)` or the model it "
            "wraps; move other methods behind `forward`",
            fix_kind=FixKind.CHECK,
            evidence={
                "steps without synchronisation": last.count,
                "forwards through the wrapper": last.forwards,
                "collectives in that backward": 0,
                "first at step": first.step,
            },
            at=rank.wall(first.at),
        )


def _events(rank: Rank, model: int) -> list[Bypassed]:
    wrapped = models.wrap_of(rank, model)
    if wrapped is None or len(models.members(rank, wrapped)[1]) < 2:
        return []
    until = _left_for_good(rank)
    return [e for e in rank.of(Bypassed) if e.model == model and e.at < until]


def _left_for_good(rank: Rank) -> float:
    """When a rank destroyed all its groups and formed none again: from there on it is alone."""
    left = max((e.at for e in rank.of(GroupDestroyed) if not e.name), default=math.inf)
    return math.inf if any(e.at > left for e in rank.of(GroupReady)) else left


def _to_its_end(rank: Rank, last: Bypassed) -> Bypassed:
    """The last such step. They are recorded at powers of two and when the rank leaves: of one that
    was stopped, those after the last record are the steps whose gradients came about alike."""
    if rank.of(RankExiting):
        return last
    mine = (last.model, last.optimizer)
    reported = [e for e in rank.of(SyncPattern) if (e.model, e.optimizer) == mine]
    now = next((e for e in reversed(reported) if e.step <= last.step), None)
    if now is None or not now.reason or now.synced:
        return last
    after = [e.step - 1 for e in reported if e.step > last.step]
    taken = [e.step for e in rank.of(StepDone) if e.optimizer == last.optimizer]
    end = min(after) if after else max(taken, default=last.step)
    more = end - last.step
    if not 0 < more < last.count:  # else there were another record
        return last
    return msgspec.structs.replace(last, step=end, count=last.count + more)


def _applied(kind: str, last: Bypassed) -> str:
    if last.optimizer == UNHELD:
        return f"the program itself applied, {last.count} times at least, gradients of {kind}"
    return f"the optimizer stepped {last.count} times on gradients of {kind}"


def _cause(kind: str, last: Bypassed) -> str:
    if last.discarded:
        return (
            f"the wrapper around {kind} was not kept, and the model itself is trained: nothing "
            "averages its gradients"
        )
    return (
        f"DDP arms its synchronisation in its own forward; this forward ran on {kind} itself, so "
        "each rank applied its own gradients"
    )
