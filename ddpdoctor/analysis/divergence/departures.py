"""Why ranks left while others still wait for them, and who is at fault: one class for each rule,
asked in the order of `EXPLANATIONS`. The first that answers wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ...events import CallSite, RankExiting, Statement
from ...report.evidence_names import STEPS_TAKEN
from ...report.findings import Evidence, Related
from ...run import Location, Rank, Run, counted, ranks_do, ranks_text, shorten
from ..calls.call_logs import CallRecord, lines
from ..calls.rank_conditions import on_rank
from ..control_flow.branches import (
    branch,
    condition,
    head_of,
    is_inside,
    leading,
    parts,
    unbranched,
    unwrapped,
)
from ..control_flow.caught_exceptions import caught
from ..control_flow.early_returns import early_return_in_round
from ..control_flow.jumps import may_end
from ..waiting.failures import (
    EXIT_RAISED,
    destroyed,
    failure,
    failures,
    lost_peer,
    raised_exit,
    stopped,
)
from ..waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ..waiting.wait_graph import gone, unanswered, victims, waiting_for
from .attribution import Attribution, Explanation
from .early_return import not_skipped
from .early_return import related as ways_of
from .left_loop import LeftLoop, LoopExitKind
from .loop_exits import MAY_END, loop_of_leaver, uneven_since
from .thresholds import HISTORY

BranchLine = tuple[Location, Statement]
"""A branch that only some ranks enter, and its line."""

UNEVEN_SINCE = "in_different_epochs_since_step"
"""Name of the evidence from which step on the ranks are in different epochs."""


@dataclass(frozen=True)
class Departure:
    """Ranks that left without an error, and ranks that wait for them; the first of each stand for
    all."""

    now: Snapshot
    left: list[RankSnapshot]
    waiting: list[RankSnapshot]

    @property
    def leaver(self) -> Rank:
        return self.left[0].rank

    @property
    def first(self) -> RankSnapshot:
        return self.waiting[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(s.rank.rank for s in self.left)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(sorted({s.rank.rank for s in self.waiting}))

    @cached_property
    def waited_in(self) -> tuple[str, Location | None]:
        """What the others waited in, as far as it is known: `all_reduce (train.py:8)`, and its
        line."""
        stand = self.first
        if stand.made:
            return stand.made.place, stand.made.location
        failed = failure(stand.rank)
        here = failed.location if failed else None
        frames = failed.exception.frames if failed and failed.exception else ()
        last = max((n for n, f in enumerate(frames) if f.user), default=-1)
        name = frames[last + 1].function if last + 1 < len(frames) else ""
        name = name or "communication inside torch"
        return f"{name} ({here})" if here else name, here

    @cached_property
    def only(self) -> BranchLine | None:
        """The branch around the call in which others wait, where the rank that left never made that
        call: its condition is on the rank, or the other rank made the call before."""
        made, stand = self.first.made, self.first
        if made is None:
            return _branch_of_exception(stand.rank)
        sites = self.leaver.of(CallSite)
        if any(lines(self.leaver, site) == made.text for site in sites):
            return None
        found = condition(made)
        if found is None and _made_before(self.now, stand, made):
            found = branch(made)
        spot = stand.rank.location(found[0].site) if found else None
        if found is None or spot is None:
            return None
        if any(is_inside(self.leaver, site, spot.file, found[1].line) for site in sites):
            return None  # the rank that left was in there, too
        return head_of(spot, found[1]), found[1]

    @property
    def to_its_end(self) -> bool:
        """Whether the rank that left came to the end of its program, or may still."""
        leaving = self.leaver.latest(RankExiting)
        return leaving is None or leaving.how == "return"

    @property
    def exited(self) -> Location | None:
        """The line on which the rank that left exited before its end."""
        leaving = self.leaver.latest(RankExiting)
        return None if leaving is None or self.to_its_end else self.leaver.location(leaving.site)

    @cached_property
    def loop(self) -> LeftLoop | None:
        """The loop that the rank left by its end; nothing in its program points at a message."""
        if self.only or self.first.made is None or not self.to_its_end:
            return None
        calls = self.leaver.ring.last_calls if self.leaver.ring else ()
        sites = {site.id: site for site in reversed(self.leaver.of(CallSite))}
        last = next((sites[c.site] for c in reversed(calls) if c.site in sites), None)
        loop = loop_of_leaver(self.leaver, last, self.first.made)
        unknown = loop is None or loop.how is LoopExitKind.UNKNOWN
        return None if self.in_message and unknown else loop

    @property
    def in_message(self) -> bool:
        """Whether the others wait in a point-to-point call."""
        return self.first.call is not None and self.first.call.index < 0

    @property
    def exit_raised(self) -> bool:
        """Whether a `SystemExit` of unknown origin ended all of them."""
        return all(raised_exit(s.rank) for s in self.left)

    @property
    def exit_called(self) -> str:
        """What all of them called to exit (`sys.exit`); empty where they came to the end of the
        program, or that is not known."""
        called = {_exit_called(s.rank) for s in self.left}
        return called.pop() if len(called) == 1 else ""

    @property
    def destroyed(self) -> bool:
        """Whether they destroyed their process groups, and their processes may have continued."""
        return not all(s.rank.of(RankExiting) or s.rank.exit_code == 0 for s in self.left)

    @property
    def ended(self) -> str:
        """How they ended: `rank 1 exited with status 0`."""
        who = ranks_text(self.ranks)
        if self.exit_raised:
            return f"{who} {'was' if len(self.left) == 1 else 'were'} ended by {EXIT_RAISED},"
        if self.exit_called:
            return f"{who} called `{self.exit_called}` and exited with status 0"
        return (
            f"{who} {'destroyed the process group' if self.destroyed else 'exited with status 0'}"
        )


def departure(run: Run) -> Departure | None:
    """The ranks that left a run too early; None for none."""
    now = snapshot_of(run)
    if stopped(run) and now.stall is None:
        return None
    left = [s for s in gone(now) if _well(s.rank)]
    waiting = [s for one in left for s in waiting_for(now, one)]
    if not left and (waiting := _lost(run, now)):
        left = [s for s in _peers(now, waiting) if _well(s.rank)]
    return Departure(now, left, waiting) if left else None


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
        (spot, head), made = why.only, why.first.made
        return self.blame(
            why,
            unwrapped(head, made)
            if made and made.signature.op.startswith("DDP")
            else unbranched(head, "call it"),
            cause=f"{parts(head)}; {why.ended} without that call",
            related=(Related(leading(head), spot),),
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
        if found is None or not any(
            lines(why.leaver, site) == made.text for site in why.leaver.of(CallSite)
        ):
            return None
        return self.blame(
            why,
            not_skipped(found, made),
            cause=f"{ranks_text(why.ranks)} came back from `{found.function}` "
            f"without this call in some round: {found.text}; {why.ended} {_lacks(why)}",
            related=ways_of(found),
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
        return self.blame(why, self.fix.format(_exit_called(why.leaver)), spot=spot, label=label)


EXPLANATIONS: tuple[DepartureExplanation, ...] = (
    EnteredAlone(),
    Branch(),
    ReturnedEarly(),
    SkippedRound(),
    LoopExit(),
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


def _exit_called(rank: Rank) -> str:
    leaving = rank.latest(RankExiting)
    return leaving.how if leaving and leaving.site >= 0 and leaving.how != "return" else ""


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


def _lost(run: Run, now: Snapshot) -> list[RankSnapshot]:
    """Ranks that lost the connection to others where nothing else failed, and where the records do
    not say which rank was missing: in no call, in one of DDP's, or in a message."""
    found = failures(run)
    if not now.failed or any(f.kind != "lost" for f in found):
        return []
    return [
        now.by_rank[f.rank.rank]
        for f in found
        if f.exception
        and lost_peer(f.exception)
        and f.rank.default_group
        and not _met(now.by_rank[f.rank.rank])
    ]


def _met(stand: RankSnapshot) -> bool:
    """Whether a rank was in a collective of its program, which no member of the group missed."""
    call, made = stand.call, stand.made
    return (
        call is not None
        and call.index >= 0
        and bool(made and not made.signature.op.startswith("DDP"))
    )


def _peers(now: Snapshot, lost: list[RankSnapshot]) -> list[RankSnapshot]:
    """The ranks that left of the groups in which `lost` were."""
    keys = [s.key for s in lost]
    return [
        s
        for s in now.by_rank.values()
        if s.gone and any(key is None or s.rank.rank in key.ranks for key in keys)
    ]


def _branch_of_exception(rank: Rank) -> BranchLine | None:
    """The branch on the rank around the call that raised, where the call is not on record."""
    raised = rank.exception
    for frame in reversed(raised.frames if raised else ()):
        if heads := on_rank(frame.inside):
            file = shorten(frame.file, rank.cwd)
            return head_of(Location(file, heads[0].line, frame.function, ""), heads[0]), heads[0]
    return None


def _made_before(now: Snapshot, stand: RankSnapshot, made: CallRecord) -> bool:
    log = now.known.logs[stand.key].get(stand.rank.rank) if stand.key in now.known.logs else None
    if log is None or made.index < 0:
        return False
    first = max(0, made.index - HISTORY)
    return any(m.text == made.text for m in now.known.window(log, first, made.index - first))


def _well(rank: Rank) -> bool:
    """Whether a rank left without an error."""
    if failure(rank) is not None or rank.exception is not None:
        return False
    leaving = rank.latest(RankExiting)
    return bool(leaving or destroyed(rank)) and not rank.exit_code
