"""Rank 0 evaluates alone, through a sampler that gives each rank a share.

run: --nproc-per-node 2
finds: DDP512 warning at `sampler = DistributedSampler(held_out, shuffle=False)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def dataset(count, seed):
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


@torch.no_grad()
def accuracy(model, batches):
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in batches)
    model.train()
    return correct / len(batches.sampler)


def main(epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data, held_out = dataset(64, seed=1), dataset(32, seed=2)
    train = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    sampler = DistributedSampler(held_out, shuffle=False)
    validation = DataLoader(held_out, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {accuracy(model.module, validation):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
