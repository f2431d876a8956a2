"""A thread prepares the batches; on rank 1 it fails, and the main thread waits for the next one.

run: --hang-after 3 --on-hang stop --nproc-per-node 2
finds: DDP603 error at `batch = batches.get()`
"""

import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def prepare(batches, rank):
    shapes = [(8, 4)] * 6 + [(8, 4 + rank)] + [(8, 4)] * 6
    weight = torch.ones(4, 4)
    for shape in shapes:
        batches.put(torch.randn(shape) @ weight)


def main():
    dist.init_process_group("gloo")
    batches = queue.Queue(maxsize=2)
    threading.Thread(
        target=prepare, args=(batches, dist.get_rank()), name="prefetch", daemon=True
    ).start()
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        batch = batches.get()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
