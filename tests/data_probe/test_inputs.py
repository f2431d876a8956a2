"""What the forwards of wrapped models are given, as it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.analysis.data.thresholds import LATER
from ddpdoctor.events import ForwardInput
from ddpdoctor.probe.recording import hooks, patching
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.probe.tensors import sample_digests
from ddpdoctor.probe.tensors.sample_digests import memories
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.training.records import Forward
from ddpdoctor.probe.watchers.data import forward_inputs
from ddpdoctor.probe.watchers.data.forward_inputs import ForwardInputs
from ddpdoctor.probe.watchers.data.loaders import Loaders
from ddpdoctor.storage.run_folder import EventWriter

torch = pytest.importorskip("torch")

Fed = Callable[..., ForwardInput]


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fed]:
    """Feeds a model once, and says what was recorded."""
    hooks.forget()
    ModuleOrigins.begin()
    ForwardInputs.begin()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    set_recorder(recorder)
    told: list[Any] = []
    monkeypatch.setattr(recorder, "emit", told.append)

    class Model(SimpleNamespace):
        __hash__ = object.__hash__

    model = Model(number=0, forwards=0)

    def feed(*args: Any, output: Any = None) -> ForwardInput:
        model.forwards += 1
        forward = Forward(model, None, -1, True, True, args, {})  # type: ignore[arg-type]
        lifecycle.forward_due.fire(recorder, forward)
        forward.output = output
        lifecycle.forward_ends.fire(recorder, forward)
        assert not recorder.off
        return told[-1]  # type: ignore[no-any-return]

    yield feed
    set_recorder(None)
    hooks.forget()
    patching.restore()
    writer.close()


def test_slices_of_columns_and_transposed_tensors_are_read() -> None:
    text = torch.arange(800.0).view(8, 100)
    for view in (text[:, 10:20], text.t(), text[:, 10], text[None, :, ::2]):
        seen, *_ = sample_digests.content((view,))
        other = text.clone().as_strided(view.shape, view.stride(), view.storage_offset())
        assert seen and sample_digests.content((other,))[0] == seen
        other[..., -1] += 1
        assert sample_digests.content((other,))[0] != seen


def test_a_recurrent_state_of_the_model_itself_is_not_counted(fed: Fed) -> None:
    """It differs where the ranks draw their dropout for themselves."""
    x, start = torch.arange(12.0).view(3, 4), (torch.zeros(1, 3), torch.zeros(1, 3))
    first = fed(x, start, output=(x.sum(), state := (torch.rand(1, 3), torch.rand(1, 3))))
    assert (first.numbers, first.carried) == (18, False)
    second = fed(x, tuple(v.detach() for v in state), output=(x.sum(), state := torch.rand(1, 3)))
    assert (second.numbers, second.carried) == (12, True)
    assert fed(x).digest == second.digest != fed(x, state).digest


def test_a_batch_that_is_given_twice_comes_from_its_loader_both_times(
    fed: Fed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may have two forwards over one batch: the second one is not input made by hand."""
    batch = torch.arange(12.0).view(3, 4)
    monkeypatch.setattr(forward_inputs, "delivered_by", lambda memory: (5,) if memory & own else ())
    own = memories(batch)
    monkeypatch.setattr(Loaders.current, "delivered", 1)
    assert [(e.fed, e.loaders) for e in (fed(batch), fed(batch))] == [(True, (5,))] * 2
    made = fed(batch + 1)
    assert (made.fed, made.loaders) == (False, ())


def test_what_a_model_hands_back_of_its_input_is_no_state(fed: Fed) -> None:
    data = torch.arange(12.0).view(3, 4)
    fed(data[0], output={"x": data[0], "y": torch.zeros(2)})
    second = fed(data[1])
    assert second.digest and not second.carried


@pytest.mark.parametrize("forwards", [64, 96, 150, 250, 1000, 6000])
def test_enough_forwards_of_the_second_half_are_looked_at(forwards: int) -> None:
    looked = [n for n in range(forwards) if forward_inputs.sampled(n)]
    assert sum(2 * n >= forwards for n in looked) >= LATER
    assert len(looked) <= 30 + 8 * max(0, forwards.bit_length() - 7)
