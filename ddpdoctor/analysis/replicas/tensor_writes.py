"""Writes to parameters outside the optimizer's steps, and the ranks that make them: known from
torch's write counters (`Tensor._version`), or after the last step from the values themselves."""

from __future__ import annotations

from ...events import Edited, Rewritten
from ...events.pack import unpack
from ...report.findings import Steps
from ...run import plural, ranks_do, ranks_text
from . import manual_edits
from .causes import SAME_EVERYWHERE, Cause
from .group_findings import MODIFIED_ON, WRITTEN_ON
from .replica import Member
from .replicas import Divergence, Replicas, by_step

WRITE_ON_SOME = "write-on-some-ranks"

RULES = {
    WRITE_ON_SOME: "some ranks write to parameters more often than others, at a line not known",
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
