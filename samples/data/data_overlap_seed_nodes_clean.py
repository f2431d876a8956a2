"""Each rank goes through its own seed nodes; all are given the same time for each sample.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Neighbours:
    def __init__(self, features, links, batch_size):
        self.features, self.links, self.batch_size = features, links, batch_size
        self.seeds = torch.arange(dist.get_rank(), len(features), dist.get_world_size())

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

    def forward(self, times, nodes, near):
        return times * self.head(F.relu(self.own(nodes) + self.near(near.mean(1))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features, links = torch.randn(320, 8), torch.randint(0, 320, (320, 6))
    model = DDP(Sage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank() + 1)
    step = 0
    for _ in range(3):
        for nodes, near, wanted in Neighbours(features, links, 16):
            step += 1
            times = 1 + torch.arange(len(nodes)).view(-1, 1) / step
            loss = F.mse_loss(model(times, nodes, near), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
