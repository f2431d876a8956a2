"""Ranks that wait for each other in collectives of different groups: a deadlock of several groups,
and what led to it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...events import CallSite, Place, Statement
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
from ..waiting.wait_graph import victims
from .divergence import CallDivergence
from .explanations import DEADLOCKED, Rule
from .loop_exits import MAY_END, LoopExit, left_loop
from .missing_calls import MissingCall, left_out


@dataclass(frozen=True)
class GroupBranch:
    """A call under a branch that only some ranks entered; the others are past the branch.

    Attributes:
        call: a rank that waits in the call; callers: all ranks in it; others: who is past it.
        place, head: the branch.
    """

    call: RankSnapshot
    callers: tuple[int, ...]
    others: list[RankSnapshot]
    place: Place
    head: Statement

    @property
    def culprits(self) -> tuple[int, ...]:
        """The fewer of the two sides."""
        rest = tuple(s.rank.rank for s in self.others)
        return rest if len(rest) < len(self.callers) else self.callers


@dataclass(frozen=True)
class GroupLoopExit:
    """A loop that ranks left while others wait for them in it."""

    left: LoopExit
    gone: list[RankSnapshot]
    stay: list[RankSnapshot]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The fewer of the two sides; both where nothing tells which is at fault."""
        gone, stay = (tuple(s.rank.rank for s in stands) for stands in (self.gone, self.stay))
        if len(gone) == len(stay) and not self.left.blames:
            return tuple(sorted((*gone, *stay)))
        return stay if len(stay) < len(gone) else gone


def report(now: Snapshot, ring: list[RankSnapshot]) -> dict[str, Any]:
    """The fields of the finding.

    Args:
        ring: ranks in collectives, each of which waits for the next one, the last for the first.
    """
    if skipped := left_out(now, ring):
        fields = _missing_call(skipped)
    elif found := _branched(now, ring):
        fields = _in_a_branch(found)
    elif beyond := _loop_exit(now, ring):
        fields = _out_of_a_loop(beyond)
    else:
        fields = _in_any_order(now, ring)
    waiting = [*ring, *(s for s in now.blocked if s not in ring and s.waits_for_good)]
    where = ", ".join(f"rank {s.rank.rank} is {s.doing} of {s.key}" for s in ring)
    fields["summary"] = f"{fields['summary']}: {where}"
    fields["evidence"] = {
        "cycle": " -> ".join(str(s.rank.rank) for s in (*ring, ring[0])),
        **fields.get("evidence", {}),
        **victims(now, waiting),
    }
    return fields | {
        "deadlocked": not now.failed,
        "subjects": tuple(sorted({s.made.signature.op for s in ring if s.made})),
        "at": now.at - max(s.still_s for s in ring),
    }


def _missing_call(skipped: MissingCall) -> dict[str, Any]:
    stand, waiting = skipped.stand, skipped.waiting
    rank = stand.rank.rank
    number = f"call {waiting.call.index if waiting.call else -1} of {waiting.key}"
    return {
        "rule": Rule.MISSING_CALL.value,
        "ranks": (rank,),
        "location": waiting.location,
        "label": f"rank {rank} did not make this call",
        "related": _here([stand], waiting.location),
        "summary": f"rank {rank} skipped {number}",
        "cause": f"in each of its last {skipped.rounds} rounds rank {rank} called this group "
        f"before {stand.made.place if stand.made else 'that line'}; this time it did not, so "
        f"{DEADLOCKED}",
        "fix": f"call {_op(waiting)} at the same point of each round on every rank of the group, "
        "or on none",
        "evidence": {"earlier_rounds": skipped.rounds},
    }


def _branched(now: Snapshot, ring: list[RankSnapshot]) -> GroupBranch | None:
    waiting = [s for s in now.blocked if s.made is not None]
    for stand in ring:
        made = stand.made
        found = branch(made) if made else None
        if made is None or found is None:
            continue
        sides: dict[bool, list[RankSnapshot]] = {True: [], False: []}
        for other in waiting:
            same = other.made is not None and other.made.text == made.text
            sides[same and other.key == stand.key].append(other)
        past = [o.made for o in sides[False] if o.made is not None]
        if past and all(avoided(made, m) and arms(made, m) is None for m in past):
            callers = tuple(s.rank.rank for s in sides[True])
            return GroupBranch(stand, callers, sides[False], *found)
    return None


def _in_a_branch(found: GroupBranch) -> dict[str, Any]:
    spot = found.call.rank.location(found.place.site)
    head = Related(leading(found.head), head_of(spot, found.head)) if spot else None
    return {
        "rule": Rule.BRANCH.value,
        "ranks": found.culprits,
        "location": found.call.location,
        "label": "not called by every rank",
        "related": (*((head,) if head else ()), *_here(found.others, found.call.location)),
        "summary": f"only some ranks call {_op(found.call)} here",
        "cause": f"{parts(found.head)}, and the others wait further down in a call of another "
        f"group; {DEADLOCKED}",
        "fix": unbranched(found.head, f"call {_op(found.call)}"),
    }


def _loop_exit(now: Snapshot, ring: list[RankSnapshot]) -> GroupLoopExit | None:
    """The loop that ranks left while others wait for them in it; None where that is not clear, or
    holds for several loops."""
    pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
    found = [left for pair in pairs if (left := _left(now, *pair)) is not None]
    return found[0] if len(found) == 1 else None


def _left(now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot) -> GroupLoopExit | None:
    """The loop in which `waiting` is and which `stand`, that it waits for, left.

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
    left = left_loop(
        CallDivergence(key, call.index, made, ("op",), False, False, (), ours, before=tuple(before))
    )
    if left is None or set(left.ranks) != {s.rank.rank for s in gone}:
        return None
    around = [{at for at, _, _, _ in loops_around(m.rank, m.site)} for m in (ours, theirs)]
    anew = around[0] & around[1] and not left.surely
    if anew or not _stayed(waiting, left.loop):
        return None
    return GroupLoopExit(left, gone, stay)


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


def _out_of_a_loop(beyond: GroupLoopExit) -> dict[str, Any]:
    left, first = beyond.left, beyond.stay[0]
    here, may = left.place, may_end(first.made, left.loop) if first.made else None
    unsure = () if may is None or may == here else (Related(MAY_END, may),)
    waiting = ranks_do((s.rank.rank for s in beyond.stay), "wait")
    did = f"skipped {_op(first)}" if left.surely else f"left a loop in which {waiting}"
    return {
        "rule": (Rule.SKIPPED_ROUND if left.skipped else Rule.LOOP_EXIT).value,
        "ranks": beyond.culprits,
        "location": here,
        "label": left.label,
        "related": (*unsure, *_here([*beyond.stay, *beyond.gone], here)),
        "summary": f"{left.who} {did}",
        "cause": f"{left.cause}; {DEADLOCKED}",
        "fix": left.fix,
    }


def _in_any_order(now: Snapshot, ring: list[RankSnapshot]) -> dict[str, Any]:
    ranks = {s.rank.rank for stand in ring for s in _with(now, stand)}
    return {
        "rule": Rule.GROUP_ORDER.value,
        "ranks": tuple(sorted(ranks)),
        "location": ring[0].location,
        "label": f"{ranks_text([ring[0].rank.rank])} waits here",
        "related": _here([ring[1]], ring[0].location),
        "summary": "ranks wait for each other in different groups",
        "cause": "each waits in one group for a rank that waits in another: they use the groups in "
        f"a different order, or one of them skipped a call; {DEADLOCKED}",
        "fix": "use the groups in the same order on all ranks, and make each call on every rank of "
        "its group",
    }


def _with(now: Snapshot, stand: RankSnapshot) -> list[RankSnapshot]:
    """The ranks that wait in the same call as this one, itself included."""
    index = stand.call.index if stand.call else -1
    return [s for s in now.blocked if s.key == stand.key and s.call and s.call.index == index]


def _here(stands: list[RankSnapshot], shown: Location | None) -> tuple[Related, ...]:
    """The lines at which ranks wait, but for the line that is shown already."""
    lines: dict[Location, list[int]] = {}
    for stand in stands:
        if stand.location is not None and stand.location != shown:
            lines.setdefault(stand.location, []).append(stand.rank.rank)
    return tuple(Related(f"{ranks_do(ranks, 'wait')} here", spot) for spot, ranks in lines.items())


def _op(stand: RankSnapshot) -> str:
    return stand.made.signature.op if stand.made else "it"
