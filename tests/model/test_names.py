"""Models of one class are told apart by what the program calls them."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.ddp_bypassed import DdpBypassed
from recordings import make_run, site
from wraps import rank, wrap

from ddpdoctor.events import Bypassed, Named, Wrapped
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.graph.model_names import ModelNames
from ddpdoctor.run import title_of

FIRST, SECOND = wrap(model=0), wrap(model=1)


def named(model, name):
    return Named(at=0, model=model, name=name)


def titles(*events):
    one = make_run({0: rank(SECOND, *events)}).ranks[0]
    return [title_of(one, wrapped) for wrapped in one.of(Wrapped)]


def test_models_of_one_class_have_names():
    assert titles(named(0, "G"), named(1, "self.F")) == ["G (Net)", "self.F (Net)"]


@pytest.mark.parametrize("names", [[], [named(0, "net"), named(1, "net")]])
def test_names_that_do_not_tell_them_apart(names):
    assert titles(*names) == ["Net", "Net"]


def test_the_only_model_of_its_class_is_that():
    one = make_run({0: rank(named(0, "G"))}).ranks[0]
    assert title_of(one, one.of(Wrapped)[0]) == "Net"


def test_the_line_of_the_wrap_comes_first_where_it_wraps_one_model():
    one = make_run({0: rank(named(0, "inner"))}).ranks[0]
    assert one.names_of(one.of(Wrapped)[0])[0] == "model"


def test_the_advice_calls_the_wrapper_as_the_program_does():
    around = Bypassed(at=0, model=1, optimizer=1, step=3, count=4, forwards=0, site=60)
    events = [site(60, "t.py", 6, "..."), SECOND, named(0, "G"), named(1, "F"), around]
    (found,) = DdpBypassed().examine(make_run({r: rank(*events) for r in (0, 1)}))
    assert found.subjects == ("F (Net)",)


def test_a_wrapper_is_named_where_it_is_trained(monkeypatch):
    told = []
    generator = torch.nn.Linear(1, 1)
    model = Model(0, generator, list(generator.parameters()), [0, 1])
    monkeypatch.setattr(model, "ddp", lambda: generator)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    monkeypatch.setattr(ModelNames.current, "_named", set())
    sites = SimpleNamespace(kind=lambda code: "user" if code.co_filename == __file__ else "")
    recorder = SimpleNamespace(sites=sites, emit=told.append)
    ModelNames.current._step_due(recorder, SimpleNamespace(number=0))
    assert [(e.model, e.name) for e in told] == [(0, "generator")]
