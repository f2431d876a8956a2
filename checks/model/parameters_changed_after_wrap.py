"""DDP306."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import Loaded, ParametersChanged, Replica, StepDone, Wrapped
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run, plural, some, title_of


class Change(NamedTuple):
    """A kind of change after the wrap: what was done to parameters, and what DDP does then."""

    done: str
    effect: str


CHANGES = {
    "added": Change("added", "never averages gradients of parameters that are added later"),
    "replaced": Change(
        "replaced", "still holds the old parameters, and never averages gradients of the new ones"
    ),
    "unfrozen": Change(
        "unfrozen", "skips parameters that are frozen then, and never averages their gradients"
    ),
    "converted": Change(
        "cast or moved",
        "loses the hooks through which it averages gradients when parameters are cast or moved",
    ),
    "frozen": Change(
        "frozen",
        "still waits for gradients of parameters that are frozen later, and does not average those "
        "in the same bucket",
    ),
    "tied": Change(
        "tied to others", "still waits for gradients of the parameters that were there before"
    ),
    "removed": Change("removed", "still waits for gradients of parameters that are removed later"),
}
"""By `ParametersChanged.kind`, which is also the rule."""

WAITED_FOR = ("frozen", "tied", "removed")
"""Changes that are harmless with `find_unused_parameters=True`."""


class ParametersChangedAfterWrap(Check):
    """The model was changed after it was wrapped

    ## What it finds
    Parameters that were added, replaced (a new head, an adapter), tied to others, removed, cast or
    moved (`.double()`, `.cpu()`), frozen or unfrozen after `DistributedDataParallel(model)`, once a
    backward shows that they are trained (or, if frozen, tied or removed, that DDP waits for them).

    ## How it knows
    Casts and moves are recorded when they are made. Before synchronising forwards, the model's
    parameters and their `requires_grad` are compared with those that DDP got: whenever a module has
    registered a parameter since, in the first forwards (128, or 3 in a model of more than 100
    parameters), and then in every fourth, or fewer in larger models. A change is reported after the
    first backward in which the changed parameter has a gradient, or in which DDP waits for one that
    does not come. The finding is proven.

    ## Why it hurts
    DDP inspects the model once, in its constructor. What is added later, each rank trains on its
    own, without an error; what is frozen later keeps other gradients from being averaged.

    ## How to fix it
    Change the model first, then wrap it. If layers are unfrozen during training, wrap again at that
    point: `model = DDP(model.module)`.

    ## When it stays quiet
    - `requires_grad` is restored before the next forward.
    - The model is moved to where it already is.
    - The optimizer is built before the wrap.
    - DDP ignores the parameters (`_ddp_params_and_buffers_to_ignore`).
    - Parameters that are frozen for some steps and thawed again (see `unused-parameter`).
    - With `find_unused_parameters=True`: parameters that are frozen, tied or removed later.
    """

    code = "DDP306"
    name = "parameters-changed-after-wrap"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        kind: f"parameters were {change.done} after the wrap" for kind, change in CHANGES.items()
    }
    requires = (models.needs_ddp,)
    effects = (
        Effect(("first-failure",), errors=(ErrorKind.REDUCTION_UNFINISHED,)),
        Effect(
            (
                *NOT_AVERAGED,
                "unused-parameter",
                "rank-dependent-graph",
                "optimizer-state-drift",
                "model-not-wrapped",
            )
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        kinds = {e.kind for r in run.ranks.values() for e in r.of(ParametersChanged)}
        for kind in sorted(kinds):
            for seen in models.seen(run, partial(_events, kind)):
                yield self._report(kind, seen)

    def _report(self, kind: str, seen: models.Seen[ParametersChanged]) -> Finding:
        rank, every = min(seen.records.items(), key=lambda item: item[1][0].at)
        event, wrapped = every[0], models.wrap_of(rank, seen.model)
        assert wrapped is not None
        change = CHANGES[kind]
        wrapper, _ = models.names_in_code(rank, wrapped)
        title = title_of(rank, wrapped)
        names = tuple(dict.fromkeys(name for e in every for name in e.names))
        spot = rank.location(_assigned(rank, event)) or rank.location(event.site)
        return self.finding(
            rule=kind,
            ranks=seen.ranks,
            steps=_extent({r: events[0] for r, events in seen.records.items()}),
            subjects=names,
            location=spot or rank.location(event.forward_site),
            label=f"{change.done} after the wrap" if spot else "first forward after the change",
            related=models.related(rank, ((wrapped.here, wrapped.site),)),
            summary=f"{some(names)} of {title} {plural(len(names), 'was', 'were')} {change.done} "
            f"after the wrap {seen.where}",
            cause=f"DDP registers the parameters of {title} when it is wrapped; it {change.effect}",
            fix=_fix(kind, wrapper, wrapped.by),
            evidence={
                "change": kind,
                "parameters": len(names),
                "with a gradient": max(e.trained for e in every),
                "the group communicated in that backward": event.communicated,
                "step": _step(rank, event),
                **({"more changes at step": later} if (later := _later(rank, every)) else {}),
            },
            at=rank.wall(event.at),
        )


def _fix(kind: str, wrapper: str, by: str) -> str:
    """What to do; by: the module of a framework that wrapped the model, which cannot be told to do
    so again."""
    still = (
        "let the parameters require gradients when the model is wrapped, and give them a learning "
        "rate of 0 until they are to be trained"
    )
    again = (
        "change the model before the wrap, or wrap it again after the change: "
        f"`{wrapper} = DistributedDataParallel({wrapper}.module)`"
    )
    if kind != "unfrozen":
        return "change the model before it is wrapped" if by else again
    return still if by else f"{again}; or {still}"


def _assigned(rank: Rank, event: ParametersChanged) -> int:
    """Site of `load_state_dict(assign=True)` that replaced the model's parameters, -1 for none."""
    loads = [e for e in rank.of(Loaded) if e.assigned and e.model == event.model]
    before = [e.site for e in loads if e.at <= event.at]
    return before[-1] if before and event.kind == "replaced" else -1


def _step(rank: Rank, event: ParametersChanged) -> int:
    """Steps of the model before the change. The event counts those of existing optimizers; this
    adds the steps of optimizers that others have replaced."""
    taken: dict[int, list[StepDone]] = {}
    mine = {e.optimizer for e in rank.of(Replica) if e.model == event.model}
    for done in rank.of(StepDone):
        if done.optimizer in mine:
            taken.setdefault(done.optimizer, []).append(done)
    in_turn = together = 0
    for number, steps in taken.items():
        count = max((s.step + 1 for s in steps if s.at < event.at), default=0)
        others = [o for n, o in taken.items() if n != number]
        separate = all(o[0].at > steps[-1].at or o[-1].at < steps[0].at for o in others)
        # Of two that step together, each may have taken one step only: then they look separate.
        if separate and steps[-1].step > 0:
            in_turn += count
        else:
            together = max(together, count)
    return max(event.step, in_turn + together)


def _extent(seen: dict[Rank, ParametersChanged]) -> Steps | None:
    """The steps with wrong gradients: all from the change on, unless a model is wrapped again. With
    several optimizers, which count their steps separately, only the first is known."""
    steps = {_step(rank, event) for rank, event in seen.items()}
    for rank, event in seen.items():
        done = rank.of(StepDone)
        again = any(w.at > event.at for w in rank.of(Wrapped))
        if not again and event.kind not in WAITED_FOR and len({s.optimizer for s in done}) == 1:
            steps |= {s.step for s in done if s.step >= event.step}
    return Steps.of(steps)


def _later(rank: Rank, every: list[ParametersChanged]) -> list[int]:
    """Steps before which more parameters were changed in the same way."""
    reported, found = set(every[0].names), []
    for event in every[1:]:
        if not reported.issuperset(event.names):
            found.append(_step(rank, event))
            reported.update(event.names)
    return found


def _events(kind: str, rank: Rank, wrapped: Wrapped) -> list[ParametersChanged]:
    """The changes of a kind that affect DDP; parameters that are frozen for some steps only are for
    `unused-parameter` to tell."""
    mine = (e for e in rank.of(ParametersChanged) if (e.model, e.kind) == (wrapped.model, kind))
    thawed = set(models.names_of(wrapped, models.thawed(rank, wrapped.model)))
    return [
        e
        for e in mine
        if not (kind in WAITED_FOR and e.find_unused)
        and not (kind == "frozen" and thawed.issuperset(e.names))
    ]
