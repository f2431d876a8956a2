"""An optimizer loaded before the wrap: DDP evens out the weights there, never the optimizer."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.probe import loads  # noqa: E402


class Active:
    def __init__(self):
        self.step = 0
        self.emitted = []

    def site(self):
        return 7

    def emit(self, event):
        self.emitted.append(event)


def loaded(monkeypatch, held, wrapped):
    monkeypatch.setattr(loads._loads, "early", [])
    monkeypatch.setattr(loads._loads, "depth", 0)
    monkeypatch.setattr(loads.models, "count", lambda: 0)
    active, optimizer = Active(), torch.optim.SGD([held], lr=0.1)
    token = loads._into_optimizer(active, (optimizer, {}), {})
    loads._done(active, token, None, None)
    loads._wrapped(active, SimpleNamespace(number=3, parameters=[lambda: wrapped]))
    return active.emitted


def test_it_is_told_once_its_model_is_wrapped(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    (event,) = loaded(monkeypatch, weight, weight)
    assert (event.what, event.model, event.site) == ("optimizer", 3, 7)


def test_the_optimizer_of_another_model(monkeypatch):
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    assert loaded(monkeypatch, one, other) == []
