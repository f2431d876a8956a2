"""Every rank goes through all seed nodes in the same order; only the neighbours are random.

run: --nproc-per-node 2
finds: DDP507 warning at `loss = F.mse_loss(model(nodes, near), wanted)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Neighbours:
    def __init__(self, features, links, batch_size):
        self.features, self.links, self.batch_size = features, links, batch_size
        self.seeds = torch.arange(len(features))

    def __iter__(self):
        for seeds in self.seeds.split(self.batch_size):
            chosen = torch.randint(0, self.links.shape[1], (len(seeds), 3))
            near = self.features[self.links[seeds].gather(1, chosen)]
            yield self.features[seeds], near, self.features[seeds].sum(1, keepdim=True)


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, nodes, near):
        return self.head(F.relu(self.own(nodes) + self.near(near.mean(1))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features, links = torch.randn(320, 8), torch.randint(0, 320, (320, 6))
    model = DDP(Sage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(3):
        for nodes, near, wanted in Neighbours(features, links, 32):
            loss = F.mse_loss(model(nodes, near), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
