"""DiLoCo: what three steps of its own have changed on each rank is averaged and stepped on.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


class Outer:
    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.shared = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.shared, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step(self):
        for shared, p in zip(self.shared, self.parameters):
            change = shared - p
            dist.all_reduce(change)
            shared.grad = change / dist.get_world_size()
        self.optimizer.step()
        for shared, p in zip(self.shared, self.parameters):
            p.copy_(shared)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = Outer(model)
    torch.manual_seed(1 + dist.get_rank())
    for i in range(18):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        if i % 3 == 2:
            outer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
