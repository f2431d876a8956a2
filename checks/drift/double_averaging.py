"""DDP409."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import averaged_gradients
from ddpdoctor.analysis.replicas import uncompared
from ddpdoctor.analysis.replicas.divergence_window import own_step
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, replicas
from ddpdoctor.analysis.replicas.thresholds import EXAMINED_STEPS, SAME_FACTOR
from ddpdoctor.events import (
    Averaged,
    Edited,
    GradientReduced,
    LossCounted,
    LossMultiplied,
    LossScaled,
    ReducedInGraph,
)
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Run

SEVERAL = 0.0
"""The factor that stands for: not all gradients were multiplied by the same number."""


DIVIDED_LOSS = "divided-loss"
COUNTED_LOSS = "counted-loss"
MULTIPLIED_LOSS = "multiplied-loss"
DIVIDED_GRADIENTS = "divided-gradients"
SUMMED_AGAIN = "summed-again"
REDUCED_AGAIN = "reduced-again"


class DoubleAveraging(Check):
    """Gradients are averaged twice, or summed and not averaged, or parameters are

    ## What it finds
    With DDP, which averages gradients itself: a loss divided by the world size (or by a product
    that contains it) before backward, or a term of it; a sum of losses divided by a count that is
    summed over all ranks (tokens, say), and not multiplied by the world size; a loss that is a mean
    over the local batch and is multiplied by the world size (a warning); gradients divided by it or
    by a product with it, or gradients or copies of them all-reduced once more. Without a wrapper:
    gradients that the program synchronises manually and divides once too often, or whose loss was
    divided before; gradients of losses that are means over each rank's own batch, summed and not
    divided (a note: the learning rate, or the limit of a clipping, may be chosen for the sum); and
    parameters that it sums over the ranks between steps and does not divide.

    ## How it knows
    Each rank searches the last twelve nodes of the loss's autograd graph for a division by the
    world size or a multiple of it: in the first six backwards of a line, then in one of 17, and
    whenever the loss is computed in a new way. The lines are recorded in a later forward. In early
    backwards it also compares the divisors with the small tensors that were summed over the ranks
    since the last one; two in a row must agree. Between the synchronised backward and the step,
    values of up to six gradients on the CPU are compared (in the first 64 steps, then in about one
    of 110 as `--budget` allows), apart from what torch's clipping changes, and so is what the
    program passes to collectives. Without a wrapper, four steps compare what is applied, or what
    torch clips after the exchange, with the mean of the ranks' own gradients, and the parameters
    after an exchange with the mean of those before it. A division counts only if its line names the
    world size, or a name assigned once in that file from a product or quotient with it: any other 2
    does not. A division by a product counts where the loss is a mean, or a sum divided by the world
    size times the number of its terms. A multiplication counts if its line names the world size,
    nothing else scales the loss, which is a mean over samples, or over the elements of them that
    count on this rank, or a sum of such means, on all ranks, and no tensor that may be part of it
    was exchanged between ranks. All this proves the fault. A manual all-reduce is an error if the
    gradients grow by the number of ranks summed; if something else scales them as well, it is only
    called redundant.

    ## Why it hurts
    The effective learning rate is too small by the world size (too large, for a sum) and changes
    with the number of ranks. An all-reduce that changes nothing still costs time.

    ## How to fix it
    Leave averaging to DDP: compute the mean over the local batch, call backward, step. For logging,
    reduce `loss.detach().clone()`.

    ## When it stays quiet
    - Division by the number of accumulation steps; losses that are reduced for logging only.
    - `loss * world_size / count`, or `loss *= world_size` where a sum over ranks is wanted: the
      loss is a sum, is scaled by anything else, or is computed from values of other ranks.
    - Sums of gradients without a wrapper: a term of the loss is no mean, all of them are divided by
      a multiple of the world size, or values of other ranks may be part of it; with an optimizer
      whose updates do not depend on a constant factor (Adam) and without torch's clipping.
    - Gradients that DDP does not average: in this backward (`no_sync`), or at all, or through a
      communication hook other than torch's.
    """

    code = "DDP409"
    name = "double-averaging"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        DIVIDED_LOSS: "the loss is divided by the world size, and DDP averages",
        COUNTED_LOSS: "the loss is divided by a count of all ranks, and DDP averages",
        MULTIPLIED_LOSS: "a loss that is a mean is multiplied by the world size",
        DIVIDED_GRADIENTS: "gradients are divided by the world size after DDP averaged them",
        SUMMED_AGAIN: "gradients that DDP averaged are summed over the ranks once more",
        REDUCED_AGAIN: "gradients that DDP averaged are all-reduced once more, to no effect",
        **averaged_gradients.RULES,
    }
    effects = (
        Effect(
            ("nonfinite-origin",),
            of=(averaged_gradients.SUMMED_PARAMETERS,),
            when=(When.SHARED_RANK, When.STEP_NOT_BEFORE),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        if not (replicas(run) or run.any(Averaged)):
            return NO_COPIES
        return None if any(True for _ in self.examine(run)) else _undecided(run)

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fields in averaged_gradients.reported(run):
            yield self.finding(fix_kind=FixKind.CHECK, **fields)
        reported: set[object] = set()
        for group in replicas(run):
            if group.left_out or not group.any.seen.averages:
                continue
            for judge in (
                self._divided_loss,
                self._counted_loss,
                self._multiplied_loss,
                self._divided_gradients,
                self._reduced,
            ):
                for finding in judge(group):
                    key = (finding.location, judge)
                    if key not in reported:
                        reported.add(key)
                        yield finding

    def _divided_loss(self, group: Replicas) -> Iterator[Finding]:
        seen = {n: e for n, m in group.members.items() if (e := _scaled(m))}
        if not seen:
            return
        number, event = next(iter(seen.items()))
        member = group.members[number]
        size = f"{event.divisor:g}"
        divided, smaller = "the loss is", "they are"
        if event.of_a_term:
            divided, smaller = "a term of the loss is", "what it adds to them is"
        linear = (e for e in member.of(ReducedInGraph, linear=True))
        summed = next((e.site for e in linear if e.backward_site == event.backward_site), -1)
        alone = (
            "call backward on this rank's own loss, without the `all_reduce` and the division: DDP "
            "averages the gradients. Where the mean is to be printed, reduce a copy: "
            f"`mean = loss.detach().clone(); dist.all_reduce(mean); mean /= {event.expression}`"
        )
        yield self._finding(
            member,
            rule=DIVIDED_LOSS,
            ranks=tuple(seen),
            first=(first := own_step(member, event.step)),
            count=member.last_step - first + 1,
            location=member.rank.location(event.site),
            label="DDP divides by the world size as well",
            related=(
                *_related(member, "sums the losses of all ranks", summed),
                *_related(member, "its backward", event.backward_site),
            ),
            summary=f"{divided} divided by the world size ({size}) before backward, and DDP "
            f"averages the gradients: {smaller} {size} times too small",
            cause="DDP averages gradients over the ranks; dividing the loss by the number of ranks "
            "averages twice",
            fix=alone
            if summed >= 0
            else f"remove the division by `{event.expression}`: DDP needs the mean over the local "
            "batch only",
            evidence={"divided_by": event.divisor, "written_as": event.expression},
            at=event.at,
        )

    def _counted_loss(self, group: Replicas) -> Iterator[Finding]:
        seen = {
            n: e for n, m in group.members.items() if (e := next(iter(m.of(LossCounted)), None))
        }
        if len(seen) < len(group.members):
            return
        number, event = next(iter(seen.items()))
        member = group.members[number]
        rank, size = member.rank, event.size
        if any(abs(_manual_factor(e) - size) < SAME_FACTOR for e in _edits(member)):
            return  # the program makes up for it
        divides = rank.location(event.site)
        yield self._finding(
            member,
            rule=COUNTED_LOSS,
            ranks=tuple(seen),
            first=(first := own_step(member, event.step)),
            count=member.last_step - first + 1,
            location=divides or rank.location(event.count_site),
            label="divides by a count of all ranks" if divides else "the count of all ranks",
            related=(
                *(_related(member, "counts over all ranks", event.count_site) if divides else ()),
                *_related(member, "its backward", event.backward_site),
            ),
            summary=f"the loss of each rank is divided by a count over all {size} ranks, and DDP "
            f"averages the gradients: they are {size} times too small",
            cause="the mean over all ranks is the sum of all their losses over the count of all; "
            f"DDP adds up the gradients and divides them by {size} once more",
            fix=f"multiply the loss by the world size: `loss * {size} / count`, with "
            "`dist.get_world_size()` for the number",
            evidence={"divided_by": event.count, "ranks": size},
            at=event.at,
        )

    def _multiplied_loss(self, group: Replicas) -> Iterator[Finding]:
        seen = {
            n: e for n, m in group.members.items() if (e := next(iter(m.of(LossMultiplied)), None))
        }
        if len(seen) < len(group.members) or any(map(_rescaled, group.members.values())):
            return
        number, event = next(iter(seen.items()))
        member, size = group.members[number], event.size
        yield self._finding(
            member,
            rule=MULTIPLIED_LOSS,
            severity=Severity.WARNING,
            ranks=tuple(seen),
            first=(first := own_step(member, event.step)),
            count=member.last_step - first + 1,
            location=member.rank.location(event.site),
            label="a mean needs no factor: DDP averages over the ranks",
            related=_related(member, "its backward", event.backward_site),
            summary=f"the loss is a mean over the local batch, and multiplied by the world size "
            f"({size}) before backward: the gradients are {size} times those of the mean over all "
            "ranks",
            cause="DDP averages the gradients of the ranks' means, which gives that of the mean "
            "over all; the factor makes it their sum, and the learning rate larger with each rank",
            fix=f"remove the factor `{event.expression}`; it belongs to a loss that is a sum "
            "divided by a count of all ranks",
            evidence={"multiplied_by": size, "written_as": event.expression},
            at=event.at,
        )

    def _divided_gradients(self, group: Replicas) -> Iterator[Finding]:
        size = len(group.any.seen.ranks)
        seen = {n: e for n, m in group.members.items() if (e := _divided(m, size))}
        if len(seen) < len(group.members) or _multiplied(group):
            return
        number, event = next(iter(seen.items()))
        member = group.members[number]
        steps = _steps(member, size)
        yield self._finding(
            member,
            rule=DIVIDED_GRADIENTS,
            ranks=tuple(seen),
            first=steps[0],
            count=len(steps),
            location=member.rank.location(event.site),
            label="DDP has already divided by the world size",
            related=(),
            summary=f"gradients are divided by the world size ({size}) after DDP averaged them: "
            f"they are {size} times too small",
            cause="after DDP's backward, `.grad` holds the mean over the ranks",
            fix=f"remove the division by `{event.divisor}`",
            evidence={"measured_ratio": _manual_factor(event), "written_as": event.divisor},
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
        # A factor that a sum over ranks does not give comes from something else as well.
        times = next((f for f in sorted(factors) if summed and f in range(2, size + 1)), 0)
        same = not times and 1 in factors
        copied = all(c.copied for row in seen.values() for c in row)
        effect, result, division = "which costs time", "adds nothing", ""
        if times:
            effect = f"which multiplies them by {times:g}"
            result = f"adds up {times:g} equal values"
        elif same:
            effect, result = "which changes nothing and costs time", "gives the same mean"
            division = " together with the division" if summed else ""
        else:
            result += "; something else scales them as well" if factors else ""
            division = f", and the division by the {size} ranks if there is one" if summed else ""
        severity = Severity.NOTE if copied else Severity.WARNING
        yield self._finding(
            member,
            rule=SUMMED_AGAIN if times else REDUCED_AGAIN,
            severity=Severity.ERROR if times else severity,
            ranks=tuple(seen),
            first=own_step(member, event.step),
            count=calls[-1].call + 1,
            location=member.rank.location(event.site),
            label="the gradients are already equal on all ranks",
            related=(),
            summary=f"gradients that DDP has averaged are all-reduced again ({event.op}"
            f"{' and a division' if same and summed else ''}), {effect}",
            cause="after DDP's backward, `.grad` holds the mean over the ranks; reducing it again "
            f"{result}",
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
    """The first division of the loss whose line is known."""
    return next((e for e in member.of(LossScaled) if e.expression), None)


def _multiplied(group: Replicas) -> bool:
    """Whether the loss is multiplied by the world size, which a later division makes up for."""
    return any(m.of(LossMultiplied) for m in group.members.values())


def _undecided(run: Run) -> str | None:
    """Why the run does not decide, where a longer one would; None where it does."""
    for group in replicas(run):
        if group.left_out or not group.any.seen.averages:
            continue
        size = len(group.any.seen.ranks)
        for member in group.members.values():
            if member.of(LossScaled):
                return (
                    f"the loss is divided by {size}, but no line was found that divides by the "
                    "world size"
                )
            if member.last_step < 1 and _changes_gradients(member, size):
                return "the program modifies gradients itself, and took only one step"
    return None


def _changes_gradients(member: Member, size: int) -> bool:
    """Whether the program modifies gradients in a way that may be an average over the ranks."""
    divided = any(_divides(e, size) for e in _edits(member))
    return divided or bool(member.of(GradientReduced))


def _edits(member: Member) -> list[Edited]:
    """The recorded modifications of gradients, but for those found by write counters only."""
    return member.of(Edited, kind="gradients", counted=False)


def _divided(member: Member, size: int) -> Edited | None:
    """The first division by the world size, or by a multiple of it, at a line that says so; before
    or after what functions of torch (clipping) do."""
    for event in _edits(member):
        if _divides(event, size) and event.divisor and (event.beside or not event.functions):
            return event
    return None


def _rescaled(member: Member) -> bool:
    """Whether the program multiplies gradients itself, apart from torch's clipping."""
    return any(e.changed and (e.beside or not e.functions) for e in _edits(member))


def _manual_factor(event: Edited) -> float:
    """The factor by which the program itself multiplied the gradients."""
    return event.besides or event.ratio


def _divides(event: Edited, size: int) -> bool:
    """Whether the program divided the gradients by the world size, or by a multiple of it, as of
    the number of accumulated backwards."""
    factor = _manual_factor(event)
    times = 1 / (factor * size) if factor > 0 else 0.0
    return event.changed and round(times) >= 1 and abs(times / round(times) - 1) < SAME_FACTOR


def _steps(member: Member, size: int) -> list[int]:
    """The steps in which gradients are divided so, also before the line was known. A record holds
    for the steps up to the next one."""
    edits = _edits(member)
    ends = [*(e.step for e in edits[1:]), member.last_step + 1]
    return [
        step
        for event, end in zip(edits, ends, strict=True)
        if _divides(event, size)
        for step in range(event.step, max(end, event.step + 1))
    ]


def _reductions(member: Member) -> list[GradientReduced]:
    """The records of the first line that reduces gradients in more than one step: a single
    reduction may be part of an initialisation."""
    lines: dict[int, list[GradientReduced]] = {}
    for event in member.of(GradientReduced):
        lines.setdefault(event.site, []).append(event)
    return next((calls for calls in lines.values() if len(calls) > 1), [])


def _factors(member: Member, calls: list[GradientReduced]) -> set[float]:
    """The factors by which the program multiplied its gradients in steps in which it reduced them,
    as far as these steps were examined: at the begin, and after each of the first reductions.

    torch's clipping does not count; manual clipping does.
    """
    edits, factors = _edits(member), set()
    steps = [own_step(member, c.step) for c in calls]
    for n, step in enumerate(steps):
        looked = step < EXAMINED_STEPS or any(0 < step - s < EXAMINED_STEPS for s in steps[:n])
        if looked or any(e.step == step for e in edits):
            latest = next((e for e in reversed(edits) if e.step <= step), None)
            factors.add(_factor(latest) if latest is not None else 1.0)
    return factors


def _factor(event: Edited) -> float:
    """The factor by which the program multiplied the gradients; 1 for not at all."""
    if not event.changed or (event.functions and not event.beside):
        return 1.0
    ratio = event.besides if event.functions else event.ratio
    return float(round(ratio)) if abs(ratio - round(ratio)) < SAME_FACTOR else ratio


def _related(member: Member, text: str, site: int) -> tuple[Related, ...]:
    spot: Location | None = member.rank.location(site)
    return (Related(text, spot),) if spot else ()
