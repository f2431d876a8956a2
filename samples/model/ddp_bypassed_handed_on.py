"""The inner module is passed on to what computes the loss.

run: --nproc-per-node 2
finds: DDP304 error at `loss = losses.of(model.module, torch.randn(32, 16))`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scaled:
    """Calls a model on scaled inputs."""

    def __init__(self, model, scale):
        self.model, self.scale = model, scale

    def __call__(self, x):
        return self.model(self.scale * x)


class Losses:
    def __init__(self, scale):
        self.scale = scale

    def of(self, model, x):
        predicted = Scaled(model, self.scale)(x)
        return (predicted - x.sum(1, keepdim=True)).square().mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    losses = Losses(0.5)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        loss = losses.of(model.module, torch.randn(32, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
