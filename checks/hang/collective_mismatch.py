"""DDP601."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ddpdoctor.analysis.control_flow.branches import (
    condition,
    finalizer,
    opener,
    parts,
    unbranched,
    unwrapped,
    where,
)
from ddpdoctor.analysis.control_flow.caught_exceptions import ExceptionExit, caught, way_out
from ddpdoctor.analysis.control_flow.jumps import ways_around
from ddpdoctor.analysis.divergence import group_cycles
from ddpdoctor.analysis.divergence.divergence import CallDivergence
from ddpdoctor.analysis.divergence.divergence_causes import (
    SwallowedException,
    alone,
    entered,
    opposed,
    swallowed,
)
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.loop_exits import LoopExit, blamed, left_loop, shifted_by_it
from ddpdoctor.analysis.divergence.mismatch_report import (
    Told,
    began,
    culprits_of,
    each_once,
    elsewhere,
    evidence,
    related,
    sides_text,
)
from ddpdoctor.analysis.divergence.thread_waits import aside, order, remedy, started
from ddpdoctor.analysis.waiting.snapshot import scene
from ddpdoctor.analysis.waiting.wait_graph import across_groups, cycle
from ddpdoctor.events import CallSite
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Run, State, ranks_text

CONSEQUENCES = (
    "rank-missing", "rank-exited-early", "rank-died", "first-failure", "stall", "data-stall",
)  # fmt: skip

DRIFT = ("gradient-drift", "parameter-drift")


class CollectiveMismatch(Check):
    """The ranks are in different collectives at the same time

    ## What it finds
    Collectives pair by their order in the group, not by their line. Ranks that are in different
    ones at the same number: one in `barrier` while the others are in `all_reduce`, a collective
    that only some ranks make (`if rank == 0:` around it, `f() if rank == 0 else 0`), one that a
    rank left out as an exception led around it, two collectives in another order, the last also
    where shapes agree and nothing hangs, even on lines that read alike, if every rank makes the
    same calls in every round, or on one line in a loop over names (the keys of a dictionary, a set)
    that come in another order; a round of a loop that some ranks skip, also where only a call shows
    it that comes in one round of many. Also ranks that wait for each other in collectives of
    different groups.

    ## How it knows
    Every rank writes down each collective before it makes it, in a file that outlives the process:
    its number in the group, its arguments and the lines that led there; also DDP's own, of the
    wrap, a forward or a backward. These lists are compared between the ranks number by number: in
    the report, and by the node's monitor once a rank has stood in a call for a second. The finding
    is proven. Where all ranks concerned wait for each other, or for one that is gone, so is the
    deadlock, and the run is stopped unless `--on-hang report` is given.

    ## Why it hurts
    The run hangs until the backend's timeout (half an hour, ten minutes with NCCL), or gloo aborts.
    Where both calls look alike there is no error at all: the numbers of one get mixed into the
    other, and training goes on with them.

    ## How to fix it
    Let every rank of the group make the same calls in the same order: move the collective out of
    the branch, or compute the condition from a value that all ranks share. Make none in `__del__`,
    which runs at another time on every rank.

    ## When it stays quiet
    Point-to-point calls; the two arms of `if rank == 0: broadcast(...) else: broadcast(...)`, which
    are different lines but the same call, also where the ranks take turns in them; the calls that a
    rank makes at the end of torch's `Join` while others still have inputs; ranks outside the group;
    a rank that is only behind.
    """

    code = "DDP601"
    name = "collective-mismatch"
    family = "hang"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(CallSite) else "no collective was seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        parted = (p for p in divergences(run) if p.key.name != "new_group" and not p.same_call)
        for reported in each_once(_judged(divergence) for divergence in parted):
            yield self._report(run, reported)
        now = scene(run)
        ring = [now.stands[r] for r in cycle(now)]
        if ring and across_groups(ring):
            yield self.finding(**group_cycles.reported(now, ring))

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == self.name:
            return False
        if shifted_by_it(mine, other):
            return True
        mixed = other.check in DRIFT and "DDP backward" in mine.subjects
        return (other.check in CONSEQUENCES or mixed) and _concerns(mine, other)

    def _report(self, run: Run, reported: Told) -> Finding:
        divergence, _ = reported
        place, culprits = divergence.place, culprits_of(reported)
        proof = evidence(run, reported)
        left = _fault_of(divergence)
        skips = left.skips if left else None
        around = _around_it(divergence)
        return self.finding(
            ranks=tuple(sorted({*culprits, *skips.ranks})) if skips else culprits,
            steps=(skips and skips.steps) or divergence.when,
            subjects=tuple(sorted({m.signature.op for m in divergence.made.values()})),
            location=left.place if left else divergence.location,
            label=left.label if left else _label(replace(divergence, culprits=culprits)),
            related=(
                *(skips.tried if skips else ()),
                *((Related("what leads around it", around.head),) if around else ()),
                *related(divergence, place, left.place if left else divergence.location),
            ),
            summary=_summary(divergence) + elsewhere(reported),
            cause=_cause(divergence, bool(proof["stuck"])),
            fix=_fix(divergence),
            fix_kind=FixKind.CHECK,
            evidence={**proof, **(left.evidence if left else {})},
            at=began(divergence, run.started),
        )


def _judged(divergence: CallDivergence) -> CallDivergence:
    """The same, with those at fault whom an exception led there, or who surely left the loop; all
    of them where threads make calls in any order."""
    if made := aside(divergence):
        every = tuple(sorted(divergence.made))
        return replace(divergence, culprits=every, place=made, depth=0, shifted=True, extra=False)
    outs = _ways_out(divergence)
    if not outs and (around := swallowed(divergence)):
        return replace(divergence, culprits=around.ranks, place=around.made, depth=0, left_out=0)
    if not outs or len(outs) == len(divergence.made):
        return _even(alone(blamed(divergence)))
    place = divergence.made[outs[0].rank.rank]
    culprits = tuple(sorted(out.rank.rank for out in outs))
    return replace(divergence, culprits=culprits, place=place, depth=0, left_out=0)


def _even(divergence: CallDivergence) -> CallDivergence:
    """The same, with all ranks at fault where half of them left a loop too early, or the other half
    too late: nothing tells which."""
    left = left_loop(divergence)
    reported = divergence.extra or divergence.left_out or condition(divergence.place) is not None
    if left is None or left.blames or reported or 2 * len(left.ranks) != len(divergence.made):
        return divergence
    return replace(divergence, culprits=tuple(sorted(divergence.made)))


def _concerns(mine: Finding, other: Finding) -> bool:
    """Failures that came before the ranks parted have another cause, and so have those that came
    when all had gone on from there."""
    if mine.evidence.get("all_got_past"):
        return False
    return other.at == 0.0 or other.at >= mine.at - 1.0


def _fault_of(divergence: CallDivergence) -> LoopExit | None:
    """The loop that the ranks at fault left, or skipped a round of."""
    left = None if _ways_out(divergence) or _around_it(divergence) else left_loop(divergence)
    return left if left and left.blames and tuple(left.ranks) == divergence.culprits else None


def _label(divergence: CallDivergence) -> str:
    if outs := _ways_out(divergence):
        return f"where {outs[0].event.kind} led {ranks_text(divergence.culprits)}"
    if (call := aside(divergence)) and started(call):
        return f"starts a thread that calls {call.signature.op}"
    if _missed(divergence):
        return f"left out by {ranks_text(divergence.culprits)}"
    if divergence.extra:
        return "not called by every rank"
    return (
        "in another order than on the other ranks" if divergence.shifted else "not what others call"
    )


def _missed(divergence: CallDivergence) -> bool:
    """Whether the ranks at fault left that call out: those that make it entered its branch, or made
    it in every round."""
    keeps = divergence.place.rank.rank not in divergence.culprits and not divergence.shifted
    return bool(divergence.left_out or _around_it(divergence) or (keeps and entered(divergence)))


def _summary(divergence: CallDivergence) -> str:
    number = f"call {divergence.index} of {divergence.key}"
    left = _fault_of(divergence)
    if left is not None and not left.known:
        return f"ranks are in different rounds of a loop: at {number}, {sides_text(divergence)}"
    if left or (_missed(divergence) and not divergence.extra and not divergence.shifted):
        op = divergence.place.signature.op
        who = ranks_text(divergence.culprits)
        return f"{who} left out {op}: at {number}, {sides_text(divergence)}"
    if divergence.extra:
        op = divergence.place.signature.op
        return f"only some ranks call {op} here: at {number}, {sides_text(divergence)}"
    if divergence.shifted:
        return f"ranks make the same calls in another order: at {number}, {sides_text(divergence)}"
    return f"ranks are in different collectives: at {number}, {sides_text(divergence)}"


def _cause(divergence: CallDivergence, stuck: bool) -> str:
    effect = (
        _stuck(divergence)
        if stuck
        else "each call pairs with another one, so that values get mixed up"
        + (" or the run hangs later" if not divergence.width else "")
    )
    if outs := _ways_out(divergence):
        return f"{outs[0].cause}; {effect}"
    if around := _around_it(divergence):
        return f"{_caught(divergence, divergence.culprits)}{around.cause}; {effect}"
    if call := aside(divergence):
        return f"{order(call)}; {effect}"
    branched = entered(divergence)
    if (spot := _when_collected(divergence)) is not None:
        here = f" (here {where(branched[1])})" if branched else ""
        return (
            f"{divergence.place.signature.op} comes from `__del__` ({spot}), which Python runs "
            f"when it collects the object, at another time on every rank{here}; {effect}"
        )
    left = left_loop(divergence)
    if left is not None:
        known = _why(divergence, left) if left.known else ""
        return f"{known}{left.cause}; {effect}"
    if divergence.left_out:
        who = ranks_text(divergence.culprits)
        made = f"{who} made that call in each of the last {divergence.left_out}"
        left_it = f"rounds, and left it out in this one{_around(divergence)}"
        return f"{_caught(divergence, divergence.culprits)}{made} {left_it}; {effect}"
    if branched is not None and opposed(divergence, *branched):
        return (
            f"ranks take different branches of `{opener(branched[1])}`, which make their "
            f"collectives in another order, or other ones; {effect}"
        )
    if branched is not None:
        return f"{parts(branched[1])}; {effect}"
    if divergence.place.key:
        return (
            "the ranks loop over the same names in another order (that of a `set` of strings is "
            f"another one in every process); {effect}"
        )
    return f"collectives pair by their order in the group, and the orders differ; {effect}"


def _stuck(divergence: CallDivergence) -> str:
    """What follows where none goes on; of a ring, calls that ended are known to have."""
    ended = {
        m.signature.op: m.rank.rank
        for m in divergence.made.values()
        if m.call is not None and m.call.state is State.DONE
    }
    if not ended:
        return group_cycles.FOR_EVER
    op, rank = min(ended.items())
    return (
        f"each call paired with another one (rank {rank}'s {op} came to an end with values that "
        "are not its own), and now none of them can go on"
    )


def _why(divergence: CallDivergence, left: LoopExit) -> str:
    """What those who left the loop, or skipped a round, caught; empty where none was seen."""
    if left.skips and left.skips.why:
        return f"{left.skips.why}; "
    return _caught(divergence, left.ranks, left.ways)


def _caught(
    divergence: CallDivergence, ranks: Collection[int], ways: tuple[Location, ...] = ()
) -> str:
    gone = [made.rank for n, made in divergence.made.items() if n in ranks]
    stay = [made.rank for n, made in divergence.made.items() if n not in ranks]
    what = caught(gone, stay, ways)
    return f"{what}; " if what else ""


def _ways_out(divergence: CallDivergence) -> list[ExceptionExit]:
    return [out for made in divergence.made.values() if (out := way_out(made)) is not None]


def _around_it(divergence: CallDivergence) -> SwallowedException | None:
    """How the ranks at fault came past the call, where only an exception leads there."""
    return None if _ways_out(divergence) or aside(divergence) else swallowed(divergence)


def _when_collected(divergence: CallDivergence) -> Location | None:
    """The line in a `__del__` that led to the call of the ranks at fault, where others are in a
    call that none led to."""
    if all(finalizer(made) for made in divergence.made.values()):
        return None
    return finalizer(divergence.place)


def _around(divergence: CallDivergence) -> str:
    """What leads around the call that was left out."""
    if ways := ways_around(divergence.place):
        return ": " + " or ".join(f"`{w.source}` ({w})" for w in ways[:2])
    branched = entered(divergence)
    return f": {parts(branched[1])}" if branched else ""


def _fix(divergence: CallDivergence) -> str:
    if outs := _ways_out(divergence):
        return outs[0].fix
    if around := _around_it(divergence):
        return around.fix
    if call := aside(divergence):
        return remedy(call)
    branched = entered(divergence)
    op = divergence.place.signature.op
    if _when_collected(divergence) is not None:
        return (
            f"make no collective in `__del__`: call {op} in a method of its own (`close()`), at "
            "the same place on every rank"
        )
    left = left_loop(divergence)
    if left is not None:
        return left.fix
    if divergence.left_out and branched is None:
        return f"make every rank of the group call {op} in every round, or none"
    if divergence.shifted and not divergence.extra:
        return "issue the collectives in one order on every rank (sort the keys you loop over)"
    if branched is not None and opposed(divergence, *branched):
        return (
            f"make the same collectives in the same order on every way through "
            f"`{opener(branched[1])}`, or once outside of it"
        )
    if branched is not None and op.startswith("DDP"):
        return unwrapped(branched[1], divergence.place)
    if branched is not None:
        here = divergence.location
        what = f"call {op}" if here is None or op in here.source else "make this call"
        return unbranched(branched[1], what)
    if len(divergence.culprits) == len(divergence.made):
        return "let every rank of the group make the same collectives in the same order"
    return f"make every rank of the group call {op}, or none"
