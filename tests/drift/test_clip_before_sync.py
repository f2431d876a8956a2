"""DDP412 on literal events."""

import pytest
from ddpdoctor.checks.drift.clip_before_sync import ClipBeforeSync
from replicas import BACKWARD, LINE, STEP, run_of

from ddpdoctor.events import Clipped, ClippedScaled, EditedBeforeSync, ShardScales
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


@pytest.mark.parametrize(("calls", "found"), [(3, True), (31, False)])
def test_gradients_of_single_samples_that_are_clipped(calls, found):
    """DP-SGD: several clips per step, of gradients that are cleared each time."""

    def rank(factor):
        last = Clipped(at=0, function="clip_grad_norm_", step=3, call=calls, site=LINE)
        return [last, *(edit(step, factor, by_hand=True, times=1) for step in (1, 2, 3))]

    assert bool(findings_of(rank(0.5), rank(0.25))) is found


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


def shards(step, *factors, **fields):
    return ShardScales(
        at=0, optimizer=0, step=step, factors=factors,
        **{"ranks": (0, 1), "site": LINE, "backward_site": BACKWARD, "step_site": STEP, **fields},
    )  # fmt: skip


def test_shards_are_scaled_by_factors_of_a_rank_s_own():
    mine = [shards(n, 0.5, 0.5, 0.5 + n / 100) for n in range(1, 5)]
    others = [shards(1, 0.25, 0.25, 0.0)]  # holds until the next one
    (finding,) = findings_of(mine, others)
    assert (finding.rule, finding.severity) == ("own-factor-on-shards", Severity.WARNING)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (1, 4, 4)


def test_one_rank_scales_its_shards():
    mine = [shards(n, 0.5, 0.1 * n, 1.0, site=-1) for n in range(1, 5)]
    (finding,) = findings_of(mine, [shards(1, 1.0, 1.0, 1.0, site=-1)])
    assert (finding.ranks, finding.location.line) == ((0,), 40)


def each(*factors, **fields):
    return [shards(n, *factors, **fields) for n in range(1, 5)]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ([shards(1, 0.5, 0.5)], [shards(1, 0.2, 0.2), shards(2, 0.5, 0.5)]),
        (each(0.5, 0.5), each(0.5, 0.5)),
        (each(0.5, 0.5), each(0.5001, 0.5001)),
        (each(0.5, 0.5, rounding=0.008), each(0.51, 0.51, rounding=0.008)),
        (each(0.5, 0.5), each(0.0, 0.0)),
        (each(0.5, 0.5), each()),
        (each(0.5, 1.0, 1.0), each(1.0, 1.0, 1.0)),
        (each(0.5, 0.0), each(0.2, 0.0)),
        (each(0.5, 0.5, ranks=(0, 2)), each(0.2, 0.2, ranks=(1, 3))),
        (each(0.5, 0.5), []),
    ],
    ids=[
        "one step", "equal factors", "equal but for rounding", "rounding of bfloat16",
        "no factor", "not looked at", "one gradient of several", "one gradient alone",
        "stages of a pipeline", "one rank only",
    ],
)  # fmt: skip
def test_shards_without_a_fault(mine, others):
    assert findings_of(mine, others) == []


@pytest.mark.parametrize(("count", "told"), [(3, True), (1, False)])
def test_gradients_that_a_loss_scale_multiplies(count, told):
    events = [
        ClippedScaled(
            at=0, function="clip_grad_norm_", limit=0.5, scale=1024.0, step=step, site=LINE,
            unscale_site=STEP,
        )
        for step in range(count)
    ]  # fmt: skip
    found = findings_of(events, events)
    assert [f.rule for f in found] == ["clipped-while-scaled"] * told
    for finding in found:
        assert (finding.ranks, finding.location.line) == ((0, 1), 33)
        assert "limited to 0.00049" in finding.summary and "unscale_" in finding.fix
