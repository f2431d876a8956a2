"""DDP604."""

from __future__ import annotations

from collections.abc import Iterable

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
    LoopExit,
    LoopExitKind,
    apart_since,
    loop_of_leaver,
    shifted_by_it,
)
from ddpdoctor.analysis.divergence.mismatch_report import never_made
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
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, scene
from ddpdoctor.analysis.waiting.wait_graph import gone, unanswered, victims, waiting_for
from ddpdoctor.events import CallSite, RankExiting, Statement
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, fold_ranks, ranks_text, shorten, unfolded

Only = tuple[Location, Statement]
"""A statement that parts the ranks, and its line."""

FIX = (
    "let all ranks do the same number of steps (`DistributedSampler`, `drop_last=True`), share the "
    "decision to stop with `all_reduce`, or wrap the loop in `with Join([model]):`"
)
EXIT = (
    "share the decision to leave with `all_reduce`, and leave the loop on all ranks in the same "
    "round; let a signal handler do no more than set a flag"
)
CALLED = (
    "share the decision to leave with `all_reduce`, and call `{}` on all ranks in the same round; "
    "where it comes after the loop, let all ranks do the same number of steps "
    "(`DistributedSampler`, `drop_last=True`)"
)


class RankExitedEarly(Check):
    """A rank is done and has left while the others still wait for it

    ## What it finds
    Ranks that left without an error (their loop was shorter, `break`, `return`, `sys.exit(0)`), or
    destroyed their process group, while others are in a collective that needs them. Where these
    entered a branch alone (`if rank == 0: evaluate(model)`), and are no more than those that left,
    they are at fault.

    ## How it knows
    Each rank writes down every call before it makes it, when it destroys its groups, and how it
    leaves. At the moment at which the run stands still, or the first rank fails, the ranks that
    wait in a call are compared with those that have left without an error: one that has not begun
    that call never will. The finding is proven.

    ## Why it hurts
    On gloo the ranks that stay get `Connection closed by peer` and are blamed by torchrun; on NCCL
    they hang until the timeout. The rank at fault ends with status 0.

    ## How to fix it
    Let all ranks leave together: the same number of batches on each (`DistributedSampler`,
    `drop_last=True`), a decision to stop that all share (`all_reduce` the flag), or
    `with Join([model]):` for uneven inputs.

    ## When it stays quiet
    Ranks that leave together; a rank that left because it failed (that is another finding).
    """

    code = "DDP604"
    name = "rank-exited-early"
    family = "hang"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(CallSite) else "no collective was seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        now = scene(run)
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

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check in ("rank-missing", "stall") or never_made(other):
            return True
        if shifted_by_it(mine, other):
            return True
        if other.check == "hyperparameter-skew":  # a schedule is right for the round of each rank
            early = other.evidence.get("the_same_values_first_on_ranks")
            if isinstance(early, list) and set(early) == _left_of(mine):
                return True
            since = mine.evidence.get("apart_since_step")
            return (
                isinstance(since, int) and other.steps is not None and (other.steps.first >= since)
            )
        return other.check in ("first-failure", "rank-died") and not (
            _left_of(mine) & set(other.ranks)
        )

    def _report(
        self, now: Snapshot, left: list[RankSnapshot], waiting: list[RankSnapshot]
    ) -> Finding:
        ranks = tuple(s.rank.rank for s in left)
        others = sorted({s.rank.rank for s in waiting})
        first = waiting[0]
        call, here = _waited_in(first)
        only = _only_some(now, left[0].rank, first)
        spot, label, loop = (None, "", None) if only else _left_at(left[0].rank, first)
        related = [Related(f"{ranks_text(others)} still here", here)] if here and spot else []
        related += [Related(leading(only[1]), only[0])] if only else []
        unsure = loop is not None and loop.how is LoopExitKind.UNKNOWN and loop.place == loop.loop
        if loop and unsure and first.made and (may := may_end(first.made, loop.loop)):
            related.append(Related("may end a loop sooner on some ranks", may))
        since = apart_since(left[0].rank, first.rank, loop.loop) if loop else None
        steps = {str(s.rank.rank): s.rank.steps for s in (*left, *waiting)}
        still = all(s.waits_for_good for s in (*left, *waiting))
        who = ranks_text(ranks)
        leaves, ended = _leaving(left)
        lacks = _lacks(now, left[0], first)
        cause = f"{parts(only[1])}; {who} {ended} without" if only else f"{who} {ended} {lacks}"
        if loop and (loop.ways or loop.exits or loop.how is LoopExitKind.FEWER):
            mixed = _mixed(left, first, others) if loop.how is LoopExitKind.SKIPPED else ""
            cause = f"{loop.cause}{mixed}; {cause}"
        ways = loop.ways if loop else ()
        why = loop.skips.why if loop and loop.skips else ""
        if what := why or caught([s.rank for s in left], [s.rank for s in waiting], ways):
            cause = f"{what}; {cause}"
        if went_on := [s.rank.rank for s in waiting if s.rank.exit_code == 0]:
            cause += f"; {ranks_text(went_on)} caught the loss of the connection and went on"
        alone = only is not None and len(others) <= len(ranks)
        return self.finding(
            ranks=tuple(others) if alone else ranks,
            steps=first.steps,
            subjects=(first.made.signature.op,) if first.made else (),
            location=spot or here,
            label=label if spot else f"{ranks_text(others)} waited here",
            related=tuple(related),
            summary=f"{who} {leaves} while {ranks_text(others)} still "
            f"wait{'s' if len(others) == 1 else ''} for it in {call}",
            cause=f"{cause}; the errors of {ranks_text(others)} are consequences",
            fix=_fix(only, loop, left[0].rank, leaves, first),
            fix_kind=FixKind.CHECK,
            evidence={
                "left": fold_ranks(ranks),
                "steps": steps,
                **({} if since is None else {"apart_since_step": since}),
                **(loop.evidence if loop else {}),
                **(victims(now, waiting) if first.made else {"waiting_in": call}),
                "stuck": not now.failed and still,
            },
            at=now.at,
        )


def _left_of(mine: Finding) -> set[int]:
    """The ranks that left: they are not at fault where others entered a branch alone."""
    left = mine.evidence.get("left")
    return unfolded(left) if isinstance(left, str) else {*mine.ranks}


def _mixed(left: list[RankSnapshot], waiting: RankSnapshot, others: list[int]) -> str:
    """What follows for the rounds after one that was skipped: nothing failed in them."""
    its = "its" if len(left) == 1 else "their"
    text = f"; from there on {its} rounds meet earlier ones of {ranks_text(others)}"
    averages = waiting.made is not None and waiting.made.signature.op == "DDP backward"
    return text + (", and gradients of different steps are averaged" if averages else "")


def _leaving(left: list[RankSnapshot]) -> tuple[str, str]:
    """What they do while others wait, and how they ended: their processes may have gone on."""
    if all(raised_exit(s.rank) for s in left):
        ended = f"ended by {EXIT_RAISED},"
        return ("leaves", f"was {ended}") if len(left) == 1 else ("leave", f"were {ended}")
    calls = {_exit_called(s.rank) for s in left}
    if len(calls) == 1 and (call := min(calls)):
        return "leaves" if len(left) == 1 else "leave", f"left by `{call}` with status 0,"
    if all(s.rank.of(RankExiting) or s.rank.exit_code == 0 for s in left):
        return "leaves" if len(left) == 1 else "leave", "ended with status 0"
    did = "destroyed its process group" if len(left) == 1 else "destroyed their process groups"
    return did, did


def _exit_called(rank: Rank) -> str:
    """What the program called to leave, where that is known; empty where it came to its end."""
    leaving = rank.latest(RankExiting)
    return leaving.how if leaving and leaving.site >= 0 and leaving.how != "return" else ""


def _lacks(now: Snapshot, leaver: RankSnapshot, waiting: RankSnapshot) -> str:
    """What it did not do before it left."""
    if waiting.call is None or waiting.call.index >= 0:
        return "without that call"
    lacking = next((m for m in unanswered(now, waiting) if m.peer is leaver), None)
    rings = [s.rank.ring for s in (leaver, waiting)]
    if lacking is None or any(r is None or r.count > len(r.calls) for r in rings):
        return "while messages were under way"  # or the first are overwritten
    one, other = leaver.rank.rank, waiting.rank.rank
    match = "received" if lacking.sends else "sent"
    did = "sends" if lacking.sends else "receives"
    here, there = ("from", "to") if lacking.sends else ("to", "from")
    return (
        f"without a match: it {match} {lacking.theirs} messages {here} rank {other}, which {did} "
        f"{lacking.mine} {there} rank {one}"
    )


def _fix(
    only: Only | None, loop: LoopExit | None, left: Rank, leaves: str, waiting: RankSnapshot
) -> str:
    if only and waiting.made and waiting.made.signature.op.startswith("DDP"):
        return unwrapped(only[1], waiting.made)
    if only:
        return unbranched(only[1], "call it")
    if loop:
        return loop.fix
    if raised_exit(left):
        return EXIT
    if call := _exit_called(left):
        return CALLED.format(call)
    if waiting.call is not None and waiting.call.index < 0:
        return (
            "let every receive have its send on the other rank, and every send its receive; let "
            "the ranks meet (`dist.barrier()`) before they leave"
        )
    if leaves.startswith("destroyed"):
        return (
            "destroy the group when no rank communicates any more: make the same calls on every "
            "rank before `destroy_process_group()`"
        )
    return FIX


def _lost(run: Run, now: Snapshot) -> list[RankSnapshot]:
    """Ranks that lost their peers in communication of which the record does not tell who lacked,
    where nothing else failed: it is no call, or one of a wrapped model, or a message."""
    found = failures(run)
    if not now.failed or any(f.kind != "lost" for f in found):
        return []
    return [
        now.stands[f.rank.rank]
        for f in found
        if f.exception
        and lost_peer(f.exception)
        and f.rank.default_group
        and not _met(now.stands[f.rank.rank])
    ]


def _met(stand: RankSnapshot) -> bool:
    """Whether a rank was in a collective of its program that no member of the group lacks."""
    call, made = stand.call, stand.made
    return (
        call is not None
        and call.index >= 0
        and bool(made and not made.signature.op.startswith("DDP"))
    )


def _peers(now: Snapshot, lost: list[RankSnapshot]) -> list[RankSnapshot]:
    """Who may have left them: the members of the groups in which they lost a rank."""
    keys = [s.key for s in lost]
    return [
        s
        for s in now.stands.values()
        if s.gone and any(key is None or s.rank.rank in key.ranks for key in keys)
    ]


def _waited_in(stand: RankSnapshot) -> tuple[str, Location | None]:
    """What a rank waited in, as far as it is known: `all_reduce (train.py:8)`, and the line."""
    if stand.made:
        return stand.made.place, stand.made.location
    failed = failure(stand.rank)
    here = failed.location if failed else None
    frames = failed.exception.frames if failed and failed.exception else ()
    last = max((n for n, f in enumerate(frames) if f.user), default=-1)
    name = frames[last + 1].function if last + 1 < len(frames) else "torch's communication"
    return f"{name} ({here})" if here else name, here


def _only_some(now: Snapshot, leaver: Rank, stand: RankSnapshot) -> Only | None:
    """The branch around a call that only some enter, and its line, where the rank that left never
    made that call: its text says so, or the other has made the call before."""
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
            return None  # the other was in there, too
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
    """Whether a rank left without an error of its own."""
    if failure(rank) is not None or rank.exception is not None:
        return False
    leaving = rank.latest(RankExiting)
    return bool(leaving or destroyed(rank)) and not rank.exit_code


def _left_at(rank: Rank, waiting: RankSnapshot) -> tuple[Location | None, str, LoopExit | None]:
    """The line by which it left: an explicit exit, the loop that ended, the end of its group."""
    leaving = rank.latest(RankExiting)
    if leaving and leaving.how != "return":
        return rank.location(leaving.site), "left here", None
    last = _last_call(rank, rank.of(CallSite))
    loop = loop_of_leaver(rank, last, waiting.made) if waiting.made else None
    messages = waiting.call is not None and waiting.call.index < 0
    if messages and (loop is None or loop.how is LoopExitKind.UNKNOWN):
        return None, "", None  # a message that was not sent is in no call of the leaver's
    if loop is not None:
        return loop.place, loop.label, loop
    end = destroyed(rank)
    if end and (spot := rank.location(end.site)):
        return spot, "destroyed it here", None
    return None, "", None


def _last_call(rank: Rank, sites: list[CallSite]) -> CallSite | None:
    calls = rank.ring.last_calls if rank.ring else ()
    return next((s for c in reversed(calls) for s in sites if s.id == c.site), None)
