"""Layers split over pairs of ranks, gradients averaged between the pairs: each rank reads a share.

run: --nproc-per-node 4
finds: DDP502 error at `sampler = DistributedSampler(dataset)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pairs[rank // 2], across[rank % 2]


class Copy(torch.autograd.Function):
    """Into the split layer: the same on all ranks, whose gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Out of the split layer: the sum of what the ranks computed."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Split(nn.Module):
    def __init__(self, width, group):
        super().__init__()
        self.group = group
        torch.manual_seed(100 + dist.get_rank(group))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.up(Copy.apply(x, self.group)))
        return x + Reduce.apply(self.down(hidden), self.group)


def main():
    dist.init_process_group("gloo")
    pair, across = make_groups()
    layers = Split(16, pair)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 16), layers, nn.Linear(16, 2))
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=across)
                parameter.grad /= 2
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
