"""A scheduler that is stepped once per epoch.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR


class PerProcess:
    """Steps for the batches that the other processes take."""

    def __init__(self, scheduler, processes):
        self.scheduler, self.processes = scheduler, processes

    def step(self):
        for _ in range(self.processes):
            self.scheduler.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = PerProcess(StepLR(optimizer, step_size=4), 1)
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(8):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 8, generator=draws)).square().mean()
            loss.backward()
            optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
