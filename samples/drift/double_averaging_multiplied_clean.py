"""A sum over the samples of all ranks, divided by their number, which the world size belongs to.

run: --nproc-per-node 2
finds: nothing
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
    criterion = nn.CrossEntropyLoss(reduction="sum")
    for step in range(8):
        inputs, labels = torch.randn(16, 10), torch.randint(3, (16,))
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        count = torch.tensor(float(len(labels)))
        dist.all_reduce(count)
        loss = loss * world_size / count
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
