"""The side of a divergence that looks wrong: what explanations start from where nothing proves who
is at fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ...events import StackFrame
from ..calls.call_logs import CallLogs, CallRecord, GroupCalls
from ..control_flow.branches import arms, avoided, branch, condition
from ..control_flow.uneven_backwards import UnevenBackwards
from .align import CallDivergence
from .thresholds import HABIT, HISTORY, RANKS_ASKED, WINDOW


@dataclass(frozen=True)
class Suspect:
    """A call that looks as if it should not be there, or as if some ranks skipped it.

    Attributes:
        call: one of those of `divergence`, or that of a rank a little later.
        ranks: who looks wrong: the callers, or those that do not make the call; all where nothing
            tells.
        rounds: where these ranks skipped the call: in how many earlier rounds, all of them, they
            made it; 0 otherwise.
        uneven: a step before which the ranks of the group ran different numbers of backwards.
        stacks: of the ranks that stand in these calls, see `within_library`.
        averaged: backwards that ranks made before.
    """

    divergence: CallDivergence
    call: CallRecord
    ranks: tuple[int, ...]
    rounds: int = 0
    uneven: UnevenBackwards | None = None
    stacks: Mapping[int, tuple[StackFrame, ...]] = field(default_factory=dict, compare=False)
    averaged: tuple[CallRecord, ...] = ()

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


Said = tuple[tuple[object, ...], tuple[str, ...]]
"""What was called, and the text of the lines that led to it."""

Missed = tuple[CallRecord, tuple[int, ...], int]
"""The call, the ranks that are past it, and the number of earlier rounds."""


def left_out(
    known: CallLogs, logs: dict[int, GroupCalls], index: int, made: dict[int, CallRecord]
) -> Missed | None:
    """The call that was due by all earlier rounds, where some ranks make it and others are past it;
    None where there is none.

    Args:
        index: the number of the present call in the group; made: that of each rank.
    """
    ours = logs[next(iter(made))]
    past = list(known.window(ours, max(0, index - HISTORY), min(index, HISTORY)))
    said = [(m.what, m.text) for m in past]
    in_training = [(m.what, m.text) for m in past if m.step > 0]  # without what sets it up
    return _next(said, said, made) or _next(in_training, said, made) or _due(said, made)


def _next(said: list[Said], every: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """The call that came next in every earlier round.

    Args:
        every: what was said in all rounds, also before training.
    """
    after = [then for now, then in pairwise(said) if now == said[-1]]
    after = after[1:]  # in the first round DDP makes an additional call of its own
    if len(after) < HABIT or len(set(after)) > 1:
        return None
    kept = [m for m in made.values() if (m.what, m.text) == after[0]]
    rest = {r: (m.what, m.text) for r, m in made.items() if m not in kept}
    if not kept or not rest or any(other not in said for other in rest.values()):
        return None
    if any(other != said[-1] and (said[-1], other) in pairwise(every) for other in rest.values()):
        return None  # it came next once, as what is logged in the first step
    if any(_loop_lines(kept[0]) - _loop_lines(made[r]) for r in rest):
        return None  # they may have finished one of the loops around it
    return kept[0], tuple(sorted(rest)), len(after)


def _due(said: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """The call that came in every k-th round of a loop around all ranks, and is due in this one."""
    for one in made.values():
        what = (one.what, one.text)
        places = [n for n, s in enumerate(said) if s == what]
        rounds = [said[x:y] for x, y in pairwise([*places, len(said)])][1:]
        rest = {r: m for r, m in made.items() if (m.what, m.text) != what}
        if len(rounds) <= HABIT or any(r != rounds[0] for r in rounds) or not rest:
            continue
        if all(
            (m.what, m.text) in rounds[0] and _loop_lines(m) == _loop_lines(one)
            for m in rest.values()
        ):
            return (one, tuple(sorted(rest)), len(rounds)) if _loop_lines(one) else None
    return None


def _loop_lines(made: CallRecord) -> set[tuple[str, int]]:
    """The loops around a call."""
    return {
        (spot.file, around.line)
        for place in (made.site.places if made.site else ())
        for around in place.inside
        if (spot := made.rank.location(place.site)) and around.is_loop
    }
