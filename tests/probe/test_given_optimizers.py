"""Which optimizers a call was given that raised."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.process.given_optimizers import given_optimizers
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(Optimizers, "current", Optimizers())
    return Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})


def made(site: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    Optimizers.current.sites[optimizer] = site
    return optimizer


def test_those_that_the_call_of_the_users_line_has(recorder: Recorder) -> None:
    _other, optimizer = made(5), made(7)
    with pytest.raises(KeyError) as caught:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, last_epoch=3)
    assert given_optimizers(recorder, caught.value) == (7,)


def test_a_line_of_the_users_that_raises_itself(recorder: Recorder) -> None:
    optimizer = made(7)
    with pytest.raises(KeyError) as caught:
        optimizer.param_groups[0]["initial_lr"]
    assert given_optimizers(recorder, caught.value) == ()
