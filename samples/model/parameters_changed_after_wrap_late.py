"""The head is replaced after two hundred steps, when the labels get finer.

run: --nproc-per-node 2
finds: DDP306 error at `self.head = nn.Linear(16, labels)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

COARSE, FINE = 4, 10
STEPS, FINER_FROM = 220, 200


class Classifier(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.label(labels)

    def label(self, labels):
        self.head = nn.Linear(16, labels)

    def forward(self, x):
        return self.head(self.body(x).relu())


def train(model, optimizer, labels, steps):
    for _ in range(steps):
        x, y = torch.randn(32, 8), torch.randint(labels, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Classifier(COARSE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, COARSE, FINER_FROM)
    model.module.label(FINE)
    optimizer.add_param_group({"params": model.module.head.parameters()})
    train(model, optimizer, FINE, STEPS - FINER_FROM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
