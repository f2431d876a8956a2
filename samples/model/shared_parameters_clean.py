"""Each rank copies the model that `mp.spawn` shares between them.

run: exec -- python {}
finds: nothing
"""

import copy
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, model, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = DDP(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(nn.Linear(16, 4), port), nprocs=2)
