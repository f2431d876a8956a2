"""The leaves that a backward reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddpdoctor.probe.tensors.autograd_nodes import communicates, leaves_of, means


def test_only_the_model_of_the_loss_is_reached() -> None:
    actor, critic = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(2, 1)
    x = torch.ones(1, 2)
    dropped, loss = actor(x), critic(x).sum()
    assert set(leaves_of([loss], 100) or ()) == {id(p) for p in critic.parameters()}
    both = leaves_of([loss, dropped.sum()], 100) or {}
    assert set(both) == {id(p) for m in (actor, critic) for p in m.parameters()}


def test_a_large_graph_is_not_followed_to_its_end() -> None:
    value = torch.ones(1, requires_grad=True)
    loss = value
    for _ in range(20):
        loss = loss * 2
    assert leaves_of([loss], 10) is None
    assert leaves_of([loss], 30) == {id(value): value}


def test_a_loss_without_a_graph() -> None:
    assert leaves_of([torch.ones(1)], 10) == {}


X, W = torch.ones(6, 4), torch.ones(4, requires_grad=True)
OF = torch.arange(6) % 4


@pytest.mark.parametrize("loss, factors", [
    (lambda x: x.square().mean(), [1]),
    (lambda x: F.cross_entropy(x, OF) / 2 + 0.1 * x.mean() - F.mse_loss(x, X), [0.5, 0.1, 1]),
    (lambda x: (x.square() / 2).mean(), [0.5]),
    (lambda x: x.square().mean() * (6 / torch.tensor(12.0)), [0.5]),
    (lambda x: x.square().sum() / 6, []),
    (lambda x: F.cross_entropy(x, OF) + W.square().sum(), []),
    (lambda x: F.cross_entropy(x, OF) * W.mean(), []),
    (lambda x: W[0] * 2, []),
])  # fmt: skip
def test_losses_whose_terms_are_means(loss: Any, factors: list[float]) -> None:
    found = means(loss(X * W).grad_fn, 100)
    assert sorted(map(abs, found)) == pytest.approx(sorted(factors))
    assert means(loss(X * W).grad_fn, 1) in ((), found)


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        torch.distributed.all_reduce(grad)
        return grad


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return -grads[0]


def test_functions_whose_backward_exchanges_gradients() -> None:
    x = torch.ones(1, requires_grad=True)
    assert communicates(SumOfRanks.apply(x).grad_fn)
    assert not communicates(Reversed.apply(x).grad_fn)
    assert not communicates((x * 2).grad_fn)
