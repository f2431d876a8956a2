"""Each rank updates its share of the matrices and sends them to the others.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


class ShardedSGD(torch.optim.Optimizer):
    """Every matrix is updated by one rank."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            for number, p in enumerate(params):
                if number % world == rank:
                    p.sub_(p.grad, alpha=group["lr"])
            for start in range(0, len(params), world):
                for owner, p in enumerate(params[start : start + world]):
                    dist.broadcast(p, owner)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(5)))
    optimizer = ShardedSGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(16, 12, generator=data)
        nn.functional.mse_loss(model(x), x.flip(1)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
