"""An optimizer loaded before the wrap: DDP evens out the weights there, never the optimizer."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.probe.recording import patching  # noqa: E402
from ddpdoctor.probe.training.wrapped_models import WrappedModels  # noqa: E402
from ddpdoctor.probe.watchers.gradients import state_loading  # noqa: E402
from ddpdoctor.probe.watchers.gradients.replica_digests import ReplicaDigests  # noqa: E402
from ddpdoctor.probe.watchers.gradients.state_loading import StateLoading  # noqa: E402
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchanges  # noqa: E402


class Active:
    def __init__(self):
        self.step = 0
        self.sites = SimpleNamespace(user_lines=lambda frame, most: [])
        self.emitted = []

    def site(self):
        return 7

    def emit(self, event):
        self.emitted.append(event)


def loaded(monkeypatch, held, wrapped):
    monkeypatch.setattr(StateLoading.current, "early", [])
    monkeypatch.setattr(StateLoading.current, "depth", 0)
    monkeypatch.setattr(WrappedModels.current, "count", lambda: 0)
    recorder, optimizer = Active(), torch.optim.SGD([held], lr=0.1)
    token = StateLoading.current._load_optimizer(recorder, (optimizer, {}), {})
    StateLoading.current._load_ends(recorder, token, None, None)
    StateLoading.current._wrapped(recorder, SimpleNamespace(number=3, parameters=[lambda: wrapped]))
    return recorder.emitted


def test_it_is_told_once_its_model_is_wrapped(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    (event,) = loaded(monkeypatch, weight, weight)
    assert (event.what, event.model, event.site) == ("optimizer", 3, 7)


def test_the_optimizer_of_another_model(monkeypatch):
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    assert loaded(monkeypatch, one, other) == []


@pytest.mark.parametrize("sent", [False, True])
def test_loads_into_a_model_that_no_wrapper_trains(monkeypatch, sent):
    monkeypatch.setattr(StateLoading.current, "early", [])
    monkeypatch.setattr(StateLoading.current, "depth", 0)
    monkeypatch.setattr(WrappedModels.current, "count", lambda: 0)
    monkeypatch.setattr(Exchanges.current, "all_carried_since", lambda mark, parameters: sent)
    recorder, model = Active(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.nn.Linear(2, 1)
    for begin, into in (
        (StateLoading.current._load_module, model),
        (StateLoading.current._load_module, other),
        (StateLoading.current._load_optimizer, optimizer),
    ):
        StateLoading.current._load_ends(recorder, begin(recorder, (into, {}), {}), None, None)
    assert recorder.emitted == []
    StateLoading.current._unwrapped(recorder, (4, list(model.parameters())))
    assert [(e.what, e.model, e.optimizer) for e in recorder.emitted] == [
        *([] if sent else [("weights", -1, 4)]),
        ("optimizer", -1, 4),
    ]


def test_a_scheduler_is_loaded_into_the_model_of_its_optimizer(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    model = SimpleNamespace(number=3, parameters=[lambda: weight])
    monkeypatch.setattr(StateLoading.current, "depth", 0)
    monkeypatch.setattr(WrappedModels.current, "count", lambda: 1)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    monkeypatch.setattr(ReplicaDigests.current, "look_whole", lambda model: None)
    recorder, optimizer = Active(), torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    outer = StateLoading.current._load_scheduler(recorder, (scheduler, {}), {})
    inner = StateLoading.current._load_scheduler(recorder, (scheduler, {}), {})
    StateLoading.current._load_ends(recorder, inner, None, None)
    StateLoading.current._load_ends(recorder, outer, None, None)
    (event,) = recorder.emitted
    assert (event.what, event.model, event.site) == ("scheduler", 3, 7)


def test_every_kind_of_load_is_told_once():
    patched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "around", lambda owner, name, **_: patched.append((owner, name)))
        patch.setattr(state_loading.lifecycle.wrapped, "subscribe", lambda *args, **kwargs: None)
        StateLoading.begin()
    assert len(patched) == len(set(patched))
    kinds = {owner for owner, name in patched if name == "load_state_dict"}
    assert {torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.LRScheduler} <= kinds
