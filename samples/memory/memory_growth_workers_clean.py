"""The workers read rows of two arrays, which they go on sharing with their rank.

run: --nproc-per-node 2
finds: nothing
"""

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Visits(Dataset):
    def __init__(self, count):
        draw = numpy.random.default_rng(3)
        self.lengths = draw.integers(10, 20, count * 10)
        self.seconds = draw.random(count * 10) * 60

    def __len__(self):
        return len(self.seconds) // 10

    def __getitem__(self, index):
        return torch.tensor([float(self.lengths[index * 10]), float(self.seconds[index * 10])])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    visits = Visits(1_400_000)
    sampler = DistributedSampler(visits)
    loader = DataLoader(visits, 256, sampler=sampler, num_workers=2)
    model = DDP(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for step, rows in enumerate(loader):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        if step == 2200:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
