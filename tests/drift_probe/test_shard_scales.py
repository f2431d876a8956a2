"""Factors by which a rank multiplies its shards of gradients."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.events import ShardScales, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.gradients import shard_scales
from ddpdoctor.probe.watchers.gradients.shard_scales import ShardScaling
from ddpdoctor.storage.run_folder import EventWriter

MESH = SimpleNamespace(mesh=torch.arange(2))
SHARDED = SimpleNamespace(is_shard=lambda: True)


class Training:
    """Trains one model, whose parameters are taken for shards."""

    def __init__(self, tmp_path):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.path = tmp_path / "rank-0.jsonl"
        self.recorder = recorder.Recorder(EventWriter(self.path), tmp_path, "rank-0", {})
        self.known = SimpleNamespace(number=0, steps=0)

    def backward(self):
        watcher, backward = ShardScaling.current, SimpleNamespace(error=None, site=7)
        watcher._backward_begins(self.recorder, backward)
        self.module(torch.rand(4, 8) + 1).square().sum().backward()
        watcher._backward_ends(self.recorder, backward)

    def scale(self, factor):
        for parameter in self.module.parameters():
            parameter.grad *= factor

    def step(self, clear=True):
        ShardScaling.current._step_begins(
            self.recorder,
            SimpleNamespace(
                known=self.known, optimizer=weakref.ref(self.optimizer), closure=False,
                number=self.known.steps, site=9,
            ),
        )  # fmt: skip
        self.optimizer.step()
        if clear:
            self.optimizer.zero_grad()
        self.known.steps += 1

    def recorded(self):
        events = map(decode, self.path.read_bytes().splitlines())
        return [(e.step, e.factors) for e in events if isinstance(e, ShardScales)]


@pytest.fixture
def training(tmp_path, monkeypatch):
    now = Training(tmp_path)
    monkeypatch.setattr(recorder.current, "recorder", now.recorder)
    monkeypatch.setattr(Optimizers.current, "known", lambda: [now.known])
    monkeypatch.setattr(shard_scales, "placements", lambda parameter: (MESH, (SHARDED,)))
    ShardScaling.begin()
    now.backward()
    now.step()  # in which the optimizer becomes known
    yield now
    patching.restore()


def test_scaled_before_the_step(training):
    for factor in (0.25, 1.0, 1.0, 0.5):
        training.backward()
        training.scale(factor)
        training.step()
    assert training.recorded() == [(1, (0.25,) * 4), (2, (1.0,) * 4), (4, (0.5,) * 4)]


def test_scaled_between_micro_batches(training):
    training.backward()
    training.scale(0.5)
    training.backward()
    training.scale(0.5)
    training.step()
    assert training.recorded() == [(1, (0.25,) * 4)]


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_between_backwards(training, to_none):
    training.backward()
    training.scale(0.5)
    training.optimizer.zero_grad(set_to_none=to_none)
    training.backward()
    training.step()
    assert training.recorded() == [(1, (1.0,) * 4)]


def test_what_a_step_leaves_is_not_compared(training):
    training.backward()
    training.step(clear=False)
    training.scale(0.5)
    training.backward()
    training.step()
    assert training.recorded() == [(1, (1.0,) * 4)]


def test_changes_that_are_no_factor(training):
    training.backward()
    for parameter in training.module.parameters():
        parameter.grad += torch.rand_like(parameter.grad)
    training.step()
    training.backward()
    training.module[0].weight.grad[:8] *= 0.5
    training.module[0].bias.grad = None
    training.step()
    assert training.recorded() == [(1, (0.0,) * 4), (2, (0.0, 0.0, 1.0, 1.0))]


def test_the_line_is_found(training):
    for _ in range(3):
        training.backward()
        training.scale(0.5)
        training.step()
    events = map(decode, training.path.read_bytes().splitlines())
    first, second = (e for e in events if isinstance(e, ShardScales))
    assert (first.site, second.step) == (-1, 2)
    assert second.site >= 0
