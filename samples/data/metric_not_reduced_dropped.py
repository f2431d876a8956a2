"""The confusion matrix is summed over the ranks in a copy, which is dropped.

run: --nproc-per-node 2
finds: DDP512 note at `sum_over_ranks(self.matrix)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sum_over_ranks(value):
    total = value.clone()
    dist.all_reduce(total)
    return total


class Confusion:
    def __init__(self, classes):
        self.matrix = torch.zeros(classes, classes)

    def update(self, target, predicted):
        for row, column in zip(target, predicted, strict=True):
            self.matrix[row, column] += 1

    def reduce(self):
        sum_over_ranks(self.matrix)

    def accuracy(self):
        return (self.matrix.diagonal().sum() / self.matrix.sum()).item()


def loader(count, seed, shuffle):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    data = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=shuffle))


def main(epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train, held_out = loader(64, seed=1, shuffle=True), loader(32, seed=2, shuffle=False)
    for epoch in range(epochs):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        confusion = Confusion(4)
        with torch.no_grad():
            for x, y in held_out:
                confusion.update(y, model.module(x).argmax(1))
        confusion.reduce()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {confusion.accuracy():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
