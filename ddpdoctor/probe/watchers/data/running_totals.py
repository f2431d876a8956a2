"""Does the program sum over the ranks what it has summed already?

A total that goes on from its sum over the ranks is passed to the next call with what a round has
added: each call gets at least what the one before gave. The numbers tell, whether the program
reduces one tensor in place or makes a new one of a number each time. Or two lines reduce one tensor
that nobody changes in between.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any, NamedTuple

from ....events import TotalReducedAgain
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...tensors.digests import readable

CALLS_AT_MOST = 1000
"""Calls whose numbers are read, but for the first one of each step."""

NUMBERS_AT_MOST = 64
"""Numbers that a program reduces together as its totals."""

APART = 16
"""A loop reduces at most so many totals in each round."""

TIMES = 4
"""Calls in a row that each get at least the sum before."""

GROWS = 1.2
"""A sum over several ranks is so many times what one of them passes, at least."""


class _Sum(NamedTuple):
    """A call that has returned.

    Attributes:
        of: the tensor; group: of ranks; step: optimizer steps before it.
        before, after: the numbers passed, and the sums.
        chains: by the calls between them, the calls that each go on from the one before, up to this
            one: what was passed, and the sum, of each.
        site: the line.
    """

    of: weakref.ref[Any]
    group: int
    step: int
    before: list[float]
    after: list[float]
    chains: dict[int, tuple[tuple[float, float], ...]]
    site: int

    @property
    def totals(self) -> tuple[float, float]:
        return sum(self.before), sum(self.after)

    @property
    def grows(self) -> bool:
        """Whether it made more of positive numbers, as a sum over several ranks does."""
        positive = all(number >= 0 for number in self.before)
        return positive and sum(self.after) > GROWS * sum(self.before)


class RunningTotals(Watcher):
    """
    Attributes:
        sums: the last calls.
        calls: looked at so far.
        waiting: the tensor of a call that has not returned, its group, and its numbers before.
        told: the lines on record.
    """

    lost = "totals that are summed over the ranks again"

    def __init__(self) -> None:
        self.sums: deque[_Sum] = deque(maxlen=APART)
        self.calls = 0
        self.waiting: tuple[weakref.ref[Any], int, list[float]] | None = None
        self.told: set[int] = set()

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        self.waiting = None
        # Before training begins it may be a trial of the connection.
        if call.op != "all_reduce" or not recorder.step or self.calls >= CALLS_AT_MOST:
            return
        if len(call.tensors) != 1:
            return
        tensor = call.tensors[0]
        if not readable(tensor) or not 0 < tensor.numel() <= NUMBERS_AT_MOST:
            return
        if call.reduces_by != "SUM" or tensor.is_complex() or tensor.requires_grad:
            return
        # One call in each step is no loop: it does not use up what later evaluations need.
        self.calls += bool(self.sums) and self.sums[-1].step == recorder.step
        self.waiting = weakref.ref(tensor), call.group, _numbers(tensor)

    @on(call_hooks.waited)
    def _waited(self, recorder: Recorder, _: float) -> None:
        if self.waiting is None:
            return
        (reference, group, before), self.waiting = self.waiting, None
        if (tensor := reference()) is None:
            return
        made = _Sum(reference, group, recorder.step, before, _numbers(tensor), {}, recorder.site())
        # Sums within nodes, and then of all nodes, are of several groups.
        earlier_sums = [last for last in self.sums if last.group == group]
        same = next((last for last in earlier_sums if last.after == before), None)
        for apart, last in enumerate(reversed([] if same else earlier_sums), 1):
            if last.step == made.step and last.site == made.site and _goes_on(last, made):
                earlier = last.chains.get(apart, (last.totals,))
                made.chains[apart] = (*earlier, made.totals)[-TIMES:]
        self.sums.append(made)
        for chain in made.chains.values():
            if len(chain) == TIMES:
                self._emit(recorder, made, chain)
        # One line may do so in a loop, as a benchmark does.
        twice = same is not None and same.of() is tensor and same.site != made.site
        if twice and same is not None and same.step == made.step and made.grows:
            self._emit(recorder, made, (same.totals, made.totals), same.site)

    def _emit(
        self,
        recorder: Recorder,
        made: _Sum,
        chain: tuple[tuple[float, float], ...],
        first_site: int = -1,
    ) -> None:
        if made.site in self.told:
            return
        self.told.add(made.site)
        recorder.emit(
            TotalReducedAgain(
                at=time.monotonic(),
                site=made.site,
                passed=tuple(passed for passed, _ in chain),
                summed=tuple(summed for _, summed in chain),
                step=made.step,
                first_site=first_site,
            )
        )


def _goes_on(last: _Sum, made: _Sum) -> bool:
    """Whether a call got the sums of an earlier one with something added, and made more of it."""
    return (
        len(last.after) == len(made.before)
        and all(b >= a for a, b in zip(last.after, made.before, strict=True))
        and sum(made.before) > sum(last.after) > 0
        and made.grows
    )


def _numbers(tensor: Any) -> list[float]:
    return [float(x) for x in tensor.detach().reshape(-1).tolist()]
