"""static_graph=True over a graph that is static, with a layer used twice and checkpointing.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Curriculum(nn.Module):
    def __init__(self):
        super().__init__()
        self.easy = nn.Linear(8, 8)
        self.hard = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x, step):
        x = self.easy(x)
        for _ in range(2):
            x = x + checkpoint(self.hard, x, use_reentrant=True)
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
