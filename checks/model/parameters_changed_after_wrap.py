"""DDP306."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import Loaded, ParametersChanged, Replica, StepDone, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, some, title_of

DONE = {
    "added": ("was added after the wrap", "the wrapper does not know what was added, and never "
              "averages its gradients"),
    "replaced": ("was replaced after the wrap", "the wrapper holds the parameter that was there "
                 "before, and never averages the gradients of the new one"),
    "unfrozen": ("was unfrozen after the wrap", "the wrapper left it out because it needed no "
                 "gradient then, and never averages its gradients"),
    "converted": ("was cast or moved after the wrap", "that gave it a new place for its gradient, "
                  "without the hook by which DDP averages it"),
    "frozen": ("was frozen after the wrap", "the wrapper still waits for its gradient, and leaves "
               "those that share its bucket as each rank computed them"),
    "tied": ("was tied to another parameter after the wrap", "the wrapper still waits for the "
             "gradient of the parameter that was there before"),
    "removed": ("was removed after the wrap", "the wrapper still waits for its gradient"),
}  # fmt: skip

WAITED_FOR = ("frozen", "tied", "removed")
"""No harm where DDP was told to look for parameters without a gradient."""


class ParametersChangedAfterWrap(Check):
    """The model was changed after it was wrapped

    ## What it finds
    Parameters that were added, replaced (a new head, an adapter), tied to others, removed, cast or
    moved (`.double()`, `.cpu()`), frozen or unfrozen after `DistributedDataParallel(model)`, once a
    backward has shown that they are trained (or, if frozen, tied or removed, waited for).

    ## How it knows
    Casts and moves are seen as they are made. Before synchronising forwards the model's parameters
    and their `requires_grad` are compared with what DDP was given: whenever some module has
    registered a parameter since, in the first forwards (128, or 3 in a model of more than 100
    parameters), and then in one of four, or of more in larger models. A change is told after the
    first backward in which what was changed has a gradient, or in which DDP waits for one that does
    not come. The finding is proven.

    ## Why it hurts
    DDP looks at the model once, in its constructor. What it does not know then is trained by each
    rank on its own, in silence; what is frozen later stops the averaging of its neighbours.

    ## How to fix it
    Change the model first, wrap it then. Where layers are unfrozen during training, wrap again at
    that point: `model = DDP(model.module)`.

    ## When it stays quiet
    `requires_grad` that is back before the next forward; a move to where the model already is; an
    optimizer built before the wrap; parameters that DDP was told to ignore; with
    `find_unused_parameters=True`, parameters that are frozen, tied or removed later.
    """

    code = "DDP306"
    name = "parameters-changed-after-wrap"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        kinds = {(e.model, e.kind) for r in run.ranks.values() for e in r.of(ParametersChanged)}
        for model, kind in sorted(kinds):
            seen = {r: e for r in run.ranks.values() if (e := _event(r, model, kind)) is not None}
            if seen:
                yield self._report(run, model, kind, seen)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "first-failure":
            return "finished reduction" in str(other.evidence)
        return other.check in (
            "unused-parameter", "rank-dependent-graph", "gradient-drift", "parameter-drift",
            "unsynced-step", "optimizer-state-drift", "model-not-wrapped",
        )  # fmt: skip

    def _report(
        self, run: Run, model: int, kind: str, seen: dict[Rank, ParametersChanged]
    ) -> Finding:
        rank, event = min(seen.items(), key=lambda item: item[1].at)
        wrapped = models.wrap_of(rank, model)
        assert wrapped is not None
        done, why = DONE[kind]
        wrapper, _ = models.names_in_code(rank, wrapped)
        title = title_of(rank, wrapped)
        every = _events(rank, model, kind)
        names = tuple(dict.fromkeys(name for e in every for name in e.names))
        spot = rank.location(_assigned(rank, event)) or rank.location(event.site)
        return self.finding(
            ranks=tuple(r.rank for r in seen),
            steps=_extent(seen),
            subjects=names,
            location=spot or rank.location(event.forward_site),
            label=done if spot else "first forward after the change",
            related=models.related(rank, ((wrapped.here, wrapped.site),)),
            summary=f"{some(names)} of {title} {_were(done, names)} "
            f"{models.on_ranks(run, (r.rank for r in seen))}",
            cause=f"DDP registered the parameters of {title} when it was wrapped: {why}",
            fix="change the model before it is wrapped, or wrap it again after the change: "
            f"`{wrapper} = DistributedDataParallel({wrapper}.module)`",
            fix_kind=FixKind.CHECK,
            evidence={
                "change": kind,
                "parameters": len(names),
                "of them with a gradient": max(e.trained for e in every),
                "the group communicated in that backward": event.communicated,
                "step": _step(rank, event),
                **({"more at step": later} if (later := _later(rank, every)) else {}),
            },
            at=rank.wall(event.at),
        )


def _assigned(rank: Rank, event: ParametersChanged) -> int:
    """The line of the load that put other parameters in the place of the model's, -1 for none."""
    loads = [e for e in rank.of(Loaded) if e.assigned and e.model == event.model]
    before = [e.site for e in loads if e.at <= event.at]
    return before[-1] if before and event.kind == "replaced" else -1


def _step(rank: Rank, event: ParametersChanged) -> int:
    """Steps of the model before it, also by optimizers whose place others have taken since: the
    event knows of living ones only."""
    taken: dict[int, list[StepDone]] = {}
    mine = {e.optimizer for e in rank.of(Replica) if e.model == event.model}
    for done in rank.of(StepDone):
        if done.optimizer in mine:
            taken.setdefault(done.optimizer, []).append(done)
    in_turn = together = 0
    for number, steps in taken.items():
        count = max((s.step + 1 for s in steps if s.at < event.at), default=0)
        others = [o for n, o in taken.items() if n != number]
        apart = all(o[0].at > steps[-1].at or o[-1].at < steps[0].at for o in others)
        if apart and steps[-1].step > 0:  # of two that step together each may step once only
            in_turn += count
        else:
            together = max(together, count)
    return max(event.step, in_turn + together)


def _extent(seen: dict[Rank, ParametersChanged]) -> Steps | None:
    """What is lost stays lost, unless something is wrapped again. Steps of several optimizers are
    counted apart, and those that follow cannot be told from one number."""
    steps = {_step(rank, event) for rank, event in seen.items()}
    for rank, event in seen.items():
        done = rank.of(StepDone)
        again = any(w.at > event.at for w in rank.of(Wrapped))
        if not again and event.kind not in WAITED_FOR and len({s.optimizer for s in done}) == 1:
            steps |= {s.step for s in done if s.step >= event.step}
    return Steps.of(steps)


def _were(done: str, names: tuple[str, ...]) -> str:
    return done.replace("was ", "were ", 1) if len(names) > 1 else done


def _later(rank: Rank, every: list[ParametersChanged]) -> list[int]:
    """Steps before which more were changed."""
    reported, found = set(every[0].names), []
    for event in every[1:]:
        if not reported.issuperset(event.names):
            found.append(_step(rank, event))
            reported.update(event.names)
    return found


def _event(rank: Rank, model: int, kind: str) -> ParametersChanged | None:
    """The first."""
    return next(iter(_events(rank, model, kind)), None)


def _events(rank: Rank, model: int, kind: str) -> list[ParametersChanged]:
    wrapped = models.wrap_of(rank, model)
    if wrapped is None or len(models.members(rank, wrapped)[1]) < 2:
        return []
    mine = (e for e in rank.of(ParametersChanged) if (e.model, e.kind) == (model, kind))
    return [e for e in mine if not (kind in WAITED_FOR and e.find_unused)]
