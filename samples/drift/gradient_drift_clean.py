"""Gradients are clipped on every rank, after the last micro-batch; rank 0 also logs their norm.

run: --nproc-per-node 2
finds: nothing
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self, features=20, hidden=64, classes=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(hidden, classes)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(10):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(3):
            last = micro == 2
            with contextlib.nullcontext() if last else model.no_sync():
                inputs, targets = torch.randn(8, 20), torch.randint(5, (8,))
                loss = F.cross_entropy(model(inputs), targets) / 3
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if rank == 0:
            norms.append(float(norm))
        optimizer.step()
    dist.destroy_process_group()
