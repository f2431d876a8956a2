"""Each rank gives ReduceLROnPlateau the loss of its own half of the validation data.

run: --nproc-per-node 2
finds: DDP512 warning at `plateau.step(validate(model, held_out))`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def share(samples, *, shuffle):
    data = TensorDataset(torch.randn(samples, 6), torch.randn(samples, 1))
    sampler = DistributedSampler(data, shuffle=shuffle)
    return sampler, DataLoader(data, batch_size=8, sampler=sampler)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [nn.functional.mse_loss(model(x), y) for x, y in loader]
    model.train()
    return torch.stack(losses).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler, train = share(64, shuffle=True)
    _, held_out = share(32, shuffle=False)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=10)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        plateau.step(validate(model, held_out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
