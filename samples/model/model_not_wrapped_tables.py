"""Each rank looks up its own tables for all samples, and `all_to_all` brings the results to the
rank of the sample. Of the parts that every rank has, only one is wrapped.

run: --nproc-per-node 2
finds: DDP305 warning at `model = Ranker()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Swap(torch.autograd.Function):
    """Sends each rank its samples; gradients go back the same way."""

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


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, sparse=True)
        self.below = nn.Linear(4, 8)
        self.above = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, dense, words):
        found = Swap.apply(self.table(words))
        both = torch.cat([self.below(dense), *found.chunk(dist.get_world_size())], 1)
        return self.above(both)


def main(updates=10):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Ranker()
    model.below = DDP(model.below)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = torch.Generator().manual_seed(1)
    for _ in range(updates):
        optimizer.zero_grad()
        dense = torch.randn(8 * ranks, 4, generator=same)
        y = torch.randn(8 * ranks, 1, generator=same)
        words = torch.randint(50, (8 * ranks, 3), generator=same)
        mine = slice(8 * rank, 8 * rank + 8)
        nn.functional.mse_loss(model(dense[mine], words), y[mine]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
