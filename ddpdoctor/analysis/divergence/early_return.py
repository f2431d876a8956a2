"""Ranks that came back from a function without the collective that the others make in it, or that
ran one again."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...report.findings import Related
from ...run import Location, ranks_text
from ..calls.call_logs import CallRecord
from ..control_flow.branches import (
    around,
    in_forward,
    leading,
    places,
    run_by_all,
    same_lines,
    unbranched,
)
from ..control_flow.early_returns import EarlyReturn, early_return, early_return_to
from .attribution import WHO, Attribution
from .explanation import CallExplanation, sides_text, what_was_skipped
from .suspects import Suspect

_ATTEMPTS = re.compile(r"for \w+ in range\(|while ")
"""The head of a loop that may count attempts."""


class ReturnedEarly(CallExplanation):
    rule = "early-return"
    text = "ranks came back from a function without the collective that others make in it"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        if divergence.shifted or not divergence.elsewhere:
            return None
        for made in divergence.calls.values():
            rest = {r: m for r, m in divergence.calls.items() if not same_lines(m, made)}
            found = early_return(made, rest.values(), divergence.before)
            if found is None:
                continue
            few = 2 * len(rest) <= len(divergence.calls)
            ranks = tuple(sorted(rest if few else set(divergence.calls) - set(rest)))
            blamed = Suspect(divergence, made, ranks)
            return self.blame(
                blamed,
                label=f"skipped by {WHO}" if few else "",
                summary=f"{what_was_skipped(blamed)}: {sides_text(blamed)}" if few else "",
                cause=f"{ranks_text(rest)} came back from `{found.function}` without this call: "
                f"{found.text}",
                fix=not_skipped(found, made),
                related=related(found, rest),
            )
        return None


class Retried(CallExplanation):
    """A rank is in the same call again, in the same step, and the others went on from it."""

    rule = "retried"
    text = "after an exception, ranks made calls again that the others made once"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        before = {m.rank.rank: m for m in divergence.before}
        again = {
            r: m
            for r, m in divergence.calls.items()
            if (last := before.get(r)) and same_lines(last, m) and last.step == m.step
        }
        if not again or len(again) == len(divergence.calls) or len(before) < len(divergence.calls):
            return None
        made = next(iter(again.values()))
        found = _repeating(made)
        if found is None or not all(same_lines(before[made.rank.rank], m) for m in before.values()):
            return None
        loop, handler = found
        who, op = ranks_text(again), made.signature.op
        return self.blame(
            Suspect(divergence, made, tuple(sorted(again))),
            label=f"called again by {WHO}",
            summary=f"{who} made a call of {op} again: {sides_text(suspect)}",
            cause=f"{who} made this call twice in one step: `{handler.source}` ({handler}) catches "
            f"an exception, and `{loop.source}` ({loop}) runs the calls again that the other ranks "
            "made once",
            fix="repeat no step with collectives on one rank: catch the exception, `all_reduce` an "
            "error flag, and repeat the step on all ranks or on none; or let the rank fail",
            related=(Related("leads back to the call", handler),),
        )


def _repeating(made: CallRecord) -> tuple[Location, Location] | None:
    """The inner loop around a call that counts attempts, and the handler in that loop which catches
    an exception and so leads back to the call; None for none."""
    handler: Location | None = None
    loops = list(around(made.rank, made.site))
    for n, (_, spot, head) in enumerate(loops):
        if head.kind == "try" and head.ways and handler is None:
            way = head.ways[0]
            handler = Location(spot.file, way.line, spot.function, way.text)
        if head.is_loop:
            loop = Location(spot.file, head.line, spot.function, head.text)
            inner = any(outer.is_loop for _, _, outer in loops[n + 1 :])
            found = inner and handler is not None and _ATTEMPTS.match(head.text)
            return (loop, handler) if found and handler is not None else None
    return None


def came_back(suspect: Suspect) -> EarlyReturn | None:
    """The function around the call from which those who skipped it came back without it."""
    skipped = [m for rank, m in suspect.divergence.calls.items() if rank in suspect.ranks]
    found = early_return(suspect.call, skipped, suspect.divergence.before)
    if found is None and suspect.rounds:  # the earlier rounds say that they are past it
        every = [early_return_to(suspect.call, m) for m in skipped]
        found = every[0] if every and all(e == every[0] for e in every) else None
    return found


def not_skipped(found: EarlyReturn, made: CallRecord) -> str:
    """What to do about a call that ranks did not come to in a function."""
    op = made.signature.op
    if len(found.ways) == 1:
        line, head = found.ways[0]
        spots = (
            made.location_at(depth)
            for depth, place in enumerate(places(made))
            if head in place.inside
        )
        spot = next((at for at in spots if at and at.function == line.function), None)
        if spot is not None and in_forward(spot, op):
            return run_by_all(head, spot, op)
        return unbranched(head, f"call {op}")
    return (
        f"let all ranks take the same way through `{found.function}`: compute these conditions "
        f"from values equal on all ranks (`all_reduce` them first)"
    )


def related(found: EarlyReturn, ranks: Collection[int]) -> tuple[Related, ...]:
    """The statements that may have led `ranks` around the call."""
    sure = ranks if len(found.ways) == 1 else ()
    return tuple(Related(leading(head, sure), line) for line, head in found.ways)
