"""A loop trains where its batches are trained on, whatever else is done with them before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.watchers.data import loaders
from ddpdoctor.probe.watchers.data.iteration import Iteration, LoaderLine
from ddpdoctor.probe.watchers.data.loaders import Loaders


class Loop:
    """The moments of a loop over one loader, as the probe meets them."""

    recorder: Any = SimpleNamespace(moves=0)

    def __init__(self) -> None:
        self.reading = Iteration(0, 0, LoaderLine(), None)

    def batch(self) -> Loop:
        Loaders.current._count_trained(self.recorder)
        if Loaders.current.tried:
            Loaders.current._count_evaluated()
        Loaders.current.pending[self.reading] = None
        Loaders.current.moved = self.recorder.moves
        return self

    def forward(self, *, grad: bool, training: bool = True) -> Loop:
        if not (grad and training):
            Loaders.current._trial_begins(self.recorder, None)  # type: ignore[arg-type]
        return self

    def backward(self) -> Loop:
        self.recorder.moves += 1
        return self

    def over(self) -> tuple[int, int]:
        Loaders.current._count_trained(self.recorder)
        Loaders.current._count_evaluated()
        return self.reading.trained, self.reading.evaluated


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    Loaders.current.pending.clear()
    Loaders.current.tried.clear()
    yield
    Loaders.current.pending.clear()
    Loaders.current.tried.clear()


def test_plain_training_and_plain_evaluation() -> None:
    assert Loop().batch().forward(grad=True).backward().batch().backward().over() == (2, 0)
    shown = Loop().batch().forward(grad=False).batch().forward(grad=True, training=False)
    assert shown.over() == (0, 2)


def test_a_forward_without_gradients_before_the_one_that_trains() -> None:
    """The fakes of a GAN, examples that are mined, labels of a teacher."""
    loop = Loop()
    for _ in range(3):
        loop.batch().forward(grad=False).forward(grad=True).backward()
    assert loop.over() == (3, 0)


def test_evaluation_in_the_midst_of_training() -> None:
    training, evaluation = Loop(), Loop()
    training.batch().forward(grad=True).backward()
    evaluation.batch().forward(grad=False).batch().forward(grad=False)  # left with `break`
    training.batch().forward(grad=True).backward()
    assert evaluation.over() == (0, 2)
    assert training.over() == (2, 0)


def test_an_iteration_that_outlives_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was communicated meanwhile is still known when it ends."""
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setattr(Loaders.current, "sequence", -1)
    monkeypatch.setattr(loaders, "sequence_number", lambda group: 7)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    Loaders.current._destroying(Loop.recorder, (), {})
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert Loaders.current._sequence() == 7
