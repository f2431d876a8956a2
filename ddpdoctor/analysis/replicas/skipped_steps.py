"""Optimizer steps that some ranks skip: known from the synchronised backwards, which all ranks run
together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...report.findings import Steps
from .evaluations import Row
from .missed_backwards import MissedBackwards
from .replicas import Replicas, by_rank, divergence

SKIPPED = "skipped-step"
FEWER = "fewer-steps"

RULES = {
    SKIPPED: "some ranks take a step after more synchronised backwards than others",
    FEWER: "some ranks take fewer steps in all, for equally many synchronised backwards",
}


@dataclass(frozen=True)
class Skipped:
    """Steps that some ranks skipped.

    Attributes:
        step: the first that not all ranks took after equally many synchronised backwards.
        backwards: by rank, the synchronised backwards before it; of the whole run where `taken`
            is known.
        taken: by rank, the steps in the end; empty where the backwards before a step tell.
        steps: at which the copies differ since.
        together: the step before which they are equal again, and stay so; -1 for none.
        fewer: by rank, how many steps are skipped until the end, where that is known.
    """

    ranks: tuple[int, ...]
    step: int
    backwards: dict[int, int]
    taken: dict[int, int]
    steps: Steps
    together: int
    fewer: dict[int, int]


def before_a_step(group: Replicas) -> Skipped | None:
    """Steps skipped before a step that some ranks took after more synchronised backwards than
    others. Backwards that others are known to have missed do not count."""
    tables = by_rank(group, "parameters", "step")
    for key in sorted({k for table in tables.values() for k in table}):
        made = {n: table[key][2] for n, table in tables.items() if key in table}
        if (least := min(made.values())) < max(made.values()):
            ranks = tuple(n for n, m in made.items() if m > least)
            return _skipped(group, ranks, key, made, together=_together(group, tables, least))
    return None


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
    return _skipped(group, ranks, min(taken.values()), made, taken)


def _skipped(
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
    fewer = {n: most - steps[n] for n in ranks} if whole else {}
    return Skipped(
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
