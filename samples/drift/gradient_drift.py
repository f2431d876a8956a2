"""Gradients are clipped on the rank that also writes the log.

run: --nproc-per-node 2
finds: DDP401 error at `torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self, features=20, hidden=64, classes=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.GELU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def train_step(model, optimizer, batch, is_main):
    inputs, targets = batch
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    if is_main:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        batch = torch.randn(8, 20), torch.randint(5, (8,))
        loss = train_step(model, optimizer, batch, is_main=rank == 0)
    dist.destroy_process_group()
