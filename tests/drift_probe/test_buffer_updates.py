"""DDP403: sketches of buffers just before a broadcast."""

from types import SimpleNamespace

import torch
from torch import nn

from ddpdoctor.probe.tensors.digests import Sketcher
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.graph.buffer_updates import BufferUpdateWatch


class Average(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.register_buffer("mean", torch.arange(float(size)))
        self.register_buffer("cache", torch.ones(size), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = x - self.mean
        self.mean.lerp_(x.mean(0), 0.1)
        return y


def told(net, forwards, syncs=True):
    events = []
    sites = SimpleNamespace(number=lambda code, line: line)
    recorder = SimpleNamespace(sites=sites, emit=events.append)
    model, watch = Model(0, net, [], []), BufferUpdateWatch()
    wrapper = SimpleNamespace(will_sync_module_buffers=lambda: syncs)
    for number in range(forwards):
        model.forwards = number + 1
        watch._forward_due(recorder, SimpleNamespace(model=model, wrapper=wrapper))
        net(torch.ones(4, 8))
    return events


def test_a_moving_average_that_is_used():
    events = told(nn.Sequential(Average(), nn.BatchNorm1d(8)), 12)
    assert [event.forward for event in events] == [2, 3, 4, 5, 6, 7, 8]
    assert {event.names for event in events} == {("0.mean",)}
    assert min(events[0].read_sites + events[0].write_sites) > 0
    assert len({event.sketches for event in events}) == 7


def test_what_is_not_broadcast_or_normalises():
    assert not told(Average(), 4, syncs=False)
    norm = Average()
    norm.register_buffer("running_var", torch.ones(8))
    assert not told(norm, 4)


def test_sketches_tell_how_far_apart_tensors_are():
    torch.manual_seed(0)
    sketcher = Sketcher()
    for size in (8, 1000, 200_000):
        one, other = torch.randn(size), torch.randn(size)
        told = (sketcher.bins(one) - sketcher.bins(other)).norm()
        assert 0.5 < told / (one - other).norm() < 1.7
