"""static_graph=True, and a curriculum that brings in the second branch later.

run: --nproc-per-node 2
finds: DDP311 error at `model = DDP(Curriculum(), static_graph=True)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Curriculum(nn.Module):
    def __init__(self):
        super().__init__()
        self.easy = nn.Linear(8, 8)
        self.hard = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x, step):
        x = self.easy(x)
        if step >= 4:
            x = x + self.hard(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Curriculum(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 8), step).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
