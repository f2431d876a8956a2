"""Optimizer steps that some ranks leave out, as the averaging backwards tell that all make."""

from __future__ import annotations

from dataclasses import dataclass

from ._lacking import Lacking
from ._replicas import Replicas, by_rank, divergence


@dataclass(frozen=True)
class Skipped:
    """Steps that some ranks left out.

    Attributes:
        step: the first that not all ranks took after as many backwards.
        backwards: by rank, the averaging backwards before it; in the `end`, of the whole run.
        taken: by rank, the steps in the end; empty where the backwards before a step tell.
    """

    ranks: tuple[int, ...]
    step: int
    backwards: dict[int, int]
    taken: dict[int, int]


def before_a_step(group: Replicas) -> Skipped | None:
    """What was left out before a step that some ranks took after more averaging backwards than
    others. Backwards that others are known to lack do not count."""
    tables = by_rank(group, "parameters", "step")
    for key in sorted({k for table in tables.values() for k in table}):
        made = {n: table[key][2] for n, table in tables.items() if key in table}
        if (least := min(made.values())) < max(made.values()):
            return Skipped(tuple(n for n, m in made.items() if m > least), key, made, {})
    return None


def in_the_end(group: Replicas) -> Skipped | None:
    """What was left out after the last step that all ranks took: they have averaged equally often,
    and their parameters differ."""
    lacking = Lacking(group.members)
    taken = {n: m.last_step + 1 for n, m in group.members.items()}
    tables = by_rank(group, "parameters", "end")
    made = {
        n: row[2] + lacking.at(n, taken[n] - 1)
        for n, table in tables.items()
        for row in table.values()
    }
    most = max(taken.values())
    if min(taken.values()) == most or len(made) < len(taken) or len(set(made.values())) > 1:
        return None
    if most > max(made.values()) or divergence(group, "parameters", "end") is None:
        return None  # some apply gradients twice; or what was left out made no difference
    ranks = tuple(n for n, count in taken.items() if count < most)
    return Skipped(ranks, min(taken.values()), made, taken)
