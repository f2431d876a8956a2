"""DDP406."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.replicas import uncompared
from ddpdoctor.analysis.replicas.group_findings import united
from ddpdoctor.analysis.replicas.missed_scaler_calls import MissedScalerCalls, left_out
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, by_step, replicas
from ddpdoctor.events import Loaded, ScalerStep
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Run, equal_ranks, odd_ones, ranks_do, ranks_text

_GRADIENTS = ("gradients", "local")
"""Kinds of their digests: averaged, or not."""


class GradScalerSkew(Check):
    """The loss scale of mixed precision differs between ranks, or only some skip a step

    ## What it finds
    `GradScaler`s whose scale is not the same on all ranks at the same step, steps that some ranks
    skip for infinite gradients while others take them, and calls that some ranks leave out while
    those of the others skip, so that only their scale falls.

    ## How it knows
    Every `GradScaler.step` is seen: each rank records the scale when it changes, and the steps that
    its optimizer did not take. Calls of the same number are compared between the ranks, up to the
    first that does not come after equally many averaging backwards on all of them; where the others
    skip that one, also the calls after it, by those backwards. A scale that lies on a GPU is not
    read, since the rank would have to wait for it: there, only steps that are skipped tell. The
    finding is proven.

    ## Why it hurts
    DDP averages gradients that were scaled differently: none is unscaled rightly. A step that is
    skipped on some ranks only leaves the models one update apart, for good.

    ## How to fix it
    Make the scaler with the same arguments on every rank, load its state on every rank, and call
    `step` and `update` on every rank in every step. Leave gradients alone after DDP averaged them,
    or let all ranks agree on the step that is to be skipped.

    ## When it stays quiet
    Scales that agree, steps that all ranks skip, scalers that are switched off; ranks that do not
    call `step` in the same iterations, unless the others skip there.
    """

    code = "DDP406"
    name = "grad-scaler-skew"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not run.any(ScalerStep):
            return "no GradScaler was used that is switched on"
        return None if replicas(run) else NO_COPIES

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        first: dict[tuple[int, ...], Finding] = {}
        for group in replicas(run):
            members = tuple(group.members)
            for finding in self._judge(group) if not group.left_out else ():
                if members not in first or finding.at < first[members].at:
                    first[members] = finding
        yield from united(first.items())

    def explains(self, mine: Finding, other: Finding) -> bool:
        # A rank that skips is a step behind from then on, with its schedule too.
        later = (
            "parameter-drift", "gradient-drift", "optimizer-state-drift", "buffer-drift",
            "hyperparameter-skew",
        )  # fmt: skip
        if other.check not in later:
            return False
        return not other.steps or not mine.steps or other.steps.first >= mine.steps.first

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        optimizer = {n: m.optimizer for n, m in group.members.items()}
        events = {
            n: [e for e in m.rank.of(ScalerStep) if e.optimizer in (optimizer[n], -1)]
            for n, m in group.members.items()
        }
        ends = {n: m.last_step for n, m in group.members.items()}
        for scaler in sorted({e.scaler for mine in events.values() for e in mine}):
            own = {n: [e for e in mine if e.scaler == scaler] for n, mine in events.items()}
            found = self._compare(group, own)
            if found is None and (left := left_out(own, ends)) is not None:
                found = self._left_out(group, left)
            if found is not None:
                yield found
                return

    def _left_out(self, group: Replicas, left: MissedScalerCalls) -> Finding:
        rank, call, who = group.members[left.by].rank, left.call, ranks_text(left.ranks)
        spelled = ", ".join(f"{v:g} on rank {n}" for n, v in left.scales.items())
        return self.finding(
            ranks=left.ranks,
            steps=left.steps,
            subjects=("GradScaler",),
            location=rank.location(call.site),
            label=f"left out on {who} at least once",
            summary=f"the loss scale differs between ranks from step {left.steps.first} on: "
            f"{spelled}",
            cause=f"{ranks_do(left.ranks, 'leave')} out scaler step {call.number}, which the "
            "others call and which skips for gradients that are not finite: only their scale "
            "falls, and the gradients, which DDP averages, are unscaled by unlike scales from "
            "then on",
            fix="call `scaler.step(optimizer)` and `scaler.update()` on every rank after every "
            "backward, also for a batch that is to be skipped (no early `return` or `continue` on "
            "some ranks only); let the ranks agree on what to skip: `dist.all_reduce(bad, "
            "op=dist.ReduceOp.MAX)`",
            evidence={
                "scaler_step": call.number,
                "by_rank": [{"rank": n, "scale": str(v)} for n, v in left.scales.items()],
            },
            at=rank.wall(call.at),
        )

    def _compare(self, group: Replicas, events: dict[int, list[ScalerStep]]) -> Finding | None:
        reported = {n: {e.call: e for e in mine} for n, mine in events.items()}
        last: dict[int, ScalerStep] = {}
        scales: dict[int, float | None] = dict.fromkeys(events)
        for call in sorted({call for mine in reported.values() for call in mine}):
            now = {n: mine[call] for n, mine in reported.items() if call in mine}
            last |= now
            scales |= {n: e.scale for n, e in now.items() if e.scale >= 0}
            if not _at_one_moment(last, call):
                return None  # some leave calls out: from here on they are of other iterations
            skips = {n: n in now and now[n].skipped for n in events}
            unlike = len({s for s in scales.values() if s is not None}) > 1
            if (unlike or len(set(skips.values())) > 1) and _all_came(group, events, call):
                if unlike:
                    return self._finding(group, events, call, scales, "scale")
                return self._finding(group, events, call, skips, "skip")
        return None

    def _finding(
        self,
        group: Replicas,
        events: dict[int, list[ScalerStep]],
        call: int,
        values: dict[int, float | None] | dict[int, bool],
        what: str,
    ) -> Finding:
        ranks = odd_ones(equal_ranks(values))
        own = {n: next((e for e in mine if e.call >= call), None) for n, mine in events.items()}
        number, event = next((n, e) for n, e in own.items() if e is not None and e.call == call)
        fix = "make the scaler with the same arguments on every rank and load its state_dict on "
        fix += "every rank"
        location, label = group.members[number].rank.location(event.site), "not alike on all ranks"
        related: tuple[Related, ...] = ()
        apart: tuple[int, ...] = ()
        set_by_hand: tuple[Location, tuple[int, ...]] | None = None
        if what == "scale":
            spelled = ", ".join(f"{v:g} on rank {n}" for n, v in values.items() if v is not None)
            summary = f"the loss scale differs between ranks at scaler step {call}: {spelled}"
            cause = "the scalers were made or loaded differently, or did not see the same steps"
            before = {_scale(mine, call - 1) for mine in events.values()}
            if len(before) == 1 and None not in before:
                cause = (
                    f"the scales were alike up to scaler step {call - 1}: not every rank calls "
                    "`update` after every step, or the scalers were made or loaded with another "
                    "interval or factor of growth"
                )
                fix = f"call `update` after every step on every rank; {fix}"
            set_by_hand = _set_by_hand(group, events, call)
        else:
            skipping = apart = tuple(n for n, v in values.items() if v)
            summary = f"{ranks_do(skipping, 'skip')} scaler step {call}, the others take it"
            label = f"skipped on {ranks_text(skipping)}"
            cause, fix = _infinite_on_some(group, event.step, skipping)
        if what == "scale" and set_by_hand is None and (loaded := _loaded(group, own)) is not None:
            related = (Related("steps with it", location),) if location else ()
            location, apart = loaded
            label = cause = f"{ranks_do(apart, 'load')} the scaler's state, the others do not"
        if set_by_hand is not None:
            related = (Related("steps with it", location),) if location else ()
            location, apart = set_by_hand
            alone = len(apart) < len(values)
            how = f"on {ranks_text(apart)} only" if alone else "of its own on each rank"
            label, cause = f"sets the scale {how}", f"`{event.kind}.update` is given a scale {how}"
            fix = "set the same scale on every rank, or leave it to the scaler"
        return self.finding(
            ranks=(apart if len(ranks) == len(values) else ()) or ranks,
            steps=_differing(group, events, event) if what == "scale" else Steps.of([event.step]),
            subjects=(event.kind,),
            location=location,
            label=label,
            related=related,
            summary=summary,
            cause=cause,
            fix=fix,
            evidence={
                "scaler_step": call,
                "by_rank": [{"rank": n, what: str(v)} for n, v in values.items()],
            },
            at=group.members[number].rank.wall(event.at),
        )


def _loaded(
    group: Replicas, steps: dict[int, ScalerStep | None]
) -> tuple[Location, tuple[int, ...]] | None:
    """The line that loads a scaler before these steps, and the ranks that do, if not all do."""
    loads: dict[int, list[int]] = {}
    for n, step in steps.items():
        if step is not None:
            mine = [e for e in group.members[n].rank.of(Loaded) if e.what == "scaler"]
            loads[n] = [e.site for e in mine if e.at < step.at]
    count = max(map(len, loads.values()))
    some = tuple(n for n, sites in loads.items() if sites and len(sites) == count)
    if not some or len(some) == len(loads):
        return None
    spot = group.members[some[0]].rank.location(loads[some[0]][-1])
    return None if spot is None else (spot, some)


def _infinite_on_some(group: Replicas, step: int, skipping: tuple[int, ...]) -> tuple[str, str]:
    """Why only these ranks skip, and what to do about it."""
    cause = "gradients are infinite on some ranks only: "
    made = {k for m in group.members.values() for k in _GRADIENTS if step in by_step(m, k, 1)}
    if made == {"local"}:
        return f"{cause}they were not averaged before it", (
            "average them before the step: run its backward outside of `no_sync()`, through the "
            "wrapper"
        )
    if made:
        cause += f"DDP averaged them, and they were changed after that, on {ranks_text(skipping)} "
        cause += "(to infinity or NaN) or on the others (to finite numbers)"
    else:
        cause += "they were not averaged, or were changed on some ranks after that"
    return cause, (
        "leave averaged gradients as they are, or change them on every rank alike; let the ranks "
        "agree on what to skip: `dist.all_reduce(bad, op=dist.ReduceOp.MAX)` before `scaler.step`"
    )


def _set_by_hand(
    group: Replicas, events: dict[int, list[ScalerStep]], call: int
) -> tuple[Location, tuple[int, ...]] | None:
    """The line that set the scale right before a call, and on which ranks."""
    latest = {n: [e for e in mine if e.call <= call][-1:] for n, mine in events.items()}
    found = {n: e[0].set_site for n, e in latest.items() if e and e[0].set_site >= 0}
    for number, site in found.items():
        spot = group.members[number].rank.location(site)
        if spot is not None:
            return spot, tuple(found)
    return None


def _at_one_moment(last: dict[int, ScalerStep], call: int) -> bool:
    """Whether this call comes after as many averaging backwards on all ranks."""
    counted = (e for e in last.values() if e.backwards >= 0)
    return len({e.backwards + (call - e.call) * e.each for e in counted}) < 2


def _scale(events: list[ScalerStep], call: int) -> float | None:
    """The scale in force at a call: it is told when it changes."""
    known = [e.scale for e in events if e.call <= call and e.scale >= 0]
    return known[-1] if known else None


def _differing(group: Replicas, events: dict[int, list[ScalerStep]], since: ScalerStep) -> Steps:
    """The steps from this one on at which the scales are not alike, up to the last that all took:
    one that grows sooner may be alike for a while in between."""
    later = {e.call: e.step for mine in events.values() for e in mine if e.call >= since.call}
    end = max(min(m.last_step for m in group.members.values()), since.step) + 1
    begins = sorted(later.items())
    ends = [min(step, end) for _, step in begins[1:]] + [end]
    apart = [
        (step, until)
        for (call, step), until in zip(begins, ends, strict=True)
        if step < until and len({_scale(mine, call) for mine in events.values()}) > 1
    ]
    if not apart:
        return Steps(since.step, since.step, 1)
    return Steps(apart[0][0], apart[-1][1] - 1, sum(until - step for step, until in apart))


def _all_came(group: Replicas, events: dict[int, list[ScalerStep]], call: int) -> bool:
    """Whether every rank got as far as this call (its last steps and skips say so)."""
    for number, member in group.members.items():
        before = events[number][0].step if events[number] else 0
        done = member.last_step + 1 - before
        skipped = sum(e.skipped for e in events[number])
        if done + skipped <= call:
            return False
    return True
