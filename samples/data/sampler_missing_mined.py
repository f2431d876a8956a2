"""Hard examples are mined without gradients before each step, and the loader has no sampler.

run: --nproc-per-node 2
finds: DDP501 error at `loader = DataLoader(data, batch_size=8, shuffle=True)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def hardest(model, inputs, targets, keep):
    with torch.no_grad():
        errors = (model(inputs) - targets).square().mean(1)
    return errors.topk(keep).indices


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for inputs, targets in loader:
            chosen = hardest(model, inputs, targets, keep=4)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
