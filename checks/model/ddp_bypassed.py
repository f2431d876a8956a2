"""DDP304."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import msgspec

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.events import (
    Bypassed,
    GroupDestroyed,
    GroupReady,
    RankExiting,
    StepDone,
    SyncPattern,
    Wrapped,
)
from ddpdoctor.events.drift import UNHELD
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, plural

OF_ITS_BACKWARD = "backward of a forward that bypasses DDP"
TAKEN = "takes the model out of the wrapper"
OF_WRAPPER = ".module"
NAMED = "keeps the model beside the wrapper"


class DdpBypassed(Check):
    """The forward bypasses DistributedDataParallel

    ## What it finds
    Optimizer steps on gradients of a wrapped model that come from no forward of the wrapper:
    `model.module(x)`, a method of the inner module (`model.module.loss(x)`), the raw model under
    another name, a wrapper that is made and not used. The finding names the line of that call; the
    line that passes the model on without its wrapper (`losses(model.module, x)`), where another
    function calls it; if the wrapper is gone, the line that took the model out of it, where it is
    found. Also if no optimizer holds the model and the program repeatedly applies such gradients
    itself.

    ## How it knows
    Before and after every backward, some gradients of each wrapped model and the number of its
    group's collectives are recorded. A backward bypasses the wrapper if it reaches the model
    although no forward of the wrapper awaits it, and the group does not communicate.

    It is reported if an optimizer then applies these gradients, nothing else carried them to the
    other ranks, and either the call around the wrapper was found or the wrapper was not called at
    all since the step before. If no optimizer holds the model, its parameters must have changed
    before three such backwards. The finding is proven.

    ## Why it hurts
    DDP averages gradients in the backward of its own forward. A forward that bypasses it trains
    each rank on its own data alone, without an error: the replicas diverge, and the model that is
    saved has seen one rank's share of the data.

    ## How to fix it
    Call the wrapper: `model(x)`. If another method is needed, let `forward` select it:
    `model(x, mode="loss")`.

    ## When it stays quiet
    - Evaluation, generation and saving through `model.module`; copies (EMA).
    - A regulariser on `model.module.weight` in the backward of a forward of the wrapper.
    - Micro-batches under `no_sync`.
    - Gradients are cleared, or synchronised manually, before the step.
    - There is one process, or the ranks have destroyed their process groups.
    """

    code = "DDP304"
    name = "ddp-bypassed"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "wrapper-bypassed": "the forward ran on the inner model, not on the wrapper",
        "wrapper-discarded": "the program did not keep the wrapper, and trains the model itself",
        "no-forward": "the `forward` of the wrapped module never runs: other modules call its "
        "parts",
        "manual-update": "the program itself applies gradients that bypassed the wrapper",
    }
    requires = (models.needs_ddp,)
    effects = (
        Effect(
            (
                *NOT_AVERAGED,
                "model-not-wrapped",
                "optimizer-state-drift",
                "parameters-changed-after-wrap",
            )
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for seen in models.seen(run, _events):
            discarded = any(e.discarded for events in seen.records.values() for e in events)
            if not discarded or len(seen.records) > 1:  # else one process goes on alone
                yield self._report(seen)

    def _report(self, seen: models.Seen[Bypassed]) -> Finding:
        rank, wrapped, events = seen.rank, seen.wrapped, seen.records[seen.rank]
        first, last = events[0], _to_its_end(rank, events[-1])
        call = next((e.call_site for e in reversed(events) if e.call_site >= 0), -1)
        spot = rank.location(call) or rank.location(first.site)
        named = rank.location(first.named_site)
        handing = next((e for e in reversed(events) if e.call_site == call and e.handed), None)
        handed = rank.location(handing.handed_site) if handing else None
        argument = handing.handed if handing and handed and not last.discarded else ""
        if last.discarded:
            at_fault, label = named, "keeps the model, not the wrapper"
        else:
            at_fault, label = handed, "passes the inner model on, not the wrapper"
        bypasses = (
            "bypasses the wrapper" if call >= 0 else "backward of a forward that bypasses DDP"
        )
        wrapper, title = seen.wrapper, seen.title
        if not wrapped.forward or (last.within and not last.forwards):
            return self._without_forward(seen)
        return self.finding(
            rule=_rule(last),
            ranks=seen.ranks,
            steps=Steps(first.step, last.step, last.count),
            subjects=(title,),
            location=at_fault or spot,
            label=label if at_fault else bypasses,
            related=models.related(
                rank,
                (
                    *_taken(first, bypasses if at_fault else "", call, argument),
                    (wrapped.here, wrapped.site),
                    ("backward", first.site),
                ),
            ),
            summary=f"{_applied(title, last)}, {seen.where}",
            cause=_cause(title, last),
            fix=_fix(wrapped, wrapper, last, argument),
            evidence={
                "steps without synchronisation": last.count,
                "forwards through the wrapper": last.forwards,
                "collectives in that backward": 0,
                "first at step": first.step,
            },
            at=rank.wall(first.at),
        )

    def _without_forward(self, seen: models.Seen[Bypassed]) -> Finding:
        """Adapters, say, that replace the forwards of another model's layers."""
        rank, wrapped, events = seen.rank, seen.wrapped, seen.records[seen.rank]
        first, last = events[0], _to_its_end(rank, events[-1])
        called = next((e.call_site for e in reversed(events) if e.call_site >= 0), first.site)
        outer = f"`{last.within}`" if last.within else "another model"
        runs = "defines no `forward`" if not wrapped.forward else "is never called"
        wraps, calls = rank.location(wrapped.site), rank.location(last.within_site)
        own = "call the wrapper" if calls else "call that"
        return self.finding(
            rule="no-forward",
            ranks=seen.ranks,
            steps=Steps(first.step, last.step, last.count),
            subjects=(seen.title,),
            location=calls or wraps,
            label=f"runs parts of {seen.title}, without the wrapper"
            if calls
            else f"wraps {seen.title}, which {runs}",
            related=models.related(
                rank,
                (
                    *(((NAMED, first.named_site),) if last.discarded else ()),
                    *(((f"wraps {seen.title}, which {runs}", wrapped.site),) if calls else ()),
                    ("calls parts of it", called),
                    ("backward", first.site),
                ),
            ),
            summary=f"{_applied(seen.title, last)}, {seen.where}",
            cause="DDP synchronises gradients only after its own forward, and the wrapped module "
            f"{runs}: {outer} calls its parts, so each rank applied its own gradients",
            fix=f"wrap {outer if last.within else 'one module whose `forward` calls that model'}, "
            f"with these parameters in it, and {own} (frozen parameters in it do no harm); or "
            "leave the wrapper out and average after each backward: `for p in parameters: "
            "dist.all_reduce(p.grad); p.grad /= world_size`, with equal weights at the start",
            evidence={
                "steps without synchronisation": last.count,
                "forwards through the wrapper": last.forwards,
            },
            at=rank.wall(first.at),
        )


def _taken(event: Bypassed, bypasses: str, call: int, handed: str) -> Iterator[tuple[str, int]]:
    """Labels and sites of how the model left its wrapper, and of the call around it if that is not
    the finding's line.

    Args:
        handed: the argument by which it is passed on, empty for none.
    """
    if event.taken_site != event.named_site:
        yield TAKEN, event.taken_site
    if bypasses:
        yield bypasses, call
    if handed.endswith(OF_WRAPPER):
        return
    if handed or not bypasses:
        yield NAMED, event.named_site


def _fix(wrapped: Wrapped, wrapper: str, last: Bypassed, handed: str) -> str:
    called = WrapOptions(wrapped).called
    if last.discarded and wrapped.by:
        return f"{called}; take the model out of the wrapper only to save it, under another name"
    if last.discarded:
        return f"{called}; give the inner model another name: no `{wrapper} = {wrapper}.module`"
    if handed:
        name = handed.removesuffix(OF_WRAPPER) if handed.endswith(OF_WRAPPER) else wrapper
        return f"pass the wrapper on: `{name}`, not `{handed}`"
    return (
        f"{called + ': ' if wrapped.by else 'call the wrapper: '}`{wrapper}(...)`, not "
        f"`{wrapper}.module(...)` or the inner model; call other methods from `forward`"
    )


def _rule(last: Bypassed) -> str:
    if last.discarded:
        return "wrapper-discarded"
    return "manual-update" if last.optimizer == UNHELD else "wrapper-bypassed"


def _events(rank: Rank, wrapped: Wrapped) -> list[Bypassed]:
    """Records of steps on gradients that bypassed the wrapper, while the rank was not alone."""
    until = _left_for_good(rank)
    return [e for e in rank.of(Bypassed) if e.model == wrapped.model and e.at < until]


def _left_for_good(rank: Rank) -> float:
    """When a rank destroyed all its process groups for good: it is alone from then on."""
    left = max((e.at for e in rank.of(GroupDestroyed) if not e.name), default=math.inf)
    return math.inf if any(e.at > left for e in rank.of(GroupReady)) else left


def _to_its_end(rank: Rank, last: Bypassed) -> Bypassed:
    """The last record, extended to the rank's last such step. They are recorded at powers of two
    and when the rank exits; if it was stopped, the steps after the last record count as long as
    their gradients were synchronised no differently."""
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
        return (
            f"the program applies gradients of {kind} that bypassed DistributedDataParallel, at "
            f"least {counted(last.count, 'time')}"
        )
    return (
        f"{counted(last.count, 'optimizer step')} {plural(last.count, 'applies', 'apply')} "
        f"gradients of {kind} that bypassed DistributedDataParallel"
    )


def _cause(kind: str, last: Bypassed) -> str:
    if last.discarded:
        return (
            f"the program did not keep the wrapper of {kind} and trains the model itself, so "
            "nothing averages its gradients"
        )
    ran = f"This forward ran on {kind} itself"
    if last.call_site < 0 and not last.within:
        ran = (
            f"Before this backward none ran: {kind} was called itself, or its parameters were read"
        )
    return (
        f"DDP synchronises gradients only after its own forward. {ran}, so each rank applied its "
        "own gradients"
    )
