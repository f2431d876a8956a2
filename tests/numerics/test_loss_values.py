"""The loss is recorded in every step at first, then in fewer and fewer, and never waited for."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.events import LossValues
from ddpdoctor.probe.watchers.numerics.loss_values import EVERY_STEP, LossWatch


class Told:
    """A recorder of its own."""

    def __init__(self) -> None:
        self.step = 0
        self.values: dict[int, float] = {}

    def emit(self, event: LossValues) -> None:
        self.values.update(zip(event.steps, event.values, strict=True))


@pytest.fixture
def watch() -> LossWatch:
    made = LossWatch()
    made.install()
    return made


def seen(watch: LossWatch, losses: list[Any]) -> dict[int, float]:
    told: Any = Told()
    for told.step, loss in enumerate(losses):
        watch._backward_begins(told, SimpleNamespace(roots=[loss]))  # type: ignore[arg-type]
    watch._leaving(told, None)
    watch._leaving(told, None)
    values: dict[int, float] = told.values
    return values


def test_fewer_and_fewer(watch: LossWatch) -> None:
    found = seen(watch, [torch.tensor(float(n)) for n in range(8 * EVERY_STEP)])
    assert all(found[n] == n for n in found)
    assert [*found][:EVERY_STEP] == [*range(EVERY_STEP)]
    for doubled in (2, 4, 8):
        steps = [n for n in found if doubled * EVERY_STEP / 2 <= n < doubled * EVERY_STEP]
        assert len(steps) == EVERY_STEP / 2
        assert {b - a for a, b in pairwise(steps)} == {doubled}


def test_only_numbers_that_are_here(watch: LossWatch) -> None:
    losses = [
        torch.zeros(2),
        torch.empty((), device="meta"),
        torch.tensor(float("nan")),
        torch.tensor(3),
        torch.nn.Parameter(torch.ones(())),
        torch.tensor([0.12345678]),
    ]
    assert seen(watch, losses) == {5: 0.123457}


def test_once_a_step(watch: LossWatch) -> None:
    told: Any = Told()
    for value in (1.0, 2.0):
        watch._backward_begins(told, SimpleNamespace(roots=[torch.tensor(value)]))  # type: ignore[arg-type]
    watch._leaving(told, None)
    assert told.values == {0: 1.0}
