"""Uneven shards inside Join: the rank that is done answers for the others.

run: --nproc-per-node 2
finds: nothing
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    everything = TensorDataset(torch.arange(60.0).view(60, 1) / 60)
    shard = Subset(everything, range(36) if rank == 0 else range(36, 60))
    loader = DataLoader(shard, batch_size=4, shuffle=True)
    model = DDP(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):  # the second begins at another step on each rank
        with Join([model]):
            for (x,) in loader:
                optimizer.zero_grad()
                (model(x) - 2 * x).square().mean().backward()
                optimizer.step()
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
