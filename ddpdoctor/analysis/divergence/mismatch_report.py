"""How a divergence of the ranks is reported: which calls, on which lines, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...report.evidence_names import STEPS_TAKEN
from ...report.findings import Condition, Evidence, Related
from ...run import Location, Run, fold_ranks, ranks_do, ranks_text
from ...run.phrases import listed, some
from ..calls.call_logs import CallRecord
from ..control_flow.branches import branch, condition, head_of, leading
from ..waiting.snapshot import RankSnapshot, snapshot_of
from .divergence import CallDivergence, describe_sides
from .divergence_causes import around_all
from .divergences import NEAR, got_past, latest
from .loop_exits import left_loop

NEVER_CREATED = "never-created"
"""Rule of group-creation-mismatch: some ranks never created a group, as ranks do not that failed or
left before."""

PASSED_BY_ALL = "all_ranks_continued"
"""Name of the evidence that all ranks continued after the divergence."""

_GROUPS_NAMED = 3
_LINES_SHOWN = 4


@dataclass(frozen=True)
class Mismatch:
    """A divergence, and the same one in other groups that execute the same lines."""

    divergence: CallDivergence
    others: tuple[CallDivergence, ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks at fault in all of these groups."""
        found = {rank for one in (self.divergence, *self.others) for rank in one.culprits}
        return tuple(sorted(found))

    @property
    def elsewhere(self) -> str:
        """`; the same in group 2 [2, 3]`; empty where it is in one group only."""
        groups = [str(divergence.key) for divergence in self.others]
        return f"; the same in {some(groups, _GROUPS_NAMED)}" if groups else ""


@dataclass(frozen=True)
class Standstill:
    """Whether ranks can go on after a divergence.

    Attributes:
        deadlocked: every rank concerned waits, or is gone, and none makes progress.
        passed: all ranks continued after the divergence.
        waited_s: seconds that the first of them has waited.
        verdict_s: seconds from the last call until the monitor reported it; None without one.
    """

    deadlocked: bool = False
    passed: bool = False
    waited_s: float = 0.0
    verdict_s: float | None = None

    @property
    def evidence(self) -> Evidence:
        found: Evidence = {PASSED_BY_ALL: True} if self.passed else {}
        if self.deadlocked:
            found["waited_s"] = round(self.waited_s, 2)
        if self.verdict_s is not None:
            found["time_to_verdict_s"] = round(self.verdict_s, 2)
        return found


def each_once(found: Iterable[CallDivergence]) -> list[Mismatch]:
    """One mismatch for all groups that diverge on the same lines, the earliest first.

    Groups that have a rank in common are not joined: one may follow from the other.
    """
    faults: list[list[CallDivergence]] = []
    for divergence in sorted(found, key=lambda d: began(d, 0.0)):
        ranks = {*divergence.key.ranks}
        disjoint = (f for f in faults if not any({*d.key.ranks} & ranks for d in f))
        same = next((f for f in disjoint if _calls(f[0]) == _calls(divergence)), None)
        if same is None:
            faults.append([divergence])
        else:
            same.append(divergence)
    return [Mismatch(first, tuple(others)) for first, *others in faults]


def _calls(divergence: CallDivergence) -> object:
    calls = frozenset((m.signature.op, m.location, m.text) for m in divergence.calls.values())
    return calls, divergence.call.text, divergence.differs, divergence.shifted, divergence.extra


STOPPED_RANKS = Condition(
    "unless all ranks continued after the cause",
    lambda mine, _: not mine.evidence.get(PASSED_BY_ALL),
)


def began(divergence: CallDivergence, otherwise: float) -> float:
    """When the first rank made its call there, in seconds on the run's clock."""
    walls = [m.rank.wall(m.call.began) for m in divergence.calls.values() if m.call]
    return min(walls, default=otherwise)


def sides_text(divergence: CallDivergence) -> str:
    """`rank 1 calls all_reduce (train.py:88) and ranks 0,2-3 call barrier (train.py:92)`."""
    found = []
    sides = list(describe_sides(divergence))
    one_line = len({(m.signature.op, m.location_at(divergence.depth)) for _, m in sides}) == 1
    for side, made in sides:
        where = made.location_at(divergence.depth) if divergence.depth else made.where
        spots = ", ".join(filter(None, (str(where or ""), made.key and f"`{made.key}`")))
        what = made.signature.text if one_line else made.signature.op
        found.append(f"{ranks_do(side, 'call')} {what}" + (f" ({spots})" if spots else ""))
    return listed(found)


def related(
    divergence: CallDivergence, place: CallRecord, location: Location | None
) -> tuple[Related, ...]:
    """The lines of the other ranks, and the branch around the call; `location` is shown already."""
    found = []
    shown = {location}
    left = left_loop(divergence)
    # Where a loop explains it, or all are at fault, only a branch on the rank is of interest.
    explained = left is not None or len(divergence.culprits) == len(divergence.calls)
    heads = (h for h in (condition(place), None if explained else branch(place)) if h is not None)
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
        here = f"{ranks_do(side, 'call')} {op} here"
        if divergence.arguments_depth:
            here = f"the arguments of {op} on {who} come from here"
        spots = [(here, made.location_at(divergence.depth))]
        if not divergence.depth:
            called = "called from here" if by_all else f"{op} of {who} is called from here"
            spots.append((called, made.caller))
        for label, where in spots:
            if where is not None and where not in shown:
                shown.add(where)
                found.append(Related(label, where))
    return tuple(found[:_LINES_SHOWN])


def evidence(run: Run, mismatch: Mismatch) -> Evidence:
    """The calls of every side at that number, and whether the ranks are deadlocked because of
    them."""
    found = _evidence(run, mismatch.divergence)
    same = [
        {
            "group": str(divergence.key),
            "call_number": divergence.index,
            "ranks": fold_ranks(divergence.culprits),
        }
        for divergence in mismatch.others
    ]
    return {
        **found,
        **standstill(run, mismatch).evidence,
        **({"same_in": same} if same else {}),
    }


def _evidence(run: Run, divergence: CallDivergence) -> Evidence:
    made = divergence.calls.values()
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
    }


def _progress(run: Run, divergence: CallDivergence) -> Evidence:
    """The optimizer steps of each rank, where they differ: one skipped some, or left its loop."""
    steps = {r: run.ranks[r].steps for r in divergence.calls}
    if len(set(steps.values())) < 2:
        return {}
    return {STEPS_TAKEN: {str(r): n for r, n in steps.items()}}


def standstill(run: Run, mismatch: Mismatch) -> Standstill:
    """Whether the ranks of a mismatch are deadlocked, in one of its groups at least."""
    every = [_standstill(run, one) for one in (mismatch.divergence, *mismatch.others)]
    deadlocked = next((one for one in every if one.deadlocked), None)
    return deadlocked or Standstill(passed=all(one.passed for one in every))


def _standstill(run: Run, divergence: CallDivergence) -> Standstill:
    if got_past(run, divergence):
        return Standstill(passed=True)
    now = snapshot_of(run)
    stands = [now.by_rank[r] for r in divergence.calls if r in now.by_rank]
    members = [s for r, s in now.by_rank.items() if r in divergence.key.ranks]
    waiting = [s for s in members if _waits_near(s, divergence)]
    # Where they got past that call all the same, they may wait anywhere.
    if not waiting and now.stall is not None:
        stands, waiting = list(now.by_rank.values()), now.blocked
    if not waiting or not all(s.waits_for_good for s in (*members, *stands)):
        return Standstill()
    began = [s.rank.wall(s.call.began) for s in (*members, *waiting) if s.call is not None]
    return Standstill(
        deadlocked=True,
        waited_s=max(s.still_s for s in waiting),
        verdict_s=now.at - max(began) if now.stall is not None and began else None,
    )


def _waits_near(stand: RankSnapshot, divergence: CallDivergence) -> bool:
    """Whether a rank waits in the call at which the ranks diverge, or soon after it."""
    call = stand.call
    if call is None or stand.gone or stand.key != divergence.key:
        return False
    return 0 <= call.index - latest(divergence, call.index) <= NEAR
