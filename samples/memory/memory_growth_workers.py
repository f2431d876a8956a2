"""The workers read rows that are Python objects, and so copy the memory they share.

run: --nproc-per-node 2
finds: DDP206 warning at `loader = DataLoader(visits, 256, sampler=sampler, num_workers=2)`
"""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Visits(Dataset):
    def __init__(self, count):
        draw = random.Random(3)
        self.visits = [
            {"page": f"/shop/page/{draw.randrange(10**9)}", "seconds": draw.random() * 60}
            for _ in range(count)
        ]

    def __len__(self):
        return len(self.visits)

    def __getitem__(self, index):
        visit = self.visits[index]
        return torch.tensor([len(visit["page"]), visit["seconds"]])


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
