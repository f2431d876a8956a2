"""The workers are kept from one epoch to the next, and open the index of the data set once.

run: --nproc-per-node 2
finds: nothing
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def open_index(worker):
    time.sleep(0.7)  # stands for a large index file


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(256, 64))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=16,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=open_index,
        persistent_workers=True,
    )
    model = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
