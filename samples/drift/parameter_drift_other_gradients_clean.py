"""Gradients are averaged by hand, zeros where a rank used another expert: each is added to its own.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x, which):
        return self.head(self.experts[which](torch.relu(self.stem(x))))


def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        logits = model(x, which=(step + rank) % 2)
        nn.functional.cross_entropy(logits, (x[:, 0] > 0).long()).backward()
        average_gradients(model)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
