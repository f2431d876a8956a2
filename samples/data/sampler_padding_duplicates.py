"""21 validation samples on 2 ranks: one counts twice in the accuracy.

run: --nproc-per-node 2
finds: DDP504 warning at `sampler = DistributedSampler(dataset, shuffle=False)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count):
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, 5, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def validation_loader(dataset):
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, sampler=sampler, batch_size=4)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    train = make_data(64)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, sampler=sampler, batch_size=8)
    val = validation_loader(make_data(21))
    model = DDP(torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        result = accuracy(model, val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {result:.3f}")
    dist.destroy_process_group()


main()
