"""DDP409."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.manual_sync.averaged_gradients import by_hand
from ddpdoctor.analysis.replicas import uncompared
from ddpdoctor.analysis.replicas.divergence_window import own_step
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, replicas
from ddpdoctor.events import Averaged, Edited, GradientReduced, LossScaled
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Run

LOOKED_AT = 20
"""Steps, the first ones or after a reduction, in all of which gradients are looked at."""

SEVERAL = 0.0
"""Not all gradients were multiplied by one number."""


class DoubleAveraging(Check):
    """Gradients are averaged twice

    ## What it finds
    A loss divided by the world size, or by a product that holds it, before its backward, gradients
    divided by it by hand, or gradients (or copies of them) all-reduced by hand, although DDP has
    averaged them already. Without a wrapper: gradients that the program exchanges by hand and whose
    mean it divides once more, or of a loss that was divided before.

    ## How it knows
    In the first six backwards of a line, then in one of 17 and wherever the loss is made in a new
    way, the last twelve nodes of its graph are searched for a division by the world size or a
    multiple; where there is one, torch is made to note the lines in a forward that follows. Between
    the averaging backward and the step some values of up to six gradients on the CPU are compared
    (in the first 64 steps, later in one of about 110 and as `--budget` allows), without what
    torch's clipping makes of them, and what the program hands to collectives with the gradients;
    without a wrapper, in four steps, what is applied with the mean of what the ranks had. A
    division counts only where its line names the world size, or a name that is given a quotient or
    a product with it in one place of that file: another 2 does not. By a product it counts where
    the loss is a mean, or a sum divided by the world size times what it is over. The finding is
    proven. An all-reduce by hand is an error where the gradients become so many times larger as
    ranks are summed; where something else multiplies them besides, that it is superfluous is all
    that is said.

    ## Why it hurts
    The effective learning rate is the world size times too small (or, with a sum, too large) and
    changes with the number of ranks. All-reduces that change nothing still cost their time.

    ## How to fix it
    Leave averaging to DDP: compute the mean over the local batch, call backward, step. For logging,
    reduce `loss.detach().clone()`.

    ## When it stays quiet
    Division by the number of accumulation steps; losses that are reduced for the log only;
    `loss *= world_size` where a sum over ranks is wanted; gradients of models that DDP does not
    average, or not in this backward (`no_sync`), or by a communication hook that is not torch's.
    """

    code = "DDP409"
    name = "double-averaging"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not (replicas(run) or run.any(Averaged)):
            return NO_COPIES
        return None if any(True for _ in self.examine(run)) else _undecided(run)

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for twice in by_hand(run):
            yield self.finding(fix_kind=FixKind.CHECK, **twice)
        reported: set[object] = set()
        for group in replicas(run):
            if group.left_out or not group.any.seen.averages:
                continue
            for judge in (self._loss, self._by_hand, self._reduced):
                for finding in judge(group):
                    key = (finding.location, finding.summary[:20])
                    if key not in reported:
                        reported.add(key)
                        yield finding

    def _loss(self, group: Replicas) -> Iterator[Finding]:
        seen = {n: e for n, m in group.members.items() if (e := _scaled(m))}
        if not seen:
            return
        number, event = next(iter(seen.items()))
        member = group.members[number]
        size = f"{event.divisor:g}"
        yield self._finding(
            member,
            ranks=tuple(seen),
            first=(first := own_step(member, event.step)),
            count=member.last_step - first + 1,
            location=member.rank.location(event.site),
            label="DDP divides by it once more",
            related=_related(member, "its backward", event.backward_site),
            summary=f"the loss is divided by the world size ({size}) before a backward whose "
            f"gradients DDP averages: they are {size} times too small",
            cause="DDP averages gradients over the ranks; dividing the loss by their number too "
            "averages twice",
            fix=f"remove the division by `{event.expression}`: the mean over the local batch is "
            "all DDP needs",
            evidence={"divided_by": event.divisor, "written_as": event.expression},
            at=event.at,
        )

    def _by_hand(self, group: Replicas) -> Iterator[Finding]:
        size = len(group.any.seen.ranks)
        seen = {n: e for n, m in group.members.items() if (e := _divided(m, size))}
        if len(seen) < len(group.members):
            return
        number, event = next(iter(seen.items()))
        member = group.members[number]
        steps = _steps(member, size)
        yield self._finding(
            member,
            ranks=tuple(seen),
            first=steps[0],
            count=len(steps),
            location=member.rank.location(event.site),
            label="DDP has divided by it already",
            related=(),
            summary=f"gradients are divided by the world size ({size}) after DDP averaged them: "
            f"they are {size} times too small",
            cause="DDP's backward leaves the mean over the ranks in `.grad`",
            fix=f"remove the division by `{event.divisor}`",
            evidence={"measured_ratio": _by_hand(event), "written_as": event.divisor},
            at=event.at,
        )

    def _reduced(self, group: Replicas) -> Iterator[Finding]:
        size = len(group.any.seen.ranks)
        seen = {n: calls for n, m in group.members.items() if (calls := _reductions(m))}
        if len(seen) < len(group.members):
            return
        number, calls = next(iter(seen.items()))
        member, event = group.members[number], calls[0]
        factors = _factors(member, calls)
        if factors == {SEVERAL}:
            return
        summed = event.op == "SUM"
        # Another number than one that adding up gives is made by something else as well.
        times = next((f for f in sorted(factors) if summed and f in range(2, size + 1)), 0)
        same = not times and 1 in factors
        copied = all(c.copied for row in seen.values() for c in row)
        effect, becomes, division = "which costs its time", "brings nothing new", ""
        if times:
            effect = f"which leaves them {times:g} times what they were"
            becomes = f"adds {times:g} equal numbers"
        elif same:
            effect, becomes = "which changes nothing and costs its time", "gives the same mean"
            division = " together with the division" if summed else ""
        else:
            becomes += "; something else multiplies them besides" if factors else ""
            division = f", and the division by the {size} ranks if there is one" if summed else ""
        yield self._finding(
            member,
            severity=Severity.ERROR if times else Severity.NOTE if copied else Severity.WARNING,
            ranks=tuple(seen),
            first=own_step(member, event.step),
            count=calls[-1].call + 1,
            location=member.rank.location(event.site),
            label="these are equal on all ranks already",
            related=(),
            summary=f"gradients that DDP has averaged are all-reduced by hand ({event.op}"
            f"{' and a division' if same and summed else ''}), {effect}",
            cause=f"DDP's backward leaves the mean over the ranks in `.grad`; reducing it again "
            f"{becomes}",
            fix=f"remove the all-reduce{division}: after `loss.backward()` the gradients are "
            "averaged",
            evidence={"operation": event.op}
            | ({"measured_ratio": times or (1 if same else max(factors))} if factors else {}),
            at=event.at,
        )

    def _finding(
        self, member: Member, *, first: int, count: int, at: float, **fields: object
    ) -> Finding:
        last = max(first, member.last_step)
        return self.finding(
            steps=Steps(first, last, max(1, min(count, last - first + 1))),
            subjects=(member.wrapped.kind,),
            optimizers=(member.optimizer,),
            fix_kind=FixKind.CHECK,
            at=member.rank.wall(at),
            **fields,
        )


def _scaled(member: Member) -> LossScaled | None:
    mine = (e for e in member.rank.of(LossScaled) if e.model == member.model)
    return next((e for e in mine if e.expression), None)


def _undecided(run: Run) -> str | None:
    """What a longer run would have told."""
    for group in replicas(run):
        if group.left_out or not group.any.seen.averages:
            continue
        size = len(group.any.seen.ranks)
        for member in group.members.values():
            if any(e.model == member.model for e in member.rank.of(LossScaled)):
                return (
                    f"the loss is divided by {size}, but no line was seen to divide by the number "
                    "of ranks"
                )
            if member.last_step < 1 and _changes_gradients(member, size):
                return "the program changes gradients itself, and took one step only"
    return None


def _changes_gradients(member: Member, size: int) -> bool:
    """In a way that may be an average over the ranks, by a line that is not known, or once."""
    divided = any(e.changed and abs(_by_hand(e) * size - 1) < 1e-3 for e in _edits(member))
    return divided or any(e.model == member.model for e in member.rank.of(GradientReduced))


def _edits(member: Member) -> list[Edited]:
    return [
        e
        for e in member.rank.of(Edited)
        if (e.model, e.optimizer, e.kind) == (member.model, member.optimizer, "gradients")
        and not e.counted
    ]


def _divided(member: Member, size: int) -> Edited | None:
    """An edit by exactly one over the world size, at a line that says so, before or after whatever
    functions of torch's (clipping) made of them."""
    for event in _edits(member):
        exact = event.changed and abs(_by_hand(event) * size - 1) < 1e-3
        if exact and event.divisor and (event.beside or not event.functions):
            return event
    return None


def _by_hand(event: Edited) -> float:
    """By how much the program multiplied them."""
    return event.besides or event.ratio


def _steps(member: Member, size: int) -> list[int]:
    """Those in which the same edit was made, also at a line that was not known yet. An edit stands
    for the steps up to the next."""
    edits = _edits(member)
    ends = [*(e.step for e in edits[1:]), member.last_step + 1]
    return [
        step
        for event, end in zip(edits, ends, strict=True)
        if event.changed and abs(_by_hand(event) * size - 1) < 1e-3
        for step in range(event.step, max(end, event.step + 1))
    ]


def _reductions(member: Member) -> list[GradientReduced]:
    """What is known of the steps in which a line did so, if it did in more than one: one that was
    reduced once only may be a start of its own."""
    lines: dict[int, list[GradientReduced]] = {}
    for event in member.rank.of(GradientReduced):
        if event.model == member.model:
            lines.setdefault(event.site, []).append(event)
    return next((calls for calls in lines.values() if len(calls) > 1), [])


def _factors(member: Member, calls: list[GradientReduced]) -> set[float]:
    """By what the program multiplied its gradients in steps in which it reduced them, as far as
    they were looked at then: in the first ones of a run, and after each of the first reductions.

    torch's clipping is not counted; what the program clips itself is.
    """
    edits, factors = _edits(member), set()
    steps = [own_step(member, c.step) for c in calls]
    for n, step in enumerate(steps):
        looked = step < LOOKED_AT or any(0 < step - s < LOOKED_AT for s in steps[:n])
        if looked or any(e.step == step for e in edits):
            latest = next((e for e in reversed(edits) if e.step <= step), None)
            factors.add(_factor(latest) if latest is not None else 1.0)
    return factors


def _factor(event: Edited) -> float:
    """By what the program multiplied them; 1 for not at all."""
    if not event.changed or (event.functions and not event.beside):
        return 1.0
    ratio = event.besides if event.functions else event.ratio
    return float(round(ratio)) if abs(ratio - round(ratio)) < 1e-3 else ratio


def _related(member: Member, text: str, site: int) -> tuple[Related, ...]:
    spot: Location | None = member.rank.location(site)
    return (Related(text, spot),) if spot else ()
