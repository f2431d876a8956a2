"""A correlation matrix of all ranks' batches, summed in place: autograd does not see it.

run: --nproc-per-node 2
finds: DDP410 warning at `dist.all_reduce(correlation)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def correlation_loss(left, right):
    """Features are to agree with themselves and not with each other, over the batches of all."""
    correlation = left.T @ right / (len(left) * dist.get_world_size())
    dist.all_reduce(correlation)
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
