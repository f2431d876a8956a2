"""DDP307."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

import msgspec

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import OptimizerSeen, Ownership, StepDone, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, some, title_of

MOST = 0.5
"""Where more than this share is left out, the rest may be meant to stay as it is."""

LITTLE = 0.1
"""Where the optimizer holds no more than this share of a model's numbers, what it holds may be
adapters or a prompt."""


class OptimizerParameterMismatch(Check):
    """The optimizer does not hold the parameters that are trained

    ## What it finds
    Parameters of a wrapped model, or of one that `fully_shard` was applied to, that get gradients,
    that are in no optimizer and that nothing changes; and beside them parameters in an optimizer
    that are not trained. The usual ways: the optimizer was built before the model was copied or
    sharded, a layer re-created or adapters put in, it was kept from an earlier model of the run
    (another fold of a cross-validation), it was given the parameters of another model, or the
    parameter groups forgot a part. (Of a sharded model it is told only where the optimizer holds
    parameters that are in no module any more.)

    ## How it knows
    Before steps 0, 1, 2, 4, 8 and so on from the model's first backward, or from the first step of
    an optimizer that is made later, and after the run's first one, the parameters of the model that
    have gradients are compared with those that all optimizers hold. Of those in none a digest and
    torch's count of writes are taken; they are told where both are still what they were at the look
    before and after the first backward, and forgiven where an optimizer holds them in the end. The
    finding is proven for the steps that were looked at.

    ## Why it hurts
    The layer stays as it was initialised, or the optimizer polishes a layer that is not used. The
    loss may still go down, by the rest.

    ## How to fix it
    Build the optimizer last, from `model.parameters()`, or let the groups cover all of it. What is
    to stay as it is: `requires_grad_(False)` before the wrap, which also saves its gradients.

    ## When it stays quiet
    Frozen parameters; several optimizers that together hold all, be it on several ranks;
    parameters that are updated by hand; an optimizer or group that is added later. It is a note
    where most of a model is left out and the rest looks chosen: it is what is nearest to the loss
    (only a head is trained), or no more than a tenth of the model (adapters, a prompt). That does
    not count where a parameter group is empty, what the optimizer holds is mostly frozen, or what
    it leaves out was frozen at an earlier wrap of the model and is not now.
    """

    code = "DDP307"
    name = "optimizer-parameter-mismatch"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not models.numbers(run) and not run.any(Ownership):
            return models.NO_DDP
        return None if run.training_ranks() else "no optimizer step seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        sharded = {e.model for r in run.ranks.values() for e in r.of(Ownership) if e.model < 0}
        for model in [*models.numbers(run), *sorted(sharded, reverse=True)]:
            seen = {r: e for r in run.ranks.values() if (e := _latest(run, r, model)) is not None}
            if seen:
                yield self._report(run, model, seen)

    def _report(self, run: Run, model: int, seen: dict[Rank, Ownership]) -> Finding:
        rank, event = next(iter(seen.items()))
        wrapped = models.wrap_of(rank, model)
        kind = title_of(rank, wrapped) if wrapped else event.module
        wrap_site = wrapped.site if wrapped else -1
        chosen = _chosen(wrapped, event)
        old = _before_they_were_made(event)
        earlier = _earlier(rank, event)
        thawed = chosen and _unfrozen(rank, wrapped, event)
        before, lasted = _in_place_of_another(rank, event)
        begin = before + max(event.begun, event.since if earlier else 0, 0)
        whose = models.wrap_of(rank, event.whose)
        owner = title_of(rank, whose) if whose else ""
        last = max(before + lasted, *(models.steps_of(r, model) for r in seen)) - 1
        spot = rank.location(event.site)
        return self.finding(
            severity=Severity.ERROR
            if event.stale or old or owner or thawed or not chosen
            else Severity.NOTE,
            ranks=tuple(r.rank for r in seen),
            steps=Steps(begin, last, last + 1 - begin) if last >= begin else None,
            subjects=event.missing,
            location=spot or rank.location(event.made) or rank.location(wrap_site),
            label=f"holds the parameters of {owner}" if owner else _label(event),
            related=models.related(
                rank,
                (
                    ("holds them too", event.other),
                    ("made here", event.made),
                    (wrapped.here if wrapped else "", wrap_site),
                ),
            ),
            summary=f"{_summary(event, kind)} {models.on_ranks(run, (r.rank for r in seen))}",
            cause=f"{event.kind} was built while they were frozen: they were unfrozen before "
            f"{kind} was wrapped again, and no optimizer was given them"
            if thawed
            else _cause(event, kind, earlier, owner),
            fix=f"build it from `{models.names_in_code(rank, wrapped)[0]}.parameters()`"
            if owner and wrapped
            else "give the optimizer what is unfrozen: `optimizer.add_param_group({'params': "
            "unfrozen})`, or build it anew then"
            if thawed
            else "make the optimizer anew for every model, from its `model.parameters()`"
            if earlier
            else "build the optimizer last, from `model.parameters()`"
            + ("" if wrapped else ", after `fully_shard`")
            if event.stale or old
            else "give the optimizer the rest of the parameters; what is to stay as it is: "
            "`requires_grad_(False)` before the wrap",
            fix_kind=FixKind.CHECK,
            evidence={
                "in no optimizer": len(event.missing),
                "parameters with gradients": event.trained,
                "held by the optimizer": event.held,
                "of these not trained": len(event.stale),
                "of these frozen": event.frozen,
                "empty groups": event.empty,
                "their shapes": list(event.stale[:8]),
            },
            at=rank.wall(event.at),
        )


def _latest(run: Run, rank: Rank, model: int) -> Ownership | None:
    """What holds at the end, without what the optimizer of another rank of the group holds: it is
    sharded, and `parameter-drift` tells what does not come back."""
    reported = [e for e in rank.of(Ownership) if e.model == model]
    if not reported:
        return None
    elsewhere = models.held_by_others(run, rank, model) if reported[-1].missing else set()
    missing = tuple(name for name in reported[-1].missing if name not in elsewhere)
    return msgspec.structs.replace(reported[-1], missing=missing) if missing else None


def _earlier(rank: Rank, event: Ownership) -> bool:
    """Whether the optimizer had stepped before, for one that the same line wrapped then."""
    if event.since <= 0:
        return False
    mine = models.wrap_of(rank, event.model)
    made = [o for o in rank.of(OptimizerSeen) if o.site == event.site >= 0]
    return mine is not None and any(
        before is not None and before.site == mine.site and number < event.model
        for optimizer in made
        if event.model not in optimizer.models
        for number in optimizer.models
        if (before := models.wrap_of(rank, number))
    )


def _unfrozen(rank: Rank, wrapped: Wrapped | None, event: Ownership) -> bool:
    """Whether an earlier wrap of the model found frozen all that the optimizer, which stepped
    before this one, leaves out."""
    if wrapped is None:
        return False
    made = [o.at for o in rank.of(OptimizerSeen) if o.site == event.site >= 0]
    names = [(p.name, p.shape) for p in wrapped.parameters]
    return (
        bool(made)
        and min(made) < wrapped.at
        and any(
            set(event.missing) <= {p.name for p in before.parameters if not p.trainable}
            for before in rank.of(Wrapped)
            if before.at < wrapped.at and before.kind == wrapped.kind
            if [(p.name, p.shape) for p in before.parameters] == names
        )
    )


def _in_place_of_another(rank: Rank, event: Ownership) -> tuple[int, int]:
    """The steps that other optimizers took of the model, one after the other, before the one that
    is named began and left the parameters out, and the steps of that; (0, 0) where none did."""
    seen = list(rank.of(OptimizerSeen))
    named = next((o for o in reversed(seen) if o.site == event.site >= 0), None)
    if named is None:
        return 0, 0
    others = {o.optimizer for o in seen if event.model in o.models} - {named.optimizer}
    steps = [e for e in rank.of(StepDone) if e.optimizer in others]
    turns = [number for number, _ in groupby(e.optimizer for e in steps)]
    reported = [e for e in rank.of(Ownership) if e.model == event.model and e.at < named.at]
    lacked = any(not set(event.missing).isdisjoint(e.missing) for e in reported)
    if lacked or len(turns) > len(others) or any(e.at > named.at for e in steps):
        return 0, 0
    return sum(e.count for e in steps), rank.steps_of(named.optimizer) if steps else 0


def _before_they_were_made(event: Ownership) -> bool:
    """Whether it holds hardly anything but what was frozen since, as where adapters came later."""
    return 2 * event.frozen > event.held


def _chosen(wrapped: Wrapped | None, event: Ownership) -> bool:
    """Whether what the optimizer holds may be all that the program means to train."""
    if event.empty or not MOST * event.trained < len(event.missing) < event.trained:
        return False
    missing = set(event.missing)
    listed = wrapped.parameters if wrapped else ()
    sizes = {p.name: math.prod(p.shape) for p in listed if p.trainable and not p.ignored}
    rest = sum(size for name, size in sizes.items() if name not in missing)
    return event.outer or rest <= LITTLE * sum(sizes.values())


def _label(event: Ownership) -> str:
    if event.stale:
        count = len(event.stale)
        return f"holds {count} parameter{'s' * (count > 1)} that {_are(count)} not trained"
    return f"leaves out {len(event.missing)} parameter{'s' * (len(event.missing) > 1)}"


def _are(count: int) -> str:
    return "are" if count > 1 else "is"


def _summary(event: Ownership, kind: str) -> str:
    names = f"{some(event.missing)} of {kind}"
    text = f"{names} got gradients in every step looked at and never changed: no optimizer holds"
    return f"{text} {'them' if len(event.missing) > 1 else 'it'},"


def _cause(event: Ownership, kind: str, earlier: bool, owner: str) -> str:
    if owner:
        return (
            f"{event.kind} was built from the parameters of {owner}, which another optimizer holds "
            f"too, and of {kind} it holds none"
        )
    if earlier:
        return (
            f"{event.kind} was made for an earlier {kind}, whose parameters it still holds; this "
            "one was made later, and no optimizer with it"
        )
    if event.stale and event.model < 0:
        return (
            f"{event.kind} was built before `fully_shard`, which put sharded parameters into "
            f"{kind} in the place of those that the optimizer holds"
        )
    if event.stale:
        return (
            f"{event.kind} was built from parameters that are no longer those of {kind}: the model "
            "was copied, or a layer re-created, after the optimizer was made"
        )
    if _before_they_were_made(event):
        return (
            f"{event.kind} holds {event.frozen} parameters that are frozen, and not those that are "
            "trained in their place: it was built before these were made, or these frozen"
        )
    if event.empty:
        return (
            f"{event.empty} of the parameter groups of {event.kind} {_are(event.empty)} empty: "
            f"nothing in {kind} is what the group was to pick, such as by its name"
        )
    return f"the parameter groups of {event.kind} do not cover {kind}"
