"""Why the ranks of a group are in different collectives: the rule that decides, and its words.

`explain` decides once which rule holds; label, summary, cause and fix follow from that.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace

from ...events import Place, Statement
from ...run import Location, State, ranks_text
from ..control_flow.branches import (
    condition,
    finalizer,
    parts,
    unbranched,
    unwrapped,
    where,
)
from ..control_flow.caught_exceptions import ExceptionExit, caught, way_out
from ..control_flow.jumps import ways_around
from .divergence import CallDivergence
from .divergence_causes import SwallowedException, as_extra_call, entered, opposed, swallowed
from .loop_exits import LoopExit, LoopExitKind, left_loop, with_leavers_at_fault
from .mismatch_report import sides_text
from .thread_waits import call_of_thread, group_fix, only_start_is_known, order_text

DEADLOCKED = "the ranks are deadlocked"
_WAYS_NAMED = 2


class Rule(enum.Enum):
    """What made the ranks diverge; the value is the rule's name in a finding."""

    EXCEPTION_EXIT = "exception-exit"
    SWALLOWED_EXCEPTION = "swallowed-exception"
    THREAD = "thread"
    FINALIZER = "finalizer"
    SKIPPED_ROUND = "skipped-round"
    LOOP_EXIT = "loop-exit"
    MISSING_CALL = "missing-call"
    OPPOSITE_BRANCHES = "opposite-branches"
    BRANCH = "branch"
    KEY_ORDER = "key-order"
    REORDERED = "reordered"
    GROUP_ORDER = "group-order"
    UNEXPLAINED = "unexplained"


RULES = {
    Rule.EXCEPTION_EXIT: "an exception led a rank to a collective in `finally:` or `except:`",
    Rule.SWALLOWED_EXCEPTION: "only an exception that was caught leads around the collective",
    Rule.THREAD: "a thread calls a collective in the group that the main thread uses",
    Rule.FINALIZER: "the collective is called in `__del__`, when an object is collected",
    Rule.SKIPPED_ROUND: "some ranks skipped a round of a loop, or the rest of one",
    Rule.LOOP_EXIT: "some ranks left a loop that others are still in",
    Rule.MISSING_CALL: "a rank skipped a call that it made in every earlier round",
    Rule.OPPOSITE_BRANCHES: "ranks take different branches of one `if`, with other collectives",
    Rule.BRANCH: "only some ranks enter the branch around the collective",
    Rule.KEY_ORDER: "ranks loop over the same names (keys, a set) in a different order",
    Rule.REORDERED: "ranks make the same calls in a different order",
    Rule.GROUP_ORDER: "ranks wait for each other in collectives of different groups",
    Rule.UNEXPLAINED: "the calls differ, and nothing on record says why",
}

Branch = tuple[Place, Statement]


@dataclass(frozen=True)
class Explanation:
    """A divergence, the rule that explains it, and what that rule is about.

    Attributes:
        divergence: with the ranks at fault, and the call to point at.
        exit: the exception that led a rank to its call (`EXCEPTION_EXIT`).
        swallowed: the handler that led around the call (`SWALLOWED_EXCEPTION`).
        finalizer: the line in `__del__` that led to the call (`FINALIZER`).
        loop: the loop that ranks left, or skipped a round of.
        branch: the branch that only the ranks at fault entered.
        opposite: other ranks are in another branch of the same `if`.
    """

    rule: Rule
    divergence: CallDivergence
    exit: ExceptionExit | None = None
    swallowed: SwallowedException | None = None
    finalizer: Location | None = None
    loop: LoopExit | None = None
    branch: Branch | None = None
    opposite: bool = False

    @property
    def blamed_loop(self) -> LoopExit | None:
        """The loop, where those who left it, or skipped a round of it, are the ranks at fault."""
        loop = self.loop
        if self.rule in (Rule.EXCEPTION_EXIT, Rule.SWALLOWED_EXCEPTION) or loop is None:
            return None
        return loop if loop.blames and tuple(loop.ranks) == self.divergence.culprits else None

    @property
    def location(self) -> Location | None:
        return self.blamed_loop.place if self.blamed_loop else self.divergence.location

    @property
    def op(self) -> str:
        return self.divergence.call.signature.op

    @property
    def who(self) -> str:
        return ranks_text(self.divergence.culprits)

    def label(self, culprits: Collection[int]) -> str:
        """What is wrong at the line; `culprits`: the ranks at fault, of other groups too."""
        divergence, who = self.divergence, ranks_text(culprits)
        if self.blamed_loop:
            return self.blamed_loop.label
        if self.exit:
            return f"{who} reached this call after {self.exit.event.kind}"
        if self.rule is Rule.THREAD and only_start_is_known(divergence.call):
            return f"starts a thread that calls {self.op}"
        if self._skipped:
            return f"skipped by {who}"
        if divergence.extra:
            return "not called by every rank"
        if divergence.shifted:
            return "called in a different order than on the other ranks"
        return "not what the other ranks call"

    @property
    def summary(self) -> str:
        number = f"call {self.divergence.index} of {self.divergence.key}"
        sides = f"at {number}, {sides_text(self.divergence)}"
        blamed, divergence = self.blamed_loop, self.divergence
        if blamed is not None and not blamed.known:
            return f"ranks are in different rounds of a loop: {sides}"
        one_op = len({made.signature.op for made in divergence.calls.values()}) == 1
        if one_op and not divergence.extra and not divergence.shifted:
            return f"ranks make different calls of {self.op}: {sides}"
        if blamed or (self._skipped and not divergence.extra and not divergence.shifted):
            return f"{self.who} skipped {self.op}: {sides}"
        if divergence.extra:
            return f"only some ranks call {self.op} here: {sides}"
        if divergence.shifted:
            return f"ranks make the same calls in a different order: {sides}"
        return f"ranks call different collectives: {sides}"

    @property
    def _skipped(self) -> bool:
        """Whether the ranks at fault did not make the call: the others entered its branch, or it
        came in every earlier round."""
        divergence = self.divergence
        at_fault = divergence.call.rank.rank in divergence.culprits
        entered_it = not at_fault and not divergence.shifted and self.branch is not None
        return bool(divergence.left_out or self.swallowed or entered_it)

    def cause(self, deadlocked: bool) -> str:
        """What made the ranks diverge, and what follows from it."""
        return f"{self._reason}; {self._effect(deadlocked)}"

    def _effect(self, deadlocked: bool) -> str:
        if deadlocked:
            return _deadlock(self.divergence)
        later = "" if self.divergence.width else " or the run hangs later"
        return f"different calls are matched with each other, so their data gets mixed up{later}"

    @property
    def _reason(self) -> str:
        divergence, branch = self.divergence, self.branch
        match self.rule:
            case Rule.EXCEPTION_EXIT if self.exit:
                return self.exit.cause
            case Rule.SWALLOWED_EXCEPTION if self.swallowed:
                return f"{_caught(divergence, divergence.culprits)}{self.swallowed.cause}"
            case Rule.THREAD:
                return order_text(divergence.call)
            case Rule.FINALIZER:
                here = f" (here {where(branch[1])})" if branch else ""
                return (
                    f"{self.op} is called in `__del__` ({self.finalizer}), which Python runs when "
                    f"it collects the object, at a different time on every rank{here}"
                )
            case Rule.SKIPPED_ROUND | Rule.LOOP_EXIT if self.loop:
                return f"{_why(divergence, self.loop)}{self.loop.cause}"
            case Rule.MISSING_CALL:
                return (
                    f"{_caught(divergence, divergence.culprits)}{self.who} made this call in each "
                    f"of the last {divergence.left_out} rounds but not in this one{self._around}"
                )
            case Rule.OPPOSITE_BRANCHES if branch:
                return (
                    f"ranks take different branches of `{branch[1].opening}`, whose collectives "
                    "differ or come in a different order"
                )
            case Rule.BRANCH if branch:
                return parts(branch[1])
            case Rule.KEY_ORDER:
                return (
                    "the ranks loop over the same names in a different order (a `set` of strings "
                    "is ordered differently in every process)"
                )
        return "collectives are matched by their order in the group, and the orders differ"

    @property
    def _around(self) -> str:
        """What leads around the call that a rank skipped."""
        if ways := ways_around(self.divergence.call):
            return ": " + " or ".join(f"`{w.source}` ({w})" for w in ways[:_WAYS_NAMED])
        return f": {parts(self.branch[1])}" if self.branch else ""

    @property
    def fix(self) -> str:
        divergence, branch, op = self.divergence, self.branch, self.op
        match self.rule:
            case Rule.EXCEPTION_EXIT if self.exit:
                return self.exit.fix
            case Rule.SWALLOWED_EXCEPTION if self.swallowed:
                return self.swallowed.fix
            case Rule.THREAD:
                return group_fix(divergence.call)
            case Rule.FINALIZER:
                return (
                    f"do not call collectives in `__del__`: call {op} in an explicit `close()`, at "
                    "the same point on every rank"
                )
            case Rule.SKIPPED_ROUND | Rule.LOOP_EXIT if self.loop:
                return self.loop.fix
        if divergence.left_out and branch is None:
            return f"call {op} on every rank of the group in every round, or on none"
        # Before the branches: both sides make the call, so moving it out of one helps nobody.
        if divergence.shifted and not divergence.extra:
            return (
                "call the collectives in the same order on every rank (sort the keys looped over)"
            )
        if branch is not None and self.opposite:
            return (
                "call the same collectives in the same order in every branch of "
                f"`{branch[1].opening}`, or once outside of it"
            )
        if branch is not None and op.startswith("DDP"):
            return unwrapped(branch[1], divergence.call)
        if branch is not None:
            here = divergence.location
            what = f"call {op}" if here is None or op in here.source else "make this call"
            return unbranched(branch[1], what)
        if len(divergence.culprits) == len(divergence.calls):
            return "call the same collectives in the same order on every rank of the group"
        return f"call {op} on every rank of the group, or on none"


def explain(found: CallDivergence) -> Explanation:
    """The first rule that explains a divergence.

    What is certain comes first: an exception or a thread that was seen, then what the loops, the
    earlier rounds and the branches of the program tell, then the order of the calls alone.
    """
    divergence = _attributed(found)
    if outs := _exits(divergence):
        return Explanation(Rule.EXCEPTION_EXIT, divergence, exit=outs[0])
    thread = call_of_thread(divergence)
    around = None if thread else swallowed(divergence)
    branch = entered(divergence)
    known = Explanation(
        Rule.UNEXPLAINED,
        divergence,
        swallowed=around,
        loop=left_loop(divergence),
        branch=branch,
        opposite=branch is not None and opposed(divergence, *branch),
    )
    if around:
        return replace(known, rule=Rule.SWALLOWED_EXCEPTION)
    if thread:
        return replace(known, rule=Rule.THREAD)
    if (line := _when_collected(divergence)) is not None:
        return replace(known, rule=Rule.FINALIZER, finalizer=line)
    return replace(known, rule=_rule_of(known))


def _rule_of(known: Explanation) -> Rule:
    """The rule of a divergence that neither an exception nor a thread explains."""
    divergence = known.divergence
    if known.loop is not None:
        skipped = known.loop.how is LoopExitKind.SKIPPED
        return Rule.SKIPPED_ROUND if skipped else Rule.LOOP_EXIT
    if divergence.left_out:
        return Rule.MISSING_CALL
    if known.branch is not None:
        return Rule.OPPOSITE_BRANCHES if known.opposite else Rule.BRANCH
    if divergence.call.key:
        return Rule.KEY_ORDER
    return Rule.REORDERED if divergence.shifted and not divergence.extra else Rule.UNEXPLAINED


def _attributed(divergence: CallDivergence) -> CallDivergence:
    """A copy with the ranks at fault that an exception led there, or that surely left the loop;
    with all ranks where threads make calls in any order."""
    if made := call_of_thread(divergence):
        every = tuple(sorted(divergence.calls))
        return replace(divergence, culprits=every, call=made, depth=0, shifted=True, extra=False)
    outs = _exits(divergence)
    if not outs and (around := swallowed(divergence)):
        return replace(divergence, culprits=around.ranks, call=around.made, depth=0, left_out=0)
    # An exception that came to all of them tells nothing about one.
    if not outs or len(outs) == len(divergence.calls):
        return _undecided(as_extra_call(with_leavers_at_fault(divergence)))
    place = divergence.calls[outs[0].rank.rank]
    culprits = tuple(sorted(out.rank.rank for out in outs))
    return replace(divergence, culprits=culprits, call=place, depth=0, left_out=0)


def _undecided(divergence: CallDivergence) -> CallDivergence:
    """A copy with all ranks at fault where half of them left a loop too early, or the other half
    too late: nothing tells which."""
    left = left_loop(divergence)
    decided = divergence.extra or divergence.left_out or condition(divergence.call) is not None
    if left is None or left.blames or decided or 2 * len(left.ranks) != len(divergence.calls):
        return divergence
    return replace(divergence, culprits=tuple(sorted(divergence.calls)))


def _exits(divergence: CallDivergence) -> list[ExceptionExit]:
    return [out for made in divergence.calls.values() if (out := way_out(made)) is not None]


def _when_collected(divergence: CallDivergence) -> Location | None:
    """The line in a `__del__` that led to the call of the ranks at fault, where others are in a
    call that none led to."""
    if all(finalizer(made) for made in divergence.calls.values()):
        return None
    return finalizer(divergence.call)


def _deadlock(divergence: CallDivergence) -> str:
    """What follows where no rank goes on: some of the calls may have returned by then."""
    ended = {
        m.signature.op: m.rank.rank
        for m in divergence.calls.values()
        if m.call is not None and m.call.state is State.DONE
    }
    if not ended:
        return DEADLOCKED
    op, rank = min(ended.items())
    return (
        f"different calls were matched with each other ({op} on rank {rank} returned with the "
        f"data of another call), and now {DEADLOCKED}"
    )


def _why(divergence: CallDivergence, left: LoopExit) -> str:
    """What those who left the loop, or skipped a round, caught; empty where none was seen."""
    if not left.known:
        return ""
    if left.skips and left.skips.why:
        return f"{left.skips.why}; "
    return _caught(divergence, left.ranks, left.ways)


def _caught(
    divergence: CallDivergence, ranks: Collection[int], ways: tuple[Location, ...] = ()
) -> str:
    gone = [made.rank for n, made in divergence.calls.items() if n in ranks]
    stay = [made.rank for n, made in divergence.calls.items() if n not in ranks]
    what = caught(gone, stay, ways)
    return f"{what}; " if what else ""
