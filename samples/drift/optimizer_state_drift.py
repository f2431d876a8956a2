"""Resuming: every rank loads the weights, but only rank 0 loads the optimizer.

run: --nproc-per-node 2
finds: DDP404 error at `optimizer.load_state_dict(checkpoint["optimizer"])`
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    return net, torch.optim.Adam(net.parameters(), lr=1e-2)


def earlier_run():
    """What a first training left behind; the same on every rank."""
    net, optimizer = make()
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(32, 10)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


class Trainer:
    def __init__(self, rank):
        self.rank = rank
        self.net, self.optimizer = make()
        self.ddp = DDP(self.net)

    def resume(self, file):
        optimizer = self.optimizer
        checkpoint = torch.load(file)
        self.ddp.module.load_state_dict(checkpoint["model"])
        if self.rank == 0:
            optimizer.load_state_dict(checkpoint["optimizer"])

    def fit(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(16, 10)
            (self.ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()


if __name__ == "__main__":
    checkpoint = earlier_run()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer(dist.get_rank())
    trainer.resume(checkpoint)
    trainer.fit(8)
    dist.destroy_process_group()
