"""The first stage of a pipeline sends a third of the batch that the second one makes room for.

run: --nproc-per-node 2
finds: DDP602 error at `dist.send(hidden.detach(), dst=1)`
"""

import torch
import torch.distributed as dist
from torch import nn

BATCH, WIDTH = 12, 16


def first_stage(steps):
    stage = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for _ in range(steps):
        hidden = stage(torch.randn(BATCH // 3, 8))
        dist.send(hidden.detach(), dst=1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        optimizer.zero_grad()
        hidden.backward(gradient)
        optimizer.step()


def second_stage(steps):
    stage = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for _ in range(steps):
        hidden = torch.zeros(BATCH, WIDTH)
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        optimizer.zero_grad()
        stage(hidden).square().mean().backward()
        dist.send(hidden.grad[: BATCH // 3].contiguous(), dst=0)
        optimizer.step()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
(second_stage if dist.get_rank() else first_stage)(steps=30)
dist.destroy_process_group()
