"""The trunk's gradients are averaged in one tensor, those of the heads are forgotten, and all are
clipped together, so that the trunk is not kept equal either.

run: --nproc-per-node 2
finds: DDP402 error at `dist.all_reduce(flat)`
"""

import torch
import torch.distributed as dist
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)

    def loss(self, x, actions):
        hidden = self.trunk(x)
        value = (self.critic(hidden).squeeze(1) - x.sum(1)).square().mean()
        return nn.functional.cross_entropy(self.actor(hidden), actions) + value


def average_gradients(module):
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    begin = 0
    for p in module.parameters():
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(40):
        x = torch.randn(16, 8, generator=generator)
        actions = torch.randint(0, 4, (16,), generator=generator)
        optimizer.zero_grad()
        agent.loss(x, actions).backward()
        average_gradients(agent.trunk)
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
