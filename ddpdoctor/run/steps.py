"""How optimizer steps are counted. Every quantity has one name:

- *step*: `StepDone.step`, one `step()` of one optimizer, from 0; `Rank.steps_of` is their number.
- *busiest*: `Rank.steps`, the number of the optimizer that took the most.
- *total*: `total_steps`, the steps of all optimizers of a rank together; `Recorder.step` in the
  probe, `Ring.step`, `Call.step` and the events' fields called `total` are this count.
- *reported*: `reported_steps`, the number that tables show: of the busiest optimizer, and where
  optimizers follow each other, the sum over these turns. `reported_by_total` translates.

`Steps` of a finding are numbers of the optimizers that the finding is about.
"""

from __future__ import annotations

import math

from ..events import StepDone
from .rank import Rank


def total_steps(rank: Rank) -> int:
    """Steps of all optimizers of a rank together, also where events of some are lost."""
    return max(recorded_total(rank), rank.steps, rank.ring.step if rank.ring else 0)


def recorded_total(rank: Rank) -> int:
    """Steps of all optimizers of a rank together, as far as its events tell."""
    return sum(e.count for e in rank.of(StepDone))


def reported_steps(rank: Rank) -> int:
    """Steps of the optimizer that took the most; where optimizers follow each other, of each of
    them."""
    turns = _turns(rank)
    return sum(max(map(rank.steps_of, turn)) for turn in turns) if turns else rank.steps


def reported_by_total(rank: Rank) -> list[tuple[int, int]]:
    """Pairs of total and reported steps, after every step on record; empty for one optimizer."""
    turns = _turns(rank)
    turn_of = {optimizer: n for n, turn in enumerate(turns) for optimizer in turn}
    most = [0] * len(turns)
    found, total = [(0, 0)], 0
    for event in rank.of(StepDone):
        turn = turn_of[event.optimizer]
        most[turn] = max(most[turn], event.step + 1)
        total += event.count
        found.append((total, sum(most)))
    return found if len(turn_of) > 1 else []


def _turns(rank: Rank) -> list[list[int]]:
    """The optimizers in the order of their first steps, those together that step in one period.

    Optimizers that step one after the other with nothing between step together.
    """
    spans: dict[int, list[float]] = {}
    after_others: dict[int, int] = {}
    for event in rank.of(StepDone):
        alone = event.forward_s + event.backward_s > 0
        after_others[event.optimizer] = after_others.get(event.optimizer, 0) + (-1 if alone else 1)
        spans.setdefault(event.optimizer, [event.at, event.at])[1] = event.at
    # Not by the first step alone: some programs take one without a gradient, to have its state.
    together = {optimizer for optimizer, more in after_others.items() if more > 0}
    turns: list[list[int]] = []
    end = -math.inf
    for optimizer, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if not turns or (first > end and optimizer not in together):
            turns.append([])
        turns[-1].append(optimizer)
        end = max(end, last)
    return turns
