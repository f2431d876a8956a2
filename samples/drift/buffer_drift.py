"""BatchNorm statistics are not copied between ranks, and every rank evaluates with its own.

run: --nproc-per-node 2
finds: DDP403 warning at `model = DDP(ConvNet(), broadcast_buffers=False)`
"""

import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore", FutureWarning)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def evaluate(model):
    model.eval()
    x, y = torch.randn(32, 1, 8, 8), torch.randint(0, 4, (32,))
    correct = (model(x).argmax(1) == y).float().mean()
    model.train()
    dist.all_reduce(correct)
    return correct.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(ConvNet(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for _ in range(6):
            x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 4, (16,))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
