"""What gradients were before torch clipped them, after the program has exchanged them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.recording.weak_references import WeakIdentityMap
from ddpdoctor.probe.tensors.digests import digests
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.manual_sync.clipped_gradients import NOT_CLIPPED, ClippedGradients
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchange, Exchanges
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def training(tmp_path, monkeypatch):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    monkeypatch.setattr(recorder.current, "recorder", Recorder(writer, tmp_path, "rank-0", {}))
    monkeypatch.setattr(Exchanges, "current", Exchanges())
    optimizers = Optimizers()
    optimizers.sites = WeakIdentityMap()
    monkeypatch.setattr(Optimizers, "current", optimizers)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers.sites[optimizer] = 1
    ClippedGradients.begin()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    yield SimpleNamespace(optimizer=optimizer, parameters=list(model.parameters()))
    patching.restore()


def exchange(elements=10):
    Exchanges.current.recent.append(Exchange(0, elements, 1))


def clip(training):
    nn.utils.clip_grad_norm_(training.parameters, 0.01)


def taken(training, step=0):
    return ClippedGradients.current.take(training.optimizer, step, training.parameters)


def test_the_gradients_after_the_exchange_and_before_the_first_clip(training):
    exchange()
    before = digests([p.grad for p in training.parameters])
    clip(training)
    clip(training)
    kept = taken(training)
    assert kept.digests.ready()
    assert kept.digests.values == before != digests([p.grad for p in training.parameters])
    assert taken(training) is NOT_CLIPPED, "once a step"


def test_a_clip_before_the_exchange_tells_nothing(training):
    clip(training)
    assert taken(training) is NOT_CLIPPED
    exchange()
    clip(training)
    exchange()
    now = digests([p.grad for p in training.parameters])
    clip(training)
    kept = taken(training)
    assert kept.digests.ready()
    assert kept.digests.values == now, "what was clipped after the last exchange"
    clip(training)
    exchange(1)
    assert taken(training) is not NOT_CLIPPED, "a norm for a log"
    clip(training)
    exchange()
    assert taken(training) is NOT_CLIPPED, "clipped before they were exchanged"


def test_a_clip_for_another_step_or_of_other_parameters(training):
    exchange()
    clip(training)
    assert taken(training, step=1) is NOT_CLIPPED
    clip(training)
    del training.parameters[0]
    assert taken(training) is NOT_CLIPPED
