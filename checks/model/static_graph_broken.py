"""DDP311."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import StaticGraphBroken as Record
from ddpdoctor.events import Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, some, title_of

ACCUMULATES = (
    "`no_sync` and `static_graph=True` exclude each other at the start of a run: DDP learns its "
    "schedule in the first iteration, which did not synchronise",
    "leave out `static_graph=True`, or let the first micro-batch of the run synchronise",
)
CHANGES = (
    "the forward does not use the same parameters, equally often, in every step",
    "leave out `static_graph=True`; where parameters are unused in some steps: "
    "`DDP(..., find_unused_parameters=True)`",
)
REENTRANT = (
    "give every `checkpoint(...)` `use_reentrant=False`, as `find_unused_parameters=True` does not "
    "work with re-entrant ones; then "
)


class StaticGraphBroken(Check):
    """static_graph=True, but the graph is not static

    ## What it finds
    A model wrapped with `static_graph=True` whose backward torch refused because the graph changed
    or because `no_sync` came first, or - without any error - whose backwards no longer communicate
    although they should. Also where every step is the same, and a part of what the forward returns
    does not reach the loss.

    ## How it knows
    torch's own errors are recorded as they come out of a forward or a backward. In every backward
    of such a model that should synchronise, the count of its group's collectives is compared before
    and after: where it stands still, nothing was averaged. What it did not reach is compared with
    what the first one reached without a gradient. The finding is proven.

    ## Why it hurts
    With the option DDP learns in the first iteration which gradients to wait for, and trusts that
    for ever. Where the graph changes, gradients are applied without being averaged; torch notices
    a step later, or not at all. That first iteration leads the backward to every output of the
    forward, also to one that the loss does not use: DDP then waits for its parameters in vain.

    ## How to fix it
    Leave `static_graph=True` out; where parameters are unused in some steps,
    `find_unused_parameters=True`, with which checkpoints need `use_reentrant=False`. With gradient
    accumulation let the first backward of the run synchronise. What never reaches the loss: freeze
    it before the wrap, or do not return it.

    ## When it stays quiet
    Graphs that are static, also with parameters that are never used, also under re-entrant
    checkpointing.
    """

    code = "DDP311"
    name = "static-graph-broken"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            seen = {r: reported for r in run.ranks.values() if (reported := _events(r, model))}
            if seen:
                yield self._report(run, model, seen)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "first-failure":
            text = str(other.evidence)
            return any(
                t in text for t in ("graph has changed", "expect_autograd_hooks", "onnection")
            )
        return other.check in (
            "gradient-drift", "parameter-drift", "unsynced-step", "unused-parameter",
            "rank-dependent-graph", "redundant-sync",
        )  # fmt: skip

    def _report(self, run: Run, model: int, seen: dict[Rank, list[Record]]) -> Finding:
        rank, events = next(iter(seen.items()))
        first, last = events[0], events[-1]
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        promised = next((e.promised for e in events if e.promised), ())
        accumulates = bool(last.unsynced) and first.kind != "changed"
        silent = max(e.silent for e in events)
        places = [("a forward under no_sync", last.unsynced_site)]
        if not promised:
            places.append(("the forward that differs", first.forward_site))
        cause, fix = (
            _beside_the_loss(rank, wrapped, promised)
            if promised
            else (ACCUMULATES if accumulates else CHANGES)
        )
        if (cause, fix) == CHANGES and any(e.nested for e in events):
            places.append(("checkpoints a part of it", last.checkpoint_site))
            fix = REENTRANT + fix
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            steps=_steps(events, silent),
            subjects=(title_of(rank, wrapped),),
            location=rank.location(wrapped.site),
            label="promises a static graph",
            related=(*models.related(rank, places), *_made(rank, wrapped, promised)),
            summary=_summary(title_of(rank, wrapped), first, silent),
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
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
    """What torch says at a forward is about the step before."""
    reported = [e.step for e in events if e.kind != "changed"]
    steps = reported or [max(0, e.step - 1) for e in events]
    first, last = min(steps), max(steps)
    return Steps(first, last, min(max(silent, 1), last - first + 1))


def _beside_the_loss(rank: Rank, wrapped: Wrapped, promised: Sequence[int]) -> tuple[str, str]:
    """Cause and help where a part of the output does not reach the loss."""
    parts = models.parts_of(wrapped, promised)
    _, inner = models.names_in_code(rank, wrapped)
    titles = some(part.title for part in parts)
    code = parts[0].code(inner)
    return (
        f"what {titles} returned does not reach the loss; in the first iteration of a static graph "
        "torch leads the backward to every output of the forward, so that DDP took it for used, "
        "and waits for its gradient since",
        f"to keep it unused, freeze it before the wrap: `{code}.requires_grad_(False)`; or let its "
        "output take part in the loss in every step; where it does in some steps only: "
        "`DDP(..., find_unused_parameters=True)` in place of `static_graph=True`",
    )


def _made(rank: Rank, wrapped: Wrapped, promised: Sequence[int]) -> Iterator[Related]:
    for part in models.parts_of(wrapped, promised)[:1]:
        if (spot := models.made_at(rank, wrapped, part)) is not None:
            yield Related("its output does not reach the loss", spot)


def _events(rank: Rank, model: int) -> list[Record]:
    wrapped = models.wrap_of(rank, model)
    if wrapped is None or len(models.members(rank, wrapped)[1]) < 2:
        return []
    return [e for e in rank.of(Record) if e.model == model]


def _summary(kind: str, first: Record, silent: int) -> str:
    if silent:
        return (
            f"{kind} is wrapped with static_graph=True, and "
            f"{silent} backward{'s' if silent > 1 else ''} that should have "
            "averaged its gradients did not communicate"
        )
    reported = "the graph changed" if first.kind == "changed" else "its own assertion failed"
    return f"{kind} is wrapped with static_graph=True, and torch says that {reported}"
