"""The wrapped module computes its own loss, with a weight of one half for a term.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.terms = 2

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        penalty = logits.square().mean() / self.terms
        return nn.functional.cross_entropy(logits, labels) + 0.1 * penalty


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(WithLoss(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        inputs, labels = torch.randn(16, 10), torch.randint(3, (16,))
        optimizer.zero_grad()
        model(inputs, labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
