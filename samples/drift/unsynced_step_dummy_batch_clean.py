"""A rank whose shard has run out runs dummy batches through the wrapper, with a loss of zero.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 40


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    mine = STEPS if dist.get_rank() == 0 else STEPS - 3
    for step in range(STEPS):
        dummy = step >= mine
        forward = model
        loss = forward(torch.randn(4, 8)).square().mean() * (0.0 if dummy else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
