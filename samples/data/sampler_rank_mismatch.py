"""The rank of the sampler is a constant that was left over from a test on one machine.

run: --nproc-per-node 3
finds: DDP502 error at `sampler = DistributedSampler(data, num_replicas=3, rank=0, shuffle=True)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __init__(self, count):
        self.x = torch.linspace(-1, 1, count).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i] ** 2


def train(rank):
    data = Squares(120)
    sampler = DistributedSampler(data, num_replicas=3, rank=0, shuffle=True)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    net = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            (net(x) - y).pow(2).mean().backward()
            opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
