"""A run that goes on in the middle of an epoch: the loader counts its passes from 0 again, and sets
the epoch of the sampler back.

run: --nproc-per-node 2
finds: DDP503 warning at `yield from self.loader`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

RESUMED_AT = 20
"""Steps that were taken before the checkpoint: one epoch and four batches."""


class Rest(BatchSampler):
    """The batches after the first ones."""

    def __init__(self, batches, skipped):
        self.batches, self.skipped = batches, skipped

    def __len__(self):
        return len(self.batches) - self.skipped

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number >= self.skipped:
                yield batch


class Epochs:
    """Iterates a loader, each time in another order."""

    def __init__(self, dataset, sampler, batches, passed=0):
        self.sampler, self.batches, self.passed = sampler, batches, passed
        self.loader = DataLoader(dataset, batch_sampler=batches)

    def __iter__(self):
        self.sampler.set_epoch(self.passed)
        yield from self.loader
        self.passed += 1


def main():
    dist.init_process_group("gloo")
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    batches = BatchSampler(sampler, 8, drop_last=True)
    epochs = Epochs(dataset, sampler, batches)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, skipped = divmod(RESUMED_AT, len(batches))
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        rest = Epochs(dataset, sampler, Rest(batches, skipped)) if skipped else epochs
        skipped = 0
        for inputs, targets in rest:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
