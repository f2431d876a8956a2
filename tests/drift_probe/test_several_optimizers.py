"""A backward whose gradients several optimizers apply, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.watchers.gradients import gradient_sync
from ddpdoctor.probe.watchers.gradients.gradient_sync import GradientSync

ANY: Any = SimpleNamespace(began=0.0, site=0, untouched={}, flag=None)


class Model(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def model() -> Iterator[Any]:
    GradientSync.current.syncs.clear()
    yield Model(number=0, running=0, ddp=lambda: None)
    GradientSync.current.syncs.clear()


def backward(model: Any, synced: bool = True) -> None:
    known = GradientSync.current.syncs[model]
    GradientSync.current._add_contribution(
        known, ANY, gradient_sync.Contribution(0, synced, frozenset((0,))), own_forward=True
    )


def step(model: Any, optimizer: int) -> None:
    held: Any = SimpleNamespace(model=model, optimizer=optimizer)
    GradientSync.current._step_ends(ANY, SimpleNamespace(holdings=[held]))  # type: ignore[arg-type]


def test_what_was_averaged_is_so_for_all_that_apply_it(model: Any) -> None:
    backward(model)
    assert GradientSync.current.averaged(model, 0) and GradientSync.current.averaged(model, 1)
    step(model, 0)
    assert GradientSync.current.averaged(model, 1)
    assert GradientSync.current.averaged(model, 0) is None, "nothing new since its own step"
    assert GradientSync.current.averaged(model) is None
    step(model, 1)
    assert GradientSync.current.averaged(model, 1) is None
    backward(model)
    assert GradientSync.current.averaged(model, 0)


def test_what_was_not_averaged_is_not(model: Any) -> None:
    GradientSync.current.syncs[model].flag = False
    backward(model)
    backward(model, synced=False)
    step(model, 0)
    assert GradientSync.current.averaged(model, 1) is False
