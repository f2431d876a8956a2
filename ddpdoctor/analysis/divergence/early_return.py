"""Ranks that came back from a function without the collective that the others make in it."""

from __future__ import annotations

from ...report.findings import Related
from ...run import ranks_text
from ..calls.call_logs import CallRecord
from ..control_flow.branches import leading, same_lines, unbranched
from ..control_flow.early_returns import EarlyReturn, early_return
from .attribution import WHO, Attribution
from .explanation import CallExplanation, sides_text, what_was_skipped
from .suspects import Suspect


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
                related=related(found),
            )
        return None


def came_back(suspect: Suspect) -> EarlyReturn | None:
    """The function around the call from which those who skipped it came back without it."""
    skipped = [m for rank, m in suspect.divergence.calls.items() if rank in suspect.ranks]
    return early_return(suspect.call, skipped, suspect.divergence.before)


def not_skipped(found: EarlyReturn, made: CallRecord) -> str:
    """What to do about a call that ranks did not come to in a function."""
    op = made.signature.op
    if len(found.ways) == 1:
        return unbranched(found.ways[0][1], f"call {op}")
    return (
        f"let all ranks take the same way through `{found.function}`: compute these conditions "
        f"from values equal on all ranks (`all_reduce` them first)"
    )


def related(found: EarlyReturn) -> tuple[Related, ...]:
    """The statements that may have led around the call."""
    return tuple(Related(leading(head), line) for line, head in found.ways)
