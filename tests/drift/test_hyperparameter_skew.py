"""DDP405 on literal events."""

import itertools
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import msgspec
import numpy
import pytest
import torch
from ddpdoctor.checks.drift.hyperparameter_skew import HyperparameterSkew
from ddpdoctor.checks.drift.optimizer_state_drift import OptimizerStateDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from recordings import START, make_run, site, steps
from replicas import LINE, OTHER, STEP, digests, run_of

from ddpdoctor.events import (
    EpochBegan,
    Hyperparameters,
    Loaded,
    Logged,
    OptimizerSeen,
    OptionsRead,
    Place,
    SchedulerStep,
    Statement,
    StepDone,
    decode,
    encode,
)
from ddpdoctor.events.amp import next_told_at, told_at
from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.source.call_resolver import places_of
from ddpdoctor.probe.source.parameter_writes import item_set_in_frames
from ddpdoctor.probe.training import optimizers
from ddpdoctor.probe.watchers.gradients.hyperparameters import HyperparameterWatch, _values
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Steps

LOG = 77


def rate(step, lr, **options):
    return Hyperparameters(at=0, optimizer=0, step=step, groups=({"lr": lr, **options},), site=STEP)


def scheduled(kind="StepLR"):
    return SchedulerStep(at=0, kind=kind, step=1, call=0, site=LINE)


def test_equal_values():
    run = run_of({n: [rate(0, 0.1), rate(2, 0.05)] for n in range(2)})
    assert list(HyperparameterSkew().examine(run)) == []


@pytest.mark.parametrize(
    ("late", "read", "told"),
    [
        (rate(168, 0.05), 144, False),  # light steps: nobody looked at step 160
        (rate(168, 0.02), 144, True),
        (None, 200, True),
        (None, 144, False),  # the run ended before it looked again
    ],
)
def test_ranks_that_read_their_options_at_other_steps(late, read, told):
    other = [msgspec.structs.replace(late, read=read)] if late else []
    ranks = {
        0: [rate(0, 0.1), msgspec.structs.replace(rate(160, 0.05), read=152), *steps(200)],
        1: [rate(0, 0.1), *other, *steps(200)],
    }
    for number, last in ((0, 200), (1, 200 if late else read)):
        ranks[number].append(OptionsRead(at=0, optimizer=0, step=last))
    found = list(HyperparameterSkew().examine(run_of(ranks)))
    assert bool(found) is told
    if late and told:
        assert "at step 168: 0.05 on rank 0, 0.02 on rank 1" in found[0].summary


@pytest.mark.parametrize(
    ("pieces", "told"),
    [((0, 1), True), ((), False), ((0,), False), ((0, 1, 2), False)],  # not of all is it known
)
def test_ranks_that_hold_pieces_of_the_same_parameters(pieces, told):
    line = site(STEP, "train.py", 9, "optimizer.step()")
    seen = OptimizerSeen(at=0, optimizer=0, kind="AdamW", site=STEP, pieces=pieces)
    run = make_run({n: [line, seen, rate(0, 0.1), rate(2, 0.1 + n), *steps(5)] for n in range(2)})
    found = list(HyperparameterSkew().examine(run))
    assert [(f.ranks, f.steps.first) for f in found] == [((0, 1), 2)] * told


def test_pieces_are_known_by_their_one_mesh():
    class Mesh:
        mesh = torch.tensor([[0, 2], [1, 3]])

    def pieces(*meshes):
        held = [SimpleNamespace(device_mesh=m) if m else SimpleNamespace() for m in meshes]
        return optimizers.pieces(SimpleNamespace(param_groups=[{"params": held}]))

    mesh = Mesh()
    assert pieces(mesh, mesh) == (0, 1, 2, 3)
    assert pieces(mesh, None) == pieces(mesh, Mesh()) == pieces(None) == pieces() == ()


def test_values_that_were_sent_as_float32():
    sent = 0.10000000149011612
    betas = {"betas": "0.9, 0.999"}, {"betas": "0.8999999761581421, 0.9990000128746033"}
    run = run_of({0: [rate(0, 0.1, **betas[0])], 1: [rate(0, sent, **betas[1])]})
    assert list(HyperparameterSkew().examine(run)) == []
    run = run_of({0: [rate(0, 0.1, mode="min")], 1: [rate(0, 0.1000001, mode="max")]})
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.subjects == ("lr", "mode")


def test_a_scheduler_that_one_rank_steps_at_a_line_more():
    again = SchedulerStep(at=0, kind="StepLR", step=1, call=0, site=STEP)
    run = run_of(
        {0: [rate(0, 0.1), scheduled(), rate(2, 0.09)],
         1: [rate(0, 0.1), scheduled(), again, rate(2, 0.05)]}
    )  # fmt: skip
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.location == run.ranks[1].location(STEP)


def test_a_scheduler_on_one_rank():
    run = run_of(
        {0: [rate(0, 0.1), scheduled(), rate(2, 0.05)], 1: [rate(0, 0.1)], 2: [rate(0, 0.1)]}
    )
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.ranks, finding.steps.first) == ((0,), 2)
    assert finding.location.line == 33


def test_plateau_on_local_losses():
    plateau = scheduled("ReduceLROnPlateau")
    run = run_of({0: [rate(0, 0.1), plateau, rate(2, 0.05)], 1: [rate(0, 0.1), plateau]})
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.ranks == (0, 1)


def test_plateau_on_a_loss_that_a_framework_was_given_by_name():
    logged = Logged(name="val_loss", site=LOG, by="lightning.pytorch.core.module")
    plateau = msgspec.structs.replace(scheduled("ReduceLROnPlateau"), metric=0.5, logged=logged)
    line = site(LOG, "train.py", 9, 'self.log("val_loss", loss)')
    run = run_of({0: [line, rate(0, 0.1), plateau, rate(2, 0.05)], 1: [rate(0, 0.1), plateau]})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.rule, finding.location.line) == ("rank-local-metric", 9)
    assert finding.fix == '`self.log("val_loss", ..., sync_dist=True)`'


def test_options_set_by_rank_point_at_the_step():
    run = run_of({n: [rate(0, 0.1, weight_decay=0.1 * n)] for n in range(2)})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.subjects, finding.location.line) == (("weight_decay",), 40)


def test_a_rank_that_failed_never_had_what_others_have_since():
    every = [rate(step, 0.1 * (step + 1)) for step in range(4)]
    ranks = {0: [*every, rate(4, 0.5), *steps(5, site=STEP)[4:]], 1: every}
    assert list(HyperparameterSkew().examine(run_of(ranks))) == []
    begun = {0: ranks[0], 1: [*every, rate(4, 0.6)]}
    (finding,) = HyperparameterSkew().examine(run_of(begun))
    assert finding.steps.first == 4, "it began that step, and did not end it"


def test_all_ranks_tell_at_the_same_steps():
    assert all(told_at(s) for s in range(128))
    assert sum(told_at(s) for s in range(1_000_000)) < 3000
    for step in (0, 5, 126, 127, 128, 130, 255, 256, 1000, 4095, 5000):
        assert next_told_at(step) == next(n for n in itertools.count(step + 1) if told_at(n))


def test_left_out_where_parameters_are_averaged():
    run = run_of({n: [rate(0, 0.1 + n)] for n in range(2)}, left_out="local SGD")
    assert list(HyperparameterSkew().examine(run)) == []


def test_an_option_set_by_hand_points_at_the_line_that_sets_it():
    ends = [StepDone(at=0, optimizer=0, step=9, site=STEP, wall_s=0.1)]
    by_hand = Hyperparameters(
        at=0, optimizer=0, step=4, groups=({"lr": 0.1, "weight_decay": 0.5},), site=STEP,
        set_sites={"weight_decay": LINE},
    )  # fmt: skip
    start = rate(0, 0.1, weight_decay=0.0)
    run = run_of({0: [start, *ends], 1: [start, by_hand, *ends], 2: [start, *ends]})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.ranks, finding.location.line) == ((1,), 33)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (4, 9, 6)


def head(text, line=30):
    return Statement(line=line, text=text)


ON_ZERO = head("if rank == 0:")
LOGS = head("if log is not None:", 31)
FIRST = rate(0, 0.5)


def set_here(step, lr, *inside, calls=()):
    """A rate that the program sets at `LINE`, with these statements around it, and those calls."""
    places = Place(LINE, inside), *(Place(OTHER, around) for around in calls)
    return msgspec.structs.replace(
        rate(step, lr), set_sites={"lr": LINE}, set_through={"lr": places}
    )


@pytest.mark.parametrize(
    ("setting", "other", "told"),
    [
        ([set_here(0, 0.1, ON_ZERO), rate(2, 0.2)], [FIRST], 30),
        ([set_here(0, 0.1, ON_ZERO)], [FIRST], 30),
        ([set_here(0, 0.1, head("if master_process:"))], [FIRST], 30),
        (
            [set_here(0, 0.1, head("if warm:"), calls=[(head("if log is not None:", 31),)])],
            [FIRST],
            31,
        ),
        ([set_here(0, 0.1, calls=[(head("past if rank:"),)])], [FIRST], 30),
        ([set_here(0, 0.1, calls=[()])], [FIRST], 0),  # nothing keeps the others from it
        ([set_here(0, 0.1, head("if loss > best:"))], [FIRST], 0),  # nor would it, for good
        ([set_here(0, 0.1, ON_ZERO)], [set_here(0, 0.4, ON_ZERO)], 0),
        ([set_here(0, 0.1, ON_ZERO), rate(2, 0.2)], [FIRST, rate(2, 0.7)], 0),
        ([set_here(0, 0.1, ON_ZERO), scheduled(), rate(2, 0.2)], [FIRST, scheduled()], 0),
    ],
)
def test_a_rate_that_one_rank_alone_sets(setting, other, told):
    run = run_of({0: setting, 1: other})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.rule == "set-on-some-ranks") is bool(told)
    if told:
        assert (finding.ranks, finding.location.line) == ((1,), 33)
        assert [r.location.line for r in finding.related] == [told, 40]


def test_how_to_set_it_on_every_rank():
    fixes = []
    for first in (
        set_here(0, 0.1, head("if step % 9 == 0 and rank == 0:")),
        set_here(0, 0.1, calls=[(ON_ZERO,)]),
    ):
        (finding,) = HyperparameterSkew().examine(run_of({0: [first], 1: [rate(0, 0.5)]}))
        fixes.append(finding.fix)
    assert "under `if step % 9 == 0:`, without `rank == 0`" in fixes[0]
    assert "run `another_line()` on every rank: move it out of `if rank == 0:`" in fixes[1]


def test_the_calls_that_lead_to_a_line_are_known():
    def set_rate(groups):
        groups[0]["lr"] = 0.5

    def helper(groups):
        set_rate(groups)

    def loop(rank=0):
        if rank == 0:
            helper([{}])
        return item_set_in_frames(sys._getframe(), lambda c: c.co_filename == __file__, "lr")

    found = loop()
    lines = [(one.code, one.line - one.code.co_firstlineno) for one in (found, *found.through)]
    assert lines == [(set_rate.__code__, 1), (helper.__code__, 1), (loop.__code__, 2)]
    told = []
    places = places_of(Sites(told.append), found)
    assert [event.line for event in told] == [one.line for one in (found, *found.through)]
    assert [[s.text for s in place.inside] for place in places] == [[], [], ["if rank == 0:"]]


def test_a_rate_set_by_hand_beside_a_scheduler_that_all_ranks_step():
    by_hand = Hyperparameters(
        at=0, optimizer=0, step=3, groups=({"lr": 0.05},), site=STEP, set_sites={"lr": STEP}
    )
    for others, line in (([scheduled()], 40), ([scheduled(), scheduled()], 33)):
        run = run_of({0: [rate(0, 0.1), *others], 1: [rate(0, 0.1), scheduled(), by_hand]})
        (finding,) = HyperparameterSkew().examine(run)
        assert finding.location.line == line


def test_steps_end_where_the_values_agree_again():
    other = rate(4, 0.2), rate(6, 0.3)
    run = run_of({0: [rate(0, 0.1), *other], 1: [rate(0, 0.1), rate(6, 0.3)]})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (4, 5, 2)


def test_of_a_long_run_not_every_step_is_looked_at():
    run = run_of(
        {n: [rate(0, 0.1), *(rate(s, 0.1 * n) for s in (160,))] for n in range(2)}, count=190
    )
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.steps == Steps(160, 184, 4, compared=4)


def test_the_line_that_sets_an_item_is_found_in_what_the_loop_calls():
    def set_rate(groups):
        for group in groups:
            group["lr"] *= 0.5

    def loop():
        set_rate([{"lr": 1.0}])
        return item_set_in_frames(sys._getframe(), lambda code: code is loop.__code__, "lr")

    assert loop() is None  # what is not the user's is not entered
    mine = (loop.__code__, set_rate.__code__)

    def again():
        set_rate([{"lr": 1.0}])
        return item_set_in_frames(
            sys._getframe(), lambda code: code in (*mine, again.__code__), "lr"
        )

    found = again()
    assert found.line == set_rate.__code__.co_firstlineno + 2


def set_in(function, *args, values=()):
    """The line of the function, counted from its first, that is found to have set the rate."""
    groups = [{"lr": 1.0}]
    found = function(
        groups, lambda: item_set_in_frames(
            sys._getframe(1), lambda code: code is function.__code__, "lr", values
        ), *args
    )  # fmt: skip
    return found and found.line - function.__code__.co_firstlineno


def test_of_several_lines_that_may_have_set_it_only_one_that_ran():
    def branches(groups, found, rank):
        if rank == 0:
            groups[0]["lr"] = 0.5
        elif rank == 1:
            groups[0]["lr"] = 0.25
        return found()

    def begun(groups, found):
        if groups:
            groups[0]["lr"] = 0.5
        groups[0]["lr"] = 0.25
        return found()

    def later(groups, found):
        for _ in range(2):
            groups[0]["lr"] *= 0.5
            at = found()
            if at is None:
                groups[0]["lr"] = 0.1
        return at

    assert set_in(branches, 1) is None
    assert [set_in(branches, n, values=[v]) for n, v in ((0, 0.5), (1, 0.25))] == [2, 4]
    assert (set_in(begun), set_in(later)) == (3, 2)


def test_options_that_differ_from_the_first_step_point_at_the_optimizer():
    made = OptimizerSeen(at=0, optimizer=0, kind="AdamW", site=LINE)
    run = run_of({n: [made, rate(0, 0.1, weight_decay=0.1 * n)] for n in range(2)})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.location.line, finding.related[0].location.line) == (33, 40)
    later = [made, rate(0, 0.1)], [made, rate(0, 0.1), rate(2, 0.2)]
    (finding,) = HyperparameterSkew().examine(run_of(dict(enumerate(later))))
    assert finding.location.line == 40


@pytest.mark.parametrize(
    "later",
    [
        SchedulerStep(at=9, kind="SWALR", step=1, call=0, site=STEP),
        SchedulerStep(at=1, kind="StepLR", step=1, call=0, site=STEP, optimizer=1),
    ],
)
def test_a_scheduler_that_cannot_have_set_what_differs(later):
    made = OptimizerSeen(at=2, optimizer=0, kind="SGD", site=LINE)
    rates = [msgspec.structs.replace(rate(0, lr), at=2) for lr in (0.1, 0.2)]
    run = run_of({n: [made, rates[n], later] for n in range(2)})
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.location == run.ranks[0].location(LINE)


def test_an_option_that_is_set_before_the_first_step_was_changed_since_it_was_made(monkeypatch):
    monkeypatch.setattr(HyperparameterWatch, "current", HyperparameterWatch())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    HyperparameterWatch.current._made(None, optimizer, None, None)
    changes = []

    def look(recorder, before, now):
        changes.append((before[0]["lr"], now[0]["lr"]))
        return {}

    monkeypatch.setattr(HyperparameterWatch.current, "_set_through", look)
    optimizer.param_groups[0]["lr"] = 0.05
    told = []
    known = SimpleNamespace(notes={}, number=0)
    step = SimpleNamespace(optimizer=lambda: optimizer, known=known, number=0, site=STEP)
    HyperparameterWatch.current._step_due(SimpleNamespace(emit=told.append), step)
    assert changes == [(0.1, 0.05)]
    assert told[0].groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("initial", "rule", "line"),
    [((0.1,), "unequal-schedules", 33), (None, "unequal-at-start", None)],
)
def test_a_scheduler_that_was_made_differently(initial, rule, line):
    def first(rank):
        told = rate(0, 0.1 + 0.01 * rank)
        begin = initial or (0.1 + 0.01 * rank,)
        return msgspec.structs.replace(
            told, scheduler="LambdaLR", scheduler_site=LINE, initial=begin
        )

    made = OptimizerSeen(at=0, optimizer=0, kind="AdamW", site=OTHER)
    (finding,) = HyperparameterSkew().examine(run_of({n: [made, first(n)] for n in range(2)}))
    assert finding.rule == rule
    assert line is None or finding.location.line == line


def test_schedulers_are_spoken_of_where_one_stepped():
    by_hand, stepped = rate(2, 0.05), [scheduled(), rate(2, 0.05)]
    for told, rule in (([by_hand], "unknown-line"), (stepped, "scheduler-on-some-ranks")):
        run = run_of({0: [rate(0, 0.1), *told], 1: [rate(0, 0.1)]})
        (finding,) = HyperparameterSkew().examine(run)
        assert finding.rule == rule


@pytest.mark.parametrize(
    ("skew", "drift", "explained"),
    [
        (5, 6, True),
        (5, 5, False),
        (0, 1, True),
        (352, 352, True),
        (352, 349, True),
        (352, 343, False),
    ],
)
def test_copies_that_drift_after_it_are_its_consequence(skew, drift, explained):
    mine = HyperparameterSkew().finding(
        summary="options differ", cause="", fix="", steps=Steps.of([skew])
    )
    other = ParameterDrift().finding(
        summary="copies differ", cause="", fix="", steps=Steps.of([drift])
    )
    assert HyperparameterSkew().explains(mine, other) is explained
    mine, other = (msgspec.structs.replace(f, optimizers=(n,)) for n, f in enumerate((mine, other)))
    assert not HyperparameterSkew().explains(mine, other), "another optimizer steps them"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (0.5, 0.5),
        (3, 3),
        (True, True),
        (1 << 70, float(1 << 70)),
        (float("nan"), "nan"),
        (Decimal("0.1"), 0.1),
        (Fraction(1, 4), 0.25),
        (numpy.float64(0.5), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array(0.5), 0.5),
        (numpy.array([0.5, 0.25]), "0.5, 0.25"),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3], requires_grad=False), 3),
        ((numpy.float64(0.9), torch.tensor(0.5)), "0.9, 0.5"),
        (["a", 1], "a, 1"),
        ((None, 0.5), "None, 0.5"),
        ([torch.empty(5), torch.empty(5)], None),
        ([0.5, object()], None),
        (torch.ones(9), None),
        (numpy.ones(9), None),
        (object(), None),
        (1j, None),
    ],
)  # fmt: skip
def test_numbers_of_any_kind_are_told(given, told):
    values = _values({"params": [], "lr": given})
    assert values == ({} if told is None else {"lr": told})
    event = Hyperparameters(at=0, optimizer=0, step=0, groups=(values,))
    assert decode(encode(event)) == event
    assert all(type(v) in (float, int, bool, str) for v in values.values())


@pytest.mark.parametrize(("first", "told"), [(2, False), (1, True)])
def test_steps_of_one_number_are_others_once_a_rank_has_skipped_one(first, told):
    ranks = {
        n: [rate(0, 0.1), rate(first + n, 0.05),
            digests("parameters", {k: [1, 2, 3, 4] for k in range(4)},
                    backwards=tuple(k + 1 + n * (k > 1) for k in range(4)))]
        for n in range(2)
    }  # fmt: skip
    found = list(HyperparameterSkew().examine(run_of(ranks)))
    assert [f.steps.first for f in found] == ([first] if told else [])


def by_hand(*changes):
    """A rate that a loop sets at the top of each of its rounds."""
    return [
        msgspec.structs.replace(rate(step, 0.1 / (n + 1)), set_sites={"lr": LINE})
        for n, step in enumerate(changes)
    ]


@pytest.mark.parametrize(("mine", "theirs", "early"), [
    ((0, 6, 12, 18), (0, 4, 9, 13, 17), (1,)),
    ((0, 6), (0, 4), ()),  # two values may well be the same
    ((0, 6, 12, 18), (0, 6, 12, 18), ()),
])  # fmt: skip
def test_a_schedule_of_rounds_that_have_other_numbers_of_steps(mine, theirs, early):
    run = run_of({0: by_hand(*mine), 1: by_hand(*theirs)}, count=20)
    found = list(HyperparameterSkew().examine(run))
    assert bool(found) is (mine != theirs)
    for finding in found:
        assert finding.location.line == 33
        assert finding.evidence.get("the_same_values_first_on_ranks", []) == list(early)
        left = RankExitedEarly().finding(ranks=(1,), summary="s", cause="c", fix="f")
        assert RankExitedEarly().explains(left, finding) is bool(early)


@pytest.mark.parametrize(("epochs", "rule"), [
    ((0, 6, 12, 18), "decided-per-rank"),
    ((0, 5, 10, 15), "different-rounds"),
])  # fmt: skip
def test_a_rate_that_each_rank_lowers_in_an_epoch_of_its_own(epochs, rule):
    def begun(steps):
        made = {"at": 0, "loader": 0, "site": LINE}
        return [EpochBegan(epoch=n, step=step, **made) for n, step in enumerate(steps)]

    mine = [*begun((0, 6, 12, 18)), *by_hand(0, 6, 12, 18)]
    theirs = [*begun(epochs), *by_hand(0, 6, 11, 16)]
    (finding,) = HyperparameterSkew().examine(run_of({0: mine, 1: theirs}, count=20))
    assert finding.rule == rule


@pytest.mark.parametrize(("lacking", "since", "sooner"), [
    ((5,), 0, [1]),  # the step of one batch was left out
    ((5, 6), 0, [1]),
    ((5,), 1, []),  # and values of its own are set
    ((17,), 0, []),  # two values may well be the same
])  # fmt: skip
def test_a_schedule_of_batches_of_which_a_rank_left_one_out(lacking, since, sooner):
    every = [0.1 / (n + 1) for n in range(20)]
    mine = [rate(n, value) for n, value in enumerate(every)]
    rest = [v for n, v in enumerate(every) if n not in lacking]
    theirs = [rate(n, v + (since * 0.01 if n > 5 else 0)) for n, v in enumerate(rest)]
    run = run_of({0: mine, 1: theirs}, count=19)
    (skew,) = HyperparameterSkew().examine(run)
    assert skew.evidence.get("the_same_values_but_for_a_few_on_ranks", []) == sooner
    for check in (CollectiveMismatch(), RankExitedEarly()):
        for by in ([1], [0], None):
            evidence = {"took_no_step_for_a_batch": by} if by else {}
            left = check.finding(ranks=(2,), summary="s", cause="c", fix="f", evidence=evidence)
            assert check.explains(left, skew) is (by == [1] == sooner)


def test_other_values_are_no_schedule_of_rounds():
    slower = [msgspec.structs.replace(e, groups=({"lr": 0.2},)) for e in by_hand(0, 4, 9)[2:]]
    run = run_of({0: by_hand(0, 6, 12, 18), 1: [*by_hand(0, 4), *slower]}, count=20)
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.rule == "set-per-rank"


def load(what, site=LINE):
    return Loaded(at=START, what=what, model=0, step=0, site=site)


@pytest.mark.parametrize(("what", "step"), [("optimizer", 0), ("scheduler", 2)])
def test_a_state_that_one_rank_loads_sets_its_rate(what, step):
    stepped = SchedulerStep(at=0, kind="CosineAnnealingLR", step=1, call=0, site=STEP)
    rates = [*([rate(0, 0.1)] if step else []), stepped]
    run = run_of({0: [load(what), *rates, rate(step, 0.05)], 1: [*rates, rate(step, 0.1)]})
    (finding,) = HyperparameterSkew().examine(run)
    assert (finding.ranks, finding.location.line) == ((0,), 33)
    assert finding.rule == "load-on-some-ranks"


def test_a_load_after_which_the_rates_were_equal_does_not_set_them():
    done = StepDone(at=0, optimizer=0, step=0, site=STEP, wall_s=0.1)
    run = run_of({n: [*[load("optimizer")] * n, rate(0, 0.1), done, scheduled("StepLR"),
                      rate(1, 0.1 * (n + 1))] for n in range(2)})  # fmt: skip
    (finding,) = HyperparameterSkew().examine(run)
    assert finding.rule == "unequal-schedules"


def test_a_resume_of_all_on_one_rank_is_one_fault():
    states = [load("weights"), load("optimizer", OTHER), load("scheduler", STEP)]
    weights = [digests("parameters", {0: [1, 1, 1, n]}) for n in range(2)]
    run = run_of({n: [*states[: 3 * n], rate(0, 0.1 + n), weights[n]] for n in range(2)})
    (finding,) = diagnose(run, [HyperparameterSkew(), ParameterDrift()]).findings
    assert (finding.code, finding.location.line) == ("DDP402", 33)
    assert [c.code for c in finding.consequences] == ["DDP405"]


@pytest.mark.parametrize(("loaded", "head", "follows"), [
    (1, "DDP404", "DDP405"),
    (2, "DDP405", "DDP404"),  # every rank loads a state
])  # fmt: skip
def test_rates_that_come_with_a_state_follow_from_its_load(loaded, head, follows):
    checks = [HyperparameterSkew(), ParameterDrift(), OptimizerStateDrift()]
    ranks = {
        n: [*[load("optimizer", (LINE, OTHER)[n])] * (n < loaded), rate(0, 0.1 + n),
            digests("parameters", {0: [1, 1, 1, 1], 1: [1, 1, 1, n]}),
            digests("state:step", {1: [5, 5, 5, 5 + n], 2: [6, 6, 6, 6 + n]})]
        for n in range(2)
    }  # fmt: skip
    (finding,) = diagnose(run_of(ranks), checks).findings
    assert finding.code == head
    assert {c.code for c in finding.consequences} == {follows, "DDP402"}
