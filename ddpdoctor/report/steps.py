"""How many steps a rank took, and those that a finding is about, of one optimizer or several."""

from __future__ import annotations

import math

import msgspec

from ..events import OptimizerSeen, StepDone
from ..run import Rank, Run
from .findings import Finding


def steps_in_turn(rank: Rank) -> int:
    """Optimizer steps, of the optimizer that took the most; where optimizers follow each other, of
    each of them. Those that step one after the other with nothing between step together."""
    spans: dict[int, list[float]] = {}
    together: set[int] = set()
    for event in rank.of(StepDone):
        if event.optimizer not in spans and not event.forward_s + event.backward_s:
            together.add(event.optimizer)
        spans.setdefault(event.optimizer, [event.at, event.at])[1] = event.at
    total, most, end = 0, 0, -math.inf
    for optimizer, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first > end and optimizer not in together:
            total, most = total + most, 0
        most, end = max(most, rank.steps_of(optimizer)), max(end, last)
    return total + most if spans else rank.steps


def among_all(run: Run, findings: list[Finding]) -> list[Finding]:
    """With all steps that the optimizers of each took, or all optimizers where it is not known
    whose it is; without, where one took more than another."""
    ranks = run.ranks.values()
    taken: dict[int, int] = {}
    for rank in ranks:
        seen = {e.optimizer for e in rank.of(OptimizerSeen)}
        for n in seen | {e.optimizer for e in rank.of(StepDone)}:
            taken[n] = max(taken.get(n, 0), rank.steps_of(n))
    in_turn = any(steps_in_turn(r) > r.steps for r in ranks)
    adjusted = []
    for finding in findings:
        totals = {taken.get(n, 0) for n in finding.optimizers or taken}
        mixed = len(totals) > 1 or (in_turn and not finding.optimizers)
        if finding.steps is not None:
            total = None if mixed else max(totals, default=0)
            steps = msgspec.structs.replace(finding.steps, total=total)
            finding = msgspec.structs.replace(finding, steps=steps)
        adjusted.append(finding)
    return adjusted
