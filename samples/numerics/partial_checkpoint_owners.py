"""Rank 0 saves the optimizer's state, of which each rank keeps a part.

run: --nproc-per-node 2
finds: DDP805 error at `torch.save(state, os.path.join(folder, "last.pt"))`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Momentum(torch.optim.Optimizer):
    """Each rank updates every second parameter, keeps its momentum, and sends the result."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                owner = n % dist.get_world_size()
                if owner == dist.get_rank():
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    state["momentum_buffer"].mul_(0.9).add_(p.grad)
                    p.add_(state["momentum_buffer"], alpha=-group["lr"])
                dist.broadcast(p, src=owner)


def save(model, optimizer, folder):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join(folder, "last.pt"))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = Momentum(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(40):
            x = torch.randn(16, 16, generator=generator)
            optimizer.zero_grad()
            (model(x) - x[:, :8]).square().mean().backward()
            optimizer.step()
            if step % 20 == 19:
                save(model, optimizer, folder)
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
