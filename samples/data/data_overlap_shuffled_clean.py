"""All ranks shuffle the list of files alike, and each takes its share of it afterwards.

run: --nproc-per-node 2
finds: nothing
"""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

FILES, ROWS = 8, 16


class Files(IterableDataset):
    def __init__(self, seed):
        self.random = random.Random(seed)

    def __iter__(self):
        files = list(range(FILES))
        self.random.shuffle(files)
        for file in files[dist.get_rank() :: dist.get_world_size()]:
            yield from torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(file))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Files(7), batch_size=8)
    for _ in range(4):
        for rows in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
