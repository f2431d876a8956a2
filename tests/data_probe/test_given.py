"""What models without a wrapper are given, while somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.watchers.manual_sync import unwrapped_inputs
from ddpdoctor.probe.watchers.manual_sync.unwrapped_inputs import UnwrappedInputs
from ddpdoctor.storage.run_folder import EventWriter

torch = pytest.importorskip("torch")
hooks = torch.nn.modules.module


@pytest.fixture(autouse=True)
def watched(tmp_path: Path) -> Iterator[None]:
    ModuleOrigins.begin()
    UnwrappedInputs.begin()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    set_recorder(Recorder(writer, tmp_path, "rank-0", {}))
    yield
    set_recorder(None)
    patching.restore()
    writer.close()


def test_the_first_forward_with_gradients_is_looked_at() -> None:
    net, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    first, second = torch.ones(3, 4), torch.zeros(3, 4)

    def seen(*inputs: object) -> unwrapped_inputs.FirstInputs:
        UnwrappedInputs.current.watch(0, list(net.parameters()))
        other(second)
        with torch.no_grad():
            net(second)
        for x in inputs:
            net(x)
        return UnwrappedInputs.current.pop(0)

    mine = seen(first, second)
    assert mine.inputs and (mine.numbers, mine.drawn) == (12, 0)
    assert seen(first).inputs == mine.inputs != seen(second).inputs
    assert seen() == unwrapped_inputs.FirstInputs()


def test_nothing_is_left_when_nobody_asks() -> None:
    net = torch.nn.Linear(4, 2)
    before = len(hooks._global_forward_pre_hooks)
    UnwrappedInputs.current.watch(0, list(net.parameters()))
    assert len(hooks._global_forward_pre_hooks) == before + 1
    UnwrappedInputs.current.stop()
    assert len(hooks._global_forward_pre_hooks) == before
    net(torch.ones(3, 4))
    assert UnwrappedInputs.current.pop(0) == unwrapped_inputs.FirstInputs()
