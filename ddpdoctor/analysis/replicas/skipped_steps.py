"""Optimizer steps that some ranks skip, and backwards that some ranks do not synchronise: known
from the synchronised backwards, which all ranks run together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...events import StepDone
from ...report.findings import Steps
from .evaluations import Row
from .missed_backwards import MissedBackwards
from .replica import Member
from .replicas import Replicas, by_rank, divergence

SKIPPED = "skipped-step"
FEWER = "fewer-steps"
MISSED = "missed-backward"

RULES = {
    MISSED: "some ranks take a step after a backward that reaches no parameter of the model",
    SKIPPED: "some ranks take a step after more synchronised backwards than others",
    FEWER: "some ranks take fewer steps in all, for equally many synchronised backwards",
}


@dataclass(frozen=True)
class Skipped:
    """Steps that some ranks skipped.

    Attributes:
        rule: of which of `RULES`; of `MISSED` the ranks skipped no step, but a backward before it.
        step: the first that not all ranks took after equally many synchronised backwards.
        backwards: by rank, the synchronised backwards before it; of the whole run where `taken`
            is known.
        taken: by rank, the steps in the end; empty where the backwards before a step tell.
        steps: at which the copies differ since.
        together: the step before which they are equal again, and stay so; -1 for none.
        fewer: by rank, how many steps are skipped until the end, where that is known.
    """

    rule: str
    ranks: tuple[int, ...]
    step: int
    backwards: dict[int, int]
    taken: dict[int, int]
    steps: Steps
    together: int
    fewer: dict[int, int]


def before_a_step(group: Replicas) -> Skipped | None:
    """Steps skipped before a step that some ranks took after more synchronised backwards than
    others, or backwards that these others missed. Those that they are known to have missed by an
    unsynchronised step do not count."""
    tables = by_rank(group, "parameters", "step")
    equal = -1
    for key in sorted({k for table in tables.values() for k in table}):
        made = {n: table[key][2] for n, table in tables.items() if key in table}
        if (least := min(made.values())) < max(made.values()):
            behind = tuple(n for n, m in made.items() if m == least)
            if all(_reached_nothing(group.members[n], equal, key) for n in behind):
                return _skipped(MISSED, group, behind, key, made)
            ranks = tuple(n for n, m in made.items() if m > least)
            together = _together(group, tables, least)
            return _skipped(SKIPPED, group, ranks, key, made, together=together)
        equal = key
    return None


def _reached_nothing(member: Member, after: int, step: int) -> bool:
    """Whether a backward between two steps of a rank did not communicate, although all backwards
    before did."""
    done = [e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer]
    before = [e for e in done if e.step <= after]
    since = [e for e in done if after < e.step and e.step - e.count < step]
    usual = all(e.synced == e.backwards for e in before)
    return bool(before) and usual and any(e.synced < e.backwards for e in since)


def in_the_end(group: Replicas) -> Skipped | None:
    """Steps skipped after the last one that all ranks took: the ranks have run equally many
    synchronised backwards, and their parameters differ."""
    taken = _taken(group)
    made = {n: row[2] for n, row in _ends(group).items()}
    most = max(taken.values())
    if min(taken.values()) == most or len(made) < len(taken) or len(set(made.values())) > 1:
        return None
    if most > max(made.values()) or divergence(group, "parameters", "end") is None:
        return None  # some apply gradients twice, or the skipped steps made no difference
    ranks = tuple(n for n, count in taken.items() if count < most)
    return _skipped(FEWER, group, ranks, min(taken.values()), made, taken)


def _skipped(
    rule: str,
    group: Replicas,
    ranks: tuple[int, ...],
    step: int,
    made: dict[int, int],
    taken: Mapping[int, int] | None = None,
    together: int = -1,
) -> Skipped:
    steps = _taken(group)
    most = max(steps.values())
    last = max(step, (most if together < 0 else together) - 1)
    ends = _ends(group)
    whole = len(ends) == len(steps) and len({row[2] for row in ends.values()}) == 1
    fewer = {n: most - steps[n] for n in ranks} if whole and rule != MISSED else {}
    return Skipped(
        rule,
        ranks,
        step,
        made,
        dict(taken or {}),
        steps=Steps(step, last, last - step + 1),
        together=together,
        fewer=fewer if all(fewer.values()) else {},
    )


def _taken(group: Replicas) -> dict[int, int]:
    return {n: m.last_step + 1 for n, m in group.members.items()}


def _ends(group: Replicas) -> dict[int, Row]:
    """By rank, the row of the end, including the backwards that the rank is known to have
    missed."""
    lacking, taken = MissedBackwards(group.members), _taken(group)
    return {
        n: (stride, values, made + lacking.at(n, taken[n] - 1))
        for n, table in by_rank(group, "parameters", "end").items()
        for stride, values, made in table.values()
    }


def _together(group: Replicas, tables: Mapping[int, Mapping[int, Row]], after: int) -> int:
    """The step before which the copies are equal again and stay so, as the rank that is ahead
    counts; -1 for none.

    The ranks' step numbers no longer match, their synchronised backwards do: compared are the
    moments after which all ranks looked at all parameters.
    """
    ends, taken = _ends(group), _taken(group)
    looks: list[dict[int, tuple[tuple[int, ...], int]]] = []
    for number, table in tables.items():
        rows = [*table.items()]
        if number in ends:
            rows.append((taken[number], ends[number]))
        looks.append(
            {m: (values, key) for key, (stride, values, m) in rows if stride == 1 and m > after}
        )
    together = -1
    for moment in sorted(set.intersection(*(set(look) for look in looks)), reverse=True):
        if len({look[moment][0] for look in looks}) > 1:
            break
        together = max(look[moment][1] for look in looks)
    return together
