"""A count of all ranks that the loss is divided by, in whichever of its terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpdoctor.probe.watchers.losses.loss_counts import _Count, _divisor

COUNT = 23.0
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("loss", "divided"),
    [
        (lambda x, n: x.sum() / n, True),
        (lambda x, n: 5 * (x.sum() / n) + 0.1 * (x.square().sum() / n), True),
        (lambda x, n: sum((x * i).sum() / n for i in range(9)), True),
        (lambda x, n: x.mean() - x.abs().sum() / n, True),
        (lambda x, n: torch.stack([x.sum() / n, x.square().sum() / n]).sum(), True),
        (lambda x, n: (x.sum() / n + x.square().sum() / n) * torch.tensor(2.0), False),
        (lambda x, n: (x.sum() * torch.tensor(2.0) / n) + x.mean(), False),
        (lambda x, n: (x / n).sum() * x.sum(), False),
        (lambda x, n: x.mean() + x.square().mean(), False),
    ],
)
def test_terms_divided_by_the_count(loss: Loss, divided: bool) -> None:
    counts = [_Count(torch.tensor([COUNT]), 0, 1, None, "")]
    x = torch.ones(4, requires_grad=True)
    for count in (torch.tensor(COUNT), torch.tensor([COUNT])):
        root: Any = loss(x, count).grad_fn
        assert (_divisor(root, counts, 2) is not None) is divided
        assert _divisor(root, counts, 1) is None
