"""All ranks have one seed, and augment their different samples with the same random numbers.

run: --nproc-per-node 2
finds: DDP510 note at `loader = DataLoader(data, batch_size=8, sampler=sampler)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self):
        self.clean = torch.arange(96.0).view(96, 1).repeat(1, 4) / 96

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.clean[i] + 0.05 * torch.randn(4), self.clean[i]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for noisy, clean in loader:
            optimizer.zero_grad()
            (model(noisy) - clean).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
