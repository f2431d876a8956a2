"""DDP410 on literal events."""

from unittest import mock

import msgspec
import pytest
import torch
import torch.nn.functional as F
from ddpdoctor.checks.drift.loss_scale_mismatch import LossScaleMismatch
from recordings import steps
from replicas import BACKWARD, LINE, run_of

from ddpdoctor.events import (
    BatchSeen,
    Edited,
    GatheredInGraph,
    GatheredWithoutGradient,
    LossMeans,
    OptimizerSeen,
    ReducedInGraph,
)
from ddpdoctor.probe.watchers.losses.loss_scaling import LossScaling
from ddpdoctor.probe.watchers.losses.reductions import means_of
from ddpdoctor.report.findings import Severity, Steps


def batch(forward, size, reduction="sum", weight=1.0):
    return BatchSeen(
        at=0, model=0, forward=forward, size=size, reduction=reduction, weight=weight, site=LINE
    )


def test_a_sum_over_unequal_batches():
    (finding,) = LossScaleMismatch().examine(
        run_of({n: [batch(0, 8), batch(2, 4 + n)] for n in range(2)})
    )
    assert finding.severity is Severity.NOTE
    assert (finding.steps.first, finding.location.line) == (2, 33)


def test_a_mean_over_unequal_batches():
    assert not list(
        LossScaleMismatch().examine(run_of({n: [batch(0, 4 + n, "mean")] for n in range(2)}))
    )


def test_a_sum_over_equal_batches():
    events = [batch(0, 8), batch(4, 3)]
    assert not list(LossScaleMismatch().examine(run_of(dict.fromkeys(range(2), events))))


def test_how_many_steps_are_unequal_of_those_compared():
    ranks = {n: [batch(0, 8), batch(2, 4 + n), batch(3, 6), batch(5, 9 - n)] for n in range(2)}
    ranks[0] += steps(8)
    (finding,) = LossScaleMismatch().examine(run_of(ranks))
    assert finding.steps == Steps(first=2, last=5, count=2, compared=3)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (((2 / 17, 2 / 17), (2 / 9, 2 / 9)), 0),  # by the global count
        (((1 / 8, 1 / 9), (1 / 4, 1 / 5)), 0),  # a mean by hand
        (((0, 0), (0, 0)), 0),
        (((1 / 8, 1 / 8), (1 / 8, 1 / 8)), 1),
        (((1 / 8, 1 / 8),), 0),
        (((1, 1),), 1),
    ],
)
def test_a_sum_that_the_program_divides_by_what_may_be_a_count(weights, found):
    sizes = ((8, 9), (4, 5))
    ranks = {
        n: [batch(f, sizes[f][n], weight=w[n]) for f, w in enumerate(weights)] for n in range(2)
    }
    assert len(list(LossScaleMismatch().examine(run_of(ranks)))) == found


def edited(step, ratio, **more):
    return Edited(at=0, model=0, optimizer=0, kind="gradients", step=step, changed=True,
                  ratio=ratio, **more)  # fmt: skip


UNEQUAL = {n: [batch(0, 8 + n), batch(1, 4 + n)] for n in range(2)}


@pytest.mark.parametrize(
    ("ratios", "more", "found"),
    [
        ((2 / 170, 2 / 181), {}, 0),
        ((2 / 170, 2 / 181), {"functions": ("clip_grad_norm_",), "beside": True}, 0),
        ((0.0,), {"functions": ("clip_grad_value_",), "beside": True}, 0),
        ((0.9, 0.7), {"functions": ("clip_grad_norm_",)}, 1),
        ((1 / 180,), {}, 1),
    ],
)
def test_gradients_that_the_program_rescales_itself(ratios, more, found):
    ranks = {
        n: [*events, *(edited(s, r, **more) for s, r in enumerate(ratios))]
        for n, events in UNEQUAL.items()
    }
    assert len(list(LossScaleMismatch().examine(run_of(ranks)))) == found


def test_a_constant_may_be_the_count_where_that_is_one():
    ranks = {n: [batch(0, 8 + n), batch(1, 9 - n), edited(0, 1 / 17)] for n in range(2)}
    assert not list(LossScaleMismatch().examine(run_of(ranks)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_how_a_loss_was_reduced_and_weighted(reduction):
    output = torch.ones(16, 3, requires_grad=True)
    loss = torch.nn.functional.mse_loss(output, torch.zeros(16, 3), reduction=reduction)
    for weighted, weight in (
        (loss, 1),
        (loss * 16 / 24, 2 / 3),
        (2 * loss / torch.tensor(8), 1 / 4),
    ):
        found = LossScaling.current._walk(None, None, weighted.grad_fn, [])
        assert found[:3] == (reduction, pytest.approx(weight), 16)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (lambda x, n: (x.square() / 24).sum() * 2, 1 / 12),
        (lambda x, n: x.square().sum() * 2 / n, 0),
        (lambda x, n: (x.square() * (2 / n)).sum(), 0),
        (lambda x, n: (x.square() * x.detach()).sum(), 1),
    ],
)
def test_what_a_sum_was_multiplied_by(loss, weight):
    device = "meta" if not weight else "cpu"  # a number on a device is not read
    x, n = (torch.ones(shape, device=device) for shape in ((16, 3), ()))
    found = LossScaling.current._walk(None, None, loss(x.requires_grad_(), n).grad_fn, [])
    assert found[:3] == ("sum", pytest.approx(weight), 16)


def test_a_sum_of_one_number_reduces_nothing():
    losses = torch.ones(16, 3, requires_grad=True)
    found = LossScaling.current._walk(None, None, losses.mean().sum().grad_fn, [])
    assert found[:3] == ("mean", 1, 16)


@pytest.mark.parametrize(
    ("loss", "leading", "told"),
    [
        (lambda x: x.mean(1)[:3].sum(), (41, 12, 12), (41, "")),  # over three tasks
        (lambda x: x.mean(1).sum(), (41, 12, 12), (12, "sum")),
        (lambda x: x.flatten().sum(), (12,), (12, "sum")),
        (lambda x: torch.nn.functional.mse_loss(x, x * 2, reduction="sum"), (41, 12), (12, "sum")),
        (lambda x: x.mean(1)[:3].mean(), (41, 12, 12), (41, "mean")),
    ],
)
def test_the_batch_is_the_input_whose_samples_are_summed(loss, leading, told):
    reduced = LossScaling.current._walk(
        None, None, loss(torch.ones(12, 5, requires_grad=True)).grad_fn, []
    )
    events = []
    recorder, model = (
        mock.Mock(emit=events.append),
        mock.Mock(leading=leading, number=0, forwards=1),
    )
    LossScaling.current._emit_batch(recorder, mock.Mock(site=LINE), model, reduced)
    assert [(e.size, e.reduction) for e in events] == [told]


def test_where_some_batches_are_of_unknown_size():
    ranks = {n: [batch(0, 8), batch(1, 40 + n, "")] for n in range(2)}
    assert not list(LossScaleMismatch().examine(run_of(ranks)))


def counted(*counts, reduction="mean", weigh=lambda mine, every: 1.0, by=""):
    """Two ranks whose losses are means over so many elements in each forward."""
    ranks = {
        n: [
            msgspec.structs.replace(
                batch(f, 8, reduction, weigh(pair[n], sum(pair))), valid=pair[n]
            )
            for f, pair in enumerate(counts)
        ]
        for n in range(2)
    }
    ranks[0] += steps(8)
    run = run_of(ranks, by=by)
    return [f for f in LossScaleMismatch().examine(run) if f.rule == "valid-elements"]


FEW_AND_MANY = ((2, 53), (51, 109), (90, 40), (3, 60), (50, 57))
CLUSTERED = ((172, 133), (250, 172), (211, 211), (133, 94), (172, 211), (94, 172))
"""Some samples have all labels, others one: no forward is far off, but all together are."""


def test_a_mean_over_unequal_numbers_of_valid_elements():
    (finding,) = counted(*FEW_AND_MANY)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    assert finding.steps == Steps(first=0, last=4, count=5, compared=5, total=None)
    assert finding.fix.startswith("reduce with `sum`")
    assert counted(*CLUSTERED)[0].rule == "valid-elements"
    (by_hand,) = counted(*FEW_AND_MANY, reduction="sum", weigh=lambda mine, every: 1 / mine)
    assert by_hand.rule == "valid-elements"


def test_the_framework_counts_the_elements_of_all_ranks():
    (finding,) = counted(*FEW_AND_MANY, by="transformers.trainer")
    assert "`TrainingArguments(average_tokens_across_devices=True)`" in finding.fix


def test_steps_are_those_of_the_optimizer_where_gradients_are_accumulated():
    ranks = {
        n: [
            msgspec.structs.replace(batch(2 * f, 8, "mean"), valid=pair[n], step=f)
            for f, pair in enumerate(((50, 53), *FEW_AND_MANY[:-1]))
        ]
        for n in range(2)
    }
    (finding,) = LossScaleMismatch().examine(run_of(ranks, count=9))
    assert finding.steps == Steps(first=1, last=4, count=4, compared=4)
    assert "micro-batches" not in finding.fix


def test_the_count_is_of_all_micro_batches_of_a_step():
    ranks = {
        n: [
            msgspec.structs.replace(batch(f, 8, "mean"), valid=pair[n], step=f // 2)
            for f, pair in enumerate(FEW_AND_MANY)
        ]
        for n in range(2)
    }
    (finding,) = LossScaleMismatch().examine(run_of(ranks, count=4))
    assert "over all micro-batches of the optimizer step before its first forward" in finding.fix


@pytest.mark.parametrize(("counts", "more"), [
    (FEW_AND_MANY[:3], {}),  # too few to tell
    (((20, 28), (31, 25), (24, 19), (27, 22)), {}),  # masks drawn with one probability
    (((36, 25), (24, 20), (28, 43), (31, 20), (24, 24), (30, 15)), {}),
    (((2, 53), (50, 57), (44, 43), (61, 60)), {}),  # once
    (FEW_AND_MANY, {"reduction": "sum", "weigh": lambda mine, every: 2 / every}),
    (FEW_AND_MANY, {"weigh": lambda mine, every: 2 * mine / every}),
])  # fmt: skip
def test_means_in_which_each_element_counts_the_same(counts, more):
    assert counted(*counts, **more) == []


@pytest.mark.parametrize(("loss", "valid"), [
    (lambda x, y, m: F.cross_entropy(x, torch.where(m, y, -100)), 5),
    (lambda x, y, m: F.cross_entropy(x, y), 0),
    (lambda x, y, m: F.cross_entropy(x, torch.where(m, y, -100), weight=torch.rand(3)), 0),
    (lambda x, y, m: F.cross_entropy(x, y, reduction="none")[m].mean(), 5),
    (lambda x, y, m: (F.cross_entropy(x, y, reduction="none") * m).sum() / m.sum(), 5),
    (lambda x, y, m: F.cross_entropy(x, y, reduction="none").mean(), 0),
])  # fmt: skip
def test_how_many_elements_count_in_a_loss(loss, valid):
    node = loss(
        torch.randn(8, 3, requires_grad=True), torch.arange(8) % 3, torch.arange(8) < 5
    ).grad_fn
    reduced = LossScaling()._walk(mock.Mock(), mock.Mock(site=0), node, [])
    assert reduced.valid == valid


def means(*pairs, weigh=lambda mine, every: 1.0):
    """Two ranks with a mean over so many elements in each forward, beside one over 4."""
    ranks = {
        n: [
            LossMeans(
                at=0,
                model=0,
                forward=f,
                elements=(4, pair[n]),
                weights=(1.0, weigh(pair[n], sum(pair))),
                step=f,
                site=LINE,
            )
            for f, pair in enumerate(pairs)
        ]
        for n in range(2)
    }
    return list(LossScaleMismatch().examine(run_of(ranks, count=9)))


def test_a_term_that_is_a_mean_over_samples_of_unequal_sizes():
    (finding,) = means(*FEW_AND_MANY)
    assert (finding.rule, finding.severity) == ("unequal-means", Severity.NOTE)
    assert finding.steps == Steps(first=0, last=4, count=5, compared=5)


@pytest.mark.parametrize(("pairs", "more"), [
    (FEW_AND_MANY[:3], {}),
    (((2, 53), (50, 54), (44, 43), (61, 60)), {}),
    (FEW_AND_MANY, {"weigh": lambda mine, every: 2 * mine / every}),
    (FEW_AND_MANY, {"weigh": lambda mine, every: 0.0}),
])  # fmt: skip
def test_means_of_which_each_element_counts_the_same(pairs, more):
    assert means(*pairs, **more) == []


@pytest.mark.parametrize(("loss", "found"), [
    (lambda x, y: F.l1_loss(x, y) + 10 * (x - y).norm(dim=-1).mean(), {(24, 1.0), (8, 10.0)}),
    (lambda x, y: (x - y).square().mean() * torch.tensor(8.0) / 5, {(24, 1.6)}),
    (lambda x, y: F.cross_entropy(x, torch.arange(8) % 3), {(8, 1.0)}),
    (lambda x, y: F.cross_entropy(x, torch.arange(8) % 3, ignore_index=0) * 5, {(8, 0.0)}),
    (lambda x, y: (x - y).square().sum(), set()),
])  # fmt: skip
def test_the_means_of_a_loss(loss, found):
    root = loss(torch.randn(8, 3, requires_grad=True), torch.randn(8, 3)).grad_fn
    assert set(means_of(root)) == found


IN_GRAPH = ReducedInGraph(
    at=0, model=0, step=1, size=2, shape=(64, 64), site=LINE, backward_site=BACKWARD
)


def test_a_tensor_of_the_loss_that_is_all_reduced_in_place():
    run = run_of({n: [IN_GRAPH] for n in range(2)})
    assert LossScaleMismatch().unobserved(run) is None
    (finding,) = LossScaleMismatch().examine(run)
    assert (finding.rule, finding.severity) == ("reduced-in-graph", Severity.WARNING)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert finding.steps == Steps(first=1, last=3, count=3)


def test_where_the_program_changes_the_gradients_itself():
    assert not list(
        LossScaleMismatch().examine(run_of({n: [IN_GRAPH, edited(0, 2.0)] for n in range(2)}))
    )


def gathered(forward, sketch=(3.0, 4.0), function="Gather", **more):
    return GatheredInGraph(
        at=0, model=0, forward=forward, step=forward, size=2, shape=(8, 4), function=function,
        norm=5.0, sketch=sketch, site=LINE, backward_site=BACKWARD, **more,
    )  # fmt: skip


def test_a_tensor_gathered_for_the_loss_that_gets_no_gradient():
    event = GatheredWithoutGradient(at=0, model=0, step=2, size=2, shape=(8, 4), backwards=3,
                                    site=LINE, backward_site=BACKWARD)  # fmt: skip
    (finding,) = LossScaleMismatch().examine(run_of({n: [event] for n in range(2)}))
    assert (finding.rule, finding.severity) == ("gathered-without-gradient", Severity.WARNING)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert finding.steps == Steps(first=0, last=3, count=4)


def test_a_loss_of_gathered_tensors_whose_gradient_reaches_only_this_ranks_part():
    for function in ("Gather", ""):
        events = [gathered(f, function=function) for f in range(4)]
        (finding,) = LossScaleMismatch().examine(run_of(dict.fromkeys(range(2), events)))
        assert (finding.rule, finding.severity) == ("gathered-in-graph", Severity.WARNING)
        assert (finding.ranks, finding.location.line) == ((0, 1), 33)
        assert finding.steps == Steps(first=0, last=3, count=4)


@pytest.mark.parametrize(
    ("function", "severity"), [("Gather", Severity.WARNING), ("", Severity.NOTE)]
)
def test_losses_of_own_rows_against_all_that_drop_the_gradient_of_other_ranks(function, severity):
    events = {
        n: [gathered(f, (3.0 + n, 4.0), function, dropped=3.0) for f in range(4)] for n in range(2)
    }
    (finding,) = LossScaleMismatch().examine(run_of(events))
    assert (finding.rule, finding.severity) == ("gradient-of-other-ranks-dropped", severity)
    assert "60 % of it" in finding.summary
    events[0][3] = events[1][3] = gathered(
        3, dropped=3.0
    )  # once they compute the same loss: that may be chance
    assert not list(LossScaleMismatch().examine(run_of(events)))


@pytest.mark.parametrize("ranks", [
    {0: [gathered(f) for f in range(2)], 1: [gathered(f) for f in range(2)]},  # too few
    {0: [gathered(f) for f in range(4)], 1: []},
    {0: [gathered(f) for f in range(4)], 1: [gathered(f, (4.0, 3.0)) for f in range(4)]},  # no part
    {n: [*(gathered(f) for f in range(4)), edited(0, 2.0)] for n in range(2)},
])  # fmt: skip
def test_gathered_tensors_whose_gradient_may_be_right(ranks):
    assert not list(LossScaleMismatch().examine(run_of(ranks)))


@pytest.mark.parametrize(
    ("kinds", "severity"),
    [(["AdamW"], Severity.NOTE), (["SGD"], Severity.WARNING), (["AdamW", "SGD"], Severity.WARNING)],
)
def test_optimizers_that_take_out_a_common_factor(kinds, severity):
    held = [
        OptimizerSeen(at=0, optimizer=n, kind=kind, site=LINE, models=(0,))
        for n, kind in enumerate(kinds)
    ]
    events = [*held, *(gathered(f) for f in range(4))]
    (finding,) = LossScaleMismatch().examine(run_of(dict.fromkeys(range(2), events)))
    assert finding.severity is severity
    assert ("takes out a factor" in finding.cause) is (severity is Severity.NOTE)
