"""What was done while the copies were equal did not set them apart."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.optimizer_state_drift import OptimizerStateDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from firing import alone
from recordings import START
from replicas import LINE, OTHER, digests, equal, run_of

from ddpdoctor.events import Edited, Loaded
from ddpdoctor.events.drift import chosen
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits

BEFORE, APART = 6, 10
"""A step before which all are equal, and the first before which they differ."""


def table(value, steps=12):
    return {step: [1, 2, 3, value if step >= APART else 4] for step in range(steps)}


def load(step, what="weights"):
    return Loaded(at=START, what=what, model=0, step=step, site=LINE)


def edit(step, **fields):
    event = Edited(
        at=START, model=0, optimizer=0, kind="parameters", step=step, changed=True, site=OTHER
    )
    return msgspec.structs.replace(event, **fields)


@pytest.mark.parametrize(("step", "named"), [(0, False), (BEFORE, False), (APART, True)])
@pytest.mark.parametrize(
    ("check", "kind", "what"),
    [
        (ParameterDrift, "parameters", "weights"),
        (OptimizerStateDrift, "state:exp_avg", "optimizer"),
    ],
)
def test_a_load_is_blamed_for_what_differs_from_the_next_step_on(check, kind, what, step, named):
    rows = {0: [load(step, what), digests(kind, table(40))], 1: [digests(kind, table(41))]}
    (finding,) = check().examine(run_of(rows, count=12))
    assert (finding.location.line == 33) is named


def test_a_load_long_before_is_blamed_where_not_all_tensors_were_compared_since():
    assert {i for step in range(7, 11) for i in chosen(step, 4, 4)} == {0, 1, 2, 3}
    rows = {n: digests("parameters", table(40 + n), stride=4) for n in range(2)}
    for step, named in ((7, False), (8, True)):
        run = run_of({0: [load(step), rows[0]], 1: [rows[1]]}, count=12)
        (finding,) = ParameterDrift().examine(run)
        assert (finding.rule == "load-on-some-ranks") is named


def test_what_is_loaded_to_evaluate_was_loaded_since_the_step_before():
    same = equal("parameters", 12)
    for step, named in ((3, False), (APART, True)):
        seen = [
            digests("parameters", {APART: [1, 2, 3, n]}, point="eval", step=APART) for n in range(2)
        ]
        run = run_of({0: [load(step), same, seen[0]], 1: [same, seen[1]]}, count=12)
        (finding,) = ParameterDrift().examine(run)
        assert (finding.rule == "load-on-some-ranks") is named


def test_an_edit_that_left_the_copies_equal_is_no_cause():
    for step, named in ((BEFORE, False), (APART, True)):
        rows = {0: [edit(step), digests("parameters", table(40))]}
        run = run_of({**rows, 1: [digests("parameters", table(41))]}, count=12)
        (finding,) = ParameterDrift().examine(run)
        assert (finding.rule == "edit-on-some-ranks") is named


def test_an_older_load_does_not_stand_for_an_edit_that_is_not_put_back():
    undone = edit(APART, changed=False, undone=True, site=-1)
    rows = {
        0: [load(BEFORE), edit(APART), digests("parameters", table(40))],
        1: [undone, digests("parameters", table(41))],
    }
    (finding,) = ParameterDrift().examine(run_of(rows, count=12))
    assert (finding.ranks, finding.location.line) == ((0,), 35)


def test_lines_that_put_back_are_not_those_of_an_edit_that_stays(monkeypatch):
    told = []
    alone(monkeypatch, ManualEdits)
    parameter = torch.nn.Parameter(torch.ones(2))
    model = type("Model", (), {"number": 0, "inner": lambda self: None})()
    followed = ManualEdits.current.models[model]
    followed.sites["parameters", False] = (LINE, OTHER)
    sites = SimpleNamespace(user_lines=lambda frame, most: [])
    recorder = SimpleNamespace(emit=told.append, every=0, step=3, sites=sites)
    holding = SimpleNamespace(
        model=model, optimizer=0, positions=[0], parameters=lambda positions: [parameter]
    )
    step = SimpleNamespace(holdings=[holding], number=3, optimizer=lambda: None, closure=False)
    for factor in (1, 2):
        lifecycle.step_ends.fire(recorder, step)
        with torch.no_grad():
            parameter.mul_(factor)
        lifecycle.step_begins.fire(recorder, step)
    assert [(e.changed, e.site) for e in told] == [(False, LINE), (True, -1)]
    assert followed.trace_position["parameters"] == 0
