"""Fine-tuning: the head for the new task is put in before the model is wrapped.

run: --nproc-per-node 2
finds: nothing
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.block = nn.Linear(32, 32)
        self.head = nn.Linear(32, 100)

    def forward(self, x):
        return self.head(torch.relu(self.block(torch.relu(self.stem(x)))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = Backbone()
    net.head = nn.Linear(32, args.classes)
    model = DDP(net)
    model.to("cpu").float()  # already there: changes nothing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        x, y = torch.randn(8, 16), torch.randint(0, args.classes, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
