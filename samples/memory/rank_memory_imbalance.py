"""Rank 0 keeps the whole data set in memory, the others read what they need.

run: --nproc-per-node 2
finds: DDP205 warning
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def rows(count, seed):
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    cache = rows(500_000, 0) if rank == 0 else None  # half a gigabyte, "for validation"
    model = DDP(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(200):
        x = rows(64, 1000 + 2 * step + rank)
        loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if cache is not None:
        print(f"validated on {len(cache)} rows")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
