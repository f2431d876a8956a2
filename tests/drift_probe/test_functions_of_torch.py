"""Functions of torch's that change gradients on some ranks only."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from firing import alone
from replicas import BACKWARD, LINE, OTHER, digests, run_of

from ddpdoctor.events import Clipped, Edited
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.watchers.gradients.gradient_sync import GradientSync
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits

CLIP, UNSCALE = "clip_grad_norm_", "unscale_"
EVERYWHERE, ITS_OWN = LINE, OTHER
"""Lines that all ranks come by, and one alone."""


def clipped(site):
    return Clipped(at=0, function=CLIP, step=0, call=0, site=site)


def edit(site=-1, functions=(), more=(), **changers):
    return Edited(
        at=0, model=0, optimizer=0, kind="gradients", step=0, changed=True, site=site, more=more,
        functions=functions, beside=bool(functions), changers=changers,
    )  # fmt: skip


def finding_of(*ranks):
    rows = {
        n: [*events, digests("gradients", {0: [1, 2, 3, 4 + n]})] for n, events in enumerate(ranks)
    }
    (finding,) = GradientDrift().examine(run_of(rows))
    return finding


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (edit(EVERYWHERE, (CLIP,), clip_grad_norm_=ITS_OWN), edit(EVERYWHERE)),
        (edit(-1, (CLIP,), clip_grad_norm_=ITS_OWN), edit(-1)),
        (
            edit(EVERYWHERE, (UNSCALE, CLIP), unscale_=-1, clip_grad_norm_=ITS_OWN),
            edit(EVERYWHERE, (UNSCALE,), unscale_=-1),
        ),
    ],
    ids=["by hand", "lines not known", "beside one that all call"],
)
def test_what_one_rank_calls_is_named_before_what_all_do(mine, others):
    finding = finding_of([clipped(EVERYWHERE), mine], [clipped(EVERYWHERE), others], [others])
    assert (finding.ranks, finding.location.line) == ((0,), 35)
    assert finding.evidence["modified_on_ranks"] == [0]


def test_a_function_that_all_call_is_not_named_for_changing_them_on_one():
    mine = edit(EVERYWHERE, (CLIP,), clip_grad_norm_=BACKWARD)
    finding = finding_of([mine], [edit(EVERYWHERE, (CLIP,), more=(ITS_OWN,))])
    assert finding.location.line != 38


def test_nor_is_one_before_a_line_that_one_rank_alone_comes_by():
    mine = edit(EVERYWHERE, (CLIP,), more=(ITS_OWN,), clip_grad_norm_=BACKWARD)
    finding = finding_of([mine], [edit(EVERYWHERE)])
    assert (finding.ranks, finding.location.line) == ((0,), 35)


def test_the_call_that_changes_these_gradients_is_named():
    """All ranks clip those of another model."""
    mine = msgspec.structs.replace(
        edit(-1, (CLIP,), clip_grad_norm_=ITS_OWN), beside=False, ratio=0.5
    )
    finding = finding_of([clipped(EVERYWHERE), clipped(ITS_OWN), mine], [clipped(EVERYWHERE)])
    assert (finding.ranks, finding.location.line) == ((0,), 35)


@pytest.mark.parametrize(
    ("factor", "changers"), [(0.25, {CLIP: ITS_OWN}), (1.0, {})], ids=["bites", "does not"]
)
def test_functions_are_told_of_the_model_that_they_write_to(monkeypatch, factor, changers):
    told = []
    recorder = SimpleNamespace(emit=told.append, every=0, step=0)
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: True)
    models, steps = [], []
    for number in range(2):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        one = {"number": number, "expected": [0], "parameters": [lambda p=parameter: p]}
        models.append(type("Model", (), one)())
        holding = SimpleNamespace(model=models[-1], optimizer=number, held=frozenset((0,)))
        steps.append(SimpleNamespace(holdings=[holding], number=0, closure=False))
    lifecycle.backward_ends.fire(recorder, SimpleNamespace(error=None, models=models, site=-1))
    gradients = [model.parameters[0]().grad for model in models]
    for gradient in gradients:
        gradient.add_(1.0)
    ManualEdits.current._function_begins()
    gradients[0].mul_(factor)
    ManualEdits.current._function_ends(recorder, (CLIP, ITS_OWN), None, None)
    for step in steps:
        lifecycle.step_begins.fire(recorder, step)
    assert [(e.functions, e.beside) for e in told] == [((CLIP,), True), ((), False)]
    assert [e.changers for e in told] == [changers, {}]


def test_each_of_several_optimizers_is_told_of_its_own_gradients(monkeypatch):
    """Both were divided, one was clipped after that."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    one = {"number": 0, "expected": [0, 1], "parameters": [lambda p=p: p for p in parameters]}
    model = type("Model", (), one)()
    told = []
    recorder = SimpleNamespace(emit=told.append, every=0, step=0)
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: True)
    edits = ManualEdits.current
    lifecycle.backward_ends.fire(recorder, SimpleNamespace(error=None, models=[model], site=-1))
    for parameter in parameters:
        parameter.grad /= 2
    edits._function_begins()
    parameters[1].grad /= 4
    edits._function_ends(recorder, (CLIP, ITS_OWN), None, None)
    for number in range(2):
        holding = SimpleNamespace(model=model, optimizer=number, held=frozenset((number,)))
        lifecycle.step_begins.fire(
            recorder, SimpleNamespace(holdings=[holding], number=0, closure=False)
        )
    assert [(e.ratio, e.besides, e.beside) for e in told] == [(0.5, 0.5, True), (0.125, 0.5, True)]
    assert [e.changers for e in told] == [{CLIP: ITS_OWN}] * 2
