"""Ranks that recorded something differently before their calls diverged, or were in different
steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ...events import FlatGradients, ReducedMetric, ScalerStep, StepDone
from ...report.findings import Related
from ...run import Location, Rank, ranks_do, ranks_text
from ...run.phrases import some
from ..calls.call_logs import CallRecord
from ..calls.rank_conditions import ON_RANK, unquoted
from ..control_flow.branches import places
from ..control_flow.jumps import loops_around
from ..control_flow.resumed import RESUMED_ON_SOME, resumed
from ..control_flow.uneven_backwards import FIX, RULE, TEXT
from ..rank_differences import COMPARED, LOAD_ALL, ONLY_SOME, preceding
from .attribution import WHO, Attribution
from .explanation import CallExplanation, order_fix
from .suspects import Suspect


class InAnotherStep(CallExplanation):
    """Ranks that ran different numbers of backwards before an earlier step, and have been in
    different steps since."""

    rule = RULE
    text = TEXT

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence, found = suspect.divergence, suspect.uneven
        if found is None or divergence.index < found.begin:
            return None
        blamed = Suspect(divergence, suspect.call, tuple(sorted(divergence.calls)))
        return self.blame(
            blamed,
            location=found.loop or found.made.location,
            label=found.label,
            cause=found.cause,
            fix=FIX,
            steps=found.steps,
            evidence=found.evidence,
        )


class ScalerSkipped(CallExplanation):
    """Ranks are in collectives of an optimizer's step, which a `GradScaler` skipped on others."""

    rule = "scaler-skipped-step"
    text = "a `GradScaler` skipped an optimizer step that has collectives, on some ranks only"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        before = {m.rank.rank: _when(m) for m in divergence.before}
        skipped: dict[int, ScalerStep] = {}
        for number, made in divergence.calls.items():
            last = made.rank.latest(ScalerStep)
            if last and last.skipped and made.rank.wall(last.at) > before.get(number, inf):
                skipped[number] = last
        others = [made for n, made in divergence.calls.items() if n not in skipped]
        if not skipped or not others:
            return None
        first = min(skipped)
        line = divergence.calls[first].rank.location(skipped[first].site)
        if line is None or not all(line in _lines(made) for made in others):
            return None
        who, rest = ranks_text(skipped), ranks_text([m.rank.rank for m in others])
        return self.blame(
            Suspect(divergence, others[0], tuple(sorted(skipped))),
            location=line,
            label=f"skips the optimizer's step on {WHO}",
            cause=f"{who} found infinity or NaN in the gradients there, and "
            f"`{line.source.strip()}` ({line}) skipped the step, with the collectives in it; "
            f"{rest} found none",
            fix="let all ranks skip a step, or none: all-reduce what each has found before it. "
            "`torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler` in the place of "
            "`GradScaler` does so",
            around=False,
        )


def _lines(made: CallRecord) -> list[Location | None]:
    """The lines of the program that led to a call."""
    return [made.location_at(depth) for depth in range(len(places(made)))]


class FlagOnSomeRanks(CallExplanation):
    """A library goes different ways after a function of the program set a flag on some ranks."""

    rule = "flag-on-some-ranks"
    text = "a flag is set under a condition on the rank, right before a library goes different ways"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        if len({made.location for made in divergence.calls.values()}) > 1:
            return None  # the program itself goes different ways
        found = {flag for made in divergence.before for flag in _flags(made)}
        if len(found) != 1:
            return None
        ((where, test),) = found
        return self.blame(
            suspect,
            location=where,
            label="runs on some ranks only",
            cause=f"right before, `{where.source}` ({where}) runs on some ranks only, as it is "
            f"under `{test}`: what reads that flag goes another way there",
            fix="let all ranks set it: `all_reduce` the decision before that statement, outside of "
            "the condition on the rank (with Lightning, "
            "`trainer.strategy.reduce_boolean_decision(flag, all=False)`)",
        )


def _flags(made: CallRecord) -> Iterator[tuple[Location, str]]:
    """The statements in the functions that led to a call that set a flag under a condition on the
    rank, each with that condition."""
    for place in places(made):
        spot = made.rank.location(place.site)
        for flag in place.flags if spot is not None else ():
            test = next((t for t in flag.tests if ON_RANK.search(unquoted(t))), None)
            if spot is not None and test is not None:
                yield Location(spot.file, flag.line, spot.function, flag.text), test


class GradientsLeftOut(CallExplanation):
    """Ranks put the gradients that exist into one tensor, and some have fewer than others."""

    rule = "gradients-left-out"
    text = "a flat tensor leaves out parameters that have no gradient on this rank"
    check = "collective-shape-mismatch"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        if not divergence.same_call or "numel" not in divergence.differs:
            return None
        flat = {r: _flat(made) for r, made in sorted(divergence.calls.items())}
        lacking = {r: {*e.missing} for r, e in flat.items() if e is not None}
        wholes = {e.whole for e in flat.values() if e is not None}
        sizes = {m.signature.numel for r, m in divergence.calls.items() if flat[r] is None}
        if len(wholes) != 1 or not sizes <= wholes:
            return None
        on_all = set.intersection(*(lacking.get(r, set()) for r in flat))
        without = {r: sorted(names - on_all) for r, names in lacking.items() if names - on_all}
        if not without:
            return None
        told = "; ".join(
            f"{some([f'`{n}`' for n in names if n], NAMES_TOLD) or 'some'} on {ranks_text([r])}"
            for r, names in without.items()
        )
        shapes = "; ".join(
            f"{ranks_text(side)}: {made.signature.text}"
            for side, made in divergence.sides(tuple(without))
        )
        op = suspect.call.signature.op
        return self.blame(
            Suspect(divergence, divergence.calls[min(without)], tuple(without)),
            label=f"fewer gradients on {WHO}" if len(without) < len(flat) else "other gradients",
            summary=f"{op} is called with different shapes: {shapes}",
            cause="the tensor holds the gradients that exist, one after the other; without one in "
            f"this step: {told}. That part of the model took no part in the loss there",
            fix="give every parameter a gradient on every rank before they are put together: "
            "`for p in parameters: if p.grad is None: p.grad = torch.zeros_like(p)`",
            subjects=tuple(sorted({n for names in without.values() for n in names if n})),
        )


def _flat(made: CallRecord) -> FlatGradients | None:
    """What a rank recorded of the flat tensor of gradients that it passes to a call."""
    numel = made.signature.numel
    return next((e for e in made.rank.of(FlatGradients) if e.numel == numel), None)


class ResumedOnSome(CallExplanation):
    rule = RESUMED_ON_SOME
    text = "only some ranks load a checkpoint, and a loop has fewer rounds on them for it"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        calls = divergence.calls.values()
        ranks, until = [made.rank for made in calls], min(map(_when, calls))
        for _, head, _, _ in loops_around(suspect.call.rank, suspect.call.site):
            if (found := resumed(head, ranks, until)) is not None:
                return self.blame(
                    Suspect(divergence, divergence.calls[found.ranks[0]], found.ranks),
                    location=found.line,
                    label=ONLY_SOME,
                    cause=f"{found.cause}: they are in different rounds of it",
                    fix=LOAD_ALL,
                    related=found.related,
                    evidence=found.evidence,
                )
        return None


class RecordedDifference(CallExplanation):
    rule = "recorded-difference"
    text = "the ranks recorded something differently before their calls diverged"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls.values()
        earlier = preceding([made.rank for made in calls], before=min(map(_when, calls)))
        # What only some do after the last call in common shows that they go different ways.
        common = min(map(_when, suspect.divergence.before), default=inf)
        earlier = [d for d in earlier if d.field or d.at < common]
        if not earlier:
            return None
        first = earlier[0]
        spots = list(dict.fromkeys(first.lines.values()))
        return self.blame(
            suspect,
            cause=f"the ranks differ before that: {first.text}",
            fix=COMPARED[first.kind].advice or order_fix(suspect),
            related=tuple(Related(f"{first.what} differs", spot) for spot in spots[:1]),
        )


class ReducedMetrics(CallExplanation):
    """The calls of a library differ in number, and it was asked to reduce other numbers."""

    rule = "reduced-metrics"
    text = "a framework is asked to reduce a logged number on some ranks only"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        if not all(made.site and made.site.through for made in calls.values()):
            return None  # the program makes one of them itself
        # What only some log after the last call in common shows that they go different ways.
        until = min(map(_when, suspect.divergence.before), default=-inf)
        ever = {name for made in calls.values() for name in _reduced(made.rank, inf)}
        reducing = {_reducing(made) for made in calls.values()} & ever
        if any(reducing - {*_reduced(made.rank, inf)} for made in calls.values()):
            until = inf  # one of them reduces right now what others never log
        names = {rank: _reduced(made.rank, until) for rank, made in sorted(calls.items())}
        every = {name: at for known in names.values() for name, at in known.items()}
        lacks = {name: tuple(r for r in names if name not in names[r]) for name in every}
        first = next((name for name, ranks in lacks.items() if ranks), None)
        if first is None or "" in every:
            return None
        without = lacks[first]
        having = [r for r in names if r not in without]
        told = some([f"`{n}`" for n, ranks in lacks.items() if ranks == without], NAMES_TOLD)
        return self.blame(
            Suspect(suspect.divergence, calls[without[0]], without),
            location=every[first],
            label=f"no {told} on {WHO}",
            cause=f"{ranks_do(having, 'log')} {told}, to be reduced over the ranks; "
            f"{ranks_do(without, 'log')} nothing of that name. The framework makes collectives for "
            "each name, so their numbers differ",
            fix="log the same names in the same order on every rank: loop over all names, log "
            "sums and counts (0 for names that do not occur), and divide after the reduction",
        )


NAMES_TOLD = 3
"""Names listed in a sentence."""


def _reducing(made: CallRecord) -> str:
    """The name of the number that a framework reduces by a call; empty if it does not."""
    key = made.site.key if made.site and made.site.through else ""
    return key.partition(" = ")[2].strip("'")


def _reduced(rank: Rank, until: float) -> dict[str, Location | None]:
    """The numbers that a rank handed to a framework to reduce, and where."""
    return {
        e.name: rank.location(e.site) for e in rank.of(ReducedMetric) if rank.wall(e.at) <= until
    }


def _when(made: CallRecord) -> float:
    """When a call was made, on the run's clock; where that is not on record, a step later."""
    if made.call is not None:
        return made.rank.wall(made.call.began)
    later = (made.rank.wall(e.at) for e in made.rank.of(StepDone) if e.step >= made.step >= 0)
    return next(later, inf)
