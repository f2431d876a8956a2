"""DDP413 on literal events."""

import functools

import pytest
import torch
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from ddpdoctor.checks.drift.schedule_length_mismatch import ScheduleLengthMismatch
from readers import loader, prologue
from recordings import make_run, site

from ddpdoctor.events import Hyperparameters, ScheduleEnded, SchedulerStep, StepDone, decode
from ddpdoctor.probe.recording import hooks, patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.gradients.hyperparameters import HyperparameterWatch
from ddpdoctor.probe.watchers.gradients.schedules import PLANS, ScheduleLengths
from ddpdoctor.storage.run_folder import EventWriter

MADE, STEPPED = 11, 12
LINES = [
    site(MADE, "train.py", 15, "scheduler = CosineAnnealingLR(optimizer, total)"),
    site(STEPPED, "train.py", 30, "scheduler.step()"),
]


def schedule(planned, calls, *, steps=None, kind="CosineAnnealingLR", counted=None, **fields):
    return ScheduleEnded(
        at=0,
        kind=kind,
        planned=planned,
        calls=calls,
        counted=calls if counted is None else counted,
        optimizer=0,
        steps=calls if steps is None else steps,
        site=MADE,
        step_site=STEPPED,
        **{"rate": 0.05, **fields},
    )


def run_of(
    event, *, micro=1, epochs=3, length=80, exhausted=True, world=2, divided=True, says_so=True,
    counts=False, **more,
):  # fmt: skip
    """Each rank takes 40 of 80 samples in each epoch, in 10 batches of 4 (of 20 for one process).

    Args:
        micro: backwards per step.
        says_so: the sampler knows among how many ranks it divides.
        counts: the program takes as many batches as there are, and never asks for one more.
        more: of `make_run`.
    """
    share = length // world if divided else length
    batches = -(-share // 4)
    sharing = {"replicas": world, "distributed": True} if divided and says_so else {}

    def events(rank):
        indices = list(range(rank, length, world)) if divided else list(range(length))
        given = loader(0, [indices] * epochs, length=length, trains=False, batches=batches,
                       exhausted=exhausted and not counts, ends={"backwards": batches},
                       began={"batches": batches} if counts else None, **sharing)  # fmt: skip
        steps = [
            StepDone(at=0, optimizer=0, step=n, site=4, wall_s=0.1, backwards=micro)
            for n in range(event.steps)
        ]
        return [*prologue(world), *LINES, *given, *steps, event]

    return make_run({n: events(n) for n in range(world)}, **more)


def judged(event, **fields):
    return list(ScheduleLengthMismatch().examine(run_of(event, **fields)))


def test_a_plan_for_a_scheduler_that_a_framework_steps():
    (finding,) = judged(schedule(60, 30, by="lightning.pytorch.trainer.trainer"), counts=True)
    assert "estimated_stepping_batches" in finding.fix


@pytest.mark.parametrize("counts", [False, True])
def test_a_plan_of_the_whole_data_set(counts):
    (finding,) = judged(schedule(60, 30), counts=counts)
    assert finding.rule == "counts-undivided-batches"
    assert finding.ranks == (0, 1)
    assert (finding.location.line, finding.related[0].location.line) == (15, 30)


def test_rounding_in_each_epoch():
    # 83 samples: 21 batches for one process, 11 for each of two ranks
    (finding,) = judged(schedule(63, 33), length=83)
    assert "about a factor of 2" in finding.summary


def test_a_plan_of_the_micro_batches():
    (finding,) = judged(schedule(30, 15, may_stop=False), micro=2)
    assert finding.rule == "counts-micro-batches"


def test_a_plan_of_all_micro_batches_of_the_whole_data_set():
    (finding,) = judged(schedule(60, 15), micro=2)
    assert finding.rule == "counts-undivided-batches"
    assert "a factor of 4" in finding.summary


@pytest.mark.parametrize("micro", [2, 4])
def test_stepped_after_each_backward(micro):
    steps = 32 // micro
    (finding,) = judged(schedule(steps, 32, steps=steps), micro=micro)
    assert finding.rule == "stepped-too-often"
    assert "optimizer.step" in finding.fix


def test_stepped_once_for_each_rank():
    (finding,) = judged(schedule(30, 60, steps=30))
    assert (finding.rule, "for each of the 2 ranks" in finding.cause) == ("stepped-too-often", True)
    assert "Accelerate" not in finding.cause and "once per optimizer step" in finding.fix
    (finding,) = judged(schedule(30, 60, steps=30, by="accelerate.scheduler"))
    assert "Accelerate" in finding.cause and "`accelerator.prepare`" in finding.fix


@pytest.mark.parametrize(("micro", "by", "divided", "rule"), [
    (1, "accelerate.scheduler", False, "loader-not-prepared"),
    (4, "accelerate.scheduler", False, "loader-not-prepared"),
    (1, "", False, "stepped-too-often"),  # the program's own steps
    (1, "accelerate.scheduler", True, "stepped-too-often"),
])  # fmt: skip
def test_a_plan_of_a_loader_that_accelerate_does_not_divide(micro, by, divided, rule):
    """Of 20 batches in each of 3 epochs, or of 10 that each rank has of them."""
    steps = (30 if divided else 60) // micro
    event = schedule(steps, 2 * steps, steps=steps, by=by)
    (finding,) = judged(event, micro=micro, divided=divided)
    assert finding.rule == rule
    words = dict.fromkeys(("summary", "cause", "fix"), "")
    cause = SamplerMissing().finding(rule="no-distributed-sampler", ranks=(0, 1), **words)
    (effect,) = [e for e in SamplerMissing().effects if finding.check in e.checks]
    assert effect.covers(cause, finding) is (rule == "loader-not-prepared")


def test_a_scheduler_that_steps_for_each_rank_and_a_plan_for_as_many():
    assert judged(schedule(60, 60, steps=30)) == []
    (finding,) = judged(schedule(120, 60, steps=30))
    assert finding.rule == "counts-undivided-batches"
    assert "after 30 of 60 steps" in finding.cause


def test_batches_divided_by_a_sampler_that_does_not_say_so():
    (finding,) = judged(schedule(60, 30), says_so=False)
    assert finding.rule == "counts-undivided-batches"
    assert judged(schedule(60, 30), divided=False) == []


def test_divided_by_the_ranks_twice():
    (finding,) = judged(schedule(15, 30, kind="PolynomialLR", rate=0.0))
    assert finding.rule == "divided-twice"
    (finding,) = judged(schedule(15, 30))
    assert "rises again" in finding.cause


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (schedule(30, 30), {}),  # as planned
        (schedule(60, 60), {"epochs": 6}),
        (schedule(15, 15), {"micro": 2}),
        (schedule(60, 30, may_stop=True), {}),  # it may have stopped early
        (schedule(30, 15, may_stop=True), {"micro": 2}),
        (schedule(60, 30), {"exhausted": False}),
        (schedule(60, 30), {"ended": {1: 1}}),  # failed
        (schedule(60, 30), {"ended": {0: -2}}),  # killed
        (schedule(60, 30, counted=90), {}),  # resumed
        (schedule(60, 30, lengths=(10,)), {}),  # it knew the length of its share
        (schedule(90, 30), {}),  # another factor
        (schedule(6, 3, steps=30), {}),  # once per epoch
        (schedule(20, 40), {"epochs": 4}),  # a cosine of two epochs, repeated
        (schedule(15, 30, kind="LinearLR"), {}),  # down to a rate that is kept
        (schedule(60, 30), {"divided": False}),
        (schedule(2, 1), {"epochs": 1, "length": 8}),  # too few steps to tell
    ],
)
def test_plans_that_are_no_fault(event, fields):
    assert judged(event, **fields) == []


def test_what_is_not_judged():
    check = ScheduleLengthMismatch()
    assert check.unobserved(make_run({n: prologue(2) for n in range(2)}))
    assert check.unobserved(run_of(schedule(60, 30), ended={1: 1}))
    assert check.unobserved(run_of(schedule(60, 30))) is None


@pytest.fixture
def schedules(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = mine = Recorder(writer, tmp_path, "rank-0", {})
    hooks.forget()
    Optimizers.begin()
    HyperparameterWatch.begin()
    ScheduleLengths.begin()

    def ended():
        ScheduleLengths.current._leaving(mine, None)
        patching.restore()
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [e for e in map(decode, lines) if isinstance(e, ScheduleEnded)]

    yield ended
    patching.restore()
    recorder.current.recorder = None


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_what_is_recorded_of_a_schedule(schedules):
    rates, sgd = torch.optim.lr_scheduler, optimizer()
    data = torch.utils.data.DataLoader(range(6), batch_size=2)
    length = len(data)
    falling = rates.LinearLR(sgd, 1.0, 0.0, total_iters=4)
    rising = rates.LinearLR(sgd, total_iters=4)
    parts = [rates.LinearLR(sgd, total_iters=2), rates.CosineAnnealingLR(sgd, T_max=5)]
    warm = rates.SequentialLR(sgd, parts, milestones=[2])
    for _ in range(3):
        sgd.step()
        for each in (falling, rising, warm):
            each.step()
    first, second = schedules()
    assert (first.kind, first.planned, first.calls, first.counted) == ("LinearLR", 4, 3, 3)
    assert (second.kind, second.planned, second.calls) == ("SequentialLR", 7, 3)
    assert first.lengths == (length,)
    assert (first.may_stop, first.steps) == (False, 3)


def test_a_loop_that_may_be_left(schedules):
    sgd = optimizer()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=4)
    for n in range(9):
        sgd.step()
        cosine.step()
        if n == 2:
            break
    (event,) = schedules()
    assert event.may_stop


def test_a_schedule_that_goes_on_from_a_loaded_state(schedules):
    sgd = optimizer()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=9)
    cosine.load_state_dict({**cosine.state_dict(), "last_epoch": 5})
    sgd.step()
    cosine.step()
    (event,) = schedules()
    assert (event.calls, event.counted) == (1, 6)


def factor(step, num_warmup_steps, num_training_steps):
    return min(step / num_warmup_steps, num_training_steps - step)


class Plan:
    def __init__(self, **values):
        self.__dict__ |= values

    def __call__(self, step):
        return 1.0

    def scaled(self, total_steps, step):
        return step / total_steps


def closure(**values):
    total_steps, epoch_steps = values["total_steps"], values["epoch_steps"]
    return lambda step: (step % epoch_steps) / total_steps


@pytest.mark.parametrize(
    ("function", "planned"),
    [
        (functools.partial(factor, num_warmup_steps=4, num_training_steps=90), 90),
        (functools.partial(functools.partial(factor, num_warmup_steps=4), num_training_steps=9), 9),
        (functools.partial(Plan().scaled, 70), 70),
        (closure(total_steps=80, epoch_steps=20), 80),
        (Plan(max_steps=60, warmup_steps=6), 60),
        (Plan(max_steps=60, total_steps=70), 0),
        (Plan(steps_per_epoch=60), 0),
        (lambda step: 0.9**step, 0),
    ],
)
def test_the_length_that_a_function_was_planned_for(function, planned):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
    assert PLANS["LambdaLR"](scheduler) == planned


@pytest.mark.parametrize(
    ("times", "metrics", "kind", "told"),
    [
        (2, (0.5, 0.4, 0.45, 0.4), "ReduceLROnPlateau", True),
        (1, (0.5, 0.4, 0.45, 0.4), "ReduceLROnPlateau", False),
        (1, (0.5, 0.5, 0.5, 0.5), "ReduceLROnPlateau", False),
        (3, (0.5, 0.4, 0.45, 0.4), "ReduceLROnPlateau", False),
        (2, (0.5, 0.4), "ReduceLROnPlateau", False),
    ],
)
def test_patience_that_is_counted_once_for_each_rank(times, metrics, kind, told):
    calls = [(epoch, metric) for epoch, metric in enumerate(metrics) for _ in range(times)]
    steps = [
        SchedulerStep(
            at=n, kind=kind, step=8 * epoch, call=n, site=STEPPED, optimizer=0, metric=metric
        )
        for n, (epoch, metric) in enumerate(calls)
    ]
    run = make_run({rank: [*LINES, *steps] for rank in range(2)})
    found = list(ScheduleLengthMismatch().examine(run))
    assert [f.rule for f in found] == ["patience-counted-per-rank"] * told
    if told:
        assert found[0].location.line == 30


@pytest.mark.parametrize(
    ("times", "schedulers", "every", "planned", "told"),
    [
        pytest.param(2, 1, 8, None, True, id="not on record"),
        pytest.param(2, 1, 8, 0, True, id="no known length"),
        pytest.param(2, 1, 8, 5, True, id="planned for the epochs"),
        pytest.param(2, 1, 8, 10, False, id="planned for the calls"),
        pytest.param(1, 1, 8, None, False, id="once per epoch"),
        pytest.param(1, 2, 8, None, False, id="two schedulers"),
        pytest.param(2, 1, 1, None, False, id="in every optimizer step"),
    ],
)
def test_epochs_that_are_counted_once_for_each_rank(times, schedulers, every, planned, told):
    calls = [(epoch, n) for epoch in range(5) for n in range(schedulers) for _ in range(times)]
    steps = [
        SchedulerStep(
            at=n,
            kind="StepLR",
            step=every * epoch,
            call=n,
            site=STEPPED,
            optimizer=0,
            scheduler=scheduler,
        )
        for n, (epoch, scheduler) in enumerate(calls)
    ]
    plan = ScheduleEnded(
        at=99,
        kind="StepLR",
        planned=planned or 0,
        calls=len(steps),
        counted=len(steps),
        optimizer=0,
        steps=5 * every,
        site=STEPPED,
        step_site=STEPPED,
    )
    run = make_run({rank: [*LINES, *steps, *[plan] * (planned is not None)] for rank in range(2)})
    found = [f for f in ScheduleLengthMismatch().examine(run) if f.rule != "stepped-too-often"]
    assert [f.rule for f in found] == ["epochs-counted-per-rank"] * told
    if told:
        assert found[0].location.line == 30


@pytest.mark.parametrize(
    ("calls", "counted", "told"),
    [(60, 60, True), (30, 30, False), (60, 90, False), (90, 90, False)],
)
def test_a_schedule_without_a_length_that_counts_each_step_once_per_rank(calls, counted, told):
    event = schedule(
        0, calls, steps=30, counted=counted, kind="LambdaLR", by="accelerate.scheduler"
    )
    found = judged(event)
    assert [(f.rule, f.severity.value) for f in found] == [
        ("steps-counted-per-rank", "note")
    ] * told


@pytest.mark.parametrize(("rates", "told"), [((0.1,), False), ((0.1, 0.05), True), ((), True)])
def test_a_rate_that_never_changes_has_no_schedule(rates, told):
    event = schedule(0, 60, steps=30, kind="LambdaLR", by="accelerate.scheduler")
    read = [
        Hyperparameters(at=0, optimizer=0, step=n, groups=({"lr": r},)) for n, r in enumerate(rates)
    ]
    run = make_run({rank: [*LINES, *read, event] for rank in range(2)})
    assert len(list(ScheduleLengthMismatch().examine(run))) == told
