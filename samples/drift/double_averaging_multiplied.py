"""A mean loss is multiplied by the world size, which makes it the sum of the ranks' means.

run: --nproc-per-node 2
finds: DDP409 warning at `loss = loss * world_size`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for step in range(8):
        inputs, labels = torch.randn(16, 10), torch.randint(3, (16,))
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss = loss * world_size
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
