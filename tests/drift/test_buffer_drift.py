"""DDP403 on literal events."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.buffer_drift import BufferDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import make_run, steps
from replicas import LINE, OTHER, digests, replica, run_of

from ddpdoctor.events import FileWritten, LateBuffers, ModulesSkipped, StateTaken, Wrapped
from ddpdoctor.events.drift import AGAIN
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.watchers.graph import late_buffers
from ddpdoctor.probe.watchers.graph.late_buffers import LateBufferWatch
from ddpdoctor.report.findings import Severity


def at_evaluation(*values):
    return digests("buffers", {6: values}, point="eval", optimizer=-1, site=LINE)


def at_the_end(*values):
    return digests("buffers", {6: values}, point="end")


TAKEN = StateTaken(at=0, model=0, step=3, forwards=3, site=LINE)


def test_equal_at_evaluation():
    run = run_of({0: [at_evaluation(1, 2)], 1: [at_evaluation(1, 2)]})
    assert list(BufferDrift().examine(run)) == []


def test_different_at_evaluation():
    run = run_of({0: [at_evaluation(1, 2)], 1: [at_evaluation(3, 2)]}, broadcast=False)
    (finding,) = BufferDrift().examine(run)
    assert finding.severity is Severity.WARNING
    assert finding.subjects == ("norm.running_mean",)
    assert finding.location.line == 10
    assert finding.related[0].location.line == 33
    assert finding.evidence["next_forward_repairs"] == "no"


def again(*values):
    return digests("buffers", {6 * AGAIN + 1: values}, point="again", optimizer=-1, site=LINE)


@pytest.mark.parametrize(("later", "found"), [((3, 2), 0), ((1, 2), 1)])
def test_one_rank_evaluates_alone_before_the_buffers_are_averaged(later, found):
    ranks = {0: [at_evaluation(1, 2), again(*later)], 1: [at_evaluation(3, 2)]}
    assert len(list(BufferDrift().examine(run_of(ranks, broadcast=False)))) == found


@pytest.mark.parametrize(("taken", "told"), [(3, 3), (0, None), (10_000, None)])
def test_the_step_of_an_evaluation(taken, told):
    looks = {
        n: [msgspec.structs.replace(at_evaluation(value, 2), step=taken)]
        for n, value in enumerate((1, 3))
    }
    (finding,) = BufferDrift().examine(run_of(looks, broadcast=False))
    assert (finding.steps and finding.steps.first) == told


def test_all_evaluations_that_differ_count():
    def looks(*values):
        every = zip((2, 3, 9), values, strict=True)  # no step follows the last one
        return [
            digests("buffers", {6 * s: (v, 2)}, point="eval", optimizer=-1, site=LINE, step=s)
            for s, v in every
        ]

    def told(*values):
        run = run_of({0: looks(1, 1, 1), 1: looks(*values)}, broadcast=False, count=9)
        (finding,) = BufferDrift().examine(run)
        assert finding.steps.last <= 8
        return finding.steps.first, finding.steps.count, finding.steps.compared

    assert told(3, 3, 3) == (2, 3, 3)
    assert told(1, 3, 1) == (3, 1, 2)


def test_evaluation_around_the_wrapper_points_at_it():
    run = run_of({0: [at_evaluation(1, 2)], 1: [at_evaluation(3, 2)]})
    (finding,) = BufferDrift().examine(run)
    assert finding.location.line == 33
    assert finding.related[0].location.line == 10


def test_counters_of_a_rank_are_its_own():
    run = run_of({0: [at_evaluation(1, 2)], 1: [at_evaluation(1, 3)]})
    assert list(BufferDrift().examine(run)) == []


def test_the_next_broadcast_repairs_what_differs_after_the_last_forward():
    run = run_of({0: [at_the_end(1, 2), TAKEN], 1: [at_the_end(3, 2)]})
    assert list(BufferDrift().examine(run)) == []


def written(path="/runs/last.pth.tar", step=3):
    return FileWritten(at=0, path=path, site=OTHER, how="save", step=step)


def kept(*rows, first=2):
    """What the buffers were after some forwards, as the next one finds them."""
    return digests("buffers", {first + n: row for n, row in enumerate(rows)}, point="kept")


def saved_by_rank_0(mine, others, *events):
    return run_of({0: [mine, *events], 1: [others]}, broadcast=False)


def test_saved_without_broadcast():
    one, other = kept((1, 2), (1, 2)), kept((3, 2), (4, 2))
    (finding,) = BufferDrift().examine(saved_by_rank_0(one, other, TAKEN, written()))
    assert finding.severity is Severity.WARNING
    assert finding.related[0].location.line == 33


def test_saved_at_the_end_without_broadcast():
    one, other = (digests("buffers", {3: [1 + n, 2]}, point="end") for n in range(2))
    (finding,) = BufferDrift().examine(saved_by_rank_0(one, other, TAKEN, written()))
    assert finding.rule == "not-broadcast"


def test_averaged_by_hand_before_it_is_saved():
    one, other = kept((1, 2), (5, 2), (6, 2)), kept((3, 2), (5, 2), (7, 2))
    assert list(BufferDrift().examine(saved_by_rank_0(one, other, TAKEN, written()))) == []


@pytest.mark.parametrize("file", [[], [written(step=2)], [written("/runs/metrics.json")]])
def test_the_state_is_taken_for_something_else_than_a_file(file):
    one, other = kept((1, 2), (1, 2)), kept((3, 2), (4, 2))
    assert list(BufferDrift().examine(saved_by_rank_0(one, other, TAKEN, *file))) == []


def test_neither_evaluated_nor_saved_is_a_note():
    ranks = {n: [at_the_end(1 + n, 2)] for n in range(2)}
    (finding,) = BufferDrift().examine(run_of(ranks, broadcast=False))
    assert finding.severity is Severity.NOTE


def test_sync_batch_norm_is_proposed_for_batch_norm_only():
    ranks = {0: [at_evaluation(1, 2)], 1: [at_evaluation(3, 2)]}
    for options, proposed in (
        ({}, True),
        ({"norm": "RunningNorm"}, False),
        ({"device": "cpu"}, False),
    ):
        (finding,) = BufferDrift().examine(run_of(ranks, broadcast=False, **options))
        assert finding.rule == "not-broadcast"
        assert ("convert_sync_batchnorm" in finding.fix) is proposed


def own_buffers(model, *values, line=LINE):
    """What a rank holds in the buffers of one of several models, from the first step on."""
    rows = {0: values, 3: values}
    return [
        *replica(model=model, broadcast=False),
        digests("buffers", rows, model=model, point="kept"),
        digests("buffers", {4: values}, model=model, point="eval", optimizer=-1, site=line),
    ]


def test_models_that_one_line_wraps_are_told_together():
    ranks = {n: [*own_buffers(0, 1 + n, 2), *own_buffers(1, 7 + n, 2)] for n in range(2)}
    (finding,) = BufferDrift().examine(make_run(ranks))
    assert [row["model"] for row in finding.evidence["models"]] == ["Net", "Net"]


def test_models_at_lines_of_their_own_are_told_apart():
    ranks = {
        n: [
            msgspec.structs.replace(e, site=OTHER) if isinstance(e, Wrapped) and e.model else e
            for model in range(2)
            for e in own_buffers(model, 1 + n, 2)
        ]
        for n in range(2)
    }
    found = list(BufferDrift().examine(make_run(ranks)))
    assert [f.location.line for f in found] == [10, 35]


def test_buffers_that_nothing_changed_differed_from_the_start():
    (finding,) = BufferDrift().examine(make_run({n: own_buffers(0, 1 + n, 2) for n in range(2)}))
    assert finding.rule == "unequal-at-wrap"
    ranks = {n: [*own_buffers(0, 1 + n, 2), at_the_end(9 + n, 2)] for n in range(2)}
    (finding,) = BufferDrift().examine(make_run(ranks))
    assert finding.rule == "not-broadcast"


@pytest.mark.parametrize(("unread", "severity"), [
    ([["norm"], ["norm"]], Severity.NOTE),
    ([["norm", "other"], ["norm"]], Severity.NOTE),
    ([["norm"], []], Severity.WARNING),
    ([["norm"], None], Severity.WARNING),
    ([["other"], ["other"]], Severity.WARNING),
])  # fmt: skip
@pytest.mark.parametrize("changed", [False, True])
def test_constant_buffers_that_no_forward_reads_are_only_saved(unread, severity, changed):
    events = {
        n: [
            kept((1 + n, 2), (1 + n + 2 * changed, 2)),
            *([ModulesSkipped(at=0, model=0, backward=1, unread=tuple(names))] if names else []),
            *([ModulesSkipped(at=0, model=0, backward=1)] if names == [] else []),
            *([TAKEN, written()] if n == 0 else []),
        ]
        for n, names in enumerate(unread)
    }
    (finding,) = BufferDrift().examine(run_of(events, broadcast=False))
    assert finding.severity is (Severity.WARNING if changed else severity)
    assert ("unless a forward reads them" in finding.fix) is (finding.severity is Severity.NOTE)


def test_constant_buffers_that_no_forward_reads_and_that_are_evaluated():
    skipped = ModulesSkipped(at=0, model=0, backward=1, unread=("norm",))
    run = make_run({n: [*own_buffers(0, 1 + n, 2), skipped] for n in range(2)})
    (finding,) = BufferDrift().examine(run)
    assert (finding.rule, finding.severity) == ("unequal-at-wrap", Severity.WARNING)


def late(step, *values, shapes=((2,), (2,))):
    names = ("head.weight_mask", "cache")[: len(values)]
    return LateBuffers(
        at=0,
        model=0,
        optimizer=0,
        step=step,
        names=names,
        shapes=shapes[: len(values)],
        values=pack(values),
    )


def test_masks_that_came_after_the_wrap():
    ranks = {n: [late(4, 1, 2), late(9, 3 + n, 2)] for n in range(2)}
    (found,) = BufferDrift().examine(run_of(ranks))
    assert (found.severity, found.subjects) == (Severity.NOTE, ("head.weight_mask",))
    assert (found.steps.first, found.location.line) == (9, 10)
    ranks[0].append(TAKEN)
    (found,) = BufferDrift().examine(run_of(ranks))
    assert (found.severity, found.related[0].location.line) == (Severity.WARNING, 33)
    apart = digests("parameters", {6: [1, 2, 3, 4]}, point="end")
    other = digests("parameters", {6: [1, 2, 9, 4]}, point="end")
    ranks = {0: [*ranks[0], apart], 1: [*ranks[1], other]}
    (drift,) = ParameterDrift().examine(run_of(ranks))
    assert BufferDrift().explains(found, drift)


def test_masks_that_are_equal_again_and_buffers_as_long_as_the_data():
    ranks = {n: [late(4, 1 + n), late(9, 7)] for n in range(2)}
    assert list(BufferDrift().examine(run_of(ranks))) == []
    ranks = {n: [late(4, 1, 2 + n, shapes=((2,), (5 + n,)))] for n in range(2)}
    assert list(BufferDrift().examine(run_of(ranks))) == []


def test_which_buffers_came_after_the_wrap():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    known = frozenset(n for n, _ in inner.named_buffers())
    model = SimpleNamespace(inner=lambda: inner, buffers=known)
    inner[0].register_buffer("mask", torch.ones(2, 2))
    inner[0].register_buffer("cache", torch.ones(2), persistent=False)
    inner[0].register_buffer("seen", torch.zeros((), dtype=torch.int64))
    assert [name for name, _ in late_buffers._late_buffers(model)] == ["0.mask"]


def test_what_ddp_broadcasts_is_told_where_its_shapes_change():
    inner = torch.nn.Linear(2, 2)
    inner.register_buffer("mask", torch.ones(2, 2))
    model = SimpleNamespace(
        inner=lambda: inner, buffers={"mask": (2, 2)}, forwards=1, number=0, group=0
    )
    told = []
    recorder = SimpleNamespace(emit=lambda e, vital: told.append(e), step=7)
    wrapper = SimpleNamespace(will_sync_module_buffers=lambda: True)
    forward = SimpleNamespace(model=Known(model), wrapper=wrapper, site=3)
    LateBufferWatch.begin()
    for size, number in ((2, 1), (3, 2), (3, 3), (4, 18), (4, 33), (5, 65)):
        inner.mask = torch.ones(size, size)
        model.forwards = number
        LateBufferWatch.current._forward_due(recorder, forward)
    shapes = [(e.forward, e.total, [(b.name, b.shape) for b in e.buffers]) for e in told]
    assert shapes == [(n, 7, [("mask", (size, size))]) for size, n in ((3, 1), (4, 32), (5, 64))]


class Known:
    """A model that weak references can be made to."""

    def __init__(self, fields):
        self.__dict__ = fields.__dict__


def of_a_part(*values, nth=0):
    key = 6 * AGAIN + nth
    return digests("buffers", {key: values}, point="part", optimizer=-1, site=LINE)


@pytest.mark.parametrize(
    ("broadcast", "severity", "line"), [(False, Severity.WARNING, 10), (True, Severity.NOTE, 33)]
)
def test_a_part_of_the_model_that_is_evaluated(broadcast, severity, line):
    ranks = {0: [of_a_part(1, 0)], 1: [of_a_part(3, 0)]}
    (finding,) = BufferDrift().examine(run_of(ranks, broadcast=broadcast))
    assert (finding.severity, finding.location.line) == (severity, line)
    assert finding.subjects == ("norm.running_mean",)


def test_parts_that_are_the_same_or_that_not_all_ranks_evaluate():
    same, other = of_a_part(1, 0), of_a_part(3, 0)
    for ranks in (
        {0: [same], 1: [same]},
        {0: [other, of_a_part(1, 0, nth=1)], 1: [same]},
        {0: [other], 1: []},
        {0: [same], 1: [of_a_part(0, 5)]},
    ):
        assert list(BufferDrift().examine(run_of(ranks, broadcast=False))) == []


@pytest.mark.parametrize(
    ("kept", "shape", "told"), [(True, (), True), (False, (), False), (False, (8,), True)]
)
def test_figures_for_a_progress_bar(kept, shape, told):
    made = [
        msgspec.structs.replace(
            e, buffers=tuple(msgspec.structs.replace(b, kept=kept, shape=shape) for b in e.buffers)
        )
        if isinstance(e, Wrapped)
        else e
        for e in replica(broadcast=False)
    ]
    run = make_run({n: [*made, at_evaluation(1 + 2 * n, 2), *steps(4)] for n in range(2)})
    assert [f.rule for f in BufferDrift().examine(run)] == ["not-broadcast"] * told
