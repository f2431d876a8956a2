"""Which clips are recorded as made while a GradScaler had the gradients multiplied."""

import pytest
import torch
from torch import nn

from ddpdoctor.events import ClippedScaled, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.watchers.gradients.scaled_clips import ScaledClips
from ddpdoctor.storage.run_folder import EventWriter


class Training:
    def __init__(self, scale=1024.0, enabled=True):
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)

    def backward(self):
        self.scaler.scale(self.model(torch.ones(3, 4)).sum()).backward()
        Backwards.current.count += 1

    def clip(self, limit=1.0):
        nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    monkeypatch.setattr(recorder.current, "recorder", Recorder(writer, tmp_path, "rank-0", {}))
    monkeypatch.setattr(Backwards.current, "count", 0)
    ScaledClips.begin()

    def events():
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [e for e in map(decode, lines) if isinstance(e, ClippedScaled)]

    yield events
    patching.restore()


def test_a_clip_before_the_gradients_are_unscaled(recorded):
    training = Training()
    for _ in range(2):
        training.backward()
        training.clip(0.5)
        training.step()
    first, _ = recorded()
    assert (first.function, first.limit, first.scale) == ("clip_grad_norm_", 0.5, 1024.0)


@pytest.mark.parametrize("case", ["unscaled", "limit", "disabled", "one", "next backward"])
def test_clips_of_what_is_not_scaled(recorded, case):
    training = Training(scale=1.0 if case == "one" else 1024.0, enabled=case != "disabled")
    training.backward()
    if case == "unscaled":
        training.scaler.unscale_(training.optimizer)
    training.clip(1024.0 if case == "limit" else 1.0)
    if case == "next backward":
        training.backward()
    training.step()
    assert not recorded()
