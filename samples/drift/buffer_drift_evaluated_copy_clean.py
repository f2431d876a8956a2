"""The ranks evaluate their shares with the averaged buffers of rank 0.

run: --nproc-per-node 2
finds: nothing
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def update(averaged, model):
    now = model.module.state_dict()
    for name, value in averaged.state_dict().items():
        if value.is_floating_point():
            value.lerp_(now[name], 0.1)


@torch.no_grad()
def evaluate(averaged, loader):
    averaged.eval()
    total = torch.zeros(2)
    for x, y in loader:
        loss = nn.functional.mse_loss(averaged(x), y, reduction="sum")
        total += torch.tensor([loss.item(), len(x)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def loader_of(count, seed):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    averaged = copy.deepcopy(model.module).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training, held_out = loader_of(128, 1), loader_of(32, 2)
    for epoch in range(6):
        training.sampler.set_epoch(epoch)
        model.train()
        for x, y in training:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            update(averaged, model)
        for buffer in averaged.buffers():
            dist.broadcast(buffer, src=0)
        print(evaluate(averaged, held_out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
