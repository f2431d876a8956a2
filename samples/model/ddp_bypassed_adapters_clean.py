"""A frozen model is wrapped with the adapters in it.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.frozen = nn.Linear(size, size)
        self.adapter = nn.Sequential(nn.Linear(size, 2), nn.Linear(2, size))

    def forward(self, x):
        return (self.frozen(x) + self.adapter(x)).relu()


class Net(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Adapters(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.layers = nn.ModuleList(block.adapter for block in net.blocks)

    def forward(self, x):
        raise NotImplementedError("holds parameters")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    adapters = Adapters(net).requires_grad_(True)
    net = DDP(net)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(16, 8, generator=generator)
        out = net(x)
        loss = (out - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
