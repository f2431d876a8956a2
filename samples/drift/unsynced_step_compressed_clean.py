"""The optimizer itself averages what it applies, the signs of gradients that are each rank's own.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SignSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                left = self.state[p].setdefault("left", torch.zeros_like(p))
                left += p.grad
                sent = left.sign() * left.abs().mean()
                left -= sent
                dist.all_reduce(sent)
                p -= group["lr"] * sent / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = SignSGD(model.parameters(), {"lr": 0.05})
    for _ in range(16):
        with model.no_sync():
            model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
