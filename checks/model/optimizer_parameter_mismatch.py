"""DDP307."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import ClassVar

import msgspec

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrapped_models import Reason
from ddpdoctor.events import OptimizerSeen, Ownership, StepDone, Wrapped
from ddpdoctor.report.declarations import seen, unless
from ddpdoctor.report.findings import Check, Finding, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, plural, some, title_of

MOST = 0.5
"""If the optimizer leaves out more than this share of the trained parameters, the program may mean
to train only the rest. A group that was forgotten leaves out less."""

LITTLE = 0.1
"""If the optimizer holds at most this share of a model's numbers, it may hold adapters or a prompt
on purpose."""


BUILD_LAST = "build the optimizer last, from `model.parameters()`"
ADD_THEM = (
    "add the other parameters to the optimizer; freeze what should not be trained "
    "(`requires_grad_(False)`) before the wrap"
)

REASONS = {
    "other-model": Reason(
        "the optimizer holds the parameters of another model",
        cause="{optimizer} was built from the parameters of {owner}, which another optimizer holds "
        "too, and holds none of {model}",
        fix="build it from `{wrapper}.parameters()`",
    ),
    "unfrozen-later": Reason(
        "the parameters were frozen when the optimizer was built",
        cause="{optimizer} was built while they were frozen. They were unfrozen before {model} was "
        "wrapped again, but not added to an optimizer",
        fix="add them to the optimizer when they are unfrozen "
        "(`optimizer.add_param_group({{'params': unfrozen}})`), or build a new one",
    ),
    "earlier-model": Reason(
        "the optimizer was built for an earlier model of the run",
        cause="{optimizer} was built for an earlier {model} and still holds its parameters; this "
        "model was made later, without a new optimizer",
        fix="build a new optimizer for every model, from its `model.parameters()`",
    ),
    "built-before-sharding": Reason(
        "the optimizer was built before the model was sharded",
        cause="{optimizer} was built before `{sharder}`, which replaced the parameters of "
        "{model} that the optimizer holds",
        fix=BUILD_LAST + ", after `{sharder}`",
    ),
    "built-while-gathered": Reason(
        "the optimizer holds some parameters that are not those that `fully_shard` made",
        cause="{optimizer} holds other tensors for these parameters than {model} has: it was built "
        "before `fully_shard` sharded them, or after a forward without a backward, which leaves "
        "them gathered",
        fix=BUILD_LAST + ", after the last `fully_shard` and before any forward (or after "
        "`model.reshard()`)",
    ),
    "stale-parameters": Reason(
        "the optimizer holds parameters that left the model after it was built",
        cause="{optimizer} holds parameters that {model} no longer has: the model was copied, or a "
        "layer re-created, after the optimizer was built",
        fix=BUILD_LAST,
    ),
    "mostly-frozen": Reason(
        "most parameters that the optimizer holds are frozen",
        cause="{optimizer} holds {frozen} parameters that are frozen, but not those that are "
        "trained: it was built before these were added, or before the others were frozen",
        fix=BUILD_LAST,
    ),
    "empty-group": Reason(
        "a parameter group of the optimizer is empty",
        cause="{empty} of the parameter groups of {optimizer} {are} empty: no parameter of {model} "
        "matches what the group selects (by name, say)",
        fix=ADD_THEM,
    ),
    "not-covered": Reason(
        "the optimizer's parameter groups do not cover the model",
        cause="the parameter groups of {optimizer} do not cover {model}",
        fix=ADD_THEM,
    ),
}

FLATTENS = "FullyShardedDataParallel"

REPLACED = ("built-before-sharding", "built-while-gathered", "stale-parameters")
"""Rules where the parameters that are held and not trained were those of the model before."""


class OptimizerParameterMismatch(Check):
    """The optimizer does not hold the parameters that are trained

    ## What it finds
    Parameters of a model in DDP, `fully_shard` or `FullyShardedDataParallel` that get gradients,
    but are in no optimizer and never change; and parameters in an optimizer that are not trained.
    Common reasons:

    - the optimizer was built before the model was copied or sharded, a layer re-created, or
      adapters added
    - it was kept from an earlier model of the run (another fold of a cross-validation)
    - it got the parameters of another model
    - its parameter groups do not cover the model

    For a sharded model, only if the optimizer holds parameters that are in no module.

    ## How it knows
    Before steps 0, 1, 2, 4, 8 and so on from the model's first backward (or from the first step of
    an optimizer that is made later), and after the run's first step, the parameters of the model
    that have gradients are compared with those that all optimizers hold. Parameters in no optimizer
    are digested, and torch's count of writes to them is recorded. They are reported if both are
    unchanged since the look before and the first backward, unless an optimizer holds them at the
    end. The finding is proven for the examined steps.

    ## Why it hurts
    The layer stays as it was initialised, or the optimizer updates a layer that is not used. The
    loss may still decrease, by the other layers.

    ## How to fix it
    Build the optimizer last, from `model.parameters()`, or cover the whole model with the groups.
    Freeze what should not be trained with `requires_grad_(False)` before the wrap, which also saves
    its gradients.

    ## When it stays quiet
    - Frozen parameters.
    - Several optimizers hold all parameters together, also across ranks.
    - Parameters are updated manually, or an optimizer or group is added later.

    Only a note: most of a model is left out and the rest may be intended, as it is nearest to the
    loss (only a head is trained) or at most a tenth of the model (adapters, a prompt). Not so if a
    parameter group is empty, if the optimizer holds mostly frozen parameters, or if what it leaves
    out was frozen at an earlier wrap of the model and is trained now.
    """

    code = "DDP307"
    name = "optimizer-parameter-mismatch"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = models.rules(REASONS)
    requires = (
        unless(models.needs_ddp, Ownership),
        seen(StepDone, otherwise="no optimizer step seen"),
    )

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
        chosen = _may_be_intended(wrapped, event)
        earlier = _earlier(rank, event)
        before, lasted = _successors(rank, event)
        begin = before + max(event.begun, event.since if earlier else 0, 0)
        whose = models.wrap_of(rank, event.whose)
        owner = title_of(rank, whose) if whose else ""
        wrapper = models.names_in_code(rank, wrapped)[0] if wrapped else "model"
        sharder = FLATTENS if event.module == FLATTENS else "fully_shard"
        last = max(before + lasted, *(models.steps_of(r, model) for r in seen)) - 1
        spot = rank.location(event.site)
        unfrozen = chosen and _unfrozen(rank, wrapped, event)
        rule = _rule(event, owner=bool(whose), unfrozen=unfrozen, earlier=earlier)
        gone = rule in REPLACED
        certain = event.stale or _mostly_frozen(event) or whose or unfrozen
        return self.finding(
            rule=rule,
            severity=Severity.ERROR if certain or not chosen else Severity.NOTE,
            ranks=tuple(r.rank for r in seen),
            steps=Steps(begin, last, last + 1 - begin) if last >= begin else None,
            subjects=event.missing,
            location=spot or rank.location(event.made) or rank.location(wrap_site),
            label=f"holds the parameters of {owner}" if owner else _label(event, gone=gone),
            related=models.related(
                rank,
                (
                    ("also holds them", event.other),
                    ("made here", event.made),
                    (wrapped.here if wrapped else "", wrap_site),
                ),
            ),
            summary=f"{_summary(event, kind)} {models.on_ranks(run, (r.rank for r in seen))}",
            cause=REASONS[rule].cause.format(
                optimizer=event.kind,
                model=kind,
                owner=owner,
                frozen=event.frozen,
                empty=event.empty,
                are=plural(event.empty, "is", "are"),
                sharder=sharder,
            ),
            fix=REASONS[rule].fix.format(wrapper=wrapper, sharder=sharder),
            evidence={
                "in no optimizer": len(event.missing),
                "parameters with gradients": event.trained,
                "held by the optimizer": event.held,
                "held but no longer in the model" if gone else "held but not trained": len(
                    event.stale
                ),
                "held but frozen": event.frozen,
                "empty groups": event.empty,
                "their shapes" if gone else "shapes of those not trained": list(event.stale[:8]),
            },
            at=rank.wall(event.at),
        )


def _latest(run: Run, rank: Rank, model: int) -> Ownership | None:
    """The rank's last record, without parameters that an optimizer on another rank of the group
    holds (a sharded optimizer, which is up to `parameter-drift`); None where none are missing."""
    reported = [e for e in rank.of(Ownership) if e.model == model]
    if not reported:
        return None
    elsewhere = models.held_by_others(run, rank, model) if reported[-1].missing else set()
    missing = tuple(name for name in reported[-1].missing if name not in elsewhere)
    return msgspec.structs.replace(reported[-1], missing=missing) if missing else None


def _earlier(rank: Rank, event: Ownership) -> bool:
    """Whether the optimizer had already stepped for an earlier model that the same line wrapped."""
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
    """Whether all parameters that the optimizer leaves out were frozen at an earlier wrap of the
    model, and the optimizer stepped before the last one."""
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


def _successors(rank: Rank, event: Ownership) -> tuple[int, int]:
    """Steps of the model by earlier optimizers, which the named one replaced, and steps of that
    one; (0, 0) where there are none, or where these left the parameters out, too."""
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


def _mostly_frozen(event: Ownership) -> bool:
    """Whether most parameters of the optimizer are frozen, as where adapters were added later."""
    return 2 * event.frozen > event.held


def _may_be_intended(wrapped: Wrapped | None, event: Ownership) -> bool:
    """Whether what the optimizer holds may be all that the program means to train."""
    if event.empty or not MOST * event.trained < len(event.missing) < event.trained:
        return False
    missing = set(event.missing)
    listed = wrapped.parameters if wrapped else ()
    sizes = {p.name: math.prod(p.shape) for p in listed if p.trainable and not p.ignored}
    rest = sum(size for name, size in sizes.items() if name not in missing)
    return event.outer or rest <= LITTLE * sum(sizes.values())


def _rule(event: Ownership, *, owner: bool, unfrozen: bool, earlier: bool) -> str:
    """What is certain about the parameters that it holds comes before what may be a choice."""
    if owner:
        return "other-model"
    if unfrozen:
        return "unfrozen-later"
    if earlier:
        return "earlier-model"
    if event.stale:
        part = len(event.missing) < event.trained
        sharded = "built-while-gathered" if part else "built-before-sharding"
        return sharded if event.model < 0 else "stale-parameters"
    if _mostly_frozen(event):
        return "mostly-frozen"
    return "empty-group" if event.empty else "not-covered"


def _label(event: Ownership, *, gone: bool) -> str:
    if event.stale:
        count = len(event.stale)
        held = f"holds {counted(count, 'parameter')} that {plural(count, 'is', 'are')}"
        return f"{held} no longer in the model" if gone else f"{held} not trained"
    return f"leaves out {counted(len(event.missing), 'parameter')}"


def _summary(event: Ownership, kind: str) -> str:
    count = len(event.missing)
    return (
        f"{some(event.missing)} of {kind} {plural(count, 'gets', 'get')} gradients but never "
        f"{plural(count, 'changes', 'change')} in the examined steps: no optimizer holds "
        f"{plural(count, 'it', 'them')},"
    )
