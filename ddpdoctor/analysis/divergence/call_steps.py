"""The optimizer steps in which a divergence of calls lies."""

from __future__ import annotations

from ...events import CALLERS
from ...report.findings import Steps
from ...run import Run
from ..calls.call_logs import CallLogs, CallRecord, GroupCalls, call_logs
from ..control_flow.branches import begins_round
from ..control_flow.jumps import loops_around
from .align import CallDivergence
from .thresholds import REACH, WINDOW


class CallSteps:
    """In which steps the ranks differ, by the calls of one of them.

    A call that follows the last step of all ranks belongs to that step; one that is outside of the
    training loop belongs to none.
    """

    def __init__(self, run: Run, divergence: CallDivergence, call: CallRecord) -> None:
        known = call_logs(run)
        logs = known.logs[divergence.key]
        mine = logs[call.rank.rank]
        again = (known.recorded(mine, index) for index in (divergence.index, *divergence.again))
        last = known.recorded(mine, divergence.cut) if divergence.cut >= 0 else None
        self._taken = [call.step, *(made.step for made in again if made)]
        self._until = last.step if last else _named_until(known, mine, call)
        taken = max(*self._taken, 0)
        ends = all(_is_over(known, log, call, taken) for log in logs.values())
        self._after = int(divergence.cut < 0 and taken > 0 and ends)
        self.over = bool(self._after) and not divergence.again and _is_outside(known, mine, call)

    @property
    def when(self) -> Steps | None:
        """The optimizer steps in which the ranks differ; None for none."""
        found = Steps.of(map(self.of, self._taken))
        if found is None or self._until is None:
            return found
        return Steps(found.first, found.last, found.count, self._until - found.first + 1)

    def of(self, taken: int) -> int:
        """The step of a call before which so many were taken; -1 for none and for unknown."""
        return -1 if self.over else max(taken - self._after, min(taken, 0))


def _named_until(known: CallLogs, log: GroupCalls, made: CallRecord) -> int | None:
    """The last step in which calls of a line are told apart by names, as for parameters they are in
    the first round only; None where they always are, or never."""
    own = bool(made.key) and not (made.site and made.site.through)
    later = range(made.index + 1, min(made.index + REACH, log.issued)) if own else ()
    others = (other for i in later if (other := known.recorded(log, i)) is not None)
    unnamed = (o.step for o in others if o.spots == made.spots and not o.key and o.step > made.step)
    found = next(unnamed, None)
    return None if found is None else found - 1


def _is_over(known: CallLogs, log: GroupCalls, made: CallRecord, taken: int) -> bool:
    """Whether a rank took exactly so many steps, and had not begun another one by a call: it ended
    well, or its model has not averaged gradients since."""
    if known.steps_of(log.rank) != taken or log.rank.state == "finished":
        return known.steps_of(log.rank) == taken
    last = _averaged(known, log)
    return last is not None and last.step == taken - 1 and not begins_round(made, last)


def _is_outside(known: CallLogs, log: GroupCalls, call: CallRecord) -> bool:
    """Whether a call is outside of the training loop: all its callers are on record, and none of
    the loops around it is around the last averaging of gradients."""
    last = _averaged(known, log)
    whole = call.site is not None and 0 < len(call.site.places) < CALLERS
    around = _loops(last) if last is not None else set()
    return whole and bool(around) and not around & _loops(call)


def _loops(made: CallRecord) -> set[tuple[str, int, str]]:
    return {key for key, _, _, _ in loops_around(made.rank, made.site)}


def _averaged(known: CallLogs, log: GroupCalls) -> CallRecord | None:
    """The last call in which DDP averaged gradients in this group; None where it is long ago."""
    last = (known.recorded(log, i) for i in range(log.issued - 1, log.issued - WINDOW, -1))
    return next((m for m in last if m and m.signature.op == "DDP backward"), None)
