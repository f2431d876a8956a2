"""Decoding takes longer than the step, and runs in the training process.

run: --nproc-per-node 2
finds: DDP702 warning at `loader = DataLoader(dataset, batch_size=4, sampler=sampler)`
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    decode_s = 0.012

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.decode_s)
        return torch.full((3, 8, 8), index / self.count), index % 2


def main():
    dist.init_process_group("gloo")
    dataset = Images(128)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
