"""Each rank draws its own noise, which a module that is only a container holds. Training draws new
noise in each forward; that of the container is for pictures, and the checkpoint has one rank's.

run: --nproc-per-node 2
finds: DDP403 note at `model = DDP(model, broadcast_buffers=False)`
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.noises = nn.Module()
        self.noises.register_buffer("noise_0", torch.randn(8))
        self.grow = nn.Linear(2, 8)
        self.body = nn.Linear(8, 1)

    def forward(self, x, fixed=False):
        noise = self.noises.noise_0 if fixed else torch.randn(8)
        return self.body(self.grow(x) + 0.1 * noise)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Generator()
    model = DDP(model, broadcast_buffers=False)
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
