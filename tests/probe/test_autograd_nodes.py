"""The leaves that a backward reaches."""

from __future__ import annotations

import torch
from torch import nn

from ddpdoctor.probe.tensors.autograd_nodes import leaves_of


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
