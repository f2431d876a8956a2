"""The side of a divergence that looks wrong: what explanations start from where nothing proves who
is at fault."""

from __future__ import annotations

from dataclasses import dataclass

from ..calls.call_logs import CallLogs, CallRecord, GroupCalls
from ..control_flow.branches import arms, avoided, branch, condition
from .align import CallDivergence
from .periodic_calls import left_out
from .thresholds import HISTORY, RANKS_ASKED, WINDOW


@dataclass(frozen=True)
class Suspect:
    """A call that looks as if it should not be there, or as if some ranks skipped it.

    Attributes:
        call: one of those of `divergence`, or that of a rank a little later.
        ranks: who looks wrong: the callers, or those that do not make the call; all where nothing
            tells.
        rounds: where these ranks skipped the call: in how many earlier rounds, all of them, they
            made it; 0 otherwise.
    """

    divergence: CallDivergence
    call: CallRecord
    ranks: tuple[int, ...]
    rounds: int = 0

    @property
    def rest(self) -> list[CallRecord]:
        """The calls of the other ranks."""
        return self.divergence.others(self.ranks)


def suspect(known: CallLogs, divergence: CallDivergence) -> Suspect:
    """The call and the side that look wrong: a call that was due by earlier rounds, then one that
    only one side makes, then the one that looks more out of place. Of two sides it is the smaller
    one, whether it makes the call or not."""
    logs, made = known.logs[divergence.key], divergence.calls
    index = min(m.index for m in made.values())
    side, rest, added = divergence.side, divergence.rest, divergence.added
    if divergence.elsewhere and added is None and (due := left_out(known, logs, index, made)):
        return Suspect(divergence, *due)
    everyone = tuple(sorted(made))
    if added is not None and (divergence.extra or len(side) != len(rest)):
        return Suspect(divergence, added, _smaller(side, rest))
    other, one = sorted((side, rest), key=lambda s: (-len(s), s))
    x, y = made[one[0]], made[other[0]]
    if added is not None:
        asking = [s for s in (one, other) if condition(made[s[0]]) is not None]
        if len(asking) != 1:
            return Suspect(divergence, x, everyone)
        return Suspect(divergence, made[asking[0][0]], asking[0])
    if x.signature.op == y.signature.op and x.text == y.text:
        return _of_arguments(known, divergence, index, one, other)
    looks = (
        _suspicion(x, y, logs[other[0]], known, index),
        _suspicion(y, x, logs[one[0]], known, index),
    )
    if looks[0] == looks[1] and len(one) == len(other):
        often = [_often(m, logs, (*one, *other), known, index) for m in (x, y)]
        if max(often) < 2 * min(often) or often[0] == often[1]:
            return Suspect(divergence, x, everyone)
        looks = (often[0] < often[1], often[1] < often[0])
    if looks[1] > looks[0]:
        return Suspect(divergence, y, _smaller(other, one))
    return Suspect(divergence, x, _smaller(one, other))


def _smaller(callers: tuple[int, ...], rest: tuple[int, ...]) -> tuple[int, ...]:
    """The smaller of two sides: the callers, or those that do not make the call."""
    return rest if len(rest) < len(callers) else callers


def _of_arguments(
    known: CallLogs,
    divergence: CallDivergence,
    index: int,
    one: tuple[int, ...],
    other: tuple[int, ...],
) -> Suspect:
    """The side with other arguments than most ranks, or with arguments that are new on this line;
    all where there is no such majority."""
    logs, made = known.logs[divergence.key], divergence.calls
    x, y = made[one[0]], made[other[0]]
    if len(one) < len(other) and 2 * len(other) >= len(made):
        return Suspect(divergence, x, tuple(sorted({*made} - {*other})))
    new = [_new(m, logs, known, index) for m in (x, y)]
    if len(one) + len(other) < len(made) or new[0] == new[1]:
        return Suspect(divergence, x, tuple(sorted(made)))
    return Suspect(divergence, x, one) if new[0] else Suspect(divergence, y, other)


def _new(made: CallRecord, logs: dict[int, GroupCalls], known: CallLogs, index: int) -> bool:
    """Whether no rank passed these arguments on this line before."""
    start = max(0, index - WINDOW)
    return not any(
        m.text == made.text and m.what == made.what
        for log in list(logs.values())[:RANKS_ASKED]
        for m in known.window(log, start, index - start)
    )


def _suspicion(
    made: CallRecord, other: CallRecord, others: GroupCalls, known: CallLogs, index: int
) -> int:
    """How much a call looks like the one that should not be there.

    A branch on the rank weighs most, then that no rank called it before, then any branch; DDP's own
    calls come in every step and are rarely at fault.
    """
    branches = condition(made) is not None or (avoided(made, other) and not arms(made, other))
    seen = any(
        m.text == made.text
        for m in known.window(others, max(0, index - WINDOW), min(index, WINDOW))
    )
    composite = made.signature.op.startswith("DDP")
    return 4 * branches + 2 * (not seen) + (branch(made) is not None) - composite


def _often(
    made: CallRecord,
    logs: dict[int, GroupCalls],
    ranks: tuple[int, ...],
    known: CallLogs,
    index: int,
) -> int:
    """How often a call was made on these lines so far: what comes in every round is less suspect
    than what comes now and then."""
    start = max(0, index - HISTORY)
    return sum(
        (m.what, m.text) == (made.what, made.text)
        for rank in ranks[:RANKS_ASKED]
        for m in known.window(logs[rank], start, index - start)
    )
