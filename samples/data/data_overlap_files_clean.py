"""All ranks shuffle the list of files equally, and each takes every second one of that.

run: --nproc-per-node 2
finds: nothing
"""

import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

FOLDER = os.path.join(tempfile.gettempdir(), f"shards-of-{os.environ['MASTER_PORT']}")


class Shards(IterableDataset):
    def __init__(self, files, seed):
        files = sorted(files)
        random.Random(seed).shuffle(files)
        self.files = files[dist.get_rank() :: dist.get_world_size()]
        self.rng = random.Random(seed + dist.get_rank())

    def __iter__(self):
        self.rng.shuffle(self.files)
        for file in self.files:
            rows = torch.load(file)
            yield from rows[torch.randperm(len(rows))]


def write(count):
    os.makedirs(FOLDER, exist_ok=True)
    for number in range(count):
        torch.manual_seed(number)
        torch.save(torch.randn(40, 8), os.path.join(FOLDER, f"{number}.pt"))


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write(16)
    dist.barrier()
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    stream = Shards([os.path.join(FOLDER, name) for name in os.listdir(FOLDER)], seed=3)
    loader = DataLoader(stream, batch_size=16)
    for _ in range(2):
        for rows in loader:
            loss = (model(rows) - rows).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
