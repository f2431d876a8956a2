"""BatchNorm with DDP's default: statistics differ after each forward and are copied at the next.

run: --nproc-per-node 2
finds: nothing
"""

import io

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += torch.randint(1, 9, ())
        x = F.relu(self.norm(self.conv(x)))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def evaluate(model):
    model.eval()
    for _ in range(2):
        model(torch.randn(32, 1, 8, 8))
    model.train()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for _ in range(6):
            x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 4, (16,))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate(model)
        if rank == 0:
            torch.save(model.module.state_dict(), io.BytesIO())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
