"""DDP310."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import ReadyTwice as Record
from ddpdoctor.report.declarations import WAITING, Condition, Effect
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, some, title_of

LABELS = {
    "reentrant-checkpoint": "re-entrant checkpoint",
    "second-backward": "second backward over one forward",
    "several-forwards": "several forwards before one backward",
    "used-outside-forward": "parameter used outside of the wrapper's forward",
    "used-more-than-once": "parameter used more than once",
}
"""By rule."""

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
    rules: ClassVar[Mapping[str, str]] = {
        "reentrant-checkpoint": "the backward ran further backwards inside it",
        "second-backward": "the forward already had a backward",
        "several-forwards": "with find_unused_parameters, forwards of one backward use different "
        "parameters",
        "used-outside-forward": "with find_unused_parameters, the loss uses a parameter outside of "
        "the wrapper's forward",
        "used-more-than-once": "none of the other reasons: DDP counts the parameter more than once",
    }
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
        for model in models.numbers(run):
            seen = {r: e for r in run.ranks.values() for e in r.of(Record)[:1] if e.model == model}
            if seen:
                yield self._report(run, model, seen)

    def _report(self, run: Run, model: int, seen: dict[Rank, Record]) -> Finding:
        rank, event = next(iter(seen.items()))
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        rule = _rule(rank, event)
        name = event.parameter or some(event.twice, 1)
        return self.finding(
            rule=rule,
            ranks=tuple(r.rank for r in seen),
            steps=Steps.of(e.step for e in seen.values()),
            subjects=tuple(dict.fromkeys([*([name] if name else []), *event.twice])),
            location=_spot(rank, event, rule),
            label=LABELS[rule],
            related=models.related(
                rank, (("backward that torch rejected", event.site), (wrapped.here, wrapped.site))
            ),
            summary=f"torch rejects the backward at step {event.step}: {name or 'a parameter'} of "
            f"{title_of(rank, wrapped)} is marked ready twice",
            cause=_cause(event, rule),
            fix=FIXES[rule],
            fix_kind=FixKind.CHECK,
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


def _cause(event: Record, rule: str) -> str:
    return {
        "reentrant-checkpoint": "re-entrant checkpointing runs a separate backward for each "
        "checkpointed part, and DDP "
        + (
            "with find_unused_parameters=True has already marked its parameters as unused"
            if event.find_unused
            else "sees a parameter that several parts share once for each part"
        ),
        "second-backward": "a second backward ran over the same forward before all gradients of "
        "the first one had arrived",
        "several-forwards": "one backward belongs to several forwards that use different "
        "parameters. With find_unused_parameters=True each forward searches again, and the last "
        "one marks parameters that only the others use as unused, hence ready, before their "
        "gradients arrive",
        "used-outside-forward": "with find_unused_parameters=True, DDP marks every parameter that "
        "the wrapper's output does not depend on as unused, hence ready. The loss then used it in "
        "another way ("
        + ("an earlier forward of the wrapper, " if event.forwards > 1 else "")
        + "a regulariser on the weights, the inner module)",
        "used-more-than-once": "the parameter was used more than once, in a way that DDP counts "
        "separately",
    }[rule]


FIXES = {
    "reentrant-checkpoint": "`checkpoint(..., use_reentrant=False)`; or "
    "`DDP(..., static_graph=True)` if the graph is the same in every step",
    "second-backward": "add the losses and run one backward: `(first + second).backward()`",
    "several-forwards": "remove `find_unused_parameters=True` if the forwards together use every "
    "parameter, or let one forward of the wrapper return all that the loss needs",
    "used-outside-forward": "remove `find_unused_parameters=True`, or return what the loss needs "
    "from the wrapper's forward",
    "used-more-than-once": "use the layer once per forward, or `DDP(..., static_graph=True)`",
}
"""By rule."""
