"""The same with the collective whose backward sums over the ranks as well.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


def correlation_loss(left, right):
    """Features are to agree with themselves and not with each other, over the batches of all."""
    correlation = left.T @ right / (len(left) * dist.get_world_size())
    correlation = all_reduce(correlation)
    return (correlation - torch.eye(len(correlation))).square().sum()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        batch = torch.randn(8, 16, generator=generator)
        both = torch.cat([batch, batch + 0.1 * torch.randn(8, 16, generator=generator)])
        loss = correlation_loss(*model(both).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
