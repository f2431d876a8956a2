"""An iterable data set that is not split: every rank and every worker reads all of it.

run: --nproc-per-node 2
finds: DDP507 error at `loader = DataLoader(Lines(160), batch_size=8, num_workers=2)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for n in range(self.count):
            yield torch.tensor([n / 100, n % 7, (n * n) % 11], dtype=torch.float32)


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Lines(160), batch_size=8, num_workers=2)
    model = DDP(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
