"""Why the calls of ranks diverge, and who is at fault: one class for each rule, asked in the order
of `EXPLANATIONS`. The first that answers wins: it chooses the ranks, and `faults` only adds those
of the same fault in other groups and rounds.

What is certain comes first: arguments that differ, an exception or a thread that was seen; then
what the loops, the earlier rounds and the branches of the program tell; then the order of the calls
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...events import CallSite, Place, Site
from ...report.findings import Related
from ...run import Location, Rank, ranks_do, ranks_text
from ..calls.call_logs import CallRecord, lines
from ..control_flow.branches import (
    condition,
    finalizer,
    head_of,
    parts,
    passed,
    same_lines,
    where,
)
from ..control_flow.caught_exceptions import caught, way_out
from ..control_flow.jumps import may_end, ways_around
from .align import CallDivergence
from .attribution import WHO, Attribution
from .early_return import Retried, ReturnedEarly, came_back, not_skipped, related
from .entered_branches import entered, only_theirs, opposed
from .explanation import (
    ANOTHER_ORDER,
    CallExplanation,
    branch_fix,
    in_another_order,
    order_fix,
    sides_text,
    through,
    what_was_skipped,
)
from .left_loop import LeftLoop, LoopExitKind
from .loop_exits import MAY_END, left_loop
from .recorded_difference import (
    FlagOnSomeRanks,
    GradientsLeftOut,
    InAnotherStep,
    RecordedDifference,
    ReducedMetrics,
    ResumedOnSome,
    ScalerSkipped,
)
from .suspects import Suspect
from .thresholds import WAYS_NAMED
from .unanswered import Arguments, KeyOrder, LackingName, ModelLeftOut, ModelOrder, Unanswered
from .within_library import WithinLibrary

NEW_GROUP_ON_ALL = (
    "call new_group on every rank, in the same order, and keep the group with this rank: "
    "`for ranks in all_groups: group = dist.new_group(ranks); mine = group if rank in ranks "
    "else mine`"
)
NEW_GROUP_OF_MEMBERS = f"{NEW_GROUP_ON_ALL}; or pass `use_local_synchronization=True`"
"""Where only members of a group create it."""


class DifferentGroups(CallExplanation):
    rule = "different-order"
    text = "ranks create different groups at the same number"
    check = "group-creation-mismatch"
    _cause = (
        "every rank of the world must call new_group, members or not, and the calls are matched by "
        "their order"
    )

    def explain(self, suspect: Suspect) -> Attribution | None:
        if suspect.divergence.key.name != "new_group":
            return None
        return self._created(suspect, self._cause)

    def _created(
        self, blamed: Suspect, cause: str, related: tuple[Related, ...] = ()
    ) -> Attribution:
        sides: dict[tuple[int, ...], list[int]] = {}
        for rank, made in blamed.divergence.calls.items():
            sides.setdefault(made.signature.ranks, []).append(rank)
        created = ", ".join(f"{ranks_do(r, 'create')} {members(m)}" for m, r in sides.items())
        return self.blame(
            blamed,
            label="other ranks create a different group",
            summary=f"ranks create different process groups at call {blamed.divergence.index} of "
            f"new_group: {created}",
            cause=cause,
            fix=NEW_GROUP_OF_MEMBERS
            if all(rank in made.signature.ranks for rank, made in blamed.divergence.calls.items())
            else NEW_GROUP_ON_ALL,
            related=related,
            subjects=tuple(members(ranks) for ranks in sides),
        )


class MembersOnly(DifferentGroups):
    rule = "members-only"
    text = "every rank creates only the groups that it is a member of"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        found = [around for made in calls.values() if (around := condition(made)) is not None]
        if suspect.divergence.key.name != "new_group" or len(found) < len(calls):
            return None
        outside = any(rank not in made.signature.ranks for rank, made in calls.items())
        if outside or len({head.line for _, head in found}) != 1:
            return None
        first, (place, head) = next(iter(calls.values())), found[0]
        spot = first.rank.location(place.site)
        if spot is None:
            return None
        blamed = Suspect(suspect.divergence, suspect.call, tuple(sorted(calls)))
        cause = f"{self._cause}; here only its members create each group"
        here = Related("only members enter this branch", head_of(spot, head))
        return self._created(blamed, cause, (here,))


class ExceptionExit(CallExplanation):
    rule = "exception-exit"
    text = "an exception led a rank to a collective in `finally:`, `except:` or `__exit__`"

    def explain(self, suspect: Suspect) -> Attribution | None:
        calls = suspect.divergence.calls
        outs = [out for made in calls.values() if (out := way_out(made)) is not None]
        if not outs:
            return None
        # An exception that came to all of them tells nothing about one.
        if len(outs) < len(calls):
            ranks = tuple(sorted(out.rank.rank for out in outs))
            suspect = Suspect(suspect.divergence, calls[outs[0].rank.rank], ranks)
        label = f"{WHO} reached this call after {outs[0].event.kind}"
        return self.blame(suspect, label=label, cause=outs[0].cause, fix=outs[0].fix)


class Thread(CallExplanation):
    rule = "thread"
    text = "a thread calls a collective in the group that the main thread uses"

    def explain(self, suspect: Suspect) -> Attribution | None:
        every = suspect.divergence.calls
        made = next((m for m in every.values() if m.site and m.site.thread), None)
        if (
            made is None
            or made.site is None
            or all(m.site and m.site.thread for m in every.values())
        ):
            return None
        # The line on record may be the one that starts the thread, instead of that of the call.
        started = not made.site.places
        if not all(_comes(m.rank, made, started) for m in every.values()):
            return None
        blamed = Suspect(suspect.divergence, made, tuple(sorted(every)))
        op, thread = made.signature.op, made.site.thread
        what = f"{op} in thread {thread}, which it starts here"
        return self.blame(
            blamed,
            label=f"starts a thread that calls {op}" if started else ANOTHER_ORDER,
            summary=f"ranks make the same calls in a different order: {sides_text(blamed)}",
            cause=f"rank {made.rank.rank} makes "
            f"{what if started else f'this call in its thread {thread}'}; relative to the calls of "
            "the main thread in the same group, its order is not the same on all ranks",
            fix="create a group once, on every rank and used by nothing else (`own = "
            "dist.new_group()`), and pass it to what this line starts (`async_save(..., "
            "process_group=own)`)"
            if started
            else "give the thread a process group of its own (`dist.new_group()` on every rank, "
            "used by nothing else), or make the call in the main thread",
        )


def _comes(rank: Rank, made: CallRecord, started: bool) -> bool:
    """Whether a rank makes the call in a thread too, or was at the line that starts its thread."""
    if started:
        return any(rank.location(site.id) == made.location for site in rank.of(Site))
    return any(s.thread and lines(rank, s) == made.text for s in rank.of(CallSite))


class SwallowedException(CallExplanation):
    """The ranks that skipped the call are further down in the function of the `try` around it."""

    rule = "swallowed-exception"
    text = "only an exception that was caught leads around the collective"

    def explain(self, suspect: Suspect) -> Attribution | None:
        divergence = suspect.divergence
        if divergence.shifted or "op" not in divergence.differs:
            return None
        for made in divergence.calls.values():
            rest = {r: m for r, m in divergence.calls.items() if m.text != made.text}
            stay = divergence.others(rest)
            if not rest or not all(same_lines(m, made) for m in stay):
                continue
            tried, head = _handler(made) or (None, None)
            if tried and head and all(passed(m, made, tried) for m in rest.values()):
                return self._skipped(Suspect(divergence, made, tuple(sorted(rest))), head)
        return None

    def _skipped(self, blamed: Suspect, head: Location) -> Attribution:
        op = blamed.call.signature.op
        return self.blame(
            blamed,
            label=f"skipped by {WHO}",
            summary=f"{what_was_skipped(blamed)}: {sides_text(blamed)}",
            cause=f"{_caught(blamed.divergence, blamed.ranks)}{ranks_text(blamed.ranks)} continued "
            f"without this call: of the statements around it, only `{head.source}` ({head}) leads "
            "past it, after an exception",
            fix="do not call collectives in a `try` that continues after an exception: move "
            f"{op} out of it, or re-raise in `{head.source}`, so that a failing rank exits",
            related=(Related("leads around the call", head),),
        )


def _handler(made: CallRecord) -> tuple[Place, Location] | None:
    """The place of a call in a `try`, and the handler of that, where no other statement between the
    `try` and the call can lead around the call."""
    for place in made.site.places if made.site else ():
        spot = made.rank.location(place.site)
        for around in place.inside if spot else ():
            if spot and around.kind == "try" and around.ways:
                way = around.ways[0]
                return place, Location(spot.file, way.line, spot.function, way.text)
            if around.kind not in ("with", "try"):
                return None
    return None


class Finalizer(CallExplanation):
    rule = "finalizer"
    text = "the collective is called in `__del__`, when an object is collected"

    def explain(self, suspect: Suspect) -> Attribution | None:
        line = finalizer(suspect.call)
        if line is None or all(map(finalizer, suspect.divergence.calls.values())):
            return None
        op, found = suspect.call.signature.op, entered(suspect)
        return self.blame(
            suspect,
            cause=f"{op} is called in `__del__` ({line}), which Python runs when it collects the "
            "object, at a different time on every rank"
            + (f" (here {where(found[1])})" if found else ""),
            fix=f"do not call collectives in `__del__`: call {op} in an explicit `close()`, at the "
            "same point on every rank",
        )


class LoopExit(CallExplanation):
    """Those who left the loop are at fault where it is known how they left, unless most did."""

    rule = "loop-exit"
    text = "some ranks left a loop that others are still in"
    _skipped = False

    def explain(self, suspect: Suspect) -> Attribution | None:
        left = left_loop(suspect)
        if left is None or left.skipped is not self._skipped:
            return None
        left = left.among([made.rank for made in suspect.divergence.calls.values()])
        why = _why(suspect.divergence, left)
        blames = left.blames or bool(why)
        blamed = self._who(suspect, left, blames)
        ours = blames and tuple(left.ranks) == blamed.ranks
        points = blames or left.how is LoopExitKind.FEWER
        skips = left.skips if ours else None
        summary = f"{what_was_skipped(blamed)}: {sides_text(blamed)}"
        if not left.known:
            summary = f"ranks are in different rounds of a loop: {sides_text(blamed)}"
        return self.blame(
            blamed,
            location=left.place if points else None,
            label=left.label if points else "",
            summary=summary if ours else "",
            cause=f"{why}{left.cause}",
            fix=left.together if why and not left.blames else left.fix,
            related=skips.tried if skips else _may_end(suspect.divergence, left),
            steps=skips.steps if skips else None,
            evidence=left.evidence if ours else None,
            also=skips.ranks if skips else (),
        )

    def _who(self, suspect: Suspect, left: LeftLoop, blames: bool) -> Suspect:
        divergence, gone = suspect.divergence, tuple(left.ranks)
        if not left.known:
            return Suspect(divergence, suspect.call, gone)
        half = 2 * len(gone) - len(divergence.calls)
        if blames and (half <= 0 or left.turn):
            stay = divergence.others(gone)[0]
            call = stay if suspect.call.rank.rank in gone else suspect.call
            return Suspect(divergence, call, gone)
        # Half of them left too early, or the other half too late: nothing tells which.
        decided = divergence.extra or suspect.rounds or condition(suspect.call) is not None
        if blames or decided or half or only_theirs(suspect):
            return suspect
        return Suspect(divergence, suspect.call, tuple(sorted(divergence.calls)))


class SkippedRound(LoopExit):
    rule = "skipped-round"
    text = "some ranks skipped a round of a loop, or the rest of one"
    _skipped = True


class MissingCall(CallExplanation):
    rule = "missing-call"
    text = "a rank skipped a call that it made in every earlier round"

    def explain(self, suspect: Suspect) -> Attribution | None:
        if not suspect.rounds:
            return None
        found, who = entered(suspect), ranks_text(suspect.ranks)
        around = f": {parts(found[1])}" if found else ""
        op = suspect.call.signature.op
        fix = f"call {op} on every rank of the group in every round, or on none"
        back = None
        if ways := ways_around(suspect.call):
            around = ": " + " or ".join(f"`{w.source}` ({w})" for w in ways[:WAYS_NAMED])
        elif not found and (back := came_back(suspect)):
            around, fix = f": {back.text}", not_skipped(back, suspect.call)
        often = (
            f"{who} made this call in each of the last {suspect.rounds} rounds but not in this one"
        )
        if (library := through(suspect.call)) and not back:
            often = f"{library} makes this call; {who} made fewer of its calls than the others"
            fix = "use it on every rank of the group, with inputs that lead to the same calls on "
            fix += "all of them (lists of the same length, none of them empty on some ranks only)"
        return self.blame(
            suspect,
            cause=f"{_caught(suspect.divergence, suspect.ranks)}{often}{around}",
            fix=branch_fix(suspect, *found) if found else fix,
            related=related(back, suspect.ranks) if back else (),
        )


class OppositeBranches(CallExplanation):
    rule = "opposite-branches"
    text = "ranks take different branches of one `if`, with other collectives"

    def explain(self, suspect: Suspect) -> Attribution | None:
        found = entered(suspect)
        if found is None or not opposed(suspect, *found):
            return None
        return self.blame(
            suspect,
            cause=f"ranks take different branches of `{found[1].opening}`, whose collectives "
            "differ or come in a different order",
            fix=branch_fix(suspect, *found),
        )


class Branch(CallExplanation):
    rule = "branch"
    text = "only some ranks enter the branch around the collective"

    def explain(self, suspect: Suspect) -> Attribution | None:
        found = entered(suspect)
        if found is None:
            return None
        return self.blame(suspect, cause=parts(found[1]), fix=branch_fix(suspect, *found))


@dataclass(frozen=True)
class Order(CallExplanation):
    """Nothing but the order of the calls is known.

    Attributes:
        holds: whether that is in this way.
    """

    rule: str
    text: str
    holds: Callable[[Suspect], object]
    cause: str = "collectives are matched by their order in the group, and the orders differ"

    def explain(self, suspect: Suspect) -> Attribution | None:
        if not self.holds(suspect):
            return None
        return self.blame(suspect, cause=self.cause, fix=order_fix(suspect))


EXPLANATIONS: tuple[CallExplanation, ...] = (
    Unanswered(),
    MembersOnly(),
    DifferentGroups(),
    InAnotherStep(),
    LackingName(),
    ModelLeftOut(),
    GradientsLeftOut(),
    Arguments(),
    ExceptionExit(),
    Thread(),
    SwallowedException(),
    Finalizer(),
    Retried(),
    ScalerSkipped(),
    ResumedOnSome(),
    ReturnedEarly(),
    SkippedRound(),
    LoopExit(),
    MissingCall(),
    OppositeBranches(),
    Branch(),
    KeyOrder(),
    ModelOrder(),
    Order("reordered", "ranks make the same calls in a different order", in_another_order),
    FlagOnSomeRanks(),
    ReducedMetrics(),
    RecordedDifference(),
    WithinLibrary(),
    Order("unexplained", "the calls differ, and nothing on record says why", lambda suspect: True),
)


def rules(check: str) -> dict[str, str]:
    """The rules of a check, in the order in which they are asked."""
    return {one.rule: one.text for one in EXPLANATIONS if one.check == check}


def members(ranks: tuple[int, ...]) -> str:
    """The ranks of a group that is created."""
    return str(list(ranks)) if ranks else "all ranks"


def _may_end(divergence: CallDivergence, left: LeftLoop) -> tuple[Related, ...]:
    """The statement that may have ended the loop, where nothing proves that it did."""
    if left.exits or left.how is not LoopExitKind.UNKNOWN:
        return ()
    may = may_end(divergence.others(left.ranks)[0], left.loop)
    return (Related(MAY_END, may),) if may else ()


def _why(divergence: CallDivergence, left: LeftLoop) -> str:
    """What those who left the loop, or skipped a round, caught; empty where none was seen."""
    if not left.known:
        return ""
    if left.skips and left.skips.why:
        return f"{left.skips.why}; "
    return _caught(divergence, left.ranks, left.ways)


def _caught(
    divergence: CallDivergence, ranks: Collection[int], ways: tuple[Location, ...] = ()
) -> str:
    gone = [made.rank for rank, made in divergence.calls.items() if rank in ranks]
    what = caught(gone, [made.rank for made in divergence.others(ranks)], ways)
    return f"{what}; " if what else ""
