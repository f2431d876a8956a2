"""A rank without a gradient sends zeros, and applies what comes back.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.text, self.image = nn.Linear(16, 4), nn.Linear(16, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x, text):
        x = self.trunk(x).relu()
        return self.last((self.text(x) if text else self.image(x)).relu())


def average_gradients(model):
    """A tensor for every parameter, so that all ranks reduce the same."""
    for p in model.parameters():
        averaged = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(averaged)
        averaged /= dist.get_world_size()
        p.grad = averaged


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TwoWays()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(40):
        x = torch.randn(16, 8, generator=generator)
        text = torch.rand((), generator=generator) < 0.5
        optimizer.zero_grad()
        (model(x, text) - x.sum(1, keepdim=True)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
