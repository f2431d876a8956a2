"""A count of all ranks that the loss is divided by, in whichever of its terms."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.events import LossCounted
from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.training.records import Backward
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.losses import loss_counts
from ddpdoctor.probe.watchers.losses.loss_counts import LossCounts, _Count, _divisor

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
    counts = [_Count(torch.tensor([COUNT]), (), 0, 1, None, "", 0)]
    x = torch.ones(4, requires_grad=True)
    for count in (torch.tensor(COUNT), torch.tensor([COUNT])):
        root: Any = loss(x, count).grad_fn
        assert (_divisor(root, counts, 2) is not None) is divided
        assert _divisor(root, counts, 1) is None


def halved(count: torch.Tensor) -> None:
    count /= 2


def nothing(count: torch.Tensor) -> None:
    """The sum stays as it is."""


@pytest.mark.parametrize(("before", "after", "counted"), [
    (nothing, nothing, True),
    (nothing, halved, False),  # a mean of the ranks' counts, in place
    (halved, nothing, False),  # `reduce_mean`
])  # fmt: skip
def test_a_count_that_is_divided_by_the_number_of_ranks(
    watched: Any, before: Any, after: Any, counted: bool
) -> None:
    watcher, recorder, told = watched
    weight = torch.ones(4, requires_grad=True)
    for n in range(12):
        count = torch.tensor(float(37 + n))
        before(count)
        watcher._called(recorder, Call("all_reduce", 0, False, (count,), "SUM"))
        with torch.no_grad():
            count.data.mul_(2)  # as the all-reduce: torch does not count its write
        after(count)
        loss = weight.sum() / count
        watcher._backward_begins(recorder, Backward(n, 7, (loss,), 0.0))
    assert bool([e for e in told if isinstance(e, LossCounted)]) is counted


@pytest.mark.parametrize(("divides", "counted"), [
    (lambda own, every: every.sum(), True),
    (lambda own, every: own, False),
    (lambda own, every: every.float().mean(), False),
])  # fmt: skip
@pytest.mark.parametrize("op", ["all_gather", "all_gather_into_tensor"])
def test_counts_that_are_gathered_and_summed(
    watched: Any, op: str, divides: Any, counted: bool
) -> None:
    watcher, recorder, told = watched
    weight = torch.ones(4, requires_grad=True)
    for n in range(12):
        own, other = torch.tensor(37 + n), torch.tensor(5 + n)
        every = torch.stack([own, other])
        outputs = tuple(every) if op == "all_gather" else (every,)
        watcher._called(recorder, Call(op, 0, False, (own,), outputs=outputs))
        loss = weight.sum() / divides(own, every).item()
        watcher._backward_begins(recorder, Backward(n, 7, (loss,), 0.0))
    assert bool([e for e in told if isinstance(e, LossCounted)]) is counted


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = SimpleNamespace(pending=1, pending_sync=True, group=0, number=0)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    monkeypatch.setattr(loss_counts, "group_size", lambda model: 2)
    watcher, told = LossCounts(), []
    watcher.plain = torch.Tensor
    sites = SimpleNamespace(user_frame=lambda frame: None)
    recorder: Any = SimpleNamespace(
        step=3, site=lambda: 5, sites=sites, emit=lambda event, **_: told.append(event)
    )
    return watcher, recorder, told
