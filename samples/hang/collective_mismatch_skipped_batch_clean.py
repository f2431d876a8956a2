"""A batch whose loss is not finite on one rank is skipped on all of them.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def targets(samples):
    values = torch.linspace(0.1, 1.0, samples)
    values[5] = 0.0
    return values.log().unsqueeze(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6), targets(48))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for inputs, labels in loader:
            loss = nn.functional.l1_loss(model(inputs), labels)
            good = torch.isfinite(loss).int()
            dist.all_reduce(good, op=dist.ReduceOp.MIN)
            if not good:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
