"""What is evaluated is put on record also where the device has not computed its digests yet."""

from types import SimpleNamespace

import pytest
import torch
from firing import alone

from ddpdoctor.events import Digests
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.tensors.pending_digests import Waiting
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.watchers.gradients import replica_digests
from ddpdoctor.probe.watchers.gradients.evaluation import Evaluation


class Busy(Waiting):
    """On a device that is done after some questions, or when it is waited for."""

    left = 2

    def ready(self, *, wait: bool = False) -> bool:
        self.left = 0 if wait else self.left - 1
        return self.left <= 0


@pytest.mark.parametrize("leaves", [False, True])
def test_digests_that_are_late_belong_to_the_evaluation(leaves, monkeypatch):
    told = []
    recorder = SimpleNamespace(emit=told.append, step=7, not_observed=lambda *_: None)
    parameter = torch.nn.Parameter(torch.ones(4))
    model = SimpleNamespace(
        number=0, forwards=8, synced_backwards=8, ignored=(), parameters=[lambda: parameter]
    )
    monkeypatch.setattr(replica_digests, "Waiting", Busy)
    monkeypatch.setattr(replica_digests, "buffers", lambda model: [])
    alone(monkeypatch, Evaluation)
    Evaluation.current._record_evaluation(recorder, model, site=3)
    assert not told, "nothing waits for the device"
    recorder.step = 9
    if leaves:
        hooks.leaving.fire(recorder, None)
    else:
        for _ in range(3):
            lifecycle.step_begins.fire(recorder, SimpleNamespace())
    assert [(e.kind, e.point, e.keys, e.step, e.site) for e in told] == [
        ("parameters", "eval", (8,), 7, 3),
        ("buffers", "eval", (8,), 7, 3),
    ]
    assert all(isinstance(e, Digests) for e in told)
    assert not Evaluation.current.pending
