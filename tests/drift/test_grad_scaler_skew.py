"""DDP406 on literal events."""

from types import SimpleNamespace

import msgspec
import pytest
from ddpdoctor.checks.drift.grad_scaler_skew import GradScalerSkew
from recordings import make_run, site, steps
from replicas import LINE, OTHER, digests, run_of

from ddpdoctor.events import Loaded, ScalerStep, ShardScales
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.gradients.hyperparameters import HyperparameterWatch
from ddpdoctor.report.findings import Steps


def scale(call, value, skipped=False, set_site=-1):
    return ScalerStep(
        at=0, scaler=0, optimizer=0, call=call, step=call, scale=value, skipped=skipped, site=LINE,
        set_site=set_site,
    )  # fmt: skip


def test_equal_scales_and_common_skips():
    events = [scale(0, 1024.0, skipped=True), scale(1, 512.0)]
    assert list(GradScalerSkew().examine(run_of(dict.fromkeys(range(2), events)))) == []


def test_different_scales():
    run = run_of({n: [scale(0, 2048.0 if n == 2 else 1024.0)] for n in range(3)})
    (finding,) = GradScalerSkew().examine(run)
    assert (finding.ranks, finding.location.line) == ((2,), 33)


def test_scales_that_were_alike_at_first():
    run = run_of({n: [scale(0, 8.0), *([] if n else [scale(5, 16.0)])] for n in (0, 1)}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.rule == "unequal-updates"
    run = run_of({n: [scale(0, 8.0 + n)] for n in (0, 1)})
    (finding,) = GradScalerSkew().examine(run)
    assert finding.rule == "unequal-scalers"


def test_shards_of_one_model_step_together():
    def sharded(skips, *, over=((0, 1), (0, 1))):
        def events(rank):
            known = ShardScales(at=0, optimizer=0, step=1, ranks=over[rank], factors=(1.0,))
            mine = [scale(0, 8.0), *([scale(2, 8.0, skipped=True)] if skips[rank] else [])]
            return [site(LINE, "train.py", 33, "scaler.step()"), *mine, known, *steps(8)]

        return list(GradScalerSkew().examine(make_run({n: events(n) for n in (0, 1)})))

    (finding,) = sharded((False, True))
    assert (finding.rule, finding.ranks) == ("skip-by-own-shards", (1,))
    assert "ShardedGradScaler" in finding.fix
    assert not sharded((True, True))
    assert not sharded((False, True), over=((0,), (1,)))  # each rank has a model of its own


def test_a_step_that_one_rank_skips():
    run = run_of({0: [scale(0, 8.0), scale(2, 8.0, skipped=True)], 1: [scale(0, 8.0)]}, count=8)
    (finding,) = GradScalerSkew().examine(run)
    assert (finding.ranks, finding.rule) == ((0,), "unequal-skips")
    for check, first in (("hyperparameter-skew", 2), ("parameter-drift", 5)):
        behind = msgspec.structs.replace(finding, check=check, steps=Steps(first, 7, 1))
        assert GradScalerSkew().explains(finding, behind), "it is a step behind from then on"
    before = msgspec.structs.replace(finding, check="hyperparameter-skew", steps=Steps(1, 7, 7))
    assert not GradScalerSkew().explains(finding, before)


def test_a_scale_that_a_rank_did_not_come_to_is_not_compared():
    ranks = {0: [scale(0, 8.0), scale(3, 4.0)], 1: [scale(0, 8.0)]}
    assert list(GradScalerSkew().examine(run_of(ranks, count=3))) == []
    assert len(list(GradScalerSkew().examine(run_of(ranks, count=4)))) == 1


def counted(call, backwards, each, **fields):
    event = scale(call, 8.0, **fields)
    return msgspec.structs.replace(event, backwards=backwards, each=each)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({0: [counted(0, 4, 4), counted(6, 28, 4, skipped=True)], 1: [counted(0, 4, 4)]}, 1),
        ({0: [scale(0, 8.0), scale(6, 8.0, skipped=True)], 1: [scale(0, 8.0)]}, 1),
    ],
    ids=["of the same iteration", "not counted"],
)
def test_a_step_that_one_rank_skips_in_an_iteration_of_all(rows, found):
    assert len(list(GradScalerSkew().examine(run_of(rows, count=9)))) == found


LEFT_OUT = [counted(0, 1, 1), counted(2, 4, 2), counted(3, 5, 1)]
"""The third iteration has no call."""


@pytest.mark.parametrize(
    "other", [[counted(0, 1, 1)], [counted(0, 1, 1), counted(4, 6, 2), counted(5, 7, 1)]]
)
def test_ranks_that_leave_calls_out_are_not_compared_from_there_on(other):
    skipped = {0: counted(6, 8, 1, skipped=True), 1: counted(7, 8, 1, skipped=True)}
    run = run_of({0: [*LEFT_OUT, skipped[0]], 1: [*other, skipped[1]]}, count=12)
    assert list(GradScalerSkew().examine(run)) == []


@pytest.mark.parametrize(
    ("kind", "cause", "fix"),
    [
        ("gradients", "DDP averaged them, and they were changed after that, on rank 2", "agree"),
        ("local", "they were not averaged before it", "no_sync"),
        ("parameters", "not averaged, or were changed", "agree"),
    ],
)
def test_why_only_some_ranks_skip_a_step(kind, cause, fix):
    ranks = {n: [scale(0, 8.0), digests(kind, {2: [1, 2, 3, 4]})] for n in range(3)}
    ranks[2].append(scale(2, 8.0, skipped=True))
    (finding,) = GradScalerSkew().examine(run_of(ranks, count=8))
    assert finding.ranks == (2,)


def test_a_rank_that_has_not_got_there_yet_is_not_compared():
    run = run_of({0: [scale(0, 8.0), scale(9, 8.0, skipped=True)], 1: [scale(0, 8.0)]}, count=4)
    assert list(GradScalerSkew().examine(run)) == []


def test_without_a_scaler():
    assert GradScalerSkew().unobserved(run_of({0: [], 1: []})) is not None
    assert GradScalerSkew().unobserved(run_of({0: [], 1: []})) is not None


def test_a_scale_that_one_rank_sets_by_hand():
    set_here = scale(8, 1024.0, set_site=OTHER)
    other = [scale(0, 2048.0), scale(8, 4096.0)]
    run = run_of({0: [scale(0, 2048.0), set_here], 1: other}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert (finding.location.line, finding.related[0].location.line) == (35, 33)
    assert finding.ranks == (0,)


def test_a_scale_set_by_hand_before_is_not_blamed():
    told = [scale(0, 8.0), scale(2, 16.0, set_site=OTHER), scale(3, 16.0)]
    run = run_of({0: told, 1: [*told, scale(6, 32.0)]}, count=7)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.location.line == 33


def again(call, value):
    """Of the scaler that was made after a resume, before step 8."""
    return msgspec.structs.replace(scale(call, value), scaler=1, step=8 + call, at=2)


def test_each_scaler_counts_its_own_steps():
    first = [scale(0, 8.0), scale(4, 16.0)]
    run = run_of({n: [*first, again(0, 8.0 + n)] for n in (0, 1)}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.steps.first == 8


def test_a_state_that_one_rank_loads():
    loaded = Loaded(at=1, what="scaler", model=-1, step=8, site=OTHER)
    rows = {0: [scale(0, 8.0), loaded, again(0, 16.0)], 1: [scale(0, 8.0), again(0, 8.0)]}
    run = run_of(rows, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.location.line == 35


def test_a_state_that_all_ranks_load_is_not_blamed():
    loaded = Loaded(at=1, what="scaler", model=-1, step=8, site=OTHER)
    run = run_of({n: [scale(0, 8.0), loaded, again(0, 8.0 + n)] for n in (0, 1)}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.location.line == 33


def test_the_steps_are_those_at_which_the_scales_differ():
    shared = [scale(0, 8.0), scale(7, 16.0)]
    run = run_of({0: shared, 1: [scale(0, 8.0), scale(3, 4.0), scale(7, 16.0)]}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.steps == Steps(3, 6, 4)
    run = run_of({0: shared, 1: [scale(0, 8.0), scale(3, 4.0)]}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert finding.steps == Steps(3, 8, 6)
    sooner = [scale(0, 8.0), scale(3, 16.0), scale(5, 32.0), scale(8, 64.0)]
    (finding,) = GradScalerSkew().examine(
        run_of({0: [scale(0, 8.0), scale(4, 16.0), scale(7, 32.0)], 1: sooner}, count=10)
    )
    assert finding.steps == Steps(3, 9, 5), "alike at 4 and 7"
    drift = msgspec.structs.replace(finding, check="gradient-drift", steps=Steps(3, 8, 6))
    assert GradScalerSkew().explains(finding, drift), "what is unscaled differently differs"


class Any:
    """A scaler, or an optimizer."""


def test_steps_of_two_optimizers_are_numbered_each_by_itself(monkeypatch):
    told, made = [], iter([1, 2, 3, 4, 6, 7])
    monkeypatch.setattr(HyperparameterWatch, "current", HyperparameterWatch())
    known = {Any(): SimpleNamespace(number=n, steps=0) for n in range(2)}
    monkeypatch.setattr(Optimizers.current, "known_optimizer", known.get)
    recorder, scaler = SimpleNamespace(emit=told.append), Any()
    for _ in range(3):
        for optimizer, state in known.items():
            state.steps += 1
            monkeypatch.setattr(Backwards.current, "synced", next(made))
            token = scaler, optimizer, state.steps - 1, 8.0, 0
            HyperparameterWatch.current._scaler_ends(recorder, token, None, None)
    rows = [(e.optimizer, e.call, e.backwards, e.each) for e in told]
    assert rows == [(0, 0, 1, 1), (1, 0, 2, 2), (0, 1, 3, 2), (0, 2, 6, 3), (1, 2, 7, 3)]
    assert not any(e.skipped for e in told)


def at(call, backwards, value, *, step=None, skipped=False, each=1):
    event = scale(call, value, skipped)
    step = call if step is None else step
    return msgspec.structs.replace(event, step=step, backwards=backwards, each=each)


SKIPS = [at(0, 1, 64.0), at(5, 6, 64.0, skipped=True), at(6, 7, 32.0, step=5)]
"""The scale falls at its sixth call."""
RETURNS = [at(0, 1, 64.0), at(5, 7, 64.0, each=2), at(6, 8, 64.0)]
"""No call after the sixth backward."""


def test_a_call_that_one_rank_leaves_out_while_the_others_skip():
    run = run_of({0: SKIPS, 1: RETURNS, 2: SKIPS}, count=9)
    (finding,) = GradScalerSkew().examine(run)
    assert (finding.ranks, finding.location.line) == ((1,), 33)
    assert finding.steps == Steps(5, 8, 4)
    for check, first in (("gradient-drift", 5), ("parameter-drift", 6)):
        effect = msgspec.structs.replace(finding, check=check, steps=Steps(first, 8, 1))
        assert GradScalerSkew().explains(finding, effect)


TAKEN = [at(0, 1, 64.0)]
LOWERED = [at(0, 1, 64.0), at(5, 7, 32.0, each=2), at(6, 8, 32.0)]
UNREAD = [at(0, 1, -1.0), at(5, 7, -1.0, each=2), at(6, 8, -1.0)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(TAKEN, RETURNS, id="the others take the step: that is parameter-drift"),
        pytest.param(SKIPS, LOWERED, id="the rank lowers its scale by itself"),
        pytest.param(RETURNS, RETURNS, id="all leave it out"),
        pytest.param([*UNREAD[:1], *SKIPS[1:]], UNREAD, id="the scale lies on a device"),
        pytest.param(SKIPS, SKIPS, id="all skip it"),
    ],
)
def test_calls_left_out_that_leave_the_scales_alike(one, other):
    assert list(GradScalerSkew().examine(run_of({0: one, 1: other}, count=9))) == []
