"""DDP406."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.replicas import uncompared
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.group_findings import united
from ddpdoctor.analysis.replicas.missed_scaler_calls import MissedScalerCalls, missed_call
from ddpdoctor.analysis.replicas.replicas import (
    Replicas,
    by_step,
    needs_copies,
    replicas,
)
from ddpdoctor.events import Loaded, ScalerStep, ShardScales
from ddpdoctor.report.declarations import COPIES_DIFFER, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, equal_ranks, odd_ones, ranks_do, ranks_text

UNEVEN = "uneven-backwards"

Events = dict[int, list[ScalerStep]]
"""Records of one scaler, by rank."""

_GRADIENTS = ("gradients", "local")
"""Kinds of digests of gradients: averaged, or not."""

MISSED_CALL = "missed-call"
SCALE_SET = "scale-set"
LOAD_ON_SOME = "load-on-some-ranks"
UNEQUAL_UPDATES = "unequal-updates"
UNEQUAL_SCALERS = "unequal-scalers"
NOT_AVERAGED = "skip-not-averaged"
CHANGED_AFTER = "skip-changed-after-averaging"
UNEQUAL_SKIPS = "unequal-skips"
OWN_SHARDS = "skip-by-own-shards"

CREATED_DIFFERENTLY = (
    "the scalers were created or loaded differently, or did not see the same steps"
)
UPDATED_DIFFERENTLY = (
    "the scales were equal up to scaler step {}: not every rank calls `update` after every step, "
    "or the scalers were created or loaded with different growth intervals or factors"
)
SAME_SCALER = (
    "create the scaler with the same arguments on every rank and load its state_dict on every rank"
)
CALL_BOTH = (
    "call `scaler.step(optimizer)` and `scaler.update()` on every rank after every backward, also "
    "for a batch that is to be skipped (no early `return` or `continue` on some ranks only)"
)
SHARDED_SCALER = (
    "use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, which lets all ranks "
    "agree on what to skip"
)
AGREE = "agree on what to skip: `dist.all_reduce(bad, op=dist.ReduceOp.MAX)`"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model that is sharded over ranks (`fully_shard`, FSDP)."""

    rank: Rank
    optimizer: int

    @property
    def last_step(self) -> int:
        """Of the optimizer, -1 where it took none."""
        return self.rank.steps_of(self.optimizer) - 1


@dataclass(frozen=True)
class Shards:
    """The parts of a model, as one optimizer trains it, by global rank."""

    members: dict[int, Shard]
    left_out: str = ""


Group = Replicas | Shards


def _of_one_model(run: Run) -> str | None:
    """Why no scalers are compared: ranks with copies or shards of one model step together."""
    return None if _shards(run) else needs_copies(run)


class GradScalerSkew(Check):
    """The loss scale of mixed precision differs between ranks, or only some ranks skip a step

    ## What it finds
    `GradScaler`s whose scale differs between ranks at the same step; steps that some ranks skip for
    infinite gradients and others take; `scaler.step` calls that some ranks omit while those of the
    others skip, so that only the others' scale falls.

    This also holds for the shards of one model (`fully_shard`, `FullyShardedDataParallel`), which
    all ranks must step or skip together.

    ## How it knows
    Each rank records every `GradScaler.step` whose scale changed and every step it skipped. Calls
    with the same number are compared between ranks, as long as all ranks run equally many
    synchronised backwards before them; if the others skip that call, also the calls after it,
    matched by backwards. A scale on a GPU is not read, since reading it would block: there only
    skipped steps are compared. A difference proves the fault.

    ## Why it hurts
    DDP averages gradients that were scaled differently, so that unscaling is wrong on every rank. A
    step skipped on some ranks only leaves the models one update apart, for good.

    ## How to fix it
    Create the scaler with the same arguments on every rank, load its state on every rank, and call
    `step` and `update` on every rank in every step. Do not modify gradients after DDP averaged
    them, or let all ranks agree on the step to skip.

    ## When it stays quiet
    - Equal scales, steps that all ranks skip, disabled scalers.
    - Ranks that do not call `step` in the same iterations, unless the others skip there.
    """

    code = "DDP406"
    name = "grad-scaler-skew"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        MISSED_CALL: "some ranks omit a call of `scaler.step` that skips on the others",
        SCALE_SET: "the program sets the scale, not the same on all ranks",
        LOAD_ON_SOME: "some ranks load the scaler's state, the others do not",
        UNEQUAL_UPDATES: "the scales were equal before, and have been updated differently",
        UNEQUAL_SCALERS: "the scales differ from the first comparison on",
        NOT_AVERAGED: "some ranks skip a step whose gradients were not averaged",
        CHANGED_AFTER: "some ranks skip a step whose gradients were changed after DDP's average",
        OWN_SHARDS: "some ranks skip a step of a sharded model: each judges by its own shards",
        UNEQUAL_SKIPS: "some ranks skip a step; whether its gradients were averaged is not known",
    }
    requires = (seen(ScalerStep, otherwise="no enabled GradScaler was used"), _of_one_model)
    effects = (
        # A rank that skips is one step behind from then on, and so is its schedule.
        Effect((*COPIES_DIFFER, "hyperparameter-skew"), when=(When.STEP_NOT_BEFORE,)),
        # Skipped steps are none: their backwards count for the step that follows.
        Effect(("unsynced-step",), rules=(UNEVEN,), when=(When.STEP_NOT_BEFORE,)),
        # Shards are unscaled by scales of their own.
        Effect(("clip-before-sync",), of=(OWN_SHARDS, UNEQUAL_UPDATES, UNEQUAL_SCALERS)),
    )

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        first: dict[tuple[int, ...], Finding] = {}
        groups: list[Group] = [*replicas(run), *_shards(run)]
        for group in groups:
            members = tuple(group.members)
            for finding in self._judge(group) if not group.left_out else ():
                if members not in first or finding.at < first[members].at:
                    first[members] = finding
        yield from united(first.items())

    def _judge(self, group: Group) -> Iterator[Finding]:
        optimizer = {n: m.optimizer for n, m in group.members.items()}
        events = {
            n: [e for e in m.rank.of(ScalerStep) if e.optimizer in (optimizer[n], -1)]
            for n, m in group.members.items()
        }
        ends = {n: m.last_step for n, m in group.members.items()}
        for scaler in sorted({e.scaler for mine in events.values() for e in mine}):
            own = {n: [e for e in mine if e.scaler == scaler] for n, mine in events.items()}
            found = self._compare(group, own)
            if found is None and (missed := missed_call(own, ends)) is not None:
                found = self._missed_call(group, missed)
            if found is not None:
                yield found
                return

    def _missed_call(self, group: Group, missed: MissedScalerCalls) -> Finding:
        rank, call = group.members[missed.by].rank, missed.call
        return self.finding(
            rule=MISSED_CALL,
            ranks=missed.ranks,
            steps=missed.steps,
            subjects=("GradScaler",),
            location=rank.location(call.site),
            label="omitted at least once, on some ranks only",
            summary=f"the loss scale differs between ranks from step {missed.steps.first} on: "
            f"{_scales(missed.scales)}",
            cause=f"{ranks_do(missed.ranks, 'omit')} scaler step {call.number}, which the other "
            "ranks call and which skips for non-finite gradients: only their scale falls, and the "
            "gradients, which DDP averages, are unscaled by different scales from then on",
            fix=f"{CALL_BOTH}; let the ranks {AGREE}",
            evidence={
                "scaler_step": call.number,
                "by_rank": [{"rank": n, "scale": str(v)} for n, v in missed.scales.items()],
            },
            at=rank.wall(call.at),
        )

    def _compare(self, group: Group, events: Events) -> Finding | None:
        """The first call at which scales, or skips, differ."""
        reported = {n: {e.call: e for e in mine} for n, mine in events.items()}
        last: dict[int, ScalerStep] = {}
        scales: dict[int, float | None] = dict.fromkeys(events)
        for call in sorted({call for mine in reported.values() for call in mine}):
            now = {n: mine[call] for n, mine in reported.items() if call in mine}
            last |= now
            scales |= {n: e.scale for n, e in now.items() if e.scale >= 0}
            if not _at_one_moment(last, call):
                return None  # some ranks omit calls: from here on, numbers of calls do not match
            skips = {n: n in now and now[n].skipped for n in events}
            differ = len({s for s in scales.values() if s is not None}) > 1
            if (differ or len(set(skips.values())) > 1) and _all_came(group, events, call):
                if differ:
                    return self._unequal_scales(group, events, call, scales)
                return self._unequal_skips(group, events, call, skips)
        return None

    def _unequal_scales(
        self, group: Group, events: Events, call: int, scales: dict[int, float | None]
    ) -> Finding:
        number, event = next((n, e) for n, m in events.items() for e in m if e.call == call)
        stepped = group.members[number].rank.location(event.site)
        cause = (
            _set_by_program(group, events, call)
            or _loaded(group, events, call)
            or _updated_differently(events, call, stepped)
        )
        minority = odd_ones(equal_ranks(scales))
        elsewhere = stepped is not None and cause.rule in (SCALE_SET, LOAD_ON_SOME)
        return self.finding(
            rule=cause.rule,
            ranks=(cause.ranks if len(minority) == len(scales) else ()) or minority,
            steps=_differing(group, events, event),
            subjects=(event.kind,),
            location=cause.location,
            label=cause.label,
            related=(Related("the scaler steps here", stepped),) if stepped and elsewhere else (),
            summary=f"the loss scale differs between ranks at scaler step {call}: "
            f"{_scales(scales)}",
            cause=cause.text,
            fix=cause.fix,
            evidence={
                "scaler_step": call,
                "by_rank": [{"rank": n, "scale": str(v)} for n, v in scales.items()],
            },
            at=group.members[number].rank.wall(event.at),
        )

    def _unequal_skips(
        self, group: Group, events: Events, call: int, skips: dict[int, bool]
    ) -> Finding:
        number, event = next((n, e) for n, m in events.items() for e in m if e.call == call)
        skipping = tuple(n for n, skipped in skips.items() if skipped)
        minority = odd_ones(equal_ranks(skips))
        rule, cause, fix = _infinite_on_some(group, event.step, skipping)
        return self.finding(
            rule=rule,
            ranks=(skipping if len(minority) == len(skips) else ()) or minority,
            steps=Steps.of([event.step]),
            subjects=(event.kind,),
            location=group.members[number].rank.location(event.site),
            label="skipped on some ranks only",
            summary=f"{ranks_do(skipping, 'skip')} scaler step {call}, the other ranks take it",
            cause=cause,
            fix=fix,
            evidence={
                "scaler_step": call,
                "by_rank": [{"rank": n, "skip": str(v)} for n, v in skips.items()],
            },
            at=group.members[number].rank.wall(event.at),
        )


def _shards(run: Run) -> list[Shards]:
    """Models whose parameters are sharded over ranks, as their optimizers train them."""
    found: dict[tuple[tuple[int, ...], int], dict[int, Shard]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(ShardScales):
            if number in event.ranks:
                mine = found.setdefault((event.ranks, event.optimizer), {})
                mine[number] = Shard(rank, event.optimizer)
    return [Shards(members) for members in found.values() if len(members) > 1]


def _scales(scales: Mapping[int, float | None]) -> str:
    """`16 on rank 0, 32 on rank 1`."""
    return ", ".join(f"{v:g} on rank {n}" for n, v in scales.items() if v is not None)


def _set_by_program(group: Group, events: Events, call: int) -> Cause | None:
    """A line sets the scale right before the call, on some ranks or differently."""
    latest = {n: [e for e in mine if e.call <= call][-1:] for n, mine in events.items()}
    found = {n: e[0] for n, e in latest.items() if e and e[0].set_site >= 0}
    spots = (group.members[n].rank.location(e.set_site) for n, e in found.items())
    spot = next((spot for spot in spots if spot is not None), None)
    if spot is None:
        return None
    kind, alone = next(iter(found.values())).kind, len(found) < len(events)
    how = f"on {ranks_text(found)} only" if alone else "different on each rank"
    return Cause(
        SCALE_SET,
        text=f"`{kind}.update` is called with a scale {how}",
        fix="set the same scale on every rank, or leave it to the scaler",
        label=f"sets the scale {'on some ranks only' if alone else 'differently on each rank'}",
        location=spot,
        ranks=tuple(found),
    )


def _loaded(group: Group, events: Events, call: int) -> Cause | None:
    """Some ranks load a scaler's state before the call, the others do not."""
    loads: dict[int, list[int]] = {}
    for n, mine in events.items():
        if (step := next((e for e in mine if e.call >= call), None)) is not None:
            every = (e for e in group.members[n].rank.of(Loaded) if e.what == "scaler")
            loads[n] = [e.site for e in every if e.at < step.at]
    count = max(map(len, loads.values()))
    some = tuple(n for n, sites in loads.items() if sites and len(sites) == count)
    if not some or len(some) == len(loads):
        return None
    spot = group.members[some[0]].rank.location(loads[some[0]][-1])
    text = f"{ranks_do(some, 'load')} the scaler's state, the other ranks do not"
    label = "loads the scaler's state on some ranks only"
    return Cause(LOAD_ON_SOME, text, SAME_SCALER, label, spot, some) if spot else None


def _updated_differently(events: Events, call: int, stepped: Location | None) -> Cause:
    """No line is known: what tells is whether the scales were equal before."""
    before = {_scale(mine, call - 1) for mine in events.values()}
    rule, text, fix = UNEQUAL_SCALERS, CREATED_DIFFERENTLY, SAME_SCALER
    if len(before) == 1 and None not in before:
        rule, text = UNEQUAL_UPDATES, UPDATED_DIFFERENTLY.format(call - 1)
        fix = f"call `update` after every step on every rank; {fix}"
    return Cause(rule, text, fix, "the scale differs between ranks", stepped)


def _infinite_on_some(group: Group, step: int, skipping: tuple[int, ...]) -> tuple[str, str, str]:
    """Why only these ranks skip, and what to do about it: the rule, the cause and the fix."""
    cause = "gradients are infinite on some ranks only: "
    if isinstance(group, Shards):
        cause += "each rank has its own shards of the averaged gradients, and looks for infinity "
        cause += "in these only"
        return OWN_SHARDS, cause, SHARDED_SCALER
    kinds = {k for m in group.members.values() for k in _GRADIENTS if step in by_step(m, k, 1)}
    if kinds == {"local"}:
        fix = "average them before the step: run backward outside `no_sync()`, through the wrapper"
        return NOT_AVERAGED, f"{cause}they were not averaged before the step", fix
    fix = f"do not modify averaged gradients, or do so on every rank; let the ranks {AGREE} before "
    fix += "`scaler.step`"
    if kinds:
        cause += f"DDP averaged them, and they were modified after that, on {ranks_text(skipping)} "
        cause += "(to infinity or NaN) or on the others (to finite values)"
        return CHANGED_AFTER, cause, fix
    cause += "they were not averaged, or were modified on some ranks after that"
    return UNEQUAL_SKIPS, cause, fix


def _at_one_moment(last: dict[int, ScalerStep], call: int) -> bool:
    """Whether this call comes after equally many synchronised backwards on all ranks."""
    counted = (e for e in last.values() if e.backwards >= 0)
    return len({e.backwards + (call - e.call) * e.each for e in counted}) < 2


def _scale(events: list[ScalerStep], call: int) -> float | None:
    """The scale at a call: it is recorded when it changes."""
    known = [e.scale for e in events if e.call <= call and e.scale >= 0]
    return known[-1] if known else None


def _differing(group: Group, events: Events, since: ScalerStep) -> Steps:
    """The steps from `since` on at which the scales differ, up to the last that all ranks took. A
    scale that grows sooner may be equal for a while in between."""
    later = {e.call: e.step for mine in events.values() for e in mine if e.call >= since.call}
    end = max(min(m.last_step for m in group.members.values()), since.step) + 1
    begins = sorted(later.items())
    ends = [min(step, end) for _, step in begins[1:]] + [end]
    spans = [
        range(step, until)
        for (call, step), until in zip(begins, ends, strict=True)
        if step < until and len({_scale(mine, call) for mine in events.values()}) > 1
    ]
    if not spans:
        return Steps(since.step, since.step, 1)
    return Steps(spans[0].start, spans[-1].stop - 1, sum(map(len, spans)))


def _all_came(group: Group, events: Events, call: int) -> bool:
    """Whether every rank got as far as this call, as its last steps and skips tell."""
    for number, member in group.members.items():
        before = events[number][0].step if events[number] else 0
        done = member.last_step + 1 - before
        skipped = sum(e.skipped for e in events[number])
        if done + skipped <= call:
            return False
    return True
