"""DDP410 on literal events."""

import pytest
import torch
from ddpdoctor.checks.drift.loss_scale_mismatch import LossScaleMismatch
from replicas import LINE, run_of

from ddpdoctor.events import BatchSeen
from ddpdoctor.findings import Severity
from ddpdoctor.probe.losses import _look


def batch(forward, size, reduction="sum"):
    return BatchSeen(at=0, model=0, forward=forward, size=size, reduction=reduction, site=LINE)


def test_a_sum_over_unequal_batches():
    (finding,) = LossScaleMismatch().examine(
        run_of({n: [batch(0, 8), batch(2, 4 + n)] for n in range(2)})
    )
    assert finding.severity is Severity.NOTE
    assert (finding.steps.first, finding.location.line) == (2, 33)
    assert "4 on rank 0, 5 on rank 1" in finding.summary


def test_a_mean_over_unequal_batches():
    assert not list(
        LossScaleMismatch().examine(run_of({n: [batch(0, 4 + n, "mean")] for n in range(2)}))
    )


def test_a_sum_over_equal_batches():
    events = [batch(0, 8), batch(4, 3)]
    assert not list(LossScaleMismatch().examine(run_of(dict.fromkeys(range(2), events))))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_how_a_loss_was_reduced_and_weighted(reduction):
    output = torch.ones(16, 3, requires_grad=True)
    loss = torch.nn.functional.mse_loss(output, torch.zeros(16, 3), reduction=reduction)
    for weighted, weight in (
        (loss, 1),
        (loss * 16 / 24, 2 / 3),
        (2 * loss / torch.tensor(8), 1 / 4),
    ):
        found, by = _look(None, None, weighted.grad_fn, [])
        assert (found, by) == (reduction, pytest.approx(weight))
