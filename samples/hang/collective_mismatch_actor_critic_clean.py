"""Ranks stop the updates of the actor together, after a forward whose loss they drop.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def update(actor, critic, optimizers, states):
    for _ in range(12):
        optimizers[0].zero_grad()
        values = actor(states)
        change = values.detach().std(0).mean()
        dist.all_reduce(change, op=dist.ReduceOp.MAX)
        if change > 0.05:
            break
        (values - 2).square().mean().backward()
        optimizers[0].step()
    for _ in range(6):
        optimizers[1].zero_grad()
        (critic(states) - 1).square().mean().backward()
        optimizers[1].step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    actor, critic = DDP(nn.Linear(6, 2)), DDP(nn.Linear(6, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (actor, critic)]
    draws = torch.Generator().manual_seed(dist.get_rank())
    for episode in range(8):
        wide = 0.3 if dist.get_rank() == 1 and episode == 3 else 0.01
        update(actor, critic, optimizers, torch.randn(16, 6, generator=draws) * wide)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
