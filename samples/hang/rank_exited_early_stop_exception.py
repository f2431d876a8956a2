"""A callback ends the training of one rank by an exception, which the loop catches.

run: --nproc-per-node 2
finds: DDP604 error at `except StopTraining:`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class StopTraining(Exception):
    pass


class Plateau:
    """Enough is enough: the loss of this rank has not come down for a while."""

    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def after_batch(self, loss):
        self.bad = 0 if loss < self.best - 1e-3 else self.bad + 1
        self.best = min(self.best, loss)
        if self.bad > self.patience:
            raise StopTraining


def fit(model, loader, optimizer, callbacks, epochs):
    try:
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for callback in callbacks:
                    callback.after_batch(loss.item())
    except StopTraining:
        print(f"rank {dist.get_rank()} stops")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(256, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    fit(model, loader, optimizer, [Plateau(patience=4)], epochs=40)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
