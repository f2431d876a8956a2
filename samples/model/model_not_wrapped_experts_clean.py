"""Each rank keeps an expert of its own, which samples reach and leave through `all_to_all`; the
parts around it, which every rank has, are wrapped.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Swap(torch.autograd.Function):
    """Sends a part of the samples to each rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx, grad):
        returned = torch.empty_like(grad)
        dist.all_to_all_single(returned, grad.contiguous())
        return returned


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(4, 8)
        self.expert = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.above = nn.Linear(8, 1)

    def forward(self, x):
        return self.above(Swap.apply(self.expert(Swap.apply(self.below(x)))))


def main(updates=10):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Mixture()
    model.below, model.above = DDP(model.below), DDP(model.above)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(updates):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
