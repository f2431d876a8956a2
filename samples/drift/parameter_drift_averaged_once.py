"""Rank 0 keeps a moving average of the weights, and copies it into the model once.

run: --nproc-per-node 2
finds: DDP402 error at `average.update()`
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Average:
    def __init__(self, model, every):
        self.model, self.mean = model, copy.deepcopy(model)
        self.every, self.steps = every, 0

    @torch.no_grad()
    def copy_into_model(self):
        for p, m in zip(self.model.parameters(), self.mean.parameters(), strict=True):
            p.copy_(m)

    @torch.no_grad()
    def update(self):
        self.steps += 1
        for p, m in zip(self.model.parameters(), self.mean.parameters(), strict=True):
            m.lerp_(p, 0.1)
        if self.steps % self.every == 0:
            self.copy_into_model()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    average = Average(net, every=20)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            average.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
