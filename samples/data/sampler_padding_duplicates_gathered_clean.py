"""The same with 20 samples, which divide by the ranks: each prediction is scored once.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 20


class Score:
    def __init__(self):
        self.hits = []

    def update(self, hits):
        self.hits.append(hits)

    def value(self):
        return torch.cat(self.hits).float().mean().item()


def make_data(count):
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, 5, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def everywhere(result):
    parts = [torch.empty_like(result) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, result)
    return torch.cat(parts)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    score = Score()
    for x, y in loader:
        score.update(everywhere(model(x).argmax(1)) == everywhere(y))
    return score.value()


def main():
    dist.init_process_group("gloo")
    train = make_data(64)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, sampler=sampler, batch_size=8)
    held_out = make_data(SAMPLES)
    shares = DistributedSampler(held_out, shuffle=False)
    val = DataLoader(held_out, sampler=shares, batch_size=4)
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
