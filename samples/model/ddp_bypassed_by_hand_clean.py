"""SGD written by hand, on gradients that DDP has averaged.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)))
    for step in range(12):
        x = torch.randn(16, 12)
        model.zero_grad()
        prediction = model(x)
        (prediction - x[:, :3]).pow(2).mean().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
