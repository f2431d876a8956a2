"""DDP512 on literal events."""

import sys
from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.data.metric_not_reduced import MetricNotReduced
from ddpdoctor.checks.drift.hyperparameter_skew import HyperparameterSkew
from readers import loader, prologue
from recordings import make_run, site
from replicas import replica

from ddpdoctor.analysis.data import data_calls
from ddpdoctor.events import (
    CallBlock,
    CallRun,
    CallSite,
    ComparedValue,
    EndDecided,
    EpochBegan,
    Logged,
    MessageSize,
    MetricUsed,
    Place,
    RankExiting,
    ResultDropped,
    SaveDecided,
    SchedulerStep,
    Signature,
    TotalDivided,
    TotalReducedAgain,
    WeightsKept,
)
from ddpdoctor.probe.source.call_resolver import Scope, resolve
from ddpdoctor.probe.source.passthrough import dropped, returned_and_dropped

COMPARE, SAVE, VALIDATE, STEP, LEAVE = 11, 12, 13, 14, 15
LINES = [
    site(COMPARE, "train.py", 30, "if loss < best:"),
    site(SAVE, "train.py", 32, "torch.save(model.state_dict(), path)"),
    site(VALIDATE, "train.py", 25, "for x, y in held_out:"),
    site(STEP, "train.py", 33, "scheduler.step(loss)"),
    site(LEAVE, "train.py", 31, "break"),
]
TRAIN, HELD_OUT = 0, 1
OTHER_VALUES = [[0.9, 0.8, 0.85], [0.7, 0.75, 0.6]]


def value(step, number, *, after=HELD_OUT):
    return ComparedValue(at=0, name="loss", value=number, loader=after, step=step, site=COMPARE)


def saved(step, number):
    return SaveDecided(
        at=0, name="loss", value=number, step=step, compared=COMPARE, loader=HELD_OUT, site=SAVE
    )


def exchange(op, step):
    return [
        Signature(at=0, id=1, op=op, dtype="float32", shape=(1,), numel=1),
        CallBlock(at=0, id=1, codes=(1, 0)),
        CallRun(at=0, group=0, first=0, block=1, repeat=1, step=step, every=0),
    ]


def every_time(op):
    first, *others = (exchange(op, step) for step in (0, 4, 8))
    return [*first, *(run for _, _, run in others)]


def may_end(number):
    return EndDecided(
        at=0, name="loss", value=number, step=8, compared=COMPARE, loader=HELD_OUT, site=LEAVE
    )


def run_of(
    values=OTHER_VALUES, *, more=(), after=HELD_OUT, shared=True, saving=True, grad=False, ends=(),
    wrapped=True, calls=(),
):  # fmt: skip
    """Two ranks that evaluate after each epoch of 4 steps.

    Args:
        values: of the metric, by rank.
        more: events of rank 0.
        after: the loader with which the metric changes; shared: each rank evaluates its share.
        ends: the ranks that may leave the loop by it.
        calls: how many collectives each group had called when an evaluation began.
    """

    def events(rank):
        share = {"replicas": 2, "sampler_rank": rank, "distributed": True} if shared else {}
        train = loader(TRAIN, [[rank, 2 + rank]] * 3, replicas=2, sampler_rank=rank)
        held_out = loader(HELD_OUT, [[rank, 2 + rank]] * 3, trains=False, loop_site=VALIDATE,
                          ends={"grad_enabled": grad},
                          began={"step": [0, 4, 8], "calls": calls},
                          **share)  # fmt: skip
        mine = [value(4 * n + 4, v, after=after) for n, v in enumerate(values[rank])]
        decided = [saved(4, values[0][0])] if rank == 0 and saving else []
        decided += [may_end(values[rank][0])] if rank in ends else []
        begin = prologue(2, wrapped=wrapped)
        return [*begin, *LINES, *train, *held_out, *mine, *decided,
                *(more if rank == 0 else ())]  # fmt: skip

    return make_run({n: events(n) for n in range(2)})


def judged(run):
    """Without the note on evaluations that nobody puts together."""
    return [f for f in noted(run) if f.rule != "never-reduced"]


def noted(run):
    return list(MetricNotReduced().examine(run))


def test_a_file_is_saved_by_the_metric_of_one_rank():
    (finding,) = judged(run_of())
    assert (finding.rule, finding.ranks) == ("decides-what-is-saved", (0,))
    assert finding.location.line == 30
    assert [r.location.line for r in finding.related] == [25, 32]


def test_weights_are_kept_by_the_metric_of_each_rank():
    kept = WeightsKept(
        at=0, name="loss", value=0.9, step=4, compared=COMPARE, loader=HELD_OUT, site=LEAVE
    )
    (finding,) = judged(run_of(saving=False, more=[kept]))
    assert finding.summary.startswith(
        "rank 0 keeps the weights of a model by `loss`, which differs"
    )
    assert [r.location.line for r in finding.related] == [25, 31]
    (finding,) = judged(run_of(more=[kept]))
    assert [r.location.line for r in finding.related] == [25, 32], "saved as well"


def test_an_evaluation_with_gradients_on():
    """As of forces, which are gradients; what is decided by it tells what it is."""
    (finding,) = judged(run_of(grad=True))
    assert finding.rule == "decides-what-is-saved"


def test_a_metric_that_stays_the_same_on_one_rank():
    (finding,) = judged(run_of([[0.9, 0.8, 0.85], [0.7]]))
    assert finding.evidence["comparisons_in_which_they_differ"] == "3 of 3"


def test_a_rank_that_left_before_its_last_value_was_read():
    """Both have the same value each time, but rank 1 leaves the loop after the second one."""

    def events(rank):
        steps, read = [0, 4, 8][: 3 - rank], [rank, 2 + rank]
        share = {"replicas": 2, "sampler_rank": rank, "distributed": True}
        train = loader(TRAIN, [read] * len(steps), began={"step": steps}, **share)
        held_out = loader(HELD_OUT, [read] * 2, trains=False, loop_site=VALIDATE,
                          ends={"grad_enabled": False}, began={"step": [4, 8]},
                          **share)  # fmt: skip
        seen = [value(4, 0.9), *([value(8, 0.8)] if rank == 0 else [])]
        return [*prologue(2), *LINES, *train, *held_out, *seen, *([saved(8, 0.8)] * (rank == 0))]

    assert not judged(make_run({n: events(n) for n in range(2)}))


def test_shares_of_a_sampler_of_ones_own():
    """It does not say how many ranks there are, but the samples do that were read."""

    def events(rank, both):
        read = [0, 1, 2, 3] if both else [rank, 2 + rank]
        held_out = loader(HELD_OUT, [read] * 3, trains=False, length=4, loop_site=VALIDATE,
                          ends={"grad_enabled": False}, own_order=True)  # fmt: skip
        mine = [value(4 * n + 4, v) for n, v in enumerate(OTHER_VALUES[rank])]
        decided = [saved(4, OTHER_VALUES[0][0])] if rank == 0 else []
        return [*prologue(2), *LINES, *held_out, *mine, *decided]

    for both in (False, True):
        run = make_run({n: events(n, both) for n in range(2)})
        assert [f.rule for f in judged(run)] == ["decides-what-is-saved"] * (not both)
        assert bool(MetricNotReduced().unobserved(run)) is both


@pytest.mark.parametrize(
    "run",
    [
        {"values": [OTHER_VALUES[0]] * 2},  # reduced
        {"values": [OTHER_VALUES[0], [v + 1e-9 for v in OTHER_VALUES[0]]]},
        {"after": TRAIN},  # a training loss
        {"shared": False},  # each rank evaluates all
        {"saving": False},
        {"values": [[0.9, 0.8], [0.7, 0.8]]},  # differed once
        {"values": [[0.9, 0.8], []], "more": exchange("all_gather", 4)},  # known to one rank
        {"more": exchange("reduce", 4)},  # rank 0 has the sum
        {"more": exchange("all_gather_object", 8)},
    ],
)
def test_metrics_that_are_no_fault(run):
    assert judged(run_of(**run)) == []


def test_a_metric_whose_other_values_are_not_on_record():
    """It comes from the evaluation by the source, and no rank exchanges any value."""
    (finding,) = judged(run_of([[0.9, 0.8], []]))
    assert (finding.rule, finding.location.line) == ("decides-what-is-saved", 30)
    assert "2 of 4 samples" in finding.summary
    assert judged(run_of([[0.9, 0.8], []], more=exchange("all_reduce", 4))) == []


def test_a_metric_that_differs_in_all_its_values_on_record():
    """It stays what it is after the first evaluation; by the source it comes from the shares."""
    (finding,) = judged(run_of([[0.9], [0.7]]))
    assert (finding.rule, finding.location.line) == ("decides-what-is-saved", 30)
    assert judged(run_of([[0.9], [0.7]], more=exchange("all_reduce", 4))) == []
    assert judged(run_of([[0.9], [0.7]], saving=False)) == []
    assert judged(run_of([[0.9], [0.9]])) == []


def test_a_loop_that_each_rank_leaves_by_its_own_metric():
    (finding,) = judged(run_of(saving=False, ends=(0, 1)))
    assert (finding.rule, finding.severity.value) == ("decides-when-to-stop", "warning")
    assert (finding.location.line, finding.ranks) == (30, (0, 1))
    assert [r.location.line for r in finding.related] == [25, 31]


@pytest.mark.parametrize(
    "run",
    [
        {"values": [OTHER_VALUES[0]] * 2},
        {"shared": False},
        {"ends": (0,)},  # rank 1 leaves by something else
        {"wrapped": False},  # no rank waits for another one
        {"more": exchange("all_reduce", 4)},
        {"more": exchange("broadcast", 4)},  # rank 0 may decide for all
        {"more": exchange("broadcast_object_list", 8)},
    ],
)
def test_loops_that_ranks_leave_together(run):
    assert judged(run_of(**{"saving": False, "ends": (0, 1), **run})) == []


@pytest.mark.parametrize(
    "sent",
    [
        Signature(at=0, id=3, op="recv_object_list"),
        MessageSize(at=0, sends=False, peer=1, group=0, numel=2, dtype="float32", bytes=8, step=0,
                    site=SAVE),
    ],
)  # fmt: skip
def test_values_that_may_have_come_in_messages(sent):
    """At which steps messages were sent is not on record."""
    assert noted(run_of([[0.9, 0.8], []], more=[sent])) == []


def test_a_metric_that_differs_once_it_has_learned_something():
    (finding,) = judged(run_of([[0.9, 0.8], [0.9, 0.7]]))
    assert finding.evidence["comparisons_in_which_they_differ"] == "1 of 2"


def test_a_reduction_whose_result_is_not_used():
    (finding,) = judged(run_of(more=exchange("all_reduce", 8)))
    assert finding.rule == "decides-what-is-saved"
    values = [OTHER_VALUES[0], [0.0]]  # what only rank 0 works out, from the reduced sums
    assert judged(run_of(values, more=exchange("all_reduce", 8))) == []


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"saving": False}, True),
        ({"saving": False, "more": every_time("all_reduce")}, False),
        ({"saving": False, "more": exchange("barrier", 0)}, True),
        ({"saving": False, "shared": False}, False),
        ({"saving": False, "grad": True}, False),
    ],
)
def test_an_evaluation_of_shares_that_nobody_puts_together(run, told):
    found = noted(run_of(**run))
    assert [(f.rule, f.severity.value) for f in found] == [("never-reduced", "note")] * told
    if told:
        assert found[0].location.line == 25
        assert found[0].evidence["samples_read_by_rank"] == {0: 2, 1: 2}


def test_an_evaluation_that_is_put_together_at_some_times_only():
    """As one that is run before training, or after it, by another line."""
    (found,) = noted(run_of(saving=False, more=exchange("all_reduce", 0)))
    assert (found.rule, found.severity.value) == ("never-reduced", "note")
    assert "2 of 3 times exchange no values in it or after it by collectives or messages" in (
        found.summary
    )


@pytest.mark.parametrize(("before", "told"), [((), False), ((0, 0), False), ((0, 1), True)])
def test_only_what_follows_the_begin_of_the_evaluation_counts(before, told):
    """As of meters of training that are reduced after its last step, before the evaluation."""
    gathers = run_of(more=exchange("all_gather", 4), calls=before)
    assert [f.rule for f in judged(gathers)] == ["decides-what-is-saved"] * told
    ends = run_of(saving=False, ends=(0, 1), more=exchange("all_reduce", 4), calls=before)
    assert [f.rule for f in judged(ends)] == ["decides-when-to-stop"] * told


@pytest.mark.parametrize(("before", "told"), [(2, False), (3, True)])
def test_calls_of_a_block_that_recurs_before_and_after_an_evaluation(before, told):
    sums = Signature(at=0, id=1, op="all_reduce", dtype="float32", shape=(1,), numel=1)
    meets = Signature(at=0, id=2, op="barrier")
    block = CallBlock(at=0, id=1, codes=(2, 0, 1, 0))
    run = CallRun(at=0, group=0, first=1, block=1, repeat=1, step=4, every=0)
    called = run_of(saving=False, ends=(0, 1), more=[sums, meets, block, run], calls=(0, before))
    assert [f.rule for f in judged(called)] == ["decides-when-to-stop"] * told


@pytest.mark.parametrize("op", ["barrier", "broadcast", "DDP forward"])
def test_calls_that_reduce_nothing(op):
    assert len(judged(run_of(more=exchange(op, 4)))) == 1


def scheduled(values, *, more=(), logged=None):
    def events(rank):
        held_out = loader(HELD_OUT, [[rank, 2 + rank]] * 3, trains=False, replicas=2,
                          sampler_rank=rank, ends={"evaluated": 1})  # fmt: skip
        steps = [
            SchedulerStep(
                at=0,
                kind="ReduceLROnPlateau",
                step=4 * n,
                call=n,
                site=STEP,
                metric=v,
                logged=logged,
            )
            for n, v in enumerate(values[rank])
        ]
        return [*prologue(2), *LINES, *held_out, *steps, *more]

    return make_run({n: events(n) for n in range(2)})


def test_a_schedule_that_follows_the_metric_of_each_rank():
    (finding,) = judged(scheduled(OTHER_VALUES))
    assert (finding.rule, finding.ranks) == ("decides-the-schedule", (0, 1))
    assert finding.location.line == 33


def test_a_metric_that_a_framework_was_given_by_name():
    logged = Logged(name="val_loss", site=SAVE, by="lightning.pytorch.core.module")
    (finding,) = judged(scheduled(OTHER_VALUES, logged=logged))
    assert finding.location.line != 33
    assert finding.related[0].location.line == 33
    assert finding.fix == '`self.log("val_loss", ..., sync_dist=True)`'


def used(
    values,
    *,
    kind="ModelCheckpoint",
    name="val_loss",
    where=SAVE,
    by="lightning.pytorch.core.module",
):
    logged = Logged(name=name, site=where, by=by)
    return [
        MetricUsed(at=0, kind=kind, step=4 * n, call=n, site=STEP, metric=v, logged=logged)
        for n, v in enumerate(values)
    ]


def decided(values, *others):
    """Two ranks whose framework decides by a metric of each."""

    def events(rank):
        held_out = loader(HELD_OUT, [[rank, 2 + rank]] * 3, trains=False, replicas=2,
                          sampler_rank=rank, ends={"evaluated": 1})  # fmt: skip
        return [*prologue(2), *LINES, *held_out, *used(values[rank]), *others]

    return make_run({n: events(n) for n in range(2)})


def test_a_checkpoint_that_a_framework_chooses():
    (finding,) = judged(decided(OTHER_VALUES))
    assert (finding.rule, finding.location.line) == ("decides-what-is-saved", 32)
    assert finding.related[-1].location.line == 33
    assert finding.fix == '`self.log("val_loss", ..., sync_dist=True)`'
    equal = used([0.5, 0.6, 0.7], name="val_acc", where=COMPARE)
    assert len(judged(decided(OTHER_VALUES, *equal))) == 1


def test_an_end_of_the_training_that_a_framework_chooses():
    def events(rank):
        held_out = loader(HELD_OUT, [[rank, 2 + rank]] * 3, trains=False, replicas=2,
                          sampler_rank=rank, ends={"evaluated": 1})  # fmt: skip
        by = "transformers.trainer_callback"
        mine = used(OTHER_VALUES[rank], kind="EarlyStoppingCallback", name="f1", by=by)
        return [*prologue(2), *LINES, *held_out, *mine]

    (finding,) = judged(make_run({n: events(n) for n in range(2)}))
    assert (finding.rule, finding.location.line) == ("decides-when-to-stop", 32)
    assert "all_reduce" in finding.fix


@pytest.mark.parametrize("values", [[OTHER_VALUES[0]] * 2, [[0.9], [0.7]], [[0.9, 0.8], []]])
def test_checkpoints_that_are_no_fault(values):
    assert judged(decided(values)) == []


def test_a_metric_that_only_one_rank_has():
    (finding,) = judged(scheduled(OTHER_VALUES, more=exchange("reduce", 0)))
    assert (finding.rule, "all_reduce" in finding.fix) == ("reduced-to-one-rank", True)


@pytest.mark.parametrize("values", [[OTHER_VALUES[0]] * 2, [[None], [None]], [[0.9], [0.7]]])
def test_schedules_that_are_no_fault(values):
    assert judged(scheduled(values)) == []


def test_what_it_needs():
    check = MetricNotReduced()
    assert check.unobserved(run_of(shared=False))
    assert check.unobserved(run_of(saving=False)) is None
    assert any("metric-not-reduced" in effect.checks for effect in HyperparameterSkew.effects)


GATHERS = """
import torch
def listed(x):
    every = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    return x
def objects(x):
    every = [None] * 2
    dist.all_gather_object(every, x)
    keep(x)
def read(x):
    every = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    return torch.cat(every)
def in_a_function(x):
    every = [None] * 2
    dist.all_gather_object(every, x)
    return lambda: every
def views(x):
    every = [out[n] for n in range(2)]
    dist.all_gather(every, x)
def plain(x):
    lib.all_gather(x)
    return (x,)
def unread(x):
    every = lib.all_gather(x)
    return x
def used(x):
    return torch.cat(lib.all_gather(x))
def kept(x):
    every = lib.all_gather(x)
    return every[0]
def given_back(x):
    return lib.all_gather(x)
def drops(x):
    given_back(x)
"""


@pytest.mark.parametrize(
    ("called", "told"),
    [
        ("listed", ("every", "dist.all_gather(every, x)")),
        ("objects", ("every", "dist.all_gather_object(every, x)")),
        ("read", None),
        ("in_a_function", None),
        ("views", None),
        ("plain", ("all_gather", "lib.all_gather(x)")),
        ("unread", ("every", "every = lib.all_gather(x)")),
        ("used", None),
        ("kept", None),
        ("drops", ("all_gather", "given_back(x)")),
    ],
)
def test_where_gathered_values_are_dropped(tmp_path, called, told):
    path = tmp_path / "program.py"
    path.write_text(GATHERS)
    found = []

    def into(target, value):
        found.append(dropped(sys._getframe(1)))

    def returns(value):
        found.append(returned_and_dropped(sys._getframe(1)))
        return [value, value]

    names = {
        "dist": SimpleNamespace(all_gather=into, all_gather_object=into),
        "lib": SimpleNamespace(all_gather=returns),
        "out": torch.zeros(2, 1),
        "keep": lambda value: None,
    }
    exec(compile(GATHERS, str(path), "exec"), names)
    names[called](torch.ones(1))
    (seen,) = found
    assert (seen and (seen.name, GATHERS.splitlines()[seen.line - 1].strip())) == told


def test_gathered_values_that_a_loss_should_be_computed_from():
    event = ResultDropped(at=0, name="all_gather", site=SAVE, dropped_site=SAVE, step=4,
                          op="all_gather", copy=False, learns=True)  # fmt: skip
    (finding,) = judged(make_run({n: [*prologue(2), *LINES, event] for n in range(2)}))
    assert (finding.rule, finding.severity.value) == ("result-not-used", "warning")


def test_values_are_read_without_running_code():
    class Trainer:
        def __init__(self):
            self.best = 0.5

        @property
        def loss(self):
            raise AssertionError

    def read(text):
        node = compile(text, "x", "eval", 1024).body
        return resolve(node, Scope({"self": Trainer(), "metrics": {"acc": 2.0}}, {"g": 3.0}))

    assert [read(t) for t in ("self.best", "metrics['acc']", "g", "self.loss", "metrics['x']")] == [
        0.5, 2.0, 3.0, None, None,
    ]  # fmt: skip


def totalled(read, *, replicas=2, more=()):
    """Two ranks that divide a sum over so many samples by the length of the data set, 8."""

    def events(rank):
        share = list(range(rank, 2 * read, 2))[:read]
        trained = loader(HELD_OUT, [share] * 2, length=8, replicas=replicas, sampler_rank=rank)
        divided = TotalDivided(at=0, loader=HELD_OUT, name="right", length=8, site=COMPARE)
        return [*prologue(2), *LINES, *trained, divided, *more]

    return [
        f for f in judged(make_run({n: events(n) for n in range(2)})) if f.rule == "divided-by-all"
    ]


def test_a_sum_that_is_divided_by_the_samples_of_all_ranks():
    (finding,) = totalled(4)
    assert "the result is 2 times too small" in finding.summary
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(
    ("read", "more"), [(8, {"replicas": -1}), (7, {}), (4, {"more": exchange("all_reduce", 0)})]
)
def test_sums_that_are_divided_rightly(read, more):
    assert totalled(read, **more) == []


@pytest.mark.parametrize(("dropped_at", "fix"), [(SAVE, "`x = torch.save("), (COMPARE, "use `t`")])
def test_a_result_that_nobody_uses(dropped_at, fix):
    event = ResultDropped(at=0, name="t", site=COMPARE, dropped_site=dropped_at, step=4)
    run = make_run({n: [*prologue(2), *LINES, event] for n in range(2)})
    assert MetricNotReduced().unobserved(run) is None
    (finding,) = judged(run)
    assert (finding.rule, finding.ranks) == ("result-not-used", (0, 1))
    assert finding.location.line == (32 if dropped_at == SAVE else 30)
    assert [r.location.line for r in finding.related] == [30] * (dropped_at == SAVE)
    assert fix in finding.fix


def test_a_copy_that_is_made_in_the_call_and_a_handle_that_nobody_keeps():
    copy = ResultDropped(at=0, name="torch.tensor(x)", site=SAVE, dropped_site=SAVE, step=4)
    handle = ResultDropped(at=0, name="all_reduce", site=COMPARE, dropped_site=COMPARE, step=4,
                           copy=False, handle=True)  # fmt: skip
    run = make_run({n: [*prologue(2), *LINES, copy, handle] for n in range(2)})
    one, other = judged(run)
    assert (one.rule, one.severity.value) == ("result-not-used", "note")
    assert "`totals = torch.tensor(x)`" in one.fix
    assert (other.rule, other.severity.value) == ("never-waited-for", "warning")
    assert "leave out `async_op=True`" in other.fix


def test_what_the_next_loss_gathers_is_no_result():
    """Calls 2 to 5 of the group, of which the evaluation makes the first two."""
    block = CallBlock(at=0, id=1, codes=(1, 0))
    signature = Signature(at=0, id=1, op="all_gather", dtype="float32", shape=(8,), numel=8)
    calls = CallRun(at=0, group=0, first=2, block=1, step=4, every=0, repeat=4)
    run = make_run({n: [*prologue(2), *LINES, signature, block, calls] for n in range(2)})

    def began(called):
        return EpochBegan(at=0, loader=0, epoch=0, step=4, site=VALIDATE, calls=(0, called))

    def exchanged(since, until):
        return data_calls.values_exchanged(run.ranks[0], 4, since=began(since), until=began(until))

    assert exchanged(2, 4) and exchanged(3, 4) and exchanged(2, 9)
    assert not exchanged(4, 4) and not exchanged(0, 2) and not exchanged(6, 9)


@pytest.mark.parametrize("handle", [True, False])
def test_a_result_that_is_dropped_was_not_exchanged(handle):
    """A handle that is dropped is not the result."""
    dropped_there = ResultDropped(at=0, name="t", site=COMPARE, dropped_site=SAVE, step=4,
                                  handle=handle)  # fmt: skip
    place = CallSite(at=0, id=0, places=(Place(COMPARE, ()),))
    events = [*prologue(2), *LINES, place, *exchange("all_reduce", 4)]
    run = make_run({0: events, 1: [*events, dropped_there]})
    assert data_calls.values_exchanged(run.ranks[0], 4)
    assert data_calls.values_exchanged(run.ranks[1], 4) is handle


@pytest.mark.parametrize(("values", "copies", "found"), [
    ([[0.9, 0.8], [0.7, 0.75]], True, 1),
    ([[0.9, 0.8], [0.9, 0.8]], True, 0),
    ([[0.9, 0.8], [0.7, 0.75]], False, 0),
])  # fmt: skip
def test_a_schedule_of_a_training_loss(values, copies, found):
    """Of copies of a model: other ranks may plan as they like."""
    ranks = {
        n: [
            *(replica() if copies else prologue(2, wrapped=False)),
            *LINES,
            *(
                SchedulerStep(
                    at=0, kind="ReduceLROnPlateau", step=4 * c, call=c, site=STEP, metric=v
                )
                for c, v in enumerate(values[n])
            ),
        ]
        for n in range(2)
    }
    run = make_run(ranks)
    assert MetricNotReduced().unobserved(run) is None
    assert [f.rule for f in judged(run)] == ["decides-the-schedule"] * found


def test_a_total_that_is_summed_again():
    event = TotalReducedAgain(
        at=0, site=COMPARE, passed=(8.0, 24.0, 56.0, 120.0), summed=(16.0, 48.0, 112.0, 240.0),
        step=4,
    )  # fmt: skip
    run = make_run({n: [*prologue(2), *LINES, event] for n in range(2)})
    assert MetricNotReduced().unobserved(run) is None
    (finding,) = judged(run)
    assert (finding.rule, finding.ranks, finding.location.line) == (
        "total-reduced-again", (0, 1), 30,
    )  # fmt: skip
    assert "grows 2 times" in finding.summary
    event = TotalReducedAgain(
        at=0, site=COMPARE, passed=(8.0, 16.0), summed=(16.0, 32.0), step=4, first_site=SAVE
    )
    (finding,) = judged(make_run({n: [*prologue(2), *LINES, event] for n in range(2)}))
    assert (finding.rule, finding.location.line) == ("reduced-twice", 30)
    assert finding.summary.startswith("what train.py:32 has summed") and "2 times" in (
        finding.summary
    )
    event = TotalReducedAgain(
        at=0, site=COMPARE, passed=(8.0, 24.0, 56.0, 120.0), summed=(16.0, 48.0, 112.0, 240.0),
        step=4,
    )  # fmt: skip
    (finding,) = judged(make_run({n: [*prologue(2), *LINES, event] for n in range(2)}))
    assert "one turns 8 into 16, and the next 24 into 48" in finding.summary


@pytest.mark.parametrize(
    ("told", "second", "more"),
    [
        (True, False, {}),
        (False, True, {}),  # both ranks read their shares
        (False, False, {"replicas": 1, "sampler_rank": 0}),
        (False, False, {"replicas": 8}),  # a part of it is read on purpose
        (False, False, {"exhausted": False}),  # a look at the first batches
        (False, False, {"trains": True}),
    ],
)
def test_an_evaluation_on_one_rank_that_is_given_a_share(told, second, more):
    def events(rank):
        given = {"trains": False, "replicas": 2, "sampler_rank": rank, **more}
        held_out = loader(HELD_OUT, [[rank, 2 + rank]] * 3, loop_site=VALIDATE, length=4,
                          distributed=True, began={"step": [0, 4, 8]}, **given)  # fmt: skip
        train = loader(TRAIN, [[rank, 2 + rank]] * 3, replicas=2, sampler_rank=rank)
        return [*prologue(2), *LINES, *train, *(held_out if second or rank == 0 else ()),
                RankExiting(at=9, how="return", status=0)]  # fmt: skip

    found = [
        f for f in noted(make_run({n: events(n) for n in range(2)})) if f.rule == "one-share-only"
    ]
    assert bool(found) is told
    if told:
        assert found[0].ranks == (0,) and "2 of 4 samples: the share of rank 1" in found[0].summary


PROGRAM = """
def returned(value):
    t = torch.tensor(value)
    t /= 2
    dist.all_reduce(t)
    return t
def cloned(loss):
    logged = loss.clone()
    dist.all_reduce(logged)
    log(loss)
def alias(loss):
    logged = loss.detach()
    dist.all_reduce(logged)
def read(loss):
    logged = loss.clone()
    dist.all_reduce(logged)
    log(logged.item())
def kept(loss):
    logged = loss.clone()
    every.append(logged)
    dist.all_reduce(logged)
def constant(device):
    t = torch.tensor([1.0], device=device)
    dist.all_reduce(t)
def handed(t):
    dist.all_reduce(t)
def passed_on(value):
    return returned(value)
def drops(value):
    returned(value)
def drops_later(value):
    passed_on(value)
def uses(value):
    x = passed_on(value)
"""


@pytest.mark.parametrize(
    ("called", "told"),
    [
        ("returned", None),
        ("drops", ("t", "returned(value)")),
        ("drops_later", ("t", "passed_on(value)")),
        ("uses", None),
        ("cloned", ("logged", "dist.all_reduce(logged)")),
        ("alias", None),
        ("read", None),
        ("kept", None),
        ("constant", None),
        ("handed", None),
    ],
)
def test_where_a_reduced_copy_is_dropped(tmp_path, called, told):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    found = []
    dist = SimpleNamespace(all_reduce=lambda t: found.append(dropped(sys._getframe(1))))
    names = {"torch": torch, "dist": dist, "every": [], "log": lambda value: None}
    exec(compile(PROGRAM, str(path), "exec"), names)
    value = names[called](torch.ones(()) if called in ("cloned", "alias", "read", "kept") else 1.0
                          if called != "constant" else "cpu")  # fmt: skip
    (seen,) = found
    said = seen and (seen.name, PROGRAM.splitlines()[seen.line - 1].strip())
    assert said == told
    assert value is None or called == "returned"
