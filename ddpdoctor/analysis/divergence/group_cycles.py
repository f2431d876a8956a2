"""Ranks that wait for each other in collectives of different groups: a deadlock of several groups,
and what led to it."""

from __future__ import annotations

from itertools import takewhile

from ...events import CallSite
from ...report.findings import Related
from ...run import Location, State, ranks_do, ranks_text
from ..control_flow.branches import (
    arms,
    avoided,
    branch,
    head_of,
    is_inside,
    leading,
    parts,
    unbranched,
)
from ..control_flow.jumps import loops_around, may_end
from ..waiting.snapshot import RankSnapshot, Snapshot
from ..waiting.wait_graph import pairs, path, victims, wait_lines
from .align import CallDivergence
from .attribution import WHO, Attribution
from .explanations import Branch, LoopExit, MissingCall, SkippedRound
from .left_loop import LeftLoop
from .loop_exits import MAY_END, left_loop
from .missing_calls import left_out
from .suspects import Suspect

DEADLOCKED = "the ranks are deadlocked"
RULES = {"group-order": "ranks wait for each other in collectives of different groups"}
"""The rule that only holds for a cycle; the others are those of `explanations`."""


def report(now: Snapshot, ring: list[RankSnapshot]) -> dict[str, object]:
    """The fields of the finding, by the first explanation that holds.

    Args:
        ring: ranks in collectives, each of which waits for the next one, the last for the first.
    """
    answers = (explain(now, ring) for explain in (_missing_call, _branch, _loop_exit))
    why = next((answer for answer in answers if answer is not None), _group_order(now, ring))
    waiting = [*ring, *(s for s in now.blocked if s not in ring and s.waits_for_good)]
    where = ", ".join(f"rank {s.rank.rank} is {s.doing} of {s.key}" for s in ring)
    return why.fields() | {
        "summary": f"{why.summary}: {where}",
        "cause": f"{why.cause}{DEADLOCKED}",
        "evidence": {
            "cycle": path(ring),
            **why.evidence,
            **victims(now, waiting),
        },
        "deadlocked": not now.failed,
        "subjects": tuple(sorted({s.made.signature.op for s in ring if s.made})),
        "at": now.at - max(s.still_s for s in ring),
    }


def _missing_call(now: Snapshot, ring: list[RankSnapshot]) -> Attribution | None:
    """The rank that skipped a call which it made in every earlier round is at fault."""
    skipped = left_out(now, ring)
    if skipped is None:
        return None
    stand, waiting = skipped.stand, skipped.waiting
    rank = stand.rank.rank
    number = f"call {waiting.call.index if waiting.call else -1} of {waiting.key}"
    return Attribution(
        rule=MissingCall.rule,
        culprits=(rank,),
        location=waiting.location,
        label=f"{WHO} did not make this call",
        related=wait_lines([stand], waiting.location),
        summary=f"rank {rank} skipped {number}",
        cause=f"in each of its last {skipped.rounds} rounds rank {rank} called this group "
        f"before {stand.made.place if stand.made else 'that line'}; this time it did not, so ",
        fix=f"call {_op(waiting)} at the same point of each round on every rank of the group, "
        "or on none",
        evidence={"earlier_rounds": skipped.rounds},
    )


def _branch(now: Snapshot, ring: list[RankSnapshot]) -> Attribution | None:
    """Of those who entered a branch and those who are past it, the fewer are at fault."""
    waiting = [s for s in now.blocked if s.made is not None]
    for stand in ring:
        made = stand.made
        found = branch(made) if made else None
        if made is None or found is None:
            continue
        there = [s for s in waiting if s.key == stand.key and s.made and s.made.text == made.text]
        rest = [s for s in waiting if s not in there]
        past = [s.made for s in rest if s.made is not None]
        if past and all(avoided(made, m) and arms(made, m) is None for m in past):
            place, head = found
            spot = stand.rank.location(place.site)
            leave = leading(head, [s.rank.rank for s in rest])
            around = (Related(leave, head_of(spot, head)),) if spot else ()
            return Attribution(
                rule=Branch.rule,
                culprits=_fewer(there, rest),
                location=stand.location,
                label="not called by every rank",
                related=(*around, *wait_lines(rest, stand.location)),
                summary=f"only some ranks call {_op(stand)} here",
                cause=f"{parts(head)}, and the others wait further down in a call of another "
                "group; ",
                fix=unbranched(head, f"call {_op(stand)}"),
            )
    return None


def _loop_exit(now: Snapshot, ring: list[RankSnapshot]) -> Attribution | None:
    """Of those who left a loop and those who wait for them in it, the fewer are at fault; both
    where nothing tells. None where that is not clear, or holds for several loops."""
    found = [one for pair in pairs(ring) if (one := _left(now, *pair)) is not None]
    if len(found) != 1:
        return None
    left, gone, stay = found[0]
    here, first = left.place, stay[0]
    may = may_end(first.made, left.loop) if first.made else None
    unsure = () if may is None or may == here else (Related(MAY_END, may),)
    waiting = ranks_do((s.rank.rank for s in stay), "wait")
    did = f"skipped {_op(first)}" if left.surely else f"left a loop in which {waiting}"
    tied = len(gone) == len(stay) and not left.blames
    return Attribution(
        rule=(SkippedRound if left.skipped else LoopExit).rule,
        culprits=_ranks([*gone, *stay]) if tied else _fewer(gone, stay),
        location=here,
        label=left.label,
        related=(*unsure, *wait_lines([*stay, *gone], here)),
        summary=f"{left.who} {did}",
        cause=f"{left.cause}; ",
        fix=left.fix,
    )


def _group_order(now: Snapshot, ring: list[RankSnapshot]) -> Attribution:
    """Nothing tells who is at fault: all who wait in the cycle."""
    return Attribution(
        rule="group-order",
        culprits=_ranks([s for stand in ring for s in _with(now, stand)]),
        location=ring[0].location,
        label=f"{ranks_text([ring[0].rank.rank])} waits here",
        related=wait_lines([ring[1]], ring[0].location),
        summary="ranks wait for each other in different groups",
        cause="each waits in one group for a rank that waits in another: they use the groups in a "
        "different order, or one of them skipped a call; ",
        fix="use the groups in the same order on all ranks, and make each call on every rank of "
        "its group",
    )


def _ranks(stands: list[RankSnapshot]) -> tuple[int, ...]:
    return tuple(sorted({s.rank.rank for s in stands}))


def _fewer(these: list[RankSnapshot], rest: list[RankSnapshot]) -> tuple[int, ...]:
    return _ranks(rest if len(rest) < len(these) else these)


def _left(
    now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot
) -> tuple[LeftLoop, list[RankSnapshot], list[RankSnapshot]] | None:
    """The loop in which `waiting` is and which `stand`, that it waits for, left; who left it, and
    who is in it.

    None where `waiting` may have come anew to a loop that all ranks had finished.
    """
    key, call, ours, theirs = waiting.key, waiting.call, stand.made, waiting.made
    if key is None or call is None or ours is None or theirs is None:
        return None
    stay = _with(now, waiting)
    gone = [s for s in now.absent(waiting) if s.blocked]
    made = {s.rank.rank: s.made for s in (*stay, *gone) if s.made is not None}
    logs = now.known.logs[key]
    there = (now.known.at(logs[r], call.index - 1) for r in made if r in logs)
    before = [m for m in there if m is not None]
    differing = CallDivergence(key, call.index, made, ("op",), False, False, before=tuple(before))
    left = left_loop(Suspect(differing, ours, ()))
    if left is None or set(left.ranks) != {s.rank.rank for s in gone}:
        return None
    around = [{at for at, _, _, _ in loops_around(m.rank, m.site)} for m in (ours, theirs)]
    anew = around[0] & around[1] and not left.surely
    if anew or not _stayed(waiting, left.loop):
        return None
    return left, gone, stay


def _stayed(stand: RankSnapshot, loop: Location) -> bool:
    """Whether a rank called nothing outside of a loop since it last made its present call."""
    at = stand.call
    calls = stand.rank.ring.calls if stand.rank.ring and at else ()
    earlier = takewhile(lambda c: at is None or c.number != at.number, calls)
    sites = {s.id: s for s in stand.rank.of(CallSite)}
    for call in reversed([c for c in earlier if c.state is not State.VOID]):
        if not is_inside(stand.rank, sites.get(call.site), loop.file, loop.line):
            return False
        if at is not None and (call.group, call.site) == (at.group, at.site):
            return True
    return False


def _with(now: Snapshot, stand: RankSnapshot) -> list[RankSnapshot]:
    """The ranks that wait in the same call as this one, itself included."""
    index = stand.call.index if stand.call else -1
    return [s for s in now.blocked if s.key == stand.key and s.call and s.call.index == index]


def _op(stand: RankSnapshot) -> str:
    return stand.made.signature.op if stand.made else "it"
