"""Why ranks left while others still wait for them, and who is at fault: one class for each rule,
asked in the order of `EXPLANATIONS`. The first that answers wins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...events import CallSite
from ...report.evidence_names import STEPS_TAKEN
from ...report.findings import Evidence, Related
from ...run import Location, Rank, counted, ranks_do, ranks_text
from ..control_flow.branches import (
    around,
    branch,
    head_of,
    leading,
    makes,
    parts,
    unbranched,
    unwrapped,
)
from ..control_flow.caught_exceptions import caught
from ..control_flow.early_returns import early_return_in_round
from ..control_flow.jumps import may_end
from ..control_flow.resumed import RESUMED_ON_SOME, resumed
from ..rank_differences import LOAD_ALL, ONLY_SOME
from ..waiting.failures import (
    destroyed,
)
from ..waiting.unwaited_sends import KEEP_HANDLES, unwaited_send
from ..waiting.wait_graph import unanswered, victims
from .attribution import Attribution, Explanation
from .departure import Departure, exit_called
from .early_return import not_skipped
from .early_return import related as ways_of
from .left_loop import LeftLoop, LoopExitKind
from .loop_exits import MAY_END, uneven_since

UNEVEN_SINCE = "in_different_epochs_since_step"
"""Name of the evidence from which step on the ranks are in different epochs."""


class DepartureExplanation(Explanation[Departure]):
    """An explanation of a departure."""

    def blame(
        self,
        why: Departure,
        fix: str,
        *,
        cause: str = "",
        spot: Location | None = None,
        label: str = "",
        related: tuple[Related, ...] = (),
        evidence: Evidence | None = None,
        culprits: tuple[int, ...] = (),
    ) -> Attribution:
        """The attribution, by default to the ranks that left.

        Args:
            spot: the line by which they left, with its label.
        """
        call, here = why.waited_in
        others, left = ranks_text(why.others), why.left
        did = "destroyed the process group" if why.destroyed else "exited"
        cause = cause or f"{why.ended} {_lacks(why)}"
        loop = why.loop
        ways = loop.ways if loop else ()
        reason = loop.skips.why if loop and loop.skips else ""
        reason = reason or caught((s.rank for s in left), (s.rank for s in why.waiting), ways)
        cause = f"{reason}; {cause}" if reason else cause
        if went_on := [s.rank.rank for s in why.waiting if s.rank.exit_code == 0]:
            cause += f"; {ranks_text(went_on)} caught the connection error and continued"
        waits = (Related(f"{ranks_do(why.others, 'wait')} here", here),) if here and spot else ()
        return Attribution(
            rule=self.rule,
            culprits=culprits or why.ranks,
            location=spot or here,
            label=label if spot else f"{others} waited here",
            summary=f"{ranks_text(why.ranks)} {did} while {ranks_do(why.others, 'wait')} for "
            f"{'it' if len(left) == 1 else 'them'} in {call}",
            cause=f"{cause}; the errors of {others} follow from this",
            fix=fix,
            call=why.first.made,
            related=(*waits, *related),
            subjects=(why.first.made.signature.op,) if why.first.made else (),
            steps=why.first.steps,
            evidence={
                "left": ranks_text(why.ranks),
                STEPS_TAKEN: {str(s.rank.rank): s.rank.steps for s in (*left, *why.waiting)},
                **(evidence or {}),
                **(victims(why.now, why.waiting) if why.first.made else {"waiting_in": call}),
            },
        )


class Branch(DepartureExplanation):
    rule = "branch"
    text = "most ranks entered a branch that the ranks that left did not"

    def explain(self, why: Departure) -> Attribution | None:
        return self._entered(why, why.ranks)

    def _entered(self, why: Departure, culprits: tuple[int, ...]) -> Attribution | None:
        if why.only is None:
            return None
        (spot, head), made, extra = why.only, why.lacking, why.extra
        then = "without that call"
        if extra is not None:
            then = (
                f"without {extra.place}: from it on, the calls of {ranks_text(why.others)} were "
                "matched with the next ones of the others"
            )
        return self.blame(
            why,
            unwrapped(head, made)
            if made and made.signature.op.startswith("DDP")
            else unbranched(head, "call it"),
            cause=f"{parts(head)}; {why.ended} {then}",
            spot=(extra.caller or extra.location) if extra else None,
            label=f"only {ranks_text(why.others)} made this call",
            related=(Related(leading(head, why.ranks), spot),),
            culprits=culprits,
        )


class EnteredAlone(Branch):
    """Those who entered the branch are at fault if they are no more than those who left."""

    rule = "entered-alone"
    text = "the ranks that wait entered a branch that the others did not"

    def explain(self, why: Departure) -> Attribution | None:
        return self._entered(why, why.others) if len(why.others) <= len(why.ranks) else None


class LoopExit(DepartureExplanation):
    rule = "loop-exit"
    text = "the ranks left a loop that others are still in"
    _skipped = False

    def explain(self, why: Departure) -> Attribution | None:
        loop, made = why.loop, why.first.made
        if loop is None or loop.skipped is not self._skipped:
            return None
        cause = f"{why.ended} {_lacks(why)}"
        if loop.ways or loop.exits or loop.how is LoopExitKind.FEWER:
            cause = f"{loop.cause}{_mixed(why) if loop.skipped else ''}; {cause}"
        unsure = loop.how is LoopExitKind.UNKNOWN and loop.place == loop.loop
        may = may_end(made, loop.loop) if unsure and made else None
        since = uneven_since(why.leaver, why.first.rank, loop.loop)
        return self.blame(
            why,
            loop.fix,
            cause=cause,
            spot=loop.place,
            label=loop.label,
            related=(Related(MAY_END, may),) if may else (),
            evidence={**({} if since is None else {UNEVEN_SINCE: since}), **loop.evidence},
        )


class SkippedRound(LoopExit):
    rule = "skipped-round"
    text = "the ranks that left skipped rounds of a loop before"
    _skipped = True


class ReturnedEarly(DepartureExplanation):
    rule = "early-return"
    text = "the ranks did all rounds, and came back once from a function without its collective"

    def explain(self, why: Departure) -> Attribution | None:
        made, loop = why.first.made, why.loop
        known = loop and (loop.ways or loop.exits or loop.how is not LoopExitKind.UNKNOWN)
        if made is None or loop is None or known or not why.to_its_end:
            return None
        found = early_return_in_round(made)
        if found is None or not makes(why.leaver, made.spots):
            return None
        return self.blame(
            why,
            not_skipped(found, made),
            cause=f"{ranks_text(why.ranks)} came back from `{found.function}` "
            f"without this call in some round: {found.text}; {why.ended} {_lacks(why)}",
            related=ways_of(found, why.ranks),
        )


class NotEntered(DepartureExplanation):
    rule = "branch-not-entered"
    text = "the ranks did all rounds, and did not enter a branch around the collective in one"

    def explain(self, why: Departure) -> Attribution | None:
        made, loop = why.first.made, why.loop
        if made is None or loop is None or loop.ways or loop.exits or not why.to_its_end:
            return None
        equal = why.leaver.steps == why.first.rank.steps > 0
        before = makes(why.leaver, made.spots)
        if (found := branch(made, past=True)) is None:
            return None
        if not (equal and before and _trains_in(why, loop)):
            return None
        place, head = found
        spot = made.rank.location(place.site)
        spot = head_of(spot, head) if spot is not None else None
        did, label = f"did not enter `{head.label}` in this round", "did not enter this branch"
        if head.kind == "past":
            did = f"skipped the rest of a round at `{head.text}`"
            label = "skipped the rest of a round here"
        return self.blame(
            why,
            unbranched(head, "call it"),
            cause=f"{ranks_text(why.ranks)} did as many steps, and {did}; {why.ended} "
            f"{_lacks(why)}",
            spot=spot,
            label=f"{ranks_text(why.ranks)} {label}",
        )


def _trains_in(why: Departure, loop: LeftLoop) -> bool:
    """Whether the rank that left trained within the loop, before the line from which the others
    came to their call: equal steps are equal rounds then."""
    made = why.first.made
    waits = _line_in(why.first.rank, made.site, loop) if made is not None else -1
    trains = [
        line
        for site in why.leaver.of(CallSite)
        if site.internal and (line := _line_in(why.leaver, site, loop)) >= 0
    ]
    return bool(trains) and min(trains) < waits


def _line_in(rank: Rank, site: CallSite | None, loop: LeftLoop) -> int:
    """The line in the body of a loop that led to a call, -1 for none."""
    lines_in = [
        spot.line
        for _, spot, head in around(rank, site)
        if (spot.file, head.line) == (loop.loop.file, loop.loop.line)
    ]
    return lines_in[-1] if lines_in else -1


class ResumedOnSome(DepartureExplanation):
    rule = RESUMED_ON_SOME
    text = "only those that left load a checkpoint, and a loop has fewer rounds on them for it"

    def explain(self, why: Departure) -> Attribution | None:
        ranks = [s.rank for s in (*why.left, *why.waiting)]
        found = resumed(why.loop.loop, ranks, math.inf) if why.loop else None
        if found is None or found.ranks != tuple(sorted(why.ranks)):
            return None
        return self.blame(
            why,
            LOAD_ALL,
            cause=found.cause,
            spot=found.line,
            label=ONLY_SOME,
            related=found.related,
            evidence=found.evidence,
        )


class UnwaitedSend(DepartureExplanation):
    rule = "unwaited-send"
    text = "the ranks left without waiting for messages that they had begun to send"

    def explain(self, why: Departure) -> Attribution | None:
        waiting = {s.rank.rank for s in why.waiting if s.call is not None and s.call.index < 0}
        sent = next((m for s in why.left if (m := unwaited_send(why.now, s, waiting))), None)
        if sent is None:
            return None
        return self.blame(
            why,
            KEEP_HANDLES + ", or call `dist.barrier()` before the ranks exit",
            cause=f"{why.ended} without waiting for the handles of `isend` calls: messages that "
            "are in flight then are lost",
            spot=sent.location,
            label="the handle is not waited for",
        )


@dataclass(frozen=True)
class HowTheyEnded(DepartureExplanation):
    """Nothing but how the ranks ended says why: one row for each way.

    Attributes:
        holds: whether they ended in this way.
        fix: may name what they called to exit.
    """

    rule: str
    text: str
    holds: Callable[[Departure], object]
    fix: str

    def explain(self, why: Departure) -> Attribution | None:
        if not self.holds(why):
            return None
        spot, label = why.exited, "exited here"
        if why.to_its_end and not why.in_message and (end := destroyed(why.leaver)):
            spot, label = why.leaver.location(end.site), "destroyed the group here"
        return self.blame(why, self.fix.format(exit_called(why.leaver)), spot=spot, label=label)


EXPLANATIONS: tuple[DepartureExplanation, ...] = (
    EnteredAlone(),
    Branch(),
    ReturnedEarly(),
    NotEntered(),
    SkippedRound(),
    ResumedOnSome(),
    LoopExit(),
    UnwaitedSend(),
    HowTheyEnded(
        "exit-raised",
        "a `SystemExit`, perhaps of a signal handler, ended the ranks",
        lambda why: why.exit_raised,
        "share the decision to exit with `all_reduce`, and leave the loop on all ranks in the same "
        "round; let a signal handler only set a flag",
    ),
    HowTheyEnded(
        "exit-called",
        "the ranks called `sys.exit(0)` or the like",
        lambda why: why.exit_called,
        "share the decision to exit with `all_reduce`, and call `{}` on all ranks in the same "
        "round; where it comes after the loop, run the same number of steps on all ranks "
        "(`DistributedSampler`, `drop_last=True`)",
    ),
    HowTheyEnded(
        "unmatched-message",
        "a send or receive has no counterpart on a rank that left",
        lambda why: why.in_message,
        "match every receive with a send on the other rank, and every send with a receive; call "
        "`dist.barrier()` before the ranks exit",
    ),
    HowTheyEnded(
        "group-destroyed",
        "the ranks destroyed their process group",
        lambda why: why.destroyed,
        "destroy the group only when no rank communicates any more: make the same calls on every "
        "rank before `destroy_process_group()`",
    ),
    HowTheyEnded(
        "program-ended",
        "the program ended on these ranks",
        lambda why: True,
        "run the same number of steps on all ranks (`DistributedSampler`, `drop_last=True`), share "
        "the decision to stop with `all_reduce`, or wrap the loop in `with Join([model]):`",
    ),
)
RULES = {one.rule: one.text for one in EXPLANATIONS}


def _mixed(why: Departure) -> str:
    """What follows for the rounds after one that was skipped: nothing failed in them."""
    its, made = "its" if len(why.left) == 1 else "their", why.first.made
    text = f"; from then on {its} rounds are matched with earlier ones of {ranks_text(why.others)}"
    averages = made is not None and made.signature.op == "DDP backward"
    return text + (", so gradients of different steps are averaged" if averages else "")


def _lacks(why: Departure) -> str:
    """What a rank did not do before it left."""
    if not why.in_message:
        return "without that call"
    leaver, waiting = why.left[0], why.first
    lacking = next((m for m in unanswered(why.now, waiting) if m.peer is leaver), None)
    rings = [s.rank.ring for s in (leaver, waiting)]
    # A ring that has wrapped around lacks the first messages, so that they cannot be counted.
    if lacking is None or any(r is None or r.count > len(r.calls) for r in rings):
        return "while messages were in flight"
    one, other = leaver.rank.rank, waiting.rank.rank
    match = "received" if lacking.sends else "sent"
    did = "sends" if lacking.sends else "receives"
    here, there = ("from", "to") if lacking.sends else ("to", "from")
    return (
        f"without a matching call: it {match} {counted(lacking.theirs, 'message')} {here} rank "
        f"{other}, which {did} {lacking.mine} {there} rank {one}"
    )
