"""Collectives that some ranks do not answer: in `Join`, those that are done; in a loop over names,
those that lack a name."""

from __future__ import annotations

from ...report.findings import Related
from ...run import ranks_do, ranks_text
from ...run.phrases import listed
from ..calls.call_logs import CallRecord
from ..control_flow.branches import head_of, where
from .attribution import Attribution
from .explanation import CallExplanation, sides_text
from .suspects import Suspect


class Unanswered(CallExplanation):
    rule = "not-answered-in-join"
    text = "the program calls a collective in `Join`, which ranks without inputs do not answer"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        done = [r for r, m in calls.items() if m.site and m.site.shadows and m.site.internal]
        own = tuple(r for r, m in calls.items() if m.site and m.site.internal is False)
        if not done or not own:
            return None
        blamed = Suspect(suspect.divergence, calls[own[0]], own)
        op = calls[own[0]].signature.op
        return self.blame(
            blamed,
            label=f"not answered by {ranks_text(done)}",
            summary=f"{op} of {ranks_text(own)} in `Join` is matched with another call of "
            f"{ranks_text(done)}: {sides_text(blamed)}",
            cause=f"{ranks_do(done, 'run')} out of inputs first; there `Join` answers the "
            "collectives of DDP and of sharded optimizers only",
            fix=f"call {op} after the `with Join(...)` block, or give it a `Joinable` whose "
            "`JoinHook` makes the same call; or end all ranks together with "
            "`Join([...], throw_on_early_termination=True)`",
        )


class LackingName(CallExplanation):
    rule = "lacking-name"
    text = "a loop over names (keys of a dictionary) makes no call for one of them on some ranks"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence, made = suspect.divergence, suspect.divergence.added
        if made is None or not divergence.lacking:
            return None
        few = divergence.side if len(divergence.side) < len(divergence.rest) else divergence.rest
        blamed = Suspect(divergence, made, few)
        names = [key.partition(" = ")[2].strip("'") for key in divergence.lacking]
        what, op = listed([f"`{name}`" for name in names]), made.signature.op
        own = ranks_text(divergence.rest)
        sets, related = _setter(made, names[0])
        return self.blame(
            blamed,
            label=f"no call for {what} on {own}",
            summary=f"{ranks_do(divergence.rest, 'make')} no {op} for {what}: {sides_text(blamed)}",
            cause=f"this loop over names makes no call for {what} on {own}{sets}",
            fix=f"loop over the same names on every rank: give {what} a value on all of them (0 "
            "where there is nothing to tell), or `all_gather_object` the names first and loop over "
            "all of them in one order",
            related=related,
        )


def _setter(made: CallRecord, name: str) -> tuple[str, tuple[Related, ...]]:
    """Where the entry with the name of a call is set: as words, and the lines."""
    place = made.site.set_at if made.site else None
    spot = made.rank.location(place.site) if place else None
    if place is None or spot is None:
        return "", ()
    head = next((h for h in place.inside if h.is_branch or h.kind == "past"), None)
    lines = (Related(f"sets `{name}`", spot),)
    if head is None:
        return f"; {spot} sets `{name}`", lines
    at, under = head_of(spot, head), where(head).strip()
    return f"; {spot} sets `{name}` {under}", (Related("the branch in which it is set", at), *lines)
