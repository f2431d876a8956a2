"""Ranks that wait for each other in a ring, each in a collective of another group than the one it
waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpdoctor.events import Enclosing, Place
from ddpdoctor.findings import Location, Related
from ddpdoctor.run import ranks_do

from ._branches import arms, avoided, branch, head_of, leading, parts, unbranched
from ._rounds import LeftOut, left_out
from ._scene import Scene, Stand
from ._waiting import victims

FOR_EVER = "none of them can ever finish"


@dataclass(frozen=True)
class Branched:
    """A call that some make under a branch, past which the others are without it.

    Attributes:
        ranks: the fewer of the two; place, head: the branch.
    """

    call: Stand
    callers: tuple[int, ...]
    others: list[Stand]
    place: Place
    head: Enclosing

    @property
    def ranks(self) -> tuple[int, ...]:
        rest = tuple(s.rank.rank for s in self.others)
        return rest if len(rest) < len(self.callers) else self.callers


def told(now: Scene, ring: list[Stand]) -> dict[str, Any]:
    """The fields of the finding."""
    if skipped := left_out(now, ring):
        fields = _left_out(skipped)
    elif found := _branched(now, ring):
        fields = _in_a_branch(found)
    else:
        fields = _in_any_order(ring)
    waiting = [*ring, *(s for s in now.blocked if s not in ring and s.waits_for_good)]
    where = ", ".join(f"rank {s.rank.rank} is {s.doing} of {s.key}" for s in ring)
    fields["summary"] = f"{fields['summary']}: {where}"
    fields["evidence"] = {
        "cycle": " -> ".join(str(s.rank.rank) for s in (*ring, ring[0])),
        "stuck": not now.failed,
        **fields.get("evidence", {}),
        **victims(waiting),
    }
    return fields | {
        "subjects": tuple(sorted({s.made.signature.op for s in ring if s.made})),
        "at": now.at - max(s.still_s for s in ring),
    }


def _left_out(skipped: LeftOut) -> dict[str, Any]:
    stand, waiting = skipped.stand, skipped.waiting
    number = f"call {waiting.call.index if waiting.call else -1} of {waiting.key}"
    return {
        "ranks": (stand.rank.rank,),
        "location": waiting.location,
        "label": f"rank {stand.rank.rank} did not make this call",
        "related": _here([stand], waiting.location),
        "summary": f"rank {stand.rank.rank} left out {number}",
        "cause": f"rank {stand.rank.rank} made a call of that group before each of its last "
        f"{skipped.rounds} calls of {stand.made.place if stand.made else 'that line'}, and none "
        f"before this one; {FOR_EVER}",
        "fix": f"make every rank of the group call {_op(waiting)} at the same place in each round, "
        "or none",
        "evidence": {"earlier_rounds": skipped.rounds},
    }


def _branched(now: Scene, ring: list[Stand]) -> Branched | None:
    waiting = [s for s in now.blocked if s.made is not None]
    for stand in ring:
        made = stand.made
        found = branch(made) if made else None
        if made is None or found is None:
            continue
        sides: dict[bool, list[Stand]] = {True: [], False: []}
        for other in waiting:
            same = other.made is not None and other.made.text == made.text
            sides[same and other.key == stand.key].append(other)
        past = [o.made for o in sides[False] if o.made is not None]
        if past and all(avoided(made, m) and arms(made, m) is None for m in past):
            callers = tuple(s.rank.rank for s in sides[True])
            return Branched(stand, callers, sides[False], *found)
    return None


def _in_a_branch(found: Branched) -> dict[str, Any]:
    spot = found.call.rank.location(found.place.site)
    head = Related(leading(found.head), head_of(spot, found.head)) if spot else None
    return {
        "ranks": found.ranks,
        "location": found.call.location,
        "label": "not called by every rank",
        "related": (*((head,) if head else ()), *_here(found.others, found.call.location)),
        "summary": f"only some ranks call {_op(found.call)} here",
        "cause": f"{parts(found.head)}, and the others wait further down in a call of another "
        f"group; {FOR_EVER}",
        "fix": unbranched(found.head, f"call {_op(found.call)}"),
    }


def _in_any_order(ring: list[Stand]) -> dict[str, Any]:
    return {
        "ranks": tuple(sorted(s.rank.rank for s in ring)),
        "location": ring[0].location,
        "label": f"rank {ring[0].rank.rank} waits here",
        "related": _here([ring[1]], ring[0].location),
        "summary": "ranks wait for each other in different groups",
        "cause": "each waits in one group for a rank that waits in another: they use the groups in "
        f"different order, or one of them left a call out; {FOR_EVER}",
        "fix": "use the groups in one order on all ranks, and make each call on every rank of its "
        "group",
    }


def _here(stands: list[Stand], shown: Location | None) -> tuple[Related, ...]:
    """The lines that other ranks are at."""
    lines: dict[Location, list[int]] = {}
    for stand in stands:
        if stand.location is not None and stand.location != shown:
            lines.setdefault(stand.location, []).append(stand.rank.rank)
    return tuple(Related(f"{ranks_do(ranks, 'wait')} here", spot) for spot, ranks in lines.items())


def _op(stand: Stand) -> str:
    return stand.made.signature.op if stand.made else "it"
