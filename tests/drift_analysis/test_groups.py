"""One fault in several groups of ranks, on literal events."""

import msgspec
import pytest
from ddpdoctor.checks.drift.grad_scaler_skew import GradScalerSkew
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.hyperparameter_skew import HyperparameterSkew
from recordings import make_run, steps
from replicas import LINE, OTHER, STEP, digests, replica

from ddpdoctor.analysis.replicas.group_findings import united
from ddpdoctor.events import Edited, Hyperparameters, ScalerStep
from ddpdoctor.report.findings import Finding, Severity, Steps
from ddpdoctor.run import Location

SAME = {0: [1, 2, 3, 4], 1: [5, 6, 7, 8], 2: [9, 8, 7, 6]}
APART = {0: [1, 2, 3, 4], 1: [50, 6, 7, 8], 2: [90, 8, 7, 6]}


def run_of(ranks):
    """Ranks 0 and 2 hold copies of one half of a model, ranks 1 and 3 of the other."""
    return make_run(
        {
            n: [*replica((n % 2, n % 2 + 2)), *events, *steps(4, site=STEP)]
            for n, events in ranks.items()
        }
    )


def edit(line, changed=True):
    return Edited(at=0, model=0, optimizer=0, kind="gradients", step=1, changed=changed, site=line)


def test_gradients_that_one_line_edits_in_each_group():
    edits = {n: edit(LINE, changed=n > 1) for n in range(4)}
    ranks = {n: [edits[n], digests("gradients", APART if n > 1 else SAME)] for n in range(4)}
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert (finding.ranks, finding.steps.first, finding.location.line) == ((2, 3), 1, 33)
    assert finding.evidence["modified_on_ranks"] == [2, 3]
    assert finding.evidence["groups"] == [
        {"ranks": "0,2", "from_step": 1}, {"ranks": "1,3", "from_step": 1},
    ]  # fmt: skip


def test_gradients_that_each_group_edits_at_a_line_of_its_own():
    edits = {n: edit(OTHER if n == 3 else LINE, changed=n > 1) for n in range(4)}
    ranks = {n: [edits[n], digests("gradients", APART if n > 1 else SAME)] for n in range(4)}
    assert [f.ranks for f in GradientDrift().examine(run_of(ranks))] == [(2,), (3,)]


def test_a_rate_that_is_set_in_each_group():
    ranks = {
        n: [
            Hyperparameters(
                at=0, optimizer=0, step=0, groups=({"lr": 0.1 * (n // 2 + 1)},), site=LINE
            )
        ]
        for n in range(4)
    }
    found = list(HyperparameterSkew().examine(run_of(ranks)))
    assert [f.ranks for f in found] == [(0, 1, 2, 3)]


def test_a_scale_that_differs_in_each_group():
    ranks = {
        n: [ScalerStep(at=0, scaler=0, optimizer=0, call=0, step=0, scale=8.0 + n // 2,
                       skipped=False, site=LINE)]
        for n in range(4)
    }  # fmt: skip
    (finding,) = GradScalerSkew().examine(run_of(ranks))
    assert finding.ranks == (0, 1, 2, 3)


FOUND = Finding(
    code="DDP401", check="gradient-drift", severity=Severity.ERROR, summary="", cause="", fix="",
    ranks=(0,), steps=Steps(1, 2, 2), location=Location("train.py", 3), rule="one",
)  # fmt: skip


@pytest.mark.parametrize(
    ("members", "change"),
    [
        pytest.param((0, 2), {}, id="the same ranks"),
        pytest.param((2, 3), {}, id="a rank in common"),
        pytest.param((1, 3), {"rule": "another"}, id="another cause"),
        pytest.param((1, 3), {"location": Location("train.py", 4)}, id="another line"),
        pytest.param((1, 3), {"location": None}, id="no line"),
        pytest.param((1, 3), {"severity": Severity.NOTE}, id="as a note"),
    ],
)
def test_findings_that_are_not_one(members, change):
    other = msgspec.structs.replace(FOUND, **change)
    assert list(united([((0, 2), FOUND), (members, other)])) == [FOUND, other]


def test_steps_of_groups_that_part_at_different_times():
    other = msgspec.structs.replace(FOUND, ranks=(3,), steps=Steps(4, 9, 5))
    (finding,) = united([((0, 2), FOUND), ((1, 3), other)])
    assert (finding.steps, finding.ranks) == (Steps(1, 9, 5), (0, 3))
