"""The training sampler shuffles.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    train_set = TensorDataset(torch.arange(64.0).view(64, 1) / 64, torch.arange(64) // 32)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler, drop_last=True)
    net = DDP(torch.nn.Linear(1, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        net.train()
        for inputs, targets in train_loader:
            loss = torch.nn.functional.cross_entropy(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
