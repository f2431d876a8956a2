"""DDP604."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.calls.call_logs import CallRecord, lines
from ddpdoctor.analysis.calls.rank_conditions import on_rank
from ddpdoctor.analysis.control_flow.branches import (
    branch,
    condition,
    head_of,
    is_inside,
    leading,
    parts,
    unbranched,
    unwrapped,
)
from ddpdoctor.analysis.control_flow.caught_exceptions import caught
from ddpdoctor.analysis.control_flow.jumps import may_end
from ddpdoctor.analysis.divergence.loop_exits import (
    MAY_END,
    SHIFTED_SCHEDULE,
    LoopExit,
    LoopExitKind,
    loop_of_leaver,
    uneven_since,
)
from ddpdoctor.analysis.divergence.mismatch_report import NEVER_CREATED
from ddpdoctor.analysis.divergence.periodic_calls import HISTORY
from ddpdoctor.analysis.waiting.failures import (
    EXIT_RAISED,
    destroyed,
    failure,
    failures,
    lost_peer,
    raised_exit,
    stopped,
)
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import gone, unanswered, victims, waiting_for
from ddpdoctor.events import CallSite, RankExiting, Statement
from ddpdoctor.report.declarations import Condition, Effect, seen
from ddpdoctor.report.evidence_names import STEPS_TAKEN
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, counted, ranks_do, ranks_text, shorten

BranchLine = tuple[Location, Statement]
"""A branch that only some ranks enter, and its line."""

SET_FIRST_ON = "the_same_values_first_on_ranks"
"""Name of the evidence of hyperparameter-skew which ranks set the same values at earlier steps."""

UNEVEN_SINCE = "in_different_epochs_since_step"
"""Name of the evidence from which step on the ranks are in different epochs."""

SAME_STEPS = (
    "run the same number of steps on all ranks (`DistributedSampler`, `drop_last=True`), share the "
    "decision to stop with `all_reduce`, or wrap the loop in `with Join([model]):`"
)
SAME_ROUND = (
    "share the decision to exit with `all_reduce`, and leave the loop on all ranks in the same "
    "round; let a signal handler only set a flag"
)
SAME_EXIT = (
    "share the decision to exit with `all_reduce`, and call `{}` on all ranks in the same round; "
    "where it comes after the loop, run the same number of steps on all ranks "
    "(`DistributedSampler`, `drop_last=True`)"
)


class Departure(enum.Enum):
    """How ranks left.

    `EXIT_RAISED`: a `SystemExit` of unknown origin. `EXIT_CALLED`: an explicit `sys.exit(0)` or the
    like. `ENDED`: the program came to its end. `DESTROYED`: they destroyed their process groups,
    and their processes may have continued.
    """

    EXIT_RAISED = enum.auto()
    EXIT_CALLED = enum.auto()
    ENDED = enum.auto()
    DESTROYED = enum.auto()


def _left_of(mine: Finding) -> set[int]:
    """The ranks that left: they are not at fault where others entered a branch alone."""
    steps = mine.evidence.get(STEPS_TAKEN)
    if mine.rule != "entered-alone" or not isinstance(steps, dict):
        return {*mine.ranks}
    return {int(rank) for rank in steps} - {*mine.ranks}


def _of_another_round(mine: Finding, other: Finding) -> bool:
    """Whether a schedule is right for the round of each rank."""
    early = other.evidence.get(SET_FIRST_ON)
    if isinstance(early, list) and set(early) == _left_of(mine):
        return True
    since = mine.evidence.get(UNEVEN_SINCE)
    return isinstance(since, int) and other.steps is not None and other.steps.first >= since


_ON_RANKS_THAT_STAYED = Condition(
    "on ranks that had not left", lambda mine, other: not _left_of(mine) & set(other.ranks)
)


class RankExitedEarly(Check):
    """A rank finished and left while others still wait for it

    ## What it finds
    Ranks that left without an error (a shorter loop, `break`, `return`, `sys.exit(0)`) or destroyed
    their process group while others are in a collective that needs them. Where those others entered
    a branch alone (`if rank == 0: evaluate(model)`) and are no more than the ranks that left, they
    are at fault.

    ## How it knows
    Each rank records every call before it makes it, when it destroys its groups, and how it exits.
    At the moment the run stands still, or the first rank fails, the ranks that wait in a call are
    compared with those that left without an error: one that has not begun that call never will. The
    finding is proven.

    ## Why it hurts
    With gloo the remaining ranks get `Connection closed by peer` and torchrun blames them; with
    NCCL they hang until the timeout. The rank at fault exits with status 0.

    ## How to fix it
    Let all ranks leave together: the same number of batches on each (`DistributedSampler`,
    `drop_last=True`), a shared decision to stop (`all_reduce` the flag), or `with Join([model]):`
    for uneven inputs.

    ## When it stays quiet
    - Ranks that leave together.
    - A rank that left because it failed: see `first-failure`.
    """

    code = "DDP604"
    name = "rank-exited-early"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "entered-alone": "the ranks that wait entered a branch that the others did not",
        "branch": "most ranks entered a branch that the ranks that left did not",
        "skipped-round": "the ranks that left skipped rounds of a loop before",
        "loop-exit": "the ranks left a loop that others are still in",
        "exit-raised": "a `SystemExit`, perhaps of a signal handler, ended the ranks",
        "exit-called": "the ranks called `sys.exit(0)` or the like",
        "unmatched-message": "a send or receive has no counterpart on a rank that left",
        "group-destroyed": "the ranks destroyed their process group",
        "program-ended": "the program ended on these ranks",
    }
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (
        Effect(("rank-missing", "stall")),
        Effect(("group-creation-mismatch",), rules=(NEVER_CREATED,)),
        Effect(("hyperparameter-skew",), when=(SHIFTED_SCHEDULE,)),
        Effect(
            ("hyperparameter-skew",),
            when=(Condition("of ranks in different rounds", _of_another_round),),
        ),
        Effect(("first-failure", "rank-died"), when=(_ON_RANKS_THAT_STAYED,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        now = snapshot_of(run)
        if stopped(run) and now.stall is None:
            return
        left = [s for s in gone(now) if _well(s.rank)]
        waiting = [s for one in left for s in waiting_for(now, one)]
        if left:
            yield self._report(now, left, waiting)
        elif lost := _lost(run, now):
            left = [s for s in _peers(now, lost) if _well(s.rank)]
            if left:
                yield self._report(now, left, lost)

    def _report(
        self, now: Snapshot, left: list[RankSnapshot], waiting: list[RankSnapshot]
    ) -> Finding:
        ranks = tuple(s.rank.rank for s in left)
        others = sorted({s.rank.rank for s in waiting})
        first = waiting[0]
        call, here = _waited_in(first)
        only = _only_some(now, left[0].rank, first)
        spot, label, loop = (None, "", None) if only else _left_at(left[0].rank, first)
        related = []
        if here and spot:
            related.append(Related(f"{ranks_do(others, 'wait')} here", here))
        related += [Related(leading(only[1]), only[0])] if only else []
        unsure = loop is not None and loop.how is LoopExitKind.UNKNOWN and loop.place == loop.loop
        if loop and unsure and first.made and (may := may_end(first.made, loop.loop)):
            related.append(Related(MAY_END, may))
        since = uneven_since(left[0].rank, first.rank, loop.loop) if loop else None
        deadlocked = not now.failed and all(s.waits_for_good for s in (*left, *waiting))
        alone = only is not None and len(others) <= len(ranks)
        departure = _departure(left)
        rule = "entered-alone" if alone else _rule(only, loop, departure, first)
        did = "destroyed the process group" if departure is Departure.DESTROYED else "exited"
        return self.finding(
            rule=rule,
            deadlocked=deadlocked,
            ranks=tuple(others) if alone else ranks,
            steps=first.steps,
            subjects=(first.made.signature.op,) if first.made else (),
            location=spot or here,
            label=label if spot else f"{ranks_text(others)} waited here",
            related=tuple(related),
            summary=f"{ranks_text(ranks)} {did} while {ranks_do(others, 'wait')} for "
            f"{'it' if len(left) == 1 else 'them'} in {call}",
            cause=_cause(now, left, waiting, only, loop),
            fix=_fix(rule, only, loop, left[0].rank, first),
            fix_kind=FixKind.CHECK,
            evidence={
                "left": ranks_text(ranks),
                STEPS_TAKEN: {str(s.rank.rank): s.rank.steps for s in (*left, *waiting)},
                **({} if since is None else {UNEVEN_SINCE: since}),
                **(loop.evidence if loop else {}),
                **(victims(now, waiting) if first.made else {"waiting_in": call}),
            },
            at=now.at,
        )


def _rule(
    only: BranchLine | None, loop: LoopExit | None, departure: Departure, waiting: RankSnapshot
) -> str:
    """Why ranks left too early: a branch or a loop says more than how their processes ended."""
    if only:
        return "branch"
    if loop:
        return "skipped-round" if loop.skipped else "loop-exit"
    if departure is Departure.EXIT_RAISED:
        return "exit-raised"
    if departure is Departure.EXIT_CALLED:
        return "exit-called"
    if waiting.call is not None and waiting.call.index < 0:
        return "unmatched-message"
    return "group-destroyed" if departure is Departure.DESTROYED else "program-ended"


def _cause(
    now: Snapshot,
    left: list[RankSnapshot],
    waiting: list[RankSnapshot],
    only: BranchLine | None,
    loop: LoopExit | None,
) -> str:
    first = waiting[0]
    others = sorted({s.rank.rank for s in waiting})
    did = f"{ranks_text(s.rank.rank for s in left)} {_ended(left)}"
    if only:
        cause = f"{parts(only[1])}; {did} without that call"
    else:
        cause = f"{did} {_lacks(now, left[0], first)}"
    if loop and (loop.ways or loop.exits or loop.how is LoopExitKind.FEWER):
        mixed = _mixed(left, first, others) if loop.skipped else ""
        cause = f"{loop.cause}{mixed}; {cause}"
    ways = loop.ways if loop else ()
    why = loop.skips.why if loop and loop.skips else ""
    if what := why or caught([s.rank for s in left], [s.rank for s in waiting], ways):
        cause = f"{what}; {cause}"
    if went_on := [s.rank.rank for s in waiting if s.rank.exit_code == 0]:
        cause += f"; {ranks_text(went_on)} caught the connection error and continued"
    return f"{cause}; the errors of {ranks_text(others)} follow from this"


def _mixed(left: list[RankSnapshot], waiting: RankSnapshot, others: list[int]) -> str:
    """What follows for the rounds after one that was skipped: nothing failed in them."""
    its = "its" if len(left) == 1 else "their"
    text = f"; from then on {its} rounds are matched with earlier ones of {ranks_text(others)}"
    averages = waiting.made is not None and waiting.made.signature.op == "DDP backward"
    return text + (", so gradients of different steps are averaged" if averages else "")


def _departure(left: list[RankSnapshot]) -> Departure:
    if all(raised_exit(s.rank) for s in left):
        return Departure.EXIT_RAISED
    if len(calls := {_exit_called(s.rank) for s in left}) == 1 and min(calls):
        return Departure.EXIT_CALLED
    if all(s.rank.of(RankExiting) or s.rank.exit_code == 0 for s in left):
        return Departure.ENDED
    return Departure.DESTROYED


def _ended(left: list[RankSnapshot]) -> str:
    """How the ranks ended, after their name; their processes may have continued."""
    match _departure(left):
        case Departure.EXIT_RAISED:
            return f"{'was' if len(left) == 1 else 'were'} ended by {EXIT_RAISED},"
        case Departure.EXIT_CALLED:
            return f"called `{_exit_called(left[0].rank)}` and exited with status 0"
        case Departure.ENDED:
            return "exited with status 0"
        case Departure.DESTROYED:
            return "destroyed the process group"


def _exit_called(rank: Rank) -> str:
    """What the program called to exit (`sys.exit`); empty where it came to its end, or that is not
    known."""
    leaving = rank.latest(RankExiting)
    return leaving.how if leaving and leaving.site >= 0 and leaving.how != "return" else ""


def _lacks(now: Snapshot, leaver: RankSnapshot, waiting: RankSnapshot) -> str:
    """What a rank did not do before it left."""
    if waiting.call is None or waiting.call.index >= 0:
        return "without that call"
    lacking = next((m for m in unanswered(now, waiting) if m.peer is leaver), None)
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


def _fix(
    rule: str,
    only: BranchLine | None,
    loop: LoopExit | None,
    left: Rank,
    waiting: RankSnapshot,
) -> str:
    if only and waiting.made and waiting.made.signature.op.startswith("DDP"):
        return unwrapped(only[1], waiting.made)
    if only:
        return unbranched(only[1], "call it")
    if loop:
        return loop.fix
    match rule:
        case "exit-raised":
            return SAME_ROUND
        case "exit-called":
            return SAME_EXIT.format(_exit_called(left))
        case "unmatched-message":
            return (
                "match every receive with a send on the other rank, and every send with a receive; "
                "call `dist.barrier()` before the ranks exit"
            )
        case "group-destroyed":
            return (
                "destroy the group only when no rank communicates any more: make the same calls on "
                "every rank before `destroy_process_group()`"
            )
    return SAME_STEPS


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


def _waited_in(stand: RankSnapshot) -> tuple[str, Location | None]:
    """What a rank waited in, as far as it is known: `all_reduce (train.py:8)`, and its line."""
    if stand.made:
        return stand.made.place, stand.made.location
    failed = failure(stand.rank)
    here = failed.location if failed else None
    frames = failed.exception.frames if failed and failed.exception else ()
    last = max((n for n, f in enumerate(frames) if f.user), default=-1)
    name = frames[last + 1].function if last + 1 < len(frames) else "communication inside torch"
    return f"{name} ({here})" if here else name, here


def _only_some(now: Snapshot, leaver: Rank, stand: RankSnapshot) -> BranchLine | None:
    """The branch around a call that only some ranks enter, where the rank that left never made that
    call: its condition is on the rank, or the other rank made the call before."""
    if stand.made:
        if any(lines(leaver, site) == stand.made.text for site in leaver.of(CallSite)):
            return None
        found = condition(stand.made)
        if found is None and _made_before(now, stand, stand.made):
            found = branch(stand.made)
        spot = stand.rank.location(found[0].site) if found else None
        if found is None or spot is None:
            return None
        line = found[1].line
        if any(is_inside(leaver, site, spot.file, line) for site in leaver.of(CallSite)):
            return None  # the rank that left was in there, too
        return head_of(spot, found[1]), found[1]
    raised = stand.rank.exception
    for frame in reversed(raised.frames if raised else ()):
        if heads := on_rank(frame.inside):
            head = heads[0]
            file = shorten(frame.file, stand.rank.cwd)
            return head_of(Location(file, head.line, frame.function, ""), head), head
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


def _left_at(rank: Rank, waiting: RankSnapshot) -> tuple[Location | None, str, LoopExit | None]:
    """The line by which a rank left, its label, and the loop that it left, if any: an explicit
    exit, the end of a loop, or that of its group."""
    leaving = rank.latest(RankExiting)
    if leaving and leaving.how != "return":
        return rank.location(leaving.site), "exited here", None
    last = _last_call(rank, rank.of(CallSite))
    loop = loop_of_leaver(rank, last, waiting.made) if waiting.made else None
    messages = waiting.call is not None and waiting.call.index < 0
    if messages and (loop is None or loop.how is LoopExitKind.UNKNOWN):
        return None, "", None  # nothing in the program of the rank that left points at a message
    if loop is not None:
        return loop.place, loop.label, loop
    end = destroyed(rank)
    if end and (spot := rank.location(end.site)):
        return spot, "destroyed the group here", None
    return None, "", None


def _last_call(rank: Rank, sites: list[CallSite]) -> CallSite | None:
    calls = rank.ring.last_calls if rank.ring else ()
    return next((s for c in reversed(calls) for s in sites if s.id == c.site), None)
