"""Ranks that recorded something differently before their calls diverged, or were in different
steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ...events import StepDone
from ...report.findings import Related
from ...run import Location
from ..calls.call_logs import CallRecord
from ..calls.rank_conditions import ON_RANK, unquoted
from ..control_flow.branches import places
from ..control_flow.uneven_backwards import FIX, RULE, TEXT
from ..rank_differences import COMPARED, preceding
from .attribution import Attribution
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


def _when(made: CallRecord) -> float:
    """When a call was made, on the run's clock; where that is not on record, a step later."""
    if made.call is not None:
        return made.rank.wall(made.call.began)
    later = (made.rank.wall(e.at) for e in made.rank.of(StepDone) if e.step >= made.step >= 0)
    return next(later, inf)
