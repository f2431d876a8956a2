"""Hard examples are mined without gradients before each step; each rank has its own part.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def hardest(model, inputs, targets, keep):
    with torch.no_grad():
        errors = (model(inputs) - targets).square().mean(1)
    return errors.topk(keep).indices


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            chosen = hardest(model, inputs, targets, keep=4)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
