"""Ranks that left without an error while others wait for them: what is on record of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...events import CallSite, RankExiting, Statement
from ...run import Location, Rank, Run, ranks_text, shorten
from ..calls.call_logs import CallRecord
from ..calls.rank_conditions import on_rank
from ..control_flow.branches import (
    branch,
    condition,
    head_of,
    is_inside,
    makes,
    places,
    same_lines,
)
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
from ..waiting.wait_graph import gone, waiting_for
from .left_loop import LeftLoop, LoopExitKind
from .loop_exits import loop_of_leaver
from .thresholds import HISTORY

BranchLine = tuple[Location, Statement]
"""A branch that only some ranks enter, and its line."""


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
    def extra(self) -> CallRecord | None:
        """The call that the others made and the rank that left did not, where it is an earlier one
        than that in which they wait: from it on, their calls were matched with its next ones."""
        stand, call = self.first, self.first.call
        logs = self.now.known.logs.get(stand.key, {}) if stand.key else {}
        mine, theirs = logs.get(stand.rank.rank), logs.get(self.leaver.rank)
        if call is None or mine is None or theirs is None or theirs.issued != call.index:
            return None
        known = self.now.known
        for index in range(call.index, max(0, call.index - HISTORY), -1):
            now, there = known.at(mine, index), known.at(theirs, index - 1)
            if now is None or there is None:
                return None
            if not same_lines(now, there):
                # Before it, the ranks made the same calls.
                before = known.at(mine, index - 1)
                aligned = before is not None and same_lines(before, there)
                return now if aligned and index < call.index else None
        return None

    @property
    def lacking(self) -> CallRecord | None:
        """The first call that the rank that left did not make."""
        return self.extra or self.first.made

    @cached_property
    def only(self) -> BranchLine | None:
        """The branch around the call that the rank that left never made: its condition is on the
        rank, the other rank made the call before, or the rank came to the end of the program. Not
        of messages, which two ranks make on lines of their own."""
        made, stand = self.lacking, self.first
        if self.in_message:
            return None
        if made is None:
            return _branch_of_exception(stand.rank)
        if makes(self.leaver, made.spots):
            return None
        found = condition(made)
        in_loop = any(head.is_loop for place in places(made) for head in place.inside)
        if found is None and (
            _made_before(self.now, stand, made) or (self.to_its_end and not in_loop)
        ):
            found = branch(made)
        spot = stand.rank.location(found[0].site) if found else None
        if found is None or spot is None:
            return None
        if any(
            is_inside(self.leaver, site, spot.file, found[1].line)
            for site in self.leaver.of(CallSite)
        ):
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
        called = {exit_called(s.rank) for s in self.left}
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


def exit_called(rank: Rank) -> str:
    """What a rank called to exit; empty where it came to the end of its program."""
    leaving = rank.latest(RankExiting)
    return leaving.how if leaving and leaving.site >= 0 and leaving.how != "return" else ""


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
    return any(m.spots == made.spots for m in now.known.window(log, first, made.index - first))


def _well(rank: Rank) -> bool:
    """Whether a rank left without an error."""
    if failure(rank) is not None or rank.exception is not None:
        return False
    leaving = rank.latest(RankExiting)
    return bool(leaving or destroyed(rank)) and not rank.exit_code
