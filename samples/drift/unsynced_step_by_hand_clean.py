"""Gradient accumulation sets DDP's flag by hand.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accumulation = 2
    for i in range(16):
        model.require_backward_grad_sync = (i + 1) % accumulation == 0
        loss = model(torch.randn(8, 16)).pow(2).mean() / accumulation
        loss.backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
