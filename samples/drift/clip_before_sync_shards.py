"""Sharded gradients, clipped by hand by the norm of each rank's own shards.

run: --nproc-per-node 2
finds: DDP412 warning at `gradient.mul_(factor)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


@torch.no_grad()
def clip(model, limit):
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    factor = (limit / square.sqrt()).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def main(updates=12):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(updates):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
        clip(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
