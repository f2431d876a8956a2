"""The forward of the wrapper is a whole training step: its first backward runs before DDP is ready.

run: --nproc-per-node 2
finds: DDP407 error at `loss.backward()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def forward(self, x):
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Trainer())
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):
        model(torch.randn(4, 8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
