"""DDP311."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.events import StaticGraphBroken as Record
from ddpdoctor.events import Wrapped
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, plural, some

NO_SYNC = (
    "`no_sync` does not work with `static_graph=True` at the start of a run: DDP learns its "
    "schedule in the first iteration, which did not synchronise",
    "{ddp.drop_static}, or synchronise the first micro-batch of the run",
)
"""Cause and fix of `no-sync-first`."""

CHANGES = (
    "the forward does not use the same parameters, equally often, in every step",
    "{ddp.drop_static}; if parameters are unused in some steps: {ddp.unused}",
)
"""Cause and fix of `graph-changes`."""

REENTRANT = (
    "pass `use_reentrant=False` to every `checkpoint(...)`, as `find_unused_parameters=True` does "
    "not work with re-entrant ones; then "
)
"""What comes before the fix if there is re-entrant checkpointing."""


class StaticGraphBroken(Check):
    """static_graph=True, but the graph is not static

    ## What it finds
    A model wrapped with `static_graph=True` whose backward torch rejected because the graph changed
    or because `no_sync` came first, or whose backwards no longer communicate although they should,
    without an error. Also if every step is the same, but some output of the forward is not used in
    the loss.

    ## How it knows
    torch's own errors are recorded when a forward or a backward raises them. For every backward of
    such a model that should synchronise, the number of its group's collectives is compared before
    and after: if it does not change, nothing was averaged. The parameters that this backward did
    not reach are compared with those that the first one reached without a gradient. The finding is
    proven.

    ## Why it hurts
    With this option, DDP learns in the first iteration which gradients to wait for, and never
    checks again. If the graph changes, gradients are applied without being averaged; torch notices
    a step later, or not at all. In the first iteration, torch runs the backward through every
    output of the forward, even one that the loss does not use: DDP then waits for its parameters in
    vain.

    ## How to fix it
    Remove `static_graph=True`. If parameters are unused in some steps, use
    `find_unused_parameters=True`, with which checkpoints need `use_reentrant=False`. With gradient
    accumulation, let the first backward of the run synchronise. If an output is never used in the
    loss, freeze its parameters before the wrap, or do not return it.

    ## When it stays quiet
    - The graph is static, even with parameters that are never used or with re-entrant
      checkpointing.
    """

    code = "DDP311"
    name = "static-graph-broken"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "output-not-in-loss": "an output of the forward is not used in the loss",
        "no-sync-first": "forwards ran under `no_sync` before the first synchronised backward",
        "graph-changes": "the forward uses other parameters than in the first iteration",
    }
    requires = (models.needs_ddp,)
    effects = (
        Effect(("first-failure",), errors=(ErrorKind.GRAPH_CHANGED, ErrorKind.CONNECTION)),
        Effect((*NOT_AVERAGED, "unused-parameter", "rank-dependent-graph", "redundant-sync")),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        return map(self._report, models.seen(run, _events))

    def _report(self, seen: models.Seen[Record]) -> Finding:
        rank, wrapped, events = seen.rank, seen.wrapped, seen.records[seen.rank]
        first, last = events[0], events[-1]
        promised = next((e.promised for e in events if e.promised), ())
        silent = max(e.silent for e in events)
        places = [("a forward under no_sync", last.unsynced_site)]
        if not promised:
            places.append(("the forward that differs", first.forward_site))
        if promised:
            rule = "output-not-in-loss"
            cause, fix = _output_not_in_loss(rank, wrapped, promised)
        elif last.unsynced and first.kind != "changed":
            rule, (cause, fix) = "no-sync-first", NO_SYNC
            fix = fix.format(ddp=WrapOptions(wrapped))
        else:
            rule, (cause, fix) = "graph-changes", CHANGES
            if any(e.nested for e in events):
                places.append(("checkpoints a part of it", last.checkpoint_site))
                fix = REENTRANT + fix
            fix = fix.format(ddp=WrapOptions(wrapped))
        return self.finding(
            rule=rule,
            ranks=seen.ranks,
            steps=_steps(events, silent),
            subjects=(seen.title,),
            location=rank.location(wrapped.site),
            label="wrapped with static_graph=True",
            related=(*models.related(rank, places), *_made(rank, wrapped, promised)),
            summary=_summary(seen.title, first, silent),
            cause=cause,
            fix=fix,
            evidence={
                "seen as": [e.kind for e in events],
                "backwards without communication": silent,
                "synchronising backwards": last.backward,
                "forwards under no_sync": last.unsynced,
                **({"waits for": list(models.names_of(wrapped, promised))} if promised else {}),
            },
            at=rank.wall(first.at),
        )


def _steps(events: list[Record], silent: int) -> Steps:
    """The steps concerned. An error that torch raises in a forward is about the step before."""
    reported = [e.step for e in events if e.kind != "changed"]
    steps = reported or [max(0, e.step - 1) for e in events]
    first, last = min(steps), max(steps)
    return Steps(first, last, min(max(silent, 1), last - first + 1))


def _output_not_in_loss(rank: Rank, wrapped: Wrapped, promised: Sequence[int]) -> tuple[str, str]:
    """Cause and fix of `output-not-in-loss`."""
    parts = models.parts_of(wrapped, promised)
    _, inner = models.names_in_code(rank, wrapped)
    titles = some(part.title for part in parts)
    code = parts[0].code(inner)
    return (
        f"the loss does not use the output of {titles}. In the first iteration of a static graph, "
        "torch runs the backward through every output of the forward, so DDP counts its parameters "
        "as used and has waited for their gradients since",
        f"to keep it unused, freeze it before the wrap: `{code}.requires_grad_(False)`; or use its "
        "output in the loss in every step; if only some steps use it, "
        f"{WrapOptions(wrapped).unused} instead of `static_graph=True`",
    )


def _made(rank: Rank, wrapped: Wrapped, promised: Sequence[int]) -> Iterator[Related]:
    """The line that made the first module whose output is not used."""
    for part in models.parts_of(wrapped, promised)[:1]:
        if (spot := models.made_at(rank, wrapped, part)) is not None:
            yield Related("its output is not used in the loss", spot)


def _events(rank: Rank, wrapped: Wrapped) -> list[Record]:
    return [e for e in rank.of(Record) if e.model == wrapped.model]


def _summary(kind: str, first: Record, silent: int) -> str:
    if silent:
        return (
            f"{kind} is wrapped with static_graph=True, but {counted(silent, 'backward')} that "
            f"should average its gradients {plural(silent, 'does', 'do')} not communicate"
        )
    reported = "the graph changed" if first.kind == "changed" else "an internal assertion failed"
    return f"{kind} is wrapped with static_graph=True, and torch reports that {reported}"
