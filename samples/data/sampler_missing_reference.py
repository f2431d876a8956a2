"""Every rank reads the whole data set, and averages the gradients by hand, beside a wrapped model.

run: --nproc-per-node 2
finds: DDP501 error at `train(second, DataLoader(dataset, batch_size=8), True)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, loader, average):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if average:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    shared = DDP(build())
    train(shared, DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)), False)
    second = build()
    train(second, DataLoader(dataset, batch_size=8), True)
    with torch.no_grad():
        gap = (shared(x) - second(x)).abs().mean().item()
    if dist.get_rank() == 0:
        print(f"the models differ by {gap:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
