"""Gradients are averaged by hand: those of the matrices, one optimizer's, and not the others'.

run: --nproc-per-node 2
finds: DDP402 warning at `adam.step()`
"""

import torch
import torch.distributed as dist
from torch import nn


def average(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(24, 8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False),
        nn.Linear(8, 24),
    )  # fmt: skip
    matrices = [model[1].weight, model[2].weight]
    rest = [*model[0].parameters(), *model[3].parameters()]
    sgd = torch.optim.SGD(matrices, lr=0.05)
    adam = torch.optim.Adam(rest, lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randint(0, 24, (16,), generator=data)
        nn.functional.cross_entropy(model(x), x).backward()
        average(matrices)
        adam.step()
        sgd.step()
        model.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
