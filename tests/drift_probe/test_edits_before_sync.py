"""Gradients that are changed before they are averaged over the ranks."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.events import EditedBeforeSync, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.gradients import edits_before_sync
from ddpdoctor.probe.watchers.gradients.edits_before_sync import EditsBeforeSync
from ddpdoctor.probe.watchers.gradients.limits import EARLY_LOOKS
from ddpdoctor.storage.run_folder import EventWriter


class Model:
    """What the probe knows of a wrapped model, as far as the watcher asks for it."""

    def __init__(self, module):
        self.number = 0
        self.parameters = [weakref.ref(p) for p in module.parameters()]
        self.expected = list(range(len(self.parameters)))


class Training:
    """Trains one model; `exchanged`: the program has passed its gradients to collectives."""

    def __init__(self, tmp_path):
        self.module = nn.Linear(4, 2)
        self.model = Model(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.path = tmp_path / "rank-0.jsonl"
        self.recorder = recorder.Recorder(EventWriter(self.path), tmp_path, "rank-0", {})
        self.steps = 0
        self.exchanged = False

    def backward(self, synced=False):
        backward = SimpleNamespace(error=None, models=[self.model], synced=set(), site=7)
        if synced:
            backward.synced.add(0)
        EditsBeforeSync.current._backward_begins(self.recorder, backward)
        self.exchanged = False
        self.module(torch.ones(3, 4)).square().sum().backward()
        EditsBeforeSync.current._backward_ends(self.recorder, backward)

    def clip(self, norm=0.01):
        nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def step(self):
        step = SimpleNamespace(
            holdings=[SimpleNamespace(model=self.model)], number=self.steps, closure=False,
            known=SimpleNamespace(number=0, notes={}), optimizer=weakref.ref(self.optimizer),
        )  # fmt: skip
        EditsBeforeSync.current._step_begins(self.recorder, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def recorded(self):
        events = map(decode, self.path.read_bytes().splitlines())
        return [
            (e.step, e.function, e.times, e.by_hand)
            for e in events
            if isinstance(e, EditedBeforeSync)
        ]


@pytest.fixture
def training(tmp_path, monkeypatch):
    now = Training(tmp_path)
    monkeypatch.setattr(recorder.current, "recorder", now.recorder)
    monkeypatch.setattr(Optimizers.current, "known", list)
    exchanges = SimpleNamespace(gradients_exchanged=lambda parameters: now.exchanged)
    monkeypatch.setattr(edits_before_sync, "Exchanges", SimpleNamespace(current=exchanges))
    EditsBeforeSync.begin()
    yield now
    patching.restore()


def test_micro_batches_are_clipped(training):
    for _ in range(2):
        for last in (False, False, True):
            training.backward(last)
            training.clip()
        training.step()
    assert training.recorded() == [(n, "clip_grad_norm_", 2, False) for n in range(2)]


def test_a_factor_of_the_programs_own(training):
    training.backward()
    for parameter in training.module.parameters():
        parameter.grad *= 0.25
    training.backward(synced=True)
    training.step()
    assert training.recorded() == [(0, "", 1, False)]


def test_clipped_before_collectives_of_the_programs_own(training):
    training.backward()
    training.clip()
    training.exchanged = True
    training.step()
    training.backward()
    training.exchanged = True
    training.clip()
    training.step()
    assert training.recorded() == [(0, "clip_grad_norm_", 1, True)]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_afterwards(training, to_none):
    training.backward()
    training.clip()
    training.optimizer.zero_grad(set_to_none=to_none)
    training.backward(synced=True)
    training.step()
    assert training.recorded() == []


def test_a_limit_that_is_not_reached(training):
    for last in (False, True):
        training.backward(last)
        training.clip(float("inf"))
    training.step()
    assert training.recorded() == []


def test_clipped_after_the_averaged_backward(training):
    training.backward()
    training.backward(synced=True)
    training.clip()
    training.step()
    assert training.recorded() == []


def test_local_steps(training):
    for _ in range(3):
        training.backward()
        training.clip()
        training.step()
    training.backward(synced=True)
    training.step()
    assert training.recorded() == []


def test_steps_with_nothing_to_see_are_soon_left_alone(training):
    for _ in range(EARLY_LOOKS):
        training.backward(synced=True)
        training.step()
    assert not any(one.enabled for one in EditsBeforeSync.current._looking)
