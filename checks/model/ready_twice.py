"""DDP310."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import ReadyTwice as Record
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, some, title_of

CHECKPOINT = "re-entrant checkpoint"
SECOND = "second backward"
SEVERAL = "several forwards before one backward"
OUTSIDE = "used beside the forward"
SHARED = "used more than once"

WATCHED = 3
"""First forwards of a model of which it is known what they called."""


class ReadyTwice(Check):
    """torch: "Expected to mark a variable ready only once"

    ## What it finds
    The backward that torch refused with that error, and why: backwards inside the backward
    (re-entrant checkpointing), a backward over a forward that already had one,
    `find_unused_parameters=True` with several forwards before one backward that use different
    parameters, or with one that the loss reaches on another way than through the wrapper's output,
    or else a parameter that DDP counts more than once.

    ## How it knows
    torch's error is recorded as it comes out of the backward, with the parameter that it names. In
    every backward the backwards inside it are counted, the forwards that it is for, and the
    backwards that these had before; of the first three forwards it is known which modules each
    called. Where none of this explains the error, the wrapper's options tell which of the other two
    reasons it is. The finding is proven.

    ## Why it hurts
    The run ends there. The message lists causes without saying which one it is.

    ## How to fix it
    `checkpoint(..., use_reentrant=False)`; one backward over the sum of the losses; leave out
    `find_unused_parameters=True`, or `static_graph=True` where the graph never changes.

    ## When it stays quiet
    Re-entrant checkpointing and shared layers in runs that work.
    """

    code = "DDP310"
    name = "ready-twice"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            seen = {r: e for r in run.ranks.values() for e in r.of(Record)[:1] if e.model == model}
            if seen:
                yield self._report(run, model, seen)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "first-failure":
            text = str(other.evidence)
            return "ready only once" in text or "onnection" in text
        if other.check == "unused-parameter":  # by the first of the backwards over one forward
            again = bool(mine.evidence["backwards over them before"])
            return again and _first(mine) == _first(other) and _wrap(mine) == _wrap(other)
        return other.check in ("rank-missing", "stall", "rank-exited-early")

    def _report(self, run: Run, model: int, seen: dict[Rank, Record]) -> Finding:
        rank, event = next(iter(seen.items()))
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        why = _why(rank, event)
        name = event.parameter or some(event.twice, 1)
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            steps=Steps.of(e.step for e in seen.values()),
            subjects=tuple(dict.fromkeys([*([name] if name else []), *event.twice])),
            location=_spot(rank, event, why),
            label=why,
            related=models.related(
                rank, (("backward that torch refused", event.site), (wrapped.here, wrapped.site))
            ),
            summary=f"torch refused the backward at step {event.step}: {name or 'a parameter'} of "
            f"{title_of(rank, wrapped)} was marked ready twice",
            cause=_cause(event, why),
            fix=_fix(why),
            fix_kind=FixKind.CHECK,
            evidence={
                "parameter": event.parameter,
                "ready more than once": list(event.twice[:20]),
                "backwards inside that backward": event.nested,
                "forwards it was for": event.forwards,
                "backwards over them before": event.backwards,
                "find_unused_parameters": event.find_unused,
                "static_graph": event.static_graph,
            },
            at=rank.wall(event.at),
        )


def _first(finding: Finding) -> int:
    return finding.steps.first if finding.steps else -1


def _wrap(finding: Finding) -> Location | None:
    return next((r.location for r in finding.related if "wrapped" in r.label), None)


def _why(rank: Rank, event: Record) -> str:
    if event.nested:
        return CHECKPOINT
    if event.backwards:
        return SECOND
    if not event.find_unused:
        return SHARED
    return SEVERAL if _used_before(rank, event) else OUTSIDE


def _used_before(rank: Rank, event: Record) -> bool:
    """Whether an earlier forward of that backward called the module of the parameter, and a later
    one did not; or other modules, where not all of the forwards were looked at."""
    known = [
        set(e.names) for e in models.skipped_of(rank, event.model) if e.backward == event.backward
    ]
    missed = {name for earlier in known for name in known[-1] - earlier}
    return event.parameter.rpartition(".")[0] in missed or bool(missed and event.forwards > WATCHED)


def _spot(rank: Rank, event: Record, why: str) -> Location | None:
    sites = {CHECKPOINT: event.checkpoint_site, SEVERAL: event.forward_site}
    return rank.location(sites.get(why, -1)) or rank.location(event.site)


def _cause(event: Record, why: str) -> str:
    return {
        CHECKPOINT: "re-entrant checkpointing runs a backward per checkpointed part, and DDP "
        + (
            "with find_unused_parameters=True has marked its parameters as unused before"
            if event.find_unused
            else "sees a parameter that several parts share once for each"
        ),
        SECOND: "a second backward ran over a forward that had one already, before all gradients "
        "of the first had arrived",
        SEVERAL: "one backward is for several forwards that use different parameters; with "
        "find_unused_parameters=True each forward searches anew, and the last one takes what only "
        "the others use as unused and marks it ready at once, before its gradient comes",
        OUTSIDE: "with find_unused_parameters=True DDP takes every parameter that the wrapper's "
        "output does not depend on as unused and marks it ready at once; the loss then reached it "
        "on another way ("
        + ("an earlier forward of the wrapper, " if event.forwards > 1 else "")
        + "a regulariser on the weights, the inner module)",
        SHARED: "the parameter took part more than once in a way that DDP counts separately",
    }[why]


def _fix(why: str) -> str:
    return {
        CHECKPOINT: "`checkpoint(..., use_reentrant=False)`; or `DDP(..., static_graph=True)` "
        "where the graph is the same in every step",
        SECOND: "add the losses and run one backward: `(first + second).backward()`",
        SEVERAL: "leave out `find_unused_parameters=True` where the forwards together use every "
        "parameter, or let one forward of the wrapper return all that the loss needs",
        OUTSIDE: "leave out `find_unused_parameters=True`, or return what the loss needs from the "
        "wrapper's forward",
        SHARED: "use the layer once per forward, or `DDP(..., static_graph=True)`",
    }[why]
