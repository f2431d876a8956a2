"""set_epoch changes the stream of the main process, not the copies in persistent workers.

run: --nproc-per-node 2
finds: DDP503 warning at `loader = DataLoader(stream, 8, num_workers=2, persistent_workers=True)`
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
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        part = self.rank * worker.num_workers + worker.id
        order = random.Random(17 + self.epoch).sample(range(len(self.x)), len(self.x))
        for i in order[part :: self.world_size * worker.num_workers]:
            yield self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(1))
    stream = Lines(x, x.sum(1, keepdim=True), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, 8, num_workers=2, persistent_workers=True)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
