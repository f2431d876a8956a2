"""Why copies of a model diverge, as far as it was seen, and what findings about them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...events import (
    Clipped,
    Edited,
    Loaded,
    OptimizerSeen,
    ProbeTrouble,
    Sketch,
    StepDone,
    Watched,
)
from ...events.drift import UNHELD
from ...report.findings import Condition, Finding, Related, Steps
from ...run import Location, Run, fold_ranks, listed, ranks_text
from ..rank_differences import differences_among
from .replica import Member
from .replicas import Divergence, Replicas, by_module
from .thresholds import GROWS, NOISE, ROUNDING

UNKNOWN = "unknown-cause"
NO_OPTIMIZER = "no-optimizer"

UNEQUAL_PARAMETERS = "unequal-parameters"
UNEVEN_JOIN = "uneven-join"

UNKNOWN_RULES = {UNKNOWN: "the copies differ, and nothing that was recorded explains it"}
"""For the `rules` of a check that reports causes of `unknown`."""

SAME_EVERYWHERE = "make the same modification on every rank, or on none"

EXAMINE_EVERY_STEP = (
    "rerun with `--every 1`: every step is then examined, and on the CPU a manual modification is "
    "reported with its rank, and with its line where it happens more than once; look for code "
    "under `if rank == ...`"
)
REPEAT_THE_STEP = (
    "look for code under `if rank == ...` that touches the model; if there is none, run the same "
    "step twice on the ranks that differ and compare"
)


@dataclass(frozen=True)
class Cause:
    """Why copies differ: the rule that decided, the line, the ranks and what to change.

    Attributes:
        rule: the rule of the check; see `Finding.rule`.
        everybody: all ranks do something of the kind, `ranks` do it differently.
        trained: the steps that were certainly taken since, where copies were compared only after
            them.
    """

    rule: str
    text: str
    fix: str
    label: str
    location: Location | None = None
    ranks: tuple[int, ...] = ()
    related: tuple[Related, ...] = ()
    evidence: dict[str, object] = field(default_factory=dict)
    everybody: bool = False
    trained: Steps | None = None


Explanation = Callable[[Replicas, Divergence], Cause | None]
"""One reason why copies may differ: None where it does not apply."""


def explained(explanations: Iterable[Explanation], group: Replicas, found: Divergence) -> Cause:
    """The cause of the first explanation that applies; the last one always does."""
    return next(cause for explain in explanations if (cause := explain(group, found)))


EXPLAINING = {
    Watched.OPTIONS: "hyperparameters and loss scales",
    Watched.EDITS: "manual modifications of gradients and parameters",
    Watched.LOADS: "loads of weights and optimizer state",
}
"""What makes copies diverge, and how a report calls it."""


JUDGED = (Loaded, Edited, Clipped)
"""What the explanations before `unknown` have judged: these records do not explain it."""


def unknown(group: Replicas, found: Divergence, moment: str) -> Cause:
    """Nothing that was recorded explains it. `moment` says what is known, as a clause."""
    members = group.members.values()
    nodes = {m.rank.node for m in members}
    lost = {t.watched for m in members for t in m.rank.of(ProbeTrouble)}
    blind = sorted(words for watched, words in EXPLAINING.items() if watched in lost)
    suspects = "; possible causes: code that runs on some ranks only, faulty memory or a faulty "
    suspects += "processor, or nondeterministic kernels"
    if len(nodes) > 1:
        suspects += f" (the ranks run on {len(nodes)} nodes)"
    text = f"nothing that was recorded explains it: {moment}"
    fix = REPEAT_THE_STEP
    if unseen := found.unseen:
        text += f"; of steps {unseen[0]} to {found.first} only the last was examined"
    if unseen or found.kind == "gradients":
        fix = EXAMINE_EVERY_STEP
    if blind:
        suspects = f"; {listed(blind)} were not observed, as the doctor itself failed there, and "
        suspects += "may be the cause"
        fix = "print on every rank what was not observed, and compare; look for code under "
        fix += "`if rank == ...` that touches the model or its optimizer"
    before = differences_among([m.rank for m in members], before=found.at)
    if other := next((d for d in before if d.kind not in JUDGED), None):
        suspects += f". First other difference between the ranks on record: {other.text}"
    return Cause(UNKNOWN, text=text + suspects, fix=fix, label="applied here")


def no_optimizer(group: Replicas, found: Divergence) -> Cause | None:
    """No optimizer holds the parameters, and yet they change: the program writes them itself."""
    if group.any.optimizer != UNHELD:
        return None
    return Cause(
        NO_OPTIMIZER,
        text="no optimizer holds these parameters: the program writes them itself after each "
        "backward (from master copies that an optimizer holds, for example), with different values "
        "on each rank. DDP averages gradients; it broadcasts parameters only at construction",
        fix="create such copies (`p.detach().clone()`) after `DistributedDataParallel(...)`, when "
        "all ranks have rank 0's parameters, or broadcast them once: `dist.broadcast(copy, 0)`",
        label="the ranks are equal after this line, but only until the first update",
        location=wrap_line(group),
        ranks=found.minority,
    )


def step_line(group: Replicas, ranks: tuple[int, ...]) -> Location | None:
    """The line of the optimizer's step, on one of these ranks if it is known there."""
    return group.line(StepDone, ranks)


def step_time(member: Member, step: int) -> float:
    """When a rank took a step, on its own clock."""
    done = member.of(StepDone)
    return next((e.at for e in done if e.step >= step), done[-1].at if done else 0.0)


def wrap_line(group: Replicas) -> Location | None:
    """The line that wraps the model in DDP."""
    return group.any.rank.location(group.any.wrapped.site)


def fields(group: Replicas, found: Divergence, cause: Cause) -> dict[str, object]:
    """The fields that every finding about a divergence of copies takes from it and its cause."""
    wrapped = wrap_line(group)
    if wrapped == cause.location:
        wrapped = None
    return {
        "rule": cause.rule,
        "ranks": cause.ranks or found.minority,
        "steps": _steps(group, found),
        "subjects": tuple(found.names),
        "location": cause.location or step_line(group, found.minority),
        "label": cause.label,
        "related": cause.related + ((Related(group.any.wrapped.here, wrapped),) if wrapped else ()),
        "cause": cause.text,
        "fix": cause.fix,
        "at": found.at,
    }


def evidence(group: Replicas, found: Divergence) -> dict[str, object]:
    """The figures of a divergence: how many tensors, how large the difference, growing or not."""
    sizes = distances(group, found)
    shown = {step: _size(value) for step, value in sizes.items()}
    facts: dict[str, object] = {
        "differing": f"{len(found.names)} of {_tensors(found)}",
        "comparisons_that_differ": f"{len(found.keys)} of {found.compared} since the first",
        _distinct(found): " | ".join(ranks_text(ranks) for ranks in found.split),
        **_who_was_compared(found),
        "modules": by_module(found.names),
    }
    if found.before >= 0:
        facts[LAST_EQUAL] = found.before
    if shown:
        facts["relative_distance_by_step"] = shown
        facts["grows"] = _grows(list(sizes.values()))
    return facts


LAST_EQUAL = "last_equal_at_step"
"""Evidence: the last step (a number) at which the copies were equal as far as compared."""


def _distinct(found: Divergence) -> str:
    """What the ranks hold different versions of, in the name of the evidence that lists them."""
    return "distinct_gradients" if found.kind in ("gradients", "local") else "distinct_copies"


def _who_was_compared(found: Divergence) -> dict[str, object]:
    """Where some ranks were not part of the first comparison: which, and what tells the groups."""
    facts: dict[str, object] = {}
    if found.uncompared:
        facts["not_compared_at_first"] = ranks_text(found.uncompared)
    if found.grouped_by:
        facts["groups_according_to"] = found.grouped_by
    return facts


def _tensors(found: Divergence) -> str:
    if found.looked == found.total:
        return f"{found.total} tensors"
    return f"{found.looked} compared tensors ({found.total} in all)"


def _steps(group: Replicas, found: Divergence) -> Steps | None:
    steps = Steps.of(found.keys)
    if steps is None or found.point != "step":
        return steps
    every = max(m.last_step for m in group.members.values()) - steps.first + 1
    whole = found.compared >= every
    return steps if whole else Steps(steps.first, steps.last, steps.count, found.compared)


def of_optimizer(group: Replicas) -> str:
    """` of Adam (train.py:12)`, whose steps are counted; empty where the rank has only one."""
    rank, number = group.any.rank, group.any.optimizer
    every = {e.optimizer: e for e in rank.of(OptimizerSeen)}
    spot = rank.location(every[number].site) if number in every else None
    return f" of {every[number].kind} ({spot})" if spot and len(every) > 1 else ""


def changed_state(finding: Finding) -> bool:
    """Whether a finding shows optimizer state that was changed for a reason of its own, not by
    gradients or parameters that differ."""
    return finding.check == "optimizer-state-drift" and finding.rule not in (UNKNOWN, UNEVEN_JOIN)


def may_follow(effect: Finding, cause: Finding, later: int) -> bool:
    """Whether the steps allow that an effect shows `later` steps after its cause.

    What was first seen at a step may have begun right after the last step at which the copies were
    still equal.
    """
    if cause.steps is None or effect.steps is None:
        return True
    equal = cause.evidence.get(LAST_EQUAL, -1)
    return effect.steps.first >= (equal if isinstance(equal, int) else -1) + 1 + later


IN_A_LATER_STEP = Condition("in a later step", lambda mine, other: may_follow(other, mine, later=1))


def _size(value: float) -> str:
    return f"{value:.2g}" if value > ROUNDING else "below 1e-6"


def _grows(sizes: list[float]) -> str:
    if len(sizes) < 2:
        return "measured once"
    first, last = sizes[0], sizes[-1]
    if last > (1 + NOISE) * first:
        return "yes" if last > GROWS * first else "slowly"
    if first > (1 + NOISE) * last:
        return "shrinks" if first > GROWS * last else "shrinks slowly"
    return "no"


def distances(group: Replicas, found: Divergence) -> dict[int, float]:
    """By step at which copies differ: the largest distance of two copies over their norm, where it
    was measured."""
    kind = found.kind
    steps = set(found.keys) if found.point == "step" else None
    end = max(m.last_step for m in group.members.values()) + 1
    sketches: dict[int, dict[int, Sketch]] = {}
    for number, member in group.members.items():
        for event in member.of(Sketch, kind=kind):
            within = event.step >= found.first if steps is None else event.step in steps
            if within or event.step == end:
                sketches.setdefault(event.step, {})[number] = event
    # Ranks that agree have no distance: it takes one rank of two groups.
    sides = [set(side) for side in found.split]
    found_distances = {
        step: _distance(list(seen.values()))
        for step, seen in sorted(sketches.items())
        if sum(not side.isdisjoint(seen) for side in sides) > 1
    }
    if not found_distances.get(end, 1.0):
        del found_distances[end]  # made equal after the last step
    return found_distances


def _distance(sketches: list[Sketch]) -> float:
    first = sketches[0]
    widest = max(
        sum((a - b) ** 2 for a, b in zip(first.bins, other.bins, strict=False)) ** 0.5
        for other in sketches[1:]
    )
    norm = max(s.norm for s in sketches)
    return widest / norm if norm else 0.0


def largest_distance(group: Replicas, found: Divergence) -> float | None:
    """The largest distance of two copies over their norm; None where it was not measured."""
    return max(distances(group, found).values(), default=None)


def is_rounding(distance: float | None) -> bool:
    """Whether a distance is measured and no larger than rounding errors."""
    return distance is not None and distance <= ROUNDING


def by_how_much(group: Replicas, found: Divergence) -> str:
    """` by up to 3 % of the norm`, the largest that was seen; empty where it was not measured."""
    distance = largest_distance(group, found)
    if distance is None:
        return ""
    if is_rounding(distance):
        return " by rounding errors"
    percent = 100 * distance
    shown = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by up to {shown} % of the norm"


def differ(count: int, split: list[tuple[int, ...]], run: Run) -> str:
    """`differs between ranks 0 and 1`, or `differ` for several things."""
    return f"{'differs' if count == 1 else 'differ'} {between(split, run)}"


def between(split: list[tuple[int, ...]], run: Run) -> str:
    """`between ranks 0-2 and 3`, or who differs where there are more than two versions."""
    if len(split) == 2:
        return f"between ranks {fold_ranks(split[0])} and {fold_ranks(split[1])}"
    ranks = [r for g in split for r in g]
    who = "all ranks" if len(ranks) == run.world_size else ranks_text(ranks)
    return f"between {who} ({len(split)} versions)"
