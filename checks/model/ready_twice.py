"""DDP310."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.analysis.models.wrapped_models import Reason
from ddpdoctor.events import ReadyTwice as Record
from ddpdoctor.events import Wrapped
from ddpdoctor.report.declarations import WAITING, Condition, Effect
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, some

REASONS = {
    "reentrant-checkpoint": Reason(
        "the backward ran further backwards inside it",
        "re-entrant checkpoint",
        "re-entrant checkpointing runs a separate backward for each checkpointed part, and DDP "
        "{parts}",
        "{ddp.reentrant}; or {ddp.static} if the graph is the same in every step",
    ),
    "second-backward": Reason(
        "the forward already had a backward",
        "second backward over one forward",
        "a second backward ran over the same forward before all gradients of the first one had "
        "arrived",
        "add the losses and run one backward: `(first + second).backward()`",
    ),
    "several-forwards": Reason(
        "with find_unused_parameters, forwards of one backward use different parameters",
        "several forwards before one backward",
        "one backward belongs to several forwards that use different parameters. With "
        "find_unused_parameters=True each forward searches again, and the last one marks "
        "parameters that only the others use as unused, hence ready, before their gradients arrive",
        "{ddp.drop_unused} if the forwards together use every parameter, or let "
        "one forward of the wrapper return all that the loss needs",
    ),
    "used-outside-forward": Reason(
        "with find_unused_parameters, the loss uses a parameter outside of the wrapper's forward",
        "parameter used outside of the wrapper's forward",
        "with find_unused_parameters=True, DDP marks every parameter that the wrapper's output "
        "does not depend on as unused, hence ready. The loss then used it in another way ({earlier}"
        "a regulariser on the weights, the inner module, a parameter that forward returns as it "
        "is)",
        "return what the loss needs from the wrapper's forward, and of a parameter an expression "
        "(`p * 1`): DDP does not see one that is returned as it is; or {ddp.drop_unused}, if every "
        "parameter is used in every step",
    ),
    "used-more-than-once": Reason(
        "none of the other reasons: DDP counts the parameter more than once",
        "parameter used more than once",
        "the parameter was used more than once, in a way that DDP counts separately",
        "use the layer once per forward, or {ddp.static}",
    ),
}

WATCHED = 3
"""The first forwards of a model, for which the called modules are known."""


def _first_step(finding: Finding) -> int:
    return finding.steps.first if finding.steps else -1


def _wraps(finding: Finding) -> set[Location]:
    """The line of the wrap: of the related lines, the one that is not the backward itself."""
    return {r.location for r in finding.related if r.location != finding.location}


def _of_one_forward(mine: Finding, other: Finding) -> bool:
    same_step = _first_step(mine) == _first_step(other)
    return same_step and not _wraps(mine).isdisjoint(r.location for r in other.related)


class ReadyTwice(Check):
    """torch: "Expected to mark a variable ready only once"

    ## What it finds
    The backward that torch rejected with that error, and why:

    - backwards inside the backward (re-entrant checkpointing)
    - a second backward over one forward
    - `find_unused_parameters=True`, with several forwards before one backward that use different
      parameters
    - `find_unused_parameters=True`, with a parameter that the loss uses outside of the wrapper's
      forward
    - otherwise a parameter that DDP counts more than once

    ## How it knows
    torch's error is recorded when the backward raises it, with the parameter that it names. In
    every backward, the backwards inside it are counted, the forwards that it belongs to, and the
    earlier backwards over these. For the first three forwards it is known which modules each of
    them called. If none of this explains the error, the wrapper's options decide between the last
    two reasons. The finding is proven.

    ## Why it hurts
    The run ends there. torch's message lists possible causes but not the one that applies.

    ## How to fix it
    `checkpoint(..., use_reentrant=False)`; one backward over the sum of the losses; remove
    `find_unused_parameters=True`; or use `static_graph=True` if the graph never changes.

    ## When it stays quiet
    - Re-entrant checkpointing and shared layers in runs without that error.
    """

    code = "DDP310"
    name = "ready-twice"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = models.rules(REASONS)
    requires = (models.needs_ddp,)
    effects = (
        Effect(("first-failure",), errors=(ErrorKind.READY_TWICE, ErrorKind.CONNECTION)),
        Effect(
            ("unused-parameter",),
            of=("second-backward",),
            when=(Condition("of the first backward over the same forward", _of_one_forward),),
        ),
        Effect(WAITING),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        return map(self._report, models.seen(run, _events))

    def _report(self, seen: models.Seen[Record]) -> Finding:
        rank, wrapped, event = seen.rank, seen.wrapped, seen.records[seen.rank][0]
        rule = _rule(rank, event)
        reason = REASONS[rule]
        parts = "sees a parameter that several parts share once for each part"
        if event.find_unused:
            parts = "with find_unused_parameters=True has already marked its parameters as unused"
        earlier = "an earlier forward of the wrapper, " if event.forwards > 1 else ""
        name = event.parameter or some(event.twice, 1)
        return self.finding(
            rule=rule,
            ranks=seen.ranks,
            steps=Steps.of(e.step for events in seen.records.values() for e in events),
            subjects=tuple(dict.fromkeys([*([name] if name else []), *event.twice])),
            location=_spot(rank, event, rule),
            label=reason.label,
            related=models.related(
                rank, (("backward that torch rejected", event.site), (wrapped.here, wrapped.site))
            ),
            summary=f"torch rejects the backward at step {event.step}: {name or 'a parameter'} of "
            f"{seen.title} is marked ready twice",
            cause=reason.cause.format(parts=parts, earlier=earlier),
            fix=reason.fix.format(ddp=WrapOptions(wrapped)),
            evidence={
                "parameter": event.parameter,
                "ready more than once": list(event.twice[:20]),
                "nested backwards": event.nested,
                "forwards in this backward": event.forwards,
                "earlier backwards over the same forwards": event.backwards,
                "find_unused_parameters": event.find_unused,
                "static_graph": event.static_graph,
            },
            at=rank.wall(event.at),
        )


def _events(rank: Rank, wrapped: Wrapped) -> list[Record]:
    return [e for e in rank.of(Record) if e.model == wrapped.model]


def _rule(rank: Rank, event: Record) -> str:
    """What was counted in the backward comes first: the other reasons are found by exclusion."""
    if event.nested:
        return "reentrant-checkpoint"
    if event.backwards:
        return "second-backward"
    if not event.find_unused:
        return "used-more-than-once"
    return "several-forwards" if _used_before(rank, event) else "used-outside-forward"


def _used_before(rank: Rank, event: Record) -> bool:
    """Whether an earlier forward of that backward called the parameter's module and the last one
    did not; or called other modules, if not all of the forwards were recorded."""
    known = [
        set(e.names) for e in models.skipped_of(rank, event.model) if e.backward == event.backward
    ]
    missed = {name for earlier in known for name in known[-1] - earlier}
    return event.parameter.rpartition(".")[0] in missed or bool(missed and event.forwards > WATCHED)


def _spot(rank: Rank, event: Record, rule: str) -> Location | None:
    sites = {
        "reentrant-checkpoint": event.checkpoint_site,
        "several-forwards": event.forward_site,
    }
    return rank.location(sites.get(rule, -1)) or rank.location(event.site)
