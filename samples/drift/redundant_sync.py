"""Gradient accumulation without no_sync: every micro-batch waits for the network.

run: --nproc-per-node 2
finds: DDP408 warning at `loss.backward()`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(accumulate=4, updates=6):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(accumulate * updates):
        x, y = torch.randn(16, 256), torch.randint(8, (16,))
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
