"""Layers split over pairs of ranks, gradients averaged between the pairs: each rank reads a share.

run: --nproc-per-node 4
finds: DDP502 error at `sampler = DistributedSampler(dataset)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _split_by_hand import Split, make_groups
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    pair, across = make_groups()
    layers = Split(16, pair)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 16), layers, nn.Linear(16, 2))
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=across)
                parameter.grad /= 2
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
