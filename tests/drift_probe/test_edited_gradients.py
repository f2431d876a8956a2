"""Parameters that differ since a step in which one rank edited gradients that nobody compared."""

from types import SimpleNamespace

import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from firing import alone
from replicas import LINE, digests, run_of

from ddpdoctor.events import Edited
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.watchers.gradients.gradient_sync import GradientSync
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits

CLIP = ("clip_grad_norm_",)
FIRST = 6
"""The first step before which the parameters differ."""


def edit(step, changed=True, functions=(), beside=False, site=-1):
    return Edited(
        at=0, model=0, optimizer=0, kind="gradients", step=step, changed=changed, site=site,
        functions=functions, beside=beside,
    )  # fmt: skip


def finding_of(mine, others, gradients=()):
    """Of ranks of which rank 0 stands apart; of its gradients these steps are compared."""
    same = {step: [1, 2, 3, 4] for step in gradients}
    rows = {}
    for n, told in enumerate((mine, others, others)):
        last = {step: [1, 2, 3, 4 + (step >= FIRST) * (n == 0)] for step in range(8)}
        rows[n] = [*told, digests("parameters", last), digests("gradients", same)]
    (finding,) = ParameterDrift().examine(run_of(rows, count=8))
    return finding


@pytest.mark.parametrize("site", [-1, LINE])
def test_the_edit_of_the_step_before_is_named(site):
    finding = finding_of([edit(5, site=site), edit(6, changed=False)], [])
    assert (finding.ranks, finding.location.line) == ((0,), 33 if site == LINE else 40)
    assert (finding.rule, finding.evidence["gradients_modified_at_step"]) == ("gradient-edit", 5)


def test_also_beside_a_function_that_all_ranks_call():
    usual = edit(0, functions=CLIP)
    finding = finding_of([usual, edit(5, functions=CLIP, beside=True)], [usual])
    assert (finding.rule, finding.evidence["gradients_modified_at_step"]) == ("gradient-edit", 5)


@pytest.mark.parametrize(
    ("mine", "others", "gradients"),
    [
        ([edit(6)], [], ()),
        ([edit(4), edit(5, changed=False)], [], ()),
        ([edit(2), edit(3, changed=False), edit(5)], [], ()),
        ([edit(5)], [edit(7)], ()),
        ([edit(5)], [edit(5)], ()),
        ([edit(5)], [], (5,)),
        ([], [edit(5)], ()),
    ],
    ids=[
        "too late", "equal since", "equal after an earlier one", "others make it elsewhere",
        "all make it", "compared and equal", "the ranks that agree",
    ],
)  # fmt: skip
def test_other_edits_are_not(mine, others, gradients):
    finding = finding_of(mine, others, gradients)
    assert "gradients_edited_at_step" not in finding.evidence


def test_micro_batches_do_not_use_up_the_looks(monkeypatch):
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: False)
    model = type("Model", (), {"number": 0, "expected": [], "parameters": []})()
    for _ in range(4):
        lifecycle.backward_ends.fire(None, SimpleNamespace(error=None, models=[model]))
    assert ManualEdits.current.models[model].moments == 0
