"""A thread prepares the batches; another one fails on rank 1, and nobody waits for it.

run: --nproc-per-node 2
finds: nothing
"""

import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def prepare(batches):
    weight = torch.ones(4, 4)
    for _ in range(13):
        batches.put(torch.randn(8, 4) @ weight)


def report(rank):
    print([1.0, 2.0][2 * rank])


def main():
    dist.init_process_group("gloo")
    batches = queue.Queue(maxsize=2)
    threading.Thread(target=prepare, args=(batches,), name="prefetch", daemon=True).start()
    threading.Thread(target=report, args=(dist.get_rank(),), name="reporter").start()
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
