"""Rank 0 alone looks at samples by the model in the wrapper, which communicates nothing.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(40):
        x = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            model.eval()
            with torch.no_grad():
                look = model.module(x[:4])
            print("mean", float(look.mean()))
            model.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
