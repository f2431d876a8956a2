"""Every trainable parameter is used; the ones that are not were frozen before the wrap.

run: --nproc-per-node 2
finds: nothing
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)
        self.spare = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = Net()
    net.spare.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    accumulate = 2
    for i in range(8):
        last = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
