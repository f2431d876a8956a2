"""DDP804: what is recorded of loads by other names, and what is said of them."""

import pytest
import torch
from ddpdoctor.checks.numerics.state_not_loaded import StateNotLoaded
from recordings import make_run, site

from ddpdoctor.events import NamesMissed, Tensor, Wrapped, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.watchers.gradients.state_loading import MissedNames
from ddpdoctor.report.findings import Severity
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorded(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = Recorder(writer, tmp_path, "rank-0", {})
    MissedNames.begin()

    def events():
        patching.restore()
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [e for e in map(decode, lines) if isinstance(e, NamesMissed)]

    yield events
    patching.restore()
    recorder.current.recorder = None


def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def judged(events, *more):
    lines = [site(e.site, "train.py", 10 + n, "load") for n, e in enumerate(events)]
    return list(StateNotLoaded().examine(make_run({n: [*lines, *events, *more] for n in range(2)})))


def wrapped(parameters):
    named = tuple(Tensor(name=f"p{n}", shape=(2,), dtype="float32") for n in range(parameters))
    return Wrapped(
        at=0, model=0, wrapper="DistributedDataParallel", kind="Sequential", group=0, site=1,
        device="cpu", parameters=named,
    )  # fmt: skip


def test_the_state_of_a_wrapper(recorded):
    model().load_state_dict(Wrapper(model()).state_dict(), strict=False)
    (event,) = events = recorded()
    assert (event.missed, event.of, event.prefix, event.extra) == (4, 4, "module.", True)
    (finding,) = judged(events)
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (0, 1))
    assert "nothing was loaded" in finding.summary and "replace('module.', '')" in finding.fix


def test_a_wrapper_that_is_given_the_state_of_its_model(recorded):
    Wrapper(model()).load_state_dict(model().state_dict(), strict=False)
    (event,) = events = recorded()
    assert (event.missed, event.extra) == (4, False)
    assert "'module.' + n" in judged(events)[0].fix


def test_names_that_differ_for_another_reason(recorded):
    state = model().state_dict()
    model().load_state_dict({n: v for n, v in state.items() if n.startswith("0.")}, strict=False)
    model().load_state_dict(state)
    with pytest.raises(RuntimeError):
        model().load_state_dict(Wrapper(model()).state_dict())
    assert recorded() == []


def test_a_model_into_which_nothing_is_loaded(recorded):
    model().load_state_dict({f"backbone.{n}": v for n, v in model().state_dict().items()}, False)
    events = recorded()
    assert [(e.missed, e.prefix, e.given) for e in events] == [(4, "", 4)]
    assert judged(events) == judged(events, wrapped(6)) == [], "a part of a model"
    (finding,) = judged(events, wrapped(4))
    assert finding.severity is Severity.WARNING
    assert "none of the 4 names" in finding.summary


def test_a_second_load_with_the_right_names(recorded):
    here, state = model(), Wrapper(model()).state_dict()
    if here.load_state_dict(state, strict=False).missing_keys:
        here.load_state_dict({n.removeprefix("module."): v for n, v in state.items()})
    events = recorded()
    assert [e.missed for e in events] == [4, 0]
    assert judged(events) == []


def test_a_part_of_the_names(recorded):
    state = model().state_dict()
    mixed = {n if n.startswith("0.") else f"module.{n}": v for n, v in state.items()}
    model().load_state_dict(mixed, strict=False)
    (finding,) = judged(recorded())
    assert finding.severity is Severity.WARNING
