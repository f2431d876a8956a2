"""Which calls of a part of a wrapped model are an evaluation of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import Digests
from ddpdoctor.events.drift import AGAIN
from ddpdoctor.events.pack import unpack
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.gradients import evaluation
from ddpdoctor.probe.watchers.gradients.evaluation import Evaluation

torch = pytest.importorskip("torch")
nn = torch.nn


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Digests]]:
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net = nn.Sequential(body, nn.BatchNorm1d(2))
    parameters = list(net.parameters())
    model = Model(0, net, parameters, list(range(len(parameters))))
    told: list[Digests] = []
    recorder = SimpleNamespace(
        emit=told.append, step=7, not_observed=lambda *_: None, site=lambda: 3
    )
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    monkeypatch.setattr(evaluation, "guarded", lambda name, act, lost: act(recorder))
    for known in (Evaluation.current.in_parts, Evaluation.current.parts):
        known.clear()
    return net, model, told


def look(net: Any, part: Any) -> None:
    """As in an evaluation: `eval()`, forwards without gradients, and the next one with."""
    (model,) = WrappedModels.current.live()
    Evaluation.current._eval_called(SimpleNamespace(), (part.eval(),), {})  # type: ignore[arg-type]
    Evaluation.current._remove()
    with torch.no_grad():
        for _ in range(2):
            Evaluation.current._called(part, ())
    Evaluation.current._stop_waiting_for(model)
    net.train()


def test_the_buffers_of_a_part_that_is_called_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    net, model, told = watched(monkeypatch)
    model.forwards = 8
    look(net, net[0])
    (event,) = told
    assert (event.kind, event.point, event.keys, event.site) == ("buffers", "part", (8 * AGAIN,), 3)
    assert [value != 0 for value in unpack(event.values)] == [True, True, True, False, False, False]
    look(net, net[0])
    assert told[1].keys == (8 * AGAIN + 1,)
    model.forwards = 16
    look(net, net[0])
    assert told[2].keys == (16 * AGAIN,)


def test_a_part_that_is_called_at_each_step_makes_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    net, model, told = watched(monkeypatch)
    for model.forwards in range(8):
        look(net, net[0])
    assert not told


def test_modules_that_are_frozen_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    net, model, told = watched(monkeypatch)
    model.forwards = 8
    for module in (net[1], nn.Sequential(nn.Linear(2, 2))):
        look(net, module)
    Evaluation.current._eval_called(SimpleNamespace(), (net[0].eval(),), {})  # type: ignore[arg-type]
    assert len(Evaluation.current.parts) == 1
    Evaluation.current._called(net[0], ())  # with gradients: it trains
    Evaluation.current._stop_waiting_for(model)
    assert not Evaluation.current.parts and not told
