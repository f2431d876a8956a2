"""The step that torch takes to make the state that it is about to load is none of the program."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ddpdoctor.events import StepDone, decode
from ddpdoctor.probe.recording import hooks, patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorded(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = made = Recorder(writer, tmp_path, "rank-0", {})
    Optimizers.begin()

    def steps():
        hooks.leaving.fire(made, None)
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return sum(e.count for e in map(decode, lines) if isinstance(e, StepDone))

    yield steps
    patching.restore()
    recorder.current.recorder = None
    hooks.forget()


def test_a_state_that_is_loaded_into_a_new_optimizer(recorded):
    model = nn.Linear(3, 2)

    def step(optimizer):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    old, new = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    step(old)
    set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, old))
    step(new)
    assert recorded() == 2
