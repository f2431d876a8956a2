"""How a parting of the ranks is told: who was where, on which lines, and since when."""

from __future__ import annotations

from collections.abc import Iterable

from ...report.findings import Evidence, Finding, Related
from ...run import Location, Run, fold_ranks, ranks_text
from ..calls.call_logs import CallRecord
from ..control_flow.branches import branch, condition, head_of, leading
from ..waiting.snapshot import RankSnapshot, Snapshot, scene
from .divergence import CallDivergence, describe_sides
from .divergence_causes import around_all
from .divergences import NEAR, got_past, latest
from .loop_exits import left_loop

Told = tuple[CallDivergence, tuple[CallDivergence, ...]]
"""A fault, and the same one in other groups."""


def each_once(found: Iterable[CallDivergence]) -> list[Told]:
    """Sub-groups that run one program part at the same lines: one fault, the earliest first."""
    faults: list[list[CallDivergence]] = []
    for divergence in sorted(found, key=lambda p: began(p, 0.0)):
        apart = (f for f in faults if not any({*p.key.ranks} & {*divergence.key.ranks} for p in f))
        same = next((f for f in apart if _calls(f[0]) == _calls(divergence)), None)
        if same is None:
            faults.append([divergence])
        else:
            same.append(divergence)
    return [(first, tuple(others)) for first, *others in faults]


def _calls(divergence: CallDivergence) -> object:
    calls = frozenset((m.signature.op, m.location, m.text) for m in divergence.made.values())
    return calls, divergence.place.text, divergence.differs, divergence.shifted, divergence.extra


def never_made(other: Finding) -> bool:
    """Whether it tells of a group that some ranks never made, as who has failed or left does. Who
    makes another group in its place has not."""
    return other.check == "group-creation-mismatch" and "groups_made" in other.evidence


def culprits_of(reported: Told) -> tuple[int, ...]:
    """The ranks at fault, of all those groups."""
    return tuple(
        sorted({rank for divergence in (reported[0], *reported[1]) for rank in divergence.culprits})
    )


def elsewhere(reported: Told) -> str:
    """`; the same in group 2 [2, 3]`."""
    groups = " and ".join(str(divergence.key) for divergence in reported[1][:3])
    more = f", and {len(reported[1]) - 3} more" if len(reported[1]) > 3 else ""
    return f"; the same in {groups}{more}" if groups else ""


def began(divergence: CallDivergence, otherwise: float) -> float:
    """When the first of them made that call."""
    walls = [m.rank.wall(m.call.began) for m in divergence.made.values() if m.call]
    return min(walls, default=otherwise)


def sides_text(divergence: CallDivergence) -> str:
    """`rank 1 is in all_reduce (train.py:88), ranks 0,2-3 are in barrier (train.py:92)`."""
    parts = []
    sides = list(describe_sides(divergence))
    alike = len({(m.signature.op, m.location_at(divergence.depth)) for _, m in sides}) == 1
    for side, made in sides:
        be = "are" if len(side) > 1 else "is"
        where = made.location_at(divergence.depth) if divergence.depth else made.where
        said = ", ".join(filter(None, (str(where or ""), made.key and f"`{made.key}`")))
        at = f" ({said})" if said else ""
        what = made.signature.text if alike else made.signature.op
        parts.append(f"{ranks_text(side)} {be} in {what}{at}")
    return ", ".join(parts)


def related(
    divergence: CallDivergence, place: CallRecord, location: Location | None
) -> tuple[Related, ...]:
    """The lines of the other ranks, and the branch that parted them; `location` is shown."""
    found = []
    shown = {location}
    left = left_loop(divergence)
    reported = left is not None or len(divergence.culprits) == len(divergence.made)
    heads = (h for h in (condition(place), None if reported else branch(place)) if h is not None)
    branched = next((h for h in heads if not around_all(divergence, *h)), None)
    if branched is not None:
        spot = place.rank.location(branched[0].site)
        head = head_of(spot, branched[1]) if spot is not None else None
        if head is not None and (location is None or location.line != head.line):
            found.append(Related(leading(branched[1]), head))
    if left is not None and left.place != location:
        found.append(Related(left.label, left.place))
    sides = list(describe_sides(divergence))
    by_all = len({made.caller for _, made in sides}) == 1
    for side, made in sides:
        who, op = ranks_text(side), made.signature.op
        here = f"calls {op} with it" if divergence.handed else f"{who} here"
        spots = [(here, made.location_at(divergence.depth))]
        if not divergence.depth:
            spots.append(("called from here" if by_all else f"calls {op} for {who}", made.caller))
        for label, where in spots:
            if where is not None and where not in shown:
                shown.add(where)
                found.append(Related(label, where))
    return tuple(found[:4])


def evidence(run: Run, reported: Told) -> Evidence:
    """The calls of every side at that number, and whether the run stands still because of it."""
    mine, *others = (_evidence(run, divergence) for divergence in (reported[0], *reported[1]))
    if not others:
        return mine
    same = [
        {
            "group": e["group"],
            "call_number": e["call_number"],
            "ranks": fold_ranks(divergence.culprits),
        }
        for e, divergence in zip(others, reported[1], strict=True)
    ]
    still: Evidence = next((e for e in (mine, *others) if e["stuck"]), {})
    kept = {k: v for k, v in still.items() if k in ("stuck", "waited_s", "time_to_verdict_s")}
    if not all(e.get("all_got_past") for e in others):
        mine.pop("all_got_past", None)
    return {**mine, "same_in": same, **kept}


def _evidence(run: Run, divergence: CallDivergence) -> Evidence:
    now = scene(run)
    made = divergence.made.values()
    in_steps = not divergence.over and any(m.step >= 0 for m in made)
    return {
        "group": str(divergence.key),
        "call_number": divergence.index,
        "calls": [
            {
                "ranks": fold_ranks(side),
                "call": m.signature.text,
                "line": str(m.location_at(divergence.depth) or ""),
                **({"called_from": str(m.caller or "")} if any(o.caller for o in made) else {}),
                **({"for": m.key} if m.key else {}),
                **({"step": divergence.step(m.step)} if in_steps else {}),
            }
            for side, m in describe_sides(divergence)
        ],
        "differs": list(divergence.differs) or ["order"],
        **({"times": 1 + len(divergence.again)} if divergence.again else {}),
        **_progress(run, divergence),
        **(
            {"stuck": False, "all_got_past": True}
            if got_past(run, divergence)
            else standing(now, divergence, sorted({m.rank.rank for m in made}))
        ),
    }


def _progress(run: Run, divergence: CallDivergence) -> Evidence:
    """Optimizer steps of each rank, where they differ: one has skipped some, or left its loop."""
    steps = {r: run.ranks[r].steps for r in divergence.made}
    if len(set(steps.values())) < 2:
        return {}
    return {"steps_taken": {str(r): n for r, n in steps.items()}}


def standing(now: Snapshot, divergence: CallDivergence, ranks: list[int]) -> Evidence:
    """`stuck`: every rank concerned waits, or is gone, and none has made progress. Where they got
    past that call all the same: where all ranks of a stall wait somewhere."""
    stands = [now.stands[r] for r in ranks if r in now.stands]
    members = [s for r, s in now.stands.items() if r in divergence.key.ranks]
    waiting = [s for s in members if _waits_near(s, divergence)]
    if not waiting and now.stall is not None:
        stands, waiting = list(now.stands.values()), now.blocked
    stuck = bool(waiting) and all(s.waits_for_good for s in (*members, *stands))
    if not stuck:
        return {"stuck": False}
    found: Evidence = {"stuck": True, "waited_s": round(max(s.still_s for s in waiting), 2)}
    began = [s.rank.wall(s.call.began) for s in (*members, *waiting) if s.call is not None]
    if now.stall is not None and began:
        found["time_to_verdict_s"] = round(now.at - max(began), 2)
    return found


def _waits_near(stand: RankSnapshot, divergence: CallDivergence) -> bool:
    """Whether a rank waits in the call at which they part, or in one of the next."""
    call = stand.call
    if call is None or stand.gone or stand.key != divergence.key:
        return False
    return 0 <= call.index - latest(divergence, call.index) <= NEAR
