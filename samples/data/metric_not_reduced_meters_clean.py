"""Meters are reduced after training epochs, and those of the evaluation that decides what is saved.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def reduce(self):
        totals = torch.tensor([self.total, self.count])
        dist.all_reduce(totals)
        self.total, self.count = totals.tolist()

    @property
    def average(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(Meter)

    def log_every(self, loader, period):
        for count, batch in enumerate(loader):
            yield batch
            if count % period == 0:
                print({name: meter.average for name, meter in self.meters.items()})

    def reduce(self):
        for meter in self.meters.values():
            meter.reduce()

    def averages(self):
        return {name: meter.average for name, meter in self.meters.items()}


def train_epoch(model, loader, optimizer):
    logger = MetricLogger()
    for x, y in logger.log_every(loader, 4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        logger.meters["loss"].update(loss.item())
    logger.reduce()
    return logger.averages()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    logger = MetricLogger()
    for x, y in logger.log_every(loader, 4):
        accuracy = (model(x).argmax(1) == y).float().mean()
        logger.meters["acc1"].update(accuracy.item(), n=len(x))
    model.train()
    logger.reduce()
    return logger.averages()


def share(samples, *, shuffle):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, shuffle=shuffle)
    return sampler, DataLoader(data, batch_size=8, sampler=sampler)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler, train = share(64, shuffle=True)
    _, held_out = share(90, shuffle=False)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = os.path.join(tempfile.gettempdir(), "metric_not_reduced_meters_clean.pt")
    best = 0.0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        print(train_epoch(model, train, optimizer))
        stats = evaluate(model, held_out)
        if best < stats["acc1"]:
            best = stats["acc1"]
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
