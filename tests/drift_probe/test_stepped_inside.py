"""DDP407 where hooks on parameters step inside the backward."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.drift.unsynced_step import UnsyncedStep
from firing import alone
from recordings import make_run, site
from wraps import rank

from ddpdoctor.events import SteppedInside
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.gradients import step_in_backward
from ddpdoctor.probe.watchers.gradients.step_in_backward import StepInBackward
from ddpdoctor.report.findings import Confidence, Steps

CHECK = UnsyncedStep()
SIZE = 3 * (16 + 4)


def told(digests, **more):
    return [
        SteppedInside(
            at=0, model=0, first=0, count=n, backwards=n, parameters=digest, site=60, **more
        )
        for n, digest in enumerate(digests, 1)
    ]


def both(mine, others, **more):
    line = site(60, "train.py", 6, "optimizers[p].step()")
    return make_run({r: rank(line, *told(each, **more)) for r, each in ((0, mine), (1, others))})


def test_a_hook_that_steps_before_ddp_averages():
    run = both([11, 12, 13], [21, 22, 23])
    assert CHECK.unobserved(run) is None
    (found,) = CHECK.examine(run)
    assert (found.code, found.confidence) == ("DDP407", Confidence.PROVEN)
    assert (found.ranks, found.steps, found.location.line) == ((0, 1), Steps(0, 2, 3), 6)


def test_where_no_digest_could_be_taken():
    (found,) = CHECK.examine(both([0, 0], [0, 0]))
    assert (found.rule, found.confidence) == ("step-inside-backward", Confidence.SUSPECTED)


@pytest.mark.parametrize(
    "run",
    [
        both([11, 12], [11, 12]),
        both([11, 12, 13], [21, 22, 13]),
        both([11, 12], [21, 22], carried=SIZE),
    ],
    ids=["all had the same data", "equal again", "averaged by the program"],
)
def test_ranks_that_do_not_part(run):
    assert list(CHECK.examine(run)) == []


@pytest.mark.parametrize("communicated, count", [(False, 1), (True, 0)])
def test_only_a_step_before_the_group_communicates_counts(monkeypatch, communicated, count):
    module = torch.nn.Linear(2, 1)
    model = Model(0, module, list(module.parameters()), [0, 1])
    wrapper = SimpleNamespace(process_group=None)
    monkeypatch.setattr(model, "ddp", lambda: wrapper)
    alone(monkeypatch, StepInBackward)
    monkeypatch.setattr(step_in_backward, "sequence_number", lambda group: 7 + communicated)
    monkeypatch.setattr(Backwards.current, "count", 3)
    told = []
    recorder = SimpleNamespace(emit=lambda event, vital: told.append(event))
    look = SimpleNamespace(model=model, sequence=7)
    lifecycle.backward_begins.fire(recorder, SimpleNamespace(observations=[look], site=5))
    for parameter in module.parameters():
        optimizer = torch.optim.SGD([parameter])
        known = SimpleNamespace(notes={})
        step = SimpleNamespace(known=known, optimizer=lambda o=optimizer: o, number=0, site=6)
        lifecycle.step_inside.fire(recorder, step)
    hooks.leaving.fire(recorder, None)
    assert [e.count for e in told] == [1] * count
