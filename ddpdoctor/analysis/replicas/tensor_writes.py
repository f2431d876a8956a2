"""What was written to copies besides the optimizer's steps, and on which ranks: as torch's count of
writes tells, or the values themselves after the last step."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import Edited, Rewritten
from ...events.pack import unpack
from ...report.findings import Steps
from ...run import ranks_do, ranks_text
from . import manual_edits
from .causes import Cause
from .replicas import Divergence, Replicas, by_step

ALIKE = "do it on every rank with the same numbers, or not at all"


@dataclass(frozen=True)
class Written:
    """To some of the copies that differ, after step `since` had begun and before step `step` did,
    on these ranks more often than on the others.

    Attributes:
        trained: the steps that were taken on it, None for none.
        times: by how often more, on the first of the ranks.
        others: these write to them, too.
    """

    ranks: tuple[int, ...]
    since: int
    step: int
    times: int
    others: bool
    trained: Steps | None


def written(group: Replicas, found: Divergence) -> Written | None:
    """Whoever stands apart wrote to them since they were equal, or all others did."""
    if found.point not in ("step", "end"):
        return None
    before = found.before if found.point == "step" else _last_equal(group, found.names)
    until = found.first if found.point == "step" else group.any.last_step + 1
    events = {n: _to(group, n, found.names) for n in group.members}
    # Ranks do not look at the same steps: what was written before or after is not counted for the
    # one, and may be for the other.
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
    last, step = group.any.last_step, max(e.step for e in mine)
    trained = Steps(step, last, last - step + 1) if step <= last else None
    times = sum(e.times for e in surely[ranks[0]]) - least
    return Written(
        ranks, min(e.since for e in mine), step, times, any(maybe[n] for n in rest), trained
    )


def _last_equal(group: Replicas, names: list[str]) -> int:
    """The last step before which some of these parameters were compared, and were equal; -1 for
    none."""
    every = group.names("parameters")
    wanted = {every.index(name) for name in names}
    tables = [by_step(m, "parameters", len(every)) for m in group.members.values()]
    for key in sorted(set.intersection(*(set(t) for t in tables)), reverse=True):
        rows = [table[key][0] for table in tables]
        common = wanted.intersection(*rows)
        if common and all(len({row[p] for row in rows}) == 1 for p in common):
            return key
    return -1


def _to(group: Replicas, number: int, names: list[str]) -> list[Rewritten]:
    member = group.members[number]
    every = member.wrapped.parameters
    return [
        e
        for e in member.rank.of(Rewritten)
        if (e.model, e.optimizer) == (member.model, member.optimizer)
        and any(every[p].name in names for p in unpack(e.parameters) if p < len(every))
    ]


def cause(seen: Written) -> Cause:
    """The program wrote to them; the line is not known."""
    if seen.trained:
        when = f"between steps {seen.since} and {seen.step}"
    else:
        when = f"after step {seen.since} began, until the end"
    who = ranks_text(seen.ranks)
    more = "more often than the others do" if seen.others else "the others do not"
    return Cause(
        text=f"{ranks_do(seen.ranks, 'write')} to them {when}, outside of the optimizer, {more} "
        "(torch counts writes); by which line is not known",
        fix=f"{ALIKE}; look for what writes to a parameter (`add_`, `copy_`, `mul_`, ...) where "
        f"only {who} {'comes' if len(seen.ranks) == 1 else 'come'} by",
        label=f"besides this, {ranks_do(seen.ranks, 'write')} to them {when}",
        ranks=seen.ranks,
        evidence={
            "written_on": list(seen.ranks),
            "written_between_steps": f"{seen.since} and {seen.step}",
            "writes_more_than_on_the_others": seen.times,
        },
        trained=seen.trained,
    )


def after_the_last_step(group: Replicas) -> Cause | None:
    """The values are not what the last step left."""
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
    return Cause(
        text=f"{'every rank edits' if everybody else ranks_do(ranks, 'edit')} parameters by hand "
        f"after the last step, {'and not alike' if everybody else 'the others do not'}"
        + ("" if spot else "; by which line is not known"),
        fix=ALIKE,
        label=f"parameters of {ranks_text(ranks)} are not what the last step left",
        location=spot,
        ranks=ranks,
        evidence={"edited_by_hand_on": list(ranks)},
    )
