"""The divergences of a run, explained: each fault once, with the groups and rounds in which it
recurs, and whether the ranks can go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...report.evidence_names import STEPS_TAKEN
from ...report.findings import Condition, Evidence, Steps
from ...run import Run, fold_ranks
from ...run.phrases import some
from ..calls.call_logs import CallLogs, call_logs
from ..control_flow.uneven_backwards import UnevenBackwards, uneven_backwards
from ..waiting.snapshot import RankSnapshot, snapshot_of
from .align import CallDivergence
from .attribution import Attribution, first
from .call_steps import CallSteps
from .divergences import divergences, got_past, latest
from .explanations import EXPLANATIONS
from .suspects import Suspect, suspect
from .thresholds import GROUPS_NAMED, NEAR
from .unanswered import averaged
from .within_library import stacks

NEVER_CREATED = "never-created"
"""Rule of group-creation-mismatch: some ranks never created a group, as ranks do not that failed or
left before."""

PASSED_BY_ALL = "all_ranks_continued"
"""Name of the evidence that all ranks continued after the divergence."""

STOPPED_RANKS = Condition(
    "unless all ranks continued after the cause",
    lambda mine, _: not mine.evidence.get(PASSED_BY_ALL),
)


@dataclass(frozen=True)
class Standstill:
    """Whether ranks can go on after a divergence.

    Attributes:
        deadlocked: every rank concerned waits, or is gone, and none makes progress.
        passed: all ranks continued after the divergence.
        waited_s: seconds that the first of them has waited; None where that is not known.
        verdict_s: seconds from the last call until the monitor reported it; None without one.
    """

    deadlocked: bool = False
    passed: bool = False
    waited_s: float | None = None
    verdict_s: float | None = None

    @property
    def evidence(self) -> Evidence:
        found: Evidence = {PASSED_BY_ALL: True} if self.passed else {}
        if self.deadlocked and self.waited_s is not None:
            found["waited_s"] = round(self.waited_s, 2)
        if self.verdict_s is not None:
            found["time_to_verdict_s"] = round(self.verdict_s, 2)
        return found


@dataclass(frozen=True)
class Divergence:
    """A divergence in one group, and who is at fault in its rounds."""

    calls: CallDivergence
    why: Attribution
    culprits: tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """A divergence, and the same one in other groups that execute the same lines."""

    run: Run
    groups: tuple[Divergence, ...]

    @property
    def first(self) -> CallDivergence:
        return self.groups[0].calls

    @property
    def why(self) -> Attribution:
        return self.groups[0].why

    @property
    def standstill(self) -> Standstill:
        """Whether the ranks are deadlocked, in one of the groups at least."""
        every = [_standstill(self.run, one.calls) for one in self.groups]
        deadlocked = next((one for one in every if one.deadlocked), None)
        return deadlocked or Standstill(passed=all(one.passed for one in every))

    def fields(self, still: Standstill) -> dict[str, object]:
        """The fields of the finding."""
        elsewhere = [str(one.calls.key) for one in self.groups[1:]]
        same = f"; the same in {some(elsewhere, GROUPS_NAMED)}" if elsewhere else ""
        fields = self.why.fields({rank for one in self.groups for rank in one.culprits})
        assert self.why.call is not None
        steps = CallSteps(self.run, self.first, self.why.call)
        return fields | {
            "deadlocked": still.deadlocked,
            "steps": self.why.steps or self._when(steps),
            "summary": self.why.summary + same,
            "evidence": {
                **self._evidence(steps),
                **still.evidence,
                **self._same_in(),
                **self.why.evidence,
            },
            "at": began(self.first, self.run.started),
        }

    def _when(self, steps: CallSteps) -> Steps | None:
        """The steps in which the ranks differ; none for groups created before training."""
        early = self.first.key.name == "new_group" and self.why.call and self.why.call.step <= 0
        return None if early else steps.when

    def _evidence(self, steps: CallSteps) -> Evidence:
        divergence, call = self.first, self.why.call
        depth = divergence.depth(call) if call else 0
        made = divergence.calls.values()
        in_steps = not steps.over and any(m.step >= 0 for m in made)
        taken = {r: self.run.ranks[r].steps for r in divergence.calls}
        return {
            "group": str(divergence.key),
            "call_number": divergence.index,
            "calls": [
                {
                    "ranks": fold_ranks(side),
                    "call": m.signature.text,
                    "line": str(m.location_at(depth) or ""),
                    **({"called_from": str(m.caller or "")} if any(o.caller for o in made) else {}),
                    **({"for": m.key} if m.key else {}),
                    **({"step": steps.of(m.step)} if in_steps else {}),
                }
                for side, m in divergence.sides(self.why.culprits)
            ],
            "differs": list(divergence.differs) or ["order"],
            **({"times": 1 + len(divergence.again)} if divergence.again else {}),
            # Where these differ, one skipped some, or left its loop.
            **(
                {STEPS_TAKEN: {str(r): n for r, n in taken.items()}}
                if len({*taken.values()}) > 1
                else {}
            ),
        }

    def _same_in(self) -> Evidence:
        rows = [
            {
                "group": str(one.calls.key),
                "call_number": one.calls.index,
                "ranks": fold_ranks(one.culprits),
            }
            for one in self.groups[1:]
        ]
        return {"same_in": rows} if rows else {}


def faults(run: Run, check: str) -> list[Fault]:
    """What a check has to report, the earliest first."""
    return [fault for fault in _faults(run) if fault.why.check == check]


@lru_cache(maxsize=1)
def _faults(run: Run) -> tuple[Fault, ...]:
    """One fault for all groups that diverge on the same lines for the same reason.

    Groups that have a rank in common are not joined: one may follow from the other.
    """
    known, now = call_logs(run), snapshot_of(run)
    found: list[tuple[object, list[Divergence]]] = []
    for calls in sorted(divergences(run), key=lambda d: began(d, 0.0)):
        uneven = next((one for one in uneven_backwards(run) if one.key == calls.key), None)
        facts = replace(_suspect(known, calls, uneven), stacks=stacks(now, calls))
        why = first(EXPLANATIONS, facts)
        culprits = {*why.culprits}
        for round_ in calls.variants:
            other = first(EXPLANATIONS, _suspect(known, round_, uneven))
            # Where all are at fault, nothing told which in that round.
            if other.rule == why.rule and len(other.culprits) < len(round_.calls):
                culprits |= {*other.culprits}
        divergence = Divergence(calls, why, tuple(sorted(culprits)))
        what = (why.rule, why.call and why.call.text, _lines(calls))
        ranks = {*calls.key.ranks}
        apart = (f for f in found if not any(ranks & {*d.calls.key.ranks} for d in f[1]))
        same = next((groups for fault, groups in apart if fault == what), None)
        if same is None:
            found.append((what, [divergence]))
        else:
            same.append(divergence)
    return tuple(Fault(run, tuple(groups)) for _, groups in found)


def _suspect(
    known: CallLogs, divergence: CallDivergence, uneven: UnevenBackwards | None
) -> Suspect:
    before = averaged(known, divergence)
    return replace(suspect(known, divergence), uneven=uneven, averaged=before)


def _lines(divergence: CallDivergence) -> object:
    calls = frozenset((m.signature.op, m.location, m.text) for m in divergence.calls.values())
    return calls, divergence.differs, divergence.shifted, divergence.extra


def began(divergence: CallDivergence, otherwise: float) -> float:
    """When the first rank made its call there, in seconds on the run's clock."""
    walls = [m.rank.wall(m.call.began) for m in divergence.calls.values() if m.call]
    return min(walls, default=otherwise)


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
        waited_s=max(s.still_s for s in waiting) if now.timed else None,
        verdict_s=now.at - max(began) if now.stall and began and now.timed else None,
    )


def _waits_near(stand: RankSnapshot, divergence: CallDivergence) -> bool:
    """Whether a rank waits in the call at which the ranks diverge, or soon after it."""
    call = stand.call
    if call is None or stand.gone or stand.key != divergence.key:
        return False
    return 0 <= call.index - latest(divergence, call.index) <= NEAR
