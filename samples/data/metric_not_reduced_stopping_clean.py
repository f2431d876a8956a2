"""A class for early stopping ends training on all ranks by the loss over all shares of the data.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    def __init__(self, patience=5):
        self.patience = patience
        self.best_score = None
        self.counter = 0
        self.early_stop = False

    def __call__(self, val_loss):
        score = -val_loss
        if self.best_score is None or score > self.best_score:
            self.best_score = score
            self.counter = 0
        else:
            self.counter += 1
            if self.counter >= self.patience:
                self.early_stop = True


def share(samples, *, shuffle):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=shuffle)
    return sampler, DataLoader(data, batch_size=8, sampler=sampler)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.mse_loss(model(x), y, reduction="sum").item()
        count += len(x)
    model.train()
    totals = torch.tensor([total, count])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler, train = share(64, shuffle=True)
    _, held_out = share(32, shuffle=False)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    early_stopping = EarlyStopping()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        early_stopping(validate(model, held_out))
        if early_stopping.early_stop:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
