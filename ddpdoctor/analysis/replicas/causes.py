"""What set copies apart, as far as it was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...events import OptimizerSeen, ProbeTrouble, StepDone
from ...report.findings import Finding, Related, Steps
from ...run import Location, Run, fold_ranks, groups_text, ranks_text
from .distances import distances
from .replica import Member
from .replicas import Divergence, Replicas, by_module


@dataclass(frozen=True)
class Cause:
    """Why copies differ: the line, who did it, and what to change.

    Attributes:
        everybody: all ranks do something of the kind, `ranks` in another way.
        put_back: they change for a moment what they take back by arithmetic, in every step.
        trained: the steps that were surely taken since, where copies were compared only after them.
    """

    text: str
    fix: str
    label: str
    location: Location | None = None
    ranks: tuple[int, ...] = ()
    known: bool = True
    related: tuple[Related, ...] = ()
    evidence: dict[str, object] = field(default_factory=dict)
    everybody: bool = False
    put_back: bool = False
    trained: Steps | None = None


EXPLAINING = (
    "hyper-parameters and loss scales",
    "edits of gradients and parameters by hand",
    "loads of weights and optimizer states",
)
"""What sets copies apart, as the probe names it where it could not watch it."""


def unknown(group: Replicas, found: Divergence, moment: str) -> Cause:
    """Nothing that was seen explains it."""
    members = group.members.values()
    nodes = {m.rank.node for m in members}
    blind = {t.lost for m in members for t in m.rank.of(ProbeTrouble)}.intersection(EXPLAINING)
    suspects = "; suspects are code that runs on some ranks only, memory or a processor that "
    suspects += "computes wrong, or kernels that are not deterministic"
    if len(nodes) > 1:
        suspects += f" (the ranks are on {len(nodes)} nodes)"
    text = f"nothing that was seen explains it: {moment}"
    fix = "look for code under `if rank == ...` that touches the model; if there is none, run the "
    fix += "same step twice on the ranks that differ and compare"
    if unseen := found.unseen:
        text += f", but of the steps {unseen[0]} to {found.first} only the last was looked at"
    if unseen or found.kind == "gradients":
        fix = "run it again with `--every 1`: then all of them are looked at in every step, and on "
        fix += "the CPU an edit by hand is told with its rank, and with its line where it is made "
        fix += "more than once; look for code under `if rank == ...`"
    if blind:
        suspects = f"; but {' and '.join(sorted(blind))} were not observed: the doctor itself "
        suspects += "failed there, and it may well be those"
        fix = "print on every rank what was not observed, and compare; look for code under "
        fix += "`if rank == ...` that touches the model or its optimizer"
    return Cause(text=text + suspects, fix=fix, label="applied here", known=False)


def written(group: Replicas, found: Divergence) -> Cause:
    """No optimizer holds them, and yet they change."""
    return Cause(
        text="no optimizer holds these parameters, the program writes them itself after each "
        "backward (from copies that an optimizer holds, say), and not the same values on every "
        "rank: DDP averages gradients, and made parameters equal only when it was made",
        fix="make such copies (`p.detach().clone()`) after `DistributedDataParallel(...)`, which "
        "gives all ranks the parameters of rank 0, or send them once: `dist.broadcast(copy, 0)`",
        label="equal only from here to the first update",
        location=wrap_line(group),
        ranks=found.minority,
    )


def step_line(group: Replicas, ranks: tuple[int, ...]) -> Location | None:
    """The line of the optimizer's step."""
    for number in (*ranks, *group.members):
        member = group.members.get(number)
        if member is None:
            continue
        for done in member.rank.of(StepDone):
            if done.optimizer == member.optimizer:
                return member.rank.location(done.site)
    return None


def step_time(member: Member, step: int) -> float:
    """When a rank took a step, on its own clock."""
    done = [e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer]
    return next((e.at for e in done if e.step >= step), done[-1].at if done else 0.0)


def wrap_line(group: Replicas) -> Location | None:
    return group.any.rank.location(group.any.wrapped.site)


def reported(group: Replicas, found: Divergence, cause: Cause) -> dict[str, object]:
    """What every finding about copies that differ has in common."""
    wrapped = wrap_line(group)
    if wrapped == cause.location:
        wrapped = None
    return {
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
    """The figures: how many, how far, growing or not."""
    sizes = distances(group, found)
    shown = {step: _size(value) for step, value in sizes.items()}
    facts: dict[str, object] = {
        "differing": f"{len(found.names)} of {_tensors(found)}",
        "looks_that_differ": f"{len(found.keys)} of {found.compared} compared since",
        "groups_of_equal_ranks": groups_text(found.split),
        **_who_was_compared(found),
        "modules": by_module(found.names),
    }
    if found.before >= 0:
        facts["last_equal_at_step"] = found.before
    if shown:
        facts["relative_distance_by_step"] = shown
        facts["grows"] = _grows(list(sizes.values()))
    return facts


def _who_was_compared(found: Divergence) -> dict[str, object]:
    """Where some ranks did not look at first: who, and from where the groups are known."""
    facts: dict[str, object] = {}
    if found.uncompared:
        facts["not_compared_at_first"] = ranks_text(found.uncompared)
    if found.reported:
        facts["groups_are_those_of"] = found.reported
    return facts


def _tensors(found: Divergence) -> str:
    if found.looked == found.total:
        return f"{found.total} tensors"
    return f"{found.looked} tensors compared, of {found.total}"


def _steps(group: Replicas, found: Divergence) -> Steps | None:
    steps = Steps.of(found.keys)
    if steps is None or found.point != "step":
        return steps
    every = max(m.last_step for m in group.members.values()) - steps.first + 1
    whole = found.compared >= every
    return steps if whole else Steps(steps.first, steps.last, steps.count, found.compared)


def of_optimizer(group: Replicas) -> str:
    """` of Adam (train.py:12)`, whose steps are counted; empty where the rank has no other one."""
    rank, number = group.any.rank, group.any.optimizer
    every = {e.optimizer: e for e in rank.of(OptimizerSeen)}
    spot = rank.location(every[number].site) if number in every else None
    return f" of {every[number].kind} ({spot})" if spot and len(every) > 1 else ""


def may_follow(effect: Finding, cause: Finding, later: int) -> bool:
    """Whether the steps allow it, where an effect shows `later` steps after its cause. What was
    first seen at a step may have begun just after the last one at which there was nothing."""
    if cause.steps is None or effect.steps is None:
        return True
    equal = cause.evidence.get("last_equal_at_step", -1)
    return effect.steps.first >= (equal if isinstance(equal, int) else -1) + 1 + later


def _size(value: float) -> str:
    return f"{value:.2g}" if value > 1e-6 else "below 1e-6"


NOISE = 0.2
"""Part by which two measurements of one distance may differ: see `Sketch`, which tells of some ten
percent for each."""


def _grows(sizes: list[float]) -> str:
    if len(sizes) < 2:
        return "measured once"
    first, last = sizes[0], sizes[-1]
    if last > 1.5 * first:
        return "yes"
    if last > (1 + NOISE) * first:
        return "slowly"
    if last * 1.5 < first:
        return "shrinks"
    return "shrinks slowly" if last * (1 + NOISE) < first else "no"


ROUNDING = " by rounding-size amounts"


def largest(group: Replicas, found: Divergence) -> str:
    """` by 3 % of their norm`, where that was measured."""
    sizes = distances(group, found)
    if not sizes:
        return ""
    percent = 100 * max(sizes.values())
    if percent <= 1e-4:
        return ROUNDING
    reported = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by {reported} % of their norm"


def differ(count: int, split: list[tuple[int, ...]], run: Run) -> str:
    """That so many things differ, and between whom."""
    return f"{'differs' if count == 1 else 'differ'} {between(split, run)}"


def between(split: list[tuple[int, ...]], run: Run) -> str:
    """Who differs from whom."""
    if len(split) == 2:
        return f"between ranks {fold_ranks(split[0])} and {fold_ranks(split[1])}"
    ranks = [r for g in split for r in g]
    who = "all ranks" if len(ranks) == run.world_size else ranks_text(ranks)
    return f"between {who}, in {len(split)} versions"
