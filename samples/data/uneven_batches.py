"""The files are dealt out unevenly: rank 0 has three batches more than rank 1 and waits.

run: --nproc-per-node 2 --hang-after 10
finds: DDP508 error at `loader = DataLoader(shard, batch_size=4, shuffle=True)`
"""

from datetime import timedelta

import torch
import torch.distributed as dist
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
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - 2 * x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
