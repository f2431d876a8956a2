"""Writes to parameters outside the optimizer's steps, and the ranks that make them: known from
torch's write counters (`Tensor._version`), or after the last step from the values themselves. And
writes in the step of an optimizer that the program defines itself."""

from __future__ import annotations

from ...events import (
    Edited,
    Hyperparameters,
    OptimizerSeen,
    ProbeTrouble,
    Rewritten,
    Watched,
)
from ...events.pack import unpack
from ...report.findings import Steps
from ...run import Location, plural, ranks_do, ranks_text, some
from ..rank_differences import differences_among
from . import manual_edits
from .causes import SAME_EVERYWHERE, Cause
from .group_findings import MODIFIED_ON, WRITTEN_ON
from .replica import Member
from .replicas import Divergence, Replicas, by_step, divergence, kinds
from .thresholds import STEPS_WATCHED

WRITE_ON_SOME = "write-on-some-ranks"
OWN_STEP = "own-step"

RULES = {
    WRITE_ON_SOME: "some ranks write to parameters more often than others, at a line not known",
    OWN_STEP: "gradients agree, and the program's own optimizer applies different updates",
}


def write_on_some(group: Replicas, found: Divergence) -> Cause | None:
    """Some ranks wrote to the parameters more often since the copies were equal, and they are those
    that differ from the others, or all the others are; the line is not known."""
    if found.point not in ("step", "end"):
        return None
    before = found.before if found.point == "step" else _last_equal(group, found.names)
    until = found.first if found.point == "step" else group.any.last_step + 1
    events = {n: _to(m, found.names) for n, m in group.members.items()}
    # Ranks do not look at the same steps: count what surely lies in the window for the ranks to
    # blame, and what may lie in it for the others.
    surely = {
        n: [e for e in mine if e.since >= before and e.step <= until] for n, mine in events.items()
    }
    maybe = {
        n: sum(e.times for e in mine if e.step > before and e.since < until)
        for n, mine in events.items()
    }
    least = min(maybe.values())
    ranks = tuple(n for n, mine in surely.items() if sum(e.times for e in mine) > least)
    rest = tuple(n for n in group.members if n not in ranks)
    if not ranks or sorted(found.minority) not in (sorted(group.members), [*ranks], [*rest]):
        return None
    mine = [e for n in ranks for e in surely[n]]
    last, since, step = group.any.last_step, min(e.since for e in mine), max(e.step for e in mine)
    trained = Steps(step, last, last - step + 1) if step <= last else None
    when = f"between the begin of step {since} and the end of the run"
    if trained:
        when = f"between steps {since} and {step}"
    others = any(maybe[n] for n in rest)
    who = ranks_text(ranks)
    return Cause(
        WRITE_ON_SOME,
        text=f"{ranks_do(ranks, 'write')} to these parameters {when}, outside the optimizer, "
        f"{'more often than the other ranks' if others else 'the other ranks do not'} (known from "
        "torch's write counters); the line is not known",
        fix=f"{SAME_EVERYWHERE}; look for in-place operations on a parameter (`add_`, `copy_`, "
        f"`mul_`, ...) in code that only {who} {plural(len(ranks), 'runs', 'run')}",
        label=f"not the only write: some ranks also write to these parameters {when}",
        ranks=ranks,
        evidence={
            WRITTEN_ON: list(ranks),
            "written_between_steps": f"{since} and {step}",
            "more_writes_than_on_the_others": sum(e.times for e in surely[ranks[0]]) - least,
        },
        trained=trained,
    )


def _last_equal(group: Replicas, names: list[str]) -> int:
    """The last step before which some of these parameters were compared and equal; -1 for none."""
    every = group.names("parameters")
    wanted = {every.index(name) for name in names}
    tables = [by_step(m, "parameters", len(every)) for m in group.members.values()]
    for key in sorted(set.intersection(*(set(t) for t in tables)), reverse=True):
        rows = [table[key][0] for table in tables]
        common = wanted.intersection(*rows)
        if common and all(len({row[p] for row in rows}) == 1 for p in common):
            return key
    return -1


def _to(member: Member, names: list[str]) -> list[Rewritten]:
    """The writes of a rank to any of these parameters."""
    every = member.wrapped.parameters
    return [
        e
        for e in member.of(Rewritten)
        if any(every[p].name in names for p in unpack(e.parameters) if p < len(every))
    ]


def after_the_last_step(group: Replicas, found: Divergence) -> Cause | None:
    """Some ranks, or all, changed parameters after the last step."""
    if found.point != "end":
        return None
    last: dict[int, Edited] = {}
    for number, member in group.members.items():
        for event in manual_edits.edits_of(member, "parameters"):
            if event.changed and event.step == member.last_step + 1:
                last[number] = event
    if not last:
        return None
    ranks = tuple(sorted(last))
    everybody = len(ranks) == len(group.members)
    sites = (group.members[n].rank.location(e.site) for n, e in last.items())
    spot = next((spot for spot in sites if spot is not None), None)
    who = "every rank modifies" if everybody else manual_edits.modify(ranks)
    return Cause(
        manual_edits.UNEQUAL_EDITS if everybody else manual_edits.EDIT_ON_SOME,
        text=f"{who} parameters after the last step, "
        + ("differently" if everybody else "the other ranks do not")
        + ("" if spot else "; the line is not known"),
        fix=SAME_EVERYWHERE,
        label="parameters are modified after the last step",
        location=spot,
        ranks=ranks,
        evidence={MODIFIED_ON: list(ranks)},
    )


def own_step(group: Replicas, found: Divergence) -> Cause | None:
    """Parameters and gradients were equal before one step of an optimizer of the program's own,
    nothing else was seen to write to parameters, and they differ after it."""
    last = found.first - 1
    if found.point != "step" or found.before != last or found.first > STEPS_WATCHED:
        return None
    seen = [_seen(member) for member in group.members.values()]
    if not all(e is not None and e.step_site >= 0 for e in seen) or not _only_the_step(
        group, found
    ):
        return None
    here = _parted(group, found)
    if not here or not _equal_before(group, here, last):
        return None
    names = group.names("parameters")
    write = _write(group, [names[p] for p in here])
    confined = len(found.names) < len(names)
    only = f", in {some(found.names)} only" if confined else ""
    first = next(e for e in seen if e is not None)
    return Cause(
        OWN_STEP,
        text=f"step {last} of {first.kind}, an optimizer of the program's own, applies different "
        f"updates on the ranks{only}: parameters and gradients were equal before it, the "
        "parameters differ after it, and nothing else was seen to write to them",
        fix="make what `step` computes from this rank's own data the same on all ranks before it "
        "changes parameters: `dist.all_reduce(value, op=dist.ReduceOp.MAX)`, or SUM divided by the "
        "world size; if it draws random numbers, seed them alike on all ranks",
        label="writes different values on the ranks" if write else "applies different updates",
        location=write or group.any.rank.location(first.step_site),
        evidence={"gradients": f"equal before step {last}"},
    )


def _seen(member: Member) -> OptimizerSeen | None:
    every = member.rank.of(OptimizerSeen)
    return next((e for e in every if e.optimizer == member.optimizer), None)


def _only_the_step(group: Replicas, found: Divergence) -> bool:
    """Whether writes outside of the steps were watched for and none was seen, and the optimizer's
    options and state are the same on all ranks."""
    watched = {Watched.EDITS, Watched.LOADS, Watched.OPTIONS}
    for member in group.members.values():
        if any(t.watched in watched for t in member.rank.of(ProbeTrouble)):
            return False
        if any(e.changed and e.step <= found.first for e in member.of(Edited, kind="parameters")):
            return False
        if any(e.since < found.first for e in member.of(Rewritten)):
            return False
    states = (divergence(group, kind) for kind in kinds(group, "state:"))
    if any(state is not None and state.first <= found.first for state in states):
        return False
    before = differences_among([m.rank for m in group.members.values()], before=found.at)
    return not any(d.kind is Hyperparameters for d in before)


def _parted(group: Replicas, found: Divergence) -> list[int]:
    """Positions of the parameters that differ at the first step at which any do."""
    tables = [
        by_step(m, "parameters", found.total).get(found.first, ({}, 0))[0]
        for m in group.members.values()
    ]
    common = set.intersection(*(set(table) for table in tables))
    return sorted(p for p in common if len({table[p] for table in tables}) > 1)


def _equal_before(group: Replicas, positions: list[int], step: int) -> bool:
    """Whether parameters and gradients of these positions were compared before a step on every
    rank, and all that were compared were equal: a step may use the norm of all gradients."""
    total = len(group.names("parameters"))
    for kind in ("parameters", "gradients"):
        rows = [by_step(m, kind, total).get(step, ({}, 0))[0] for m in group.members.values()]
        common = set.intersection(*(set(row) for row in rows))
        # Zero: absent, or could not be read.
        if not all(p in common and rows[0][p] for p in positions):
            return False
        if any(len({row[p] for row in rows}) > 1 for p in common):
            return False
    return True


def _write(group: Replicas, names: list[str]) -> Location | None:
    """The only line that may have written to these parameters; or the first of those that name
    them, where they name no others and each is named."""
    rank, seen = group.any.rank, _seen(group.any)
    writes = seen.writes if seen is not None else ()
    named = [w for w in writes if any(_is_of(w.target, name) for name in names)]
    others = set(group.names("parameters")) - set(names)
    exact = named and not any(_is_of(w.target, name) for w in named for name in others)
    if exact and all(any(_is_of(w.target, name) for w in named) for name in names):
        return rank.location(named[0].site)
    return rank.location(writes[0].site) if len(writes) == 1 else None


def _is_of(target: str, name: str) -> bool:
    """Whether `attn.q_proj.weight` may be the parameter `blocks.0.attn.q_proj.weight`."""
    path = target.split(".")[1:]
    return bool(path) and name.split(".")[-len(path) :] == path
