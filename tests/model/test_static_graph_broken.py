"""DDP311: with torch's error and without."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from ddpdoctor.checks.model.static_graph_broken import StaticGraphBroken
from recordings import make_run
from wraps import codes, rank

from ddpdoctor.events import StaticGraphBroken as Record
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.graph import reducer_errors
from ddpdoctor.probe.watchers.graph.reducer_errors import ReducerErrors

CHECK = StaticGraphBroken()


def broken(kind, **more):
    return Record(at=0, model=0, kind=kind, step=4, backward=5, forward_site=52, **more)


@pytest.mark.parametrize("kind", ["changed", "asserted", "silent"])
def test_each_way_it_shows(kind):
    (found,) = CHECK.examine(make_run({r: rank(broken(kind, silent=2)) for r in (0, 1)}))
    assert found.location.line == 5
    assert found.steps.first == (3 if kind == "changed" else 4), "of the step before"


def test_one_break_is_one_step_though_torch_says_so_in_the_next():
    events = (broken("silent", silent=1), msgspec.structs.replace(broken("changed"), step=5))
    (found,) = CHECK.examine(make_run({r: rank(*events) for r in (0, 1)}))
    assert (found.steps.first, found.steps.last, found.steps.count) == (4, 4, 1)


def test_several_silent_steps():
    rows = [msgspec.structs.replace(broken("silent", silent=n), step=3 + n) for n in (1, 2, 4)]
    (found,) = CHECK.examine(make_run({r: rank(*rows) for r in (0, 1)}))
    assert (found.steps.first, found.steps.last, found.steps.count) == (4, 7, 4)


def test_under_reentrant_checkpointing_the_other_option_alone_would_fail():
    event = broken("silent", silent=1, nested=3, checkpoint_site=51)
    (found,) = CHECK.examine(make_run({r: rank(event) for r in (0, 1)}))
    assert "checkpoints a part of it" in [r.label for r in found.related]
    assert found.rule == "graph-changes"
    first = broken("asserted", unsynced=3, nested=3)
    (found,) = CHECK.examine(make_run({r: rank(first) for r in (0, 1)}))
    assert found.rule == "no-sync-first"


def test_accumulation_is_named_as_the_cause():
    (found,) = CHECK.examine(make_run({r: rank(broken("asserted", unsynced=3)) for r in (0, 1)}))
    assert found.rule == "no-sync-first"


def test_an_output_that_never_reaches_the_loss():
    events = (broken("silent", silent=1, promised=(4, 5)), broken("changed", silent=1))
    (found,) = CHECK.examine(make_run({r: rank(*events) for r in (0, 1)}))
    assert [r.location.line for r in found.related] == [12]
    (other,) = CHECK.examine(make_run({r: rank(broken("silent", silent=1)) for r in (0, 1)}))
    assert [r.label for r in other.related] == ["the forward that differs"]


@pytest.mark.parametrize(
    ("given", "untouched", "promised"),
    [({0, 1}, (2,), (2,)), ({0, 1, 2}, (2,), ()), ({0, 1}, (1, 2), ())],
    ids=["without a gradient at first, too", "used at first", "another besides"],
)
def test_what_the_first_backward_reached_without_a_gradient(
    monkeypatch, given, untouched, promised
):
    monkeypatch.setattr(ReducerErrors.current, "_silent", reducer_errors.Counter())
    monkeypatch.setattr(ReducerErrors.current, "_without_gradient", {})
    model: Any = Model(0, torch.nn.Linear(1, 1), [], [])
    model.static_graph = True
    told: list[Record] = []
    recorder: Any = SimpleNamespace(emit=lambda event, vital: told.append(event))
    look = SimpleNamespace(
        model=model, firing=SimpleNamespace(counts={0: 1, 1: 1, 2: 1}, given=given)
    )
    first = SimpleNamespace(observations=[look], synced={0}, untouched={0: ()})
    second = SimpleNamespace(observations=[], synced=set(), untouched={0: untouched})
    for backward in (first, second):
        more: Any = {"models": [model], "expected_sync": {0: True}, "site": 1, "nested": 0}
        ReducerErrors.current._backward_ends(recorder, SimpleNamespace(**vars(backward), **more))
    assert [(e.kind, e.promised) for e in told] == [("silent", promised)]


def test_one_process_has_nothing_to_synchronise():
    assert codes(make_run({0: rank(broken("silent", silent=1), ranks=(0,))}), CHECK) == []


def test_a_static_graph():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []
