"""DDP311: with torch's error and without."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddpdoctor.checks.model.static_graph_broken import StaticGraphBroken
from recordings import make_run
from wraps import codes, rank

from ddpdoctor.events import StaticGraphBroken as Record
from ddpdoctor.probe import models, reduction

CHECK = StaticGraphBroken()


def broken(kind, **more):
    return Record(at=0, model=0, kind=kind, step=4, backward=5, forward_site=52, **more)


@pytest.mark.parametrize("kind", ["changed", "asserted", "silent"])
def test_each_way_it_shows(kind):
    (found,) = CHECK.examine(make_run({r: rank(broken(kind, silent=2)) for r in (0, 1)}))
    assert found.location.line == 5
    assert found.steps.first == 4


def test_accumulation_is_named_as_the_cause():
    (found,) = CHECK.examine(make_run({r: rank(broken("asserted", unsynced=3)) for r in (0, 1)}))
    assert "no_sync" in found.cause


def test_an_output_that_never_reaches_the_loss():
    events = (broken("silent", silent=1, promised=(4, 5)), broken("changed", silent=1))
    (found,) = CHECK.examine(make_run({r: rank(*events) for r in (0, 1)}))
    assert "what aux (Linear) returned does not reach the loss" in found.cause
    assert "net.aux.requires_grad_(False)" in found.fix
    assert [r.location.line for r in found.related] == [12]
    (other,) = CHECK.examine(make_run({r: rank(broken("silent", silent=1)) for r in (0, 1)}))
    assert "does not use the same parameters" in other.cause
    assert [r.label for r in other.related] == ["the forward that differs"]


@pytest.mark.parametrize(
    ("given", "untouched", "promised"),
    [({0, 1}, (2,), (2,)), ({0, 1, 2}, (2,), ()), ({0, 1}, (1, 2), ())],
    ids=["without a gradient at first, too", "used at first", "another besides"],
)
def test_what_the_first_backward_reached_without_a_gradient(
    monkeypatch, given, untouched, promised
):
    monkeypatch.setattr(reduction, "_silent", reduction.Counter())
    monkeypatch.setattr(reduction, "_hollow", {})
    model: Any = models.Model(0, torch.nn.Linear(1, 1), [], [])
    model.static_graph = True
    told: list[Record] = []
    active: Any = SimpleNamespace(emit=lambda event, vital: told.append(event))
    look = SimpleNamespace(
        model=model, firing=SimpleNamespace(counts={0: 1, 1: 1, 2: 1}, given=given)
    )
    first = SimpleNamespace(looks=[look], synced={0}, untouched={0: ()})
    second = SimpleNamespace(looks=[], synced=set(), untouched={0: untouched})
    for backward in (first, second):
        more: Any = {"models": [model], "expected_sync": {0: True}, "site": 1}
        reduction._backward_ends(active, SimpleNamespace(**vars(backward), **more))
    assert [(e.kind, e.promised) for e in told] == [("silent", promised)]


def test_one_process_has_nothing_to_synchronise():
    assert codes(make_run({0: rank(broken("silent", silent=1), ranks=(0,))}), CHECK) == []


def test_a_static_graph():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []
