"""Losses and gradients on a device: whether they are finite is asked of it at the step, for all of
them at once, and read at a later one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ....events import NonFinite
from ...recording.devices import Flags, Work, hands_off, readable_later

MOST_EARLIER = 32
"""Numbers of backwards before the last one that are kept until the step."""

MOST_WAITING = 20
"""Steps whose numbers may be on their way to the host."""

Suspected = tuple[Any, NonFinite | None]
"""A number on a device, and what to record if it is not finite."""


class Asked(NamedTuple):
    """Numbers that a step applied."""

    flags: Flags
    numbers: list[Suspected]


class DeviceNumbers:
    """
    Attributes:
        last: of the last backward: its loss, the largest element of a gradient; `earlier` of the
            backwards before it since the last step, whose gradients may have been dropped.
        waiting: numbers that a step applied, on their way to the host.
    """

    def __init__(self) -> None:
        self.last: list[Suspected] = []
        self.earlier: list[Suspected] = []
        self.waiting: list[Asked] = []

    def backward_begins(self) -> None:
        self.earlier = (self.earlier + self.last)[-MOST_EARLIER:]
        self.last = []

    def add(self, value: Any, event: NonFinite) -> bool:
        """Note a loss or a gradient; False if it cannot be asked about."""
        import torch

        if hands_off() or not readable_later(value.device):
            return False
        number = value.detach()
        if number.numel() != 1:  # one kernel; NaN and infinity pass through
            number = torch.linalg.vector_norm(number, ord=math.inf)
            Work.add(1, value.nbytes)
        self.last.append((number.reshape(()), event))
        return True

    def step(self, optimizer: Any) -> None:
        """Ask about what a step applies; about nothing if `optimizer` is None."""
        last, earlier = self.last, self.earlier
        self.last, self.earlier = [], []
        if optimizer is not None:
            self._ask([*_accumulated(optimizer, earlier), *last])

    def end(self) -> None:
        """Ask about the last backward, which no step has applied yet: the program may end because
        of it."""
        unapplied = [(n, e and msgspec.structs.replace(e, applied=False)) for n, e in self.last]
        self._ask(unapplied)

    def _ask(self, numbers: list[Suspected]) -> None:
        if numbers and not hands_off():
            asked = Asked(Flags([number for number, _ in numbers]), numbers)
            self.waiting = [*self.waiting, asked][-MOST_WAITING:]

    def found(self, *, wait: bool = False) -> Iterator[NonFinite]:
        """What has turned out not to be finite, as far as devices have answered."""
        while self.waiting and (answers := self.waiting[0].flags.answers(wait=wait)) is not None:
            numbers = self.waiting.pop(0).numbers
            told = [(event, bad) for (_, event), bad in zip(numbers, answers, strict=True)]
            left = next((bad for event, bad in told if event is None), True)
            for event, bad in told:
                if event is None:  # what follows is of the last backward
                    left = True
                elif bad and left:
                    yield event


def _accumulated(optimizer: Any, earlier: list[Suspected]) -> list[Suspected]:
    """What is known of the backwards before the last one, and then, without an event, the largest
    gradient of the smallest parameter: if that is finite, the program has dropped theirs."""
    import torch

    held = (p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
    there = [g for g in held if not g.is_cpu and g.layout is torch.strided and g.numel()]
    if not earlier or not there or hands_off():
        return []
    smallest = min(there, key=lambda g: int(g.numel()))
    Work.add(1, smallest.nbytes)
    return [*earlier, (torch.linalg.vector_norm(smallest.detach(), ord=math.inf), None)]
