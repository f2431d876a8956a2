"""Collectives of the program in `Join`, which no rank answers that is done."""

from __future__ import annotations

from ...run import ranks_do, ranks_text
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
