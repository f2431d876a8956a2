"""Every parameter gets a gradient before they are put into one tensor.

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
    """Always a tensor of the same size, so that all ranks reduce the same."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    together = torch.cat([p.grad.flatten() for p in used])
    flat[: together.numel()] = together
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    begin = 0
    for p in used:
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


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
