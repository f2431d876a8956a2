"""Modes that differ for good reasons: rank 0 evaluates and comes back, BatchNorm is frozen on all
ranks.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(x), y)
    model.train()
    print(f"loss {loss.item():.3f}", flush=True)


def main(epochs=3, batches=6):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(epochs):
        for _ in range(batches):
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            evaluate(model, torch.randn(64, 16), torch.randint(4, (64,)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
