"""DDP412 on literal events."""

import pytest
from ddpdoctor.checks.drift.clip_before_sync import ClipBeforeSync
from replicas import BACKWARD, LINE, run_of

from ddpdoctor.events import EditedBeforeSync
from ddpdoctor.report.findings import Severity


def edit(step, factor=0.5, **fields):
    return EditedBeforeSync(
        at=0, optimizer=0, step=step, factor=factor,
        **{"model": 0, "times": 3, "function": "clip_grad_norm_", "site": LINE,
           "backward_site": BACKWARD, **fields},
    )  # fmt: skip


def scaled(step, factor):
    return edit(step, factor, function="", site=-1)


def findings_of(*ranks):
    return list(ClipBeforeSync().examine(run_of(dict(enumerate(ranks)))))


def test_micro_batches_are_clipped():
    events = [edit(0), edit(1), edit(3)]
    (finding,) = findings_of(events, events)
    assert (finding.rule, finding.severity) == ("clipped-micro-batches", Severity.WARNING)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (0, 3, 3)


def test_outliers_on_one_rank_are_enough():
    (finding,) = findings_of([edit(0), edit(1, 0.0)], [])
    assert finding.ranks == (0,)


def test_clipped_before_the_program_averages_by_itself():
    events = [edit(n, model=-1, by_hand=True, times=1, backward_site=-1) for n in range(3)]
    (finding,) = findings_of(events, events)
    assert (finding.rule, finding.subjects) == ("clipped-before-averaging-by-hand", ())
    assert "after the gradients were averaged" in finding.fix


def test_scaled_by_local_factors():
    mine, others = ([scaled(n, f) for n in range(4)] for f in (0.5, 0.25))
    (finding,) = findings_of(mine, others)
    assert (finding.rule, finding.location.line) == ("scaled-by-local-factors", 38)
    assert finding.steps.count == 4


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ([edit(0)], [edit(0)]),
        ([scaled(n, 0.5) for n in range(4)], [scaled(n, 0.5) for n in range(4)]),
        ([scaled(n, 0.12345) for n in range(4)], [scaled(n, 0.12346) for n in range(4)]),
        ([scaled(n, 0.5) for n in range(4)], [scaled(n, 0.0) for n in range(4)]),
        ([scaled(n, 0.5) for n in range(4)], []),
    ],
    ids=["one step", "equal factors", "equal but for rounding", "no factor", "one rank only"],
)
def test_no_fault(mine, others):
    assert findings_of(mine, others) == []


def test_without_gradients_of_several_ranks():
    assert ClipBeforeSync().unobserved(run_of({0: [], 1: []})) is not None
