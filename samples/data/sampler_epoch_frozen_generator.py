"""The stream shuffles by a generator that it keeps, of which new workers get the same copy.

run: --nproc-per-node 2
finds: DDP503 warning at `loader = DataLoader(stream, 8, num_workers=2)`
"""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, x, y, rank, world_size):
        self.x, self.y = x, y
        self.rank, self.world_size = rank, world_size
        self.rng = random.Random(17)

    def __iter__(self):
        worker = get_worker_info()
        part = self.rank * worker.num_workers + worker.id
        order = self.rng.sample(range(len(self.x)), len(self.x))
        for i in order[part :: self.world_size * worker.num_workers]:
            yield self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(1))
    stream = Lines(x, x.sum(1, keepdim=True), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, 8, num_workers=2)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
