"""Every rank draws its own random split, and then its share of that.

run: --nproc-per-node 2
finds: DDP511 error at `train_data, test_data = random_split(whole, [80, 20])`
"""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    whole = TensorDataset(torch.arange(100.0).view(100, 1) / 100, torch.arange(100) % 2)
    seed_everything(1000 + dist.get_rank())
    train_data, test_data = random_split(whole, [80, 20])
    train_sampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, batch_size=8, sampler=train_sampler)
    model = DDP(torch.nn.Linear(1, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
