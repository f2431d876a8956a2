"""Nothing clears the gradients, of which some are exactly zero at the first step.

run: --nproc-per-node 2
finds: DDP411 warning at `optimizer.step()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    """Its last layer is zero at first, so the first gradient of the one before is exactly zero."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 8)
        self.outside = nn.Linear(8, 2)
        nn.init.zeros_(self.outside.weight)

    def forward(self, x):
        return self.outside(torch.tanh(self.inside(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        loss = (model(torch.randn(8, 4)) - torch.randn(8, 2)).square().mean()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
