"""A module that is only a container holds frequencies, which are drawn alike on all ranks.

run: --nproc-per-node 2
finds: nothing
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.bands = nn.Module()
        self.bands.register_buffer("frequencies", torch.randn(2, 8))
        self.body = nn.Linear(16, 1)

    def forward(self, x):
        phases = x @ self.bands.frequencies
        return self.body(torch.cat([phases.sin(), phases.cos()], 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Field(), broadcast_buffers=False)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        x = torch.randn(16, 2)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), tempfile.mktemp())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
