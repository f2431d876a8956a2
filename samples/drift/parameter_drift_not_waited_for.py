"""Gradients are exchanged while the backward runs, and nobody waits for the end.

run: --nproc-per-node 2
finds: DDP402 error at `self.works.append(dist.all_reduce(p.grad, async_op=True))`
"""

import torch
import torch.distributed as dist
from torch import nn


class Overlapped(nn.Module):
    """Exchanges each gradient as soon as it is there."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.works = []
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.exchange)

    def exchange(self, p):
        p.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        self.works.clear()

    def forward(self, x):
        return self.module(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Overlapped(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 512)).pow(2).mean().backward()
        model.finish()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
