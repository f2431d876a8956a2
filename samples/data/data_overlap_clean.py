"""An iterable data set that splits itself by rank and worker.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, count, rank, world):
        self.count, self.rank, self.world = count, rank, world

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        for n in range(self.rank * workers + worker, self.count, self.world * workers):
            yield torch.tensor([n / 100, n % 7, (n * n) % 11], dtype=torch.float32)


def main():
    dist.init_process_group("gloo")
    lines = Lines(160, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(lines, batch_size=8, num_workers=2)
    model = DDP(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
